// A Communicator over a Transport, for streams of the `host` device: each stream waits in its own thread while the
// communicator's carries the collective out. For streams of a GPU, too, once it has a StreamMover; the same order of
// calls counts for both.
#pragma once

#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "spillway/communicator.h"
#include "src/comm/collective_loop.h"
#include "src/comm/collective_queue.h"
#include "src/comm/stream_mover.h"
#include "src/comm/transfers.h"
#include "src/comm/transport.h"

namespace spillway {

// kInvalidArgument: no number of seconds that somebody would wait, above 0 and a year at the most.
void refuse_patience(double seconds);

class TransportCommunicator final : public Communicator {
 public:
  // Comes back when all ranks have come, and throws when one does not.
  TransportCommunicator(std::unique_ptr<Transport> transport, const TransferLimits& limits, double patience_seconds);
  ~TransportCommunicator() override;

  std::uint32_t rank() const noexcept override { return rank_; }
  std::uint32_t ranks() const noexcept override { return ranks_; }
  std::string describe() const override;
  void throw_if_failed() const override { works_->queue.throw_if_failed(); }
  void note_work() noexcept override { works_->queue.note_work(); }
  void note_ending(bool ending) noexcept override { works_->queue.note_ending(ending); }

  // From here on streams of a GPU may be named. Once, between two calls. `gpu`: what names it.
  void move_streams_by(std::unique_ptr<StreamMover> streams, std::string gpu = {});
  const std::string& gpu() const noexcept { return gpu_; }
  bool moves_streams() const noexcept { return works_->streams != nullptr; }
  const TransferLimits& limits() const noexcept { return works_->limits; }
  double patience_seconds() const noexcept { return works_->patience_seconds; }

 protected:
  void start(const Collective& call, Stream& stream) override;

 private:
  void end();

  // What the thread works on.
  struct Works {
    Works(std::unique_ptr<Transport> over, const TransferLimits& limits, double patience_seconds)
        : limits(limits),
          patience_seconds(patience_seconds),
          transport(std::move(over)),
          queue(transport->ranks(), patience_seconds, transport->library()),
          loop(*transport, queue, limits, patience_seconds) {}

    const TransferLimits limits;
    const double patience_seconds;
    const std::unique_ptr<Transport> transport;
    std::unique_ptr<StreamMover> streams;  // null: none
    CollectiveQueue queue;
    CollectiveLoop loop;
  };

  std::unique_ptr<Works> works_;
  const std::uint32_t rank_, ranks_;
  const std::string library_;
  std::string gpu_;
  std::thread thread_, watcher_;  // who goes through the calls; who lets a GPU's streams go where that one hangs
};

}  // namespace spillway
