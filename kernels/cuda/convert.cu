// Accumulation and casts: streams of elements, eight a thread where the addresses allow it.
#include "kernels/cuda/elements.cuh"
#include "kernels/cuda/kernels.h"

namespace spillway::cuda {
namespace {

constexpr unsigned kThreads = 256;
constexpr unsigned kPack = 8;

template <typename To, typename From>
__global__ void cast_elements(typename To::Element* to, const typename From::Element* from, std::size_t count,
                              std::size_t packs) {
  const std::size_t i = std::size_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i < packs) {
    const auto in = load_pack<kPack>(from + i * kPack);
    Pack<typename To::Element, kPack> out;
#pragma unroll
    for (unsigned k = 0; k < kPack; ++k) out.at[k] = To::narrow(From::widen(in.at[k]));
    store_pack(to + i * kPack, out);
  }
  const std::size_t single = packs * kPack + i;
  if (single < count) to[single] = To::narrow(From::widen(from[single]));
}

template <typename From, bool kFirst>
__global__ void add_elements(float* sum, const typename From::Element* from, std::size_t count, std::size_t packs) {
  const std::size_t i = std::size_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i < packs) {
    const auto in = load_pack<kPack>(from + i * kPack);
    Pack<float, kPack> out;
    if constexpr (!kFirst) out = load_pack<kPack>(sum + i * kPack);
#pragma unroll
    for (unsigned k = 0; k < kPack; ++k) {
      const float x = From::widen(in.at[k]);
      out.at[k] = kFirst ? x : __fadd_rn(out.at[k], x);
    }
    store_pack(sum + i * kPack, out);
  }
  const std::size_t single = packs * kPack + i;
  if (single < count) {
    const float x = From::widen(from[single]);
    sum[single] = kFirst ? x : __fadd_rn(sum[single], x);
  }
}

// How many packs of `count` elements go as one access each: all whole ones, or none.
template <typename A, typename B>
std::size_t packs_of(const A* a, const B* b, std::size_t count) {
  return packs_align<kPack>(a) && packs_align<kPack>(b) ? count / kPack : 0;
}
// Each thread takes one pack, and one of the elements that are left.
unsigned grid_for(std::size_t count, std::size_t packs) {
  return blocks_for(std::max(packs, count - packs * kPack), kThreads);
}

}  // namespace

void accumulate(float* accumulator, const void* from, DType from_type, std::size_t count, bool first,
                cudaStream_t stream) {
  if (count == 0) return;
  for_type(from_type, [&]<typename From>(From) {
    const auto* in = static_cast<const typename From::Element*>(from);
    const std::size_t packs = packs_of(accumulator, in, count);
    const unsigned grid = grid_for(count, packs);
    if (first) {
      add_elements<From, true><<<grid, kThreads, 0, stream>>>(accumulator, in, count, packs);
    } else {
      add_elements<From, false><<<grid, kThreads, 0, stream>>>(accumulator, in, count, packs);
    }
  });
  check(cudaGetLastError(), "accumulating a gradient");
}

void cast(void* to, DType to_type, const void* from, DType from_type, std::size_t count, cudaStream_t stream) {
  if (count == 0) return;
  if (to_type == from_type) {
    return check(cudaMemcpyAsync(to, from, count * size_of(to_type), cudaMemcpyDeviceToDevice, stream), "a copy");
  }
  for_type(to_type, [&]<typename To>(To) {
    for_type(from_type, [&]<typename From>(From) {
      auto* out = static_cast<typename To::Element*>(to);
      const auto* in = static_cast<const typename From::Element*>(from);
      const std::size_t packs = packs_of(out, in, count);
      cast_elements<To, From><<<grid_for(count, packs), kThreads, 0, stream>>>(out, in, count, packs);
    });
  });
  check(cudaGetLastError(), "a cast");
}

}  // namespace spillway::cuda
