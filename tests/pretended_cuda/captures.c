/* Captures of streams, what they forbid, and graphs. The rules are those of CUDA's documentation. */
#include "pretended.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct CUgraphExec_st {
    Graph *graph;
    int id, launches, is_destroyed;
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

static int is_own(const Capture *capture) { return pthread_equal(capture->thread, pthread_self()); }
static int is_blocking(const Capture *capture) { return !(capture->origin->flags & cudaStreamNonBlocking); }
static int forbids_unsafe_calls(const Capture *capture) {
    return thread_mode != cudaStreamCaptureModeRelaxed && capture->mode != cudaStreamCaptureModeRelaxed &&
           (is_own(capture) ||
            (capture->mode == cudaStreamCaptureModeGlobal && thread_mode == cudaStreamCaptureModeGlobal));
}
static int forbids_all(const Capture *capture) { return 1; }

/* Return an error if a capture forbids a call, and make those captures invalid. */
static int check(int (*forbids)(const Capture *), const char *what, int error) {
    int found = 0;
    for (int i = 0; i < live.captures; i++)
        if (forbids(active[i]))
            invalidate(active[i], what), found = 1;
    return found ? illegal(what, error) : cudaSuccess;
}

int all_captures_forbid(const char *what) { return check(forbids_all, what, cudaErrorStreamCaptureUnsupported); }
int legacy_may_work(const char *what) { return check(is_blocking, what, cudaErrorStreamCaptureImplicit); }
int pretended_forbidden(const char *what) {
    LOCKED;
    pretended_has_context = 1;
    return check(forbids_unsafe_calls, what, cudaErrorStreamCaptureUnsupported);
}

void follow(Nodes *nodes, const Nodes *more) {
    for (size_t i = 0, j; i < more->count; i++) {
        for (j = 0; j < nodes->count && nodes->nodes[j] != more->nodes[i]; j++)
            ;
        if (j == MAX_STREAMS_OF_A_CAPTURE)
            abort();
        nodes->nodes[j] = more->nodes[i];
        nodes->count = j == nodes->count ? j + 1 : nodes->count;
    }
}

void add_node(Stream *stream, const Op *op) {
    Graph *graph = stream->capture->graph;
    Node *node = malloc(sizeof(Node));
    *node = (Node){.op = *op, .before = stream->last};
    if (op->args != NULL)
        node->op.args = memcpy(malloc(op->args_size + 1), op->args, op->args_size);
    graph->nodes = realloc(graph->nodes, (graph->count + 1) * sizeof(Node *));
    graph->nodes[graph->count++] = node;
    stream->last = (Nodes){1, {node}};
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
    Capture *capture = stream->capture = active[live.captures++] = malloc(sizeof(Capture));
    *capture = (Capture){.id = ++capture_ids, .mode = mode, .thread = pthread_self(), .origin = stream, .graph = graph};
    stream->last.count = 0, live.graphs++;
    return cudaSuccess;
}

API(cudaStreamBeginCapture, cudaStream_t stream, enum cudaStreamCaptureMode mode) {
    LOCKED;
    stream = resolve(stream);
    int error = begin(stream, mode);
    pretended_note("capture_begin", "'s':%d,'capture':%d,'mode':%d,'error':%d", stream->number, capture_ids, mode, error);
    return set(error);
}

/* Mark the nodes that the stream's last ones follow. Nodes stand after those that they follow. */
static void mark_joined(Graph *graph, Nodes *last) {
    for (size_t i = 0; i < last->count; i++)
        last->nodes[i]->is_joined = 1;
    for (size_t i = graph->count; i-- > 0;)
        for (size_t j = 0; j < graph->nodes[i]->before.count; j++)
            graph->nodes[i]->before.nodes[j]->is_joined |= graph->nodes[i]->is_joined;
}

