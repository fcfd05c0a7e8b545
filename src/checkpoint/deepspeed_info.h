// What the pickles of a DeepSpeed checkpoint say beside tensors: counters, settings, and what cannot be imported.
// Errors: kInvalidArgument.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "spillway/import.h"
#include "src/formats/pickle_reader.h"

namespace spillway {

inline constexpr std::uint64_t kMostSteps = std::uint64_t{1} << 53;  // no sum of two such counts overflows

// A whole number, or an Enum of one; nothing for anything else, null too.
std::optional<std::uint64_t> whole_number(const PickleValue* value);
std::optional<double> real_number(const PickleValue* value);

// A member that must be there and of that kind; `object` stands in the error.
const PickleValue& member(const PickleValue& dict, std::string_view key, PickleValue::Kind kind,
                          const std::string& object);

// From the model states of rank 0.
void add_engine_info(const PickleValue& root, const std::string& object, DeepSpeedInfo& facts);
// From the optimizer states of rank 0; `zero` is their optimizer_state_dict, `base` that of the optimizer inside.
void add_optimizer_info(const PickleValue& zero, const PickleValue& base, DeepSpeedInfo& facts);

}  // namespace spillway
