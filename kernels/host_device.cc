#include "kernels/host_device.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "kernels/convert.h"
#include "kernels/host_memory.h"
#include "kernels/host_stream.h"
#include "kernels/optimizer.h"
#include "spillway/error.h"
#include "spillway/units.h"

namespace spillway {
namespace {

// Kernels and copies go to the workers in pieces of a fixed size; a single piece runs on the stream's own thread.
constexpr std::size_t kPieceElements = 64 * kKiB;
constexpr std::size_t kPieceBytes = 512 * kKiB;

// body(begin, end) for pieces of [0, count).
template <typename Body>
void for_pieces(HostWorkers& workers, std::size_t count, std::size_t piece, Body body) {
  if (count <= piece) return body(std::size_t{0}, count);
  workers.parallel_for(div_up(count, piece), [&](std::size_t i) { body(i * piece, std::min(count, (i + 1) * piece)); });
}

class HostEvent final : public Event {
 public:
  // The latest record: `position` tasks of a stream. Null before the first. Guarded, because one thread may record
  // while another asks.
  struct Record {
    const StreamProgress* stream = nullptr;
    std::uint64_t position = 0;
  };
  void set(Record record) {
    const std::lock_guard lock(mutex_);
    latest_ = record;
  }
  Record latest() const {
    const std::lock_guard lock(mutex_);
    return latest_;
  }

 private:
  mutable std::mutex mutex_;
  Record latest_;
};

// What it has enqueued must have run when it is destroyed.
class HostStopwatch final : public Stopwatch {
 public:
  void start(Stream& stream) override {
    stopped_ = false;
    stream.launch([this](HostWorkers&) { begin_ = Clock::now(); });
  }
  void stop(Stream& stream) override {
    stopped_ = true;
    ++stops_;
    stream.launch([this](HostWorkers&) {
      end_ = Clock::now();
      ++passed_;
    });
  }
  std::optional<double> seconds() const override {
    const auto taken = times();
    if (!taken) return std::nullopt;
    return std::chrono::duration<double>(taken->end - taken->begin).count();
  }
  std::optional<Times> times() const override {
    if (!stopped_ || passed_ != stops_) return std::nullopt;
    return Times{begin_, end_};
  }

 private:
  using Clock = std::chrono::steady_clock;
  Clock::time_point begin_, end_;  // by the stream's thread, before it counts in passed_
  std::atomic<std::uint64_t> passed_ = 0;
  std::uint64_t stops_ = 0;
  bool stopped_ = false;
};

const HostStream& as_host(const Stream& stream) {
  SPILLWAY_CHECK(stream.kind() == DeviceKind::kHost, "a stream of another device");
  return static_cast<const HostStream&>(stream);
}
HostStream& as_host(Stream& stream) { return const_cast<HostStream&>(as_host(std::as_const(stream))); }

class HostDevice final : public Device {
 public:
  HostDevice(const HostDeviceOptions& options, HostWorkers& workers)
      : workers_(workers), arena_(options.hbm_bytes, kHbmArena), copy_delay_(options.copy_delay_seconds) {}

  DeviceKind kind() const noexcept override { return DeviceKind::kHost; }
  std::span<std::byte> hbm() const noexcept override { return arena_.memory(); }
  std::string describe() const override {
    const double mib = static_cast<double>(arena_.memory().size()) / static_cast<double>(kMiB);
    return fmt::format(
        "host device (the CPU): {:.{}f} MiB of RAM stand for GPU memory (hbm_bytes), {} pages, {} compute thread{}",
        mib, mib == std::floor(mib) ? 0 : 2, arena_.huge_pages() ? "huge" : "small", workers_.threads(),
        workers_.threads() == 1 ? "" : "s");
  }

  void register_host(std::span<std::byte> memory) override { registered_.add(memory); }
  void unregister_host(std::span<std::byte> memory) noexcept override { registered_.remove(memory); }

  std::unique_ptr<Stream> create_stream(std::string name) override {
    const std::lock_guard lock(mutex_);
    streams_.push_back(std::make_shared<StreamProgress>());
    return std::make_unique<HostStream>(std::move(name), streams_.back(), workers_);
  }
  std::unique_ptr<Stream> adopt_stream(void*) override {
    throw Error(Code::kInvalidArgument, {"adopt_stream", "the host device has streams of its own only", 0,
                                         "use Engine::stream(), or a cuda device"});
  }
  std::unique_ptr<Event> create_event() override { return std::make_unique<HostEvent>(); }
  std::unique_ptr<Stopwatch> create_stopwatch() override { return std::make_unique<HostStopwatch>(); }

  bool done(const Event& event) const override {
    const auto record = static_cast<const HostEvent&>(event).latest();
    return record.stream == nullptr || record.stream->reached(record.position);
  }
  void synchronize(const Event& event) const override {
    const auto record = static_cast<const HostEvent&>(event).latest();
    if (record.stream != nullptr) record.stream->wait_until(record.position);
  }

  void copy_async(CopyKind kind, void* to, const void* from, std::size_t bytes, Stream& stream) override {
    if (bytes == 0) return;
    const bool to_host = kind == CopyKind::kDeviceToHost, from_host = kind == CopyKind::kHostToDevice;
    SPILLWAY_CHECK(to_host ? registered_.contains(to, bytes) : arena_.contains(to, bytes),
                   "a copy goes to registered host memory or to the HBM arena");
    SPILLWAY_CHECK(from_host ? registered_.contains(from, bytes) : arena_.contains(from, bytes),
                   "a copy comes from registered host memory or from the HBM arena");
    launch_copy(to, from, bytes, stream);
  }

