#include "src/comm/sum_tree.h"

#include <algorithm>

#include "spillway/error.h"

namespace spillway {
namespace {

// Small enough that the pending sums of 2^16 parts lie in the second-level cache, long enough for vectors.
constexpr std::size_t kStrip = 2048;
constexpr std::size_t kMostPending = 17;

void add_strip(float* left, const float* right, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) left[i] += right[i];
}

}  // namespace

void sum_in_tree(std::span<const float* const> parts, float* to, std::size_t count) {
  SPILLWAY_CHECK(!parts.empty() && std::bit_width(parts.size()) < kMostPending, "2^16 parts are the most");
  // The same counting as fold_in_tree's, on strips: pending[h] is a left operand that waits for its right one.
  alignas(64) float pending[kMostPending][kStrip];
  for (std::size_t at = 0; at < count; at += kStrip) {
    const std::size_t strip = std::min(kStrip, count - at);
    std::size_t height = 0;
    for (std::size_t come = 0; come < parts.size(); ++come) {
      std::copy_n(parts[come] + at, strip, pending[height++]);
      for (std::size_t bits = come; bits & 1; bits >>= 1, --height) {
        add_strip(pending[height - 2], pending[height - 1], strip);
      }
    }
    for (; height > 1; --height) add_strip(pending[height - 2], pending[height - 1], strip);
    std::copy_n(pending[0], strip, to + at);
  }
}

}  // namespace spillway
