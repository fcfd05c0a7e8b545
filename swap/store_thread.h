// The store's thread: the one thread that submits and reaps I/O. Other threads post requests to it; completions are
// handed to the poster's IoHandler, on the store's thread, one at a time, never inside post().
//
//   any thread ── post(request, handler) ──► mailbox ──► IoQueue ──► handler.on_io(…)
//              ── wake(handler)          ──► mailbox ───────────────► handler.on_wake()
//
// It knows nothing of tiles, slots or checksums: a request is a range of the store's striped space. Priorities, pieces,
// retries and short transfers are the IoQueue's. Nothing is allocated after construction. When the queue itself fails,
// everything under way and everything posted later completes with EIO.
// Read next: spillway/io_queue.h, then aio/piece_queue.cc (requests into pieces) and aio/uring_engine.cc (pieces into
// the ring).
#pragma once

#include <condition_variable>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "spillway/error.h"
#include "spillway/io_queue.h"
#include "swap/timeline.h"

namespace spillway {

class IoHandler {
 public:
  virtual ~IoHandler() = default;
  // Store's thread. `request.tag` is the poster's own.
  virtual void on_io(const IoRequest& request, const IoCompletion& completion) = 0;
  virtual void on_wake() {}
};

class StoreThread {
 public:
  // Throws what IoQueue::create throws. Files must outlive the thread. Every request is a span of `timeline`, unless
  // that is null.
  StoreThread(const IoQueueOptions& options, std::vector<File*> files, std::vector<std::span<std::byte>> regions,
              Timeline* timeline = nullptr);
  ~StoreThread();  // waits for everything under way

  // The handler must stay alive until its on_io ran. Blocks while the mailbox is full, except on the store's own
  // thread, where room for kOwnRequests requests is kept.
  void post(const IoRequest& request, IoHandler& handler);
  void wake(IoHandler& handler);
  // Drops wakes of the handler that were not delivered and waits for a wake or a completion that is being delivered: a
  // handler may tell its owner that all is done before it returns. Not on the store's thread. The handler may be
  // destroyed afterwards, if nothing it posted is under way.
  void retire(IoHandler& handler);

  IoStats stats() const;
  const std::string& description() const noexcept { return description_; }
  const File& file(std::uint32_t index) const { return *files_[index]; }
  // The file that holds an offset of the striped space, and where in it.
  struct FileOffset {
    const File& file;
    std::uint64_t offset;
  };
  FileOffset place_of(std::uint64_t space_offset) const;
  // What the queue itself failed with, after which every request fails with EIO; empty: it has not.
  std::string queue_failure() const;
  // Whether a run can go on from the store after a failure: one slot a tile keeps no step.
  void keep_steps(bool keeps) { keeps_steps_ = keeps; }
  bool keeps_steps() const noexcept { return keeps_steps_; }

  static constexpr std::uint32_t kOwnRequests = 512;

 private:
  struct Entry {
    IoRequest request;
    IoHandler* handler = nullptr;
    std::uint32_t next = 0;  // in the free list
    std::int64_t posted_ns = 0;
  };
  static constexpr std::uint32_t kEntries = 2048;
  static constexpr std::uint32_t kNone = UINT32_MAX;

  void run(const IoQueueOptions& options, std::vector<std::span<std::byte>> regions);
  void loop();
  bool take_mail();  // false: stop
  void submit(std::uint32_t entry);
  void finish(std::uint32_t entry, const IoCompletion& completion, std::int64_t done_ns);
  std::int64_t now_ns() const { return timeline_ ? timeline_->now_ns() : 0; }
  void fail_everything(const char* why);
  IoCompletion failed(const IoRequest& request) const;
  void deliver_wakes();
  std::uint32_t take_entry(bool own_thread, std::unique_lock<std::mutex>& lock);

  Timeline* const timeline_;
  std::vector<File*> files_;
  std::optional<StripeMap> stripes_;
  std::unique_ptr<IoQueue> queue_;  // store's thread only, but wake() and stats_
  std::string description_;

  mutable std::mutex mutex_;
  std::condition_variable room_, started_, woken_;
  std::vector<Entry> entries_;
  std::uint32_t free_head_ = kNone, free_count_ = 0;
  std::vector<std::uint32_t> posted_, taken_;
  std::vector<IoHandler*> wakes_, taken_wakes_;
  const IoHandler* in_handler_ = nullptr;  // a completion is being delivered to it
  IoStats stats_;
  bool ready_ = false, stop_ = false, dead_ = false, keeps_steps_ = true;
  std::exception_ptr start_failure_;
  std::string queue_failure_;
  std::vector<bool> in_queue_;  // store's thread only
  std::thread thread_;
};

// Counts batches that have completed: for who waits for any of several.
class IoProgress {
 public:
  std::uint64_t count() const;
  void wait_beyond(std::uint64_t count) const;

 private:
  friend class IoBatch;
  void note();

  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  std::uint64_t count_ = 0;
};

// Requests that one thread waits for together. Reusable after wait().
class IoBatch : public IoHandler {
 public:
  // `progress`, unless null, outlives the batch.
  explicit IoBatch(StoreThread& store, IoProgress* progress = nullptr) : store_(store), progress_(progress) {}
  ~IoBatch() override { wait_nothrow(); }

  void add(const IoRequest& request);
  bool done() const;
  // Blocks until every request added has completed; throws the first failure.
  void wait();
  // The same without throwing.
  void wait_nothrow() noexcept;

 private:
  void on_io(const IoRequest& request, const IoCompletion& completion) override;

  StoreThread& store_;
  IoProgress* progress_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::uint32_t pending_ = 0;
  bool failed_ = false;
  IoRequest failed_request_;
  IoCompletion failure_;
};

// The Error of a failed request.
Error io_error(const StoreThread& store, const IoRequest& request, const IoCompletion& completion);

}  // namespace spillway
