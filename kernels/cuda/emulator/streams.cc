// Streams, each a thread that takes its work in order, and events.
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <utility>

#include "kernels/cuda/emulator/blocks.h"
#include "kernels/cuda/emulator/runtime.h"

using Clock = std::chrono::steady_clock;

// One mutex and one condition for all: they are few.
namespace spillway::emulated {
namespace {

std::mutex& mutex() {
  static auto& the = *new std::mutex;  // stream threads may outlive static objects
  return the;
}
std::condition_variable& changed() {
  static auto& the = *new std::condition_variable;
  return the;
}

// A place in a stream that it comes by once.
struct Mark {
  bool passed = false;
  Clock::time_point at;
};

}  // namespace
}  // namespace spillway::emulated

using namespace spillway::emulated;

struct CUstream_st {
  int gpu = 0;
  std::deque<std::function<void()>> work;  // null: the next of the marks
  std::deque<std::shared_ptr<Mark>> marks;
  bool busy = false, destroyed = false;
  unsigned flags = 0;

  bool empty() const { return work.empty() && !busy; }
};

struct CUevent_st {
  int gpu = 0;
  bool timed = false;
  std::shared_ptr<Mark> latest;
};

namespace spillway::emulated {
namespace {

void run_stream(CUstream_st* stream) {
  std::unique_lock lock(mutex());
  while (true) {
    changed().wait(lock, [&] { return !stream->work.empty() || stream->destroyed; });
    if (stream->work.empty()) break;
    const std::function<void()> work = std::move(stream->work.front());
    stream->work.pop_front();
    if (work) {
      stream->busy = true;
      lock.unlock();
      work();
      lock.lock();
      stream->busy = false;
    } else {  // in one go: who sees the last mark passed sees the stream empty
      stream->marks.front()->at = Clock::now();
      stream->marks.front()->passed = true;
      stream->marks.pop_front();
    }
    changed().notify_all();
  }
  delete stream;
}

std::set<CUstream_st*>& streams() {
  static auto& the = *new std::set<CUstream_st*>;
  return the;
}

// With mutex() held.
CUstream_st* make_stream(unsigned flags) {
  auto* stream = new CUstream_st;
  stream->gpu = gpu_of_this_thread();
  stream->flags = flags;
  streams().insert(stream);
  std::thread(run_stream, stream).detach();
  return stream;
}
CUstream_st* stream_of(cudaStream_t handle) {
  static auto& default_streams = *new std::map<int, CUstream_st*>;
  if (handle == nullptr) {
    CUstream_st*& own = default_streams[gpu_of_this_thread()];
    return own != nullptr ? own : own = make_stream(cudaStreamDefault);
  }
  if (!streams().contains(handle)) stop("a stream is used that was destroyed");
  return handle;
}

cudaStreamCaptureMode& capture_mode() {  // of this thread
  thread_local cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
  return mode;
}
std::atomic<int>& captures() {
  static std::atomic<int> count = 0;
  return count;
}
bool breaks_a_capture() { return captures() > 0 && capture_mode() == cudaStreamCaptureModeGlobal; }

void push(CUstream_st* stream, std::function<void()> work) {
  stream->work.push_back(std::move(work));
  changed().notify_all();
}

}  // namespace

void enqueue(cudaStream_t stream, std::function<void()> work) {
  const std::lock_guard lock(mutex());
  push(stream_of(stream), std::move(work));
}

bool is_of_this_thread(cudaStream_t stream) {
  const std::lock_guard lock(mutex());
  return stream_of(stream)->gpu == gpu_of_this_thread();
}

}  // namespace spillway::emulated

extern "C" {

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* to, unsigned flags) {
  if (const cudaError_t died = enter("cudaStreamCreate")) return died;
  const std::lock_guard lock(mutex());
  *to = make_stream(flags);
  return cudaSuccess;
}

// What is enqueued still runs.
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  if (const cudaError_t died = enter("cudaStreamDestroy")) return died;
  const std::lock_guard lock(mutex());
  stream_of(stream)->destroyed = true;
  streams().erase(stream);
  changed().notify_all();
  return cudaSuccess;
}

