#include "kernels/norm.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "kernels/float_environment.h"
#include "spillway/error.h"
#include "spillway/units.h"

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

HWY_INLINE Doubles load(const float* from) { return hn::PromoteTo(F64(), hn::LoadU(F32(), from)); }
HWY_INLINE Doubles load(const std::uint16_t* from) {
  const auto bits = hn::ShiftLeft<16>(hn::PromoteTo(U32(), hn::LoadU(U16(), from)));
  return hn::PromoteTo(F64(), hn::BitCast(F32(), bits));
}

// The sum of squares of one leaf. The square of an fp32 number has at most 48 significant bits and is exact in double, so
// a fused multiply-add rounds once, like a sum of exact squares does: fused or not, the bits are the same.
template <typename Element>
HWY_INLINE double leaf_sum(const Element* from, std::size_t count) {
  Doubles sums[kVectors];
  for (std::size_t k = 0; k < kVectors; ++k) sums[k] = hn::Zero(F64());
  std::size_t i = 0;
  for (; i + kAccumulators <= count; i += kAccumulators) {
    for (std::size_t k = 0; k < kVectors; ++k) {
      const Doubles x = load(from + i + k * hn::MaxLanes(F64()));
      sums[k] = hn::MulAdd(x, x, sums[k]);
    }
  }
  double folded[kAccumulators];
  for (std::size_t k = 0; k < kVectors; ++k) hn::StoreU(sums[k], F64(), folded + k * hn::MaxLanes(F64()));
  if (i < count) {
    // Zeros for what is missing: adding +0 changes no sum of squares.
    Element tail[kAccumulators] = {};
    for (std::size_t j = 0; j < count - i; ++j) tail[j] = from[i + j];
    for (std::size_t k = 0; k < kVectors; ++k) {
      const Doubles x = load(tail + k * hn::MaxLanes(F64()));
      hn::StoreU(hn::MulAdd(x, x, sums[k]), F64(), folded + k * hn::MaxLanes(F64()));
    }
  }
  for (std::size_t half = kAccumulators / 2; half > 0; half /= 2)
    for (std::size_t j = 0; j < half; ++j) folded[j] += folded[j + half];
  return folded[0];
}

template <typename Element>
void leaf_sums_typed(const Element* data, std::size_t count, double* leaves) {
  for (std::size_t i = 0; i < count; i += kNormLeaf) {
    const std::size_t left = count - i;
    leaves[i / kNormLeaf] = leaf_sum(data + i, left < kNormLeaf ? left : kNormLeaf);
  }
}

void leaf_sums(const void* data, DType type, std::size_t count, double* leaves) {
  if (type == DType::kFloat32) return leaf_sums_typed(static_cast<const float*>(data), count, leaves);
  return leaf_sums_typed(static_cast<const std::uint16_t*>(data), count, leaves);
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

bool is_finite(const void* data, DType type, std::size_t i) {
  if (type == DType::kFloat32) {
    return (std::bit_cast<std::uint32_t>(static_cast<const float*>(data)[i]) & 0x7fffffffu) < 0x7f800000u;
  }
  return (static_cast<const std::uint16_t*>(data)[i] & 0x7fffu) < 0x7f80u;
}

}  // namespace

NormResult squared_norm(const void* data, DType type, std::size_t count, std::span<double> leaves,
                        HostWorkers& workers) {
  SPILLWAY_CHECK(type == DType::kFloat32 || type == DType::kBFloat16, "the norm reads fp32 and bf16");
  const std::size_t leaf_count = div_up(count, kNormLeaf);
  SPILLWAY_CHECK(leaves.size() >= leaf_count, "scratch for every leaf");

  workers.parallel_for(div_up(leaf_count, kGroup), [&](std::size_t group) {
    const DefaultFloatEnvironment environment;
    const std::size_t begin = group * kGroup * kNormLeaf;
    HWY_DYNAMIC_DISPATCH(leaf_sums)
    (static_cast<const std::byte*>(data) + begin * size_of(type), type, std::min(kGroup * kNormLeaf, count - begin),
     leaves.data() + group * kGroup);
  });

  const DefaultFloatEnvironment environment;
  NormResult result;
  for (std::size_t leaf = 0; leaf < leaf_count; ++leaf) {
    // Squares of fp32 numbers stay below 2^256, far from the limit of double: a leaf's sum is not finite exactly when one
    // of its elements is not.
    if (!std::isfinite(leaves[leaf])) {
      std::size_t i = leaf * kNormLeaf;
      while (is_finite(data, type, i)) ++i;
      result.first_nonfinite = i;
      return result;
    }
    result.sum_of_squares += leaves[leaf];
  }
  return result;
}

}  // namespace spillway
#endif  // HWY_ONCE
