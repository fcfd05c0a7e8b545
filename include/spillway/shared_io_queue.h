// An IoQueue that any number of threads use at a time. It has one thread of its own, which alone calls the queue below:
//
//   submit ─┐                                           ┌─ wait
//   submit ─┼─► requests (a mutex) ─► its thread ─► completions ┼─ wait      a completion goes to one of those who wait
//   submit ─┘                                           └─ wait
//
// What io_queue.h says holds, but for this:
// * Any thread may call anything, several at a time; only the destructor must be alone. wake() ends one wait(), one
//   that waits or the next, and is not for signal handlers.
// * submit() starts a request by itself, and a mistake is an Error instead of the program's end: kInvalidArgument for a
//   wrong request, kBusy for one more than max_requests, kInvalidArgument after close().
// * When the engine fails, every request that was under way completes with EIO, as soon as nothing is in flight any
//   more; then submit() and wait() throw what happened.
// * stats() are those of the last completion.
// * A process that is forked has no such thread: its calls throw kUnsupported, or answer 0, and change nothing.
// * The log's sink must not call the queue.
//
// Compared with an IoQueue a request costs a lock and, when the thread slept, two context switches more.
#pragma once

#include "spillway/cplusplus.h"

#include <memory>
#include <span>

#include "spillway/io_queue.h"

namespace spillway {

class SharedIoQueue : public IoQueue {
 public:
  // As IoQueue::create.
  static std::unique_ptr<SharedIoQueue> create(const IoQueueOptions& options, std::span<File* const> files,
                                               std::span<const std::span<std::byte>> regions);

  // Ends every request: what is in flight is waited for, what has not started completes with ECANCELED. wait() hands
  // the completions out as before, and then returns at once. The destructor does the same, and logs how many requests
  // failed without anybody having taken their completion, and which was the first.
  virtual void close() = 0;
};

}  // namespace spillway
