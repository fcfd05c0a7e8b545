#include "src/checkpoint/tile_values.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <string_view>
#include <utility>
#include <vector>

#include "kernels/moments.h"
#include "spillway/bf16.h"
#include "spillway/error.h"
#include "spillway/fp16.h"
#include "swap/tile_arrays.h"

namespace spillway {
namespace {

constexpr std::uint64_t kValuesAtOnce = 64 * 1024;

// Calls piece(parameter, first element of it, offset in the tile, count) for every run of a parameter inside the tile,
// at most kValuesAtOnce long.
template <typename Piece>
void for_each_piece(const Plan& plan, std::uint32_t tile, std::optional<std::uint32_t> only, Piece&& piece) {
  const TilePlan& t = plan.tiles[tile];
  const auto& places = plan.blocks[t.block].partition.parameters;
  for (std::uint32_t p = 0; p < places.size(); ++p) {
    if (only && *only != p) continue;
    const std::uint64_t begin = std::max(places[p].first, t.range.first);
    const std::uint64_t end = std::min(places[p].first + places[p].count, t.range.first + t.range.count);
    for (std::uint64_t at = begin; at < end; at += kValuesAtOnce) {
      piece(p, at - places[p].first, at - t.range.first, std::min(kValuesAtOnce, end - at));
    }
  }
}

// What makes 16-bit weights exact, a residual or a master, is not there in a frozen tile.
void put_values(const OptimizerTile& out, std::uint64_t at, std::span<const float> values) {
  auto* const halves = static_cast<std::uint16_t*>(out.weight);
  switch (out.type) {
    case DType::kFloat32: std::ranges::copy(values, static_cast<float*>(out.weight) + at); return;
    case DType::kFloat16:
      std::ranges::transform(values, halves + at, float_to_fp16);
      if (out.master) std::ranges::copy(values, out.master + at);
      return;
    case DType::kBFloat16:
      for (std::size_t i = 0; i < values.size(); ++i) {
        const SplitMaster split = split_master(values[i]);
        halves[at + i] = out.residual ? split.weight : float_to_bf16(values[i]);
        if (out.residual) out.residual[at + i] = split.residual;
      }
  }
}

// Bits pass as they are, whatever numbers they would be.
void put_bits(const OptimizerTile& out, std::uint64_t at, std::span<const float> values) {
  if (out.type == DType::kFloat32) return put_values(out, at, values);
  std::ranges::transform(values, static_cast<std::uint16_t*>(out.weight) + at, upper_half);
}

void take_bits(const OptimizerTile& in, std::uint64_t at, std::span<float> values) {
  const auto* const halves = static_cast<const std::uint16_t*>(in.weight);
  for (std::size_t i = 0; i < values.size(); ++i) {
    values[i] = in.type == DType::kFloat32 ? static_cast<const float*>(in.weight)[at + i]
                                           : bf16_to_float(halves[at + i]);  // moves the bits
  }
}

bool is_bytes(const Plan& plan, const TilePlan& tile, std::uint32_t parameter) {
  return plan.blocks[tile.block].partition.parameters[parameter].bytes;
}

// Whether the weight that training uses is a number.
bool stays_finite(float value, DType type) {
  if (!std::isfinite(value)) return false;
  switch (type) {
    case DType::kFloat32: break;
    case DType::kFloat16: return fits_fp16(value);
    case DType::kBFloat16: return std::isfinite(bf16_to_float(split_master(value).weight));
  }
  return true;
}

std::string_view infinity_or_nan(float not_finite) {
  return std::isnan(not_finite) ? "NaN" : not_finite < 0 ? "-Inf" : "Inf";
}

void take_values(const OptimizerTile& in, bool exact, std::uint64_t at, std::span<float> values) {
  const bool whole = exact && (in.master || in.residual);
  const auto* const halves = static_cast<const std::uint16_t*>(in.weight);
  for (std::size_t i = 0; i < values.size(); ++i, ++at) {
    switch (in.type) {
      case DType::kFloat32: values[i] = static_cast<const float*>(in.weight)[at]; break;
      case DType::kFloat16: values[i] = whole ? in.master[at] : fp16_to_float(halves[at]); break;
      case DType::kBFloat16:
        values[i] = whole ? join_master({halves[at], in.residual[at]}) : bf16_to_float(halves[at]);
        break;
    }
  }
}

}  // namespace

void fill_tile(const Plan& plan, std::uint32_t tile, const TileMemory& memory, const WeightSource& source,
               std::optional<std::uint32_t> only) {
  const OptimizerTile out = tile_arrays(plan.tile_places[tile].shape, memory, nullptr);
  std::vector<float> values(kValuesAtOnce);
  for_each_piece(plan, tile, only,
                 [&](std::uint32_t parameter, std::uint64_t first, std::uint64_t at, std::uint64_t count) {
                   const std::span<float> piece = std::span(values).first(count);
                   source(plan.tiles[tile].block, parameter, first, piece);
                   is_bytes(plan, plan.tiles[tile], parameter) ? put_bits(out, at, piece) : put_values(out, at, piece);
                 });
}

void read_tile(const Plan& plan, std::uint32_t tile, const TileMemory& memory, bool exact, const WeightSink& sink,
               std::optional<std::uint32_t> only) {
  const OptimizerTile in = tile_arrays(plan.tile_places[tile].shape, memory, nullptr);
  std::vector<float> values(kValuesAtOnce);
  for_each_piece(
      plan, tile, only, [&](std::uint32_t parameter, std::uint64_t first, std::uint64_t at, std::uint64_t count) {
        const std::span<float> piece = std::span(values).first(count);
        is_bytes(plan, plan.tiles[tile], parameter) ? take_bits(in, at, piece) : take_values(in, exact, at, piece);
        sink(plan.tiles[tile].block, parameter, first, piece);
      });
}

float trained_weight(float master, DType type) {
  switch (type) {
    case DType::kFloat32: break;
    case DType::kFloat16: return fp16_to_float(float_to_fp16(master));
    case DType::kBFloat16: return bf16_to_float(split_master(master).weight);
  }
  return master;
}

WeightSource finite_weights(const ModelDescription& model, DType type, const WeightSource& source) {
  return [&model, type, &source](std::uint32_t block, std::uint32_t p, std::uint64_t first, std::span<float> out) {
    source(block, p, first, out);
    check_weights(model.blocks[block].parameters[p], type, first, out);
  };
}

void check_weights(const Parameter& parameter, DType type, std::uint64_t first, std::span<const float> values) {
  if (parameter.bytes) return;
  const bool frozen = !parameter.trainable;
  const auto bad = std::ranges::find_if_not(values, [=](float value) {
    if (!frozen) return stays_finite(value, type);
    return !std::isnan(value) && (type != DType::kFloat16 || std::isinf(value) || stays_finite(value, type));
  });
  if (bad == values.end()) return;
  const auto refuse = [&](std::string happened, const char* hint) {
    throw Error(Code::kInvalidArgument, {parameter.name, std::move(happened), 0, hint});
  };
  if (!std::isfinite(*bad)) {
    refuse(fmt::format("holds {} at index {}, before any training", infinity_or_nan(*bad),
                       first + static_cast<std::uint64_t>(bad - values.begin())),
           "its values are damaged, or were never set: look at the file or program that they come from");
  }
  if (type == DType::kFloat16)
    refuse(fmt::format("holds {}, and fp16 ends at 65,504", *bad), "train it in bf16 or fp32");
  refuse(fmt::format("holds {}, and bf16 ends at 3.39e38", *bad), "train it in fp32");
}

namespace {

std::string_view moment_name(Moment moment) { return moment == Moment::kExpAvg ? kExpAvg : kExpAvgSq; }

float* exact_moments(const OptimizerTile& tile, Moment moment) {
  return moment == Moment::kExpAvg ? tile.exp_avg : tile.exp_avg_sq;
}

}  // namespace

void check_moments(const Parameter& parameter, Moment moment, MomentFormat format, std::uint64_t first,
                   std::span<const float> values) {
  const auto bad = find_unstorable(values, moment, format);
  if (!bad) return;
  const float value = values[*bad];
  const std::string what = std::isfinite(value) ? fmt::format("{:g}", value) : std::string(infinity_or_nan(value));
  const bool too_large = std::isfinite(value) && !(moment == Moment::kExpAvgSq && value < 0);
  const auto most = std::bit_cast<float>(largest_moment(format));
  throw Error(Code::kInvalidArgument,
              {fmt::format("{}.{}", parameter.name, moment_name(moment)),
               fmt::format("holds {} at index {}{}", what, first + *bad,
                           too_large ? fmt::format(", and {} states end at {:.3g}", name_of(format), most) : ""),
               0, too_large ? "set spillway.states to fp32" : "look at the file or program that it comes from"});
}

void fill_moment(const Plan& plan, std::uint32_t tile, const TileMemory& memory, Moment moment,
                 const WeightSource& source, std::uint64_t rounding_key, std::optional<std::uint32_t> only) {
  const OptimizerTile arrays = tile_arrays(plan.tile_places[tile].shape, memory, nullptr);
  float* const out = exact_moments(arrays, moment);
  std::vector<float> values(out ? 0 : kValuesAtOnce);
  for_each_piece(plan, tile, only,
                 [&](std::uint32_t parameter, std::uint64_t first, std::uint64_t at, std::uint64_t count) {
                   const std::span<float> piece = out ? std::span(out + at, count) : std::span(values).first(count);
                   source(plan.tiles[tile].block, parameter, first, piece);
                   if (!out) encode_moments(arrays.reduced, moment, at, piece, rounding_key);
                 });
}

void read_moment(const Plan& plan, std::uint32_t tile, const TileMemory& memory, Moment moment, const WeightSink& sink,
                 std::optional<std::uint32_t> only) {
  const OptimizerTile arrays = tile_arrays(plan.tile_places[tile].shape, memory, nullptr);
  const float* const in = exact_moments(arrays, moment);
  std::vector<float> values(in ? 0 : kValuesAtOnce);
  for_each_piece(plan, tile, only,
                 [&](std::uint32_t parameter, std::uint64_t first, std::uint64_t at, std::uint64_t count) {
                   if (in) return sink(plan.tiles[tile].block, parameter, first, {in + at, count});
                   const std::span<float> piece = std::span(values).first(count);
                   decode_moments(arrays.reduced, moment, at, piece);
                   sink(plan.tiles[tile].block, parameter, first, piece);
                 });
}

}  // namespace spillway
