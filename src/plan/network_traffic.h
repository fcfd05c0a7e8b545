// What a rank moves to and from the others for a block: counted from the plan, as the engine's collectives move it.
// Pure.
//
//   weights   gathered   at the first lease after its own part came           bytes of the others' slices
//   sums      scattered  once a step, when the block's gradient is complete   4 for each element of these, or 2
//   leaves    gathered   after that                                           8 for each leaf of these
//
// Where ranks own no parts (stage 0), sums alone: each rounds its slice of them, and has the others' rounded.
#pragma once

#include <cstdint>

#include "src/plan/plan.h"

namespace spillway {

struct Collectives {
  std::uint64_t bytes = 0;  // of others; as many of its own go to, or come from, the others
  std::uint64_t calls = 0;

  Collectives& operator+=(const Collectives& other) {
    bytes += other.bytes;
    calls += other.calls;
    return *this;
  }
};

struct BlockNetwork {
  Collectives weights, sums, rounded, leaves;
};

// Of the plan's rank; nothing with one. Allocates nothing.
BlockNetwork network_of(const Plan& plan, std::uint32_t block);

}  // namespace spillway
