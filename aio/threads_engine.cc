// The engine that works everywhere: a small pool of threads in pread, pwrite and fdatasync.
//
//   submit ──► work ring ──► threads ──► result ring ──► eventfd ──► reap
#include <fmt/format.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "aio/fixed_ring.h"
#include "aio/io_engine.h"
#include "aio/wake_event.h"
#include "spillway/error.h"
#include "spillway/log.h"

namespace spillway {
namespace {

// Each thread holds one transfer in the kernel. At 1 MiB pieces sixteen keep a fast drive busy; more only switch.
constexpr std::size_t kThreadsPerFile = 16;

std::int64_t perform(int fd, const IoPiece& piece) noexcept {
  std::int64_t moved = 0;
  switch (piece.op) {
    case IoOp::kRead: moved = ::pread(fd, piece.buffer, piece.bytes, static_cast<off_t>(piece.offset)); break;
    case IoOp::kWrite: moved = ::pwrite(fd, piece.buffer, piece.bytes, static_cast<off_t>(piece.offset)); break;
    case IoOp::kSync: moved = ::fdatasync(fd); break;
  }
  return moved < 0 ? -static_cast<std::int64_t>(errno) : moved;
}

class ThreadsEngine final : public IoEngine {
 public:
  explicit ThreadsEngine(const IoEngineOptions& options) : depth_(options.depth), work_(depth_), results_(depth_) {
    fds_.resize(std::max<std::size_t>(options.files.size(), options.max_files), -1);
    for (std::size_t i = 0; i < options.files.size(); ++i) fds_[i] = options.files[i]->fd();
    start_threads(options.files.size());
  }

  ~ThreadsEngine() override {
    {
      std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    work_ready_.notify_all();
    for (auto& thread : threads_) thread.join();
  }

  std::size_t submit(std::span<const IoPiece> pieces) override {
    std::size_t taken = 0;
    {
      std::lock_guard lock(mutex_);
      for (; taken < pieces.size() && in_flight_ < depth_; ++taken, ++in_flight_) work_.push(pieces[taken]);
    }
    if (taken == 1) {
      work_ready_.notify_one();
    } else if (taken > 1) {
      work_ready_.notify_all();
    }
    return taken;
  }

  Reaped reap(std::span<IoResult> out, double timeout_seconds) override {
    Reaped reaped = collect(out);
    if (reaped.count != 0 || reaped.woken || timeout_seconds == 0) return reaped;
    event_.wait(timeout_seconds);
    return collect(out);
  }

  void wake() noexcept override {
    woken_.store(true);
    event_.set();
  }

  std::string describe() const override { return fmt::format("threads ({} threads)", threads_.size()); }

  // A thread reads the descriptor of a piece that was handed to it after this.
  void set_file(std::uint32_t index, const File* file) override {
    fds_.at(index) = file ? file->fd() : -1;
    if (file) start_threads(static_cast<std::size_t>(std::ranges::count_if(fds_, [](int fd) { return fd >= 0; })));
  }
  bool add_region(std::span<std::byte>) override { return false; }
  void remove_region(std::span<std::byte>) override {}

 private:
  // As many as so many files keep busy.
  void start_threads(std::size_t files) {
    const std::size_t most = std::min<std::size_t>(depth_, kThreadsPerFile * std::max<std::size_t>(1, files));
    // Signals are the host program's business: these threads block them all.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    try {
      while (threads_.size() < most) threads_.emplace_back([this] { run(); });
    } catch (const std::system_error& failure) {
      pthread_sigmask(SIG_SETMASK, &before, nullptr);
      const int error = failure.code().value();
      if (threads_.empty()) {
        throw Error(Code::kUnsupported,
                    {"I/O threads", "cannot be started", error, "raise the process limit (ulimit -u)"});
      }
      log(LogLevel::kWarning, fmt::format("I/O threads: only {} of {} could be started ({}); fast drives will idle",
                                          threads_.size(), most, failure.code().message()));
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  Reaped collect(std::span<IoResult> out) {
    // The event is cleared before what it announces is read: whatever arrives in between sets it again.
    event_.clear();
    Reaped reaped{.woken = woken_.exchange(false)};
    std::lock_guard lock(mutex_);
    for (; reaped.count < out.size() && !results_.empty(); --in_flight_) out[reaped.count++] = results_.pop();
    return reaped;
  }

  void run() {
    std::unique_lock lock(mutex_);
    for (;;) {
      work_ready_.wait(lock, [this] { return stopping_ || !work_.empty(); });
      if (work_.empty()) return;
      const IoPiece piece = work_.pop();
      lock.unlock();
      const std::int64_t moved = perform(fds_[piece.file], piece);
      lock.lock();
      const bool first = results_.empty();
      results_.push({piece.slot, moved});
      if (first) event_.set();
    }
  }

  const std::uint32_t depth_;
  std::vector<int> fds_;
  WakeEvent event_;
  std::atomic<bool> woken_ = false;

  std::mutex mutex_;  // guards what follows, up to the threads
  std::condition_variable work_ready_;
  FixedRing<IoPiece> work_;
  FixedRing<IoResult> results_;
  std::uint32_t in_flight_ = 0;  // taken and not yet reaped, so both rings always have room
  bool stopping_ = false;

  std::vector<std::thread> threads_;
};

}  // namespace

std::unique_ptr<IoEngine> make_threads_engine(const IoEngineOptions& options) {
  return std::make_unique<ThreadsEngine>(options);
}

}  // namespace spillway
