// Sums in a balanced binary tree over parts: what makes a sum over ranks independent of how many ranks hold the parts.
//
//   4 parts   (0 + 1) + (2 + 3)          1 rank holds all of it, 2 ranks hold (0 + 1) and (2 + 3), 4 ranks one leaf
//   each 5 parts   ((0 + 1) + (2 + 3)) + 4    the first part of a tree is the largest power of two below the number of
//   parts
//
// Pure. A rank that holds a power of two of contiguous parts, and as many as every other, folds its own into one and
// the fold over ranks of those is the tree over all parts.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>

namespace spillway {

// The fold of value(0) … value(count - 1), count at least 1, by add(left, right).
template <typename Value, typename Add>
auto fold_in_tree(std::size_t count, Value value, Add add) {
  using T = decltype(value(std::size_t{0}));
  // As one counts in binary: a pending fold for every bit that is set in the number of parts that have come.
  std::array<T, 64> pending{};
  std::size_t height = 0;
  for (std::size_t come = 0; come < count; ++come) {
    T folded = value(come);
    for (std::size_t bits = come; bits & 1; bits >>= 1) folded = add(pending[--height], folded);
    pending[height++] = folded;
  }
  T folded = pending[--height];
  while (height > 0) folded = add(pending[--height], folded);
  return folded;
}

// to[i] = the tree's sum of parts[0][i] … parts[n - 1][i] in fp32. `to` may be one of the parts, and overlaps no part
// otherwise.
void sum_in_tree(std::span<const float* const> parts, float* to, std::size_t count);

}  // namespace spillway
