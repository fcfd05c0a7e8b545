// The io_uring engine: one ring, one issuer, registered buffers and files where the kernel grants them.
#include <fmt/format.h>
#include <liburing.h>
#include <poll.h>
#include <string.h>
#include <sys/resource.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <fstream>
#include <iterator>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "aio/io_engine.h"
#include "aio/wake_event.h"
#include "spillway/error.h"
#include "spillway/log.h"
#include "spillway/units.h"

namespace spillway {
namespace {

// The kernel takes at most 1 GiB in one registered buffer (io_uring_register(2), IORING_REGISTER_BUFFERS).
constexpr std::uint64_t kLargestRegistered = kGiB;
constexpr std::size_t kMostRegistered = 1 << 14;  // and so many, IORING_MAX_REG_BUFFERS
// Places in the kernel's table for each region that may come later.
constexpr std::uint32_t kPlacesOfRegion = 4;
// user_data of the poll on the wake event; pieces use their slot, liburing keeps the largest value for itself.
constexpr std::uint64_t kWakeTag = ~std::uint64_t{0} - 1;

std::string errno_name(int error) {
  const char* name = strerrorname_np(error);
  return name ? name : std::to_string(error);
}

// The sysctl kernel.io_uring_disabled (Linux 6.6): 0 for everybody, 1 for a group, 2 for nobody. -1: not there.
int io_uring_disabled() {
  int value = -1;
  std::ifstream("/proc/sys/kernel/io_uring_disabled") >> value;
  return value;
}

std::string why_no_ring(int error) {
  switch (error) {
    case EPERM:
    case EACCES:
      if (const int value = io_uring_disabled(); value > 0) return fmt::format("kernel.io_uring_disabled is {}", value);
      return "a container's seccomp profile blocks it";
    case ENOSYS: return "the kernel has no io_uring, or a seccomp profile hides it";
    case ENOMEM: return "the locked memory limit (ulimit -l) or memory is too small";
    case EMFILE:
    case ENFILE: return "the open files limit (ulimit -n) is reached";
    default: return strerrordesc_np(error);
  }
}

[[noreturn]] void throw_refused(int error) {
  throw Error(Code::kUnsupported, {"io_uring", fmt::format("{} ({})", errno_name(error), why_no_ring(error)), 0,
                                   "choose another engine or allow io_uring"});
}

[[noreturn]] void throw_broken(const char* call, int error) {
  throw Error(Code::kIo,
              {"io_uring", fmt::format("{} failed", call), error, "the queue cannot go on; see the kernel log"});
}

// Calls what needs locked memory; returns the errno value, 0 on success. A ring closed a moment ago still counts
// against the limit until the kernel gets to freeing it, so "no memory" is asked again for a while.
template <class Call>
int patiently(Call call) {
  constexpr int kTries = 20;
  int error = -call();
  for (int tries = 1; error == ENOMEM && tries < kTries; ++tries) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
    error = -call();
  }
  return error;
}

// Held while a ring is mapped or unmapped. liburing makes these system calls itself, so that thread sanitizer does not
// see them; by this it sees that a ring comes after the end of one that had the same memory.
std::mutex& ring_memory() {
  static std::mutex mutex;
  return mutex;
}

// Bytes this process may lock; nothing when there is no limit.
std::optional<std::uint64_t> lock_limit() {
  struct rlimit limit;
  if (::getrlimit(RLIMIT_MEMLOCK, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return std::nullopt;
  return limit.rlim_cur;
}

// Setup flags from most to least wanted. With deferred task run completions are worked off inside our own wait, not by
// interrupting the thread; it needs a single issuer (Linux 6.1). Cooperative task run (5.19) is the next best.
struct Setup {
  unsigned flags;
  const char* name;
};
constexpr std::array kSetups = {
    Setup{IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN, "single issuer, deferred task run"},
    Setup{IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_COOP_TASKRUN, "single issuer, cooperative task run"},
    Setup{IORING_SETUP_COOP_TASKRUN, "cooperative task run"},
    Setup{0, "plain ring"},
};

class UringEngine final : public IoEngine {
 public:
  explicit UringEngine(const IoEngineOptions& options)
      : entries_(options.depth + 2), piece_bytes_(options.block_bytes) {
    fds_.resize(std::max<std::size_t>(options.files.size(), options.max_files), -1);  // -1: a place without a file
    for (std::size_t i = 0; i < options.files.size(); ++i) fds_[i] = options.files[i]->fd();
    open_ring();
    try {
      check_abilities();
      register_files();
      const auto given = static_cast<std::uint32_t>(options.regions.size());
      register_regions(options.regions, options.max_regions > given ? options.max_regions - given : 0);
    } catch (...) {
      close_ring();
      throw;
    }
  }

  // Closing a ring frees it in the background. What it holds of the locked memory limit and of the files (their locks,
  // the space of a removed one) is given back at once, since the next queue may want the same.
  ~UringEngine() override {
    if (buffers_registered_) io_uring_unregister_buffers(&ring_);
    if (files_registered_) io_uring_unregister_files(&ring_);
    close_ring();
  }
  UringEngine(const UringEngine&) = delete;
  UringEngine& operator=(const UringEngine&) = delete;

  std::size_t submit(std::span<const IoPiece> pieces) override {
    std::size_t taken = 0;
    // One entry stays free for the poll on the wake event.
    while (taken < pieces.size() && io_uring_sq_space_left(&ring_) > 1) prepare(pieces[taken++]);
    flush();
    return taken;
  }

  Reaped reap(std::span<IoResult> out, double timeout_seconds) override {
    if (!polling_) poll_wake_event();
    if (io_uring_cq_ready(&ring_) == 0) wait_for_one(timeout_seconds);

    Reaped reaped;
    unsigned head = 0, seen = 0;
    io_uring_cqe* cqe = nullptr;
    io_uring_for_each_cqe(&ring_, head, cqe) {
      if (cqe->user_data == kWakeTag) {
        polling_ = false;
        reaped.woken = event_.clear();
      } else if (reaped.count < out.size()) {
        out[reaped.count++] = {static_cast<std::uint32_t>(cqe->user_data), cqe->res};
      } else {
        break;
      }
      ++seen;
    }
    io_uring_cq_advance(&ring_, seen);
    return reaped;
  }

  void wake() noexcept override { event_.set(); }

  std::string describe() const override {
    return fmt::format("io_uring ({}, {} buffers, {} files)", setup_, buffers_.empty() ? "unregistered" : "registered",
                       files_registered_ ? "registered" : "unregistered");
  }

  void set_file(std::uint32_t index, const File* file) override {
    const int fd = file ? file->fd() : -1;
    if (files_registered_) {
      if (const int result = io_uring_register_files_update(&ring_, index, &fd, 1); result < 0) {
        throw Error(Code::kIo, {file ? file->path().string() : "registered files", "the ring does not take it", -result,
                                "make a queue anew with this file"});
      }
    }
    fds_.at(index) = fd;
  }

  bool add_region(std::span<std::byte> region) override {
    const std::vector<iovec> runs = runs_of(region);
    if (runs.size() > free_places_.size()) {
      log_plain(region.size(), fmt::format("its {} parts are more than the {} places that the kernel's table has left",
                                           runs.size(), free_places_.size()));
      return false;
    }
    const std::size_t before = buffers_.size();
    for (const iovec& run : runs) {
      const unsigned place = free_places_.back();
      const int error = as_limited(region.size(), [&] {
        return std::min(0, io_uring_register_buffers_update_tag(&ring_, place, &run, nullptr, 1));
      });
      if (error != 0) {
        log_refused(region.size(), error);
        while (buffers_.size() > before) forget(buffers_.size() - 1);
        return false;
      }
      free_places_.pop_back();
      keep(run, place);
    }
    std::ranges::sort(buffers_, {}, &RegisteredBuffer::begin);
    return true;
  }

  void remove_region(std::span<std::byte> region) override {
    for (std::size_t i = buffers_.size(); i-- > 0;) {
      if (buffers_[i].begin >= region.data() && buffers_[i].end <= region.data() + region.size()) forget(i);
    }
  }

 private:
  struct RegisteredBuffer {
    const std::byte* begin;
    const std::byte* end;
    unsigned place;  // in the kernel's table
  };

  void open_ring() {
    for (const Setup& setup : kSetups) {
      const int error = patiently([&] {
        const std::lock_guard lock(ring_memory());
        return io_uring_queue_init(entries_, &ring_, setup.flags);
      });
      if (error == 0) {
        setup_ = setup.name;
        return;
      }
      // EINVAL is how an older kernel says that it does not know a flag; anything else will not get better.
      if (error != EINVAL || setup.flags == 0) throw_refused(error);
      log(LogLevel::kInfo,
          fmt::format("io_uring: the kernel does not grant '{}'; completions cost more CPU", setup.name));
    }
  }

  void close_ring() {
    const std::lock_guard lock(ring_memory());
    io_uring_queue_exit(&ring_);
  }

  void check_abilities() {
    // Without it every wait with a timeout needs a timer request of its own.
    if ((ring_.features & IORING_FEAT_EXT_ARG) == 0) {
      throw Error(Code::kUnsupported, {"io_uring", "the kernel is older than 5.11", 0, "choose another engine"});
    }
    // A sandbox may allow the ring and refuse its use; the first request, the poll on the wake event, shows it.
    poll_wake_event();
    const int result = io_uring_submit(&ring_);
    if (result < 0 && !passes(-result)) throw_refused(-result);
  }

  void register_files() {
    if (fds_.empty()) return;
    const int error = -io_uring_register_files(&ring_, fds_.data(), static_cast<unsigned>(fds_.size()));
    files_registered_ = error == 0;
    if (error != 0) {
      log(LogLevel::kWarning,
          fmt::format("registered files: {}; plain files, which cost less than 1 % more CPU", errno_name(error)));
    }
  }

  // A region above the kernel's 1 GiB is registered in runs; neighbours overlap by a piece, so that none straddles two.
  std::vector<iovec> runs_of(std::span<std::byte> region) const {
    std::vector<iovec> runs;
    while (!region.empty()) {
      const auto run = region.first(std::min<std::uint64_t>(region.size(), kLargestRegistered));
      runs.push_back({run.data(), run.size()});
      const bool last = run.size() == region.size();
      region = region.subspan(last || 2 * piece_bytes_ > run.size() ? run.size() : run.size() - piece_bytes_);
    }
    return runs;
  }

  // A table of the runs of these, with places that stay empty for those that `later` regions have (Linux 5.13).
  void register_regions(std::span<const std::span<std::byte>> regions, std::uint32_t later) {
    std::vector<iovec> table;
    std::uint64_t total = 0;
    for (const std::span<std::byte> region : regions) {
      total += region.size();
      const std::vector<iovec> runs = runs_of(region);
      table.insert(table.end(), runs.begin(), runs.end());
    }
    const std::size_t filled = table.size();
    table.resize(filled + std::min<std::size_t>(std::size_t{later} * kPlacesOfRegion, kMostRegistered), iovec{});
    if (table.empty()) return;
    const auto call = [&] {
      return io_uring_register_buffers(&ring_, table.data(), static_cast<unsigned>(table.size()));
    };
    int error = as_limited(total, call);
    if (error != 0) log_refused(total, error);
    if (error != 0 && filled > 0 && later > 0) {  // so that at least what comes later may find its place
      table.assign(table.size(), iovec{});
      error = -call();
    }
    if (error != 0) return;
    buffers_registered_ = true;
    buffers_.reserve(table.size());
    free_places_.reserve(table.size());
    for (auto place = static_cast<unsigned>(table.size()); place-- > 0;) {
      if (table[place].iov_base == nullptr) {
        free_places_.push_back(place);
      } else {
        keep(table[place], place);
      }
    }
    std::ranges::sort(buffers_, {}, &RegisteredBuffer::begin);
  }

  // Calls what locks so much memory; returns the errno value, 0 on success. What the limit cannot hold is asked once.
  template <class Call>
  static int as_limited(std::uint64_t bytes, Call call) {
    const std::optional<std::uint64_t> limit = lock_limit();
    return !limit || *limit >= bytes ? patiently(call) : -call();
  }

  void log_refused(std::uint64_t bytes, int error) const {
    const std::optional<std::uint64_t> limit = error == ENOMEM ? lock_limit() : std::nullopt;
    if (!limit) return log_plain(bytes, errno_name(error));
    log_plain(bytes, fmt::format("{}, RLIMIT_MEMLOCK is {} KiB", errno_name(error), *limit / kKiB),
              "; raise it with ulimit -l, LimitMEMLOCK= or CAP_IPC_LOCK");
  }

  static void log_plain(std::uint64_t bytes, const std::string& why, const char* remedy = "") {
    log(LogLevel::kWarning, fmt::format("registered buffers ({} MiB): {}; plain buffers, about {} % more CPU{}",
                                        div_up(bytes, kMiB), why, kPlainBuffersPrice, remedy));
  }

  void keep(const iovec& run, unsigned place) {
    const auto* begin = static_cast<const std::byte*>(run.iov_base);
    buffers_.push_back({begin, begin + run.iov_len, place});
  }

  // The kernel lets go of it when what is in flight with it is done. A place that it does not empty is not used again.
  void forget(std::size_t index) {
    const unsigned place = buffers_[index].place;
    const iovec nothing{};
    buffers_.erase(buffers_.begin() + static_cast<std::ptrdiff_t>(index));
    if (io_uring_register_buffers_update_tag(&ring_, place, &nothing, nullptr, 1) >= 0) free_places_.push_back(place);
  }

  // The registered buffer that holds all of the piece, or -1: then the kernel pins its pages for this one transfer. Of
  // the runs of a region only the last to begin before the piece can: it ends after all that begin before it.
  int registered_index(const IoPiece& piece) const noexcept {
    const auto after = std::upper_bound(buffers_.begin(), buffers_.end(), piece.buffer,
                                        [](const std::byte* at, const RegisteredBuffer& b) { return at < b.begin; });
    if (after == buffers_.begin() || piece.buffer + piece.bytes > std::prev(after)->end) return -1;
    return static_cast<int>(std::prev(after)->place);
  }

  void prepare(const IoPiece& piece) {
    io_uring_sqe* const sqe = io_uring_get_sqe(&ring_);
    SPILLWAY_CHECK(sqe != nullptr, "the submission ring has room for every piece in flight");
    const int file = files_registered_ ? static_cast<int>(piece.file) : fds_[piece.file];
    const auto bytes = static_cast<unsigned>(piece.bytes);
    const int buffer = piece.op == IoOp::kSync ? -1 : registered_index(piece);
    switch (piece.op) {
      case IoOp::kRead:
        if (buffer >= 0) {
          io_uring_prep_read_fixed(sqe, file, piece.buffer, bytes, piece.offset, buffer);
        } else {
          io_uring_prep_read(sqe, file, piece.buffer, bytes, piece.offset);
        }
        break;
      case IoOp::kWrite:
        if (buffer >= 0) {
          io_uring_prep_write_fixed(sqe, file, piece.buffer, bytes, piece.offset, buffer);
        } else {
          io_uring_prep_write(sqe, file, piece.buffer, bytes, piece.offset);
        }
        break;
      case IoOp::kSync: io_uring_prep_fsync(sqe, file, IORING_FSYNC_DATASYNC); break;
    }
    if (files_registered_) io_uring_sqe_set_flags(sqe, IOSQE_FIXED_FILE);
    io_uring_sqe_set_data64(sqe, piece.slot);
  }

  // Hands prepared entries to the kernel. What it refuses for now (no memory, completions unread) stays in the ring and
  // goes with the next call.
  void flush() {
    if (io_uring_sq_ready(&ring_) == 0) return;
    const int result = io_uring_submit(&ring_);
    if (result < 0 && !passes(-result)) throw_broken("io_uring_enter", -result);
  }

  void poll_wake_event() {
    io_uring_sqe* const sqe = io_uring_get_sqe(&ring_);
    if (sqe == nullptr) return;  // the ring is full of what the kernel refused for now; next reap tries again
    io_uring_prep_poll_add(sqe, event_.fd(), POLLIN);
    io_uring_sqe_set_data64(sqe, kWakeTag);
    polling_ = true;
  }

  void wait_for_one(double timeout_seconds) {
    int result = 0;
    if (timeout_seconds == 0) {
      result = io_uring_submit_and_get_events(&ring_);
    } else {
      auto spec = to_timespec<__kernel_timespec>(timeout_seconds);
      io_uring_cqe* first = nullptr;
      result = io_uring_submit_and_wait_timeout(&ring_, &first, 1, timeout_seconds < 0 ? nullptr : &spec, nullptr);
    }
    if (result >= 0 || -result == ETIME) return;
    if (!passes(-result)) throw_broken("io_uring_enter", -result);
    // The kernel is short of memory: nothing was waited for, so we give it a moment.
    if (-result != EINTR && io_uring_cq_ready(&ring_) == 0 && timeout_seconds != 0) event_.wait(1e-3);
  }

  static bool passes(int error) noexcept { return error == EINTR || error == EAGAIN || error == EBUSY; }

  const unsigned entries_;
  const std::uint64_t piece_bytes_;
  io_uring ring_{};
  const char* setup_ = "";
  std::vector<int> fds_;
  std::vector<RegisteredBuffer> buffers_;  // sorted by address
  std::vector<unsigned> free_places_;      // of the kernel's table of buffers, which there is or is not
  bool buffers_registered_ = false, files_registered_ = false;
  bool polling_ = false;  // a poll on the wake event is prepared or in the kernel
  WakeEvent event_;
};

}  // namespace

std::unique_ptr<IoEngine> make_uring_engine(const IoEngineOptions& options) {
  return std::make_unique<UringEngine>(options);
}

}  // namespace spillway
