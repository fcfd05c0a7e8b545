// Sixteen fp32 lanes on every instruction set: one AVX-512 vector, two of AVX2, four of SSE2. A fixed number of lanes
// fixes the order of every sum, so the bits do not depend on the vector length.
//
// Included once per Highway target.
#if defined(SPILLWAY_GPT2_VECTOR_LANES_H) == defined(HWY_TARGET_TOGGLE)
#ifdef SPILLWAY_GPT2_VECTOR_LANES_H
#undef SPILLWAY_GPT2_VECTOR_LANES_H
#else
#define SPILLWAY_GPT2_VECTOR_LANES_H
#endif

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "hwy/highway.h"
#include "spillway/bf16.h"

HWY_BEFORE_NAMESPACE();
namespace spillway::models::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

inline constexpr std::size_t kLanes = 16;
using F32 = hn::CappedTag<float, kLanes>;
using U32 = hn::RebindToUnsigned<F32>;
using I32 = hn::RebindToSigned<F32>;
using U16 = hn::Rebind<std::uint16_t, F32>;
inline constexpr std::size_t kPart = hn::MaxLanes(F32());
inline constexpr std::size_t kParts = kLanes / kPart;

// An element of an fp16 tensor; one of a bf16 tensor is a std::uint16_t.
struct Half {
  std::uint16_t bits;
};

struct Lanes {
  hn::Vec<F32> part[kParts];
};

template <typename F>
HWY_INLINE Lanes each(F function) {
  Lanes out;
  for (std::size_t i = 0; i < kParts; ++i) out.part[i] = function(i);
  return out;
}

HWY_INLINE Lanes splat(float value) {
  return each([&](std::size_t) { return hn::Set(F32(), value); });
}
HWY_INLINE Lanes load(const float* p) {
  return each([&](std::size_t i) { return hn::LoadU(F32(), p + i * kPart); });
}
HWY_INLINE Lanes load(const std::uint16_t* p) {
  return each([&](std::size_t i) {
    return hn::BitCast(F32(), hn::ShiftLeft<16>(hn::PromoteTo(U32(), hn::LoadU(U16(), p + i * kPart))));
  });
}
// fp16: an fp32 number with an exponent that is 112 too small, subnormals too; Inf and NaN keep their fraction.
HWY_INLINE Lanes load(const Half* p) {
  return each([&](std::size_t i) {
    const auto half = hn::PromoteTo(U32(), hn::LoadU(U16(), reinterpret_cast<const std::uint16_t*>(p) + i * kPart));
    const auto sign = hn::ShiftLeft<16>(hn::And(half, hn::Set(U32(), 0x8000)));
    const auto magnitude = hn::ShiftLeft<13>(hn::And(half, hn::Set(U32(), 0x7fff)));
    const auto number = hn::BitCast(U32(), hn::Mul(hn::BitCast(F32(), magnitude), hn::Set(F32(), 0x1p112f)));
    const auto infinite = hn::Or(magnitude, hn::Set(U32(), 0x7f800000));
    const auto quiet = hn::Or(infinite, hn::Set(U32(), 0x400000));
    auto result = hn::IfThenElse(hn::Gt(magnitude, hn::Set(U32(), 0x0f7fffff)), infinite, number);
    result = hn::IfThenElse(hn::Gt(magnitude, hn::Set(U32(), 0x0f800000)), quiet, result);
    return hn::BitCast(F32(), hn::Or(result, sign));
  });
}
// Every second one of 32 numbers.
HWY_INLINE void load_pairs(const float* p, Lanes& first, Lanes& second) {
  for (std::size_t i = 0; i < kParts; ++i) {
    hn::LoadInterleaved2(F32(), p + 2 * i * kPart, first.part[i], second.part[i]);
  }
}
HWY_INLINE void store(const Lanes& v, float* p) {
  for (std::size_t i = 0; i < kParts; ++i) hn::StoreU(v.part[i], F32(), p + i * kPart);
}
// Rounds to nearest, ties to even; NaN stays NaN: the bits of float_to_bf16().
HWY_INLINE hn::Vec<U32> bf16_bits(hn::Vec<F32> v) {
  const auto bits = hn::BitCast(U32(), v);
  const auto high = hn::ShiftRight<16>(bits);
  const auto odd = hn::And(high, hn::Set(U32(), 1));
  const auto rounded = hn::ShiftRight<16>(hn::Add(bits, hn::Add(odd, hn::Set(U32(), 0x7fff))));
  const auto quiet = hn::Or(high, hn::Set(U32(), 0x40));
  return hn::IfThenElse(hn::RebindMask(U32(), hn::IsNaN(v)), quiet, rounded);
}
HWY_INLINE void store(const Lanes& v, std::uint16_t* p) {
  for (std::size_t i = 0; i < kParts; ++i) {
    hn::StoreU(hn::DemoteTo(U16(), hn::BitCast(I32(), bf16_bits(v.part[i]))), U16(), p + i * kPart);
  }
}
// Two rows of bf16, element by element in turn.
HWY_INLINE void store_interleaved(const Lanes& even, const Lanes& odd, std::uint32_t* p) {
  for (std::size_t i = 0; i < kParts; ++i) {
    const auto words = hn::Or(bf16_bits(even.part[i]), hn::ShiftLeft<16>(bf16_bits(odd.part[i])));
    hn::StoreU(words, U32(), p + i * kPart);
  }
}

