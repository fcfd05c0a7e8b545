// The floating-point environment that the numerics contract assumes: round to nearest, subnormals kept, no traps.
//
// Host programs do change it (linking one object with -ffast-math sets flush-to-zero for the whole process, and new
// threads inherit it), and then sums, sqrt and fma give other bits. Every kernel therefore runs under this guard, once
// per call on a range, which costs about ten cycles; the caller's own settings come back when it goes out of scope.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace spillway {

#if defined(__x86_64__)

using FloatSettings = unsigned;  // MXCSR
// After reset (Intel SDM volume 1, 10.2.3): all exceptions masked, nearest-even, FTZ and DAZ off.
inline constexpr FloatSettings kDefaultFloatSettings = 0x1f80;
inline FloatSettings float_settings() noexcept { return _mm_getcsr(); }
inline void set_float_settings(FloatSettings settings) noexcept { _mm_setcsr(settings); }

#elif defined(__aarch64__)

using FloatSettings = std::uint64_t;  // FPCR
// Nothing trapped, nearest-even, FZ off, IEEE half precision (Arm ARM, FPCR). Not by fesetenv(FE_DFL_ENV): glibc takes
// AHP for a reserved bit and leaves it set, and under it a half has no Inf and no NaN.
inline constexpr FloatSettings kDefaultFloatSettings = 0;
inline FloatSettings float_settings() noexcept {
  FloatSettings settings;
  asm volatile("mrs %0, fpcr" : "=r"(settings) : : "memory");
  return settings;
}
inline void set_float_settings(FloatSettings settings) noexcept {
  asm volatile("msr fpcr, %0" : : "r"(settings) : "memory");
}

#else
#error "say how this processor's floating-point settings are read and set"
#endif

class DefaultFloatEnvironment {
 public:
  DefaultFloatEnvironment() noexcept : saved_(float_settings()) { set_float_settings(kDefaultFloatSettings); }
  ~DefaultFloatEnvironment() { set_float_settings(saved_); }
  DefaultFloatEnvironment(const DefaultFloatEnvironment&) = delete;
  DefaultFloatEnvironment& operator=(const DefaultFloatEnvironment&) = delete;

 private:
  FloatSettings saved_;
};

}  // namespace spillway
