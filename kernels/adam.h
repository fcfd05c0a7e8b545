// What tests, benches and other kernels see of Adam besides its public header: the definition, and every instruction
// set.
#pragma once

#include <cstddef>
#include <string_view>
#include <vector>

#include "spillway/adam.h"

namespace spillway {

// The same with std::fma, one element at a time: the definition. Results that are not NaN have equal bits on every
// target; which of two NaNs survives an operation is the processor's choice.
bool adam_update_reference(const AdamTile& tile, const AdamScalars& scalars, std::size_t begin, std::size_t end);

// Aborts on a type that Adam does not update, a range outside the tile or contradicting scalars.
void check_adam_arguments(const AdamTile& tile, const AdamScalars& scalars, std::size_t begin, std::size_t end);

// Instruction sets this machine can run, best first, for tests and benches; and one fixed set's function.
using AdamFunction = bool (*)(const AdamTile&, const AdamScalars&, std::size_t begin, std::size_t end);
struct AdamTarget {
  std::string_view name;
  AdamFunction update;
};
std::vector<AdamTarget> adam_targets();

}  // namespace spillway
