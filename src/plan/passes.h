// What forward passes fetch that follow one another between steps: an evaluation's, the tokens of a text. Pure.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "src/plan/plan.h"

namespace spillway {

// So many of the visits, the first, are one forward pass.
std::size_t first_pass(std::span<const Visit> visits);
// What a forward pass asks for and what of it is fetched, from nvme too, when it follows another one without a step in
// between. Zeros where all weights live in HBM.
struct PassTraffic {
  std::uint64_t weights = 0, fetched = 0, nvme_read = 0;
};
PassTraffic pass_traffic(const Plan& plan);

}  // namespace spillway
