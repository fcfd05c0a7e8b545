// In which type gradients travel between ranks.
#pragma once

#include <string>

#include "spillway/config.h"

namespace spillway {

// Why gradients cannot travel as this configuration says; empty: they can. What is rounded on its way is rounded as
// often as there are ranks, and sum_groups promise that their number is nothing to the bits.
std::string refusal_of_communication(const Config& config);
inline constexpr const char* kOneOfTheTwo = "leave one of the two out";

}  // namespace spillway
