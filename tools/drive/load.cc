#include "tools/drive/load.h"

#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <new>

#include "spillway/error.h"
#include "spillway/units.h"

namespace spillway::drive {
namespace {

using Clock = std::chrono::steady_clock;

constexpr double kLookSeconds = 0.05;  // longest wait between two looks at the clock
constexpr double kMostStretch = 4;     // of a window, until it holds enough completions

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

// Where the requests of one kind go on one file: over and over a range of the file, or of the striped space.
class Walk {
 public:
  Walk(std::uint32_t file, const StripeMap* stripes, std::uint64_t begin, std::uint64_t end)
      : file_(file), stripes_(stripes), begin_(begin), end_(end), at_(begin) {}

  struct Step {
    std::uint64_t file_offset, bytes;
  };
  Step next(std::uint64_t request_bytes) {
    StripeMap::Extent run{at_, at_, end_ - at_};
    if (stripes_) run = stripes_->next_on(file_, at_);
    if (run.space_offset >= end_) {
      before_ += end_ - begin_;
      at_ = begin_;
      if (!stripes_) return next(request_bytes);
      run = stripes_->next_on(file_, at_);
    }
    run.bytes = std::min({run.bytes, end_ - run.space_offset, request_bytes});
    at_ = run.space_offset + run.bytes;
    return {run.file_offset, run.bytes};
  }
  std::uint64_t walked() const { return before_ + at_ - begin_; }

 private:
  std::uint32_t file_;
  const StripeMap* stripes_;
  std::uint64_t begin_, end_, at_;
  std::uint64_t before_ = 0;  // in the rounds before this one
};

class Load {
 public:
  Load(std::span<const LoadFile> files, std::span<std::byte> memory, const LoadSpec& spec)
      : spec_(spec), files_(files), memory_(memory), slots_(files.size() * spec_.depth), done_(slots_.size()) {
    SPILLWAY_CHECK(slots_.size() * spec_.block_bytes <= memory.size(), "a place in memory for each request");
    SPILLWAY_CHECK(spec.read_parts + spec.write_parts > 0, "a load reads or writes");
    std::vector<File*> open;
    for (std::uint32_t f = 0; f < files.size(); ++f) {
      open.push_back(files[f].file);
      lanes_.push_back(make_lane(f));
    }
    const std::span<std::byte> regions[] = {memory.first(slots_.size() * spec_.block_bytes)};
    const auto offered = std::span(regions).first(spec.fixed_buffers ? 1 : 0);
    queue_ = IoQueue::create({.engine = spec.engine,
                              .block_bytes = spec.block_bytes,
                              .depth = spec.depth,
                              .max_requests = static_cast<std::uint32_t>(slots_.size())},
                             open, offered);
    result_.engine = queue_->describe();
    result_.fixed_buffers = result_.engine.find(", registered buffers") != std::string::npos;
    result_.latencies_us.reserve(1 << 14);
  }

  LoadResult run() {
    if (spec_.begin) spec_.begin();
    start_ = Clock::now();
    if (spec_.warmup_seconds <= 0) open_window();
    fill();
    while (outstanding_ > 0) {
      const auto completions = queue_->wait(done_, kLookSeconds);
      const auto now = Clock::now();
      for (const IoCompletion& completion : completions) finish(completion, now);
      if (!completions.empty()) mark(now);
      if (submitting_ && spec_.go_on && !spec_.go_on(seconds_since(start_), moved_)) {
        result_.ended_early = true;
        stop();
      }
      if (submitting_ && window_closed_ && !spec_.hold()) stop();
      if (submitting_) fill();
    }
    close_window();
    result_.moved_in_all = moved_;
    return std::move(result_);
  }

 private:
  struct Slot {
    IoOp op = IoOp::kRead;
    std::uint64_t bytes = 0;
    Clock::time_point submitted;
  };
  struct Lane {  // of one file
    Walk reads, writes;
    std::vector<std::uint32_t> free = {};  // slots
    std::uint64_t issued = 0;
  };

