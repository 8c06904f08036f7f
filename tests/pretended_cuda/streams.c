/* Streams and events, with a pretended clock: a stream is busy for about as long as a GPU would be. */
#include "pretended.h"

#include <stdlib.h>
#include <time.h>

Stream legacy = {.is_alive = 1}, *streams = &legacy;
static int stream_numbers, event_numbers;

double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

double later(double a, double b) { return a > b ? a : b; }

void wait_until(double time) {
    double left = time - now();
    if (left > 0) /* a sleep of no time takes 50 us */
        nanosleep(&(struct timespec){(time_t)left, (long)((left - (time_t)left) * 1e9)}, NULL);
}

Stream *resolve(Stream *stream) { return stream == NULL || stream == cudaStreamLegacy ? &legacy : stream; }

/* What is destroyed is not freed, so that later uses are seen. */
int is_dead(const Stream *stream) {
    if (!stream->is_alive)
        pretended_note("misuse", "'what':'a stream that was destroyed'");
    return !stream->is_alive;
}
static int is_gone(const Event *event) { return event == NULL || !event->is_alive; }

API(cudaStreamCreateWithPriority, cudaStream_t *stream, unsigned flags, int priority) {
    LOCKED;
    *stream = malloc(sizeof(Stream));
    **stream = (Stream){.is_alive = 1, .number = ++stream_numbers, .flags = flags, .priority = priority,
                        .next = streams};
    streams = *stream, live.streams++;
    pretended_note("stream_create", "'s':%d,'flags':%u,'priority':%d", stream_numbers, flags, priority);
    return cudaSuccess;
}
API(cudaStreamCreateWithFlags, cudaStream_t *s, unsigned flags) { return cudaStreamCreateWithPriority(s, flags, 0); }
API(cudaStreamCreate, cudaStream_t *stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }

API(cudaStreamDestroy, cudaStream_t stream) {
    LOCKED;
    stream = resolve(stream);
    if (is_dead(stream) || stream == &legacy)
        return set(cudaErrorInvalidResourceHandle);
    if (stream->capture != NULL)
        invalidate(stream->capture, "a captured stream was destroyed");
    stream->is_alive = 0, stream->busy = 0, live.streams--;
    pretended_note("stream_destroy", "'s':%d", stream->number);
    return cudaSuccess;
}

API(cudaStreamGetPriority, cudaStream_t stream, int *priority) {
    *priority = resolve(stream)->priority;
    return set(is_dead(resolve(stream)) ? cudaErrorInvalidResourceHandle : cudaSuccess);
}

/* Return an error if the host may not wait for a stream, or look at it, now. */
static int may_wait(Stream *stream, const char *event, const char *what) {
    LOCKED;
    pretended_note(event, "'s':%d", stream->number);
    if (is_dead(stream))
        return cudaErrorInvalidResourceHandle;
    if (stream->capture == NULL)
        return stream == &legacy ? legacy_may_work(what) : cudaSuccess;
    return invalidated(stream->capture, what, stream->capture->is_invalid ? cudaErrorStreamCaptureInvalidated
                                                                          : cudaErrorStreamCaptureUnsupported);
}

API(cudaStreamSynchronize, cudaStream_t stream) {
    stream = resolve(stream);
    int error = may_wait(stream, "stream_synchronize", "cudaStreamSynchronize");
    wait_until(error ? 0 : stream->busy);
    return set(error);
}

API(cudaStreamQuery, cudaStream_t stream) {
    stream = resolve(stream);
    int error = may_wait(stream, "stream_query", "cudaStreamQuery");
    return set(error ? error : now() < stream->busy ? cudaErrorNotReady : cudaSuccess);
}

API(cudaDeviceSynchronize, void) {
    pretended_note("device_synchronize", "'s':0");
    int error = all_captures_forbid("cudaDeviceSynchronize");
    for (Stream *s = streams; s != NULL && error == 0; s = s->next)
        wait_until(s->busy);
    return set(error);
}

