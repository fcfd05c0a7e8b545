#include "src/comm/scalars.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "src/comm/sum_tree.h"

namespace spillway {
namespace {

double fold_two(Fold fold, double a, double b) {
  if (fold == Fold::kSum) return a + b;
  if (std::isnan(a)) return a;
  if (std::isnan(b)) return b;
  return fold == Fold::kMax ? std::max(a, b) : std::min(a, b);
}

std::uint64_t fold_two(Fold fold, std::uint64_t a, std::uint64_t b) {
  switch (fold) {
    case Fold::kSum: return a + b;
    case Fold::kMax: return std::max(a, b);
    case Fold::kMin: return std::min(a, b);
    case Fold::kOr: break;
  }
  return a | b;
}

template <typename T>
T fold_all(std::span<const Word* const> words, std::size_t place, Fold fold) {
  return fold_in_tree(
      words.size(), [&](std::size_t rank) { return std::bit_cast<T>(words[rank]->values[place]); },
      [&](T a, T b) { return fold_two(fold, a, b); });
}

}  // namespace

void fold_scalars(std::span<const Word* const> word_of_rank, const Collective& call) {
  for (std::size_t i = 0; i < call.data.size() / 8; ++i) {
    const auto folded = call.scalar_type == ScalarType::kDouble
                            ? std::bit_cast<std::uint64_t>(fold_all<double>(word_of_rank, i, call.fold))
                            : fold_all<std::uint64_t>(word_of_rank, i, call.fold);
    std::memcpy(call.data.data() + 8 * i, &folded, 8);
  }
}

}  // namespace spillway
