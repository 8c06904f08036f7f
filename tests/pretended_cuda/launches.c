/* What is put on a stream: written into the trace, checked, and done if it is a copy or a fill. */
#include "pretended.h"

#include <string.h>

enum { LARGE = 64 << 20 }; /* bytes that are not worth memory of the host */
__thread int pretended_has_context;

static void dangling(const Op *op, uint64_t address, int exec) {
    const char *name = op->kind == KERNEL ? op->function->name : op->kind == LIBRARY ? op->name : "copy or fill";
    pretended_note("dangling", "'name':'%s','p':%lu,'exec':%d", name, address, exec);
}

/* Note addresses of memory that is not there, or not any more. */
static void check_addresses(const Op *op, int exec) {
    for (int i = 0; i < op->pointer_count; i++)
        if (!is_mapped((void *)op->pointers[i], 1))
            dangling(op, op->pointers[i], exec);
    const unsigned char *at = op->args;
    for (int i = 0; op->kind == KERNEL && i < op->function->count; at += op->function->parameters[i++].size)
        for (int offset = 0; offset + 8 <= op->function->parameters[i].size; offset += 8) {
            uint64_t word;
            memcpy(&word, at + offset, 8);
            if (!op->function->parameters[i].is_guess && !is_mapped((void *)word, 1))
                dangling(op, word, exec);
        }
}

/* Return about how many seconds an op takes. */
static double duration(const Op *op) {
    if (op->kind == KERNEL && op->function->count == 1 && strstr(op->function->name, "spin_kernel")) { /* _sleep(cycles) */
        long long cycles;
        memcpy(&cycles, op->args, 8);
        return cycles / 1.98e9;
    }
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

/* PyTorch's fill_ and add_(number) of contiguous tensors: (int count, functor, std::array<char *, 1 or 2>). */
static void compute(const Function *f, const unsigned char *args) {
    int count, size = f->count == 3 ? f->parameters[1].size : 0;
    char *places[2] = {NULL, NULL};
    float terms[2];
    if (f->count != 3 || f->parameters[1].is_guess || f->parameters[2].size > sizeof(places))
        return;
    memcpy(&count, args, 4), memcpy(places, args + 4 + size, f->parameters[2].size);
    if (!is_device(places[0]) || (size_t)count * size > LARGE || !is_mapped(places[0], (size_t)count * size))
        return;
    if (strstr(f->name, "FillFunctor"))
        repeat(places[0], args + 4, size, count);
    else if (strstr(f->name, "CUDAFunctorOnSelf_add<float>") && is_mapped(places[1], (size_t)count * 4)) {
        memcpy(terms, args + 4, 8);
        for (int i = 0; i < count; i++)
            ((float *)places[0])[i] = ((float *)places[1])[i] + terms[0] * terms[1];
    }
}

int run(const Op *op, Stream *stream, int exec) {
    double start = now();
    trace_op(op, stream, 0, exec, cudaSuccess);
    stream->busy = (start > stream->busy ? start : stream->busy) + duration(op);
    check_addresses(op, exec);
    if (op->kind == HOST)
        op->call(op->data);
    else if (op->kind == KERNEL)
        compute(op->function, op->args);
    if (op->width * op->height > LARGE && is_device(op->dst)) {
        pretended_note("left_out", "'n':%zu", op->width * op->height);
        return cudaSuccess;
    }
    for (size_t row = 0; row < op->height; row++) { /* of a copy or fill */
        char *dst = (char *)op->dst + row * op->dst_pitch;
        const char *src = (const char *)op->src + row * op->src_pitch;
        if (!is_mapped(dst, op->width) || (op->kind == COPY && !is_mapped(src, op->width))) {
            dangling(op, (uint64_t)(is_mapped(dst, op->width) ? src : dst), exec);
            return cudaErrorIllegalAddress;
        }
        if (op->kind == COPY)
            memmove(dst, src, op->width);
        else
            repeat(dst, &op->value, op->element, op->width / op->element);
    }
    return cudaSuccess;
}

static int put(Stream *stream, const Op *op) {
    if (is_dead(stream))
        return cudaErrorInvalidResourceHandle;
    if (stream->capture == NULL) {
        int error = stream == &legacy ? legacy_may_work("work on the legacy stream") : cudaSuccess;
        return error ? error : run(op, stream, 0);
    }
    if (stream->capture->is_invalid)
        return cudaErrorStreamCaptureInvalidated;
    trace_op(op, stream, stream->capture->id, 0, cudaSuccess);
    add_node(stream, op);
    return cudaSuccess;
}

int pretended_is_read(Stream *stream) { return is_traced() || resolve(stream)->capture != NULL; }

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
        pretended_note("misuse", "'what':'%u bytes of shared memory for %s, allowed are %d'", shared, f->name,
                       f->shared_limit);
        return cudaErrorInvalidValue;
    }
    Op op = {.kind = KERNEL, .function = f, .grid = grid, .block = block, .shared = shared};
    for (int i = 0; i < f->count; i++)
        op.args_size += f->parameters[i].size;
    unsigned char args_of[op.args_size + 1], *at = op.args = args_of; /* a capture copies them */
    for (int i = 0; i < f->count; at += f->parameters[i++].size)
        memcpy(at, args[i], f->parameters[i].size);
    return pretended_put(stream, &op);
}

int pretended_limit_shared(Function *function, int bytes) {
    if (bytes > MAX_SHARED)
        return cudaErrorInvalidValue;
    function->shared_limit = bytes;
    return cudaSuccess;
}

static Op copy(void *dst, size_t dst_pitch, const void *src, size_t src_pitch, size_t width, size_t height) {
    return (Op){.kind = COPY, .dst = dst, .src = src, .width = width, .height = height, .dst_pitch = dst_pitch,
                .src_pitch = src_pitch};
}

API(cudaMemcpyAsync, void *dst, const void *src, size_t count, enum cudaMemcpyKind kind, cudaStream_t stream) {
    Op op = copy(dst, count, src, count, count, 1);
    return set(pretended_put(stream, &op));
}
API(cudaMemcpyPeerAsync, void *dst, int to, const void *src, int from, size_t count, cudaStream_t stream) {
    return cudaMemcpyAsync(dst, src, count, cudaMemcpyDeviceToDevice, stream);
}
API(cudaMemcpy2DAsync, void *dst, size_t dst_pitch, const void *src, size_t src_pitch, size_t width, size_t height,
    enum cudaMemcpyKind kind, cudaStream_t stream) {
    Op op = copy(dst, dst_pitch, src, src_pitch, width, height);
    return set(pretended_put(stream, &op));
}
API(cudaMemcpy, void *dst, const void *src, size_t count, enum cudaMemcpyKind kind) {
    int error = pretended_forbidden("a copy that the host waits for");
    error = error ? error : cudaMemcpyAsync(dst, src, count, kind, NULL);
    wait_until(error ? 0 : legacy.busy);
    return set(error);
}
API(cudaMemsetAsync, void *dst, int value, size_t count, cudaStream_t stream) {
    Op op = {.kind = FILL, .dst = dst, .width = count, .height = 1, .value = value, .element = 1};
    return set(pretended_put(stream, &op));
}
API(cudaMemset, void *dst, int value, size_t count) { return cudaMemsetAsync(dst, value, count, NULL); }

API(cudaLaunchHostFunc, cudaStream_t stream, cudaHostFn_t call, void *data) {
    Op op = {.kind = HOST, .call = call, .data = data};
    return set(pretended_put(stream, &op));
}
