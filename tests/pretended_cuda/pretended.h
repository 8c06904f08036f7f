/* The pretended device: memory, streams, captures, graphs, and a trace of all that is put on a stream. Ops run at once,
   in the order of the calls; kernels do nothing. The functions of CUDA's runtime are written on these types. The
   libraries of the driver, cuBLAS and NCCL call the functions named pretended_*. */
#ifndef PRETENDED_H
#define PRETENDED_H
#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdint.h>

#define API(name, ...) cudaError_t name(__VA_ARGS__)
#define LOCKED __attribute__((cleanup(unlock), unused)) int is_locked = lock() /* until the block ends */

enum { MAX_SHARED = 232448, DEFAULT_SHARED = 49152, MAX_BRANCHES = 64 };

typedef struct Parameter {
    int size, is_guess; /* size in bytes */
} Parameter;

typedef struct CUfunc_st {
    const char *name;
    Parameter *parameters;
    int count, shared_limit; /* count -1: parameters are not read yet */
} Function;

/* What is put on a stream. */
typedef struct Op {
    enum { KERNEL, COPY, FILL, HOST, LIBRARY } kind;
    const char *name;
    const Parameter *parameters; /* KERNEL, LIBRARY */
    int count;
    unsigned char *args; /* one after the other */
    size_t args_size;
    dim3 grid, block; /* KERNEL */
    unsigned shared;
    char text[160]; /* LIBRARY: sizes and options */
    void *dst;      /* COPY, FILL */
    const void *src;
    size_t width, height, dst_pitch, src_pitch; /* bytes and rows */
    int value;
    void (*call)(void *); /* HOST */
    void *data;
} Op;

typedef struct CUgraph_st {
    Op *ops;
    size_t count;
    int id, references;
} Graph;

/* A stream that takes part in a capture is a branch of it. A clock has how many ops of every branch come before. */
typedef struct Clock {
    int ops[MAX_BRANCHES];
} Clock;

typedef struct Capture {
    int id, mode, is_invalid, is_over, branches;
    pthread_t thread;
    struct CUstream_st *origin;
    Graph *graph;
} Capture;

typedef struct CUstream_st {
    int is_alive, number, priority, branch;
    unsigned flags;
    Capture *capture;
    Clock clock;
    double busy; /* until then, in seconds: roughly what its ops would take on a GPU */
    struct CUstream_st *next;
} Stream;

typedef struct CUevent_st {
    int is_alive, number, is_recorded;
    unsigned flags;
    Capture *capture;
    Clock clock;
    double time;
} Event;

/* For the other libraries */
extern __thread int pretended_has_context; /* of this thread: the runtime makes one with the first call that needs it */
void pretended_note(const char *event, const char *format, ...) __attribute__((format(printf, 2, 3)));
int pretended_forbidden(const char *what); /* an error if a capture that is not relaxed forbids it */
int pretended_put(Stream *stream, const Op *op);
int pretended_launch(Stream *stream, const Function *function, dim3 grid, dim3 block, unsigned shared, void **args);
int pretended_library(Stream *stream, const char *name, int count, void *const *pointers, const char *format, ...)
    __attribute__((format(printf, 5, 6)));
int pretended_limit_shared(Function *function, int bytes);

#pragma GCC visibility push(hidden)
extern struct Live {
    long long bytes, ranges, streams, events, graphs, execs, captures;
} live;
int lock(void);
int is_traced(void);
void unlock(int *);
void trace_op(const Op *op, const Stream *stream, int capture, int exec, int error);
API(set, int error);                      /* keep it for cudaGetLastError, and return it */
int illegal(const char *what, int error); /* note it, and return it */

int is_device(const void *address);
int is_mapped(const void *address, size_t size); /* true of the host's memory */

extern Stream legacy, *streams;
Stream *resolve(Stream *stream);
int is_dead(const Stream *stream); /* a misuse, which is noted */
double now(void);
double later(double a, double b);
void wait_until(double time);

void invalidate(Capture *capture, const char *why);
int invalidated(Capture *capture, const char *why, int error); /* make it invalid, note the error, and return it */
int legacy_may_work(const char *what);      /* an error if a capture forbids it */
int all_captures_forbid(const char *what); /* an error if any capture goes on */
void join(Stream *stream, Capture *capture, const Clock *clock);
int run(const Op *op, Stream *stream, int exec);
#pragma GCC visibility pop
#endif
