// How many elements a tensor of a shape has.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace spillway {

// Far beyond any drive, and small enough that 24 bytes for each of them, in each of 16 such blocks, fit 64 bits.
inline constexpr std::uint64_t kMostElements = std::uint64_t{1} << 55;

// The product of its dimensions; 1 for rank 0. Throws kInvalidArgument, naming `object`, for a dimension of 0 and for
// more than kMostElements.
std::uint64_t count_elements(const std::string& object, const std::vector<std::uint64_t>& shape);

}  // namespace spillway