  Lane make_lane(std::uint32_t f) const {
    const std::uint64_t begin = spec_.stripes ? 0 : align_up(files_[f].begin, spec_.block_bytes);
    const std::uint64_t end = spec_.stripes ? spec_.space_bytes : align_down(files_[f].bytes, spec_.block_bytes);
    const bool both = spec_.read_parts > 0 && spec_.write_parts > 0;
    const std::uint64_t middle = both ? align_down((begin + end) / 2, spec_.block_bytes) : begin;
    SPILLWAY_CHECK(end > middle && (!both || middle > begin), "room for a request in the file");
    Lane lane{.reads = Walk(f, spec_.stripes, begin, both ? middle : end),
              .writes = Walk(f, spec_.stripes, middle, end),
              .free = {}};
    for (std::uint32_t slot = spec_.depth; slot-- > 0;) lane.free.push_back(f * spec_.depth + slot);
    return lane;
  }

  // Keeps every file's requests at their number.
  void fill() {
    for (std::uint32_t f = 0; f < lanes_.size(); ++f) {
      while (submitting_ && !lanes_[f].free.empty() && !ahead(f)) submit(f);
    }
  }

  // A striped transfer is done when its slowest part is: no file may run away from the others.
  bool ahead(std::uint32_t f) const {
    if (!spec_.stripes) return false;
    const auto walked = [](const Lane& lane) { return lane.reads.walked() + lane.writes.walked(); };
    std::uint64_t least = kNoLimit;
    for (const Lane& lane : lanes_) least = std::min(least, walked(lane));
    const std::uint64_t leash = 4 * lanes_.size() * spec_.depth * spec_.block_bytes + 64 * spec_.stripes->unit_bytes();
    return walked(lanes_[f]) > least + leash;
  }

  void submit(std::uint32_t f) {
    Lane& lane = lanes_[f];
    const std::uint64_t parts = spec_.read_parts + spec_.write_parts;
    const bool write = (lane.issued + 1) * spec_.write_parts / parts != lane.issued * spec_.write_parts / parts;
    if (submitted_ + spec_.block_bytes > spec_.most_bytes) return stop();
    if (write && result_.written_in_all + spec_.block_bytes > spec_.most_written_bytes) return stop();
    const Walk::Step step = (write ? lane.writes : lane.reads).next(spec_.block_bytes);
    const std::uint32_t slot = lane.free.back();
    lane.free.pop_back();
    ++lane.issued;
    ++outstanding_;
    submitted_ += step.bytes;
    if (write) result_.written_in_all += step.bytes;
    slots_[slot] = {write ? IoOp::kWrite : IoOp::kRead, step.bytes, Clock::now()};
    queue_->submit({.op = slots_[slot].op,
                    .file = f,
                    .offset = step.file_offset + (spec_.stripes ? files_[f].begin : 0),
                    .buffer = memory_.data() + slot * spec_.block_bytes,
                    .bytes = step.bytes,
                    .tag = slot});
  }

  void finish(const IoCompletion& completion, Clock::time_point now) {
    const Slot& slot = slots_[completion.tag];
    if (completion.error != 0) {
      throw transfer_error(slot.op, *files_[completion.error_file].file, completion,
                           "check the drive; the kernel's log may say more");
    }
    lanes_[completion.tag / spec_.depth].free.push_back(static_cast<std::uint32_t>(completion.tag));
    --outstanding_;
    moved_ += slot.bytes;
    if (!window_open_) return;
    (slot.op == IoOp::kWrite ? result_.written_bytes : result_.read_bytes) += slot.bytes;
    result_.latencies_us.push_back(std::chrono::duration<float, std::micro>(now - slot.submitted).count());
    window_end_ = now;
  }

  // After a batch of completions: does the window open, or close?
  void mark(Clock::time_point now) {
    if (!window_open_ && !window_closed_) {
      const double since_start = std::chrono::duration<double>(now - start_).count();
      // A fast drive may reach its limit of bytes before the warm-up is over.
      const bool warm = since_start >= spec_.warmup_seconds || moved_ >= most_bytes() / 4;
      if (warm && moved_ >= spec_.block_bytes * spec_.depth) open_window();
      return;
    }
    const double inside = std::chrono::duration<double>(now - window_start_).count();
    if (!window_open_ || !submitting_ || inside < spec_.seconds) return;
    // Completions come in bursts as large as what is in flight: a window that holds less than one says little.
    if (result_.latencies_us.size() >= slots_.size() || inside >= kMostStretch * spec_.seconds) {
      spec_.hold ? close_window() : stop();
    }
  }

