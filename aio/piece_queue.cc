// The queue proper: requests become pieces, pieces go through an engine until all of their bytes are moved.
//
//             ┌ urgent ┐                     ┌────────── again: resumed, retried, not taken ◄─┐
//   submit ──►│        ├─ cut at block_bytes ┴─► engine ──► finish ────────────────────────────┴─► ready ──► wait
//             └ normal ┘                        (≤ depth pieces hold a slot)
//
// A piece keeps its slot from the cut until its last byte is moved or it has failed; a request is ready when all of it
// has been cut and none of its pieces holds a slot. All memory is taken in the constructor.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <limits>
#include <thread>
#include <utility>
#include <vector>

#include "aio/fixed_ring.h"
#include "aio/io_engine.h"
#include "spillway/error.h"
#include "spillway/log.h"
#include "spillway/units.h"

namespace spillway {
namespace {

using Clock = std::chrono::steady_clock;

// How often one piece may be refused in a row without a byte moved. EAGAIN means that the kernel is short of something,
// so it backs off, 1 ms doubling to 64 ms: about half a second in all.
constexpr std::uint32_t kMostTries = 12;
constexpr auto kFirstPause = std::chrono::milliseconds(1), kLongestPause = std::chrono::milliseconds(64);
constexpr std::uint32_t kNone = std::numeric_limits<std::uint32_t>::max();

double seconds_between(Clock::time_point from, Clock::time_point to) {
  return std::chrono::duration<double>(to - from).count();
}

class PieceQueue final : public IoQueue {
 public:
  PieceQueue(const IoQueueOptions& options, std::span<File* const> files, std::unique_ptr<IoEngine> engine)
      : options_(options),
        files_(files.begin(), files.end()),
        engine_(std::move(engine)),
        requests_(options.max_requests),
        pieces_(options.depth),
        results_(options.depth),
        waiting_{FixedRing<std::uint32_t>(options.max_requests), FixedRing<std::uint32_t>(options.max_requests)},
        ready_(options.max_requests),
        again_(options.depth) {
    free_requests_.reserve(options.max_requests);
    for (std::uint32_t i = options.max_requests; i-- > 0;) free_requests_.push_back(i);
    free_pieces_.reserve(options.depth);
    for (std::uint32_t i = options.depth; i-- > 0;) free_pieces_.push_back(i);
    batch_.reserve(options.depth);
  }

  // What has not started never will; what is in flight writes into the caller's memory, so it is waited for.
  ~PieceQueue() override {
    try {
      while (in_engine_ > 0) {
        for (std::size_t left = engine_->reap(results_, options_.stall_report_seconds).count; left > 0; --left)
          --in_engine_;
        report_stalls(Clock::now());
      }
    } catch (const Error& failure) {
      log(LogLevel::kWarning, fmt::format("{} (while closing the queue)", failure.what()));
    }
  }

  void submit(const IoRequest& request) override {
    check_owner();
    check_request(request);
    SPILLWAY_CHECK(!free_requests_.empty(), "more requests than IoQueueOptions::max_requests");
    const std::uint32_t index = free_requests_.back();
    free_requests_.pop_back();
    requests_[index] = {.io = request, .result = {.tag = request.tag}};
    waiting_[static_cast<std::size_t>(request.priority)].push(index);
  }

  std::span<IoCompletion> wait(std::span<IoCompletion> out, double timeout_seconds) override {
    check_owner();
    SPILLWAY_CHECK(!out.empty(), "wait() needs room for a completion");
    // Beyond a century is for ever; the clock's arithmetic would overflow.
    const bool bounded = timeout_seconds >= 0 && timeout_seconds < 3e9;
    const auto deadline =
        bounded
            ? Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(timeout_seconds))
            : Clock::time_point::max();
    start(Clock::now());
    for (;;) {
      const Reaped reaped = engine_->reap(results_, patience(Clock::now(), deadline));
      const auto now = Clock::now();
      for (const IoResult& result : std::span(results_).first(reaped.count)) finish(result, now);
      start(now);  // before the caller gets to work on what completed, so that the drive has work too
      report_stalls(now);
      if (!ready_.empty() || reaped.woken || now >= deadline) break;
    }
    std::size_t filled = 0;
    for (; filled < out.size() && !ready_.empty(); ++filled) {
      const std::uint32_t index = ready_.pop();
      out[filled] = requests_[index].result;
      free_requests_.push_back(index);
    }
    return out.first(filled);
  }

