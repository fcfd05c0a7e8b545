#include "tools/models/decoder/rotary.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <numbers>
#include <utility>

namespace spillway::models {
namespace {

// A power in fp32, rounded once.
float power(float base, float exponent) {
  return static_cast<float>(std::pow(static_cast<double>(base), static_cast<double>(exponent)));
}

// base^(2i / rotated) of each pair i of columns.
std::vector<float> powers(float base, std::uint32_t rotated) {
  std::vector<float> result(rotated / 2);
  for (std::size_t i = 0; i < result.size(); ++i)
    result[i] = power(base, static_cast<float>(2 * i) / static_cast<float>(rotated));
  return result;
}

std::vector<float> inverse(std::vector<float> values) {
  for (float& value : values) value = 1.0f / value;
  return values;
}

// transformers computes it of Python's numbers up to the model's positions, and of fp32 tensors past them.
float dynamic_theta(const RotaryRules& rules, std::uint32_t sequence) {
  if (sequence <= rules.positions) return static_cast<float>(rules.theta);
  const float stretch =
      static_cast<float>(rules.factor) * static_cast<float>(sequence) / static_cast<float>(rules.positions) -
      static_cast<float>(rules.factor - 1);
  const double exponent = static_cast<double>(rules.rotated) / (rules.rotated - 2.0);
  return static_cast<float>(rules.theta) * power(stretch, static_cast<float>(exponent));
}

// High frequencies stay, low ones are divided by the factor, and those between go from one to the other.
std::vector<float> llama3(const RotaryRules& rules) {
  std::vector<float> frequencies = inverse(powers(static_cast<float>(rules.theta), rules.rotated));
  const auto factor = static_cast<float>(rules.factor), low = static_cast<float>(rules.low_freq_factor);
  const auto original = static_cast<float>(rules.original_positions);
  const auto longest = static_cast<float>(rules.original_positions / rules.low_freq_factor);
  const auto shortest = static_cast<float>(rules.original_positions / rules.high_freq_factor);
  for (float& frequency : frequencies) {
    const float wave = static_cast<float>(2 * std::numbers::pi) / frequency;
    if (wave > longest) {
      frequency /= factor;
    } else if (wave >= shortest) {
      const float smooth = (original / wave - low) / static_cast<float>(rules.high_freq_factor - rules.low_freq_factor);
      frequency = (1 - smooth) * frequency / factor + smooth * frequency;
    }
  }
  return frequencies;
}

// As Llama 3's, with a ramp over the pairs of columns instead of wave lengths.
std::vector<float> yarn(const RotaryRules& rules) {
  const std::vector<float> waves = powers(static_cast<float>(rules.theta), rules.rotated);
  // The pair of columns that turns so many times over the original positions.
  const auto pair_of = [&](double turns) {
    return rules.rotated * std::log(rules.original_positions / (turns * 2 * std::numbers::pi)) /
           (2 * std::log(rules.theta));
  };
  double first = pair_of(rules.beta_fast), last = pair_of(rules.beta_slow);
  if (rules.truncate) {
    first = std::floor(first);
    last = std::ceil(last);
  }
  first = std::max(first, 0.0);
  last = std::min(last, rules.rotated - 1.0);
  if (first == last) last += 0.001;
  std::vector<float> frequencies(waves.size());
  for (std::size_t i = 0; i < waves.size(); ++i) {
    const float ramp =
        std::clamp((static_cast<float>(i) - static_cast<float>(first)) / static_cast<float>(last - first), 0.0f, 1.0f);
    const float as_trained = 1 - ramp;
    const float stretched = 1.0f / (static_cast<float>(rules.factor) * waves[i]);
    frequencies[i] = stretched * (1 - as_trained) + 1.0f / waves[i] * as_trained;
  }
  return frequencies;
}

}  // namespace

std::vector<float> rotary_frequencies(const RotaryRules& rules, std::uint32_t sequence) {
  const auto theta = static_cast<float>(rules.theta);
  std::vector<float> result;
  switch (rules.scaling) {
    case RotaryScaling::kNone: return inverse(powers(theta, rules.rotated));
    case RotaryScaling::kLinear:
      result = inverse(powers(theta, rules.rotated));
      for (float& frequency : result) frequency /= static_cast<float>(rules.factor);
      return result;
    case RotaryScaling::kDynamic: return inverse(powers(dynamic_theta(rules, sequence), rules.rotated));
    case RotaryScaling::kYarn: return yarn(rules);
    case RotaryScaling::kLlama3: return llama3(rules);
    case RotaryScaling::kLongRope: {
      const auto& factors = sequence > rules.original_positions ? rules.long_factor : rules.short_factor;
      result = powers(theta, rules.rotated);
      for (std::size_t i = 0; i < result.size(); ++i) result[i] *= static_cast<float>(factors[i]);
      return inverse(std::move(result));
    }
  }
  return result;
}

double rotary_attention_factor(const RotaryRules& rules) {
  if (rules.attention_factor) return *rules.attention_factor;
  if (rules.factor <= 1) return 1;
  if (rules.scaling == RotaryScaling::kYarn) {
    const auto of = [&](double mscale) { return 0.1 * mscale * std::log(rules.factor) + 1; };
    const bool said = rules.mscale != 0 && rules.mscale_all_dim != 0;
    return said ? of(rules.mscale) / of(rules.mscale_all_dim) : of(1);
  }
  if (rules.scaling == RotaryScaling::kLongRope)
    return std::sqrt(1 + std::log(rules.factor) / std::log(rules.original_positions));
  return 1;
}

std::vector<float> rotary_table(const RotaryRules& rules, std::uint32_t sequence) {
  const std::vector<float> frequencies = rotary_frequencies(rules, sequence);
  const auto factor = static_cast<float>(rotary_attention_factor(rules));
  std::vector<float> table;
  table.reserve(std::size_t{sequence} * rules.rotated);
  for (std::uint32_t position = 0; position < sequence; ++position) {
    for (const float frequency : frequencies) {
      const double angle = static_cast<float>(position) * frequency;
      table.push_back(static_cast<float>(std::cos(angle)) * factor);
      table.push_back(static_cast<float>(std::sin(angle)) * factor);
    }
  }
  return table;
}

}  // namespace spillway::models
