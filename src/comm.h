// The Communicator seam: what ranks tell each other. `self` is one rank; implementations over a real network hand these
// calls to a library's collectives, there are none of our own.
//
// Collectives on device memory are in place and in stream order: a buffer holds the whole vector, and each rank owns
// the slice of it that `starts` says. In place is what NCCL and MPI offer without a copy, and it makes one rank a
// no-op. Every rank must make the same calls in the same order with the same starts. Thread: one at a time. Errors:
// spillway::Error.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "spillway/device.h"
#include "spillway/dtype.h"

namespace spillway {

// A vector in device memory that is cut into one slice per rank; slices may differ in length (see partition.h).
struct SlicedVector {
  void* data = nullptr;
  DType type = DType::kFloat32;
  std::span<const std::uint64_t> starts;  // ranks() + 1 element offsets: slice r is [starts[r], starts[r + 1])
};

enum class ReduceOp : std::uint8_t { kSum, kMax };

class Communicator {
 public:
  virtual ~Communicator() = default;
  virtual std::uint32_t rank() const noexcept = 0;
  virtual std::uint32_t ranks() const noexcept = 0;

  // Before: each rank's own slice is filled. After: all slices are, on every rank.
  virtual void all_gather(const SlicedVector& vector, Stream& stream) = 0;
  // Before: each rank has a whole vector. After: each rank's own slice holds the sum over the ranks, added in the order
  // of ranks; the other slices are unspecified.
  virtual void reduce_scatter(const SlicedVector& vector, Stream& stream) = 0;
  // Host values, combined in the order of ranks: every rank gets the same bits. Blocks.
  virtual void all_reduce(std::span<double> values, ReduceOp op) = 0;
  // Returns when every rank has called it.
  virtual void barrier() = 0;
};

// One rank, which already has everything.
std::unique_ptr<Communicator> create_self_communicator();

}  // namespace spillway
