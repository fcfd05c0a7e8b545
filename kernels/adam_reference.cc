// The definition of the update: one element at a time, in the order of kernels/adam.h. Compiled for the baseline
// instruction set, where std::fma is a correctly rounded library call; it is also what runs on a CPU without FMA.
#include <cmath>

#include "kernels/adam.h"
#include "kernels/float_environment.h"
#include "spillway/bf16.h"
#include "spillway/error.h"

namespace spillway {
namespace {

float load_weight(const AdamTile& tile, std::size_t i) {
  if (tile.type == DType::kFloat32) return static_cast<const float*>(tile.weight)[i];
  return join_master({static_cast<const std::uint16_t*>(tile.weight)[i], tile.residual[i]});
}

void store_weight(const AdamTile& tile, std::size_t i, float w) {
  if (tile.type == DType::kFloat32) {
    static_cast<float*>(tile.weight)[i] = w;
    return;
  }
  const SplitMaster split = split_master(w);
  static_cast<std::uint16_t*>(tile.weight)[i] = split.weight;
  tile.residual[i] = split.residual;
}

float load_gradient(const AdamTile& tile, std::size_t i) {
  if (tile.type == DType::kFloat32) return static_cast<const float*>(tile.gradient)[i];
  return bf16_to_float(static_cast<const std::uint16_t*>(tile.gradient)[i]);
}

// Not inlined: no arithmetic may move past the switch of the floating-point environment around the call.
[[gnu::noinline]] bool update(const AdamTile& tile, const AdamScalars& s, std::size_t begin, std::size_t end) {
  bool finite = true;
  for (std::size_t i = begin; i < end; ++i) {
    float w = load_weight(tile, i);
    float g = load_gradient(tile, i) * s.gradient_scale;
    if (s.l2) g = std::fma(s.l2_decay, w, g);
    const float m = std::fma(s.beta1, tile.exp_avg[i], s.one_minus_beta1 * g);
    const float v = std::fma(s.beta2, tile.exp_avg_sq[i], (s.one_minus_beta2 * g) * g);
    const float d = std::fma(std::sqrt(v), s.inv_sqrt_bias2, s.epsilon);
    const float u = m / d;
    if (s.decoupled) w = std::fma(s.negative_lr_decay, w, w);
    w = std::fma(-s.step_size, u, w);
    tile.exp_avg[i] = m;
    tile.exp_avg_sq[i] = v;
    store_weight(tile, i, w);
    finite = finite && std::isfinite(w) && std::isfinite(m) && std::isfinite(v);
  }
  return finite;
}

// base^exponent by squaring. Not std::pow: libraries choose their variant by CPU, and the last bit differs between them.
// The error grows as exponent * 2^-53; where that is no longer small, base^exponent is far below 1 and so is its part in
// the bias 1 - base^exponent.
double power(double base, std::uint64_t exponent) {
  double result = 1;
  for (; exponent != 0; exponent >>= 1, base *= base)
    if (exponent & 1) result *= base;
  return result;
}

}  // namespace

bool adam_update_reference(const AdamTile& tile, const AdamScalars& scalars, std::size_t begin, std::size_t end) {
  check_adam_arguments(tile, scalars, begin, end);
  const DefaultFloatEnvironment environment;
  return update(tile, scalars, begin, end);
}

void check_adam_arguments(const AdamTile& tile, const AdamScalars& scalars, std::size_t begin, std::size_t end) {
  SPILLWAY_CHECK(tile.type == DType::kFloat32 || tile.type == DType::kBFloat16, "Adam updates fp32 and bf16 weights");
  SPILLWAY_CHECK((tile.residual != nullptr) == (tile.type == DType::kBFloat16), "a bf16 tile, and no other, has residuals");
  SPILLWAY_CHECK(begin <= end && end <= tile.count, "the range must lie in the tile");
  SPILLWAY_CHECK(!(scalars.l2 && scalars.decoupled), "weight decay is either L2 or decoupled");
}

AdamScalars adam_scalars(const AdamHyper& hyper, std::uint64_t step, double gradient_scale) {
  SPILLWAY_CHECK(step > 0, "the first step is 1");
  const DefaultFloatEnvironment environment;
  const double bias1 = hyper.bias_correction ? 1 - power(hyper.beta1, step) : 1;
  const double bias2 = hyper.bias_correction ? 1 - power(hyper.beta2, step) : 1;
  AdamScalars s;
  s.gradient_scale = static_cast<float>(gradient_scale);
  s.beta1 = static_cast<float>(hyper.beta1);
  s.one_minus_beta1 = static_cast<float>(1 - hyper.beta1);
  s.beta2 = static_cast<float>(hyper.beta2);
  s.one_minus_beta2 = static_cast<float>(1 - hyper.beta2);
  s.inv_sqrt_bias2 = static_cast<float>(1 / std::sqrt(bias2));
  s.epsilon = static_cast<float>(hyper.epsilon);
  s.step_size = static_cast<float>(hyper.learning_rate / bias1);
  // Without decay neither line runs: fma(±0, w, w) could only turn a weight of -0 into +0.
  s.l2 = !hyper.decoupled_decay && hyper.weight_decay != 0;
  s.decoupled = hyper.decoupled_decay && hyper.weight_decay != 0;
  if (s.l2) s.l2_decay = static_cast<float>(hyper.weight_decay);
  if (s.decoupled) s.negative_lr_decay = static_cast<float>(-hyper.learning_rate * hyper.weight_decay);
  return s;
}

}  // namespace spillway
