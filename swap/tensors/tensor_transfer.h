// Requests that move one tensor between memory and the files of its store, and the threads that wait for them: any
// number. Which tensor moves is decided by tensor_store_moves.cc.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <optional>
#include <span>

#include "swap/extents.h"
#include "swap/store_thread.h"

namespace spillway {

class TensorTransfer : public IoHandler {
 public:
  TensorTransfer(StoreThread& thread, IoOp op) : thread_(thread), op_(op) {}
  ~TensorTransfer() override {
    close();
    wait();
  }

  // Posts what moves `bytes` of memory from or to these parts of the space, the first of them from `skip` bytes on.
  // Offsets, sizes and memory are multiples of kTensorAlignment. Any number of times, before close().
  void add(std::span<const Extent> parts, std::uint64_t skip, std::span<std::byte> memory);
  // Nothing more is added. Any number of times.
  void close();

  bool done() const;
  void wait() const;  // until all is done
  // Of what has failed first.
  struct Failure {
    IoRequest request;
    IoCompletion completion;
  };
  std::optional<Failure> failure() const;
  IoOp op() const noexcept { return op_; }

 private:
  void on_io(const IoRequest& request, const IoCompletion& completion) override;

  StoreThread& thread_;
  const IoOp op_;
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  std::uint64_t pending_ = 1;  // one for close()
  bool closed_ = false;
  std::optional<Failure> failure_;
};

}  // namespace spillway
