/* Streams and events, with a pretended clock: a stream is busy for about as long as a GPU would be. */
#include "pretended.h"

#include <stdlib.h>
#include <time.h>

Stream legacy = {.magic = ALIVE}, *streams = &legacy;
static Stream per_thread = {.magic = ALIVE, .number = -1};
static int stream_numbers, event_numbers;

double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

void wait_until(double time) {
    double left = time - now();
    if (left > 0)
        nanosleep(&(struct timespec){(time_t)left, (long)((left - (time_t)left) * 1e9)}, NULL);
}

static double later(double a, double b) { return a > b ? a : b; }

Stream *resolve(Stream *stream) {
    return stream == NULL || stream == cudaStreamLegacy ? &legacy : stream == cudaStreamPerThread ? &per_thread : stream;
}

int is_dead(const Stream *stream) {
    if (stream->magic == ALIVE)
        return 0;
    pretended_note("misuse", "'what':'a stream that was destroyed, or is none'");
    return 1;
}

static int is_gone(const Event *event) { return event == NULL || event->magic != ALIVE; }
static int capture_of(const Stream *stream) { return stream->capture ? stream->capture->id : 0; }
static int number_of(const Event *event) { return event ? event->number : -1; }

API(cudaStreamCreateWithPriority, cudaStream_t *stream, unsigned flags, int priority) {
    LOCKED;
    Stream *made = *stream = calloc(1, sizeof(Stream));
    made->magic = ALIVE, made->flags = flags, made->priority = priority, made->number = ++stream_numbers;
    made->next = streams, streams = made, live.streams++;
    pretended_note("stream_create", "'s':%d,'flags':%u,'priority':%d", made->number, flags, priority);
    return cudaSuccess;
}
API(cudaStreamCreate, cudaStream_t *stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }
API(cudaStreamCreateWithFlags, cudaStream_t *stream, unsigned flags) {
    return cudaStreamCreateWithPriority(stream, flags, 0);
}

API(cudaStreamDestroy, cudaStream_t stream) {
    LOCKED;
    stream = resolve(stream);
    if (is_dead(stream) || stream == &legacy || stream == &per_thread)
        return set(cudaErrorInvalidResourceHandle);
    if (stream->capture != NULL)
        invalidate(stream->capture, "a captured stream was destroyed");
    Stream **at = &streams;
    while (*at != stream)
        at = &(*at)->next;
    *at = stream->next;
    stream->magic = DEAD, live.streams--; /* not freed: later uses are seen */
    pretended_note("stream_destroy", "'s':%d", stream->number);
    return cudaSuccess;
}

int may_wait(Stream *stream, const char *what) {
    if (is_dead(stream))
        return cudaErrorInvalidResourceHandle;
    if (stream->capture != NULL) {
        int was_invalid = stream->capture->is_invalid;
        invalidate(stream->capture, what);
        return illegal(what, was_invalid ? cudaErrorStreamCaptureInvalidated : cudaErrorStreamCaptureUnsupported);
    }
    return stream == &legacy ? legacy_may_work(what) : cudaSuccess;
}

/* Note a call of the host for a stream, and return until when it has to wait. */
static double looked(Stream *stream, const char *event, const char *what, int *error) {
    LOCKED;
    stream = resolve(stream);
    *error = may_wait(stream, what);
    double busy = *error ? 0 : stream->busy;
    pretended_note(event, "'s':%d,'error':%d", stream->number, *error);
    return busy;
}

API(cudaStreamSynchronize, cudaStream_t stream) {
    int error;
    wait_until(looked(stream, "stream_synchronize", "cudaStreamSynchronize", &error)); /* without the lock */
    return set(error);
}

API(cudaStreamQuery, cudaStream_t stream) {
    int error;
    double busy = looked(stream, "stream_query", "cudaStreamQuery", &error);
    return set(error ? error : now() < busy ? cudaErrorNotReady : cudaSuccess);
}

API(cudaStreamAddCallback, cudaStream_t stream, cudaStreamCallback_t call, void *data, unsigned flags) {
    int error = cudaStreamSynchronize(stream); /* a capture does not take it */
    if (error == 0)
        call(stream, cudaSuccess, data);
    return set(error);
}

API(cudaStreamGetPriority, cudaStream_t stream, int *priority) {
    stream = resolve(stream);
    *priority = stream->priority;
    return set(is_dead(stream) ? cudaErrorInvalidResourceHandle : cudaSuccess);
}

static double device_synchronize(int *error) {
    LOCKED;
    double until = 0;
    *error = all_captures_forbid("cudaDeviceSynchronize");
    for (Stream *s = streams; s != NULL && *error == 0; s = s->next)
        until = later(until, s->busy);
    pretended_note("device_synchronize", "'error':%d", *error);
    return until;
}

API(cudaDeviceSynchronize, void) {
    int error;
    wait_until(device_synchronize(&error));
    return set(error);
}

