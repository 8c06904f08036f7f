/* The rest of the runtime: errors, the device, and the kernels of PyTorch, which the compiler registers. */
#define _GNU_SOURCE
#include "pretended.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- errors ---- */

#define ERRORS(E) \
    E(cudaSuccess, "no error") \
    E(cudaErrorInvalidValue, "invalid argument") \
    E(cudaErrorMemoryAllocation, "out of memory") \
    E(cudaErrorInvalidConfiguration, "invalid configuration argument") \
    E(cudaErrorInvalidDeviceFunction, "invalid device function") \
    E(cudaErrorInvalidDevice, "invalid device ordinal") \
    E(cudaErrorInvalidResourceHandle, "invalid resource handle") \
    E(cudaErrorIllegalState, "the operation cannot be performed in the present state") \
    E(cudaErrorSymbolNotFound, "named symbol not found") \
    E(cudaErrorNotReady, "device not ready") \
    E(cudaErrorIllegalAddress, "an illegal memory access was encountered") \
    E(cudaErrorNotSupported, "operation not supported") \
    E(cudaErrorStreamCaptureUnsupported, "operation not permitted when stream is capturing") \
    E(cudaErrorStreamCaptureInvalidated, "operation failed due to a previous error during capture") \
    E(cudaErrorStreamCaptureMerge, "operation would result in a merge of separate capture sequences") \
    E(cudaErrorStreamCaptureUnmatched, "capture was not ended in the same stream as it began") \
    E(cudaErrorStreamCaptureUnjoined, "capturing stream has unjoined work") \
    E(cudaErrorStreamCaptureIsolation, "dependency created on uncaptured work in another stream") \
    E(cudaErrorStreamCaptureImplicit, "operation would make the legacy stream depend on a capturing blocking stream") \
    E(cudaErrorCapturedEvent, "operation not permitted on an event last recorded in a capturing stream") \
    E(cudaErrorStreamCaptureWrongThread, "attempt to terminate a thread-local capture sequence from another thread")
#define NAME(code, text) case code: return #code;
#define TEXT(code, text) case code: return text;

static __thread cudaError_t last_error;

API(set, int error) { return last_error = error ? (cudaError_t)error : last_error, (cudaError_t)error; }
API(cudaPeekAtLastError, void) { return last_error; }
API(cudaGetLastError, void) {
    cudaError_t error = last_error;
    last_error = cudaSuccess;
    return error;
}
const char *cudaGetErrorName(cudaError_t error) {
    switch (error) { ERRORS(NAME) default: return "cudaErrorUnknown"; }
}
const char *cudaGetErrorString(cudaError_t error) {
    switch (error) { ERRORS(TEXT) default: return "unknown error"; }
}

/* ---- the device: attribute, field of cudaDeviceProp, value ---- */

#define DEVICE(D) \
    D(ComputeCapabilityMajor, major, 9) D(MultiProcessorCount, multiProcessorCount, 132) D(WarpSize, warpSize, 32) \
    D(MaxThreadsPerBlock, maxThreadsPerBlock, 1024) D(MaxThreadsPerMultiProcessor, maxThreadsPerMultiProcessor, 2048) \
    D(MaxBlockDimX, maxThreadsDim[0], 1024) D(MaxBlockDimY, maxThreadsDim[1], 1024) \
    D(MaxBlockDimZ, maxThreadsDim[2], 64) D(MaxGridDimX, maxGridSize[0], 2147483647) \
    D(MaxGridDimY, maxGridSize[1], 65535) D(MaxGridDimZ, maxGridSize[2], 65535) \
    D(MaxBlocksPerMultiprocessor, maxBlocksPerMultiProcessor, 32) D(MaxRegistersPerBlock, regsPerBlock, 65536) \
    D(MaxRegistersPerMultiprocessor, regsPerMultiprocessor, 65536) D(TotalConstantMemory, totalConstMem, 65536) \
    D(MaxSharedMemoryPerBlock, sharedMemPerBlock, DEFAULT_SHARED) \
    D(MaxSharedMemoryPerBlockOptin, sharedMemPerBlockOptin, MAX_SHARED) \
    D(MaxSharedMemoryPerMultiprocessor, sharedMemPerMultiprocessor, 233472) \
    D(ReservedSharedMemoryPerBlock, reservedSharedMemPerBlock, 1024) D(L2CacheSize, l2CacheSize, 60 << 20) \
    D(GlobalMemoryBusWidth, memoryBusWidth, 6144) D(TextureAlignment, textureAlignment, 512) \
    D(UnifiedAddressing, unifiedAddressing, 1) D(ConcurrentKernels, concurrentKernels, 1) D(PciBusId, pciBusID, 1) \
    D(AsyncEngineCount, asyncEngineCount, 3) D(CooperativeLaunch, cooperativeLaunch, 1) \
    D(ClusterLaunch, clusterLaunch, 1)