  void wake() noexcept override { engine_->wake(); }

  std::uint32_t pending() const noexcept override {
    return static_cast<std::uint32_t>(requests_.size() - free_requests_.size());
  }

  IoStats stats() const noexcept override {
    IoStats stats = stats_;
    if (in_engine_ > 0) stats.busy_seconds += seconds_between(busy_since_, Clock::now());
    return stats;
  }

  std::string describe() const override { return engine_->describe(); }

 private:
  struct Request {
    IoRequest io;
    IoCompletion result;
    std::uint64_t cut_bytes = 0;    // handed out as pieces
    std::uint32_t pieces_open = 0;  // pieces that hold a slot
  };

  struct Piece {
    IoPiece io;                     // what is left of it
    std::uint32_t request = kNone;  // kNone: the slot is free
    std::uint32_t tries = 0;        // refusals in a row
    bool in_engine = false;
    Clock::time_point due;         // not offered to the engine before this
    Clock::time_point progressed;  // cut, or last byte moved
    Clock::time_point reported;    // as stalled
  };

  void check_owner() const {
    SPILLWAY_CHECK(std::this_thread::get_id() == owner_, "only the thread that created the queue submits and waits");
  }

  void check_request(const IoRequest& request) const {
    SPILLWAY_CHECK(request.file < files_.size(), "no such file in this queue");
    if (request.op == IoOp::kSync) {
      SPILLWAY_CHECK(request.bytes == 0 && request.buffer == nullptr, "a sync moves no bytes");
      return;
    }
    SPILLWAY_CHECK(request.bytes > 0 && request.buffer != nullptr, "a transfer needs bytes and a buffer");
    SPILLWAY_CHECK(request.offset <= std::numeric_limits<std::int64_t>::max() - request.bytes, "offset out of range");
    const auto address = reinterpret_cast<std::uintptr_t>(request.buffer);
    SPILLWAY_CHECK((request.offset | request.bytes | address) % files_[request.file]->alignment() == 0,
                   "offset, address and length must be multiples of File::alignment()");
  }

  // Offers the engine every piece that may start: those to be tried again, then new ones, urgent before normal.
  void start(Clock::time_point now) {
    batch_.clear();
    next_due_ = Clock::time_point::max();
    for (std::size_t left = again_.size(); left > 0; --left) {
      const std::uint32_t slot = again_.pop();
      if (pieces_[slot].due <= now) {
        batch_.push_back(pieces_[slot].io);
      } else {
        put_back(slot);
      }
    }
    while (!free_pieces_.empty()) {
      auto& waiting = waiting_[0].empty() ? waiting_[1] : waiting_[0];
      if (waiting.empty()) break;
      if (cut_piece(waiting.front(), now)) waiting.pop();
    }
    if (batch_.empty()) return;

    const std::size_t taken = engine_->submit(batch_);
    if (in_engine_ == 0 && taken > 0) busy_since_ = now;
    in_engine_ += static_cast<std::uint32_t>(taken);
    for (std::size_t i = 0; i < taken; ++i) pieces_[batch_[i].slot].in_engine = true;
    for (std::size_t i = taken; i < batch_.size(); ++i) put_back(batch_[i].slot);
  }

