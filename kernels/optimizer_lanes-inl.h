// What the forms of the optimizers' moments have in common, once per instruction set: how weights and gradients lie in
// memory, and the arithmetic of spillway/optimizer.h on a vector of elements. Included by optimizer.cc alone.
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "hwy/highway.h"
#include "spillway/optimizer.h"

#if defined(SPILLWAY_OPTIMIZER_LANES_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef SPILLWAY_OPTIMIZER_LANES_INL_H
#undef SPILLWAY_OPTIMIZER_LANES_INL_H
#else
#define SPILLWAY_OPTIMIZER_LANES_INL_H
#endif

HWY_BEFORE_NAMESPACE();
namespace spillway::HWY_NAMESPACE {
namespace {

namespace hn = hwy::HWY_NAMESPACE;

using F32 = hn::CappedTag<float, 16>;  // SVE's length is known at run time: at most AVX-512's
using I32 = hn::RebindToSigned<F32>;
using U32 = hn::RebindToUnsigned<F32>;
using I16 = hn::Rebind<std::int16_t, F32>;
using U16 = hn::Rebind<std::uint16_t, F32>;
using F16 = hn::Rebind<hwy::float16_t, F32>;
using Floats = hn::Vec<F32>;
using Bits = hn::Vec<U32>;
constexpr std::size_t kMaxLanes = hn::MaxLanes(F32());  // Lanes() itself but on SVE

enum class Rule { kAdam, kAdagrad, kLion, kMomentum, kNesterov };
enum class Decay { kNone, kL2, kDecoupled };

constexpr bool kept_average(Rule rule) { return rule != Rule::kAdagrad; }
constexpr bool kept_square(Rule rule) { return rule == Rule::kAdam || rule == Rule::kAdagrad; }

// The arrays of a tile, or of the stack copy that stands in for its tail; all but the moments.
template <typename Element>
struct WeightArrays {
  Element* HWY_RESTRICT weight;
  std::int16_t* HWY_RESTRICT residual;
  float* HWY_RESTRICT master;
  const Element* HWY_RESTRICT gradient;
};
template <typename Element>
WeightArrays<Element> weights_of(const OptimizerTile& tile) {
  return {static_cast<Element*>(tile.weight), tile.residual, tile.master, static_cast<const Element*>(tile.gradient)};
}

// A scalar of the step in every lane. SVE's vectors have no size and cannot be members: there it is spread in use.
#if HWY_HAVE_SCALABLE
struct Constant {
  explicit Constant(float x) : value(x) {}
  HWY_INLINE operator Floats() const { return hn::Set(F32(), value); }
  float value;
};
HWY_INLINE Constant constant(float x) { return Constant(x); }
#else
using Constant = Floats;
HWY_INLINE Constant constant(float x) { return hn::Set(F32(), x); }
#endif

struct Constants {
  explicit Constants(const OptimizerScalars& s)
      : scale(constant(s.gradient_scale)),
        beta1(constant(s.beta1)),
        one_minus_beta1(constant(s.one_minus_beta1)),
        beta2(constant(s.beta2)),
        one_minus_beta2(constant(s.one_minus_beta2)),
        inv_sqrt_bias2(constant(s.inv_sqrt_bias2)),
        epsilon(constant(s.epsilon)),
        step_size(constant(s.step_size)),
        decay(constant(s.l2 ? s.l2_decay : s.negative_lr_decay)) {}
  Constant scale, beta1, one_minus_beta1, beta2, one_minus_beta2, inv_sqrt_bias2, epsilon, step_size, decay;
};

HWY_INLINE Bits magnitude(Floats x) { return hn::And(hn::BitCast(U32(), x), hn::Set(U32(), 0x7fffffffu)); }

// How weights and gradients lie in memory. `store` returns the magnitude of what forward and backward will read.
struct Fp32 {
  using Element = float;
  static constexpr bool kResidual = false, kMaster = false;
  static HWY_INLINE Floats gradient(const float* from) { return hn::LoadU(F32(), from); }
  static HWY_INLINE Floats load(const WeightArrays<float>& a, std::size_t i) { return hn::LoadU(F32(), a.weight + i); }
  static HWY_INLINE Bits store(const WeightArrays<float>& a, std::size_t i, Floats w) {
    hn::StoreU(w, F32(), a.weight + i);
    return magnitude(w);
  }
};

struct Bf16 {
  using Element = std::uint16_t;
  static constexpr bool kResidual = true, kMaster = false;
  static HWY_INLINE Bits widen(const std::uint16_t* from) {
    return hn::ShiftLeft<16>(hn::PromoteTo(U32(), hn::LoadU(U16(), from)));
  }
  static HWY_INLINE Floats gradient(const std::uint16_t* from) { return hn::BitCast(F32(), widen(from)); }
  static HWY_INLINE Floats load(const WeightArrays<Element>& a, std::size_t i) {
    const auto residual = hn::PromoteTo(I32(), hn::LoadU(I16(), a.residual + i));
    return hn::BitCast(F32(), hn::Add(widen(a.weight + i), hn::BitCast(U32(), residual)));
  }
  // The split of spillway/bf16.h. Both halves fit 16 bits, so the saturation of DemoteTo never acts.
  static HWY_INLINE Bits store(const WeightArrays<Element>& a, std::size_t i, Floats w) {
    const Bits u = hn::BitCast(U32(), w);
    const Bits hi = hn::ShiftRight<16>(hn::Add(u, hn::Set(U32(), 0x8000u)));
    const Bits widened = hn::ShiftLeft<16>(hi);
    hn::StoreU(hn::DemoteTo(U16(), hn::BitCast(I32(), hi)), U16(), a.weight + i);
    hn::StoreU(hn::DemoteTo(I16(), hn::BitCast(I32(), hn::Sub(u, widened))), I16(), a.residual + i);
    return hn::Max(magnitude(w), magnitude(hn::BitCast(F32(), widened)));  // the carry may turn a NaN into a number
  }
};

struct Fp16 {
  using Element = std::uint16_t;
  static constexpr bool kResidual = false, kMaster = true;
  static HWY_INLINE Floats gradient(const std::uint16_t* from) {
    return hn::PromoteTo(F32(), hn::BitCast(F16(), hn::LoadU(U16(), from)));
  }
  static HWY_INLINE Floats load(const WeightArrays<Element>& a, std::size_t i) {
    return hn::LoadU(F32(), a.master + i);
  }
  static HWY_INLINE Bits store(const WeightArrays<Element>& a, std::size_t i, Floats w) {
    const auto half = hn::DemoteTo(F16(), w);
    hn::StoreU(w, F32(), a.master + i);
    hn::StoreU(hn::BitCast(U16(), half), U16(), a.weight + i);
    return magnitude(hn::PromoteTo(F32(), half));
  }
};

// The moments' new values, their square root (of `v`, where the rule takes it), and what the weight moves by, in units
// of the step size.
template <Rule kRule>
HWY_INLINE Floats direction(const Constants& c, Floats g, Floats& m, Floats& v, Floats& root) {
  if constexpr (kRule == Rule::kAdam) {
    m = hn::MulAdd(c.beta1, m, hn::Mul(c.one_minus_beta1, g));
    v = hn::MulAdd(c.beta2, v, hn::Mul(hn::Mul(c.one_minus_beta2, g), g));
    root = hn::Sqrt(v);
    return hn::Div(m, hn::MulAdd(root, c.inv_sqrt_bias2, c.epsilon));
  } else if constexpr (kRule == Rule::kAdagrad) {
    v = hn::MulAdd(g, g, v);
    root = hn::Sqrt(v);
    return hn::Div(g, hn::Add(root, c.epsilon));
  } else if constexpr (kRule == Rule::kLion) {
    const Floats blend = hn::MulAdd(c.beta1, m, hn::Mul(c.one_minus_beta1, g));
    m = hn::MulAdd(c.beta2, m, hn::Mul(c.one_minus_beta2, g));
    const auto counts = hn::Ne(blend, hn::Zero(F32()));  // NaN counts, and must not become 1
    const auto number = hn::And(counts, hn::Eq(blend, blend));
    return hn::IfThenElse(number, hn::CopySign(hn::Set(F32(), 1.0f), blend), blend);
  } else {
    m = hn::MulAdd(c.beta1, m, hn::Mul(c.one_minus_beta1, g));
    return kRule == Rule::kNesterov ? hn::MulAdd(c.beta1, m, g) : m;
  }
}

// Updates a vector of weights and returns the largest magnitude that forward and backward will read, as bits: fp32
// magnitudes order like unsigned integers, and Inf and NaN come after every finite value.
template <typename Format, Rule kRule, Decay kDecay>
HWY_INLINE Bits update_weights(const WeightArrays<typename Format::Element>& a, std::size_t i, const Constants& c,
                               Floats& m, Floats& v, Floats& root) {
  Floats w = Format::load(a, i);
  Floats g = hn::Mul(Format::gradient(a.gradient + i), c.scale);
  if constexpr (kDecay == Decay::kL2) g = hn::MulAdd(c.decay, w, g);
  const Floats u = direction<kRule>(c, g, m, v, root);
  if constexpr (kDecay == Decay::kDecoupled) w = hn::MulAdd(c.decay, w, w);
  return Format::store(a, i, hn::NegMulAdd(c.step_size, u, w));
}

// A stack copy of the weights and gradients of an incomplete vector. Lanes past the end repeat the last element; a
// constant there could overflow where no real element does.
template <typename Format, std::size_t kCount>
struct WeightsTail {
  using Element = typename Format::Element;
  WeightsTail(const WeightArrays<Element>& a, std::size_t begin, std::size_t count) {
    for (std::size_t lane = 0; lane < kCount; ++lane) {
      const std::size_t i = begin + (lane < count ? lane : count - 1);
      weight[lane] = a.weight[i];
      gradient[lane] = a.gradient[i];
      if constexpr (Format::kResidual) residual[lane] = a.residual[i];
      if constexpr (Format::kMaster) master[lane] = a.master[i];
    }
  }
  WeightArrays<Element> arrays() { return {weight, residual, master, gradient}; }
  void copy_back(const WeightArrays<Element>& a, std::size_t begin, std::size_t count) const {
    std::memcpy(a.weight + begin, weight, count * sizeof(weight[0]));
    if constexpr (Format::kResidual) std::memcpy(a.residual + begin, residual, count * sizeof(std::int16_t));
    if constexpr (Format::kMaster) std::memcpy(a.master + begin, master, count * sizeof(float));
  }
  Element weight[kCount], gradient[kCount];
  std::int16_t residual[kCount];
  float master[kCount];
};

// Elements of one cache line of the narrowest exact array. The lines of all arrays are asked for ahead, into the
// second-level cache and, nearer, into the first: five streams at once are too many for an Intel processor's own
// prefetcher (bench/optimizer_bench: 0.44 instead of 0.56 ns a bf16 parameter on two cores; into the first alone:
// 0.465). An AMD processor's follows the four of exact fp32, and is only held up (near_of).
constexpr std::size_t kLine = 32, kFar = 2048;

// Past the end of a tile it asks for what nobody wants, which is harmless.
template <typename T>
HWY_INLINE void prefetch(const T* from, std::size_t near) {
  for (std::size_t at = 0; at < kLine; at += 64 / sizeof(T)) {
    __builtin_prefetch(from + near + at, 0, 3);
    __builtin_prefetch(from + kFar + at, 0, 2);
  }
}

template <typename Format>
HWY_INLINE void prefetch(const WeightArrays<typename Format::Element>& a, std::size_t i, std::size_t near) {
  prefetch(a.weight + i, near);
  if constexpr (Format::kResidual) prefetch(a.residual + i, near);
  if constexpr (Format::kMaster) prefetch(a.master + i, near);
}

}  // namespace
}  // namespace spillway::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
