#include "kernels/finite.h"

#include <algorithm>
#include <cstdint>

#include "kernels/page_ahead.h"

namespace spillway {
namespace {

// Exponents of ones alone are those of NaN and Inf. Without a branch, so that the compiler takes whole vectors; a page
// between looks.
template <typename Bits>
bool none_has(const Bits* data, std::size_t count, Bits exponent) {
  constexpr std::size_t kBetweenLooks = kSmallPage / sizeof(Bits);
  for (std::size_t first = 0; first < count; first += kBetweenLooks) {
    ask_page(data + first, 2);
    Bits found = 0;
    for (std::size_t i = first, end = std::min(count, first + kBetweenLooks); i < end; ++i)
      found |= static_cast<Bits>((data[i] & exponent) == exponent);
    if (found != 0) return false;
  }
  return true;
}

}  // namespace

bool all_finite(const void* data, DType type, std::size_t count) {
  switch (type) {
    case DType::kFloat32: return none_has(static_cast<const std::uint32_t*>(data), count, 0x7f800000u);
    case DType::kBFloat16: return none_has<std::uint16_t>(static_cast<const std::uint16_t*>(data), count, 0x7f80);
    case DType::kFloat16: return none_has<std::uint16_t>(static_cast<const std::uint16_t*>(data), count, 0x7c00);
  }
  return false;
}

}  // namespace spillway