  // That can move before one of the limits ends the load.
  std::uint64_t most_bytes() const {
    if (spec_.write_parts == 0 || spec_.most_written_bytes == kNoLimit) return spec_.most_bytes;
    const std::uint64_t parts = spec_.read_parts + spec_.write_parts;
    return std::min(spec_.most_bytes, spec_.most_written_bytes / spec_.write_parts * parts);
  }

  void open_window() {
    window_open_ = true;
    window_start_ = window_end_ = Clock::now();
    cpu_start_ = process_cpu_seconds();
  }

  // With a warm-up the window is about the steady state, so the drain stays outside it.
  void stop() {
    submitting_ = false;
    if (spec_.warmup_seconds > 0) close_window();
  }

  void close_window() {
    if (window_closed_) return;
    window_closed_ = true;
    if (!window_open_) return;
    window_open_ = false;
    result_.seconds = std::chrono::duration<double>(window_end_ - window_start_).count();
    result_.cpu_seconds = process_cpu_seconds() - cpu_start_;
  }

  const LoadSpec& spec_;
  const std::span<const LoadFile> files_;
  const std::span<std::byte> memory_;
  std::vector<Slot> slots_;
  std::vector<IoCompletion> done_;
  std::vector<Lane> lanes_;
  LoadResult result_;
  bool submitting_ = true, window_open_ = false, window_closed_ = false;
  std::uint64_t outstanding_ = 0, submitted_ = 0, moved_ = 0;
  Clock::time_point start_, window_start_, window_end_;
  double cpu_start_ = 0;
  std::unique_ptr<IoQueue> queue_;  // last: it waits for what is in flight before anything else goes
};

}  // namespace

double LoadResult::cpu_seconds_per_gib() const {
  const auto bytes = static_cast<double>(read_bytes + written_bytes);
  return bytes > 0 ? cpu_seconds / bytes * static_cast<double>(kGiB) : 0;
}

double LoadResult::latency_us(double share) const {
  if (latencies_us.empty()) return 0;
  std::vector<float> sorted = latencies_us;
  const auto last = static_cast<double>(sorted.size() - 1);
  const auto at = sorted.begin() + static_cast<std::ptrdiff_t>(std::ceil(share * last));
  std::nth_element(sorted.begin(), at, sorted.end());
  return *at;
}

LoadMemory::LoadMemory(std::uint64_t bytes) {
  void* memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  ::madvise(memory, bytes, MADV_HUGEPAGE);
  bytes_ = {static_cast<std::byte*>(memory), bytes};
  // splitmix64 (Steele, Lea, Flood 2014): a word is a hash of its number.
  for (std::uint64_t i = 0; i + sizeof(std::uint64_t) <= bytes; i += sizeof(std::uint64_t)) {
    std::uint64_t word = (i + 1) * 0x9e3779b97f4a7c15;
    word = (word ^ (word >> 30)) * 0xbf58476d1ce4e5b9;
    word = (word ^ (word >> 27)) * 0x94d049bb133111eb;
    word ^= word >> 31;
    std::memcpy(bytes_.data() + i, &word, sizeof word);
  }
}

LoadMemory::~LoadMemory() { ::munmap(bytes_.data(), bytes_.size()); }

LoadResult run_load(std::span<const LoadFile> files, std::span<std::byte> memory, const LoadSpec& spec) {
  return Load(files, memory, spec).run();
}

double process_cpu_seconds() {
  struct rusage usage {};
  ::getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& t) {
    return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_usec) * 1e-6;
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

double median(std::vector<double> values) {
  if (values.empty()) return 0;
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  if (values.size() % 2 == 1) return *middle;
  return (*middle + *std::max_element(values.begin(), middle)) / 2;
}

}  // namespace spillway::drive
