// Moments in fewer bytes as fp32 values and back, for whoever brings states in or out: snapshots, exports, imports. The
// update itself never comes here. Any thread; a host program's floating-point environment changes no bit.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "spillway/optimizer.h"

namespace spillway {

enum class Moment : std::uint8_t { kExpAvg, kExpAvgSq };

// Elements [first, first + values.size()) of a tile whose moments are not exact, widened. `first` is a multiple of
// kMomentGroup.
void decode_moments(const ReducedMoments& from, Moment moment, std::uint64_t first, std::span<float> values);

// The other way, into whole groups: the last one may be shorter where a parameter ends. Values that came from
// decode_moments() of the same form become codes that decode to the same values, so that an update goes on with the
// same bits. All others are rounded as an update of `rounding_key` would. Each is_storable() in the form.
void encode_moments(const ReducedMoments& to, Moment moment, std::uint64_t first, std::span<const float> values,
                    std::uint64_t rounding_key);

// Where the first value is that the form cannot hold, or that is no moment: a negative exp_avg_sq. None: all can be.
std::optional<std::size_t> find_unstorable(std::span<const float> values, Moment moment, MomentFormat format);

}  // namespace spillway