#define ATTRIBUTE(attribute, field, value) case cudaDevAttr##attribute: *out = value; break;
#define FIELD(attribute, field, value) out->field = value;

API(cudaDeviceGetAttribute, int *out, enum cudaDeviceAttr attribute, int device) {
    switch (attribute) {
        DEVICE(ATTRIBUTE)
    case cudaDevAttrClockRate: *out = 1980000; break;
    case cudaDevAttrMemoryClockRate: *out = 3201000; break;
    default: *out = 0;
    }
    return cudaSuccess;
}
API(cudaGetDeviceProperties, struct cudaDeviceProp *out, int device) {
    size_t unused;
    if (device)
        return set(cudaErrorInvalidDevice);
    *out = (struct cudaDeviceProp){.name = "NVIDIA H200 (pretended)", .uuid = {"pretended"}};
    DEVICE(FIELD)
    return cudaMemGetInfo(&unused, &out->totalGlobalMem);
}
API(cudaGetDeviceCount, int *count) { return *count = 1, cudaSuccess; }
API(cudaGetDevice, int *device) { return *device = 0, cudaSuccess; }
API(cudaSetDevice, int device) { return pretended_has_context = 1, set(device ? cudaErrorInvalidDevice : cudaSuccess); }
API(cudaDriverGetVersion, int *version) { return *version = 13010, cudaSuccess; }
API(cudaRuntimeGetVersion, int *version) { return *version = 13000, cudaSuccess; }
API(cudaDeviceCanAccessPeer, int *can, int a, int b) { return *can = 0, cudaSuccess; }
API(cudaDeviceGetPCIBusId, char *text, int size, int device) {
    return snprintf(text, size, "0000:01:00.0"), cudaSuccess;
}
API(cudaDeviceGetStreamPriorityRange, int *least, int *greatest) { return *least = 0, *greatest = -5, cudaSuccess; }
API(cudaGetDriverEntryPointByVersion, const char *symbol, void **function, unsigned version, unsigned long long flags,
    enum cudaDriverEntryPointQueryResult *status) {
    char second[200];
    snprintf(second, sizeof(second), "%s_v2", symbol);
    void *driver = dlopen("libcuda.so.1", RTLD_LAZY);
    *function = driver ? dlsym(driver, symbol) : NULL;
    *function = *function || !driver ? *function : dlsym(driver, second);
    if (status)
        *status = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return cudaSuccess;
}

/* ---- kernels of PyTorch, by the address of their stub on the host ---- */

enum { BUCKETS = 1 << 16, MAX_PARAMETERS = 64 };
static struct Known {
    struct Known *next;
    const void *host;
    Function function;
} *known[BUCKETS];

static struct Known **bucket(const void *host) { return &known[((uintptr_t)host >> 4) % BUCKETS]; }

void **__cudaRegisterFatBinary(void *binary) {
    static void *handle;
    return &handle;
}
void __cudaRegisterFunction(void **handle, const char *host, char *device, const char *name, int limit, uint3 *thread,
                            uint3 *block_id, dim3 *block, dim3 *grid, int *warp) {
    LOCKED;
    struct Known *entry = malloc(sizeof(*entry)), **at = bucket(host);
    *entry = (struct Known){*at, host, {.name = name, .count = -1, .shared_limit = DEFAULT_SHARED}};
    *at = entry;
}

/* Tell the size of a parameter from its type. */
static Parameter parameter_of(const char *type) {
    static const struct {
        const char *name;
        int size;
    } TYPES[] = {{"int", 4}, {"unsigned int", 4}, {"float", 4}, {"long", 8}, {"unsigned long", 8}, {"double", 8},
                 {"bool", 1}, {"long long", 8}, {"short", 2}, {"char", 1}, {"unsigned char", 1}, {"signed char", 1},
                 {"c10::BFloat16", 2}, {"c10::Half", 2}, {"at::native::CUDAFunctorOnSelf_add<float>", 8}};
    char filled[200];
    int pointers;
    if (sscanf(type, "std::array<char*, %d", &pointers) == 1)
        return (Parameter){8 * pointers};
    if (sscanf(type, "at::native::FillFunctor<%199[^>]>", filled) == 1)
        type = filled;
    for (size_t i = 0; i < sizeof(TYPES) / sizeof(*TYPES); i++)
        if (strcmp(type, TYPES[i].name) == 0)
            return (Parameter){TYPES[i].size};
    size_t length = strlen(type);
    if (type[length - 1] == '*' || (length > 12 && strcmp(type + length - 12, "__restrict__") == 0))
        return (Parameter){8};
    /* Of a reduction, what it reads and writes comes first. */
    int is_reduction = strncmp(type, "at::native::ReduceOp", 20) == 0;
    return (Parameter){is_reduction ? 1536 : strstr(type, "TensorListMetadata") ? 2048 : 32, 1};
}

