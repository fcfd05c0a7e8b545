// How the states of a parameter are described. Pure.
#pragma once

#include "spillway/config.h"
#include "spillway/model.h"
#include "swap/extents.h"

namespace spillway {

// Of a trainable parameter; empty: the exact ones. Parameters of a block whose states are described alike lie together,
// and the description of a store tells of all that are not exact.
StateList states_of(const Config& config, const Parameter& parameter);

}  // namespace spillway
