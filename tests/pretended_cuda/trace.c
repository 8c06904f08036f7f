/* The trace: one JSON object a line, in the file that PRETENDED_TRACE or pretended_trace() names. */
#define _GNU_SOURCE
#include "pretended.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static pthread_mutex_t mutex = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;
static FILE *trace;
struct Live live;

int lock(void) { return pthread_mutex_lock(&mutex); }
void unlock(int *unused) { pthread_mutex_unlock(&mutex); }

/* For ctypes: write to a file from now on; NULL ends it. */
void pretended_trace(const char *path) {
    LOCKED;
    if (trace != NULL)
        fclose(trace);
    trace = path != NULL && *path ? fopen(path, "w") : NULL;
}

__attribute__((constructor)) static void start(void) { pretended_trace(getenv("PRETENDED_TRACE")); }

/* For ctypes: what there is now. */
void pretended_counts(struct Live *counts) {
    LOCKED;
    *counts = live;
}

/* fprintf to the trace, where ' in the format stands for " */
static void vprint(const char *format, va_list rest) {
    char quoted[400], *at = quoted;
    do
        *at++ = *format == '\'' ? '"' : *format;
    while (*format++);
    vfprintf(trace, quoted, rest);
}

__attribute__((format(printf, 1, 2))) static void print(const char *format, ...) {
    va_list rest;
    va_start(rest, format);
    vprint(format, rest);
    va_end(rest);
}

int is_traced(void) { return trace != NULL; }

void pretended_note(const char *event, const char *format, ...) {
    if (trace == NULL) /* at once: most calls are not traced, and may be timed */
        return;
    LOCKED;
    print("{'e':'%s','t':%d,", event, gettid());
    va_list rest;
    va_start(rest, format);
    vprint(format, rest);
    va_end(rest);
    print("}\n");
}

/* Numbers as they are. Of structs the addresses: what is read beyond a guessed size may be no part of it. */
static void print_argument(const unsigned char *at, Parameter parameter) {
    long long number = 0;
    if (parameter.size <= 8 && !parameter.is_guess) {
        memcpy(&number, at, parameter.size);
        print("%lld", parameter.size == 4 ? (int)number : number);
        return;
    }
    print(parameter.is_guess ? "{'guess':[" : "[");
    for (int found = 0, offset = 0; offset + 8 <= parameter.size; offset += 8) {
        memcpy(&number, at + offset, 8);
        if (is_device((void *)number))
            print("%s%lld", found++ ? "," : "", number);
    }
    print(parameter.is_guess ? "]}" : "]");
}

void trace_op(const Op *op, const Stream *stream, int capture, int exec, int error) {
    static const char *KINDS[] = {"kernel", "copy", "fill", "host", "library"};
    if (trace == NULL)
        return;
    print("{'e':'%s','t':%d,'s':%d,'capture':%d,'exec':%d,'error':%d", KINDS[op->kind], gettid(), stream->number,
          capture, exec, error);
    if (op->kind == KERNEL)
        print(",'grid':[%u,%u,%u],'block':[%u,%u,%u],'shared':%u", op->grid.x, op->grid.y, op->grid.z, op->block.x,
              op->block.y, op->block.z, op->shared);
    if (op->kind == KERNEL || op->kind == LIBRARY) {
        print(",'name':'%s','text':'%s','args':[", op->name, op->text);
        const unsigned char *at = op->args;
        for (int i = 0; i < op->count; at += op->parameters[i++].size) {
            print(i ? "," : "");
            print_argument(at, op->parameters[i]);
        }
        print("]");
    } else {
        print(",'dst':%lu,'src':%lu,'n':%zu,'value':%d", (uintptr_t)op->dst, (uintptr_t)op->src, op->width * op->height,
              op->value);
    }
    print("}\n");
}