  // Appends the request's next piece to the batch. True when nothing of it is left to cut.
  bool cut_piece(std::uint32_t index, Clock::time_point now) {
    Request& request = requests_[index];
    IoRequest& io = request.io;
    if (io.op == IoOp::kSync && files_[io.file]->sync_error() != 0)
      request.result.error = files_[io.file]->sync_error();
    if (request.result.error != 0) {  // the rest of a failed request is not started
      request.cut_bytes = io.bytes;
      complete_if_done(index);
      return true;
    }
    const std::uint32_t slot = free_pieces_.back();
    free_pieces_.pop_back();
    const std::uint64_t bytes = std::min(options_.block_bytes, io.bytes - request.cut_bytes);
    pieces_[slot] = {.io = {.op = io.op,
                            .file = io.file,
                            .slot = slot,
                            .offset = io.offset + request.cut_bytes,
                            .buffer = io.buffer + request.cut_bytes,
                            .bytes = bytes},
                     .request = index,
                     .due = now,
                     .progressed = now,
                     .reported = now};
    batch_.push_back(pieces_[slot].io);
    request.cut_bytes += bytes;
    ++request.pieces_open;
    return request.cut_bytes == io.bytes;
  }

  void finish(const IoResult& result, Clock::time_point now) {
    SPILLWAY_CHECK(result.slot < pieces_.size() && pieces_[result.slot].in_engine, "a piece completes exactly once");
    Piece& piece = pieces_[result.slot];
    piece.in_engine = false;
    if (--in_engine_ == 0) stats_.busy_seconds += seconds_between(busy_since_, now);
    const int error = result.moved < 0 ? static_cast<int>(-result.moved) : 0;
    if (piece.io.op == IoOp::kSync) return finish_sync(piece, error);
    if (error == EINTR || error == EAGAIN) return try_again(piece, error, now);
    if (error != 0) return fail(piece, error);

    const auto moved = static_cast<std::uint64_t>(result.moved);
    SPILLWAY_CHECK(moved <= piece.io.bytes, "an engine moves no more than it was asked to");
    // A direct transfer goes on from an aligned place: one that stopped inside a sector is repeated from that sector's
    // start. A read that does not fill its first sector has met the end of the file.
    const std::uint64_t done =
        moved == piece.io.bytes ? moved : align_down<std::uint64_t>(moved, files_[piece.io.file]->alignment());
    (piece.io.op == IoOp::kRead ? stats_.read_bytes : stats_.write_bytes) += done;
    if (done == 0) return piece.io.op == IoOp::kRead ? fail(piece, ENODATA) : try_again(piece, EIO, now);
    if (done == piece.io.bytes) return close(piece);
    piece.io.offset += done;
    piece.io.buffer += done;
    piece.io.bytes -= done;
    piece.tries = 0;
    piece.progressed = now;
    resume(piece, now);
  }

  // No errno is harmless here, EINTR included: the kernel tells a lost page once, and an interrupted sync may have used
  // up that one time. A sync that ran beside a failed one cannot be believed either.
  void finish_sync(Piece& piece, int error) {
    File& file = *files_[piece.io.file];
    if (error != 0) file.note_sync_failure(error);
    if (file.sync_error() != 0) return fail(piece, file.sync_error());
    ++stats_.syncs;
    close(piece);
  }

  void try_again(Piece& piece, int error, Clock::time_point now) {
    if (++piece.tries >= kMostTries) return fail(piece, error);
    const auto pause = std::min(kFirstPause * (1 << std::min(piece.tries - 1, 16u)), kLongestPause);
    resume(piece, error == EAGAIN ? now + pause : now);
  }

  void resume(Piece& piece, Clock::time_point due) {
    if (requests_[piece.request].result.error != 0) return close(piece);  // its request has failed: no use
    piece.due = due;
    put_back(piece.io.slot);
  }

  void put_back(std::uint32_t slot) {
    again_.push(slot);
    next_due_ = std::min(next_due_, pieces_[slot].due);
  }

