// Which of the processes that train one model together this process is. How they talk to each other: src/comm.
#pragma once

#include <cstdint>

namespace spillway {

struct Rank {
  std::uint32_t index = 0, count = 1;
  bool operator==(const Rank&) const = default;
};

}  // namespace spillway
