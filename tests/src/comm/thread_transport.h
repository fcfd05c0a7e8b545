// A Transport whose ranks are threads of this process, so that sanitizers see all of a communicator, and tests can make
// a rank fall silent. Messages are copied when they are sent; collectives are over when all have come to them.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <vector>

#include "src/comm/transport.h"

namespace spillway {

class ThreadHub {
 public:
  explicit ThreadHub(std::uint32_t ranks) : ranks_(ranks), of_rank_(ranks) {}

  std::unique_ptr<Transport> join(std::uint32_t rank);

  // From now on nothing of that rank's goes out or comes in, as when its process is stopped.
  void silence(std::uint32_t rank);
  // Its next message to every rank in the channel of words is lost.
  void lose_a_word(std::uint32_t rank);
  // Its library does not come back from the next call, nor ever after. The hub must live on.
  void hang(std::uint32_t rank);
  // Its library fails at the next poll.
  void break_down(std::uint32_t rank, const std::string& why);

 private:
  friend class ThreadTransport;

  enum class Kind : std::uint8_t { kAllGather, kBroadcast, kReduce, kReduceScatter };
  struct Meeting {  // a collective
    Kind kind = Kind::kAllGather;
    std::uint32_t root = 0, come = 0, gone = 0;
    std::vector<std::vector<std::byte>> brought;
  };
  struct OfRank {
    bool silent = false, hangs = false;
    std::vector<std::uint32_t> lose;  // words to each rank that are to be lost
    std::string broken;
  };
  using Road = std::tuple<std::uint32_t, std::uint32_t, Channel>;  // from, to

  const std::uint32_t ranks_;
  std::condition_variable never_;
  std::mutex mutex_;  // guards everything below
  std::vector<OfRank> of_rank_;
  std::map<Road, std::deque<std::vector<std::byte>>> sent_;
  std::map<std::uint64_t, Meeting> meetings_;  // by their place in the order
};

}  // namespace spillway