static int end(Stream *stream, Graph **graph) {
    Capture *capture = stream->capture;
    if (is_dead(stream) || capture == NULL)
        return illegal("the end of a capture that there is not", cudaErrorIllegalState);
    if (capture->origin != stream) {
        invalidate(capture, "another stream ends the capture");
        return illegal("another stream ends the capture", cudaErrorStreamCaptureUnmatched);
    }
    if (capture->mode != cudaStreamCaptureModeRelaxed && !is_own(capture))
        return illegal("another thread ends the capture", cudaErrorStreamCaptureWrongThread);
    int unjoined = 0, at = 0;
    mark_joined(capture->graph, &stream->last);
    for (Stream *s = streams; s != NULL; s = s->next)
        if (s->capture == capture) {
            for (size_t i = 0; i < s->last.count; i++)
                unjoined |= !s->last.nodes[i]->is_joined;
            s->capture = NULL, s->last.count = 0;
        }
    while (active[at] != capture)
        at++;
    active[at] = active[--live.captures], capture->is_over = 1;
    int error = capture->is_invalid ? cudaErrorStreamCaptureInvalidated
                : unjoined          ? illegal("streams are not joined", cudaErrorStreamCaptureUnjoined)
                                    : cudaSuccess;
    if (error)
        cudaGraphDestroy(capture->graph);
    else
        *graph = capture->graph;
    return error;
}

API(cudaStreamEndCapture, cudaStream_t stream, cudaGraph_t *graph) {
    LOCKED;
    stream = resolve(stream);
    int id = stream->capture ? stream->capture->id : 0;
    *graph = NULL;
    int error = end(stream, graph);
    pretended_note("capture_end", "'s':%d,'capture':%d,'nodes':%zu,'error':%d", stream->number, id,
                   *graph ? (*graph)->count : 0, error);
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
    if (*status == cudaStreamCaptureStatusActive) {
        if (id)
            *id = capture->id;
        if (graph)
            *graph = capture->graph;
        if (nodes)
            *nodes = (const cudaGraphNode_t *)stream->last.nodes;
        if (count)
            *count = stream->last.count;
    }
    if (edges)
        *edges = NULL;
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
    LOCKED;
    *count = nodes == NULL || graph->count < *count ? graph->count : *count;
    if (nodes != NULL)
        memcpy(nodes, graph->nodes, *count * sizeof(*nodes));
    return cudaSuccess;
}

API(cudaGraphDestroy, cudaGraph_t graph) {
    LOCKED;
    if (--graph->references)
        return cudaSuccess;
    for (size_t i = 0; i < graph->count; i++)
        free(graph->nodes[i]->op.args); /* nodes stay: events may point to them */
    graph->count = 0, live.graphs--;
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

API(cudaGraphLaunch, cudaGraphExec_t exec, cudaStream_t stream) {
    LOCKED;
    stream = resolve(stream);
    if (exec == NULL || exec->is_destroyed || is_dead(stream))
        return set(illegal("a launch of a graph that was destroyed", cudaErrorInvalidResourceHandle));
    int is_captured = stream->capture != NULL;
    int error = stream == &legacy ? legacy_may_work("a graph on the legacy stream") : cudaSuccess;
    if (is_captured)
        pretended_note("misuse", "'what':'a graph is launched in a capture: its ops become nodes'");
    else if (error == 0)
        pretended_note("graph_launch", "'exec':%d,'s':%d,'nodes':%zu", exec->id, stream->number, exec->graph->count);
    exec->launches += !is_captured;
    for (size_t i = 0; i < exec->graph->count && error == 0; i++) {
        const Op *op = &exec->graph->nodes[i]->op;
        error = is_captured ? pretended_put(stream, op) : run(op, stream, exec->id);
    }
    return set(error);
}

API(cudaGraphExecDestroy, cudaGraphExec_t exec) {
    LOCKED;
    if (exec == NULL || exec->is_destroyed)
        return set(cudaErrorInvalidResourceHandle);
    exec->is_destroyed = 1, live.execs--;
    pretended_note("exec_destroy", "'exec':%d,'launches':%d", exec->id, exec->launches);
    return cudaGraphDestroy(exec->graph);
}
