// A thread that owns a queue, and what it and its callers hand each other.
#include "aio/shared_queue.h"

#include <fmt/format.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "aio/fixed_ring.h"
#include "aio/io_engine.h"
#include "aio/request_check.h"
#include "spillway/error.h"
#include "spillway/log.h"

namespace spillway {
namespace {

constexpr std::size_t kTakenAtOnce = 64;  // completions
constexpr const char* kSharedQueue = "I/O queue";

// Signals are the host program's business: a thread that starts under this blocks them all.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

 private:
  sigset_t before_;
};

class ServedQueue {
 public:
  ServedQueue(const IoQueueOptions& options, std::span<File* const> files,
              const std::function<std::unique_ptr<IoQueue>()>& make)
      : files_(files.begin(), files.end()),
        requests_(options.max_requests),
        done_(options.max_requests),
        max_requests_(options.max_requests) {
    if (options.stripes) stripes_ = *options.stripes;
    submitted_.reserve(max_requests_);
    free_.reserve(max_requests_);
    for (std::uint32_t i = max_requests_; i-- > 0;) free_.push_back(i);
    try {
      const SignalsBlocked blocked;
      thread_ = std::thread([&] { run(make); });
    } catch (const std::system_error& failure) {
      throw Error(Code::kUnsupported, {kSharedQueue, "its thread cannot be started", failure.code().value(),
                                       "raise the process limit (ulimit -u)"});
    }
    std::unique_lock lock(mutex_);
    answered_.wait(lock, [&] { return started_; });
    if (!refused_) return;
    lock.unlock();
    thread_.join();
    std::rethrow_exception(refused_);
  }

  ~ServedQueue() {
    close();
    thread_.join();
    std::size_t failed = 0;
    std::string first;
    for (; !done_.empty(); done_.pop()) {
      const auto& [op, result] = done_.front();
      if (result.error == 0 || failed++ > 0) continue;
      const bool known = result.error_file < files_.size() && files_[result.error_file] != nullptr;
      first = fmt::format("{}: {} ({})", known ? files_[result.error_file]->path().string() : "a file that went",
                          describe_transfer(op, result), std::generic_category().message(result.error));
    }
    if (failed > 0) {
      log(LogLevel::kWarning, fmt::format("{}: {} requests failed, and nobody took their completions; the first: {}",
                                          kSharedQueue, failed, first));
    }
  }

  void submit(const IoRequest& request) {
    const std::lock_guard lock(mutex_);
    if (failure_) throw *failure_;
    if (closing_) throw_closed();
    if (const char* const why = refusal(request, files_, stripes_ ? &*stripes_ : nullptr))
      throw Error(Code::kInvalidArgument, {name_of(request), why, 0, "see spillway/io_queue.h"});
    if (pending_ == max_requests_) {
      throw Error(Code::kBusy, {kSharedQueue, fmt::format("holds {} requests, as many as it may", pending_), 0,
                                "take completions first, or raise max_requests"});
    }
    const std::uint32_t index = free_.back();
    free_.pop_back();
    requests_[index] = {request, true};
    ++pending_;
    submitted_.push_back(index);
    if (submitted_.size() == 1) queue_->wake();  // who finds one there has woken it
  }

  std::span<IoCompletion> wait(std::span<IoCompletion> out, double timeout_seconds) {
    using Clock = std::chrono::steady_clock;
    if (out.empty())
      throw Error(Code::kInvalidArgument, {kSharedQueue, "wait() has no room for a completion", 0, "give it some"});
    const bool bounded = timeout_seconds >= 0 && timeout_seconds < 3e9;  // as in PieceQueue
    const auto deadline = Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                             std::chrono::duration<double>(bounded ? timeout_seconds : 0));
    const bool for_something = timeout_seconds < 0 && timeout_seconds != kUntilWoken;
    std::unique_lock lock(mutex_);
    while (done_.empty() && !woken_ && !ended_ && !(for_something && pending_ == 0)) {
      if (!bounded) {
        completed_.wait(lock);
      } else if (completed_.wait_until(lock, deadline) == std::cv_status::timeout) {
        break;
      }
    }
    woken_ = false;
    if (done_.empty() && ended_ && failure_) throw *failure_;
    std::size_t filled = 0;
    for (; filled < out.size() && !done_.empty(); ++filled) out[filled] = done_.pop().second;
    pending_ -= static_cast<std::uint32_t>(filled);
    if (filled > 0 && pending_ == 0) completed_.notify_all();  // those who waited for something
    return out.first(filled);
  }

  void wake() {
    const std::lock_guard lock(mutex_);
    woken_ = true;
    completed_.notify_one();
  }

  void cancel_waiting() {
    ask([&] { queue_->cancel_waiting(); });
  }

