// The optimizers in the order of spillway/optimizer.h, each line one rounding: four elements a thread, so that a warp's
// access to any array is without gaps, every array read once and written once.
#include "kernels/cuda/elements.cuh"
#include "kernels/cuda/following.cuh"
#include "kernels/cuda/kernels.h"

namespace spillway::cuda {
namespace {

constexpr unsigned kThreads = 256;
constexpr unsigned kPack = 4;

struct Element {
  float weight, exp_avg, exp_avg_sq, gradient;
};

template <OptimizerKind kKind>
__device__ float direction(Element& e, const OptimizerScalars& s, float g) {
  if constexpr (kKind == OptimizerKind::kAdam) {
    e.exp_avg = __fmaf_rn(s.beta1, e.exp_avg, __fmul_rn(s.one_minus_beta1, g));
    e.exp_avg_sq = __fmaf_rn(s.beta2, e.exp_avg_sq, __fmul_rn(__fmul_rn(s.one_minus_beta2, g), g));
    return __fdiv_rn(e.exp_avg, __fmaf_rn(__fsqrt_rn(e.exp_avg_sq), s.inv_sqrt_bias2, s.epsilon));
  } else if constexpr (kKind == OptimizerKind::kAdagrad) {
    e.exp_avg_sq = __fmaf_rn(g, g, e.exp_avg_sq);
    return __fdiv_rn(g, __fadd_rn(__fsqrt_rn(e.exp_avg_sq), s.epsilon));
  } else if constexpr (kKind == OptimizerKind::kLion) {
    const float c = __fmaf_rn(s.beta1, e.exp_avg, __fmul_rn(s.one_minus_beta1, g));
    e.exp_avg = __fmaf_rn(s.beta2, e.exp_avg, __fmul_rn(s.one_minus_beta2, g));
    return c > 0 ? 1.0f : c < 0 ? -1.0f : c;
  } else {
    e.exp_avg = __fmaf_rn(s.beta1, e.exp_avg, __fmul_rn(s.one_minus_beta1, g));
    return s.nesterov ? __fmaf_rn(s.beta1, e.exp_avg, g) : e.exp_avg;
  }
}

template <OptimizerKind kKind>
__device__ bool step(Element& e, const OptimizerScalars& s) {
  float g = __fmul_rn(e.gradient, s.gradient_scale);
  if (s.l2) g = __fmaf_rn(s.l2_decay, e.weight, g);
  const float u = direction<kKind>(e, s, g);
  if (s.decoupled) e.weight = __fmaf_rn(s.negative_lr_decay, e.weight, e.weight);
  e.weight = __fmaf_rn(-s.step_size, u, e.weight);
  return isfinite(e.weight) && (!has_exp_avg(kKind) || isfinite(e.exp_avg)) &&
         (!has_exp_avg_sq(kKind) || isfinite(e.exp_avg_sq));
}

// kCount elements from `i` on: all of them are there, and aligned for one access each array.
template <typename Type, OptimizerKind kKind, unsigned kCount>
__device__ bool update_pack(const OptimizerTile& tile, const OptimizerScalars& s, std::size_t i) {
  using Stored = typename Type::Element;
  constexpr bool kSplit = std::is_same_v<Type, BFloat16>, kMaster = std::is_same_v<Type, Float16>;
  Pack<Stored, kCount> weight{};
  Pack<std::int16_t, kCount> residual{};
  Pack<float, kCount> master{}, m{}, v{};
  const auto gradient = load_pack<kCount>(static_cast<const Stored*>(tile.gradient) + i);
  if constexpr (kMaster) {
    master = load_pack<kCount>(tile.master + i);
  } else {
    weight = load_pack<kCount>(static_cast<const Stored*>(tile.weight) + i);
  }
  if constexpr (kSplit) residual = load_pack<kCount>(tile.residual + i);
  if constexpr (has_exp_avg(kKind)) m = load_pack<kCount>(tile.exp_avg + i);
  if constexpr (has_exp_avg_sq(kKind)) v = load_pack<kCount>(tile.exp_avg_sq + i);
  bool finite = true;
#pragma unroll
  for (unsigned k = 0; k < kCount; ++k) {
    Element e{0, m.at[k], v.at[k], Type::widen(gradient.at[k])};
    if constexpr (kSplit) e.weight = join_master({weight.at[k], residual.at[k]});
    if constexpr (kMaster) e.weight = master.at[k];
    if constexpr (!kSplit && !kMaster) e.weight = weight.at[k];
    finite &= step<kKind>(e, s);
    m.at[k] = e.exp_avg;
    v.at[k] = e.exp_avg_sq;
    if constexpr (kSplit) {
      const SplitMaster split = split_master(e.weight);
      weight.at[k] = split.weight;
      residual.at[k] = split.residual;
    } else {
      master.at[k] = e.weight;
      weight.at[k] = Type::narrow(e.weight);
    }
    finite &= isfinite(Type::widen(weight.at[k]));
  }
  store_pack(static_cast<Stored*>(tile.weight) + i, weight);
  if constexpr (kSplit) store_pack(tile.residual + i, residual);
  if constexpr (kMaster) store_pack(tile.master + i, master);
  if constexpr (has_exp_avg(kKind)) store_pack(tile.exp_avg + i, m);
  if constexpr (has_exp_avg_sq(kKind)) store_pack(tile.exp_avg_sq + i, v);
  return finite;
}

// Each thread takes one of `packs` packs from `begin` on, and one of the elements behind them.
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
