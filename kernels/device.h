// The Device seam: everything that differs between GPUs and the emulated `host` device. Which devices there are, and
// how each is made, is in devices.h.
//
// A Device owns one HBM arena of exactly the asked size and hands out streams and events: streams are in order, a wait
// captures the event's latest record at the time of the call, copies are asynchronous. Host memory named in a copy must
// be registered first. Streams, events and stopwatches must be destroyed before their device.
// Threads: every call may come from any thread. Several may feed one stream: what each enqueues stays in its order.
// Errors: spillway::Error at creation and registration. A GPU may also fail later, and then for good: throw_if_failed()
// says so, and is asked before anything is made of results. All else goes on without it: what is enqueued is dropped,
// events are done, and functions that streams were to call are called, so that whoever waits for them comes to an end.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "kernels/norm.h"
#include "spillway/device.h"
#include "spillway/dtype.h"
#include "spillway/optimizer.h"

namespace spillway {

inline bool lies_in(std::span<const std::byte> memory, std::span<const std::byte> region) {
  return memory.data() >= region.data() && memory.size() <= region.size() &&
         memory.data() <= region.data() + (region.size() - memory.size());
}

enum class CopyKind : std::uint8_t { kHostToDevice, kDeviceToHost, kDeviceToDevice };

// How long a stream had nothing to run.
struct IdleSeconds {
  double empty = 0;    // nothing was enqueued
  double waiting = 0;  // for an event of another stream
};

// Counts them, from some time before it was first asked for. May outlive its stream, and not the device.
class IdleClock {
 public:
  virtual ~IdleClock() = default;
  // So far. Never less than before.
  virtual IdleSeconds seconds() = 0;
  // Of what seconds() last said to be `waiting`, the part for events of `on`.
  virtual double waiting_for(const Stream& on) const = 0;
  // Whether the caller waits inside of a call to Spillway, and so launches nothing by itself. What a GPU's stream has
  // to run between a stopwatch's two marks is known only then.
  virtual void caller_waits(bool waits) = 0;
};

class Event {
 public:
  virtual ~Event() = default;
  bool recorded() const noexcept { return recorded_; }

 protected:
  friend class Device;
  bool recorded_ = false;
};

// Takes the time that a stream is busy between two places. One thread at a time; nobody waits for it.
class Stopwatch {
 public:
  virtual ~Stopwatch() = default;
  virtual void start(Stream& stream) = 0;
  virtual void stop(Stream& stream) = 0;  // the same stream
  // Nothing before stop(), and until the stream has come by it.
  virtual std::optional<double> seconds() const = 0;
  // The same as times of the host's clock.
  struct Times {
    std::chrono::steady_clock::time_point begin, end;
  };
  virtual std::optional<Times> times() const = 0;
};

class Device {
 public:
  virtual ~Device() = default;

  virtual DeviceKind kind() const noexcept = 0;
  virtual std::string describe() const = 0;
  virtual std::span<std::byte> hbm() const noexcept = 0;
  virtual void register_host(std::span<std::byte> memory) = 0;
  virtual void unregister_host(std::span<std::byte> memory) noexcept = 0;

  virtual std::unique_ptr<Stream> create_stream(std::string name) = 0;
  // A stream of the caller's, which stays the caller's: a handle as native() of a Stream returns. Throws
  // kInvalidArgument on `host`, which has none but its own.
  virtual std::unique_ptr<Stream> adopt_stream(void* native) = 0;
  virtual std::unique_ptr<Event> create_event() = 0;
  // An event that is mostly asked for by done(), and whose record costs a stream of small copies less: a thread that
  // waits for it may spin.
  virtual std::unique_ptr<Event> create_polled_event() { return create_event(); }
  virtual std::unique_ptr<Stopwatch> create_stopwatch() = 0;

  void record(Event& event, Stream& stream) {
    event.recorded_ = true;
    do_record(event, stream);
  }
  // A wait for an event that was never recorded is always a bug, so it is refused, though GPUs let it pass at once.
  void wait(Stream& stream, Event& event) {
    SPILLWAY_CHECK(event.recorded(), "a stream may only wait for an event that was recorded");
    do_wait(stream, event);
  }
  virtual bool done(const Event& event) const = 0;         // true also when never recorded
  virtual void synchronize(const Event& event) const = 0;  // blocks the calling thread
  virtual void throw_if_failed() const {}                  // kDevice

  virtual void copy_async(CopyKind kind, void* to, const void* from, std::size_t bytes, Stream& stream) = 0;
  // The same where the device's side, one side of two at the least, is memory of the caller's outside the arena: an
  // allocation on this GPU; on `host` any memory.
  virtual void copy_lent_async(CopyKind kind, void* to, const void* from, std::size_t bytes, Stream& stream) = 0;
  virtual void fill_async(void* to, std::byte value, std::size_t bytes, Stream& stream) = 0;
  // Calls function(argument) on a thread of the device once the stream gets there. It must be short, must not block and
  // must not call the device.
  virtual void call_async(void (*function)(void*), void* argument, Stream& stream) = 0;

  // accumulator[i] = from[i] (first) or accumulator[i] + from[i], in fp32.
  virtual void accumulate_async(float* accumulator, const void* from, DType from_type, std::size_t count, bool first,
                                Stream& stream) = 0;
  // to[i] = from[i], rounded to nearest, ties to even.
  virtual void cast_async(void* to, DType to_type, const void* from, DType from_type, std::size_t count,
                          Stream& stream) = 0;
  // The squared norm in two parts; see kernels/norm.h. `leaves` and `result`: device memory.
  virtual void leaf_sums_async(const void* data, DType type, std::size_t count, double* leaves, Stream& stream) = 0;
  virtual void add_leaves_async(const double* leaves, std::size_t count, NormResult* result, Stream& stream) = 0;
  // Updates elements [begin, end) of the tile. *finite (device memory) is cleared when a result is not finite, and left
  // alone otherwise.
  virtual void update_async(const OptimizerTile& tile, const OptimizerScalars& scalars, std::size_t begin,
                            std::size_t end, std::uint32_t* finite, Stream& stream) = 0;

  // The stream's, always the same one.
  virtual std::shared_ptr<IdleClock> idle_clock(Stream& stream) = 0;

 protected:
  virtual void do_record(Event& event, Stream& stream) = 0;
  virtual void do_wait(Stream& stream, Event& event) = 0;
};

}  // namespace spillway