  void fail(Piece& piece, int error) {
    IoCompletion& result = requests_[piece.request].result;
    if (result.error == 0) {  // the first failure of a request is the one reported
      result.error = error;
      result.error_offset = piece.io.offset;
      result.error_bytes = piece.io.bytes;
    }
    close(piece);
  }

  void close(Piece& piece) {
    const std::uint32_t index = std::exchange(piece.request, kNone);
    free_pieces_.push_back(piece.io.slot);
    --requests_[index].pieces_open;
    complete_if_done(index);
  }

  // A request that is not cut to its end is still in a waiting ring; start() meets it there.
  void complete_if_done(std::uint32_t index) {
    const Request& request = requests_[index];
    if (request.pieces_open == 0 && request.cut_bytes == request.io.bytes) ready_.push(index);
  }

  // How long the engine may wait: until the deadline, the next piece due, or the next look for stalled pieces.
  double patience(Clock::time_point now, Clock::time_point deadline) const {
    if (!ready_.empty()) return 0;
    Clock::time_point until = deadline;
    if (again_.size() > 0 && next_due_ > now) until = std::min(until, next_due_);
    // Pieces that are due and still here were not taken. A completion makes room for them; with none to come, time
    // must.
    if (again_.size() > 0 && next_due_ <= now && in_engine_ == 0) until = std::min(until, now + kFirstPause);
    if (free_pieces_.size() < pieces_.size()) until = std::min(until, now + stall_look_interval());
    return until == Clock::time_point::max() ? -1 : std::max(0.0, seconds_between(now, until));
  }

  Clock::duration stall_look_interval() const {
    return std::chrono::duration_cast<Clock::duration>(
        std::chrono::duration<double>(options_.stall_report_seconds / 4));
  }

  void report_stalls(Clock::time_point now) {
    if (now - stalls_looked_at_ < stall_look_interval()) return;
    stalls_looked_at_ = now;
    const auto limit = 4 * stall_look_interval();
    for (Piece& piece : pieces_) {
      if (piece.request == kNone || now - piece.progressed < limit || now - piece.reported < limit) continue;
      piece.reported = now;
      const File& file = *files_[piece.io.file];
      const IoCompletion at{.error_offset = piece.io.offset, .error_bytes = piece.io.bytes};
      log(LogLevel::kWarning,
          fmt::format(
              "{}: {} has made no progress for {:.1f} s ({}); still waiting, see the kernel log for the drive's state",
              file.path().string(), describe_transfer(piece.io.op, at), seconds_between(piece.progressed, now),
              engine_->describe()));
    }
  }

  const IoQueueOptions options_;
  const std::vector<File*> files_;
  const std::unique_ptr<IoEngine> engine_;
  const std::thread::id owner_ = std::this_thread::get_id();

  std::vector<Request> requests_;
  std::vector<Piece> pieces_;
  std::vector<IoResult> results_;
  std::vector<IoPiece> batch_;
  std::vector<std::uint32_t> free_requests_, free_pieces_;
  std::array<FixedRing<std::uint32_t>, 2> waiting_;        // requests not cut to their end, by priority
  FixedRing<std::uint32_t> ready_;                         // requests done and not yet returned
  FixedRing<std::uint32_t> again_;                         // slots of pieces to be offered to the engine again
  Clock::time_point next_due_ = Clock::time_point::max();  // the earliest `due` in again_
  Clock::time_point stalls_looked_at_{};
  std::uint32_t in_engine_ = 0;
  Clock::time_point busy_since_{};
  IoStats stats_;
};

}  // namespace

std::unique_ptr<IoQueue> make_queue(const IoQueueOptions& options, std::span<File* const> files,
                                    std::unique_ptr<IoEngine> engine) {
  check_options(options, files);
  return std::make_unique<PieceQueue>(options, files, std::move(engine));
}

}  // namespace spillway
