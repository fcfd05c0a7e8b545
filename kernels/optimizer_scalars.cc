// The scalars of a step: computed in double, rounded once.
#include <cmath>

#include "kernels/float_environment.h"
#include "kernels/moments.h"
#include "spillway/error.h"
#include "spillway/optimizer.h"

namespace spillway {
namespace {

// base^exponent by squaring. Not std::pow: libraries choose their variant by CPU, and the last bit differs between
// them. The error grows as exponent * 2^-53; where that is no longer small, base^exponent is far below 1 and so is its
// part in the bias 1 - base^exponent.
double power(double base, std::uint64_t exponent) {
  double result = 1;
  for (; exponent != 0; exponent >>= 1, base *= base)
    if (exponent & 1) result *= base;
  return result;
}

}  // namespace

OptimizerScalars optimizer_scalars(const OptimizerConfig& config, std::uint64_t step, double gradient_scale) {
  SPILLWAY_CHECK(step > 0, "the first step is 1");
  const DefaultFloatEnvironment environment;
  const bool adam = config.kind == OptimizerKind::kAdam, sgd = config.kind == OptimizerKind::kSgd;
  const bool corrected = adam && config.bias_correction;
  const double bias1 = corrected ? 1 - power(config.beta1, step) : 1;
  const double bias2 = corrected ? 1 - power(config.beta2, step) : 1;
  // The first step of SGD takes its gradient whole, and so does SGD without momentum.
  const double dampening = step > 1 && config.momentum != 0 ? config.dampening : 0;
  OptimizerScalars s;
  s.kind = config.kind;
  s.nesterov = sgd && config.nesterov;
  s.gradient_scale = static_cast<float>(gradient_scale);
  s.beta1 = static_cast<float>(sgd ? config.momentum : config.beta1);
  s.one_minus_beta1 = static_cast<float>(sgd ? 1 - dampening : 1 - config.beta1);
  s.beta2 = static_cast<float>(config.beta2);
  s.one_minus_beta2 = static_cast<float>(1 - config.beta2);
  s.inv_sqrt_bias2 = static_cast<float>(1 / std::sqrt(bias2));
  s.epsilon = static_cast<float>(config.epsilon);
  s.step_size = static_cast<float>(config.learning_rate / bias1);
  // Without decay neither line runs: fma(±0, w, w) could only turn a weight of -0 into +0.
  const bool decoupled = config.kind == OptimizerKind::kLion || (adam && config.decoupled_decay);
  s.l2 = !decoupled && config.weight_decay != 0;
  s.decoupled = decoupled && config.weight_decay != 0;
  if (s.l2) s.l2_decay = static_cast<float>(config.weight_decay);
  if (s.decoupled) s.negative_lr_decay = static_cast<float>(-config.learning_rate * config.weight_decay);
  s.rounding_key = rounding_key(config.seed, step);
  return s;
}

}  // namespace spillway