static int stream_wait(Stream *stream, Event *event, unsigned flags) {
    if (is_dead(stream) || is_gone(event))
        return illegal("a wait for an event, or of a stream, that does not exist", cudaErrorInvalidResourceHandle);
    pretended_note("stream_wait", "'s':%d,'event':%d,'capture':%d", stream->number, event->number,
                   event->capture ? event->capture->id : 0);
    if (event->capture == NULL) {
        if (stream->capture != NULL && event->is_recorded && !(flags & cudaEventWaitExternal))
            return invalidated(stream->capture, "a captured stream waits for an event from outside",
                               cudaErrorStreamCaptureIsolation);
        stream->busy = later(stream->busy, event->time);
        return cudaSuccess;
    }
    if (event->capture->is_over)
        return illegal("cudaStreamWaitEvent for an event of a capture that has ended", cudaErrorCapturedEvent);
    if (stream == &legacy)
        return invalidated(event->capture, "the legacy stream waits for a captured event",
                           cudaErrorStreamCaptureImplicit);
    if (stream->capture != NULL && stream->capture != event->capture) {
        invalidate(stream->capture, "two captures meet");
        return invalidated(event->capture, "two captures meet", cudaErrorStreamCaptureMerge);
    }
    if (event->capture->is_invalid)
        return cudaErrorStreamCaptureInvalidated;
    join(stream, event->capture, &event->clock);
    return cudaSuccess;
}

API(cudaStreamWaitEvent, cudaStream_t stream, cudaEvent_t event, unsigned flags) {
    LOCKED;
    return set(stream_wait(resolve(stream), event, flags));
}

API(cudaEventCreateWithFlags, cudaEvent_t *event, unsigned flags) {
    LOCKED;
    *event = malloc(sizeof(Event));
    **event = (Event){.is_alive = 1, .number = ++event_numbers, .flags = flags};
    live.events++;
    return cudaSuccess;
}
API(cudaEventCreate, cudaEvent_t *event) { return cudaEventCreateWithFlags(event, 0); }

API(cudaEventDestroy, cudaEvent_t event) {
    LOCKED;
    if (is_gone(event))
        return set(cudaErrorInvalidResourceHandle);
    event->is_alive = 0, live.events--;
    return cudaSuccess;
}

static int event_record(Event *event, Stream *stream, unsigned flags) {
    if (is_dead(stream) || is_gone(event))
        return illegal("a record of an event, or on a stream, that does not exist", cudaErrorInvalidResourceHandle);
    Capture *capture = flags & cudaEventRecordExternal ? NULL : stream->capture;
    pretended_note("event_record", "'s':%d,'event':%d,'capture':%d", stream->number, event->number,
                   capture ? capture->id : 0);
    if (capture != NULL && capture->is_invalid)
        return cudaErrorStreamCaptureInvalidated;
    event->capture = capture, event->clock = stream->clock;
    event->time = later(now(), stream->busy), event->is_recorded = 1;
    return stream == &legacy ? legacy_may_work("cudaEventRecord on the legacy stream") : cudaSuccess;
}

API(cudaEventRecordWithFlags, cudaEvent_t event, cudaStream_t stream, unsigned flags) {
    LOCKED;
    return set(event_record(event, resolve(stream), flags));
}
API(cudaEventRecord, cudaEvent_t event, cudaStream_t stream) { return cudaEventRecordWithFlags(event, stream, 0); }

static int may_look(Event *event, const char *what) {
    LOCKED;
    if (is_gone(event))
        return illegal(what, cudaErrorInvalidResourceHandle);
    if (event->capture != NULL && !event->capture->is_over)
        invalidate(event->capture, what);
    return event->capture == NULL ? cudaSuccess : illegal(what, cudaErrorCapturedEvent);
}

API(cudaEventQuery, cudaEvent_t event) {
    int error = pretended_forbidden("cudaEventQuery");
    error = error ? error : may_look(event, "cudaEventQuery of a captured event");
    return set(error ? error : now() < event->time ? cudaErrorNotReady : cudaSuccess);
}

API(cudaEventSynchronize, cudaEvent_t event) {
    int error = pretended_forbidden("cudaEventSynchronize");
    error = error ? error : may_look(event, "cudaEventSynchronize of a captured event");
    pretended_note("event_synchronize", "'event':%d", is_gone(event) ? -1 : event->number);
    wait_until(error ? 0 : event->time);
    return set(error);
}

API(cudaEventElapsedTime, float *ms, cudaEvent_t start, cudaEvent_t end) {
    int error = may_look(start, "cudaEventElapsedTime of a captured event");
    error = error ? error : may_look(end, "cudaEventElapsedTime of a captured event");
    int has_times = error || !((start->flags | end->flags) & cudaEventDisableTiming);
    if (error == 0 && (!start->is_recorded || !end->is_recorded || !has_times))
        error = illegal("cudaEventElapsedTime of events without times", cudaErrorInvalidResourceHandle);
    if (error == 0)
        *ms = (float)((end->time - start->time) * 1e3);
    return set(error ? error : now() < end->time ? cudaErrorNotReady : cudaSuccess);
}
