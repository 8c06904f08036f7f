/* What is put on a stream: written into the trace, checked, and done if it is a copy or a fill. */
#include "pretended.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LARGE = 64 << 20 }; /* bytes that are not worth memory of the host */
__thread int pretended_has_context;

static int dangling(const Op *op, const void *address, int exec) {
    pretended_note("dangling", "'name':'%s','p':%lu,'exec':%d", op->name, (uintptr_t)address, exec);
    return cudaErrorIllegalAddress;
}

/* Note addresses of memory that is not there, or not any more. */
static void check_addresses(const Op *op, int exec) {
    const unsigned char *at = op->args;
    for (int i = 0; i < op->count; at += op->parameters[i++].size)
        for (int offset = 0; offset + 8 <= op->parameters[i].size && !op->parameters[i].is_guess; offset += 8) {
            void *word;
            memcpy(&word, at + offset, 8);
            if (!is_mapped(word, 1))
                dangling(op, word, exec);
        }
}

/* Return about how many seconds an op takes. */
static double duration(const Op *op) {
    if (op->kind == KERNEL && op->count == 1 && strstr(op->name, "spin_kernel")) /* torch.cuda._sleep(cycles) */
        return *(long long *)op->args / 1.98e9;
    return op->kind == COPY || op->kind == FILL ? 1e-6 + op->width * op->height / 2e12 : 3e-6;
}

/* Write an element `count` times, by copies of ever longer pieces. */
static void repeat(char *dst, const void *element, size_t size, size_t count) {
    memcpy(dst, element, count ? size : 0);
    for (size_t done = size, all = size * count, piece; done < all; done += piece) {
        piece = done < all - done ? done : all - done;
        memcpy(dst + done, dst, piece);
    }
}

/* Do PyTorch's fill_ and add_(number) of contiguous tensors: (int count, functor, std::array<char *, 1 or 2>). */
static void compute(const Op *op) {
    const Parameter *p = op->parameters;
    if (op->count != 3 || p[1].is_guess || p[2].size > 16)
        return;
    size_t count = *(int *)op->args, size = p[1].size;
    char *places[2] = {NULL, NULL};
    memcpy(places, op->args + 4 + size, p[2].size);
    if (!is_device(places[0]) || count * size > LARGE || !is_mapped(places[0], count * size))
        return;
    const float *terms = (const float *)(op->args + 4), *from = (const float *)places[1];
    if (strstr(op->name, "FillFunctor"))
        repeat(places[0], op->args + 4, size, count);
    else if (strstr(op->name, "CUDAFunctorOnSelf_add<float>") && is_mapped(from, count * 4))
        for (size_t i = 0; i < count; i++)
            ((float *)places[0])[i] = from[i] + terms[0] * terms[1];
}

int run(const Op *op, Stream *stream, int exec) {
    trace_op(op, stream, 0, exec, cudaSuccess);
    stream->busy = later(now(), stream->busy) + duration(op);
    check_addresses(op, exec);
    if (op->kind == HOST)
        op->call(op->data);
    if (op->kind == KERNEL)
        compute(op);
    if (op->width * op->height > LARGE && is_device(op->dst)) {
        pretended_note("left_out", "'n':%zu", op->width * op->height);
        return cudaSuccess;
    }
    for (size_t row = 0; row < op->height; row++) { /* of a copy or fill */
        char *dst = (char *)op->dst + row * op->dst_pitch;
        const char *src = (const char *)op->src + row * op->src_pitch;
        if (!is_mapped(dst, op->width) || !is_mapped(src, op->width))
            return dangling(op, is_mapped(dst, op->width) ? src : dst, exec);
        if (op->kind == COPY)
            memmove(dst, src, op->width);
        else
            memset(dst, op->value, op->width);
    }
    return cudaSuccess;
}

static int put(Stream *stream, const Op *op) {
    Capture *capture = stream->capture;
    if (is_dead(stream))
        return cudaErrorInvalidResourceHandle;
    if (capture == NULL) {
        int error = stream == &legacy ? legacy_may_work("work on the legacy stream") : cudaSuccess;
        return error ? error : run(op, stream, 0);
    }
    if (capture->is_invalid)
        return cudaErrorStreamCaptureInvalidated;
    trace_op(op, stream, capture->id, 0, cudaSuccess);
    Graph *graph = capture->graph;
    graph->ops = realloc(graph->ops, (graph->count + 1) * sizeof(Op));
    graph->ops[graph->count] = *op;
    unsigned char *args = malloc(op->args_size + 1);
    graph->ops[graph->count++].args = memcpy(args, op->args ? op->args : args, op->args_size);
    stream->clock.ops[stream->branch]++;
    return cudaSuccess;
}