cudaError_t cudaStreamGetFlags(cudaStream_t stream, unsigned* flags) {
  const std::lock_guard lock(mutex());
  *flags = stream_of(stream)->flags;
  return cudaSuccess;
}

// Of graphs only that while one is captured other threads must not ask how far the GPU is, but those that said they
// may.
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  begin_with_gpu();
  std::swap(*mode, capture_mode());
  return cudaSuccess;
}
cudaError_t cudaStreamBeginCapture(cudaStream_t, cudaStreamCaptureMode mode) {
  if (const cudaError_t died = enter("cudaStreamBeginCapture")) return died;
  if (mode == cudaStreamCaptureModeGlobal) ++captures();
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t, cudaGraph_t* graph) {
  *graph = nullptr;
  --captures();
  return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t) { return cudaSuccess; }

cudaError_t cudaStreamQuery(cudaStream_t stream) {
  if (const cudaError_t died = enter("cudaStreamQuery")) return died;
  if (breaks_a_capture()) return fail(cudaErrorStreamCaptureUnsupported);
  const std::lock_guard lock(mutex());
  return stream_of(stream)->empty() ? cudaSuccess : fail(cudaErrorNotReady);
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  if (const cudaError_t died = enter("cudaStreamSynchronize")) return died;
  std::unique_lock lock(mutex());
  const CUstream_st* of = stream_of(stream);
  changed().wait(lock, [&] { return of->empty(); });
  return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize() {
  if (const cudaError_t died = enter("cudaDeviceSynchronize")) return died;
  std::unique_lock lock(mutex());
  changed().wait(lock, [gpu = gpu_of_this_thread()] {
    for (const CUstream_st* stream : streams()) {
      if (stream->gpu == gpu && !stream->empty()) return false;
    }
    return true;
  });
  return cudaSuccess;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* argument) {
  if (const cudaError_t died = enter("cudaLaunchHostFunc")) return died;
  enqueue_host_function(stream, function, argument);
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* to, unsigned flags) {
  if (const cudaError_t died = enter("cudaEventCreate")) return died;
  *to = new CUevent_st{.gpu = gpu_of_this_thread(), .timed = (flags & cudaEventDisableTiming) == 0, .latest = nullptr};
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  begin_with_gpu();
  delete event;
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  if (const cudaError_t died = enter("cudaEventRecord")) return died;
  const std::lock_guard lock(mutex());
  if (stream_of(stream)->gpu != event->gpu) return fail(cudaErrorInvalidResourceHandle);
  event->latest = std::make_shared<Mark>();
  stream_of(stream)->marks.push_back(event->latest);
  push(stream_of(stream), nullptr);
  return cudaSuccess;
}

// For the record of now; what is recorded later does not count.
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  if (const cudaError_t died = enter("cudaStreamWaitEvent")) return died;
  const std::lock_guard lock(mutex());
  if (event->latest == nullptr) return cudaSuccess;
  push(stream_of(stream), [mark = event->latest] {
    std::unique_lock waiting(mutex());
    changed().wait(waiting, [&] { return mark->passed; });
  });
  return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  if (const cudaError_t died = enter("cudaEventQuery")) return died;
  if (breaks_a_capture()) return fail(cudaErrorStreamCaptureUnsupported);
  const std::lock_guard lock(mutex());
  return event->latest == nullptr || event->latest->passed ? cudaSuccess : fail(cudaErrorNotReady);
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  if (const cudaError_t died = enter("cudaEventSynchronize")) return died;
  std::unique_lock lock(mutex());
  const std::shared_ptr<Mark> mark = event->latest;
  changed().wait(lock, [&] { return mark == nullptr || mark->passed; });
  return cudaSuccess;
}

cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t from, cudaEvent_t to) {
  const std::lock_guard lock(mutex());
  for (const cudaEvent_t event : {from, to}) {
    if (!event->timed || event->latest == nullptr) return fail(cudaErrorInvalidResourceHandle);
    if (!event->latest->passed) return fail(cudaErrorNotReady);
  }
  *milliseconds = std::chrono::duration<float, std::milli>(to->latest->at - from->latest->at).count();
  return cudaSuccess;
}

}  // extern "C"
