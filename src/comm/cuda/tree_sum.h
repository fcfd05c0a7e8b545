// Sums in a tree over ranks (src/comm/sum_tree.h) on a GPU, with the bits of the host's; private to src/comm/cuda.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "spillway/dtype.h"

namespace spillway::cuda {

struct TreeParts {
  float* own = nullptr;  // becomes the sum
  // Those of the other ranks as they travelled, in their order, `stride` values from one to the next.
  const void* received = nullptr;
  DType wire = DType::kFloat32;  // to which the own ones are rounded as well
  std::size_t stride = 0;
  std::uint32_t rank = 0, ranks = 1;
};

inline constexpr std::uint32_t kMostTreeParts = 1u << 16;

// These enqueue. They throw kDevice when a launch is refused.
void sum_in_tree(const TreeParts& parts, std::size_t count, cudaStream_t stream);
// to[i] = from[i], rounded to `wire`, 16 bits.
void narrow(const float* from, void* to, DType wire, std::size_t count, cudaStream_t stream);

}  // namespace spillway::cuda