/* Read the parameters from the name: "void f<...>(int, g, std::array<char*, 1ul>)". */
static void read_parameters(Function *f) {
    extern char *__cxa_demangle(const char *, char *, size_t *, int *);
    int status, depth = 1;
    char *name = __cxa_demangle(f->name, NULL, NULL, &status), *end = name ? strrchr(name, ')') : NULL;
    f->name = name ? name : f->name, f->count = 0, f->parameters = calloc(MAX_PARAMETERS, sizeof(Parameter));
    if (end == NULL)
        return;
    char *at = end, *text = strndup(name, end - name), *from;
    while (depth && at-- > name) /* to the parenthesis that this one closes */
        depth += *at == ')' ? 1 : *at == '(' ? -1 : 0;
    at = from = text + (at + 1 - name);
    for (depth = 0; f->count < MAX_PARAMETERS && from < text + (end - name); at++) {
        depth += *at && strchr("<({[", *at) ? 1 : *at && strchr(">)}]", *at) ? -1 : 0;
        if (*at && (*at != ',' || depth))
            continue;
        *at = 0;
        f->parameters[f->count++] = parameter_of(from + strspn(from, " "));
        from = at + 1;
    }
    free(text);
}

static Function *function_of(const void *host) {
    LOCKED;
    struct Known *entry = *bucket(host);
    while (entry != NULL && entry->host != host)
        entry = entry->next;
    if (entry != NULL && entry->function.count < 0)
        read_parameters(&entry->function);
    return entry ? &entry->function : NULL;
}

API(cudaLaunchKernel, const void *host, dim3 grid, dim3 block, void **args, size_t shared, cudaStream_t stream) {
    Function *f = function_of(host);
    return set(f ? pretended_launch(stream, f, grid, block, shared, args) : cudaErrorInvalidDeviceFunction);
}
API(__cudaLaunchKernel, cudaKernel_t f, dim3 grid, dim3 block, void **args, size_t shared, cudaStream_t stream) {
    return cudaLaunchKernel(f, grid, block, args, shared, stream);
}
API(cudaLaunchKernelExC, const cudaLaunchConfig_t *c, const void *f, void **args) {
    return cudaLaunchKernel(f, c->gridDim, c->blockDim, args, c->dynamicSmemBytes, c->stream);
}
API(__cudaGetKernel, cudaKernel_t *kernel, const void *host) {
    *kernel = (cudaKernel_t)host;
    return set(function_of(host) ? cudaSuccess : cudaErrorInvalidDeviceFunction);
}

static __thread struct Configuration {
    dim3 grid, block;
    size_t shared;
    struct CUstream_st *stream;
} pushed;

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, struct CUstream_st *stream) {
    pushed = (struct Configuration){grid, block, shared, stream};
    return 0;
}
API(__cudaPopCallConfiguration, dim3 *grid, dim3 *block, size_t *shared, void *stream) {
    *grid = pushed.grid, *block = pushed.block, *shared = pushed.shared, *(cudaStream_t *)stream = pushed.stream;
    return cudaSuccess;
}

API(cudaFuncGetAttributes, struct cudaFuncAttributes *out, const void *host) {
    *out = (struct cudaFuncAttributes){.maxThreadsPerBlock = 1024, .numRegs = 64, .ptxVersion = 90, .binaryVersion = 90,
                                       .maxDynamicSharedSizeBytes = DEFAULT_SHARED};
    return set(function_of(host) ? cudaSuccess : cudaErrorInvalidDeviceFunction);
}
API(cudaFuncSetAttribute, const void *host, enum cudaFuncAttribute attribute, int value) {
    Function *f = function_of(host);
    int is_limit = attribute == cudaFuncAttributeMaxDynamicSharedMemorySize;
    return set(f == NULL ? cudaErrorInvalidDeviceFunction : is_limit ? pretended_limit_shared(f, value) : cudaSuccess);
}
API(cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags, int *count, const void *f, int block, size_t shared,
    unsigned flags) {
    return *count = block > 512 ? 1 : 2, cudaSuccess;
}
API(cudaOccupancyMaxActiveBlocksPerMultiprocessor, int *count, const void *f, int block, size_t shared) {
    return *count = block > 512 ? 1 : 2, cudaSuccess;
}