  void copy_lent_async(CopyKind kind, void* to, const void* from, std::size_t bytes, Stream& stream) override {
    if (bytes == 0) return;
    SPILLWAY_CHECK(kind != CopyKind::kDeviceToHost || registered_.contains(to, bytes), "registered host memory");
    SPILLWAY_CHECK(kind != CopyKind::kHostToDevice || registered_.contains(from, bytes), "registered host memory");
    launch_copy(to, from, bytes, stream);
  }

  void fill_async(void* to, std::byte value, std::size_t bytes, Stream& stream) override {
    check_device(to, bytes);
    if (bytes == 0) return;
    stream.launch([to, value, bytes](HostWorkers& workers) {
      for_pieces(workers, bytes, kPieceBytes, [&](std::size_t begin, std::size_t end) {
        std::memset(static_cast<std::byte*>(to) + begin, std::to_integer<int>(value), end - begin);
      });
    });
  }

  void call_async(void (*function)(void*), void* argument, Stream& stream) override {
    stream.launch([function, argument](HostWorkers&) { function(argument); });
  }

  void accumulate_async(float* accumulator, const void* from, DType from_type, std::size_t count, bool first,
                        Stream& stream) override {
    check_device(accumulator, count * sizeof(float));
    check_device(from, count * size_of(from_type));
    stream.launch([=](HostWorkers& workers) {
      for_pieces(workers, count, kPieceElements, [&](std::size_t begin, std::size_t end) {
        accumulate(accumulator + begin, static_cast<const std::byte*>(from) + begin * size_of(from_type), from_type,
                   end - begin, first);
      });
    });
  }

  void cast_async(void* to, DType to_type, const void* from, DType from_type, std::size_t count,
                  Stream& stream) override {
    check_device(to, count * size_of(to_type));
    check_device(from, count * size_of(from_type));
    stream.launch([=](HostWorkers& workers) {
      for_pieces(workers, count, kPieceElements, [&](std::size_t begin, std::size_t end) {
        cast(static_cast<std::byte*>(to) + begin * size_of(to_type), to_type,
             static_cast<const std::byte*>(from) + begin * size_of(from_type), from_type, end - begin);
      });
    });
  }

  void leaf_sums_async(const void* data, DType type, std::size_t count, double* leaves, Stream& stream) override {
    check_device(data, count * size_of(type));
    check_device(leaves, div_up(count, kNormLeaf) * sizeof(double));
    stream.launch([=](HostWorkers& workers) { leaf_sums(data, type, count, leaves, workers); });
  }

  void add_leaves_async(const double* leaves, std::size_t count, NormResult* result, Stream& stream) override {
    check_device(leaves, count * sizeof(double));
    check_device(result, sizeof(NormResult));
    stream.launch([=](HostWorkers&) { *result = add_leaves(std::span(leaves, count)); });
  }

  void update_async(const OptimizerTile& tile, const OptimizerScalars& scalars, std::size_t begin, std::size_t end,
                    std::uint32_t* finite, Stream& stream) override {
    check_optimizer_arguments(tile, scalars, begin, end);
    for_each_array(tile, [this](const void* array, std::size_t bytes) { check_device(array, bytes); });
    check_device(finite, sizeof(*finite));
    stream.launch([=](HostWorkers& workers) {
      std::atomic<bool> all_finite = true;
      for_pieces(workers, end - begin, kPieceElements, [&](std::size_t from, std::size_t to) {
        if (!optimizer_update(tile, scalars, begin + from, begin + to))
          all_finite.store(false, std::memory_order_relaxed);
      });
      if (!all_finite) *finite = 0;
    });
  }

  std::shared_ptr<IdleClock> idle_clock(Stream& stream) override { return as_host(stream).progress(); }

 protected:
  void do_record(Event& event, Stream& stream) override {
    const HostStream& host = as_host(stream);
    static_cast<HostEvent&>(event).set({host.progress().get(), host.position()});
  }
  void do_wait(Stream& stream, Event& event) override {
    const auto record = static_cast<HostEvent&>(event).latest();
    as_host(stream).launch_wait(*record.stream, record.position);
  }

 private:
  void check_device(const void* data, std::size_t bytes) const {
    SPILLWAY_CHECK(bytes == 0 || arena_.contains(data, bytes), "device work reads and writes the HBM arena only");
  }

  void launch_copy(void* to, const void* from, std::size_t bytes, Stream& stream) const {
    stream.launch([to, from, bytes, delay = copy_delay_](HostWorkers& workers) {
      if (delay > 0) std::this_thread::sleep_for(std::chrono::duration<double>(delay));
      for_pieces(workers, bytes, kPieceBytes, [&](std::size_t begin, std::size_t end) {
        std::memcpy(static_cast<std::byte*>(to) + begin, static_cast<const std::byte*>(from) + begin, end - begin);
      });
    });
  }

  HostWorkers& workers_;
  HostArena arena_;
  RegisteredMemory registered_;
  double copy_delay_;
  std::mutex mutex_;  // streams_
  std::vector<std::shared_ptr<StreamProgress>> streams_;
};

}  // namespace

std::unique_ptr<Device> create_host_device(const HostDeviceOptions& options, HostWorkers& workers) {
  return std::make_unique<HostDevice>(options, workers);
}

}  // namespace spillway
