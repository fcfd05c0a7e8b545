// The optimizers' arithmetic on the GPU, in the order of spillway/optimizer.h, each line one rounding; and how a thread
// reads and writes a few consecutive weights.
#pragma once

#include "kernels/cuda/elements.cuh"
#include "spillway/optimizer.h"

namespace spillway::cuda {

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

// A pack of which the first `there` elements exist; `whole`: all, and aligned for one access.
template <unsigned N, typename T>
__device__ Pack<T, N> load_part(const T* from, unsigned there, bool whole) {
  if (whole) return load_pack<N>(from);
  Pack<T, N> pack{};
#pragma unroll
  for (unsigned k = 0; k < N; ++k)
    if (k < there) pack.at[k] = from[k];
  return pack;
}
template <unsigned N, typename T>
__device__ void store_part(T* to, const Pack<T, N>& pack, unsigned there, bool whole) {
  if (whole) return store_pack<N>(to, pack);
#pragma unroll
  for (unsigned k = 0; k < N; ++k)
    if (k < there) to[k] = pack.at[k];
}

// Consecutive weights with what makes them exact, and their gradients.
template <typename Type, unsigned kCount>
struct Weights {
  using Stored = typename Type::Element;
  static constexpr bool kSplit = std::is_same_v<Type, BFloat16>, kMaster = std::is_same_v<Type, Float16>;

  __device__ void load(const OptimizerTile& tile, std::size_t i, unsigned there, bool whole) {
    gradient = load_part<kCount>(static_cast<const Stored*>(tile.gradient) + i, there, whole);
    if constexpr (kMaster) {
      master = load_part<kCount>(tile.master + i, there, whole);
    } else {
      weight = load_part<kCount>(static_cast<const Stored*>(tile.weight) + i, there, whole);
    }
    if constexpr (kSplit) residual = load_part<kCount>(tile.residual + i, there, whole);
  }
  __device__ float at(unsigned k) const {
    if constexpr (kSplit) return join_master({weight.at[k], residual.at[k]});
    if constexpr (kMaster) return master.at[k];
    if constexpr (!kSplit && !kMaster) return weight.at[k];
  }
  // Returns whether what forward and backward read is finite.
  __device__ bool put(unsigned k, float value) {
    if constexpr (kSplit) {
      const SplitMaster split = split_master(value);
      weight.at[k] = split.weight;
      residual.at[k] = split.residual;
    } else {
      master.at[k] = value;
      weight.at[k] = Type::narrow(value);
    }
    return isfinite(Type::widen(weight.at[k]));
  }
  __device__ void store(const OptimizerTile& tile, std::size_t i, unsigned there, bool whole) const {
    store_part(static_cast<Stored*>(tile.weight) + i, weight, there, whole);
    if constexpr (kSplit) store_part(tile.residual + i, residual, there, whole);
    if constexpr (kMaster) store_part(tile.master + i, master, there, whole);
  }

  Pack<Stored, kCount> weight{}, gradient{};
  Pack<std::int16_t, kCount> residual{};
  Pack<float, kCount> master{};
};

}  // namespace spillway::cuda