static int stream_wait(Stream *stream, Event *event, unsigned flags) {
    if (is_dead(stream) || is_gone(event))
        return illegal("a wait for an event, or of a stream, that does not exist", cudaErrorInvalidResourceHandle);
    if (event->capture == NULL) {
        if (stream->capture != NULL && event->is_recorded && !(flags & cudaEventWaitExternal)) {
            invalidate(stream->capture, "a captured stream waits for an event from outside");
            return illegal("a captured stream waits for an event from outside", cudaErrorStreamCaptureIsolation);
        }
        stream->busy = later(stream->busy, event->time);
        return cudaSuccess;
    }
    if (event->capture->is_over)
        return illegal("cudaStreamWaitEvent for an event of a capture that has ended", cudaErrorCapturedEvent);
    if (stream == &legacy) {
        invalidate(event->capture, "the legacy stream waits for a captured event");
        return illegal("the legacy stream waits for a captured event", cudaErrorStreamCaptureImplicit);
    }
    if (stream->capture != NULL && stream->capture != event->capture) {
        invalidate(event->capture, "two captures meet"), invalidate(stream->capture, "two captures meet");
        return illegal("two captures meet", cudaErrorStreamCaptureMerge);
    }
    if (event->capture->is_invalid)
        return cudaErrorStreamCaptureInvalidated;
    stream->capture = event->capture;
    follow(&stream->last, &event->last);
    return cudaSuccess;
}

API(cudaStreamWaitEvent, cudaStream_t stream, cudaEvent_t event, unsigned flags) {
    LOCKED;
    stream = resolve(stream);
    int error = stream_wait(stream, event, flags);
    pretended_note("stream_wait", "'s':%d,'event':%d,'capture':%d,'error':%d", stream->number, number_of(event),
                   capture_of(stream), error);
    return set(error);
}

API(cudaEventCreateWithFlags, cudaEvent_t *event, unsigned flags) {
    LOCKED;
    Event *made = *event = calloc(1, sizeof(Event));
    made->magic = ALIVE, made->flags = flags, made->number = ++event_numbers, live.events++;
    return cudaSuccess;
}
API(cudaEventCreate, cudaEvent_t *event) { return cudaEventCreateWithFlags(event, 0); }

API(cudaEventDestroy, cudaEvent_t event) {
    LOCKED;
    if (is_gone(event))
        return set(cudaErrorInvalidResourceHandle);
    event->magic = DEAD, live.events--;
    return cudaSuccess;
}

static int event_record(Event *event, Stream *stream, unsigned flags) {
    if (is_dead(stream) || is_gone(event))
        return illegal("a record of an event, or on a stream, that does not exist", cudaErrorInvalidResourceHandle);
    if (stream->capture != NULL && stream->capture->is_invalid)
        return cudaErrorStreamCaptureInvalidated;
    int is_captured = stream->capture != NULL && !(flags & cudaEventRecordExternal);
    event->capture = is_captured ? stream->capture : NULL, event->is_recorded = 1;
    if (is_captured)
        event->last = stream->last;
    else
        event->time = later(now(), stream->busy);
    return stream == &legacy ? legacy_may_work("cudaEventRecord on the legacy stream") : cudaSuccess;
}

API(cudaEventRecordWithFlags, cudaEvent_t event, cudaStream_t stream, unsigned flags) {
    LOCKED;
    stream = resolve(stream);
    int error = event_record(event, stream, flags);
    pretended_note("event_record", "'s':%d,'event':%d,'capture':%d,'error':%d", stream->number, number_of(event),
                   capture_of(stream), error);
    return set(error);
}
API(cudaEventRecord, cudaEvent_t event, cudaStream_t stream) { return cudaEventRecordWithFlags(event, stream, 0); }

static int may_look(Event *event, const char *what) {
    if (is_gone(event))
        return illegal(what, cudaErrorInvalidResourceHandle);
    if (event->capture == NULL)
        return cudaSuccess;
    if (!event->capture->is_over)
        invalidate(event->capture, what);
    return illegal(what, cudaErrorCapturedEvent);
}

API(cudaEventQuery, cudaEvent_t event) {
    LOCKED;
    int error = pretended_forbidden("cudaEventQuery");
    if (error == 0)
        error = may_look(event, "cudaEventQuery of a captured event");
    return set(error ? error : now() < event->time ? cudaErrorNotReady : cudaSuccess);
}

static double event_synchronize(Event *event, int *error) {
    LOCKED;
    *error = pretended_forbidden("cudaEventSynchronize");
    if (*error == 0)
        *error = may_look(event, "cudaEventSynchronize of a captured event");
    pretended_note("event_synchronize", "'event':%d,'error':%d", number_of(event), *error);
    return *error ? 0 : event->time;
}

API(cudaEventSynchronize, cudaEvent_t event) {
    int error;
    wait_until(event_synchronize(event, &error));
    return set(error);
}

API(cudaEventElapsedTime, float *ms, cudaEvent_t start, cudaEvent_t end) {
    LOCKED;
    int error = may_look(start, "cudaEventElapsedTime of a captured event");
    if (error == 0)
        error = may_look(end, "cudaEventElapsedTime of a captured event");
    if (error)
        return set(error);
    if (!start->is_recorded || !end->is_recorded || (start->flags | end->flags) & cudaEventDisableTiming)
        return set(illegal("cudaEventElapsedTime of events not recorded, or without times", cudaErrorInvalidResourceHandle));
    *ms = (float)((end->time - start->time) * 1e3);
    return set(now() < end->time ? cudaErrorNotReady : cudaSuccess);
}
