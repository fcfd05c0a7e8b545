// What tests, benches and other kernels see of the optimizers besides their public header: the definition, and every
// instruction set.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "spillway/optimizer.h"

namespace spillway {

// The same with std::fma, one element at a time: the definition. Results that are not NaN have equal bits on every
// target; which of two NaNs survives an operation is the processor's choice.
bool optimizer_update_reference(const OptimizerTile& tile, const OptimizerScalars& scalars, std::size_t begin,
                                std::size_t end);

// The same for a caller that reads every piece of this many elements once more before its update: the next piece then
// comes into the first-level cache as a whole, 28 KiB of five arrays, while this one is updated.
inline constexpr std::size_t kUpdatePiece = 2048;
bool optimizer_update_piece(const OptimizerTile& tile, const OptimizerScalars& scalars, std::size_t begin,
                            std::size_t end);

// Calls visit(array, bytes) for each array that the tile has.
template <typename Visit>
void for_each_array(const OptimizerTile& tile, Visit visit) {
  const auto see = [&](const void* array, std::size_t elements, std::size_t each) {
    if (array != nullptr) visit(array, elements * each);
  };
  const ReducedMoments& reduced = tile.reduced;
  const std::size_t groups = (tile.count + kMomentGroup - 1) / kMomentGroup;
  for (const void* array : {static_cast<const void*>(tile.weight), tile.gradient})
    see(array, tile.count, size_of(tile.type));
  for (const float* array : {tile.exp_avg, tile.exp_avg_sq, tile.master}) see(array, tile.count, sizeof(float));
  see(tile.residual, tile.count, sizeof(std::int16_t));
  for (const void* array : {reduced.exp_avg, reduced.exp_avg_sq}) see(array, tile.count, size_of(reduced.format));
  for (const std::uint16_t* array : {reduced.exp_avg_scales, reduced.exp_avg_sq_scales})
    see(array, groups, sizeof(std::uint16_t));
}

// Aborts on arrays that are missing or too many, a range outside the tile or contradicting scalars.
void check_optimizer_arguments(const OptimizerTile& tile, const OptimizerScalars& scalars, std::size_t begin,
                               std::size_t end);

// Instruction sets this machine can run, best first, for tests and benches; and one fixed set's function.
using OptimizerFunction = bool (*)(const OptimizerTile&, const OptimizerScalars&, std::size_t begin, std::size_t end);
struct OptimizerTarget {
  std::string_view name;
  OptimizerFunction update;
};
std::vector<OptimizerTarget> optimizer_targets();
// Where this machine runs none of them but the definition: what that costs. Else empty.
std::string slow_optimizers();

}  // namespace spillway
