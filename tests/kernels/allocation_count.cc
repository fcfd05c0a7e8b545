#include "tests/kernels/allocation_count.h"

#include <atomic>
#include <cstdlib>
#include <new>

namespace {
std::atomic<std::uint64_t> allocations = 0;
}  // namespace

// malloc still does the work, so the sanitizers keep their eye on it. In a file of its own: inlined beside a `new`
// expression, g++ takes the free() for a mistake (-Wmismatched-new-delete).
void* operator new(std::size_t bytes) {
  allocations.fetch_add(1, std::memory_order_relaxed);
  if (void* memory = std::malloc(bytes)) return memory;
  throw std::bad_alloc();
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

std::uint64_t spillway::allocation_count() { return allocations; }
