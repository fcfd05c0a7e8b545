#include "swap/store_thread.h"

#include <pthread.h>

#include <algorithm>
#include <cerrno>
#include <string>

#include "spillway/log.h"
#include "swap/store_files.h"

namespace spillway {
namespace {

Span span_of(const IoRequest& request, std::int64_t begin_ns, std::int64_t end_ns) {
  const SpanKind kind = request.op == IoOp::kRead    ? SpanKind::kRead
                        : request.op == IoOp::kWrite ? SpanKind::kWrite
                                                     : SpanKind::kSync;
  return {.kind = kind, .subject = request.offset, .bytes = request.bytes, .begin_ns = begin_ns, .end_ns = end_ns};
}

}  // namespace

StoreThread::StoreThread(const IoQueueOptions& options, std::vector<File*> files,
                         std::vector<std::span<std::byte>> regions, Timeline* timeline)
    : timeline_(timeline), files_(std::move(files)), entries_(kEntries), in_queue_(kEntries, false) {
  if (options.stripes) stripes_ = *options.stripes;
  for (std::uint32_t i = 0; i < kEntries; ++i) entries_[i].next = i + 1 < kEntries ? i + 1 : kNone;
  free_head_ = 0;
  free_count_ = kEntries;
  for (auto* list : {&posted_, &taken_}) list->reserve(kEntries);
  for (auto* list : {&wakes_, &taken_wakes_}) list->reserve(64);
  // The ring accepts requests from the thread that made it, so the queue is created there.
  thread_ = std::thread([this, options, regions = std::move(regions)]() mutable { run(options, std::move(regions)); });
  std::unique_lock lock(mutex_);
  started_.wait(lock, [this] { return ready_ || start_failure_; });
  if (start_failure_) {
    lock.unlock();
    thread_.join();
    std::rethrow_exception(start_failure_);
  }
}

StoreThread::~StoreThread() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
    queue_->wake();  // before the thread can see that it is to stop: the queue goes with it
  }
  started_.notify_all();  // where a thread whose queue has failed waits
  thread_.join();
}

void StoreThread::run(const IoQueueOptions& options, std::vector<std::span<std::byte>> regions) {
  ::pthread_setname_np(::pthread_self(), "spillway store");
  try {
    IoQueueOptions all = options;
    all.max_requests = kEntries;
    queue_ = IoQueue::create(all, files_, regions);
    std::lock_guard lock(mutex_);
    description_ = queue_->describe();
    ready_ = true;
  } catch (...) {
    std::lock_guard lock(mutex_);
    start_failure_ = std::current_exception();
    started_.notify_all();
    return;
  }
  started_.notify_all();
  try {
    loop();
  } catch (const std::exception& failure) {
    log(LogLevel::kWarning, std::string("the I/O queue failed: ") + failure.what());
    fail_everything(failure.what());
  }
  queue_.reset();  // here, because it waits for what a failure has left in flight, and only its own thread may
}

void StoreThread::loop() {
  IoCompletion completions[64];
  while (take_mail()) {
    for (std::uint32_t entry : taken_) in_queue_[entry] = true;  // all, should the queue fail at the first
    for (std::uint32_t entry : taken_) submit(entry);
    deliver_wakes();
    // Here this thread sleeps, until the kernel completes a request, or until post() or wake() write the queue's event.
    const auto done = queue_->wait(completions, kUntilWoken);
    const std::int64_t done_ns = now_ns();
    {
      std::lock_guard lock(mutex_);
      stats_ = queue_->stats();  // before the handlers: who sees a completion sees its bytes counted
    }
    for (const IoCompletion& completion : done) finish(static_cast<std::uint32_t>(completion.tag), completion, done_ns);
  }
}

// Swapped under the lock and worked off without it, so that no poster waits for I/O. False: the thread is to end, and
// nothing is left to do.
bool StoreThread::take_mail() {
  std::lock_guard lock(mutex_);
  taken_.clear();
  taken_wakes_.clear();
  posted_.swap(taken_);
  wakes_.swap(taken_wakes_);
  return !(stop_ && taken_.empty() && taken_wakes_.empty() && queue_->pending() == 0);
}

void StoreThread::submit(std::uint32_t entry) {
  IoRequest request = entries_[entry].request;
  // By this the completion finds its entry, and with it the handler and the poster's own tag.
  request.tag = entry;
  in_queue_[entry] = true;
  queue_->submit(request);
}

