#include "swap/tensors/tensor_transfer.h"

#include <utility>

#include "swap/tensors/tensor_table.h"

namespace spillway {

void TensorTransfer::add(std::span<const Extent> parts, std::uint64_t skip, std::span<std::byte> memory) {
  for_each_run(parts, skip, memory, [this](std::uint64_t offset, std::span<std::byte> piece) {
    {
      const std::lock_guard lock(mutex_);
      ++pending_;
    }
    thread_.post({.op = op_, .file = kStripedSpace, .offset = offset, .buffer = piece.data(), .bytes = piece.size()},
                 *this);
  });
}

// pending_ starts at one for the transfer itself, so that it is not over before its last request was added.
void TensorTransfer::close() {
  const std::lock_guard lock(mutex_);
  if (std::exchange(closed_, true)) return;
  if (--pending_ == 0) changed_.notify_all();
}

bool TensorTransfer::done() const {
  const std::lock_guard lock(mutex_);
  return pending_ == 0;
}

void TensorTransfer::wait() const {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return pending_ == 0; });
}

std::optional<TensorTransfer::Failure> TensorTransfer::failure() const {
  const std::lock_guard lock(mutex_);
  return failure_;
}

void TensorTransfer::on_io(const IoRequest& request, const IoCompletion& completion) {
  const std::lock_guard lock(mutex_);
  if (completion.error != 0 && !failure_) failure_ = {request, completion};
  if (--pending_ == 0) changed_.notify_all();  // under the lock: who waits may destroy this
}

}  // namespace spillway
