// The definition of the updates: one element at a time, in the order of spillway/optimizer.h. Compiled for the baseline
// instruction set, where std::fma is a correctly rounded library call; it is also what runs on a CPU without FMA.
#include <algorithm>
#include <cmath>

#include "kernels/float_environment.h"
#include "kernels/moments.h"
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

struct Moments {
  float m = 0, v = 0;
};

// What the weight moves by, in units of the step size; moments updated.
float direction(const OptimizerScalars& s, float g, Moments& moments) {
  float &m = moments.m, &v = moments.v;
  switch (s.kind) {
    case OptimizerKind::kAdam:
      m = std::fma(s.beta1, m, s.one_minus_beta1 * g);
      v = std::fma(s.beta2, v, (s.one_minus_beta2 * g) * g);
      return m / std::fma(std::sqrt(v), s.inv_sqrt_bias2, s.epsilon);
    case OptimizerKind::kAdagrad: v = std::fma(g, g, v); return g / (std::sqrt(v) + s.epsilon);
    case OptimizerKind::kLion: {
      const float c = std::fma(s.beta1, m, s.one_minus_beta1 * g);
      m = std::fma(s.beta2, m, s.one_minus_beta2 * g);
      return c > 0 ? 1 : c < 0 ? -1 : c;
    }
    case OptimizerKind::kSgd: break;
  }
  m = std::fma(s.beta1, m, s.one_minus_beta1 * g);
  return s.nesterov ? std::fma(s.beta1, m, g) : m;
}

// Returns whether the weight is finite.
bool update_element(const OptimizerTile& tile, const OptimizerScalars& s, std::size_t i, Moments& moments) {
  float w = load_weight(tile, i);
  float g = load_gradient(tile, i) * s.gradient_scale;
  if (s.l2) g = std::fma(s.l2_decay, w, g);
  const float u = direction(s, g, moments);
  if (s.decoupled) w = std::fma(s.negative_lr_decay, w, w);
  w = std::fma(-s.step_size, u, w);
  return store_weight(tile, i, w);
}

bool update_exact(const OptimizerTile& tile, const OptimizerScalars& s, std::size_t begin, std::size_t end) {
  bool finite = true;
  for (std::size_t i = begin; i < end; ++i) {
    Moments moments{tile.exp_avg != nullptr ? tile.exp_avg[i] : 0, tile.exp_avg_sq != nullptr ? tile.exp_avg_sq[i] : 0};
    finite &= update_element(tile, s, i, moments) && std::isfinite(moments.m) && std::isfinite(moments.v);
    if (tile.exp_avg != nullptr) tile.exp_avg[i] = moments.m;
    if (tile.exp_avg_sq != nullptr) tile.exp_avg_sq[i] = moments.v;
  }
  return finite;
}

bool storable(const Moments& moments, MomentFormat format) {
  return is_storable(moments.m, format) && is_storable(moments.v, format);
}

bool update_bf16(const OptimizerTile& tile, const OptimizerScalars& s, std::size_t begin, std::size_t end) {
  auto* const m = static_cast<std::uint16_t*>(tile.reduced.exp_avg);
  auto* const v = static_cast<std::uint16_t*>(tile.reduced.exp_avg_sq);  // null for Lion
  bool finite = true;
  for (std::size_t i = begin; i < end; ++i) {
    Moments moments{bf16_to_float(m[i]), v != nullptr ? bf16_to_float(v[i]) : 0};
    finite &= update_element(tile, s, i, moments) && storable(moments, MomentFormat::kBFloat16);
    const std::uint32_t random = rounding_bits(s.rounding_key, tile.reduced.index + i);
    m[i] = moment_to_bf16(moments.m, random_of_exp_avg(random));
    if (v != nullptr) v[i] = moment_to_bf16(moments.v, random_of_exp_avg_sq(random));
  }
  return finite;
}

