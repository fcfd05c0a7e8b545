// Configurations of runs that are looked at before they are made, of so many ranks as a command line says.
#pragma once

#include <cstdint>
#include <functional>

#include "spillway/error.h"

namespace spillway::terminal {

// Throws `error` of a configuration that was read for one rank. Where read(0), for nobody who trains, has none, so that
// the rows of several ranks are all that is wrong, it says that --ranks tells how many. The log is silent afterwards.
[[noreturn]] void refuse_for_one_rank(const Error& error, const std::function<void(std::uint32_t ranks)>& read);

// What read(ranks) returns, which loads a configuration.
template <typename Read>
auto read_for_ranks(std::uint32_t ranks, const Read& read) {
  try {
    return read(ranks);
  } catch (const Error& error) {
    if (ranks != 1) throw;
    refuse_for_one_rank(error, read);
  }
}

}  // namespace spillway::terminal
