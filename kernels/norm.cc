#include "kernels/norm.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "kernels/float_environment.h"
#include "spillway/error.h"
#include "spillway/units.h"

// SVE's vectors have no size, so that the accumulators of several leaves cannot be an array of them: NEON is used.
#if defined(__aarch64__)
#undef HWY_DISABLED_TARGETS
#define HWY_DISABLED_TARGETS (HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128)
#endif
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/norm.cc"
#include "hwy/foreach_target.h"  // includes this file once per target
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace spillway::HWY_NAMESPACE {
namespace {

namespace hn = hwy::HWY_NAMESPACE;

using F64 = hn::CappedTag<double, 16>;
using F32 = hn::Rebind<float, F64>;
using U32 = hn::Rebind<std::uint32_t, F64>;
using U16 = hn::Rebind<std::uint16_t, F64>;
using Doubles = hn::Vec<F64>;
constexpr std::size_t kAccumulators = 16;
constexpr std::size_t kVectors = kAccumulators / hn::MaxLanes(F64());

struct Fp32 {
  using Element = float;
  static HWY_INLINE Doubles load(const float* from) { return hn::PromoteTo(F64(), hn::LoadU(F32(), from)); }
};
struct Bf16 {
  using Element = std::uint16_t;
  static HWY_INLINE Doubles load(const std::uint16_t* from) {
    const auto bits = hn::ShiftLeft<16>(hn::PromoteTo(U32(), hn::LoadU(U16(), from)));
    return hn::PromoteTo(F64(), hn::BitCast(F32(), bits));
  }
};
// In integers, for targets without a conversion of their own: the fp16 number is an fp32 number with an exponent that
// is 112 too small, and so is every subnormal; Inf and NaN become the largest numbers and are put right.
struct Fp16 {
  using Element = std::uint16_t;
  static HWY_INLINE Doubles load(const std::uint16_t* from) {
    const auto half = hn::PromoteTo(U32(), hn::LoadU(U16(), from));
    const auto magnitude = hn::ShiftLeft<13>(hn::And(half, hn::Set(U32(), 0x7fffu)));
    const auto small = hn::Mul(hn::BitCast(F32(), magnitude), hn::Set(F32(), 0x1p112f));
    const auto special = hn::Gt(magnitude, hn::Set(U32(), 0x0f7fffffu));
    return hn::PromoteTo(F64(), hn::IfThenElse(hn::RebindMask(F32(), special), hn::Inf(F32()), small));
  }
};

constexpr std::size_t kTogether = 4;  // leaves summed at once: one alone waits for its own additions

// The sums of squares of whole leaves. The square of an fp32 number has at most 48 significant bits and is exact in
// double, so a fused multiply-add rounds once, like a sum of exact squares does: fused or not, the bits are the same.
template <typename Format, std::size_t kLeaves>
HWY_INLINE void whole_leaves(const typename Format::Element* from, double* leaves) {
  Doubles sums[kLeaves][kVectors];
  for (auto& leaf : sums)
    for (Doubles& sum : leaf) sum = hn::Zero(F64());
  for (std::size_t i = 0; i < kNormLeaf; i += kAccumulators) {
    for (std::size_t leaf = 0; leaf < kLeaves; ++leaf) {
      const auto* at = from + leaf * kNormLeaf + i;
      __builtin_prefetch(
          reinterpret_cast<const std::byte*>(from + kLeaves * kNormLeaf) + (leaf * kNormLeaf + i) * sizeof(*from), 0,
          3);
      for (std::size_t k = 0; k < kVectors; ++k) {
        const Doubles x = Format::load(at + k * hn::MaxLanes(F64()));
        sums[leaf][k] = hn::MulAdd(x, x, sums[leaf][k]);
      }
    }
  }
  for (std::size_t leaf = 0; leaf < kLeaves; ++leaf) {
    double folded[kAccumulators];
    for (std::size_t k = 0; k < kVectors; ++k) hn::StoreU(sums[leaf][k], F64(), folded + k * hn::MaxLanes(F64()));
    for (std::size_t half = kAccumulators / 2; half > 0; half /= 2)
      for (std::size_t j = 0; j < half; ++j) folded[j] += folded[j + half];
    leaves[leaf] = folded[0];
  }
}

template <typename Format>
void leaf_sums_of(const void* data, std::size_t count, double* leaves) {
  using Element = typename Format::Element;
  const auto* from = static_cast<const Element*>(data);
  std::size_t i = 0;
  for (; i + kTogether * kNormLeaf <= count; i += kTogether * kNormLeaf)
    whole_leaves<Format, kTogether>(from + i, leaves + i / kNormLeaf);
  for (; i < count; i += kNormLeaf) {
    // Zeros for what is missing: adding +0 changes no sum of squares.
    Element tail[kNormLeaf] = {};
    for (std::size_t j = 0; j < kNormLeaf && i + j < count; ++j) tail[j] = from[i + j];
    whole_leaves<Format, 1>(tail, leaves + i / kNormLeaf);
  }
}

void leaf_sums(const void* data, DType type, std::size_t count, double* leaves) {
  switch (type) {
    case DType::kFloat32: return leaf_sums_of<Fp32>(data, count, leaves);
    case DType::kBFloat16: return leaf_sums_of<Bf16>(data, count, leaves);
    case DType::kFloat16: return leaf_sums_of<Fp16>(data, count, leaves);
  }
}

}  // namespace
}  // namespace spillway::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace spillway {
namespace {

HWY_EXPORT(leaf_sums);

// Leaves that one call of a body takes: 64 Ki elements.
constexpr std::size_t kGroup = 64;

}  // namespace

void leaf_sums(const void* data, DType type, std::size_t count, double* leaves, HostWorkers& workers) {
  workers.parallel_for(div_up(div_up(count, kNormLeaf), kGroup), [&](std::size_t group) {
    const DefaultFloatEnvironment environment;
    const std::size_t begin = group * kGroup * kNormLeaf;
    HWY_DYNAMIC_DISPATCH(leaf_sums)
    (static_cast<const std::byte*>(data) + begin * size_of(type), type, std::min(kGroup * kNormLeaf, count - begin),
     leaves + group * kGroup);
  });
}

NormResult add_leaves(std::span<const double> leaves) {
  const DefaultFloatEnvironment environment;
  NormResult result;
  for (std::size_t leaf = 0; leaf < leaves.size(); ++leaf) {
    if (!std::isfinite(leaves[leaf])) {
      result.first_nonfinite = leaf * kNormLeaf;
      return result;
    }
    result.sum_of_squares += leaves[leaf];
  }
  return result;
}

NormResult squared_norm(const void* data, DType type, std::size_t count, std::span<double> leaves,
                        HostWorkers& workers) {
  const std::size_t leaf_count = div_up(count, kNormLeaf);
  SPILLWAY_CHECK(leaves.size() >= leaf_count, "scratch for every leaf");
  leaf_sums(data, type, count, leaves.data(), workers);
  return add_leaves(leaves.first(leaf_count));
}

}  // namespace spillway
#endif  // HWY_ONCE
