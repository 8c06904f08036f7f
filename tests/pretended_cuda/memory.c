/* Memory of the device, and pinned memory of the host. No address is given out twice, so that stale ones are seen. */
#define _GNU_SOURCE
#include "pretended.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { GRANULE = 2 << 20, GRANULES = 4 << 20 };
typedef struct Region {
    char *start;
    size_t used;             /* granules that were given out, ever */
    uint32_t left[GRANULES]; /* granules from here to the end of the allocation; 0: none */
} Region;
static Region device = {.start = (char *)0x200000000000}, pinned = {.start = (char *)0x300000000000};

static size_t total(void) {
    const char *gib = getenv("PRETENDED_GIB");
    return (size_t)((gib ? atof(gib) : 139.8) * (1 << 30));
}

static void *reserve(char *address, size_t size, int flags) {
    return mmap(address, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | flags, -1, 0);
}

static int is_in(const Region *region, const void *address) {
    return (char *)address >= region->start && (char *)address < region->start + (size_t)GRANULE * GRANULES;
}
int is_device(const void *address) { return is_in(&device, address); }

int is_mapped(const void *address, size_t size) {
    size_t offset = (char *)address - device.start, granule = offset / GRANULE;
    return !is_device(address) || size == 0 || offset + size <= (granule + device.left[granule]) * GRANULE;
}

static void *take(Region *region, size_t count) {
    char *address = region->start + region->used * GRANULE;
    if (region->used == 0 && reserve(address, (size_t)GRANULE * GRANULES, MAP_FIXED_NOREPLACE) != address)
        abort();
    if (region->used + count > GRANULES || mprotect(address, count * GRANULE, PROT_READ | PROT_WRITE))
        return NULL; /* the process has a limit */
    for (size_t i = count; i > 0; i--)
        region->left[region->used++] = i;
    return address;
}

/* Return how many granules an allocation had; 0 if none begins here. */
static size_t give_back(Region *region, void *address) {
    size_t first = ((char *)address - region->start) / GRANULE;
    if (!is_in(region, address) || (uintptr_t)address % GRANULE)
        return 0;
    size_t count = region->left[first];
    if (count == 0 || (first && region->left[first - 1] == count + 1))
        return 0;
    reserve(address, count * GRANULE, MAP_FIXED);
    memset(&region->left[first], 0, count * sizeof(*region->left));
    return count;
}

API(cudaMalloc, void **address, size_t size) {
    LOCKED;
    size_t count = (size + GRANULE - 1) / GRANULE;
    int error = pretended_forbidden("cudaMalloc");
    *address = NULL;
    if (error == 0 && live.bytes + count * GRANULE > total())
        error = cudaErrorMemoryAllocation;
    if (error == 0 && count && (*address = take(&device, count)) == NULL)
        error = cudaErrorMemoryAllocation;
    if (*address != NULL)
        live.bytes += count * GRANULE, live.ranges++;
    pretended_note("malloc", "'p':%lu,'n':%zu,'error':%d", (uintptr_t)*address, size, error);
    return set(error);
}

API(cudaFree, void *address) {
    LOCKED;
    int error = address ? pretended_forbidden("cudaFree") : cudaSuccess;
    if (address == NULL || error)
        return set(error);
    size_t count = give_back(&device, address);
    live.bytes -= count * GRANULE, live.ranges -= count != 0;
    pretended_note("free", "'p':%lu", (uintptr_t)address);
    return set(count ? cudaSuccess : illegal("cudaFree of no allocation", cudaErrorInvalidValue));
}

API(cudaMemGetInfo, size_t *free_bytes, size_t *all) {
    *all = total(), *free_bytes = *all - live.bytes;
    return cudaSuccess;
}

API(cudaHostAlloc, void **address, size_t size, unsigned flags) {
    LOCKED;
    int error = pretended_forbidden("cudaHostAlloc");
    if (error == 0 && (*address = take(&pinned, size / GRANULE + 1)) == NULL)
        error = cudaErrorMemoryAllocation;
    return set(error);
}

API(cudaFreeHost, void *address) {
    LOCKED;
    int error = pretended_forbidden("cudaFreeHost");
    if (error == 0 && give_back(&pinned, address) == 0)
        error = illegal("cudaFreeHost of no allocation", cudaErrorInvalidValue);
    return set(error);
}

API(cudaPointerGetAttributes, struct cudaPointerAttributes *out, const void *address) {
    *out = (struct cudaPointerAttributes){.type = cudaMemoryTypeUnregistered, .device = cudaInvalidDeviceId};
    if (is_device(address))
        *out = (struct cudaPointerAttributes){.type = cudaMemoryTypeDevice, .devicePointer = (void *)address};
    else if (is_in(&pinned, address))
        *out = (struct cudaPointerAttributes){.type = cudaMemoryTypeHost, .hostPointer = (void *)address};
    return cudaSuccess;
}
