#include "src/comm/transport_communicator.h"

#include <pthread.h>

#include <string_view>
#include <utility>

#include <fmt/format.h>

#include "kernels/checksum.h"
#include "kernels/devices.h"
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

void refuse_patience(double seconds) {
  constexpr double kYear = 365.0 * 24 * 60 * 60;
  if (seconds > 0 && seconds <= kYear) return;  // also not NaN
  throw Error(Code::kInvalidArgument,
              {"patience_seconds", fmt::format("is {:g}", seconds), 0, "give seconds, above 0 and a year at the most"});
}

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
  if (watcher_.joinable()) watcher_.join();
  // A thread that hangs may come back, and would look at what close() frees.
  if (!ended && works_->streams) works_->streams->abandon();
  const bool closed = works_->streams == nullptr || (ended && works_->streams->close());
  if (ended && works_->loop.lets_go() && closed) return;
  // After a failure a library, or a GPU, may still look at what it was given. That is lost: a few MiB of a process that
  // ends.
  static_cast<void>(works_.release());
}

std::string TransportCommunicator::describe() const {
  const std::string streams = works_->streams ? ", and " + works_->streams->library() : "";
  return fmt::format("rank {} of {}, over {}{}", rank_, ranks_, library_, streams);
}

void TransportCommunicator::move_streams_by(std::unique_ptr<StreamMover> streams, std::string gpu) {
  gpu_ = std::move(gpu);
  works_->streams = std::move(streams);
  works_->loop.move_streams_by(*works_->streams);
  watcher_ = std::thread([works = works_.get()] {
    if (works->queue.watch()) works->streams->abandon();
  });
  pthread_setname_np(watcher_.native_handle(), "ranks watch");
}

void TransportCommunicator::start(const Collective& call, Stream& stream) {
  CollectiveQueue& queue = works_->queue;
  const DeviceType& device = device_of(stream.kind());
  if (!device.on_cpu && works_->streams) {
    const std::uint64_t number = queue.call(call, CollectiveQueue::Where::kGpu);
    return works_->streams->enqueue(number, call, stream);
  }
  if (!device.on_cpu) {
    throw Error(Code::kUnsupported,
                {"the communicator over " + library_,
                 fmt::format("it moves host memory, and this stream is of the {} device", device.name), 0,
                 "join the GPUs of all ranks with make_communicator(\"nccl\"), or set spillway.device to host"});
  }
  const std::uint64_t number = queue.call(call);
  stream.launch([&queue, number](HostWorkers&) { queue.arrive(number); });
}

}  // namespace spillway
