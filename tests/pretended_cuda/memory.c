/* Memory of the device, and pinned memory of the host. */
#define _GNU_SOURCE
#include "pretended.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

typedef struct Range {
    struct Range *next;
    char *base;
    size_t size;
} Range;

#define REGION ((char *)0x200000000000) /* device_trace.py has it, too */
#define REGION_END (REGION + ((size_t)8 << 40))
enum { GRANULE = 2 << 20 };
static unsigned owner[(8ul << 40) / GRANULE]; /* of a granule: the number of its range, or 0. Launches look it up */
static char *unused; /* no address is given out twice, so that a stale pointer is seen */
static Range *device, *pinned;

static size_t total(void) {
    const char *gib = getenv("PRETENDED_GIB");
    return (size_t)((gib ? atof(gib) : 139.8) * (1 << 30));
}

static void *reserve(char *address, size_t size, int flags) {
    return mmap(address, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | flags, -1, 0);
}

static Range **find(Range **at, const void *address) {
    while (*at != NULL && ((char *)address < (*at)->base || (char *)address >= (*at)->base + (*at)->size))
        at = &(*at)->next;
    return at;
}

static void *add(Range **ranges, void *base, size_t size) {
    Range *range = malloc(sizeof(Range));
    *range = (Range){*ranges, base, size};
    *ranges = range;
    return base;
}

/* Return the size of the range that begins at an address, and forget it; 0 if there is none. */
static size_t forget(Range **ranges, const void *base) {
    Range **at = find(ranges, base), *range = *at;
    if (range == NULL || range->base != base)
        return 0;
    size_t size = range->size;
    *at = range->next;
    free(range);
    return size;
}

static unsigned *owner_of(const void *address) { return owner + ((char *)address - REGION) / GRANULE; }
static void own(const void *base, size_t size, unsigned number) {
    for (unsigned *at = owner_of(base); at < owner_of((char *)base + size); at++)
        *at = number;
}

int is_device(const void *address) { return (char *)address >= REGION && (char *)address < REGION_END; }

int is_mapped(const void *address, size_t size) {
    if (!is_device(address) || size == 0)
        return 1;
    const char *last = (char *)address + size - 1;
    return *owner_of(address) && is_device(last) && *owner_of(address) == *owner_of(last);
}

API(cudaMalloc, void **address, size_t size) {
    static unsigned numbers;
    LOCKED;
    size_t rounded = (size + GRANULE - 1) / GRANULE * GRANULE;
    int error = pretended_forbidden("cudaMalloc");
    *address = NULL;
    if (unused == NULL && (unused = reserve(REGION, REGION_END - REGION, MAP_FIXED_NOREPLACE)) == MAP_FAILED)
        abort();
    if (error == 0 && size) {
        if (live.bytes + rounded > total() || unused + rounded > REGION_END ||
            mprotect(unused, rounded, PROT_READ | PROT_WRITE)) { /* the process has a limit */
            error = cudaErrorMemoryAllocation;
        } else {
            *address = add(&device, unused, rounded);
            own(unused, rounded, ++numbers);
            unused += rounded, live.bytes += rounded, live.ranges++;
        }
    }
    pretended_note("malloc", "'p':%lu,'n':%zu,'error':%d", (uintptr_t)*address, size, error);
    return set(error);
}

API(cudaFree, void *address) {
    LOCKED;
    int error = address == NULL ? 0 : pretended_forbidden("cudaFree");
    if (address != NULL && error == 0) {
        size_t size = forget(&device, address);
        if (size)
            reserve(address, size, MAP_FIXED), own(address, size, 0), live.bytes -= size, live.ranges--;
        else
            error = cudaErrorInvalidValue;
    }
    pretended_note("free", "'p':%lu,'error':%d", (uintptr_t)address, error);
    return set(error);
}

API(cudaMemGetInfo, size_t *free_bytes, size_t *all) {
    *all = total(), *free_bytes = *all - live.bytes;
    return cudaSuccess;
}

int pretended_range(const void *address, void **base, size_t *size) {
    LOCKED;
    Range *range = *find(&device, address);
    if (range != NULL && base)
        *base = range->base;
    if (range != NULL && size)
        *size = range->size;
    return range == NULL ? cudaErrorInvalidValue : cudaSuccess;
}

API(cudaHostAlloc, void **address, size_t size, unsigned flags) {
    LOCKED;
    int error = pretended_forbidden("cudaHostAlloc");
    if (error == 0 && posix_memalign(address, 4096, size ? size : 1))
        error = cudaErrorMemoryAllocation;
    if (error == 0)
        add(&pinned, *address, size ? size : 1);
    return set(error);
}

API(cudaHostRegister, void *address, size_t size, unsigned flags) {
    LOCKED;
    int error = pretended_forbidden("cudaHostRegister");
    if (error == 0)
        add(&pinned, address, size ? size : 1);
    return set(error);
}

static int unpin(void *address, const char *what) {
    LOCKED;
    int error = pretended_forbidden(what);
    return error ? error : forget(&pinned, address) ? cudaSuccess : cudaErrorInvalidValue;
}

API(cudaHostUnregister, void *address) { return set(unpin(address, "cudaHostUnregister")); }

API(cudaFreeHost, void *address) {
    int error = unpin(address, "cudaFreeHost");
    if (error == 0)
        free(address);
    return set(error);
}

API(cudaPointerGetAttributes, struct cudaPointerAttributes *out, const void *address) {
    LOCKED;
    *out = (struct cudaPointerAttributes){.type = cudaMemoryTypeUnregistered, .device = cudaInvalidDeviceId};
    if (is_device(address))
        *out = (struct cudaPointerAttributes){.type = cudaMemoryTypeDevice, .devicePointer = (void *)address};
    else if (*find(&pinned, address) != NULL)
        *out = (struct cudaPointerAttributes){.type = cudaMemoryTypeHost, .hostPointer = (void *)address};
    return cudaSuccess;
}