  std::uint32_t add_file(File& file) {
    std::uint32_t index = 0;
    ask([&] {
      index = queue_->add_file(file);
      const std::lock_guard lock(mutex_);
      if (index >= files_.size()) files_.resize(index + 1);
      files_[index] = &file;
    });
    return index;
  }

  // What is submitted from now on is refused; what was before reaches the queue before it is asked to let the file go.
  void remove_file(std::uint32_t index) {
    File* file = nullptr;
    {
      const std::lock_guard lock(mutex_);
      check_leaves(index, files_, stripes_ ? &*stripes_ : nullptr);  // it may be another's by the time that it is asked
      file = std::exchange(files_[index], nullptr);
    }
    try {
      ask([&] { queue_->remove_file(index); });
    } catch (...) {
      const std::lock_guard lock(mutex_);
      files_[index] = file;
      throw;
    }
  }

  bool add_region(std::span<std::byte> region) {
    bool registered = false;
    ask([&] { registered = queue_->add_region(region); });
    return registered;
  }

  void remove_region(const std::byte* begin) {
    ask([&] { queue_->remove_region(begin); });
  }

  void close() {
    std::unique_lock lock(mutex_);
    closing_ = true;
    if (queue_ != nullptr) queue_->wake();
    answered_.wait(lock, [&] { return ended_; });
  }

  std::uint32_t pending() {
    const std::lock_guard lock(mutex_);
    return pending_;
  }
  IoStats stats() {
    const std::lock_guard lock(mutex_);
    return stats_;
  }
  std::string describe() {
    const std::lock_guard lock(mutex_);
    return described_;
  }

 private:
  struct Held {
    IoRequest io;
    bool under_way = false;
  };

  [[noreturn]] static void throw_closed() {
    throw Error(Code::kInvalidArgument, {kSharedQueue, "is closed", 0, "make a new one"});
  }

  std::string name_of(const IoRequest& request) const {
    if (request.file == kStripedSpace) return "request of the striped space";
    if (request.file < files_.size() && files_[request.file] != nullptr) return files_[request.file]->path().string();
    return fmt::format("request of file {}", request.file);
  }

  // What it is given is there until it has started.
  void run(const std::function<std::unique_ptr<IoQueue>()>& make) {
    std::vector<IoCompletion> room;
    std::vector<std::uint32_t> batch;
    std::exception_ptr refused;
    try {
      room.resize(kTakenAtOnce);
      batch.reserve(max_requests_);
      queue_ = make();
      described_ = queue_->describe();
    } catch (...) {
      refused = std::current_exception();
    }
    {
      const std::lock_guard lock(mutex_);
      started_ = true;
      refused_ = refused;
      answered_.notify_all();
    }
    if (refused) return;
    try {
      while (turn(room, batch)) {
      }
      end(std::nullopt);
    } catch (const Error& error) {
      end(error);
    } catch (const std::exception& error) {
      end(Error(Code::kIo, {kSharedQueue, error.what(), 0, "make a new one"}));
    }
  }

  // False when everything has ended.
  bool turn(std::span<IoCompletion> room, std::vector<std::uint32_t>& batch) {
    const std::function<void()>* question = nullptr;
    bool closing = false;
    {
      const std::lock_guard lock(mutex_);
      batch.swap(submitted_);
      question = question_;
      closing = closing_;
    }
    for (const std::uint32_t index : batch) {
      IoRequest request = requests_[index].io;
      request.tag = index;
      queue_->submit(request);
    }
    batch.clear();
    if (question != nullptr) {
      (*question)();
      std::string described = queue_->describe();
      const std::lock_guard lock(mutex_);
      described_.swap(described);
      question_ = nullptr;
      answered_.notify_all();
    }
    if (closing) queue_->cancel_waiting();
    if (closing && queue_->pending() == 0) return false;
    const auto done = queue_->wait(room, closing ? -1 : kUntilWoken);
    if (!done.empty()) hand_over(done);
    return true;
  }

  void hand_over(std::span<const IoCompletion> completions) {
    const IoStats stats = queue_->stats();
    const std::lock_guard lock(mutex_);
    stats_ = stats;
    for (const IoCompletion& each : completions) give(static_cast<std::uint32_t>(each.tag), each);
    completions.size() == 1 ? completed_.notify_one() : completed_.notify_all();
  }

  void give(std::uint32_t index, IoCompletion result) {
    Held& held = requests_[index];
    result.tag = held.io.tag;
    held.under_way = false;
    free_.push_back(index);
    done_.push({held.io.op, result});
  }

