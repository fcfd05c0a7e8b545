// Why the compute stream had nothing to run: what a step's stall is attributed to.
#pragma once

#include "spillway/cplusplus.h"

#include <array>
#include <cstddef>
#include <cstdint>

namespace spillway {

enum class StallCause : std::uint8_t {
  kRead,      // bytes of weights or states on their way from NVMe
  kWrite,     // a buffer whose bytes are on their way to NVMe
  kCopy,      // weights on their way to the device, in host memory already
  kGradient,  // gradients on their way down
  kUpdate,    // the optimizer's pass over a tile
  kCommit,    // writing and syncing a commit
  kSave,      // writing and syncing a snapshot
  kOther,     // none of these: the caller's own code
  kNetwork,   // what other ranks bring: their part of weights, and of sums
};

inline constexpr std::array kStallNames = {"read",   "write", "copy",  "gradient", "update",
                                           "commit", "save",  "other", "network"};

struct StallSeconds {
  std::array<double, kStallNames.size()> of{};  // by cause

  double& operator[](StallCause cause) { return of[static_cast<std::size_t>(cause)]; }
  double operator[](StallCause cause) const { return of[static_cast<std::size_t>(cause)]; }
  double total() const {
    double sum = 0;
    for (double seconds : of) sum += seconds;
    return sum;
  }
};

}  // namespace spillway
