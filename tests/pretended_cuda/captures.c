/* Captures of streams, what they forbid, and graphs. The rules are those of CUDA's documentation. */
#include "pretended.h"

#include <stdlib.h>
#include <string.h>

struct CUgraphExec_st {
    Graph *graph;
    int id, launches;
};

static Capture *active[64]; /* the first live.captures of them go on */
static int capture_ids, graph_ids, exec_ids;
static __thread enum cudaStreamCaptureMode thread_mode = cudaStreamCaptureModeGlobal;

int illegal(const char *what, int error) {
    pretended_note("illegal", "'what':'%s','error':%d", what, error);
    return error;
}
void invalidate(Capture *capture, const char *why) {
    if (!capture->is_invalid)
        pretended_note("capture_invalid", "'capture':%d,'why':'%s'", capture->id, why);
    capture->is_invalid = 1;
}
int invalidated(Capture *capture, const char *why, int error) { return invalidate(capture, why), illegal(why, error); }

static int is_own(const Capture *capture) { return pthread_equal(capture->thread, pthread_self()); }
static int is_blocking(const Capture *capture) { return !(capture->origin->flags & cudaStreamNonBlocking); }
static int forbids_all(const Capture *capture) { return 1; }
static int forbids_unsafe_calls(const Capture *capture) {
    int is_global = capture->mode == cudaStreamCaptureModeGlobal && thread_mode == cudaStreamCaptureModeGlobal;
    int is_relaxed = capture->mode == cudaStreamCaptureModeRelaxed || thread_mode == cudaStreamCaptureModeRelaxed;
    return is_global || (is_own(capture) && !is_relaxed);
}

/* Return an error if a capture forbids a call, and make those captures invalid. */
static int check(int (*forbids)(const Capture *), const char *what, int error) {
    LOCKED;
    int found = 0;
    for (int i = 0; i < live.captures; i++)
        if (forbids(active[i]))
            invalidate(active[i], what), found = 1;
    return found ? illegal(what, error) : cudaSuccess;
}
int all_captures_forbid(const char *what) { return check(forbids_all, what, cudaErrorStreamCaptureUnsupported); }
int legacy_may_work(const char *what) { return check(is_blocking, what, cudaErrorStreamCaptureImplicit); }
int pretended_forbidden(const char *what) {
    pretended_has_context = 1;
    return check(forbids_unsafe_calls, what, cudaErrorStreamCaptureUnsupported);
}

/* Let a stream take part in a capture, after what a clock has. */
void join(Stream *stream, Capture *capture, const Clock *clock) {
    if (stream->capture == NULL) {
        stream->capture = capture, stream->clock = *clock, stream->branch = capture->branches++;
        if (stream->branch == MAX_BRANCHES)
            abort();
    }
    for (int i = 0; i < MAX_BRANCHES; i++)
        if (stream->clock.ops[i] < clock->ops[i])
            stream->clock.ops[i] = clock->ops[i];
}

static int begin(Stream *stream, int mode) {
    if (is_dead(stream) || live.captures == sizeof(active) / sizeof(*active))
        return cudaErrorInvalidResourceHandle;
    if (stream == &legacy)
        return illegal("a capture of the legacy stream", cudaErrorStreamCaptureUnsupported);
    if (stream->capture != NULL)
        return illegal("a second capture of a stream", cudaErrorIllegalState);
    Graph *graph = malloc(sizeof(Graph));
    *graph = (Graph){.id = ++graph_ids, .references = 1};
    Capture *capture = active[live.captures++] = malloc(sizeof(Capture)); /* not freed: events may point to it */
    *capture = (Capture){.id = ++capture_ids, .mode = mode, .thread = pthread_self(), .origin = stream, .graph = graph};
    join(stream, capture, &(Clock){});
    live.graphs++;
    pretended_note("capture_begin", "'s':%d,'capture':%d,'mode':%d", stream->number, capture_ids, mode);
    return cudaSuccess;
}

API(cudaStreamBeginCapture, cudaStream_t stream, enum cudaStreamCaptureMode mode) {
    LOCKED;
    return set(begin(resolve(stream), mode));
}

static int end(Stream *stream, Capture *capture) {
    if (is_dead(stream) || capture == NULL)
        return illegal("the end of a capture that there is not", cudaErrorIllegalState);
    if (capture->origin != stream)
        return invalidated(capture, "another stream ends the capture", cudaErrorStreamCaptureUnmatched);
    if (capture->mode != cudaStreamCaptureModeRelaxed && !is_own(capture))
        return illegal("another thread ends the capture", cudaErrorStreamCaptureWrongThread);
    int is_joined = 1, at = 0;
    for (Stream *s = streams; s != NULL; s = s->next)
        if (s->capture == capture) {
            is_joined &= stream->clock.ops[s->branch] >= s->clock.ops[s->branch];
            s->capture = NULL;
        }
    while (active[at] != capture)
        at++;
    active[at] = active[--live.captures], capture->is_over = 1;
    return capture->is_invalid ? cudaErrorStreamCaptureInvalidated
           : is_joined         ? cudaSuccess
                               : illegal("streams are not joined", cudaErrorStreamCaptureUnjoined);
}

