// A library that moves data on streams of a GPU, as a communicator uses it beside its Transport: NCCL. Words and the
// values of an all_reduce go over the transport; data never leaves the GPUs.
//
// A stream gets, for each collective that is called for it:
//
//   come ─► gate ─────────────► the library's own work, piece by piece ─► over
//            opened by the communicator's thread when all ranks have agreed
//
// No thread of the host waits for a stream, and none holds it up: the GPU reads and writes marks in host memory.
#pragma once

#include <cstdint>
#include <string>

#include "spillway/communicator.h"

namespace spillway {

class StreamMover {
 public:
  virtual ~StreamMover() = default;

  virtual std::string library() const = 0;  // its name and version

  // The caller's thread. Of an all_reduce and a barrier: marks and gate alone. Once abandoned: nothing. What goes wrong
  // is told by failure().
  virtual void enqueue(std::uint64_t number, const Collective& call, Stream& stream) noexcept = 0;

  // The communicator's thread.
  virtual bool has_come(std::uint64_t number) const = 0;
  virtual bool is_over(std::uint64_t number) const = 0;
  virtual std::uint64_t marks() const = 0;  // another number whenever a stream has come by one
  virtual void open_gates(std::uint64_t below) = 0;
  virtual std::string failure() = 0;  // empty: none
  // Ends what the library does, opens all gates, and enqueues nothing any more.
  virtual void abandon() noexcept = 0;

  // The last call, when all is over or abandoned. False: the GPU or the library still knows this object's memory.
  virtual bool close() noexcept = 0;
};

}  // namespace spillway
