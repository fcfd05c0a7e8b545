// The squared norm of a gradient in a fixed order, and whether an element is not finite.
//
// Leaves of 1,024 consecutive elements; inside a leaf element i goes to accumulator i mod 16, squares and sums in
// double; the accumulators are folded by halving (16 → 8 → 4 → 2 → 1); leaves are added in order. Equal bits whatever
// the instruction set, threads or tile size.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "spillway/device.h"
#include "spillway/dtype.h"

namespace spillway {

inline constexpr std::size_t kNormLeaf = 1024;
inline constexpr std::uint64_t kAllFinite = UINT64_MAX;

struct NormResult {
  double sum_of_squares = 0;  // unspecified when an element is not finite
  // Where the first leaf begins that has such an element: its first index, a multiple of kNormLeaf.
  std::uint64_t first_nonfinite = kAllFinite;
};

// Leaf sums, which those who have parts of a gradient make of their own, and what they make of all of them. Squares of
// fp32 numbers stay below 2^256, far from the limit of double: a leaf's sum is not finite exactly when one of its
// elements is not. `leaves`: div_up(count, kNormLeaf) of them.
void leaf_sums(const void* data, DType type, std::size_t count, double* leaves, HostWorkers& workers);
NormResult add_leaves(std::span<const double> leaves);

// `data` holds `count` elements; a last leaf may be short (missing elements count as zero). `leaves` is scratch for the
// leaf sums of one call: at least div_up(count, kNormLeaf) doubles.
NormResult squared_norm(const void* data, DType type, std::size_t count, std::span<double> leaves,
                        HostWorkers& workers);

}  // namespace spillway
