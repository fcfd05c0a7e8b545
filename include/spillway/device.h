// Device and stream handles, as a model's operations see them.
//
// A Stream is an in-order queue of device work, like a cudaStream_t. The engine owns the streams it hands out. Work is
// enqueued by one thread at a time and runs later; memory named by enqueued work must stay valid until it has run.
// On the `host` device work is a HostTask that runs on the stream's thread and spreads itself over the workers.
#pragma once

#include <array>
#include <cstddef>
#include <cstring>
#include <memory>
#include <new>
#include <string_view>
#include <type_traits>

#include "spillway/error.h"

namespace spillway {

enum class DeviceKind { kHost, kCuda };

// What spillway.device calls them, in the order of DeviceKind.
inline constexpr std::array<std::string_view, 2> kDeviceNames = {"host", "cuda"};
constexpr std::string_view name_of(DeviceKind device) { return kDeviceNames[static_cast<std::size_t>(device)]; }

// A reference to a callable `void(std::size_t index)`; does not own it, never allocates.
class IndexBody {
 public:
  template <typename F>
  requires(!std::is_same_v<std::remove_cvref_t<F>, IndexBody>) IndexBody(F&& body)
  noexcept  // NOLINT: implicit by design, a lambda is passed in place
      : object_(const_cast<void*>(static_cast<const void*>(std::addressof(body)))),
        call_([](void* object, std::size_t index) { (*static_cast<std::remove_reference_t<F>*>(object))(index); }) {}

  void operator()(std::size_t index) const { call_(object_, index); }

 private:
  void* object_;
  void (*call_)(void*, std::size_t);
};

// The compute threads of the `host` device (and of every CPU kernel). Which thread runs which index is not fixed, so a
// body must give the same bits in any order.
class HostWorkers {
 public:
  virtual ~HostWorkers() = default;
  virtual unsigned threads() const noexcept = 0;
  // Runs body(0) … body(count - 1) on the workers and on the calling thread; returns when all have run. The body must
  // not throw. `slot` below threads() is unique among the bodies running at one time: current_slot() inside a body.
  virtual void parallel_for(std::size_t count, IndexBody body) = 0;
  virtual unsigned current_slot() const noexcept = 0;

  // NUMA nodes that groups of the threads are bound to; 1: no thread is bound.
  virtual unsigned nodes() const noexcept { return 1; }
  // Runs body(0) … body(count - 1) at the same time, body(n) on a thread of node n, for a count of at most nodes();
  // parallel_for inside a body spreads over that node's threads alone. Not to be called inside a body.
  virtual void parallel_for_nodes(std::size_t count, IndexBody body) {
    SPILLWAY_CHECK(count <= 1, "these threads belong to one node");
    if (count == 1) body(0);
  }
};

// Work for the `host` device: a trivially copyable closure `void(HostWorkers&)` kept in place, so that enqueueing never
// allocates. It must not throw.
class HostTask {
 public:
  static constexpr std::size_t kCapacity = 240;

  template <typename F>
  requires(!std::is_same_v<std::remove_cvref_t<F>, HostTask>) HostTask(F work)
  noexcept  // NOLINT: implicit by design
      : call_([](const std::byte* storage, HostWorkers& workers) {
          (*std::launder(reinterpret_cast<const F*>(storage)))(workers);
        }) {
    static_assert(sizeof(F) <= kCapacity && alignof(F) <= alignof(std::max_align_t));
    static_assert(std::is_trivially_copyable_v<F> && std::is_trivially_destructible_v<F>);
    ::new (static_cast<void*>(storage_)) F(work);
  }
  HostTask() noexcept : call_(nullptr) {}

  void operator()(HostWorkers& workers) const { call_(storage_, workers); }

 private:
  alignas(std::max_align_t) std::byte storage_[kCapacity];
  void (*call_)(const std::byte*, HostWorkers&);
};

class Stream {
 public:
  virtual ~Stream() = default;
  virtual DeviceKind kind() const noexcept = 0;
  // A cudaStream_t on the `cuda` device, null on `host`.
  virtual void* native() const noexcept = 0;
  // `host` only: appends work. Blocks while the queue is full. Throws kUnsupported on `cuda`.
  virtual void launch(const HostTask& task) = 0;
  // Blocks the calling thread until everything enqueued so far has run.
  virtual void synchronize() = 0;
};

}  // namespace spillway
