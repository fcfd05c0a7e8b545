#include "kernels/moment_codes.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>

#include "kernels/float_environment.h"
#include "kernels/moments.h"
#include "spillway/bf16.h"
#include "spillway/error.h"

namespace spillway {
namespace {

constexpr int kLargestCode[] = {127, 255};  // by moment
constexpr std::size_t index_of(Moment moment) { return static_cast<std::size_t>(moment); }

bool same_bits(float a, float b) { return std::bit_cast<std::uint32_t>(a) == std::bit_cast<std::uint32_t>(b); }

// A group's codes, of either moment.
struct Group {
  Moment moment;
  void* codes;
  std::uint16_t* scale;
  std::span<const float> values;

  float decoded(int code, float of_scale) const {
    return moment == Moment::kExpAvg ? exp_avg_from_int8(static_cast<std::int8_t>(code), of_scale)
                                     : exp_avg_sq_from_uint8(static_cast<std::uint8_t>(code), roots_a_code(of_scale));
  }
  void put(std::size_t i, int code) const {
    if (moment == Moment::kExpAvg) static_cast<std::int8_t*>(codes)[i] = static_cast<std::int8_t>(code);
    if (moment == Moment::kExpAvgSq) static_cast<std::uint8_t*>(codes)[i] = static_cast<std::uint8_t>(code);
  }
  float largest() const {
    float most = 0;
    for (const float value : values) most = std::max(most, std::abs(value));
    return moment == Moment::kExpAvg ? most : std::sqrt(most);
  }
};

// The code whose value this is with the scale; none.
std::optional<int> code_of(const Group& group, float value, float scale) {
  const int nearest = group.moment == Moment::kExpAvg
                          ? exp_avg_to_int8(value, scale)
                          : static_cast<int>(std::lround(std::min(255.0f, std::sqrt(value) * codes_a_root(scale))));
  // Squares below 2^-126 have lost bits, so that their root may lie nearer to a neighbour.
  for (const int code : {nearest, nearest - 1, nearest + 1}) {
    if (std::abs(code) > kLargestCode[index_of(group.moment)] || (group.moment == Moment::kExpAvgSq && code < 0))
      continue;
    if (same_bits(group.decoded(code, scale), value)) return code;
  }
  return std::nullopt;
}

// Whether all values are codes with this scale; then they are written.
bool put_as_codes_of(const Group& group, std::uint16_t scale_bits) {
  std::array<int, kMomentGroup> codes = {};
  for (std::size_t i = 0; i < group.values.size(); ++i) {
    const auto code = code_of(group, group.values[i], bf16_to_float(scale_bits));
    if (!code) return false;
    codes[i] = *code;
  }
  for (std::size_t i = 0; i < group.values.size(); ++i) group.put(i, codes[i]);
  *group.scale = scale_bits;
  return true;
}

// Values that were codes: which code the largest was says the scale. It was the largest code or one or two below it,
// but for scales that end below 2^-126, where bf16 has few bits.
bool put_as_codes(const Group& group) {
  const double largest = group.largest();
  for (int code = kLargestCode[index_of(group.moment)]; code > 0; --code) {
    const double parts = group.moment == Moment::kExpAvg ? 254.0 - code : 255.0;
    const double scale = largest * parts / code;
    if (scale > 0x1p127) return false;
    if (put_as_codes_of(group, float_to_bf16(static_cast<float>(scale)))) return true;
  }
  return false;
}

void encode_group(const Group& group, std::uint64_t index, std::uint64_t key) {
  const float largest = group.largest();
  if (largest > 0 && put_as_codes(group)) return;
  *group.scale = scale_to_bf16(largest);
  const float scale = bf16_to_float(*group.scale);
  for (std::size_t i = 0; i < group.values.size(); ++i) {
    if (group.moment == Moment::kExpAvg) {
      group.put(i, exp_avg_to_int8(group.values[i], scale));
    } else {
      const std::uint32_t random = random_of_exp_avg_sq(rounding_bits(key, index + i));
      group.put(i, root_to_uint8(std::sqrt(group.values[i]), codes_a_root(scale), random));
    }
  }
}

std::uint16_t* halves_of(const ReducedMoments& of, Moment moment) {
  return static_cast<std::uint16_t*>(moment == Moment::kExpAvg ? of.exp_avg : of.exp_avg_sq);
}

Group group_of(const ReducedMoments& of, Moment moment, std::uint64_t first, std::span<const float> values) {
  const bool average = moment == Moment::kExpAvg;
  auto* const bytes = static_cast<std::byte*>(average ? of.exp_avg : of.exp_avg_sq);
  std::uint16_t* const scales = average ? of.exp_avg_scales : of.exp_avg_sq_scales;
  return {moment, bytes + first, scales + first / kMomentGroup, values};
}

// Not inlined: no arithmetic may move past the switch of the floating-point environment around the call.
[[gnu::noinline]] void decode_int8(const ReducedMoments& from, Moment moment, std::uint64_t first,
                                   std::span<float> values) {
  for (std::size_t i = 0; i < values.size(); ++i) {
    const std::uint64_t at = first + i;
    if (moment == Moment::kExpAvg) {
      const float scale = bf16_to_float(from.exp_avg_scales[at / kMomentGroup]);
      values[i] = exp_avg_from_int8(static_cast<const std::int8_t*>(from.exp_avg)[at], scale);
    } else {
      const float scale = roots_a_code(bf16_to_float(from.exp_avg_sq_scales[at / kMomentGroup]));
      values[i] = exp_avg_sq_from_uint8(static_cast<const std::uint8_t*>(from.exp_avg_sq)[at], scale);
    }
  }
}

[[gnu::noinline]] void encode_int8(const ReducedMoments& to, Moment moment, std::uint64_t first,
                                   std::span<const float> values, std::uint64_t key) {
  for (std::size_t at = 0; at < values.size(); at += kMomentGroup) {
    const auto group = values.subspan(at, std::min(kMomentGroup, values.size() - at));
    encode_group(group_of(to, moment, first + at, group), to.index + first + at, key);
  }
}

}  // namespace

void decode_moments(const ReducedMoments& from, Moment moment, std::uint64_t first, std::span<float> values) {
  SPILLWAY_CHECK(from.format != MomentFormat::kFloat32 && first % kMomentGroup == 0, "groups are decoded whole");
  const DefaultFloatEnvironment environment;
  if (from.format == MomentFormat::kInt8) return decode_int8(from, moment, first, values);
  const std::uint16_t* const halves = halves_of(from, moment) + first;
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = bf16_to_float(halves[i]);
}

void encode_moments(const ReducedMoments& to, Moment moment, std::uint64_t first, std::span<const float> values,
                    std::uint64_t rounding_key) {
  SPILLWAY_CHECK(to.format != MomentFormat::kFloat32 && first % kMomentGroup == 0, "groups are encoded whole");
  const DefaultFloatEnvironment environment;
  if (to.format == MomentFormat::kInt8) return encode_int8(to, moment, first, values, rounding_key);
  std::uint16_t* const halves = halves_of(to, moment) + first;
  for (std::size_t i = 0; i < values.size(); ++i) {
    const std::uint32_t bits = rounding_bits(rounding_key, to.index + first + i);
    halves[i] =
        moment_to_bf16(values[i], moment == Moment::kExpAvg ? random_of_exp_avg(bits) : random_of_exp_avg_sq(bits));
  }
}

std::optional<std::size_t> find_unstorable(std::span<const float> values, Moment moment, MomentFormat format) {
  const auto found = std::ranges::find_if_not(
      values, [&](float value) { return is_storable(value, format) && !(moment == Moment::kExpAvgSq && value < 0); });
  if (found == values.end()) return std::nullopt;
  return static_cast<std::size_t>(found - values.begin());
}

}  // namespace spillway
