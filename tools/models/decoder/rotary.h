// Rotary positions (Su et al. 2021): the angles that columns of queries and keys are turned by, and what models do to
// them to take longer rows. Pure.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace spillway::models {

enum class RotaryScaling : std::uint8_t {
  kNone,
  kLinear,
  kDynamic,   // NTK: theta grows with the row, past the model's positions
  kYarn,      // Peng et al. 2023
  kLlama3,    // Llama 3.1's
  kLongRope,  // Ding et al. 2024: a factor for each frequency, others for long rows
};

// Named as in config.json's rope_parameters, where that has a name for it.
struct RotaryRules {
  RotaryScaling scaling = RotaryScaling::kNone;
  std::uint32_t rotated = 0;  // columns of a head, the first ones; an even number
  double theta = 10000, factor = 1;
  // max_position_embeddings, and before it was made larger.
  std::uint32_t positions = 0, original_positions = 0;
  std::optional<double> attention_factor = {};              // YaRN, LongRoPE; none: of the factor
  double low_freq_factor = 1, high_freq_factor = 4;         // Llama 3
  double beta_fast = 32, beta_slow = 1;                     // YaRN
  double mscale = 0, mscale_all_dim = 0;                    // YaRN; 0: not said
  bool truncate = true;                                     // YaRN
  std::vector<double> short_factor = {}, long_factor = {};  // LongRoPE: rotated / 2 each
};

// The angle of each pair of columns at position 1, of rows of `sequence` tokens: rotated / 2 of them. Each operation
// rounds to fp32 as transformers 5.24 does: an angle is the product of a frequency and a position, so that a last bit
// of the first is 1e-4 in the angle at position 4,000.
std::vector<float> rotary_frequencies(const RotaryRules& rules, std::uint32_t sequence);
// What cosine and sine are multiplied with.
double rotary_attention_factor(const RotaryRules& rules);
// Rotary::table of positions 0 … sequence - 1: [sequence][rotated / 2][2], cosine first. fp32 whatever the model's
// type is (transformers rounds it to that).
std::vector<float> rotary_table(const RotaryRules& rules, std::uint32_t sequence);

}  // namespace spillway::models