void StoreThread::finish(std::uint32_t entry, const IoCompletion& completion, std::int64_t done_ns) {
  const Entry done = entries_[entry];
  if (timeline_ && completion.error == 0) timeline_->add(span_of(done.request, done.posted_ns, done_ns));
  in_queue_[entry] = false;
  {
    std::lock_guard lock(mutex_);
    // The entry is free before its handler runs: handlers post their next request from inside on_io(), and may need it.
    entries_[entry].next = free_head_;
    free_head_ = entry;
    ++free_count_;
    in_handler_ = done.handler;
  }
  room_.notify_all();
  // Also when the handler's own posts find the queue failed, and throw.
  struct Returned {
    StoreThread& thread;
    ~Returned() {
      {
        std::lock_guard lock(thread.mutex_);
        thread.in_handler_ = nullptr;
      }
      thread.woken_.notify_all();
    }
  } returned{*this};
  // Outside of the lock: on_io() computes checksums, enqueues copies and posts.
  done.handler->on_io(done.request, completion);
}

// Where it would have begun: nobody knows how far it came.
IoCompletion StoreThread::failed(const IoRequest& request) const {
  IoCompletion failure{.tag = request.tag,
                       .error = EIO,
                       .error_file = request.file,
                       .error_offset = request.offset,
                       .error_bytes = request.bytes};
  if (request.file != kStripedSpace) return failure;
  failure.error_file = 0;
  if (request.op == IoOp::kSync) return failure;
  failure.error_file = stripes_->file_of(request.offset);
  const StripeMap::Extent place = stripes_->next_on(failure.error_file, request.offset);
  failure.error_offset = place.file_offset;
  failure.error_bytes = std::min(place.bytes, request.bytes);
  return failure;
}

std::string StoreThread::queue_failure() const {
  std::lock_guard lock(mutex_);
  return queue_failure_;
}

// The queue is beyond use: whatever it holds will never be reported. What handlers post from now on waits in the
// mailbox, on whichever thread they run.
void StoreThread::fail_everything(const char* why) {
  {
    std::lock_guard lock(mutex_);
    queue_failure_ = why;
    dead_ = true;
  }
  for (std::uint32_t entry = 0; entry < kEntries; ++entry) {
    if (in_queue_[entry]) finish(entry, failed(entries_[entry].request), now_ns());
  }
  deliver_wakes();  // those that were under way; one too many does no harm
  while (true) {
    {
      std::unique_lock lock(mutex_);
      taken_.clear();
      taken_wakes_.clear();
      posted_.swap(taken_);
      wakes_.swap(taken_wakes_);
      if (taken_.empty() && taken_wakes_.empty()) {
        if (stop_) return;
        started_.wait(lock, [this] { return stop_ || !posted_.empty() || !wakes_.empty(); });
      }
    }
    for (std::uint32_t entry : taken_) finish(entry, failed(entries_[entry].request), now_ns());
    deliver_wakes();
  }
}

void StoreThread::deliver_wakes() {
  for (IoHandler* handler : taken_wakes_) handler->on_wake();
  {
    std::lock_guard lock(mutex_);
    taken_wakes_.clear();
  }
  woken_.notify_all();
}

void StoreThread::retire(IoHandler& handler) {
  std::unique_lock lock(mutex_);
  std::erase(wakes_, &handler);
  woken_.wait(
      lock, [&] { return in_handler_ != &handler && std::ranges::find(taken_wakes_, &handler) == taken_wakes_.end(); });
}

std::uint32_t StoreThread::take_entry(bool own_thread, std::unique_lock<std::mutex>& lock) {
  if (own_thread) {
    SPILLWAY_CHECK(free_count_ > 0, "handlers on the store's thread keep to kOwnRequests requests");
  } else {
    // Handlers cannot wait here, since they run on the thread that would make room; so the last entries are kept for
    // them.
    room_.wait(lock, [this] { return free_count_ > kOwnRequests; });
  }
  const std::uint32_t entry = free_head_;
  free_head_ = entries_[entry].next;
  --free_count_;
  return entry;
}

