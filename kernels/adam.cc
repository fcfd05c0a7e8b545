// Adam with Highway: the same source compiled for every x86-64 target with hardware FMA (AVX2, AVX-512), chosen at run
// time. sqrt, divide and fma round correctly on all of them, so the bits are those of adam_reference.cc, which also
// runs where there is no FMA (Highway's scalar MulAdd rounds twice and cannot be used).
//
// One pass: per bf16 parameter 14 bytes are read and 12 written, so the loop waits for memory, not for arithmetic.
#include "kernels/adam.h"

#include <cstring>

#include "kernels/float_environment.h"
#include "spillway/bf16.h"
#include "spillway/error.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/adam.cc"
#include "hwy/foreach_target.h"  // includes this file once per target
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace spillway::HWY_NAMESPACE {
namespace {

#if HWY_TARGET == HWY_SCALAR || HWY_TARGET == HWY_EMU128

bool update(const AdamTile& tile, const AdamScalars& scalars, std::size_t begin, std::size_t end) {
  return adam_update_reference(tile, scalars, begin, end);
}

#else

namespace hn = hwy::HWY_NAMESPACE;

using F32 = hn::ScalableTag<float>;
using I32 = hn::RebindToSigned<F32>;
using U32 = hn::RebindToUnsigned<F32>;
using I16 = hn::Rebind<std::int16_t, F32>;
using U16 = hn::Rebind<std::uint16_t, F32>;
using Floats = hn::Vec<F32>;
using Bits = hn::Vec<U32>;
constexpr std::size_t kLanes = hn::MaxLanes(F32());

enum class Decay { kNone, kL2, kDecoupled };

// The arrays of a tile, or of the stack copy that stands in for its tail.
template <typename Weight>  // float, or std::uint16_t for bf16
struct Arrays {
  Weight* HWY_RESTRICT weight;
  std::int16_t* HWY_RESTRICT residual;
  float* HWY_RESTRICT exp_avg;
  float* HWY_RESTRICT exp_avg_sq;
  const Weight* HWY_RESTRICT gradient;
};

struct Constants {
  explicit Constants(const AdamScalars& s)
      : scale(hn::Set(F32(), s.gradient_scale)),
        beta1(hn::Set(F32(), s.beta1)),
        one_minus_beta1(hn::Set(F32(), s.one_minus_beta1)),
        beta2(hn::Set(F32(), s.beta2)),
        one_minus_beta2(hn::Set(F32(), s.one_minus_beta2)),
        inv_sqrt_bias2(hn::Set(F32(), s.inv_sqrt_bias2)),
        epsilon(hn::Set(F32(), s.epsilon)),
        step_size(hn::Set(F32(), s.step_size)),
        decay(hn::Set(F32(), s.l2 ? s.l2_decay : s.negative_lr_decay)) {}
  Floats scale, beta1, one_minus_beta1, beta2, one_minus_beta2, inv_sqrt_bias2, epsilon, step_size, decay;
};

HWY_INLINE Bits widen(const std::uint16_t* from) {
  return hn::ShiftLeft<16>(hn::PromoteTo(U32(), hn::LoadU(U16(), from)));
}

HWY_INLINE Floats load_weight(const Arrays<float>& a, std::size_t i) { return hn::LoadU(F32(), a.weight + i); }

HWY_INLINE Floats load_weight(const Arrays<std::uint16_t>& a, std::size_t i) {
  const auto residual = hn::PromoteTo(I32(), hn::LoadU(I16(), a.residual + i));
  return hn::BitCast(F32(), hn::Add(widen(a.weight + i), hn::BitCast(U32(), residual)));
}

HWY_INLINE void store_weight(const Arrays<float>& a, std::size_t i, Floats w) { hn::StoreU(w, F32(), a.weight + i); }

// The split of spillway/bf16.h. Both halves fit 16 bits, so the saturation of DemoteTo never acts.
HWY_INLINE void store_weight(const Arrays<std::uint16_t>& a, std::size_t i, Floats w) {
  const Bits u = hn::BitCast(U32(), w);
  const Bits hi = hn::ShiftRight<16>(hn::Add(u, hn::Set(U32(), 0x8000u)));
  const Bits lo = hn::Sub(u, hn::ShiftLeft<16>(hi));
  hn::StoreU(hn::DemoteTo(U16(), hn::BitCast(I32(), hi)), U16(), a.weight + i);
  hn::StoreU(hn::DemoteTo(I16(), hn::BitCast(I32(), lo)), I16(), a.residual + i);
}

HWY_INLINE Floats load_gradient(const float* from) { return hn::LoadU(F32(), from); }
HWY_INLINE Floats load_gradient(const std::uint16_t* from) { return hn::BitCast(F32(), widen(from)); }

HWY_INLINE Bits magnitude(Floats x) { return hn::And(hn::BitCast(U32(), x), hn::Set(U32(), 0x7fffffffu)); }

// Updates kLanes elements and returns the largest magnitude among the results, as bits: fp32 magnitudes order like
// unsigned integers, and Inf and NaN come after every finite value.
template <Decay kDecay, typename Weight>
HWY_INLINE Bits update_lanes(const Arrays<Weight>& a, std::size_t i, const Constants& c) {
  Floats w = load_weight(a, i);
  Floats g = hn::Mul(load_gradient(a.gradient + i), c.scale);
  if constexpr (kDecay == Decay::kL2) g = hn::MulAdd(c.decay, w, g);
  const Floats m = hn::MulAdd(c.beta1, hn::LoadU(F32(), a.exp_avg + i), hn::Mul(c.one_minus_beta1, g));
  const Floats v = hn::MulAdd(c.beta2, hn::LoadU(F32(), a.exp_avg_sq + i), hn::Mul(hn::Mul(c.one_minus_beta2, g), g));
  const Floats d = hn::MulAdd(hn::Sqrt(v), c.inv_sqrt_bias2, c.epsilon);
  const Floats u = hn::Div(m, d);
  if constexpr (kDecay == Decay::kDecoupled) w = hn::MulAdd(c.decay, w, w);
  w = hn::NegMulAdd(c.step_size, u, w);
  hn::StoreU(m, F32(), a.exp_avg + i);
  hn::StoreU(v, F32(), a.exp_avg_sq + i);
  store_weight(a, i, w);
  return hn::Max(magnitude(w), hn::Max(magnitude(m), magnitude(v)));
}

// The last, incomplete vector: through a copy on the stack, so that it runs the very same instructions. Lanes past the
// end repeat the last element; a constant there could overflow where no real element does.
template <Decay kDecay, typename Weight>
HWY_INLINE Bits update_tail(const Arrays<Weight>& a, std::size_t begin, std::size_t count, const Constants& c) {
  Weight weight[kLanes], gradient[kLanes];
  std::int16_t residual[kLanes];
  float exp_avg[kLanes], exp_avg_sq[kLanes];
  for (std::size_t lane = 0; lane < kLanes; ++lane) {
    const std::size_t i = begin + (lane < count ? lane : count - 1);
    weight[lane] = a.weight[i];
    gradient[lane] = a.gradient[i];
    residual[lane] = a.residual ? a.residual[i] : std::int16_t{0};
    exp_avg[lane] = a.exp_avg[i];
    exp_avg_sq[lane] = a.exp_avg_sq[i];
  }
  const Bits largest = update_lanes<kDecay>(Arrays<Weight>{weight, residual, exp_avg, exp_avg_sq, gradient}, 0, c);
  std::memcpy(a.weight + begin, weight, count * sizeof(Weight));
  if (a.residual) std::memcpy(a.residual + begin, residual, count * sizeof(std::int16_t));
  std::memcpy(a.exp_avg + begin, exp_avg, count * sizeof(float));
  std::memcpy(a.exp_avg_sq + begin, exp_avg_sq, count * sizeof(float));
  return largest;
}

// Elements of one cache line of the narrowest array, and how far ahead the lines of all are asked for: five streams at
// once are too many for the processor's own prefetcher (bench/adam_bench: 0.90 instead of 1.08 ns a parameter).
constexpr std::size_t kLine = 32, kAhead = 1024;

template <int kToWrite, typename T>
HWY_INLINE void prefetch_line(const T* from) {
  for (std::size_t at = 0; at < kLine; at += 64 / sizeof(T)) __builtin_prefetch(from + at, kToWrite);
}

// Past the end of a tile it asks for what nobody wants, which is harmless.
template <typename Weight>
HWY_INLINE void prefetch(const Arrays<Weight>& a, std::size_t i) {
  prefetch_line<1>(a.weight + i);
  prefetch_line<1>(a.exp_avg + i);
  prefetch_line<1>(a.exp_avg_sq + i);
  if constexpr (sizeof(Weight) == 2) prefetch_line<1>(a.residual + i);
  prefetch_line<0>(a.gradient + i);
}

template <Decay kDecay, typename Weight>
bool update_range(const AdamTile& tile, const AdamScalars& scalars, std::size_t begin, std::size_t end) {
  const Arrays<Weight> a{static_cast<Weight*>(tile.weight), tile.residual, tile.exp_avg, tile.exp_avg_sq,
                         static_cast<const Weight*>(tile.gradient)};
  const Constants c(scalars);
  Bits largest = hn::Zero(U32());
  std::size_t i = begin;
  for (; i + kLine <= end; i += kLine) {
    prefetch(a, i + kAhead);
    for (std::size_t k = 0; k < kLine; k += kLanes) largest = hn::Max(largest, update_lanes<kDecay>(a, i + k, c));
  }
  for (; i + kLanes <= end; i += kLanes) largest = hn::Max(largest, update_lanes<kDecay>(a, i, c));
  if (i < end) largest = hn::Max(largest, update_tail<kDecay>(a, i, end - i, c));
  return hn::AllTrue(U32(), hn::Lt(largest, hn::Set(U32(), 0x7f800000u)));
}

template <typename Weight>
bool update_typed(const AdamTile& tile, const AdamScalars& scalars, std::size_t begin, std::size_t end) {
  if (scalars.l2) return update_range<Decay::kL2, Weight>(tile, scalars, begin, end);
  if (scalars.decoupled) return update_range<Decay::kDecoupled, Weight>(tile, scalars, begin, end);
  return update_range<Decay::kNone, Weight>(tile, scalars, begin, end);
}

bool update(const AdamTile& tile, const AdamScalars& scalars, std::size_t begin, std::size_t end) {
  return tile.type == DType::kFloat32 ? update_typed<float>(tile, scalars, begin, end)
                                      : update_typed<std::uint16_t>(tile, scalars, begin, end);
}

#endif

}  // namespace
}  // namespace spillway::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace spillway {
namespace {

HWY_EXPORT(update);

// The function of one target, with the checks and the floating-point environment of the public call.
template <AdamFunction kUpdate>
bool update_on(const AdamTile& tile, const AdamScalars& scalars, std::size_t begin, std::size_t end) {
  check_adam_arguments(tile, scalars, begin, end);
  const DefaultFloatEnvironment environment;
  return kUpdate(tile, scalars, begin, end);
}

}  // namespace

bool adam_update(const AdamTile& tile, const AdamScalars& scalars, std::size_t begin, std::size_t end) {
  check_adam_arguments(tile, scalars, begin, end);
  const DefaultFloatEnvironment environment;
  return HWY_DYNAMIC_DISPATCH(update)(tile, scalars, begin, end);
}

std::vector<AdamTarget> adam_targets() {
  std::vector<AdamTarget> targets;
  const std::int64_t machine = hwy::SupportedTargets();
  const auto add = [&](std::int64_t target, AdamFunction function) {
    if (machine & target) targets.push_back({hwy::TargetName(target), function});
  };
#if HWY_TARGETS & HWY_AVX3_DL
  add(HWY_AVX3_DL, update_on<N_AVX3_DL::update>);
#endif
#if HWY_TARGETS & HWY_AVX3
  add(HWY_AVX3, update_on<N_AVX3::update>);
#endif
#if HWY_TARGETS & HWY_AVX2
  add(HWY_AVX2, update_on<N_AVX2::update>);
#endif
  targets.push_back({"scalar", adam_update_reference});
  return targets;
}

}  // namespace spillway
#endif  // HWY_ONCE
