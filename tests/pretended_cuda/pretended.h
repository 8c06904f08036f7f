/* The pretended device: memory, streams, captures, graphs, and a trace of all that is put on a stream. Ops run at once, in
   the order of the calls; kernels do nothing. The functions of CUDA's runtime are written on these types; the libraries of
   the driver, cuBLAS and NCCL call the functions named pretended_*. */
#ifndef PRETENDED_H
#define PRETENDED_H
#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdint.h>

#define API(name, ...) cudaError_t name(__VA_ARGS__)
#define LOCKED __attribute__((cleanup(unlock), unused)) int is_locked = lock() /* until the block ends */

enum { MAX_SHARED = 232448, DEFAULT_SHARED = 49152, MAX_STREAMS_OF_A_CAPTURE = 64 };

typedef struct Function {
    const char *name;
    int count;         /* of parameters; -1: not read yet */
    struct Parameter {
        int size, is_guess; /* size in bytes */
    } *parameters;
    int shared_limit; /* of dynamic shared memory */
} Function;

/* What is put on a stream. */
typedef struct Op {
    enum { KERNEL, COPY, FILL, HOST, LIBRARY } kind;
    const char *name;         /* LIBRARY */
    const Function *function; /* KERNEL */
    dim3 grid, block;
    unsigned shared;
    unsigned char *args; /* KERNEL: parameters, one after the other */
    size_t args_size;
    uint64_t pointers[8]; /* LIBRARY */
    int pointer_count;
    char text[160]; /* LIBRARY: sizes and options */
    void *dst;
    const void *src;
    size_t width, height, dst_pitch, src_pitch; /* bytes and rows */
    int value, element;                         /* FILL: elements of so many bytes */
    void (*call)(void *);                       /* HOST */
    void *data;
} Op;

typedef struct Nodes {
    size_t count;
    struct Node *nodes[MAX_STREAMS_OF_A_CAPTURE];
} Nodes;

typedef struct Node {
    Op op;
    Nodes before;
    int is_joined;
} Node;

typedef struct CUgraph_st {
    Node **nodes;
    size_t count;
    int id, references;
} Graph;

typedef struct Capture {
    int id, mode, is_invalid, is_over;
    pthread_t thread;
    struct CUstream_st *origin;
    Graph *graph;
} Capture;

enum { ALIVE = 0x57534d31, DEAD = 0x44454144 };

typedef struct CUstream_st {
    int magic, number, priority;
    unsigned flags;
    Capture *capture;
    Nodes last;  /* what the next node of the capture follows */
    double busy; /* until then, in seconds: roughly what its ops would take on a GPU */
    struct CUstream_st *next;
} Stream;

typedef struct CUevent_st {
    int magic, number, is_recorded;
    unsigned flags;
    Capture *capture;
    Nodes last;
    double time;
} Event;

/* For the other libraries */
extern __thread int pretended_has_context; /* of this thread: the runtime makes one with the first call that needs it */
void pretended_note(const char *event, const char *format, ...) __attribute__((format(printf, 2, 3)));
int pretended_put(Stream *stream, const Op *op);
int pretended_is_read(Stream *stream); /* the text of ops: writing it takes longer than the call */
int pretended_launch(Stream *stream, const Function *function, dim3 grid, dim3 block, unsigned shared, void **args);
int pretended_forbidden(const char *what); /* an error if a capture that is not relaxed forbids it */
int pretended_limit_shared(Function *function, int bytes);

#pragma GCC visibility push(hidden)
extern struct Live {
    long long bytes, ranges, streams, events, graphs, execs, captures;
} live;

int lock(void);
void unlock(int *);
int is_traced(void);
void trace_op(const Op *op, const Stream *stream, int capture, int exec, int error);

API(set, int error); /* keep it for cudaGetLastError, and return it */
int is_device(const void *address);
int is_mapped(const void *address, size_t size); /* true of the host's memory */

extern Stream legacy, *streams;
Stream *resolve(Stream *stream);
int is_dead(const Stream *stream); /* a misuse, which is noted */
double now(void);
void wait_until(double time);
int may_wait(Stream *stream, const char *what); /* an error if the host may not wait for it, or look at it, now */

void invalidate(Capture *capture, const char *why);
int illegal(const char *what, int error);
int legacy_may_work(const char *what);      /* an error if a capture forbids it */
int all_captures_forbid(const char *what); /* an error if any capture goes on */
void follow(Nodes *nodes, const Nodes *more);
void add_node(Stream *stream, const Op *op);
int run(const Op *op, Stream *stream, int exec);
#pragma GCC visibility pop
#endif
