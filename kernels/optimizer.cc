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
#if HWY_TARGET != HWY_SCALAR && HWY_TARGET != HWY_EMU128
#include "kernels/optimizer_lanes-inl.h"
#include "kernels/optimizer_reduced-inl.h"
#endif

HWY_BEFORE_NAMESPACE();
namespace spillway::HWY_NAMESPACE {
namespace {

#if HWY_TARGET == HWY_SCALAR || HWY_TARGET == HWY_EMU128

bool update(const OptimizerTile& tile, const OptimizerScalars& scalars, std::size_t begin, std::size_t end,
            std::size_t /*near*/) {
  return optimizer_update_reference(tile, scalars, begin, end);
}

#else

template <typename Element>
struct Arrays {
  WeightArrays<Element> weights;
  float* HWY_RESTRICT exp_avg;
  float* HWY_RESTRICT exp_avg_sq;
};

// Updates a vector of elements and returns the largest magnitude among the results, as bits.
template <typename Format, Rule kRule, Decay kDecay>
HWY_INLINE Bits update_lanes(const Arrays<typename Format::Element>& a, std::size_t i, const Constants& c) {
  Floats m = hn::Zero(F32()), v = hn::Zero(F32()), root = hn::Zero(F32());
  if constexpr (kept_average(kRule)) m = hn::LoadU(F32(), a.exp_avg + i);
  if constexpr (kept_square(kRule)) v = hn::LoadU(F32(), a.exp_avg_sq + i);
  Bits largest = update_weights<Format, kRule, kDecay>(a.weights, i, c, m, v, root);
  if constexpr (kept_average(kRule)) {
    hn::StoreU(m, F32(), a.exp_avg + i);
    largest = hn::Max(largest, magnitude(m));
  }
  if constexpr (kept_square(kRule)) {
    hn::StoreU(v, F32(), a.exp_avg_sq + i);
    largest = hn::Max(largest, magnitude(v));
  }
  return largest;
}

// The last, incomplete vector: through a copy on the stack, so that it runs the very same instructions.
template <typename Format, Rule kRule, Decay kDecay>
HWY_INLINE Bits update_tail(const Arrays<typename Format::Element>& a, std::size_t begin, std::size_t count,
                            const Constants& c) {
  WeightsTail<Format, kMaxLanes> weights(a.weights, begin, count);
  float exp_avg[kMaxLanes], exp_avg_sq[kMaxLanes];
  for (std::size_t lane = 0; lane < hn::Lanes(F32()); ++lane) {
    const std::size_t i = begin + (lane < count ? lane : count - 1);
    if constexpr (kept_average(kRule)) exp_avg[lane] = a.exp_avg[i];
    if constexpr (kept_square(kRule)) exp_avg_sq[lane] = a.exp_avg_sq[i];
  }
  const Bits largest = update_lanes<Format, kRule, kDecay>({weights.arrays(), exp_avg, exp_avg_sq}, 0, c);
  weights.copy_back(a.weights, begin, count);
  if constexpr (kept_average(kRule)) std::memcpy(a.exp_avg + begin, exp_avg, count * sizeof(float));
  if constexpr (kept_square(kRule)) std::memcpy(a.exp_avg_sq + begin, exp_avg_sq, count * sizeof(float));
  return largest;
}

template <typename Format, Rule kRule>
HWY_INLINE void prefetch(const Arrays<typename Format::Element>& a, std::size_t i, std::size_t near) {
  prefetch<Format>(a.weights, i, near);
  if constexpr (kept_average(kRule)) prefetch(a.exp_avg + i, near);
  if constexpr (kept_square(kRule)) prefetch(a.exp_avg_sq + i, near);
  prefetch(a.weights.gradient + i, near);
}

template <typename Format, Rule kRule, Decay kDecay>
bool update_range(const OptimizerTile& tile, const OptimizerScalars& scalars, std::size_t begin, std::size_t end,
                  std::size_t near) {
  using Element = typename Format::Element;
  const Arrays<Element> a{weights_of<Element>(tile), tile.exp_avg, tile.exp_avg_sq};
  const Constants c(scalars);
  const std::size_t lanes = hn::Lanes(F32());
  Bits largest = hn::Zero(U32());
  std::size_t i = begin;
  for (; i + kLine <= end; i += kLine) {
    if (near != 0) {
      prefetch<Format, kRule>(a, i, near);
    } else if ((i - begin) % (kSmallPage / sizeof(Element)) == 0) {  // states lie in huge pages, and these may not
      ask_page(a.weights.weight + i, 1);
      ask_page(a.weights.gradient + i, 1);
    }
    for (std::size_t k = 0; k < kLine; k += lanes)
      largest = hn::Max(largest, update_lanes<Format, kRule, kDecay>(a, i + k, c));
  }
  for (; i + lanes <= end; i += lanes) largest = hn::Max(largest, update_lanes<Format, kRule, kDecay>(a, i, c));
  if (i < end) largest = hn::Max(largest, update_tail<Format, kRule, kDecay>(a, i, end - i, c));
  return hn::AllTrue(U32(), hn::Lt(largest, hn::Set(U32(), 0x7f800000u)));
}

template <typename Format, Rule kRule, Decay kDecay>
bool update_moments(const OptimizerTile& tile, const OptimizerScalars& scalars, std::size_t begin, std::size_t end,
                    std::size_t near) {
  if constexpr (kRule == Rule::kAdam || kRule == Rule::kLion) {
    if (tile.reduced.format == MomentFormat::kBFloat16)
      return update_reduced<Format, kRule, kDecay, Bf16Moments>(tile, scalars, begin, end, near);
    if (tile.reduced.format == MomentFormat::kInt8)
      return update_reduced<Format, kRule, kDecay, Int8Moments>(tile, scalars, begin, end, near);
  }
  return update_range<Format, kRule, kDecay>(tile, scalars, begin, end, near);
}

template <typename Format, Rule kRule>
bool update_by(const OptimizerTile& tile, const OptimizerScalars& s, std::size_t begin, std::size_t end,
               std::size_t near) {
  if constexpr (kRule != Rule::kLion) {
    if (s.l2) return update_moments<Format, kRule, Decay::kL2>(tile, s, begin, end, near);
  }
  if constexpr (kRule == Rule::kAdam || kRule == Rule::kLion) {
    if (s.decoupled) return update_moments<Format, kRule, Decay::kDecoupled>(tile, s, begin, end, near);
  }
  return update_moments<Format, kRule, Decay::kNone>(tile, s, begin, end, near);
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
std::size_t near_of(const OptimizerTile& tile) {
#if HWY_ARCH_X86
  const bool exact = tile.reduced.format == MomentFormat::kFloat32;
  if (tile.type == DType::kFloat32 && exact && __builtin_cpu_is("amd")) return 0;
#endif
  static_cast<void>(tile);
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
  return run(kUpdate, tile, scalars, begin, end, near_of(tile));
}

}  // namespace

bool optimizer_update(const OptimizerTile& tile, const OptimizerScalars& scalars, std::size_t begin, std::size_t end) {
  return run(HWY_DYNAMIC_DISPATCH(update), tile, scalars, begin, end, near_of(tile));
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
