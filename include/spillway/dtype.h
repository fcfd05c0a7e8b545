// Element types of weights and gradients.
#pragma once

#include "spillway/cplusplus.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace spillway {

enum class DType : std::uint8_t { kFloat32, kBFloat16, kFloat16 };
inline constexpr std::array kDTypes = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};

constexpr std::size_t size_of(DType type) { return type == DType::kFloat32 ? 4 : 2; }

constexpr std::string_view name_of(DType type) {
  switch (type) {
    case DType::kFloat32: return "fp32";
    case DType::kBFloat16: return "bf16";
    case DType::kFloat16: return "fp16";
  }
  return "?";
}

}  // namespace spillway
