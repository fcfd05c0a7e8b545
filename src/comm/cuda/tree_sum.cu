// A thread adds up four values, or one of those that are left, of all parts. As one counts in binary: pending[h] is the
// sum of 2^h parts that waits for its right neighbour. Loops are unrolled, so that pending sums stay in registers.
#include "kernels/cuda/check.h"
#include "kernels/cuda/elements.cuh"
#include "src/comm/cuda/tree_sum.h"

namespace spillway::cuda {
namespace {

constexpr unsigned kThreads = 256, kPack = 4;

template <unsigned N>
__device__ Pack<float, N> add(const Pack<float, N>& left, const Pack<float, N>& right) {
  Pack<float, N> sum;
#pragma unroll
  for (unsigned k = 0; k < N; ++k) sum.at[k] = __fadd_rn(left.at[k], right.at[k]);
  return sum;
}

// A rank's part, as it travelled or would have.
template <typename Type, unsigned N>
__device__ Pack<float, N> part_of(const TreeParts& parts, std::uint32_t rank, std::size_t at) {
  using Element = typename Type::Element;
  Pack<float, N> part;
  if (rank == parts.rank) {
    part = load_pack<N>(parts.own + at);
#pragma unroll
    for (unsigned k = 0; k < N; ++k) part.at[k] = Type::widen(Type::narrow(part.at[k]));
  } else {
    const Element* from = static_cast<const Element*>(parts.received) + (rank - (rank > parts.rank)) * parts.stride;
    const Pack<Element, N> come = load_pack<N>(from + at);
#pragma unroll
    for (unsigned k = 0; k < N; ++k) part.at[k] = Type::widen(come.at[k]);
  }
  return part;
}

template <typename Type, unsigned kHeights, unsigned N>
__device__ void add_parts(const TreeParts& parts, std::size_t at) {
  Pack<float, N> pending[kHeights];
  for (std::uint32_t come = 0; come < parts.ranks; ++come) {
    Pack<float, N> sum = part_of<Type, N>(parts, come, at);
    bool carries = true;
#pragma unroll
    for (unsigned h = 0; h < kHeights; ++h) {
      if (!carries) continue;
      if ((come >> h & 1) == 0) {
        pending[h] = sum;
        carries = false;
      } else {
        sum = add(pending[h], sum);
      }
    }
  }
  Pack<float, N> total;
  bool any = false;
#pragma unroll
  for (unsigned h = 0; h < kHeights; ++h) {
    if ((parts.ranks >> h & 1) == 0) continue;
    total = any ? add(pending[h], total) : pending[h];
    any = true;
  }
  store_pack(parts.own + at, total);
}

template <typename Type, unsigned kHeights>
__global__ void add_in_tree(TreeParts parts, std::size_t count, std::size_t packs) {
  const std::size_t i = std::size_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i < packs) add_parts<Type, kHeights, kPack>(parts, i * kPack);
  const std::size_t single = packs * kPack + i;
  if (single < count) add_parts<Type, kHeights, 1>(parts, single);
}

template <typename Type>
__global__ void narrow_each(const float* from, typename Type::Element* to, std::size_t count) {
  const std::size_t i = std::size_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i < count) to[i] = Type::narrow(from[i]);
}

}  // namespace

void sum_in_tree(const TreeParts& parts, std::size_t count, cudaStream_t stream) {
  if (count == 0 || parts.ranks == 1) return;
  constexpr unsigned kOfEight = 4, kOfMost = 17;  // bits of a number of ranks
  for_type(parts.wire, [&](auto type) {
    using Type = decltype(type);
    const auto* received = static_cast<const typename Type::Element*>(parts.received);
    const bool aligned = packs_align<kPack>(parts.own) && packs_align<kPack>(received) && parts.stride % kPack == 0;
    const std::size_t packs = aligned ? count / kPack : 0;
    const unsigned grid = blocks_for(std::max(packs, count - packs * kPack), kThreads);
    if (parts.ranks <= 8) {
      add_in_tree<Type, kOfEight><<<grid, kThreads, 0, stream>>>(parts, count, packs);
    } else {
      add_in_tree<Type, kOfMost><<<grid, kThreads, 0, stream>>>(parts, count, packs);
    }
  });
  check(cudaGetLastError(), "adding up gradients of all ranks");
}

void narrow(const float* from, void* to, DType wire, std::size_t count, cudaStream_t stream) {
  if (count == 0) return;
  for_type(wire, [&](auto type) {
    using Type = decltype(type);
    narrow_each<Type>
        <<<blocks_for(count, kThreads), kThreads, 0, stream>>>(from, static_cast<typename Type::Element*>(to), count);
  });
  check(cudaGetLastError(), "rounding gradients for other ranks");
}

}  // namespace spillway::cuda