API(cudaStreamEndCapture, cudaStream_t stream, cudaGraph_t *graph) {
    LOCKED;
    stream = resolve(stream);
    Capture *capture = stream->capture;
    int error = end(stream, capture);
    *graph = error ? NULL : capture->graph;
    pretended_note("capture_end", "'s':%d,'capture':%d,'nodes':%zu,'error':%d", stream->number,
                   capture ? capture->id : 0, *graph ? (*graph)->count : 0, error);
    if (error && capture && capture->is_over)
        cudaGraphDestroy(capture->graph);
    return set(error);
}

API(cudaStreamGetCaptureInfo, cudaStream_t stream, enum cudaStreamCaptureStatus *status, unsigned long long *id,
    cudaGraph_t *graph, const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges, size_t *count) {
    LOCKED;
    stream = resolve(stream);
    Capture *capture = stream->capture;
    *status = capture == NULL       ? cudaStreamCaptureStatusNone
              : capture->is_invalid ? cudaStreamCaptureStatusInvalidated
                                    : cudaStreamCaptureStatusActive;
    if (capture != NULL && id)
        *id = capture->id;
    if (capture != NULL && graph)
        *graph = capture->graph;
    for (int i = 0; i < live.captures && stream == &legacy; i++)
        if (is_blocking(active[i]))
            return set(cudaErrorStreamCaptureImplicit);
    return set(is_dead(stream) ? cudaErrorInvalidResourceHandle : cudaSuccess);
}
API(cudaStreamIsCapturing, cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
    return cudaStreamGetCaptureInfo(stream, status, NULL, NULL, NULL, NULL, NULL);
}

API(cudaThreadExchangeStreamCaptureMode, enum cudaStreamCaptureMode *mode) {
    enum cudaStreamCaptureMode before = thread_mode;
    thread_mode = *mode, *mode = before;
    return cudaSuccess;
}

API(cudaGraphGetNodes, cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count) {
    return *count = graph->count, set(nodes ? cudaErrorNotSupported : cudaSuccess);
}

API(cudaGraphDestroy, cudaGraph_t graph) {
    LOCKED;
    if (--graph->references)
        return cudaSuccess;
    for (size_t i = 0; i < graph->count; i++)
        free(graph->ops[i].args);
    free(graph->ops), free(graph);
    live.graphs--;
    return cudaSuccess;
}

API(cudaGraphInstantiateWithFlags, cudaGraphExec_t *exec, cudaGraph_t graph, unsigned long long flags) {
    LOCKED;
    *exec = malloc(sizeof(**exec));
    **exec = (struct CUgraphExec_st){.graph = graph, .id = ++exec_ids};
    graph->references++, live.execs++;
    pretended_note("instantiate", "'exec':%d,'graph':%d,'nodes':%zu", exec_ids, graph->id, graph->count);
    return cudaSuccess;
}

static int launch(struct CUgraphExec_st *exec, Stream *stream) {
    if (exec == NULL || exec->graph == NULL || is_dead(stream))
        return illegal("a launch of a graph that was destroyed", cudaErrorInvalidResourceHandle);
    if (stream->capture != NULL)
        return illegal("a launch of a graph in a capture, which is not written", cudaErrorNotSupported);
    int error = stream == &legacy ? legacy_may_work("a graph on the legacy stream") : cudaSuccess;
    if (error)
        return error;
    exec->launches++;
    pretended_note("graph_launch", "'exec':%d,'s':%d,'nodes':%zu", exec->id, stream->number, exec->graph->count);
    for (size_t i = 0; i < exec->graph->count && error == 0; i++)
        error = run(&exec->graph->ops[i], stream, exec->id);
    return error;
}

API(cudaGraphLaunch, cudaGraphExec_t exec, cudaStream_t stream) {
    LOCKED;
    return set(launch(exec, resolve(stream)));
}

API(cudaGraphExecDestroy, cudaGraphExec_t exec) {
    LOCKED;
    if (exec == NULL || exec->graph == NULL)
        return set(cudaErrorInvalidResourceHandle);
    pretended_note("exec_destroy", "'exec':%d,'launches':%d", exec->id, exec->launches);
    cudaGraphDestroy(exec->graph);
    exec->graph = NULL, live.execs--; /* not freed: later uses are seen */
    return cudaSuccess;
}
