// A Communicator over a Transport, for streams of the `host` device: each stream waits in its own thread while the
// communicator's carries the collective out.
#pragma once

#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "spillway/communicator.h"
#include "src/comm/collective_loop.h"
#include "src/comm/collective_queue.h"
#include "src/comm/transfers.h"
#include "src/comm/transport.h"

namespace spillway {

class TransportCommunicator final : public Communicator {
 public:
  // Comes back when all ranks have come, and throws when one does not.
  TransportCommunicator(std::unique_ptr<Transport> transport, const TransferLimits& limits, double patience_seconds);
  ~TransportCommunicator() override;

  std::uint32_t rank() const noexcept override { return rank_; }
  std::uint32_t ranks() const noexcept override { return ranks_; }
  std::string describe() const override;
  void throw_if_failed() const override { works_->queue.throw_if_failed(); }

 protected:
  void start(const Collective& call, Stream& stream) override;

 private:
  void end();

  // What the thread works on.
  struct Works {
    Works(std::unique_ptr<Transport> over, const TransferLimits& limits, double patience_seconds)
        : transport(std::move(over)),
          queue(transport->ranks(), patience_seconds, transport->library()),
          loop(*transport, queue, limits, patience_seconds) {}

    const std::unique_ptr<Transport> transport;
    CollectiveQueue queue;
    CollectiveLoop loop;
  };

  std::unique_ptr<Works> works_;
  const std::uint32_t rank_, ranks_;
  const std::string library_;
  std::thread thread_;
};

}  // namespace spillway