// The bits of float_to_fp16(): the same rounding, and what is too large becomes Inf.
HWY_INLINE void store(const Lanes& v, Half* p) {
  auto* to = reinterpret_cast<std::uint16_t*>(p);
  for (std::size_t i = 0; i < kParts; ++i) {
    const auto bits = hn::BitCast(U32(), v.part[i]);
    const auto sign = hn::And(hn::ShiftRight<16>(bits), hn::Set(U32(), 0x8000));
    const auto magnitude = hn::And(bits, hn::Set(U32(), 0x7fffffff));
    const auto odd = hn::And(hn::ShiftRight<13>(magnitude), hn::Set(U32(), 1));
    const auto rebiased = hn::Sub(magnitude, hn::Set(U32(), 112u << 23));
    const auto normal = hn::ShiftRight<13>(hn::Add(rebiased, hn::Add(odd, hn::Set(U32(), 0xfff))));
    // 0.5 has the smallest subnormal as its last bit.
    const auto sum = hn::Add(hn::BitCast(F32(), magnitude), hn::Set(F32(), 0.5f));
    const auto subnormal = hn::Sub(hn::BitCast(U32(), sum), hn::Set(U32(), 0x3f000000));
    const auto quiet = hn::Or(hn::Set(U32(), 0x7e00), hn::And(hn::ShiftRight<13>(magnitude), hn::Set(U32(), 0x3ff)));
    auto result = hn::IfThenElse(hn::Lt(magnitude, hn::Set(U32(), 0x38800000)), subnormal, normal);
    result = hn::IfThenElse(hn::Gt(magnitude, hn::Set(U32(), 0x477fefff)), hn::Set(U32(), 0x7c00), result);
    result = hn::IfThenElse(hn::Gt(magnitude, hn::Set(U32(), 0x7f800000)), quiet, result);
    hn::StoreU(hn::DemoteTo(U16(), hn::BitCast(I32(), hn::Or(result, sign))), U16(), to + i * kPart);
  }
}

HWY_INLINE Lanes operator+(const Lanes& a, const Lanes& b) {
  return each([&](std::size_t i) { return hn::Add(a.part[i], b.part[i]); });
}
HWY_INLINE Lanes operator-(const Lanes& a, const Lanes& b) {
  return each([&](std::size_t i) { return hn::Sub(a.part[i], b.part[i]); });
}
HWY_INLINE Lanes operator*(const Lanes& a, const Lanes& b) {
  return each([&](std::size_t i) { return hn::Mul(a.part[i], b.part[i]); });
}
HWY_INLINE Lanes operator/(const Lanes& a, const Lanes& b) {
  return each([&](std::size_t i) { return hn::Div(a.part[i], b.part[i]); });
}
// The larger one; b where a is NaN or both are.
HWY_INLINE Lanes larger(const Lanes& a, const Lanes& b) {
  return each([&](std::size_t i) { return hn::IfThenElse(hn::Gt(a.part[i], b.part[i]), a.part[i], b.part[i]); });
}
// a where x is below zero; b where it is NaN, too.
HWY_INLINE Lanes negative_chooses(const Lanes& x, const Lanes& a, const Lanes& b) {
  return each([&](std::size_t i) { return hn::IfThenElse(hn::Lt(x.part[i], hn::Zero(F32())), a.part[i], b.part[i]); });
}

