#include "kernels/convert.h"

#include <cstdint>
#include <cstring>

#include "kernels/float_environment.h"
#include "spillway/error.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/convert.cc"
#include "hwy/foreach_target.h"  // includes this file once per target
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace spillway::HWY_NAMESPACE {
namespace {

namespace hn = hwy::HWY_NAMESPACE;

using F32 = hn::CappedTag<float, 16>;  // SVE's length is known at run time: at most AVX-512's
using I32 = hn::RebindToSigned<F32>;
using U32 = hn::RebindToUnsigned<F32>;
using U16 = hn::Rebind<std::uint16_t, F32>;
using Floats = hn::Vec<F32>;
using Bits = hn::Vec<U32>;
constexpr std::size_t kMaxLanes = hn::MaxLanes(F32());  // Lanes() itself but on SVE

// Memory formats: how a vector of elements is loaded as fp32 and stored from fp32.
struct Float32 {
  using Element = float;
  static HWY_INLINE Floats load(const float* from) { return hn::LoadU(F32(), from); }
  static HWY_INLINE void store(Floats x, float* to) { hn::StoreU(x, F32(), to); }
};

struct BFloat16 {
  using Element = std::uint16_t;
  static HWY_INLINE Floats load(const std::uint16_t* from) {
    return hn::BitCast(F32(), hn::ShiftLeft<16>(hn::PromoteTo(U32(), hn::LoadU(U16(), from))));
  }
  // float_to_bf16() of spillway/bf16.h on every lane.
  static HWY_INLINE void store(Floats x, std::uint16_t* to) {
    const Bits u = hn::BitCast(U32(), x);
    const Bits top = hn::ShiftRight<16>(u);
    const Bits odd = hn::And(top, hn::Set(U32(), 1u));
    const Bits rounded = hn::ShiftRight<16>(hn::Add(u, hn::Add(hn::Set(U32(), 0x7fffu), odd)));
    const Bits quiet = hn::Or(top, hn::Set(U32(), 0x40u));
    const auto nan = hn::Gt(hn::And(u, hn::Set(U32(), 0x7fffffffu)), hn::Set(U32(), 0x7f800000u));
    const Bits result = hn::IfThenElse(nan, quiet, rounded);
    hn::StoreU(hn::DemoteTo(U16(), hn::BitCast(I32(), result)), U16(), to);  // fits: nothing saturates
  }
};

// In integers, because Highway's own conversion treats a signalling NaN in one way per target.
struct Float16 {
  using Element = std::uint16_t;
  static HWY_INLINE Floats load(const std::uint16_t* from) {
    const Bits h = hn::PromoteTo(U32(), hn::LoadU(U16(), from));
    const Bits sign = hn::ShiftLeft<16>(hn::And(h, hn::Set(U32(), 0x8000u)));
    const Bits magnitude = hn::And(h, hn::Set(U32(), 0x7fffu));
    // Exponent bias 15 → 127; for Inf and NaN (31 → 255) the same step once more.
    const Bits rebias = hn::Set(U32(), 112u << 23);
    const Bits normal = hn::Add(hn::ShiftLeft<13>(magnitude), rebias);
    const Bits special = hn::Add(normal, rebias);
    const Bits quiet = hn::Or(special, hn::Set(U32(), 0x400000u));
    // Subnormal: an integer times 2^-24, exact in fp32.
    const Floats scaled =
        hn::Mul(hn::ConvertTo(F32(), hn::BitCast(I32(), magnitude)), hn::Set(F32(), 5.9604644775390625e-8f));
    Bits result = hn::IfThenElse(hn::Gt(magnitude, hn::Set(U32(), 0x7bffu)), special, normal);
    result = hn::IfThenElse(hn::Gt(magnitude, hn::Set(U32(), 0x7c00u)), quiet, result);
    result = hn::IfThenElse(hn::Lt(magnitude, hn::Set(U32(), 0x400u)), hn::BitCast(U32(), scaled), result);
    return hn::BitCast(F32(), hn::Or(result, sign));
  }
  // float_to_fp16() of spillway/fp16.h on every lane.
  static HWY_INLINE void store(Floats x, std::uint16_t* to) {
    const Bits u = hn::BitCast(U32(), x);
    const Bits magnitude = hn::And(u, hn::Set(U32(), 0x7fffffffu));
    const Bits sign = hn::And(hn::ShiftRight<16>(u), hn::Set(U32(), 0x8000u));
    const Bits odd = hn::And(hn::ShiftRight<13>(magnitude), hn::Set(U32(), 1u));
    const Bits rebiased = hn::Sub(magnitude, hn::Set(U32(), 112u << 23));
    const Bits normal = hn::ShiftRight<13>(hn::Add(rebiased, hn::Add(hn::Set(U32(), 0xfffu), odd)));
    // Added to 0.5, whose last bit is the smallest subnormal, the sum rounds to a multiple of it.
    const Floats sum = hn::Add(hn::BitCast(F32(), magnitude), hn::Set(F32(), 0.5f));
    const Bits subnormal = hn::Sub(hn::BitCast(U32(), sum), hn::Set(U32(), 0x3f000000u));
    const Bits quiet = hn::Or(hn::Set(U32(), 0x7e00u), hn::And(hn::ShiftRight<13>(magnitude), hn::Set(U32(), 0x3ffu)));
    Bits result = hn::IfThenElse(hn::Lt(magnitude, hn::Set(U32(), 0x38800000u)), subnormal, normal);
    result = hn::IfThenElse(hn::Gt(magnitude, hn::Set(U32(), 0x477fefffu)), hn::Set(U32(), 0x7c00u), result);
    result = hn::IfThenElse(hn::Gt(magnitude, hn::Set(U32(), 0x7f800000u)), quiet, result);
    hn::StoreU(hn::DemoteTo(U16(), hn::BitCast(I32(), hn::Or(result, sign))), U16(), to);  // fits: nothing saturates
  }
};

// Calls body(from, to) on a vector of elements at a time; the last, incomplete group goes through copies on the stack,
// so that it runs the very same instructions.
template <typename From, typename To, typename Body>
HWY_INLINE void for_lanes(const From* HWY_RESTRICT from, To* HWY_RESTRICT to, std::size_t count, Body body) {
  const std::size_t lanes = hn::Lanes(F32());
  std::size_t i = 0;
  for (; i + lanes <= count; i += lanes) body(from + i, to + i);
  if (i == count) return;
  From from_tail[kMaxLanes] = {};
  To to_tail[kMaxLanes] = {};
  std::memcpy(from_tail, from + i, (count - i) * sizeof(From));
  std::memcpy(to_tail, to + i, (count - i) * sizeof(To));
  body(from_tail, to_tail);
  std::memcpy(to + i, to_tail, (count - i) * sizeof(To));
}

template <typename From, typename To>
struct CastLanes {
  HWY_INLINE void operator()(const typename From::Element* from, typename To::Element* to) const {
    To::store(From::load(from), to);
  }
};

template <typename From>
struct AddLanes {
  HWY_INLINE void operator()(const typename From::Element* from, float* to) const {
    Float32::store(hn::Add(Float32::load(to), From::load(from)), to);
  }
};

template <typename From, typename To>
void cast_typed(void* to, const void* from, std::size_t count) {
  for_lanes(static_cast<const typename From::Element*>(from), static_cast<typename To::Element*>(to), count,
            CastLanes<From, To>());
}

template <typename From>
void add_typed(float* accumulator, const void* from, std::size_t count) {
  for_lanes(static_cast<const typename From::Element*>(from), accumulator, count, AddLanes<From>());
}

template <typename From>
void cast_from(void* to, DType to_type, const void* from, std::size_t count) {
  switch (to_type) {
    case DType::kFloat32: return cast_typed<From, Float32>(to, from, count);
    case DType::kBFloat16: return cast_typed<From, BFloat16>(to, from, count);
    case DType::kFloat16: return cast_typed<From, Float16>(to, from, count);
  }
}

void cast_other(void* to, DType to_type, const void* from, DType from_type, std::size_t count) {
  switch (from_type) {
    case DType::kFloat32: return cast_from<Float32>(to, to_type, from, count);
    case DType::kBFloat16: return cast_from<BFloat16>(to, to_type, from, count);
    case DType::kFloat16: return cast_from<Float16>(to, to_type, from, count);
  }
}

void add(float* accumulator, const void* from, DType from_type, std::size_t count) {
  switch (from_type) {
    case DType::kFloat32: return add_typed<Float32>(accumulator, from, count);
    case DType::kBFloat16: return add_typed<BFloat16>(accumulator, from, count);
    case DType::kFloat16: return add_typed<Float16>(accumulator, from, count);
  }
}

}  // namespace
}  // namespace spillway::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace spillway {
namespace {

HWY_EXPORT(cast_other);
HWY_EXPORT(add);

}  // namespace

void cast(void* to, DType to_type, const void* from, DType from_type, std::size_t count) {
  if (count == 0) return;
  if (to_type == from_type) {
    std::memcpy(to, from, count * size_of(to_type));
    return;
  }
  const DefaultFloatEnvironment environment;
  HWY_DYNAMIC_DISPATCH(cast_other)(to, to_type, from, from_type, count);
}

void accumulate(float* accumulator, const void* from, DType from_type, std::size_t count, bool first) {
  if (first) return cast(accumulator, DType::kFloat32, from, from_type, count);
  const DefaultFloatEnvironment environment;
  HWY_DYNAMIC_DISPATCH(add)(accumulator, from, from_type, count);
}

}  // namespace spillway
#endif  // HWY_ONCE
