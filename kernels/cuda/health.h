// Whether the GPU still works; private to kernels/cuda.
//
// An error of CUDA's is for good: every later call fails, and what is enqueued never runs. So the first one is kept for
// whoever asks (Device::throw_if_failed), everything after it is dropped, and nobody is left waiting: functions that
// streams were to call are called by a thread of its own, which also looks after the GPU while nobody else calls CUDA.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <list>
#include <mutex>
#include <optional>
#include <thread>

#include "kernels/cuda/context.h"
#include "kernels/cuda/event.h"
#include "spillway/error.h"

namespace spillway::cuda {

class Health {
 public:
  Health();   // of this thread's GPU
  ~Health();  // calls what is still to be called
  Health(const Health&) = delete;
  Health& operator=(const Health&) = delete;

  void throw_if_failed() const;
  const Context& context() const noexcept { return context_; }

  // Does `work` unless the GPU has failed; it throws when the GPU fails in it.
  template <typename Work>
  void guard(Work work) noexcept {
    if (failed_) return;
    try {
      const Context::Use use(context_);
      work();
    } catch (const Error& error) {
      fail(error);
    }
  }

  struct Call;
  // For cudaLaunchHostFunc(stream, Health::run, …): function(argument) is called in any case.
  Call* prepare(void (*function)(void*), void* argument);
  static void run(void* call);
  // Of a GPU that has failed: returns when there is nothing left to call. Otherwise at once.
  void wait_for_calls();

  // Since the GPU came by an event, which is done; and when that was, by the host's clock. They throw.
  double seconds_since(const RawEvent& event);
  std::chrono::steady_clock::time_point time_of(const RawEvent& event);

 private:
  void fail(const Error& error) noexcept;
  void make(const Call& call, std::unique_lock<std::mutex>& lock);  // held, but for the call itself
  void watch();

  const Context context_ = Context::of_this_thread();
  cudaStream_t clock_ = nullptr;  // where the present is asked for; nothing else runs there
  std::mutex now_mutex_;
  RawEvent now_{RawEvent::Use::kNow};
  std::atomic<bool> failed_ = false;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::optional<Error> failure_;
  std::list<Call> waiting_, free_;  // calls to come, in order; places for more
  std::size_t running_ = 0;         // calls that have not returned
  bool stop_ = false;
  std::thread watcher_;  // last: it uses the rest
};

struct Health::Call {
  Health* owner;
  void (*function)(void*);
  void* argument;
  std::list<Call>::iterator self;
};

}  // namespace spillway::cuda