int pretended_put(Stream *stream, const Op *op) {
    LOCKED;
    pretended_has_context = 1;
    stream = resolve(stream);
    int error = put(stream, op);
    if (error)
        trace_op(op, stream, stream->capture ? stream->capture->id : 0, 0, error);
    return error;
}

int pretended_launch(Stream *stream, const Function *f, dim3 grid, dim3 block, unsigned shared, void **args) {
    if (!grid.x || !grid.y || !grid.z || !block.x || !block.y || !block.z || grid.x > 0x7fffffff || grid.y > 65535 ||
        grid.z > 65535 || (uint64_t)block.x * block.y * block.z > 1024) {
        pretended_note("misuse", "'what':'grid or block of %s: %u %u %u, %u %u %u'", f->name, grid.x, grid.y, grid.z,
                       block.x, block.y, block.z);
        return cudaErrorInvalidConfiguration;
    }
    if ((int)shared > f->shared_limit) {
        pretended_note("misuse", "'what':'%u bytes of shared memory for %s, of %d'", shared, f->name, f->shared_limit);
        return cudaErrorInvalidValue;
    }
    unsigned char packed[1 << 16];
    Op op = {.kind = KERNEL, .name = f->name, .parameters = f->parameters, .count = f->count, .args = packed,
             .grid = grid, .block = block, .shared = shared};
    for (int i = 0; i < f->count; op.args_size += f->parameters[i++].size)
        memcpy(packed + op.args_size, args[i], f->parameters[i].size);
    return pretended_put(stream, &op);
}

int pretended_library(Stream *stream, const char *name, int count, void *const *pointers, const char *format, ...) {
    static const Parameter POINTERS[] = {{8}, {8}, {8}, {8}, {8}, {8}};
    Op op = {.kind = LIBRARY, .name = name, .parameters = POINTERS, .count = count, .args = (unsigned char *)pointers,
             .args_size = 8 * count};
    if (is_traced() || resolve(stream)->capture != NULL) { /* the text takes longer than the call */
        va_list rest;
        va_start(rest, format);
        vsnprintf(op.text, sizeof(op.text), format, rest);
        va_end(rest);
    }
    return pretended_put(stream, &op);
}

int pretended_limit_shared(Function *function, int bytes) {
    if (bytes > MAX_SHARED)
        return cudaErrorInvalidValue;
    function->shared_limit = bytes;
    return cudaSuccess;
}

API(cudaMemcpy2DAsync, void *dst, size_t dst_pitch, const void *src, size_t src_pitch, size_t width, size_t height,
    enum cudaMemcpyKind kind, cudaStream_t stream) {
    Op op = {.kind = COPY, .name = "copy", .dst = dst, .src = src, .width = width, .height = height,
             .dst_pitch = dst_pitch, .src_pitch = src_pitch};
    return set(pretended_put(stream, &op));
}
API(cudaMemcpyAsync, void *dst, const void *src, size_t count, enum cudaMemcpyKind kind, cudaStream_t stream) {
    return cudaMemcpy2DAsync(dst, count, src, count, count, 1, kind, stream);
}
API(cudaMemcpy, void *dst, const void *src, size_t count, enum cudaMemcpyKind kind) {
    int error = pretended_forbidden("a copy that the host waits for");
    error = error ? error : cudaMemcpyAsync(dst, src, count, kind, NULL);
    wait_until(error ? 0 : legacy.busy);
    return set(error);
}
API(cudaMemsetAsync, void *dst, int value, size_t count, cudaStream_t stream) {
    Op op = {.kind = FILL, .name = "fill", .dst = dst, .width = count, .height = 1, .value = value};
    return set(pretended_put(stream, &op));
}
API(cudaMemset, void *dst, int value, size_t count) { return cudaMemsetAsync(dst, value, count, NULL); }
API(cudaLaunchHostFunc, cudaStream_t stream, cudaHostFn_t call, void *data) {
    Op op = {.kind = HOST, .name = "host", .call = call, .data = data};
    return set(pretended_put(stream, &op));
}
