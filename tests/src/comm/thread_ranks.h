// Ranks that are threads of this process, each with a communicator of its own.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <exception>
#include <functional>
#include <thread>
#include <vector>

#include "src/comm/transport_communicator.h"
#include "tests/src/comm/thread_transport.h"

namespace spillway::testing {

// With a hub that the body may use to make ranks fail. What the body throws is a failure of the test.
inline void run_ranks_on(ThreadHub& hub, std::uint32_t ranks, const TransferLimits& limits, double patience_seconds,
                         const std::function<void(Communicator&)>& body) {
  std::vector<std::thread> threads;
  for (std::uint32_t rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        TransportCommunicator communicator(hub.join(rank), limits, patience_seconds);
        body(communicator);
      } catch (const std::exception& error) {
        ADD_FAILURE() << "rank " << rank << ": " << error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

inline void run_ranks(std::uint32_t ranks, const std::function<void(Communicator&)>& body) {
  constexpr double kPatience = 60;  // not what makes a test pass
  ThreadHub hub(ranks);
  run_ranks_on(hub, ranks, {}, kPatience, body);
}

}  // namespace spillway::testing
