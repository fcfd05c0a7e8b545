// Streams of CUDA whose data NCCL moves; private to libspillway_nccl.so.
//
// NCCL is asked not to block: where a call of its has to connect ranks first, it says that it is at it, and the caller
// asks again until it is done, or until the communicator's thread has abandoned it. One lock is around all of NCCL's
// calls and is never held while one waits.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <nccl.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

#include "kernels/cuda/context.h"
#include "src/comm/collective_queue.h"
#include "src/comm/nccl_plugin.h"

namespace spillway::cuda {

// Of the GPU of the thread that makes it.
class NcclMover final : public StreamMover {
 public:
  explicit NcclMover(const NcclOptions& options);
  ~NcclMover() override;
  void connect(const NcclId& id);

  std::string library() const override;
  void enqueue(std::uint64_t number, const Collective& call, Stream& stream) noexcept override;
  bool has_come(std::uint64_t number) const override;
  bool is_over(std::uint64_t number) const override;
  std::uint64_t marks() const override;
  void open_gates(std::uint64_t below) override;
  std::string failure() override;
  void abandon() noexcept override;
  bool close() noexcept override;

 private:
  using Mark = std::uint32_t;  // of a collective's number, from 1; counts on beyond 2^32
  static constexpr std::uint64_t kPlaces = CollectiveQueue::kCalls;
  // In host memory that the GPU reads and writes.
  struct Marks {
    Mark gates;  // those below are open
    std::array<Mark, kPlaces> come, pieces, over;
  };
  using Lock = std::unique_lock<std::mutex>;
  struct Abandoned {};
  struct Piece {
    const Collective& call;
    cudaStream_t stream;
    Mark& mark;
    Mark& written;  // to it, with what is enqueued
    Lock& lock;
  };

  static Mark mark_of(std::uint64_t number) noexcept { return static_cast<Mark>(number + 1); }
  static Mark seen(const Mark& mark) noexcept;
  void write(Mark& mark, Mark value, cudaStream_t stream) const;
  void move(const Piece& piece);
  void gather(const Piece& piece);
  void add_fastest(const Piece& piece);
  void add_in_tree(const Piece& piece);
  void broadcast(const Piece& piece);
  // The chunk's part of a rank's slice.
  struct Part {
    std::byte* data;
    std::uint64_t bytes;
  };
  Part part(const Collective& call, std::uint32_t rank, std::uint64_t chunk, std::uint64_t chunk_bytes) const;
  template <typename Calls>
  void group(const Piece& piece, Calls calls);  // one piece, with its mark
  template <typename Move>
  void slice_by_slice(const Piece& piece, Move move);
  void wait_accepted(ncclResult_t result, const char* what, Lock& lock);
  ncclResult_t state() const;  // of what NCCL is at
  void fail(const std::string& why);
  void poll_health();
  void release() noexcept;

  const Context context_ = Context::of_this_thread();
  const std::uint32_t rank_, ranks_;
  const TransferLimits limits_;
  const std::chrono::duration<double> patience_;
  const std::uint64_t tree_chunk_bytes_, slice_chunk_bytes_;
  decltype(&cuStreamWriteValue32) write_value_ = nullptr;
  decltype(&cuStreamWaitValue32) wait_value_ = nullptr;
  Marks* marks_ = nullptr;
  std::byte* scratch_ = nullptr;
  cudaEvent_t added_ = nullptr;     // what was in scratch memory, whatever stream it was for
  cudaStream_t watched_ = nullptr;  // nothing runs there; it says whether the GPU works
  std::chrono::steady_clock::time_point polled_;

  mutable std::mutex mutex_;  // guards what follows, and calls of NCCL's
  ncclComm_t comm_ = nullptr;
  bool told_remote_ = false;
  std::array<Mark, kPlaces> enqueued_{}, pieces_{};
  std::uint64_t latest_ = 0;
  std::string failure_;
  std::atomic<bool> abandoned_ = false, failed_ = false, gpu_failed_ = false;
  std::shared_ptr<std::atomic<bool>> aborted_ = std::make_shared<std::atomic<bool>>(false);
};

}  // namespace spillway::cuda
