// The optimizers in the order of spillway/optimizer.h, each line one rounding: four elements a thread, so that a warp's
// access to any array is without gaps, every array read once and written once.
#include "kernels/cuda/following.cuh"
#include "kernels/cuda/kernels.h"
#include "kernels/cuda/optimizer.cuh"

namespace spillway::cuda {
namespace {

constexpr unsigned kThreads = 256;
constexpr unsigned kPack = 4;

// kCount elements from `i` on: all of them are there, and aligned for one access each array.
template <typename Type, OptimizerKind kKind, unsigned kCount>
__device__ bool update_pack(const OptimizerTile& tile, const OptimizerScalars& s, std::size_t i) {
  Weights<Type, kCount> weights;
  weights.load(tile, i, kCount, true);
  Pack<float, kCount> m{}, v{};
  if constexpr (has_exp_avg(kKind)) m = load_pack<kCount>(tile.exp_avg + i);
  if constexpr (has_exp_avg_sq(kKind)) v = load_pack<kCount>(tile.exp_avg_sq + i);
  bool finite = true;
#pragma unroll
  for (unsigned k = 0; k < kCount; ++k) {
    Element e{weights.at(k), m.at[k], v.at[k], Type::widen(weights.gradient.at[k])};
    finite &= step<kKind>(e, s);
    m.at[k] = e.exp_avg;
    v.at[k] = e.exp_avg_sq;
    finite &= weights.put(k, e.weight);
  }
  weights.store(tile, i, kCount, true);
  if constexpr (has_exp_avg(kKind)) store_pack(tile.exp_avg + i, m);
  if constexpr (has_exp_avg_sq(kKind)) store_pack(tile.exp_avg_sq + i, v);
  return finite;
}

// Each thread takes one of `packs` packs from `begin` on, and one of the elements after them.
template <typename Type, OptimizerKind kKind>
__global__ void update_elements(const OptimizerTile tile, const OptimizerScalars scalars, std::size_t begin,
                                std::size_t packs, std::size_t end, std::uint32_t* finite) {
  follow_on();
  const std::size_t i = std::size_t{blockIdx.x} * kThreads + threadIdx.x;
  bool good = true;
  if (i < packs) good &= update_pack<Type, kKind, kPack>(tile, scalars, begin + i * kPack);
  const std::size_t single = begin + packs * kPack + i;
  if (single < end) good &= update_pack<Type, kKind, 1>(tile, scalars, single);
  if (!good) *finite = 0;
}

template <typename Type, OptimizerKind kKind>
void launch(const OptimizerTile& tile, const OptimizerScalars& scalars, std::size_t begin, std::size_t end,
            std::uint32_t* finite, cudaStream_t stream) {
  using Stored = typename Type::Element;
  const auto aligned = [begin](const auto* array) { return array == nullptr || packs_align<kPack>(array + begin); };
  const bool packed = aligned(static_cast<const Stored*>(tile.weight)) &&
                      aligned(static_cast<const Stored*>(tile.gradient)) && aligned(tile.residual) &&
                      aligned(tile.master) && aligned(tile.exp_avg) && aligned(tile.exp_avg_sq);
  const std::size_t count = end - begin, packs = packed ? count / kPack : 0;
  const unsigned grid = blocks_for(std::max(packs, count - packs * kPack), kThreads);
  launch_following("the update of a tile", update_elements<Type, kKind>, grid, kThreads, stream, tile, scalars, begin,
                   packs, end, finite);
}

}  // namespace

void update(const OptimizerTile& tile, const OptimizerScalars& scalars, std::size_t begin, std::size_t end,
            std::uint32_t* finite, cudaStream_t stream) {
  if (begin == end) return;
  if (tile.reduced.format != MomentFormat::kFloat32) return update_reduced(tile, scalars, begin, end, finite, stream);
  for_type(tile.type, [&]<typename Type>(Type) {
    switch (scalars.kind) {
      case OptimizerKind::kAdam: return launch<Type, OptimizerKind::kAdam>(tile, scalars, begin, end, finite, stream);
      case OptimizerKind::kAdagrad:
        return launch<Type, OptimizerKind::kAdagrad>(tile, scalars, begin, end, finite, stream);
      case OptimizerKind::kLion: return launch<Type, OptimizerKind::kLion>(tile, scalars, begin, end, finite, stream);
      case OptimizerKind::kSgd: return launch<Type, OptimizerKind::kSgd>(tile, scalars, begin, end, finite, stream);
    }
  });
}

}  // namespace spillway::cuda