// Elements [begin, end) share their scales.
bool update_int8_group(const OptimizerTile& tile, const OptimizerScalars& s, std::size_t begin, std::size_t end) {
  const ReducedMoments& reduced = tile.reduced;
  auto* const m = static_cast<std::int8_t*>(reduced.exp_avg);
  auto* const v = static_cast<std::uint8_t*>(reduced.exp_avg_sq);  // null for Lion
  std::uint16_t& m_scale = reduced.exp_avg_scales[begin / kMomentGroup];
  const float m_scale_was = bf16_to_float(m_scale);
  const float v_was = v != nullptr ? roots_a_code(bf16_to_float(reduced.exp_avg_sq_scales[begin / kMomentGroup])) : 0;
  Moments moments[kMomentGroup];
  float largest_m = 0, largest_root = 0;
  bool finite = true;
  for (std::size_t i = begin; i < end; ++i) {
    Moments& of = moments[i - begin];
    of = {exp_avg_from_int8(m[i], m_scale_was), v != nullptr ? exp_avg_sq_from_uint8(v[i], v_was) : 0};
    finite &= update_element(tile, s, i, of) && storable(of, MomentFormat::kInt8);
    largest_m = std::max(largest_m, std::abs(of.m));
    largest_root = std::max(largest_root, std::sqrt(of.v));
  }
  m_scale = scale_to_bf16(largest_m);
  for (std::size_t i = begin; i < end; ++i) m[i] = exp_avg_to_int8(moments[i - begin].m, bf16_to_float(m_scale));
  if (v == nullptr) return finite;
  std::uint16_t& v_scale = reduced.exp_avg_sq_scales[begin / kMomentGroup];
  v_scale = scale_to_bf16(largest_root);
  for (std::size_t i = begin; i < end; ++i) {
    const std::uint32_t random = random_of_exp_avg_sq(rounding_bits(s.rounding_key, reduced.index + i));
    v[i] = root_to_uint8(std::sqrt(moments[i - begin].v), codes_a_root(bf16_to_float(v_scale)), random);
  }
  return finite;
}

// Not inlined: no arithmetic may move past the switch of the floating-point environment around the call.
[[gnu::noinline]] bool update(const OptimizerTile& tile, const OptimizerScalars& s, std::size_t begin,
                              std::size_t end) {
  switch (tile.reduced.format) {
    case MomentFormat::kFloat32: break;
    case MomentFormat::kBFloat16: return update_bf16(tile, s, begin, end);
    case MomentFormat::kInt8:
      bool finite = true;
      for (; begin < end; begin += kMomentGroup)
        finite &= update_int8_group(tile, s, begin, std::min(end, begin + kMomentGroup));
      return finite;
  }
  return update_exact(tile, s, begin, end);
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
  const ReducedMoments& reduced = tile.reduced;
  const bool exact = reduced.format == MomentFormat::kFloat32, scaled = has_scales(reduced.format);
  const bool average = has_exp_avg(scalars.kind), square = has_exp_avg_sq(scalars.kind);
  SPILLWAY_CHECK((tile.exp_avg != nullptr) == (exact && average) && (tile.exp_avg_sq != nullptr) == (exact && square) &&
                     (reduced.exp_avg != nullptr) == (!exact && average) &&
                     (reduced.exp_avg_sq != nullptr) == (!exact && square),
                 "a tile has the moments that its optimizer keeps, and no other");
  SPILLWAY_CHECK((reduced.exp_avg_scales != nullptr) == (scaled && average) &&
                     (reduced.exp_avg_sq_scales != nullptr) == (scaled && square),
                 "int8 moments, and no other, have scales");
  SPILLWAY_CHECK(exact || can_reduce(scalars.kind), "the moments of Adam and Lion alone are reduced");
  SPILLWAY_CHECK(!scaled || (begin % kMomentGroup == 0 && (end % kMomentGroup == 0 || end == tile.count)),
                 "elements that share a scale are updated together");
  SPILLWAY_CHECK(begin <= end && end <= tile.count, "the range must lie in the tile");
  SPILLWAY_CHECK(!(scalars.l2 && scalars.decoupled), "weight decay is either L2 or decoupled");
  SPILLWAY_CHECK(!(scalars.l2 && scalars.kind == OptimizerKind::kLion), "Lion's weight decay is decoupled");
  SPILLWAY_CHECK(!scalars.decoupled || scalars.kind == OptimizerKind::kAdam || scalars.kind == OptimizerKind::kLion,
                 "weight decay of Adagrad and SGD is L2");
}

}  // namespace spillway
