// The optimizers with Highway: the same source compiled for every target with hardware FMA (AVX2, AVX-512, NEON, SVE),
// chosen at run time. sqrt, divide and fma round correctly on all of them, so the bits are those of
// optimizer_reference.cc, which also runs where there is no FMA (Highway's scalar MulAdd rounds twice and cannot be
// used).
//
// One pass: Adam reads 14 bytes and writes 12 per bf16 parameter, so the loop waits for memory, not for arithmetic.
#include "kernels/optimizer.h"

#include <cstring>

#include "kernels/float_environment.h"
#include "kernels/page_ahead.h"
#include "spillway/error.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/optimizer.cc"
#include "hwy/foreach_target.h"  // includes this file once per target
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace spillway::HWY_NAMESPACE {
namespace {

#if HWY_TARGET == HWY_SCALAR || HWY_TARGET == HWY_EMU128

bool update(const OptimizerTile& tile, const OptimizerScalars& scalars, std::size_t begin, std::size_t end,
            std::size_t /*near*/) {
  return optimizer_update_reference(tile, scalars, begin, end);
}

#else

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

// The arrays of a tile, or of the stack copy that stands in for its tail.
template <typename Element>
struct Arrays {
  Element* HWY_RESTRICT weight;
  std::int16_t* HWY_RESTRICT residual;
  float* HWY_RESTRICT master;
  float* HWY_RESTRICT exp_avg;
  float* HWY_RESTRICT exp_avg_sq;
  const Element* HWY_RESTRICT gradient;
};

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
  static HWY_INLINE Floats load(const Arrays<float>& a, std::size_t i) { return hn::LoadU(F32(), a.weight + i); }
  static HWY_INLINE Bits store(const Arrays<float>& a, std::size_t i, Floats w) {
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
  static HWY_INLINE Floats load(const Arrays<Element>& a, std::size_t i) {
    const auto residual = hn::PromoteTo(I32(), hn::LoadU(I16(), a.residual + i));
    return hn::BitCast(F32(), hn::Add(widen(a.weight + i), hn::BitCast(U32(), residual)));
  }
  // The split of spillway/bf16.h. Both halves fit 16 bits, so the saturation of DemoteTo never acts.
  static HWY_INLINE Bits store(const Arrays<Element>& a, std::size_t i, Floats w) {
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
  static HWY_INLINE Floats load(const Arrays<Element>& a, std::size_t i) { return hn::LoadU(F32(), a.master + i); }
  static HWY_INLINE Bits store(const Arrays<Element>& a, std::size_t i, Floats w) {
    const auto half = hn::DemoteTo(F16(), w);
    hn::StoreU(w, F32(), a.master + i);
    hn::StoreU(hn::BitCast(U16(), half), U16(), a.weight + i);
    return magnitude(hn::PromoteTo(F32(), half));
  }
};

// Updates a vector of elements and returns the largest magnitude among the results, as bits: fp32 magnitudes order like
// unsigned integers, and Inf and NaN come after every finite value.
template <typename Format, Rule kRule, Decay kDecay>
HWY_INLINE Bits update_lanes(const Arrays<typename Format::Element>& a, std::size_t i, const Constants& c) {
  Floats w = Format::load(a, i);
  Floats g = hn::Mul(Format::gradient(a.gradient + i), c.scale), u;
  if constexpr (kDecay == Decay::kL2) g = hn::MulAdd(c.decay, w, g);
  Bits largest = hn::Zero(U32());
  if constexpr (kRule == Rule::kAdam) {
    const Floats m = hn::MulAdd(c.beta1, hn::LoadU(F32(), a.exp_avg + i), hn::Mul(c.one_minus_beta1, g));
    const Floats v = hn::MulAdd(c.beta2, hn::LoadU(F32(), a.exp_avg_sq + i), hn::Mul(hn::Mul(c.one_minus_beta2, g), g));
    u = hn::Div(m, hn::MulAdd(hn::Sqrt(v), c.inv_sqrt_bias2, c.epsilon));
    hn::StoreU(m, F32(), a.exp_avg + i);
    hn::StoreU(v, F32(), a.exp_avg_sq + i);
    largest = hn::Max(magnitude(m), magnitude(v));
  } else if constexpr (kRule == Rule::kAdagrad) {
    const Floats v = hn::MulAdd(g, g, hn::LoadU(F32(), a.exp_avg_sq + i));
    u = hn::Div(g, hn::Add(hn::Sqrt(v), c.epsilon));
    hn::StoreU(v, F32(), a.exp_avg_sq + i);
    largest = magnitude(v);
  } else if constexpr (kRule == Rule::kLion) {
    const Floats before = hn::LoadU(F32(), a.exp_avg + i);
    const Floats blend = hn::MulAdd(c.beta1, before, hn::Mul(c.one_minus_beta1, g));
    const Floats m = hn::MulAdd(c.beta2, before, hn::Mul(c.one_minus_beta2, g));
    const auto counts = hn::Ne(blend, hn::Zero(F32()));  // NaN counts, and must not become 1
    const auto number = hn::And(counts, hn::Eq(blend, blend));
    u = hn::IfThenElse(number, hn::CopySign(hn::Set(F32(), 1.0f), blend), blend);
    hn::StoreU(m, F32(), a.exp_avg + i);
    largest = magnitude(m);
  } else {
    const Floats m = hn::MulAdd(c.beta1, hn::LoadU(F32(), a.exp_avg + i), hn::Mul(c.one_minus_beta1, g));
    u = kRule == Rule::kNesterov ? hn::MulAdd(c.beta1, m, g) : m;
    hn::StoreU(m, F32(), a.exp_avg + i);
    largest = magnitude(m);
  }
  if constexpr (kDecay == Decay::kDecoupled) w = hn::MulAdd(c.decay, w, w);
  w = hn::NegMulAdd(c.step_size, u, w);
  return hn::Max(Format::store(a, i, w), largest);
}

// The last, incomplete vector: through a copy on the stack, so that it runs the very same instructions. Lanes past the
// end repeat the last element; a constant there could overflow where no real element does.
template <typename Format, Rule kRule, Decay kDecay>
HWY_INLINE Bits update_tail(const Arrays<typename Format::Element>& a, std::size_t begin, std::size_t count,
                            const Constants& c) {
  typename Format::Element weight[kMaxLanes], gradient[kMaxLanes];
  std::int16_t residual[kMaxLanes];
  float master[kMaxLanes], exp_avg[kMaxLanes], exp_avg_sq[kMaxLanes];
  for (std::size_t lane = 0; lane < hn::Lanes(F32()); ++lane) {
    const std::size_t i = begin + (lane < count ? lane : count - 1);
    weight[lane] = a.weight[i];
    gradient[lane] = a.gradient[i];
    if constexpr (Format::kResidual) residual[lane] = a.residual[i];
    if constexpr (Format::kMaster) master[lane] = a.master[i];
    if constexpr (kept_average(kRule)) exp_avg[lane] = a.exp_avg[i];
    if constexpr (kept_square(kRule)) exp_avg_sq[lane] = a.exp_avg_sq[i];
  }
  const Bits largest =
      update_lanes<Format, kRule, kDecay>({weight, residual, master, exp_avg, exp_avg_sq, gradient}, 0, c);
  std::memcpy(a.weight + begin, weight, count * sizeof(weight[0]));
  if constexpr (Format::kResidual) std::memcpy(a.residual + begin, residual, count * sizeof(std::int16_t));
  if constexpr (Format::kMaster) std::memcpy(a.master + begin, master, count * sizeof(float));
  if constexpr (kept_average(kRule)) std::memcpy(a.exp_avg + begin, exp_avg, count * sizeof(float));
  if constexpr (kept_square(kRule)) std::memcpy(a.exp_avg_sq + begin, exp_avg_sq, count * sizeof(float));
  return largest;
}

// Elements of one cache line of the narrowest array. The lines of all arrays are asked for ahead, into the second-level
// cache and, nearer, into the first: five streams at once are too many for an Intel processor's own prefetcher
// (bench/optimizer_bench: 0.44 instead of 0.56 ns a bf16 parameter on two cores; into the first alone: 0.465). An AMD
// processor's follows the four of fp32, and is only held up (near_of).
constexpr std::size_t kLine = 32, kFar = 2048;

// Past the end of a tile it asks for what nobody wants, which is harmless.
template <typename T>
HWY_INLINE void prefetch(const T* from, std::size_t near) {
  for (std::size_t at = 0; at < kLine; at += 64 / sizeof(T)) {
    __builtin_prefetch(from + near + at, 0, 3);
    __builtin_prefetch(from + kFar + at, 0, 2);
  }
}

template <typename Format, Rule kRule>
HWY_INLINE void prefetch(const Arrays<typename Format::Element>& a, std::size_t i, std::size_t near) {
  prefetch(a.weight + i, near);
  if constexpr (Format::kResidual) prefetch(a.residual + i, near);
  if constexpr (Format::kMaster) prefetch(a.master + i, near);
  if constexpr (kept_average(kRule)) prefetch(a.exp_avg + i, near);
  if constexpr (kept_square(kRule)) prefetch(a.exp_avg_sq + i, near);
  prefetch(a.gradient + i, near);
}

template <typename Format, Rule kRule, Decay kDecay>
bool update_range(const OptimizerTile& tile, const OptimizerScalars& scalars, std::size_t begin, std::size_t end,
                  std::size_t near) {
  using Element = typename Format::Element;
  const Arrays<Element> a{
      static_cast<Element*>(tile.weight),        tile.residual, tile.master, tile.exp_avg, tile.exp_avg_sq,
      static_cast<const Element*>(tile.gradient)};
  const Constants c(scalars);
  const std::size_t lanes = hn::Lanes(F32());
  Bits largest = hn::Zero(U32());
  std::size_t i = begin;
  for (; i + kLine <= end; i += kLine) {
    if (near != 0) {
      prefetch<Format, kRule>(a, i, near);
    } else if ((i - begin) % (kSmallPage / sizeof(Element)) == 0) {  // states lie in huge pages, and these may not
      ask_page(a.weight + i, 1);
      ask_page(a.gradient + i, 1);
    }
    for (std::size_t k = 0; k < kLine; k += lanes)
      largest = hn::Max(largest, update_lanes<Format, kRule, kDecay>(a, i + k, c));
  }
  for (; i + lanes <= end; i += lanes) largest = hn::Max(largest, update_lanes<Format, kRule, kDecay>(a, i, c));
  if (i < end) largest = hn::Max(largest, update_tail<Format, kRule, kDecay>(a, i, end - i, c));
  return hn::AllTrue(U32(), hn::Lt(largest, hn::Set(U32(), 0x7f800000u)));
}

template <typename Format, Rule kRule>
bool update_by(const OptimizerTile& tile, const OptimizerScalars& s, std::size_t begin, std::size_t end,
               std::size_t near) {
  if constexpr (kRule != Rule::kLion) {
    if (s.l2) return update_range<Format, kRule, Decay::kL2>(tile, s, begin, end, near);
  }
  if constexpr (kRule == Rule::kAdam || kRule == Rule::kLion) {
    if (s.decoupled) return update_range<Format, kRule, Decay::kDecoupled>(tile, s, begin, end, near);
  }
  return update_range<Format, kRule, Decay::kNone>(tile, s, begin, end, near);
}

template <typename Format>
bool update_format(const OptimizerTile& tile, const OptimizerScalars& s, std::size_t begin, std::size_t end,
                   std::size_t near) {
  switch (s.kind) {
    case OptimizerKind::kAdam: return update_by<Format, Rule::kAdam>(tile, s, begin, end, near);
    case OptimizerKind::kAdagrad: return update_by<Format, Rule::kAdagrad>(tile, s, begin, end, near);
    case OptimizerKind::kLion: return update_by<Format, Rule::kLion>(tile, s, begin, end, near);
    case OptimizerKind::kSgd: break;
  }
  return s.nesterov ? update_by<Format, Rule::kNesterov>(tile, s, begin, end, near)
                    : update_by<Format, Rule::kMomentum>(tile, s, begin, end, near);
}

bool update(const OptimizerTile& tile, const OptimizerScalars& scalars, std::size_t begin, std::size_t end,
            std::size_t near) {
  switch (tile.type) {
    case DType::kFloat32: return update_format<Fp32>(tile, scalars, begin, end, near);
    case DType::kBFloat16: return update_format<Bf16>(tile, scalars, begin, end, near);
    case DType::kFloat16: break;
  }
  return update_format<Fp16>(tile, scalars, begin, end, near);
}

#endif

}  // namespace
}  // namespace spillway::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace spillway {
namespace {

HWY_EXPORT(update);

// Elements from here to the lines that are asked for into the first-level cache; 0: none are. On an EPYC of the fourth
// generation a step with fp32 took 1.43 of PyTorch's on one core with lines asked for, and 1.26 with the pages of
// weights and gradients alone; with bf16, whose arrays are more and shorter, 1.03 and 1.13.
std::size_t near_of(DType type) {
#if HWY_ARCH_X86
  if (type == DType::kFloat32 && __builtin_cpu_is("amd")) return 0;
#endif
  static_cast<void>(type);
  return 256;
}

using Update = bool (*)(const OptimizerTile&, const OptimizerScalars&, std::size_t, std::size_t, std::size_t);

// With the checks and the floating-point environment of the public call.
bool run(Update update, const OptimizerTile& tile, const OptimizerScalars& scalars, std::size_t begin, std::size_t end,
         std::size_t near) {
  check_optimizer_arguments(tile, scalars, begin, end);
  const DefaultFloatEnvironment environment;
  return update(tile, scalars, begin, end, near);
}

template <Update kUpdate>
bool update_on(const OptimizerTile& tile, const OptimizerScalars& scalars, std::size_t begin, std::size_t end) {
  return run(kUpdate, tile, scalars, begin, end, near_of(tile.type));
}

}  // namespace

bool optimizer_update(const OptimizerTile& tile, const OptimizerScalars& scalars, std::size_t begin, std::size_t end) {
  return run(HWY_DYNAMIC_DISPATCH(update), tile, scalars, begin, end, near_of(tile.type));
}

bool optimizer_update_piece(const OptimizerTile& tile, const OptimizerScalars& scalars, std::size_t begin,
                            std::size_t end) {
  return run(HWY_DYNAMIC_DISPATCH(update), tile, scalars, begin, end, kUpdatePiece);
}

std::vector<OptimizerTarget> optimizer_targets() {
  std::vector<OptimizerTarget> targets;
  const std::int64_t machine = hwy::SupportedTargets();
  const auto add = [&](std::int64_t target, OptimizerFunction function) {
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
#if HWY_TARGETS & HWY_SVE2_128
  add(HWY_SVE2_128, update_on<N_SVE2_128::update>);
#endif
#if HWY_TARGETS & HWY_SVE_256
  add(HWY_SVE_256, update_on<N_SVE_256::update>);
#endif
#if HWY_TARGETS & HWY_SVE2
  add(HWY_SVE2, update_on<N_SVE2::update>);
#endif
#if HWY_TARGETS & HWY_SVE
  add(HWY_SVE, update_on<N_SVE::update>);
#endif
#if HWY_TARGETS & HWY_NEON
  add(HWY_NEON, update_on<N_NEON::update>);
#endif
  targets.push_back({"scalar", optimizer_update_reference});
  return targets;
}

std::string slow_optimizers() {
  if (optimizer_targets().size() > 1) return {};
  // bench/results/optimizer.jsonl: 16.9 ns a bf16 parameter on one thread against 0.9 with AVX2.
  return "cpu: has no vector instructions with fused multiply-add (AVX2, NEON), so Adam takes about 17 times as long, "
         "with the same bits; in a virtual machine pass the host's CPU on (QEMU: -cpu host)";
}

}  // namespace spillway
#endif  // HWY_ONCE
