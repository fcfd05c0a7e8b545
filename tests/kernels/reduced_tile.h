// Tiles with moments in bf16 and int8, for the tests of the kernels.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <vector>

#include "kernels/moments.h"
#include "tests/kernels/optimizer_tile.h"

namespace spillway {

inline const std::vector<OptimizerKind> kReducedKinds = [] {
  std::vector<OptimizerKind> kinds;
  std::ranges::copy_if(kOptimizerKinds, std::back_inserter(kinds), can_reduce);
  return kinds;
}();

// A tile whose moments are stored in another form. Copies share nothing.
struct ReducedTile {
  ReducedTile(DType type, OptimizerKind kind, MomentFormat form, std::size_t elements)
      : weights(type, kind, elements), format(form) {
    const std::size_t bytes = size_of(form), groups = (elements + 31) / 32;
    weights.exp_avg.clear(), weights.exp_avg_sq.clear();
    exp_avg.resize(elements * bytes);
    if (has_exp_avg_sq(kind)) exp_avg_sq.resize(elements * bytes);
    if (has_scales(form)) exp_avg_scales.resize(groups);
    if (has_scales(form) && has_exp_avg_sq(kind)) exp_avg_sq_scales.resize(groups);
  }

  // From element `first` on, a multiple of 32 for int8.
  OptimizerTile view(std::size_t first = 0) {
    OptimizerTile tile = weights.view(first);
    const std::size_t bytes = size_of(format);
    const auto from = [](auto& array, std::size_t at) { return array.empty() ? nullptr : array.data() + at; };
    tile.reduced = {.format = format,
                    .exp_avg = from(exp_avg, first * bytes),
                    .exp_avg_sq = from(exp_avg_sq, first * bytes),
                    .exp_avg_scales = from(exp_avg_scales, first / 32),
                    .exp_avg_sq_scales = from(exp_avg_sq_scales, first / 32),
                    .index = index + first};
    return tile;
  }
  float exp_avg_at(std::size_t i) const {
    return format == MomentFormat::kBFloat16
               ? bf16_to_float(get16(exp_avg, i))
               : exp_avg_from_int8(std::bit_cast<std::int8_t>(exp_avg[i]), bf16_to_float(exp_avg_scales[i / 32]));
  }
  float exp_avg_sq_at(std::size_t i) const {
    return format == MomentFormat::kBFloat16
               ? bf16_to_float(get16(exp_avg_sq, i))
               : exp_avg_sq_from_uint8(std::to_integer<std::uint8_t>(exp_avg_sq[i]),
                                       roots_a_code(bf16_to_float(exp_avg_sq_scales[i / 32])));
  }
  static std::uint16_t get16(const std::vector<std::byte>& array, std::size_t i) {
    std::uint16_t value;
    std::memcpy(&value, array.data() + 2 * i, 2);
    return value;
  }

  OwnedTile weights;
  MomentFormat format;
  std::vector<std::byte> exp_avg, exp_avg_sq;
  std::vector<std::uint16_t> exp_avg_scales, exp_avg_sq_scales;
  std::uint64_t index = 0;
};

// Random weights and gradients; moments that an update may have left.
inline ReducedTile random_reduced(DType type, OptimizerKind kind, MomentFormat format, std::size_t count,
                                  std::mt19937_64& generator) {
  ReducedTile tile(type, kind, format, count);
  const OwnedTile random = random_tile(type, kind, count, generator);
  tile.weights.weight = random.weight, tile.weights.residual = random.residual;
  tile.weights.master = random.master, tile.weights.gradient = random.gradient;
  OddFloats odd(generator);
  const auto scale = [&] { return scale_to_bf16(std::min(std::abs(odd()), 1e30f)); };
  if (format == MomentFormat::kInt8) {
    for (std::byte& code : tile.exp_avg)
      code = std::bit_cast<std::byte>(static_cast<std::int8_t>(generator() % 255 - 127));
    for (std::byte& code : tile.exp_avg_sq) code = static_cast<std::byte>(generator());
    for (std::uint16_t& s : tile.exp_avg_scales) s = scale();
    for (std::uint16_t& s : tile.exp_avg_sq_scales) s = scale_to_bf16(std::min(std::abs(odd()), 1e15f));
  } else {
    for (std::size_t i = 0; i < count; ++i) {
      const std::uint16_t m = float_to_bf16(odd()), v = float_to_bf16(std::min(std::abs(odd()), 1e30f));
      std::memcpy(tile.exp_avg.data() + 2 * i, &m, 2);
      if (has_exp_avg_sq(kind)) std::memcpy(tile.exp_avg_sq.data() + 2 * i, &v, 2);
    }
  }
  return tile;
}

}  // namespace spillway
