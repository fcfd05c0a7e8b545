// How the states of a parameter are described: which have moments in fewer bytes, and which stay exact. Pure.
#pragma once

#include "spillway/config.h"
#include "spillway/model.h"
#include "swap/extents.h"

namespace spillway {

// Of a trainable parameter; empty: the exact ones. Parameters of a block whose states are described alike lie together,
// and the description of a store tells of all that are not exact.
StateList states_of(const Config& config, const Parameter& parameter);

// What `config` says of parameters that are not named as exact, whatever model they are of.
StateList reduced_states(const Config& config);

// The form of a trainable parameter's moments.
MomentFormat format_of(const Config& config, const Parameter& parameter);

// Throws kInvalidArgument for an optimizer whose states are exact alone, and for a pattern of Config::exact_states that
// matches no trainable parameter.
void check_reduced_states(const Config& config, const ModelDescription& model);

}  // namespace spillway
