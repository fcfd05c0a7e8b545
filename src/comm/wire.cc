#include "src/comm/wire.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "spillway/bf16.h"
#include "spillway/error.h"
#include "spillway/fp16.h"

namespace spillway {
namespace {

// Through copies, a strip at a time: the two kinds of number lie in the same bytes, which a compiler would not believe.
constexpr std::size_t kConverted = 1024;

template <typename Convert>
void narrow_strips(std::span<std::byte> values, Convert convert) {
  float wide[kConverted];
  std::uint16_t narrow[kConverted];
  const std::size_t all = values.size() / sizeof(float);
  for (std::size_t at = 0; at < all; at += kConverted) {
    const std::size_t count = std::min(kConverted, all - at);
    std::memcpy(wide, values.data() + at * sizeof(float), count * sizeof(float));
    for (std::size_t i = 0; i < count; ++i) narrow[i] = convert(wide[i]);
    std::memcpy(values.data() + at * sizeof(std::uint16_t), narrow, count * sizeof(std::uint16_t));
  }
}

// From the end: what is written lies past all that is still to be read.
template <typename Convert>
void widen_strips(std::span<std::byte> values, Convert convert) {
  float wide[kConverted];
  std::uint16_t narrow[kConverted];
  for (std::size_t end = values.size() / sizeof(float); end > 0;) {
    const std::size_t at = (end - 1) / kConverted * kConverted, count = end - at;
    std::memcpy(narrow, values.data() + at * sizeof(std::uint16_t), count * sizeof(std::uint16_t));
    for (std::size_t i = 0; i < count; ++i) wide[i] = convert(narrow[i]);
    std::memcpy(values.data() + at * sizeof(float), wide, count * sizeof(float));
    end = at;
  }
}

}  // namespace

void narrow_in_place(std::span<std::byte> values, DType wire) {
  SPILLWAY_CHECK(values.size() % sizeof(float) == 0, "values are whole");
  switch (wire) {
    case DType::kBFloat16: return narrow_strips(values, [](float x) { return float_to_bf16(x); });
    case DType::kFloat16: return narrow_strips(values, [](float x) { return float_to_fp16(x); });
    case DType::kFloat32: break;
  }
}

void widen_in_place(std::span<std::byte> values, DType wire) {
  SPILLWAY_CHECK(values.size() % sizeof(float) == 0, "values are whole");
  switch (wire) {
    case DType::kBFloat16: return widen_strips(values, [](std::uint16_t x) { return bf16_to_float(x); });
    case DType::kFloat16: return widen_strips(values, [](std::uint16_t x) { return fp16_to_float(x); });
    case DType::kFloat32: break;
  }
}

}  // namespace spillway
