// The floating-point environment that the numerics contract assumes: round to nearest, subnormals kept, no traps.
//
// Host programs do change it (linking one object with -ffast-math sets flush-to-zero for the whole process, and new
// threads inherit it), and then sums, sqrt and fma give other bits. Every kernel therefore runs under this guard, once per
// call on a range, which costs about ten cycles; the caller's own settings come back when it goes out of scope.
#pragma once

#if defined(__x86_64__)
#include <xmmintrin.h>
#else
#include <cfenv>
#endif

namespace spillway {

#if defined(__x86_64__)

class DefaultFloatEnvironment {
 public:
  DefaultFloatEnvironment() noexcept : saved_(_mm_getcsr()) { _mm_setcsr(kDefault); }
  ~DefaultFloatEnvironment() { _mm_setcsr(saved_); }
  DefaultFloatEnvironment(const DefaultFloatEnvironment&) = delete;
  DefaultFloatEnvironment& operator=(const DefaultFloatEnvironment&) = delete;

 private:
  // MXCSR after reset (Intel SDM volume 1, 10.2.3): all exceptions masked, nearest-even, FTZ and DAZ off.
  static constexpr unsigned kDefault = 0x1f80;
  unsigned saved_;
};

#else

class DefaultFloatEnvironment {
 public:
  DefaultFloatEnvironment() noexcept {
    std::fegetenv(&saved_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~DefaultFloatEnvironment() { std::fesetenv(&saved_); }
  DefaultFloatEnvironment(const DefaultFloatEnvironment&) = delete;
  DefaultFloatEnvironment& operator=(const DefaultFloatEnvironment&) = delete;

 private:
  std::fenv_t saved_;
};

#endif

}  // namespace spillway
