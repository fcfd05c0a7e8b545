// A communicator whose calls go on to another one: for tests that look at them, or hold them up.
#pragma once

#include <atomic>
#include <cstdint>
#include <span>
#include <string>

#include "spillway/communicator.h"

namespace spillway::testing {

class Forwarding : public Communicator {
 public:
  explicit Forwarding(Communicator& to) : to_(to) {}

  std::uint32_t rank() const noexcept override { return to_.rank(); }
  std::uint32_t ranks() const noexcept override { return to_.ranks(); }
  std::string describe() const override { return to_.describe(); }
  void throw_if_failed() const override { to_.throw_if_failed(); }
  void note_work() noexcept override { to_.note_work(); }
  void note_ending(bool ending) noexcept override { to_.note_ending(ending); }

 protected:
  virtual void before(const Collective& call, Stream& stream) = 0;

 private:
  template <typename T>
  static std::span<T> values(const Collective& call) {
    return {reinterpret_cast<T*>(call.data.data()), call.data.size() / sizeof(T)};
  }
  void start(const Collective& call, Stream& stream) override {
    before(call, stream);
    const std::int32_t block = call.block;
    switch (call.kind) {
      case CollectiveKind::kAllGather: return to_.all_gather(call.data, call.slices, block, stream);
      case CollectiveKind::kReduceScatter:
        return to_.reduce_scatter(values<float>(call), call.slices, call.sums, block, stream);
      case CollectiveKind::kAllReduce:
        if (call.scalar_type == ScalarType::kDouble)
          return to_.all_reduce(values<double>(call), call.fold, block, stream);
        return to_.all_reduce(values<std::uint64_t>(call), call.fold, block, stream);
      case CollectiveKind::kBroadcast: return to_.broadcast(call.data, call.root, block, stream);
      case CollectiveKind::kBarrier: return to_.barrier(block, stream);
      case CollectiveKind::kOpen: return;
    }
  }

  Communicator& to_;
};

// Counts how often a rank says that its work goes on.
class CountingWork final : public Forwarding {
 public:
  using Forwarding::Forwarding;
  void note_work() noexcept override { ++noted; }

  std::atomic<unsigned> noted = 0;

 private:
  void before(const Collective&, Stream&) override {}
};

}  // namespace spillway::testing
