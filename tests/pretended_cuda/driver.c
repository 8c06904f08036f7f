/* The driver: what Triton calls, and what PyTorch asks for by name. */
#include "pretended.h"

#include <cuda.h>
#include <elf.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int context;

/* ---- device and memory: as in the runtime, which has the same numbers ---- */

CUresult cuDriverGetVersion(int *version) { return cudaDriverGetVersion(version); }
CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    return *device = ordinal, ordinal ? CUDA_ERROR_INVALID_DEVICE : CUDA_SUCCESS;
}
CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    return cudaDeviceGetAttribute(value, (enum cudaDeviceAttr)attribute, device);
}
CUresult cuCtxGetCurrent(CUcontext *out) {
    return *out = pretended_has_context ? (CUcontext)&context : NULL, CUDA_SUCCESS;
}
CUresult cuCtxSetCurrent(CUcontext in) { return pretended_has_context = in != NULL, CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *out, CUdevice device) { return *out = (CUcontext)&context, CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *is_active) {
    return *flags = 0, *is_active = 1, CUDA_SUCCESS;
}
CUresult cuGetErrorString(CUresult error, const char **text) {
    return *text = cudaGetErrorString((cudaError_t)error), CUDA_SUCCESS;
}

CUresult cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr pointer) {
    struct cudaPointerAttributes known;
    cudaPointerGetAttributes(&known, (void *)pointer);
    if (known.type == cudaMemoryTypeUnregistered)
        return CUDA_ERROR_INVALID_VALUE;
    if (attribute == CU_POINTER_ATTRIBUTE_DEVICE_POINTER)
        *(CUdeviceptr *)data = pointer;
    else if (attribute == CU_POINTER_ATTRIBUTE_MEMORY_TYPE)
        *(unsigned *)data = known.type == cudaMemoryTypeDevice ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
    else
        *(int *)data = 0;
    return CUDA_SUCCESS;
}
CUresult cuPointerGetAttributes(unsigned count, CUpointer_attribute *attributes, void **data, CUdeviceptr pointer) {
    for (unsigned i = 0; i < count; i++)
        if (cuPointerGetAttribute(data[i], attributes[i], pointer))
            memset(data[i], 0, 4);
    return CUDA_SUCCESS;
}
CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address,
                                const cuuint64_t *sizes, const cuuint64_t *strides, const cuuint32_t *box,
                                const cuuint32_t *steps, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
    *map = (CUtensorMap){{(uintptr_t)address}}; /* so that the address is found among the parameters */
    return (uintptr_t)address % 16 ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

/* ---- kernels ---- */

/* Read the sizes of a kernel's parameters from a cubin: attributes of its section .nv.info.<name>. */
static void read_parameters(Function *f, const char *cubin) {
    enum { KPARAM_INFO = 0x17, HAS_SIZE = 4, MOST = 1024 };
    const Elf64_Ehdr *header = (const Elf64_Ehdr *)cubin;
    const Elf64_Shdr *sections = (const Elf64_Shdr *)(cubin + header->e_shoff);
    const char *names = cubin + sections[header->e_shstrndx].sh_offset;
    f->parameters = calloc(MOST, sizeof(Parameter));
    for (int i = 0; i < header->e_shnum; i++) {
        const char *name = names + sections[i].sh_name;
        if (strncmp(name, ".nv.info.", 9) || strcmp(name + 9, f->name))
            continue;
        const unsigned char *at = (const unsigned char *)cubin + sections[i].sh_offset, *end = at + sections[i].sh_size;
        for (int size; at + 4 <= end; at += 4 + size) {
            size = at[0] == HAS_SIZE ? at[2] | at[3] << 8 : 0;
            int ordinal = at[8] | at[9] << 8;
            if (at[0] != HAS_SIZE || at[1] != KPARAM_INFO || size < 12 || ordinal >= MOST)
                continue;
            unsigned packed;
            memcpy(&packed, at + 12, 4);
            f->parameters[ordinal].size = packed >> 18;
            f->count = ordinal + 1 > f->count ? ordinal + 1 : f->count;
        }
    }
}

CUresult cuModuleLoadData(CUmodule *module, const void *image) {
    const Elf64_Ehdr *header = image;
    int error = pretended_forbidden("cuModuleLoadData");
    if (error)
        return error;
    if (memcmp(image, ELFMAG, SELFMAG)) {
        pretended_note("misuse", "'what':'cuModuleLoadData of no cubin'");
        return CUDA_ERROR_INVALID_IMAGE;
    }
    size_t sections = header->e_shoff + (size_t)header->e_shnum * header->e_shentsize;
    size_t programs = header->e_phoff + (size_t)header->e_phnum * header->e_phentsize;
    size_t size = programs > sections ? programs : sections;
    *module = memcpy(malloc(size), image, size); /* a caller may free the image */
    return CUDA_SUCCESS;
}
CUresult cuModuleLoad(CUmodule *module, const char *path) {
    static char image[64 << 20];
    FILE *file = fopen(path, "rb");
    if (file == NULL)
        return CUDA_ERROR_FILE_NOT_FOUND;
    size_t size = fread(image, 1, sizeof(image), file);
    fclose(file);
    return size ? cuModuleLoadData(module, image) : CUDA_ERROR_INVALID_IMAGE;
}
CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
    Function *f = calloc(1, sizeof(Function));
    f->name = strdup(name), f->shared_limit = DEFAULT_SHARED;
    read_parameters(f, (const char *)module);
    return *function = f, CUDA_SUCCESS;
}
CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
    *value = attribute == CU_FUNC_ATTRIBUTE_NUM_REGS                        ? 128
             : attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK         ? 1024
             : attribute == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES ? function->shared_limit
                                                                            : 0;
    return CUDA_SUCCESS;
}
CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) {
    int is_limit = attribute == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
    return is_limit ? pretended_limit_shared(function, value) : cudaSuccess;
}
CUresult cuOccupancyMaxActiveClusters(int *count, CUfunction function, const CUlaunchConfig *config) {
    return *count = 132, CUDA_SUCCESS;
}
CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *count, CUfunction function, int block, size_t shared) {
    return *count = 2, CUDA_SUCCESS;
}
CUresult cuLaunchKernel(CUfunction function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                        unsigned bz, unsigned shared, CUstream stream, void **params, void **extra) {
    return pretended_launch(stream, function, (dim3){gx, gy, gz}, (dim3){bx, by, bz}, shared, params);
}
CUresult cuLaunchKernelEx(const CUlaunchConfig *c, CUfunction function, void **params, void **extra) {
    return cuLaunchKernel(function, c->gridDimX, c->gridDimY, c->gridDimZ, c->blockDimX, c->blockDimY, c->blockDimZ,
                          c->sharedMemBytes, c->hStream, params, extra);
}
