// The queue proper: requests become pieces, pieces go through an engine until all of their bytes are moved.
//
//               ┌ urgent ┐                     ┌────────── again: resumed, retried, not taken ◄─┐
//   submit ──► ┌►│        ├─ cut at block_bytes ┴─► engine ──► finish ────────────────────────────┴─► ready ──► wait
//              │ └ normal ┘ (reads and writes      (≤ depth pieces of a file hold a slot)
//              │             take turns)
//              └ one line per file: a striped request stands in several, so a slow drive does not hold up the others
//
// A piece keeps its slot from the cut until its last byte is moved or it has failed; a request is ready when it stands
// in no line and none of its pieces holds a slot. All memory is taken in the constructor, but the line of a file that
// comes later.
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <limits>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "aio/fixed_ring.h"
#include "aio/io_engine.h"
#include "aio/request_check.h"
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
  PieceQueue(const IoQueueOptions& options, std::span<File* const> files, std::span<const std::span<std::byte>> regions,
             std::unique_ptr<IoEngine> engine)
      : options_(options),
        files_(files.begin(), files.end()),
        regions_(regions.begin(), regions.end()),
        engine_(std::move(engine)),
        places_(file_places(options, files.size())),
        requests_(options.max_requests),
        pieces_(total_depth(options, files.size())),
        results_(pieces_.size()),
        ready_(options.max_requests),
        again_(pieces_.size()) {
    if (options.stripes) stripes_ = *options.stripes;
    lines_.reserve(places_);
    for (std::size_t i = 0; i < files.size(); ++i) lines_.emplace_back(options.max_requests);
    free_requests_.reserve(options.max_requests);
    for (std::uint32_t i = options.max_requests; i-- > 0;) free_requests_.push_back(i);
    free_pieces_.reserve(pieces_.size());
    for (auto i = static_cast<std::uint32_t>(pieces_.size()); i-- > 0;) free_pieces_.push_back(i);
    batch_.reserve(pieces_.size());
  }

  // What has not started never will; what is in flight writes into the caller's memory, so it is waited for.
  ~PieceQueue() override {
    if (in_engine_ > 0) check_owner();
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
    const char* const why = refusal(request, files_, stripes_ ? &*stripes_ : nullptr);
    SPILLWAY_CHECK(why == nullptr, why);
    SPILLWAY_CHECK(!free_requests_.empty(), "more requests than IoQueueOptions::max_requests");
    const std::uint32_t index = free_requests_.back();
    free_requests_.pop_back();
    requests_[index] = {.io = request, .result = {.tag = request.tag}};
    if (request.file != kStripedSpace) return stand_in_line(index, request.file);
    for (std::uint32_t file = 0; file < stripes_->files(); ++file) {
      if (request.op == IoOp::kSync || run_on(request, file, request.offset)) stand_in_line(index, file);
    }
  }

  std::span<IoCompletion> wait(std::span<IoCompletion> out, double timeout_seconds) override {
    check_owner();
    SPILLWAY_CHECK(!out.empty(), "wait() needs room for a completion");
    // Beyond a century is for ever; the clock's arithmetic would overflow.
    if (timeout_seconds < 0 && timeout_seconds != kUntilWoken && pending() == 0) timeout_seconds = 0;  // nothing comes
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

  void cancel_waiting() override {
    check_owner();
    for (std::uint32_t file = 0; file < lines_.size(); ++file) {
      for (FixedRing<Cursor>* waiting : {&lines_[file].urgent, &lines_[file].reads, &lines_[file].writes}) {
        while (!waiting->empty()) {
          const Cursor cursor = waiting->pop();
          Request& request = requests_[cursor.request];
          note_failure(request, ECANCELED, rest_of(request.io, file, cursor.at));
          --request.lines;
          complete_if_done(cursor.request);
        }
      }
    }
  }

  std::uint32_t add_file(File& file) override {
    check_owner();
    check_block(options_, file);
    const auto index = static_cast<std::uint32_t>(std::ranges::find(files_, nullptr) - files_.begin());
    check_place(file, index, places_);
    files_.reserve(index + 1);
    if (index == lines_.size()) lines_.emplace_back(options_.max_requests);
    engine_->set_file(index, &file);
    if (index == files_.size()) files_.push_back(nullptr);
    files_[index] = &file;
    return index;
  }

  void remove_file(std::uint32_t index) override {
    check_owner();
    check_leaves(index, files_, stripes_ ? &*stripes_ : nullptr);
    if (!lines_[index].idle())
      throw Error(Code::kBusy, {files_[index]->path().string(), "requests of the I/O queue are under way on it", 0,
                                "wait for them"});
    engine_->set_file(index, nullptr);
    files_[index] = nullptr;
  }

  bool add_region(std::span<std::byte> region) override {
    check_owner();
    check_region(region, regions_, options_.max_regions);
    regions_.reserve(regions_.size() + 1);
    const bool registered = engine_->add_region(region);
    regions_.push_back(region);
    return registered;
  }

  void remove_region(const std::byte* begin) override {
    check_owner();
    const auto region = regions_.begin() + region_at(begin, regions_);
    engine_->remove_region(*region);
    regions_.erase(region);
  }

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
    std::uint32_t lines = 0;        // lines that it stands in
    std::uint32_t pieces_open = 0;  // pieces that hold a slot
  };

  // What of a request is not cut yet, of its part on one file.
  struct Cursor {
    std::uint32_t request = kNone;
    std::uint64_t at = 0;  // in the file, or in the striped space
  };

  // Of a file. Drives move both ways at once: where reads and writes wait, neither holds more than half of the slots.
  struct Line {
    explicit Line(std::size_t capacity) : urgent(capacity), reads(capacity), writes(capacity) {}
    FixedRing<Cursor> urgent, reads, writes;  // syncs are writes
    std::uint32_t read_slots = 0, write_slots = 0;

    std::uint32_t slots() const { return read_slots + write_slots; }
    bool idle() const { return slots() == 0 && urgent.empty() && reads.empty() && writes.empty(); }
    std::uint32_t& slots_of(IoOp op) { return op == IoOp::kRead ? read_slots : write_slots; }
    FixedRing<Cursor>& of(const IoRequest& io) {
      return io.priority == IoPriority::kUrgent ? urgent : io.op == IoOp::kRead ? reads : writes;
    }
    FixedRing<Cursor>& next() {
      if (!urgent.empty()) return urgent;
      if (reads.empty() || writes.empty()) return reads.empty() ? writes : reads;
      return read_slots <= write_slots ? reads : writes;
    }
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

  void stand_in_line(std::uint32_t index, std::uint32_t file) {
    Request& request = requests_[index];
    ++request.lines;
    lines_[file].of(request.io).push({index, request.io.offset});
  }

  // The next contiguous run of a transfer on `file`, at or after `at`; nothing when the request ends before it.
  std::optional<StripeMap::Extent> run_on(const IoRequest& io, std::uint32_t file, std::uint64_t at) const {
    const std::uint64_t end = io.offset + io.bytes;
    StripeMap::Extent run{at, at, end - at};
    if (io.file == kStripedSpace) run = stripes_->next_on(file, at);
    if (run.space_offset >= end) return std::nullopt;
    run.bytes = std::min(run.bytes, end - run.space_offset);
    return run;
  }

  // What of a request is not cut on `file`, as far as it goes without a break.
  IoPiece rest_of(const IoRequest& io, std::uint32_t file, std::uint64_t at) const {
    if (io.op == IoOp::kSync) return {.op = io.op, .file = file};
    const StripeMap::Extent run = *run_on(io, file, at);
    return {.op = io.op, .file = file, .offset = run.file_offset, .bytes = run.bytes};
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
    for (std::uint32_t file = 0; file < lines_.size(); ++file) {
      Line& line = lines_[file];
      while (line.slots() < options_.depth) {
        FixedRing<Cursor>& waiting = line.next();
        if (waiting.empty()) break;
        if (!cut_piece(waiting.front(), file, now)) continue;
        const std::uint32_t index = waiting.pop().request;
        --requests_[index].lines;
        complete_if_done(index);
      }
    }
    if (batch_.empty()) return;

    const std::size_t taken = engine_->submit(batch_);
    if (in_engine_ == 0 && taken > 0) busy_since_ = now;
    in_engine_ += static_cast<std::uint32_t>(taken);
    for (std::size_t i = 0; i < taken; ++i) pieces_[batch_[i].slot].in_engine = true;
    for (std::size_t i = taken; i < batch_.size(); ++i) put_back(batch_[i].slot);
  }

  // Appends the next piece of a request's part on `file` to the batch. True when nothing of it is left to cut.
  bool cut_piece(Cursor& cursor, std::uint32_t file, Clock::time_point now) {
    Request& request = requests_[cursor.request];
    const IoRequest& io = request.io;
    if (io.op == IoOp::kSync && files_[file]->sync_error() != 0) {
      note_failure(request, files_[file]->sync_error(), {.file = file});
    }
    if (request.result.error != 0) return true;  // the rest of a failed request is not started
    StripeMap::Extent run{};
    if (io.op != IoOp::kSync) run = *run_on(io, file, cursor.at);
    run.bytes = std::min(run.bytes, options_.block_bytes);

    const std::uint32_t slot = free_pieces_.back();
    free_pieces_.pop_back();
    ++lines_[file].slots_of(io.op);
    ++request.pieces_open;
    pieces_[slot] = {.io = {.op = io.op,
                            .file = file,
                            .slot = slot,
                            .offset = run.file_offset,
                            .buffer = io.op == IoOp::kSync ? nullptr : io.buffer + (run.space_offset - io.offset),
                            .bytes = run.bytes},
                     .request = cursor.request,
                     .due = now,
                     .progressed = now,
                     .reported = now};
    batch_.push_back(pieces_[slot].io);
    cursor.at = run.space_offset + run.bytes;
    return io.op == IoOp::kSync || !run_on(io, file, cursor.at);
  }

  void finish(const IoResult& result, Clock::time_point now) {
    SPILLWAY_CHECK(result.slot < pieces_.size() && pieces_[result.slot].in_engine, "a piece completes exactly once");
    Piece& piece = pieces_[result.slot];
    piece.in_engine = false;
    if (--in_engine_ == 0) stats_.busy_seconds += seconds_between(busy_since_, now);
    const int error = result.moved < 0 ? static_cast<int>(-result.moved) : 0;
    if (piece.io.op == IoOp::kSync) return finish_sync(piece, error);
    if (error == EINTR || error == EAGAIN || error == ECANCELED) return try_again(piece, error, now);
    if (error != 0) return fail(piece, error);

    const auto moved = static_cast<std::uint64_t>(result.moved);
    SPILLWAY_CHECK(moved <= piece.io.bytes, "an engine moves no more than it was asked to");
    // A direct transfer goes on from an aligned place: one that stopped inside a sector is repeated from that sector's
    // start. A read that does not fill its first sector has met the end of the file.
    const std::uint64_t done =
        moved == piece.io.bytes ? moved : align_down<std::uint64_t>(moved, files_[piece.io.file]->alignment());
    (piece.io.op == IoOp::kRead ? stats_.read_bytes : stats_.write_bytes) += done;
    if (done == piece.io.bytes) return close(piece);
    if (done == 0 && piece.io.op == IoOp::kWrite) return try_again(piece, EIO, now);
    if (done == 0) return may_end_at(piece, piece.io.offset + moved) ? close(piece) : fail(piece, ENODATA);
    piece.io.offset += done;
    piece.io.buffer += done;
    piece.io.bytes -= done;
    piece.tries = 0;
    piece.progressed = now;
    resume(piece, now);
  }

  // Whether the file may end at `offset`, inside this piece or before it.
  bool may_end_at(const Piece& piece, std::uint64_t offset) const {
    const IoRequest& io = requests_[piece.request].io;
    return io.least_bytes != 0 && offset >= io.offset + io.least_bytes;
  }

  // No errno is harmless here, EINTR included: the kernel tells a lost page once, and an interrupted sync may have used
  // up that one time. A sync that ran beside a failed one cannot be believed either.
  void finish_sync(Piece& piece, int error) {
    File& file = *files_[piece.io.file];
    if (error == ECANCELED && file.sync_error() == 0) error = sync_here(file);
    if (error != 0) file.note_sync_failure(error);
    if (file.sync_error() != 0) return fail(piece, file.sync_error());
    ++stats_.syncs;
    close(piece);
  }

  // io_uring cancels what it can start no thread for, before it has begun (io-wq.c, io_acct_cancel_pending_work): no
  // error of the drive's has been told yet, and this thread can do the same.
  int sync_here(const File& file) {
    if (!std::exchange(said_that_syncs_wait_, true)) {
      log(LogLevel::kWarning,
          fmt::format("{}: the kernel can start no thread for a sync (a limit on processes: ulimit -u "
                      "or the cgroup's pids.max); the store's own thread syncs, while transfers wait",
                      file.path().string()));
    }
    return ::fdatasync(file.fd()) == 0 ? 0 : errno;
  }

  void try_again(Piece& piece, int error, Clock::time_point now) {
    if (++piece.tries >= kMostTries) return fail(piece, error);
    const auto pause = std::min(kFirstPause * (1 << std::min(piece.tries - 1, 16u)), kLongestPause);
    resume(piece, error == EAGAIN || error == ECANCELED ? now + pause : now);
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
    note_failure(requests_[piece.request], error, piece.io);
    close(piece);
  }

  static void note_failure(Request& request, int error, const IoPiece& piece) {
    IoCompletion& result = request.result;
    if (result.error != 0) return;  // the first failure of a request is the one reported
    result.error = error;
    result.error_file = piece.file;
    result.error_offset = piece.offset;
    result.error_bytes = piece.bytes;
  }

  void close(Piece& piece) {
    const std::uint32_t index = std::exchange(piece.request, kNone);
    free_pieces_.push_back(piece.io.slot);
    --lines_[piece.io.file].slots_of(piece.io.op);
    --requests_[index].pieces_open;
    complete_if_done(index);
  }

  // A request that is not cut to its end still stands in a line; start() meets it there.
  void complete_if_done(std::uint32_t index) {
    const Request& request = requests_[index];
    if (request.pieces_open == 0 && request.lines == 0) ready_.push(index);
  }

  // How long the engine may wait: until the deadline, the next piece due, or the next look for stalled pieces.
  double patience(Clock::time_point now, Clock::time_point deadline) const {
    if (!ready_.empty()) return 0;
    Clock::time_point until = deadline;
    // Pieces that are due and still here were not taken, or fell due just now: a moment, whatever else is in flight. To
    // wait for a completion instead would let a slow file hold up the others.
    if (!again_.empty()) until = std::min(until, std::max(next_due_, now + kFirstPause));
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
  std::vector<File*> files_;                   // null: a place that a file has left
  std::vector<std::span<std::byte>> regions_;  // they matter to the engine alone
  std::optional<StripeMap> stripes_;           // over the first files
  const std::unique_ptr<IoEngine> engine_;
  const std::uint32_t places_;  // of files
  const std::thread::id owner_ = std::this_thread::get_id();

  std::vector<Request> requests_;
  std::vector<Piece> pieces_;
  std::vector<IoResult> results_;
  std::vector<IoPiece> batch_;
  std::vector<std::uint32_t> free_requests_, free_pieces_;
  std::vector<Line> lines_;                                // by file
  FixedRing<std::uint32_t> ready_;                         // requests done and not yet returned
  FixedRing<std::uint32_t> again_;                         // slots of pieces to be offered to the engine again
  Clock::time_point next_due_ = Clock::time_point::max();  // the earliest `due` in again_
  Clock::time_point stalls_looked_at_{};
  std::uint32_t in_engine_ = 0;
  Clock::time_point busy_since_{};
  IoStats stats_;
  bool said_that_syncs_wait_ = false;
};

}  // namespace

std::unique_ptr<IoQueue> make_queue(const IoQueueOptions& options, std::span<File* const> files,
                                    std::unique_ptr<IoEngine> engine, std::span<const std::span<std::byte>> regions) {
  check_options(options, files);
  return std::make_unique<PieceQueue>(options, files, regions, std::move(engine));
}

}  // namespace spillway
