// What gradients say before a step: their norm, and whether all of them are finite.
#include <algorithm>
#include <atomic>
#include <cmath>

#include "kernels/finite.h"
#include "kernels/norm.h"
#include "src/optimizer/tensor_optimizer.h"

namespace spillway {

// In the engine's order: a block's leaves are added in order, and then the blocks.
GradientNorm TensorOptimizer::norm_of(std::span<const OptimizerTensor> tensors) {
  const std::span<std::byte> memory = host_region(plan_.host.norms);
  double* const leaves = reinterpret_cast<double*>(memory.data());
  double sum = 0;
  for (std::uint32_t b = 0; b < plan_.blocks.size(); ++b) {
    const BlockPartition& partition = plan_.blocks[b].partition;
    const std::size_t all = partition.trainable_elements / kNormLeaf;
    std::fill_n(leaves, all, 0.0);
    for (std::uint32_t p = 0; p < partition.parameters.size(); ++p) {
      const ParameterPlace& place = partition.parameters[p];
      const std::uint32_t t = tensors_.index(b, p);
      if (tensors[t].gradient == nullptr) continue;
      const std::span<double> own(leaves + place.first / kNormLeaf, div_up(place.count, std::uint64_t{kNormLeaf}));
      bool finite = true;
      if (is_elsewhere(tensors[t].gradient)) {
        tensors_.staging().carrier()->leaf_sums(t, own);
        finite = std::ranges::all_of(own, [](double sum) { return std::isfinite(sum); });
      } else {
        const NormResult result = squared_norm(tensors[t].gradient, config_.weights, place.count, own, *workers_);
        finite = result.first_nonfinite == kAllFinite;
      }
      if (finite) continue;
      return {.norm = HUGE_VAL, .first_nonfinite = t};
    }
    double of_block = 0;
    for (std::size_t leaf = 0; leaf < all; ++leaf) of_block += leaves[leaf];
    sum += of_block;
  }
  return {.norm = std::sqrt(sum)};
}

GradientNorm TensorOptimizer::gradient_norm(std::span<const OptimizerTensor> tensors) {
  const auto turn = caller_.enter("gradient_norm");
  check(tensors, "gradient_norm", true);
  return norm_of(tensors);
}

// The first tensor that has one, if any. All in host memory at once, at the speed of memory; nothing is added up.
std::optional<std::uint32_t> TensorOptimizer::first_nonfinite(std::span<const OptimizerTensor> tensors) {
  std::atomic<std::uint32_t> first = tensors_.count();
  const auto found = [&](std::uint32_t tensor) {
    std::uint32_t before = first;
    while (tensor < before && !first.compare_exchange_weak(before, tensor)) {
    }
  };
  const std::span<const TensorPiece> pieces = tensors_.pieces();
  workers_->parallel_for(pieces.size(), [&](std::size_t i) {
    const TensorPiece& piece = pieces[i];
    const auto* const gradient = static_cast<const std::byte*>(tensors[piece.tensor].gradient);
    if (gradient == nullptr || is_elsewhere(gradient)) return;
    if (!all_finite(gradient + piece.first * size_of(config_.weights), config_.weights, piece.count))
      found(piece.tensor);
  });
  for (std::uint32_t t = 0; t < tensors_.count(); ++t) {
    if (!is_elsewhere(tensors[t].gradient)) continue;
    const std::uint64_t count = plan_.blocks[tensors_.block(t)].partition.parameters[tensors_.parameter(t)].count;
    const std::span<double> sums(reinterpret_cast<double*>(host_region(plan_.host.norms).data()),
                                 div_up(count, std::uint64_t{kNormLeaf}));
    tensors_.staging().carrier()->leaf_sums(t, sums);
    if (!std::ranges::all_of(sums, [](double sum) { return std::isfinite(sum); })) found(t);
  }
  return first == tensors_.count() ? std::nullopt : std::optional(first.load());
}

}  // namespace spillway