void StoreThread::post(const IoRequest& request, IoHandler& handler) {
  const bool own_thread = std::this_thread::get_id() == thread_.get_id();
  {
    std::unique_lock lock(mutex_);
    const std::uint32_t entry = take_entry(own_thread, lock);
    entries_[entry].request = request;
    entries_[entry].handler = &handler;
    entries_[entry].posted_ns = now_ns();
    // A handler that posts is on the thread that owns the queue already: no mailbox, no wake-up.
    if (own_thread && !dead_) {
      lock.unlock();
      submit(entry);
      return;
    }
    posted_.push_back(entry);
    if (dead_) started_.notify_all();
  }
  queue_->wake();
}

void StoreThread::wake(IoHandler& handler) {
  {
    std::lock_guard lock(mutex_);
    // One wake-up is enough however often it was asked for: on_wake() looks for all there is to do.
    for (IoHandler* waiting : wakes_) {
      if (waiting == &handler) return;
    }
    wakes_.push_back(&handler);
    if (dead_) started_.notify_all();
  }
  queue_->wake();
}

IoStats StoreThread::stats() const {
  std::lock_guard lock(mutex_);
  return stats_;
}

void IoBatch::add(const IoRequest& request) {
  {
    std::lock_guard lock(mutex_);
    ++pending_;
  }
  store_.post(request, *this);
}

bool IoBatch::done() const {
  std::lock_guard lock(mutex_);
  return pending_ == 0;
}

void IoBatch::wait_nothrow() noexcept {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return pending_ == 0; });
}

void IoBatch::wait() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return pending_ == 0; });
  if (!failed_) return;
  failed_ = false;
  throw io_error(store_, failed_request_, failure_);
}

void IoBatch::on_io(const IoRequest& request, const IoCompletion& completion) {
  std::lock_guard lock(mutex_);
  if (completion.error != 0 && !failed_) {
    failed_ = true;
    failed_request_ = request;
    failure_ = completion;
  }
  // Notified under the lock: the waiter may destroy the batch as soon as it sees zero.
  if (--pending_ > 0) return;
  changed_.notify_all();
  if (progress_) progress_->note();
}

std::uint64_t IoProgress::count() const {
  std::lock_guard lock(mutex_);
  return count_;
}

void IoProgress::wait_beyond(std::uint64_t count) const {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this, count] { return count_ > count; });
}

void IoProgress::note() {
  std::lock_guard lock(mutex_);
  ++count_;
  changed_.notify_all();
}

StoreThread::FileOffset StoreThread::place_of(std::uint64_t space_offset) const {
  SPILLWAY_CHECK(stripes_.has_value(), "this thread's files form a striped space");
  const std::uint32_t file = stripes_->file_of(space_offset);
  return {*files_[file], stripes_->next_on(file, space_offset).file_offset};
}

namespace {

// The space of a store is reserved when it is made: one that is full later is so by somebody's rule.
std::string repair_of(int error) {
  switch (error) {
    case ENOSPC:
      return "make room: the drive gives out more space than it has (thin provisioning, blocks shared with a copy)";
    case EDQUOT: return "raise the quota of this user or project, or make room in it";
    case EFBIG: return "raise the file size limit (ulimit -f)";
    case ECANCELED: return "raise the limit on processes (ulimit -u, the cgroup's pids.max)";
    default: return "check the drive";
  }
}
// A store gets its name with its first commit.
Hint way_on_from(const StoreThread& store, const File& file, const std::string& repair) {
  const bool named = file.path() != StoreFiles::temporary_name(file.path().parent_path());
  if (named && store.keeps_steps()) {
    return repair.empty() ? Hint(Remedy::kResume) : Hint(Remedy::kRepairAndResume, {repair});
  }
  return (repair.empty() ? "" : repair + ", and ") + "begin again: the store has no step to go on from";
}

}  // namespace

Error io_error(const StoreThread& store, const IoRequest& request, const IoCompletion& completion) {
  const std::string of_queue = store.queue_failure();
  const File& file = store.file(completion.error_file);
  // A file that ends where it did not: no run opens it any more. A drive may answer ENODATA, too, for a bad sector.
  const bool ends = file.size_bytes() < completion.error_offset + completion.error_bytes;
  if (completion.error == ENODATA && ends) return transfer_error(request.op, file, completion, Remedy::kCutShort);
  if (of_queue.empty()) {
    return transfer_error(request.op, file, completion, way_on_from(store, file, repair_of(completion.error)));
  }
  return Error(Code::kIo, file.path().string(),
               describe_transfer(request.op, completion) + " failed, since the I/O queue itself failed: " + of_queue,
               completion.error, way_on_from(store, file, ""));
}

}  // namespace spillway
