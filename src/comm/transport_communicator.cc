#include "src/comm/transport_communicator.h"

#include <pthread.h>

#include <string_view>
#include <utility>

#include <fmt/format.h>

#include "kernels/checksum.h"
#include "spillway/error.h"
#include "spillway/version.h"

namespace spillway {
namespace {

// What must be the same on every rank for the pieces of a collective to meet, as one number.
std::uint64_t settings_of(const TransferLimits& limits) {
  const std::string text =
      fmt::format("{} {} {} {}", SPILLWAY_VERSION, limits.scratch_bytes, limits.direct_bytes, limits.piece_bytes);
  return granule_checksum(std::as_bytes(std::span(text)));
}

}  // namespace

TransportCommunicator::TransportCommunicator(std::unique_ptr<Transport> transport, const TransferLimits& limits,
                                             double patience_seconds)
    : works_(std::make_unique<Works>(std::move(transport), limits, patience_seconds)),
      rank_(works_->transport->rank()),
      ranks_(works_->transport->ranks()),
      library_(works_->transport->library()),
      thread_([works = works_.get()] { works->loop.run(); }) {
  pthread_setname_np(thread_.native_handle(), "ranks");
  std::uint64_t settings = settings_of(limits);
  const Collective open{.kind = CollectiveKind::kOpen, .data = std::as_writable_bytes(std::span(&settings, 1))};
  works_->queue.arrive(works_->queue.call(open));
  try {
    throw_if_failed();
  } catch (...) {
    end();
    throw;
  }
}

TransportCommunicator::~TransportCommunicator() { end(); }

void TransportCommunicator::end() {
  works_->queue.drain();
  const bool ended = works_->queue.stop();
  ended ? thread_.join() : thread_.detach();
  if (ended && works_->loop.lets_go()) return;
  // After a failure the library may still look at what it was given. That is lost: a few MiB of a process that ends.
  static_cast<void>(works_.release());
}

std::string TransportCommunicator::describe() const {
  return fmt::format("rank {} of {}, over {}", rank_, ranks_, library_);
}

void TransportCommunicator::start(const Collective& call, Stream& stream) {
  if (stream.kind() != DeviceKind::kHost) {
    throw Error(Code::kUnsupported,
                {"the communicator over " + library_, "it moves host memory, and this stream is of the cuda device", 0,
                 "set spillway.device to host on every rank"});
  }
  CollectiveQueue& queue = works_->queue;
  const std::uint64_t number = queue.call(call);
  stream.launch([&queue, number](HostWorkers&) { queue.arrive(number); });
}

}  // namespace spillway
