// The Linux AIO engine (io_submit(2)): for kernels and sandboxes without io_uring. Every request pins its pages anew,
// and every batch and every wait is a system call of its own.
//
//   submit ──► io_submit ──► the kernel's completion ring ──► io_getevents ──► reap
//
// Truly asynchronous only for direct I/O: a buffered request would be performed inside io_submit.
#include <fmt/format.h>
#include <libaio.h>
#include <poll.h>
#include <string.h>

#include <algorithm>
#include <cerrno>
#include <string>
#include <utility>
#include <vector>

#include "aio/fixed_ring.h"
#include "aio/io_engine.h"
#include "aio/wake_event.h"
#include "spillway/error.h"

namespace spillway {
namespace {

[[noreturn]] void refuse(std::string happened) {
  throw Error(Code::kUnsupported, {"libaio", std::move(happened), 0, "choose the threads engine"});
}

std::string why_refused(int error) {
  switch (error) {
    case EAGAIN: return "EAGAIN (all of fs.aio-max-nr is taken)";
    case ENOSYS: return "ENOSYS (the kernel has no AIO, or a seccomp profile hides it)";
    case EPERM:
    case EACCES: return fmt::format("{} (a container's seccomp profile blocks it)", strerrorname_np(error));
    default: return fmt::format("{} ({})", strerrorname_np(error), strerrordesc_np(error));
  }
}

class LibaioEngine final : public IoEngine {
 public:
  explicit LibaioEngine(const IoEngineOptions& options)
      : blocks_(options.depth), events_(options.depth + 1), refused_(options.depth) {
    fds_.resize(std::max<std::size_t>(options.files.size(), options.max_files), -1);
    for (std::uint32_t i = 0; i < options.files.size(); ++i) set_file(i, options.files[i]);
    pointers_.reserve(options.depth);
    if (const int error = -io_setup(static_cast<int>(options.depth) + 1, &context_); error != 0) {
      refuse(why_refused(error));
    }
    if (const int error = -poll_wake_event(); error > 0) {
      io_destroy(context_);
      // A kernel before 4.18 does not know this request; nothing else could end a wait.
      refuse(error == EINVAL ? "the kernel is older than 4.18 and cannot be woken" : why_refused(error));
    }
  }

  ~LibaioEngine() override { io_destroy(context_); }
  LibaioEngine(const LibaioEngine&) = delete;
  LibaioEngine& operator=(const LibaioEngine&) = delete;

  std::size_t submit(std::span<const IoPiece> pieces) override {
    if (blocks_.size() < pieces.size()) pieces = pieces.first(blocks_.size());
    pointers_.clear();
    for (const IoPiece& piece : pieces) pointers_.push_back(prepare(piece));
    std::size_t taken = 0;
    while (taken < pieces.size()) {
      const int result = io_submit(context_, static_cast<long>(pieces.size() - taken), pointers_.data() + taken);
      if (result > 0) {
        taken += static_cast<std::size_t>(result);
      } else if (result == 0 || -result == EAGAIN || -result == EINTR) {
        break;  // the kernel is short of room: the rest is offered again
      } else {
        refused_.push({pieces[taken].slot, result});  // this very request cannot be: that is its result
        ++taken;
      }
    }
    return taken;
  }

  Reaped reap(std::span<IoResult> out, double timeout_seconds) override {
    Reaped reaped;
    while (reaped.count < out.size() && !refused_.empty()) out[reaped.count++] = refused_.pop();
    if (!polling_) poll_wake_event();
    auto spec = to_timespec<struct timespec>(reaped.count > 0 ? 0 : timeout_seconds);
    const bool for_ever = timeout_seconds < 0 && reaped.count == 0;
    const auto most = static_cast<long>(std::min(events_.size(), out.size() - reaped.count));
    if (most == 0) return reaped;
    const int got = io_getevents(context_, 1, most, events_.data(), for_ever ? nullptr : &spec);
    if (got < 0 && -got != EINTR) {
      throw Error(Code::kIo, {"libaio", "io_getevents failed", -got, "the queue cannot go on; see the kernel log"});
    }
    for (int i = 0; i < got; ++i) {
      const io_event& event = events_[static_cast<std::size_t>(i)];
      if (event.data == &wake_block_) {
        polling_ = false;
        reaped.woken = event_.clear();
      } else {
        out[reaped.count++] = {static_cast<std::uint32_t>(reinterpret_cast<std::uintptr_t>(event.data)),
                               static_cast<std::int64_t>(event.res)};
      }
    }
    return reaped;
  }

  void wake() noexcept override { event_.set(); }

  std::string describe() const override { return "libaio"; }

  void set_file(std::uint32_t index, const File* file) override {
    if (file && !file->direct()) refuse(file->path().string() + " has no direct I/O, so a request would block");
    fds_.at(index) = file ? file->fd() : -1;
  }
  bool add_region(std::span<std::byte>) override { return false; }
  void remove_region(std::span<std::byte>) override {}

 private:
  // A piece's control block is its slot's: a slot holds one piece at a time.
  iocb* prepare(const IoPiece& piece) {
    iocb* const block = &blocks_.at(piece.slot);
    const int fd = fds_[piece.file];
    const auto offset = static_cast<long long>(piece.offset);
    switch (piece.op) {
      case IoOp::kRead: io_prep_pread(block, fd, piece.buffer, piece.bytes, offset); break;
      case IoOp::kWrite: io_prep_pwrite(block, fd, piece.buffer, piece.bytes, offset); break;
      case IoOp::kSync: io_prep_fdsync(block, fd); break;
    }
    block->data = reinterpret_cast<void*>(static_cast<std::uintptr_t>(piece.slot));
    return block;
  }

  // Returns io_submit's result. Not taken for want of room: the next reap tries again.
  int poll_wake_event() {
    io_prep_poll(&wake_block_, event_.fd(), POLLIN);
    wake_block_.data = &wake_block_;
    iocb* one = &wake_block_;
    const int result = io_submit(context_, 1, &one);
    polling_ = result == 1;
    return result;
  }

  io_context_t context_ = nullptr;
  std::vector<int> fds_;
  std::vector<iocb> blocks_;     // by slot
  std::vector<iocb*> pointers_;  // to the blocks of one submit
  std::vector<io_event> events_;
  FixedRing<IoResult> refused_;  // by io_submit itself, not reaped yet
  iocb wake_block_{};
  bool polling_ = false;
  WakeEvent event_;
};

}  // namespace

std::unique_ptr<IoEngine> make_libaio_engine(const IoEngineOptions& options) {
  return std::make_unique<LibaioEngine>(options);
}

}  // namespace spillway
