// A Communicator over a Transport, for streams of the `host` device: each stream waits in its own thread while the
// communicator's carries the collective out.
#pragma once

#include <memory>
#include <string>
#include <thread>

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
  void throw_if_failed() const override { queue_.throw_if_failed(); }

 protected:
  void start(const Collective& call, Stream& stream) override;

 private:
  void end();

  std::unique_ptr<Transport> transport_;
  const std::uint32_t rank_, ranks_;
  const std::string library_;
  CollectiveQueue queue_;
  std::unique_ptr<CollectiveLoop> loop_;
  std::thread thread_;
};

}  // namespace spillway
