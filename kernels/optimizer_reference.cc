// The definition of the updates: one element at a time, in the order of spillway/optimizer.h. Compiled for the baseline
// instruction set, where std::fma is a correctly rounded library call; it is also what runs on a CPU without FMA.
#include <cmath>

#include "kernels/float_environment.h"
#include "kernels/optimizer.h"
#include "spillway/bf16.h"
#include "spillway/error.h"
#include "spillway/fp16.h"

namespace spillway {
namespace {

float load_weight(const OptimizerTile& tile, std::size_t i) {
  if (tile.type == DType::kFloat32) return static_cast<const float*>(tile.weight)[i];
  if (tile.type == DType::kFloat16) return tile.master[i];
  return join_master({static_cast<const std::uint16_t*>(tile.weight)[i], tile.residual[i]});
}

// Returns whether the weight is finite, as master and as what forward and backward will read.
bool store_weight(const OptimizerTile& tile, std::size_t i, float w) {
  if (tile.type == DType::kFloat32) {
    static_cast<float*>(tile.weight)[i] = w;
    return std::isfinite(w);
  }
  std::uint16_t& weight = static_cast<std::uint16_t*>(tile.weight)[i];
  if (tile.type == DType::kFloat16) {
    tile.master[i] = w;
    weight = float_to_fp16(w);
    return std::isfinite(fp16_to_float(weight));
  }
  const SplitMaster split = split_master(w);
  weight = split.weight;
  tile.residual[i] = split.residual;
  return std::isfinite(w) && std::isfinite(bf16_to_float(weight));
}

float load_gradient(const OptimizerTile& tile, std::size_t i) {
  if (tile.type == DType::kFloat32) return static_cast<const float*>(tile.gradient)[i];
  const std::uint16_t bits = static_cast<const std::uint16_t*>(tile.gradient)[i];
  return tile.type == DType::kFloat16 ? fp16_to_float(bits) : bf16_to_float(bits);
}

// What the weight moves by, in units of the step size; moments updated.
float direction(const OptimizerTile& tile, const OptimizerScalars& s, std::size_t i, float g) {
  switch (s.kind) {
    case OptimizerKind::kAdam: {
      const float m = tile.exp_avg[i] = std::fma(s.beta1, tile.exp_avg[i], s.one_minus_beta1 * g);
      const float v = tile.exp_avg_sq[i] = std::fma(s.beta2, tile.exp_avg_sq[i], (s.one_minus_beta2 * g) * g);
      const float d = std::fma(std::sqrt(v), s.inv_sqrt_bias2, s.epsilon);
      return m / d;
    }
    case OptimizerKind::kAdagrad: {
      const float v = tile.exp_avg_sq[i] = std::fma(g, g, tile.exp_avg_sq[i]);
      return g / (std::sqrt(v) + s.epsilon);
    }
    case OptimizerKind::kLion: {
      const float c = std::fma(s.beta1, tile.exp_avg[i], s.one_minus_beta1 * g);
      tile.exp_avg[i] = std::fma(s.beta2, tile.exp_avg[i], s.one_minus_beta2 * g);
      return c > 0 ? 1 : c < 0 ? -1 : c;
    }
    case OptimizerKind::kSgd: break;
  }
  const float m = tile.exp_avg[i] = std::fma(s.beta1, tile.exp_avg[i], s.one_minus_beta1 * g);
  return s.nesterov ? std::fma(s.beta1, m, g) : m;
}

// Not inlined: no arithmetic may move past the switch of the floating-point environment around the call.
[[gnu::noinline]] bool update(const OptimizerTile& tile, const OptimizerScalars& s, std::size_t begin,
                              std::size_t end) {
  bool finite = true;
  for (std::size_t i = begin; i < end; ++i) {
    float w = load_weight(tile, i);
    float g = load_gradient(tile, i) * s.gradient_scale;
    if (s.l2) g = std::fma(s.l2_decay, w, g);
    const float u = direction(tile, s, i, g);
    if (s.decoupled) w = std::fma(s.negative_lr_decay, w, w);
    w = std::fma(-s.step_size, u, w);
    finite &= store_weight(tile, i, w);
    if (tile.exp_avg != nullptr) finite &= std::isfinite(tile.exp_avg[i]);
    if (tile.exp_avg_sq != nullptr) finite &= std::isfinite(tile.exp_avg_sq[i]);
  }
  return finite;
}

}  // namespace

bool optimizer_update_reference(const OptimizerTile& tile, const OptimizerScalars& scalars, std::size_t begin,
                                std::size_t end) {
  check_optimizer_arguments(tile, scalars, begin, end);
  const DefaultFloatEnvironment environment;
  return update(tile, scalars, begin, end);
}

void check_optimizer_arguments(const OptimizerTile& tile, const OptimizerScalars& scalars, std::size_t begin,
                               std::size_t end) {
  SPILLWAY_CHECK((tile.residual != nullptr) == (tile.type == DType::kBFloat16),
                 "a bf16 tile, and no other, has residuals");
  SPILLWAY_CHECK((tile.master != nullptr) == (tile.type == DType::kFloat16),
                 "an fp16 tile, and no other, has an fp32 master");
  SPILLWAY_CHECK((tile.exp_avg != nullptr) == has_exp_avg(scalars.kind) &&
                     (tile.exp_avg_sq != nullptr) == has_exp_avg_sq(scalars.kind),
                 "a tile has the moments that its optimizer keeps, and no other");
  SPILLWAY_CHECK(begin <= end && end <= tile.count, "the range must lie in the tile");
  SPILLWAY_CHECK(!(scalars.l2 && scalars.decoupled), "weight decay is either L2 or decoupled");
  SPILLWAY_CHECK(!(scalars.l2 && scalars.kind == OptimizerKind::kLion), "Lion's weight decay is decoupled");
  SPILLWAY_CHECK(!scalars.decoupled || scalars.kind == OptimizerKind::kAdam || scalars.kind == OptimizerKind::kLion,
                 "weight decay of Adagrad and SGD is L2");
}

}  // namespace spillway
