// The engine's kernels on the GPU, with the bits of the CPU's; private to kernels/cuda. Each enqueues on the stream and
// allocates nothing. Arguments as in kernels/device.h. Errors: kDevice when a launch is refused.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "kernels/norm.h"
#include "spillway/dtype.h"
#include "spillway/optimizer.h"

namespace spillway::cuda {

void accumulate(float* accumulator, const void* from, DType from_type, std::size_t count, bool first,
                cudaStream_t stream);
void cast(void* to, DType to_type, const void* from, DType from_type, std::size_t count, cudaStream_t stream);
void leaf_sums(const void* data, DType type, std::size_t count, double* leaves, cudaStream_t stream);
void add_leaves(const double* leaves, std::size_t count, NormResult* result, cudaStream_t stream);
void update(const OptimizerTile& tile, const OptimizerScalars& scalars, std::size_t begin, std::size_t end,
            std::uint32_t* finite, cudaStream_t stream);
// What update() calls for moments in bf16 and int8.
void update_reduced(const OptimizerTile& tile, const OptimizerScalars& scalars, std::size_t begin, std::size_t end,
                    std::uint32_t* finite, cudaStream_t stream);

}  // namespace spillway::cuda