// Lanes added by halving: 16, 8, 4, 2, 1.
HWY_INLINE float fold(const Lanes& v) {
  float lanes[kLanes];
  store(v, lanes);
  for (std::size_t half = kLanes / 2; half > 0; half /= 2) {
    for (std::size_t i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  }
  return lanes[0];
}

// e^x of several vectors, 2 ulp, for x from -87 (below: e^-87, about 1e-38) to 88; NaN gives NaN. Cody-Waite reduction
// and the polynomial of Cephes' expf (Moshier 1989). Step by step for all of them: each chain by itself waits for its
// own last result.
template <std::size_t N>
HWY_INLINE void exponentials(hn::Vec<F32> (&v)[N]) {
  const F32 f;
  const auto set = [&](float value) { return hn::Set(f, value); };
  hn::Vec<F32> p[N];
  hn::Vec<U32> exponent[N];
  for (auto& x : v) x = hn::IfThenElse(hn::Gt(x, set(88.0f)), set(88.0f), x);
  for (auto& x : v) x = hn::IfThenElse(hn::Lt(x, set(-87.0f)), set(-87.0f), x);
  for (std::size_t i = 0; i < N; ++i) {
    // Adding 1.5 * 2^23 leaves the nearest integer in the low bits: no conversion, which NaN would upset.
    const auto magic = set(12582912.0f);
    const auto shifted = hn::Add(hn::Mul(v[i], set(1.44269504f)), magic);
    exponent[i] = hn::ShiftLeft<23>(hn::Add(hn::BitCast(U32(), shifted), hn::Set(U32(), 127)));
    p[i] = hn::Sub(shifted, magic);
  }
  for (std::size_t i = 0; i < N; ++i) v[i] = hn::Sub(v[i], hn::Mul(p[i], set(0.693359375f)));
  for (std::size_t i = 0; i < N; ++i) v[i] = hn::Sub(v[i], hn::Mul(p[i], set(-2.12194440e-4f)));
  for (auto& x : p) x = set(1.9875691500e-4f);
  for (const float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f}) {
    for (std::size_t i = 0; i < N; ++i) p[i] = hn::Add(hn::Mul(p[i], v[i]), set(c));
  }
  for (std::size_t i = 0; i < N; ++i) {
    p[i] = hn::Add(hn::Add(hn::Mul(p[i], hn::Mul(v[i], v[i])), v[i]), set(1.0f));
    v[i] = hn::Mul(p[i], hn::BitCast(f, exponent[i]));
  }
}
HWY_INLINE Lanes exponential(Lanes x) {
  exponentials(x.part);
  return x;
}

template <typename T>
const T* typed(const void* p) {
  return static_cast<const T*>(p);
}
template <typename T>
T* typed(void* p) {
  return static_cast<T*>(p);
}

// tanh x, 4e-7 of itself however small: below 0.625 the polynomial of Cephes' tanhf (Moshier 1989), above it
// 1 - 2 / (e^2x + 1); NaN gives NaN.
HWY_INLINE Lanes hyperbolic_tangent(const Lanes& x) {
  const Lanes square = x * x;
  Lanes p = splat(-5.70498872745e-3f);
  for (const float c : {2.06390887954e-2f, -5.37397155531e-2f, 1.33314422036e-1f, -3.33332819422e-1f}) {
    p = p * square + splat(c);
  }
  const Lanes near = p * square * x + x;
  const Lanes size = each([&](std::size_t i) { return hn::Abs(x.part[i]); });
  const Lanes far = splat(1) - splat(2) / (exponential(size + size) + splat(1));
  return each([&](std::size_t i) {
    const auto is_far = hn::Ge(size.part[i], hn::Set(F32(), 0.625f));
    return hn::IfThenElse(is_far, hn::CopySign(far.part[i], x.part[i]), near.part[i]);
  });
}

// Calls body(offset, lanes) over `count` elements; body gets load and store functions that pad a short tail with zeros.
template <typename T>
struct Full {
  static HWY_INLINE Lanes read(const T* p, std::size_t) { return load(p); }
  static HWY_INLINE void write(const Lanes& v, T* p, std::size_t) { store(v, p); }
};
template <typename T>
struct Tail {
  static HWY_INLINE Lanes read(const T* p, std::size_t count) {
    T padded[kLanes] = {};
    std::memcpy(padded, p, count * sizeof(T));
    return load(padded);
  }
  static HWY_INLINE void write(const Lanes& v, T* p, std::size_t count) {
    T padded[kLanes];
    store(v, padded);
    std::memcpy(p, padded, count * sizeof(T));
  }
};

// body(io, offset, count): io<T>-like accessor type as first argument; count is kLanes but in the tail.
template <typename T, typename Body>
HWY_INLINE void for_lanes(std::size_t count, const Body& body) {
  std::size_t i = 0;
  for (; i + kLanes <= count; i += kLanes) body(Full<T>(), i, kLanes);
  if (i < count) body(Tail<T>(), i, count - i);
}

}  // namespace spillway::models::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif
