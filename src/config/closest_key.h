// The known word nearest to a misspelled one.
#pragma once

#include <cstddef>
#include <span>
#include <string_view>

namespace spillway {

// Edit distance: insertions, deletions, substitutions and swaps of neighbours count one each (optimal string
// alignment).
std::size_t edit_distance(std::string_view a, std::string_view b);

// The candidate with the smallest distance to `word`, ignoring case; empty when none is near enough to be meant.
std::string_view closest(std::string_view word, std::span<const std::string_view> candidates);

}  // namespace spillway
