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
    : transport_(std::move(transport)),
      rank_(transport_->rank()),
      ranks_(transport_->ranks()),
      library_(transport_->library()),
      queue_(ranks_),
      loop_(std::make_unique<CollectiveLoop>(*transport_, queue_, limits, patience_seconds)),
      thread_([this] { loop_->run(); }) {
  pthread_setname_np(thread_.native_handle(), "ranks");
  std::uint64_t settings = settings_of(limits);
  const Collective open{.kind = CollectiveKind::kOpen, .data = std::as_writable_bytes(std::span(&settings, 1))};
  queue_.arrive(queue_.call(open));
  try {
    queue_.throw_if_failed();
  } catch (...) {
    end();
    throw;
  }
}

TransportCommunicator::~TransportCommunicator() { end(); }

void TransportCommunicator::end() {
  queue_.drain();
  queue_.stop();
  thread_.join();
  if (loop_->lets_go()) return;
  // After a failure the library may still look at what it was given. That is lost: a few MiB of a process that ends.
  static_cast<void>(loop_.release());
  static_cast<void>(transport_.release());
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
  const std::uint64_t number = queue_.call(call);
  stream.launch([queue = &queue_, number](HostWorkers&) { queue->arrive(number); });
}

}  // namespace spillway
