// Writes what PyTorch's caching allocator gives out and takes back into the trace.
#include <c10/cuda/CUDACachingAllocator.h>

extern "C" void pretended_note(const char *event, const char *format, ...);

extern "C" void pretended_track() {
  using c10::cuda::CUDACachingAllocator::TraceEntry;
  c10::cuda::CUDACachingAllocator::attachAllocatorTraceTracker([](const TraceEntry &entry) {
    const char *event = entry.action_ == TraceEntry::ALLOC            ? "alloc"
                        : entry.action_ == TraceEntry::FREE_REQUESTED ? "release"
                        : entry.action_ == TraceEntry::FREE_COMPLETED ? "freed"
                                                                      : nullptr;
    if (event != nullptr)
      pretended_note(event, "'p':%zu,'n':%zu,'pool':[%llu,%llu]", entry.addr_, entry.size_,
                     (unsigned long long)entry.mempool_.first, (unsigned long long)entry.mempool_.second);
  });
}
