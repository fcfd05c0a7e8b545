// Thousands of short schedules drawn from a seed, over every engine: one to three files, striped or not, direct or not,
// blocks, depths, requests and priorities of all kinds, and below them a drive that fails in every way we know of. Of
// each schedule all must hold:
//
//   a request completes once, and every request does;       a byte is the one that was written, but for the bits that
//   an error names a place inside its request;              the drive flipped and the sectors that it lied about;
//   after a failed sync no sync of the file is believed;    after a failed write a sector is the old or the new one.
//
// A schedule that hangs ends the program. SPILLWAY_SEED=N repeats the schedule that a failure names first of all; what
// the kernel's timing adds it cannot repeat.
#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <map>
#include <mutex>
#include <thread>

#include "queue_fixture.h"
#include "tests/sanitizer.h"
#include "tests/seed.h"

namespace spillway::testing {
namespace {

// So many schedules, several at a time: most of one is waiting, for the drive and for the kernel to close what a queue
// had open.
#if defined(SPILLWAY_THREAD_SANITIZER)
// One at a time: liburing maps and unmaps rings by system calls of its own, so the sanitizer takes the ring that one
// thread had at an address and the one that another gets there for the same memory.
constexpr int kSchedules = 150, kAtATime = 1;
#elif defined(SPILLWAY_ADDRESS_SANITIZER)
constexpr int kSchedules = 300, kAtATime = 4;
#else
constexpr int kSchedules = 1000, kAtATime = 4;
#endif
constexpr std::uint64_t kCells = 48;  // of a space; a request owns some, and their memory, until it completes
constexpr std::uint64_t kMostCell = 4096;
constexpr std::uint64_t kFileBytes = (kCells + 16) * kMostCell;  // the header, and the last row of a striped space

// Ends the program when it is not fed for two minutes.
class Watchdog {
 public:
  ~Watchdog() {
    {
      std::lock_guard lock(mutex_);
      over_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }
  void feed(std::uint64_t seed) {
    {
      std::lock_guard lock(mutex_);
      seed_ = seed;
      ++meals_;
    }
    changed_.notify_all();
  }

 private:
  void watch() {
    std::unique_lock lock(mutex_);
    while (!over_) {
      const std::uint64_t seen = meals_;
      if (changed_.wait_for(lock, std::chrono::minutes(2), [&] { return over_ || meals_ != seen; })) continue;
      std::fprintf(stderr, "the schedule of SPILLWAY_SEED=%llu hangs\n", static_cast<unsigned long long>(seed_));
      std::abort();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::uint64_t seed_ = 0, meals_ = 0;
  bool over_ = false;
  std::thread thread_{[this] { watch(); }};
};

struct Totals {
  static constexpr std::array kNames = {"good requests", "failed requests", "failed syncs", "short transfers", "errors",
                                        "delays",        "partial submits", "flipped bits", "torn writes",     "lies"};
  std::array<std::uint64_t, kNames.size()> counts{};

  Totals& operator+=(const Totals& other) {
    for (std::size_t i = 0; i < counts.size(); ++i) counts[i] += other.counts[i];
    return *this;
  }
};

// A stretch of one file that a stretch of a space lies on.
struct Run {
  std::uint32_t file = 0;
  std::uint64_t file_offset = 0, space_offset = 0, bytes = 0;
};

class Schedule {
 public:
  Schedule(IoEngineKind kind, std::uint64_t seed, std::span<const std::filesystem::path> paths, Memory& memory)
      : kind_(kind), random_(seed), memory_(memory) {
    const std::size_t count = 1 + below(3);
    const bool direct = kind == IoEngineKind::kLibaio || !chance(0.15);
    for (std::size_t i = 0; i < count; ++i) {
      files_.push_back(std::make_unique<File>(File::open(paths[i], {.writable = true, .direct = direct})));
      pointers_.push_back(files_.back().get());
      unit_ = std::max<std::uint64_t>(unit_, files_.back()->alignment());
    }
    SPILLWAY_CHECK(unit_ <= kMostCell, "a cell takes an aligned request");
    cell_ = unit_ > 1 ? unit_ * (1 + below(kMostCell / unit_)) : 1 + below(kMostCell);
    if (chance(0.5)) {
      std::vector<std::uint32_t> shares;
      for (std::size_t i = 0; i < count; ++i) shares.push_back(1 + static_cast<std::uint32_t>(below(3)));
      stripes_.emplace(shares, cell_ * (1 + below(3)), cell_ * below(3));
    }
    for (std::size_t space = 0; space < (stripes_ ? 1 : count); ++space)
      model_.push_back(stored(space, first(), all()));
    open_queue(seed);
  }

  void run(Totals& totals) {
    const std::uint64_t requests = 10 + below(50);
    for (std::uint64_t tag = 0; tag < requests && !::testing::Test::HasFatalFailure(); ++tag) {
      if (flights_.size() < max_requests_) submit_one(tag);
      if (chance(0.05)) queue_->wake();
      if (chance(0.6)) wait(chance(0.5) ? 0 : 1e-3);
    }
    // A wait that is not woken returns nothing only when there is nothing.
    while (queue_->pending() > 0 && !::testing::Test::HasFatalFailure()) wait(-1);
    if (::testing::Test::HasFatalFailure()) return;
    ASSERT_TRUE(flights_.empty()) << "requests were lost";
    IoCompletion extra[1];
    ASSERT_TRUE(queue_->wait(extra, 0).empty());
    for (std::size_t space = 0; space < model_.size(); ++space) {
      ASSERT_TRUE(stored(space, first(), all()) == model_[space]) << "other bytes are stored at the end";
    }
    for (const auto& [file, load] : trace_.loads) {
      ASSERT_LE(load.most_pieces, depth_);
      ASSERT_LE(load.most_bytes, depth_ * block_);
    }
    totals += {{good_, failed_, failed_syncs_, trace_.shorts, trace_.errors, trace_.delays, trace_.fewer, trace_.flips,
                trace_.torn, trace_.lies}};
  }

 private:
  struct Flight {
    IoRequest io;
    std::uint64_t pattern = 0;  // seed of what a write stores
    bool sync_failed_before = false;
  };

  std::uint64_t below(std::uint64_t limit) { return random_() % limit; }
  bool chance(double probability) { return std::uniform_real_distribution<double>()(random_) < probability; }
  std::uint64_t first() const { return stripes_ ? stripes_->header_bytes() : 0; }
  std::uint64_t all() const { return kCells * cell_; }
  std::byte* memory_of(std::size_t space, std::uint64_t offset) {
    return memory_.data() + space * kCells * kMostCell + offset - first();
  }

  void open_queue(std::uint64_t seed) {
    block_ = unit_ > 1 ? unit_ * (1 + below(12)) : 1 + below(9000);
    depth_ = 1 + static_cast<std::uint32_t>(below(6));
    max_requests_ = 1 + static_cast<std::uint32_t>(below(40));
    FaultRates rates;
    const std::uint64_t kind = below(4);
    // None; those that a queue rides out; and twice all of them.
    if (kind >= 1) rates = {.short_transfer = 0.2, .eintr = 0.1, .eagain = 0.005, .delay = 0.1};
    may_fail_ = kind >= 2;
    if (may_fail_) {
      rates.eio = rates.enospc = 0.02;
      rates.flip = rates.torn = 0.1;
      rates.lie = 0.5;
      rates.syncs_too = true;
    }
    FaultPlan plan{.script = seeded_faults(seed, rates, unit_),
                   .seed = seed,
                   .takes_fewer = kind >= 1 ? 0.1 : 0,
                   .reorder = kind >= 1,
                   .trace = &trace_,
                   .files = pointers_};
    const IoQueueOptions options{.block_bytes = block_,
                                 .depth = depth_,
                                 .max_requests = max_requests_,
                                 .stripes = stripes_ ? &*stripes_ : nullptr};
    const std::span<std::byte> regions[] = {memory_.span(0, memory_.span().size() / 2)};  // some buffers lie outside
    auto engine = make_engine(kind_, {.depth = total_depth(options, pointers_.size()),
                                      .block_bytes = block_,
                                      .files = pointers_,
                                      .regions = regions});
    queue_ = make_queue(options, pointers_, make_faulty_engine(std::move(engine), std::move(plan)));
  }

  // Where a stretch of a space lies.
  std::vector<Run> runs(std::size_t space, std::uint64_t offset, std::uint64_t bytes) const {
    if (!stripes_) return {{static_cast<std::uint32_t>(space), offset, offset, bytes}};
    std::vector<Run> found;
    for (std::uint64_t at = offset; at < offset + bytes;) {
      const std::uint32_t file = stripes_->file_of(at);
      const StripeMap::Extent place = stripes_->next_on(file, at);
      found.push_back({file, place.file_offset, at, std::min(place.bytes, offset + bytes - at)});
      at += found.back().bytes;
    }
    return found;
  }

  // What the files hold, past all faults; one look at each of them.
  std::vector<std::byte> stored(std::size_t space, std::uint64_t offset, std::uint64_t bytes) const {
    std::vector<std::byte> content(bytes);
    const std::vector<Run> all = runs(space, offset, bytes);
    for (std::uint32_t file = 0; file < files_.size(); ++file) {
      std::uint64_t begin = UINT64_MAX, end = 0;
      for (const Run& run : all) {
        if (run.file != file) continue;
        begin = std::min(begin, run.file_offset);
        end = std::max(end, run.file_offset + run.bytes);
      }
      if (end == 0) continue;
      Memory scratch(end - begin);
      files_[file]->read_at(begin, scratch.span());
      for (const Run& run : all) {
        if (run.file == file)
          std::copy_n(scratch.data() + (run.file_offset - begin), run.bytes, &content[run.space_offset - offset]);
      }
    }
    return content;
  }

  std::size_t space_of(const IoRequest& io) const { return stripes_ ? 0 : io.file; }

  void submit_one(std::uint64_t tag) {
    const std::size_t space = below(model_.size());
    IoRequest io{.op = below(2) ? IoOp::kRead : IoOp::kWrite,
                 .priority = below(2) ? IoPriority::kUrgent : IoPriority::kNormal,
                 .file = stripes_ ? kStripedSpace : static_cast<std::uint32_t>(space),
                 .tag = tag};
    Flight flight{.io = {}, .pattern = random_()};
    if (chance(0.05)) {
      io.op = IoOp::kSync;
      for (std::uint32_t f = 0; f < files_.size(); ++f) {
        flight.sync_failed_before |= (stripes_ || f == io.file) && files_[f]->sync_error() != 0;
      }
    } else {
      const std::uint64_t cell = below(kCells);
      std::uint64_t cells = 0;
      const std::uint64_t most = chance(0.1) ? kCells : 1 + below(12);
      while (cells < most && cell + cells < kCells && !taken_[space][cell + cells]) ++cells;
      if (cells == 0) return;
      std::fill_n(taken_[space].begin() + static_cast<std::ptrdiff_t>(cell), cells, true);
      io.offset = first() + cell * cell_;
      io.bytes = cells * cell_;
      io.buffer = memory_of(space, io.offset);
      fill_pattern({io.buffer, io.bytes}, flight.pattern);  // of a read too: what it does not deliver shows
    }
    flight.io = io;
    flights_[tag] = flight;
    queue_->submit(io);
  }

  void wait(double timeout_seconds) {
    std::array<IoCompletion, 8> done;
    const auto room = std::span(done).first(1 + below(done.size()));
    for (const IoCompletion& completion : queue_->wait(room, timeout_seconds)) {
      finish(completion);
      if (::testing::Test::HasFatalFailure()) return;
    }
  }

  void finish(const IoCompletion& completion) {
    const auto node = flights_.extract(completion.tag);
    ASSERT_FALSE(node.empty()) << "request " << completion.tag << " completed twice, or was never submitted";
    const Flight& flight = node.mapped();
    const IoRequest& io = flight.io;
    (completion.error == 0 ? good_ : failed_) += 1;
    if (completion.error != 0) check_error(io, completion);
    if (io.op == IoOp::kSync) {
      failed_syncs_ += completion.error != 0;
      ASSERT_TRUE(completion.error != 0 || !flight.sync_failed_before) << "a sync after a failed one was believed";
      return;
    }
    const std::size_t space = space_of(io);
    const std::uint64_t begin = io.offset - first();
    std::fill_n(taken_[space].begin() + static_cast<std::ptrdiff_t>(begin / cell_), io.bytes / cell_, false);
    std::byte* const model = model_[space].data() + begin;
    const std::vector<std::byte> old(model, model + io.bytes);
    std::vector<std::byte> expected = old;
    if (io.op == IoOp::kWrite) {
      fill_pattern(expected, flight.pattern);
      ASSERT_TRUE(same_bytes({io.buffer, io.bytes}, expected)) << "the buffer of a write was changed";
    }
    spoil(io, old, expected);
    if (io.op == IoOp::kRead) {
      if (completion.error == 0) check_same({io.buffer, io.bytes}, expected, io);
      return;
    }
    if (completion.error != 0) check_old_or_new(io, old, expected);
    std::copy(expected.begin(), expected.end(), model);
  }

  void check_error(const IoRequest& io, const IoCompletion& completion) {
    ASSERT_TRUE(may_fail_) << "error " << completion.error << " from a drive that has none";
    const bool full = io.op == IoOp::kWrite && completion.error == ENOSPC;
    const bool interrupted = io.op == IoOp::kSync && (completion.error == EINTR || completion.error == EAGAIN);
    ASSERT_TRUE(completion.error == EIO || full || interrupted) << completion.error;
    ASSERT_LT(completion.error_file, files_.size());
    if (io.file != kStripedSpace) {
      ASSERT_EQ(completion.error_file, io.file);
    }
    if (io.op == IoOp::kSync) {
      ASSERT_EQ(completion.error, files_[completion.error_file]->sync_error());
      return;
    }
    ASSERT_GT(completion.error_bytes, 0u);
    const std::uint64_t begin = completion.error_offset, end = begin + completion.error_bytes;
    const std::vector<Run> on = runs(space_of(io), io.offset, io.bytes);
    ASSERT_TRUE(std::any_of(on.begin(), on.end(),
                            [&](const Run& run) {
                              return run.file == completion.error_file && run.file_offset <= begin &&
                                     end <= run.file_offset + run.bytes;
                            }))
        << "the place of the error, " << begin << " to " << end << " of file " << completion.error_file
        << ", is outside the request";
  }

  // Does to the request's bytes what the drive is known to have done, and closes the account.
  void spoil(const IoRequest& io, std::span<const std::byte> old, std::span<std::byte> bytes) {
    for (const Run& run : runs(space_of(io), io.offset, io.bytes)) {
      const std::uint64_t at = run.space_offset - io.offset;
      const ByteAt begin{run.file, run.file_offset}, end{run.file, run.file_offset + run.bytes};
      const auto range = [&](auto& map) { return std::pair(map.lower_bound(begin), map.lower_bound(end)); };
      if (io.op == IoOp::kWrite) {
        const auto [from, to] = range(trace_.unstored);
        for (auto lost = from; lost != to; ++lost) {
          const std::uint64_t start = at + lost->first.offset - run.file_offset;
          std::copy_n(old.begin() + static_cast<std::ptrdiff_t>(start), lost->second,
                      bytes.begin() + static_cast<std::ptrdiff_t>(start));
        }
        trace_.unstored.erase(from, to);
      }
      const auto [from, to] = range(trace_.flipped);
      for (auto flip = from; flip != to; ++flip) {
        bytes[at + flip->first.offset - run.file_offset] ^= std::byte{flip->second};
      }
      trace_.flipped.erase(from, to);
    }
  }

  // After a failed write every sector is whole. `expected` becomes what is there.
  void check_old_or_new(const IoRequest& io, std::span<const std::byte> old, std::vector<std::byte>& expected) {
    const std::vector<std::byte> now = stored(space_of(io), io.offset, io.bytes);
    const std::span<const std::byte> is(now), fresh(expected);
    for (std::uint64_t at = 0; at < io.bytes; at += unit_) {
      const auto sector = is.subspan(at, unit_);
      ASSERT_TRUE(same_bytes(sector, old.subspan(at, unit_)) || same_bytes(sector, fresh.subspan(at, unit_)))
          << "byte " << at << " of a failed write of " << io.bytes << " at " << io.offset;
    }
    expected = now;
  }

  static void check_same(std::span<const std::byte> is, std::span<const std::byte> expected, const IoRequest& io) {
    if (same_bytes(is, expected)) return;
    const auto at = std::mismatch(is.begin(), is.end(), expected.begin()).first - is.begin();
    FAIL() << "byte " << at << " of a read of " << io.bytes << " at " << io.offset << " is wrong";
  }

  const IoEngineKind kind_;
  std::mt19937_64 random_;
  Memory& memory_;
  std::vector<std::unique_ptr<File>> files_;
  std::vector<File*> pointers_;
  std::optional<StripeMap> stripes_;
  std::uint64_t unit_ = 1, cell_ = 1, block_ = 1;
  std::uint32_t depth_ = 1, max_requests_ = 1;
  bool may_fail_ = false;
  std::vector<std::vector<std::byte>> model_;  // what the files must hold, by space
  std::array<std::array<bool, kCells>, 3> taken_{};
  std::map<std::uint64_t, Flight> flights_;
  std::uint64_t good_ = 0, failed_ = 0, failed_syncs_ = 0;
  EngineTrace trace_;
  std::unique_ptr<IoQueue> queue_;  // goes first
};

class QueueScheduleTest : public ::testing::TestWithParam<IoEngineKind> {
 protected:
  // Runs schedules with files and memory of their own, until `next_` says that there are enough.
  void work() {
    TempDir dir;
    std::vector<std::filesystem::path> paths;
    for (std::uint64_t i = 0; i < 3; ++i) {
      paths.push_back(dir / ("file" + std::to_string(i)));
      File file = File::open(paths.back(), {.writable = true, .create = true});
      Memory content(kFileBytes);
      content.fill_pattern(seed_ + i);
      file.write_at(0, content.span());
    }
    Memory memory(3 * kCells * kMostCell);
    Totals totals;
    Watchdog watchdog;
    for (std::uint64_t n = next_++; n < kSchedules && !HasFatalFailure(); n = next_++) {
      watchdog.feed(seed_ + n);
      SCOPED_TRACE("SPILLWAY_SEED=" + std::to_string(seed_ + n));
      Schedule(GetParam(), seed_ + n, paths, memory).run(totals);
    }
    std::lock_guard lock(mutex_);
    totals_ += totals;
  }

  const std::uint64_t seed_ = test_seed();
  std::atomic<std::uint64_t> next_ = 0;
  std::mutex mutex_;  // guards the totals
  Totals totals_;
};

TEST_P(QueueScheduleTest, EveryByteIsRightOrAnErrorSaysSo) {
  if (const std::string refusal = refusal_of(GetParam()); !refusal.empty()) GTEST_SKIP() << refusal;
  std::vector<std::thread> workers;
  for (int i = 0; i < kAtATime; ++i) workers.emplace_back([this] { work(); });
  for (std::thread& worker : workers) worker.join();
  if (HasFatalFailure()) return;
  std::printf("%s\n", ::testing::PrintToString(totals_.counts).c_str());
  for (std::size_t i = 0; i < totals_.counts.size(); ++i) {
    EXPECT_GT(totals_.counts[i], 0u) << Totals::kNames[i] << ": what never happened was not tested";
  }
}

INSTANTIATE_TEST_SUITE_P(Engines, QueueScheduleTest, ::testing::ValuesIn(kIoEngines),
                         [](const auto& info) { return std::string(name_of(info.param)); });

}  // namespace
}  // namespace spillway::testing