  // After a failure of the engine, of what it had no completion comes any more; its memory is free once nothing is in
  // flight, which is what the queue's destructor waits for.
  void end(const std::optional<Error>& failure) {
    std::unique_ptr<IoQueue> queue;
    {
      const std::lock_guard lock(mutex_);
      closing_ = true;
      failure_ = failure;
      queue.swap(queue_);
    }
    const IoStats stats = queue->stats();
    queue.reset();
    const std::lock_guard lock(mutex_);
    stats_ = stats;
    for (std::uint32_t index = 0; index < requests_.size(); ++index) {
      const IoRequest& io = requests_[index].io;
      if (!requests_[index].under_way) continue;
      give(index, {.error = EIO,
                   .error_file = io.file == kStripedSpace ? 0 : io.file,
                   .error_offset = io.offset,
                   .error_bytes = io.bytes});
    }
    ended_ = true;
    completed_.notify_all();
    answered_.notify_all();
  }

  // Has the thread do it, and throws what that throws. One at a time.
  void ask(const std::function<void()>& body) {
    const std::lock_guard one(asking_);
    std::exception_ptr thrown;
    const std::function<void()> question = [&] {
      try {
        body();
      } catch (...) {
        thrown = std::current_exception();
      }
    };
    std::unique_lock lock(mutex_);
    if (!closing_) {
      question_ = &question;
      queue_->wake();
      answered_.wait(lock, [&] { return question_ == nullptr || ended_; });
      if (thrown) std::rethrow_exception(thrown);
      if (std::exchange(question_, nullptr) == nullptr) return;
    }
    if (failure_) throw *failure_;
    throw_closed();
  }

  std::unique_ptr<IoQueue> queue_;  // the thread's, but for wake() under the mutex; null once it has ended

  std::mutex asking_;
  std::mutex mutex_;  // guards what follows, up to the thread; a request is the thread's from when it takes its index
  std::condition_variable completed_, answered_;
  std::vector<File*> files_;  // as the queue has them; null: none, or one that is about to go
  std::optional<StripeMap> stripes_;
  std::vector<Held> requests_;
  std::vector<std::uint32_t> free_, submitted_;    // indices of requests
  FixedRing<std::pair<IoOp, IoCompletion>> done_;  // not taken yet
  const std::uint32_t max_requests_;
  std::uint32_t pending_ = 0;                        // submitted and not taken
  const std::function<void()>* question_ = nullptr;  // for the thread
  bool started_ = false, woken_ = false, closing_ = false, ended_ = false;
  std::exception_ptr refused_;  // instead of a start
  std::optional<Error> failure_;
  IoStats stats_;
  std::string described_;

  std::thread thread_;
};

class ThreadedQueue final : public SharedIoQueue {
 public:
  explicit ThreadedQueue(std::unique_ptr<ServedQueue> served) : served_(std::move(served)) {}
  // In a forked process there is no thread to join, and what others waited for there cannot be destroyed.
  ~ThreadedQueue() override {
    if (elsewhere()) static_cast<void>(served_.release());
  }

  void submit(const IoRequest& request) override { served().submit(request); }
  std::span<IoCompletion> wait(std::span<IoCompletion> out, double timeout_seconds) override {
    return served().wait(out, timeout_seconds);
  }
  void wake() noexcept override {
    if (!elsewhere()) served_->wake();
  }
  void cancel_waiting() override { served().cancel_waiting(); }
  std::uint32_t add_file(File& file) override { return served().add_file(file); }
  void remove_file(std::uint32_t index) override { served().remove_file(index); }
  bool add_region(std::span<std::byte> region) override { return served().add_region(region); }
  void remove_region(const std::byte* begin) override { served().remove_region(begin); }
  std::uint32_t pending() const noexcept override { return elsewhere() ? 0 : served_->pending(); }
  IoStats stats() const noexcept override { return elsewhere() ? IoStats{} : served_->stats(); }
  std::string describe() const override { return served().describe(); }
  void close() override { served().close(); }

 private:
  bool elsewhere() const noexcept { return ::getpid() != process_; }
  ServedQueue& served() const {
    if (!elsewhere()) return *served_;
    throw Error(Code::kUnsupported,
                {kSharedQueue, fmt::format("belongs to process {}, which forked this one", process_), 0,
                 "make one in this process"});
  }

  const pid_t process_ = ::getpid();
  std::unique_ptr<ServedQueue> served_;
};

}  // namespace

std::unique_ptr<SharedIoQueue> make_shared_queue(const IoQueueOptions& options, std::span<File* const> files,
                                                 const std::function<std::unique_ptr<IoQueue>()>& make) {
  check_options(options, files);
  return std::make_unique<ThreadedQueue>(std::make_unique<ServedQueue>(options, files, make));
}

std::unique_ptr<SharedIoQueue> SharedIoQueue::create(const IoQueueOptions& options, std::span<File* const> files,
                                                     std::span<const std::span<std::byte>> regions) {
  return make_shared_queue(options, files, [&] { return IoQueue::create(options, files, regions); });
}

}  // namespace spillway
