// A message-passing library as TransportCommunicator uses it. One thread at a time calls, nothing blocks: what was
// started is over when poll() gives its ticket back, and memory that was named belongs to it until then.
//
// Between two ranks messages of one channel arrive in the order in which they were sent, and each meets the receive
// that was started in the same place of that order, of the same size. All ranks start the same collectives in the same
// order. A call that fails never gives its ticket back; failure() says why the first of them did, and the others go on.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace spillway {

using Ticket = std::uint64_t;  // the caller's choice

enum class Channel : std::uint8_t { kWords, kData };

// Of a rank's slice, somewhere in the data.
struct SlicePart {
  std::uint64_t begin = 0, bytes = 0;
};

// How ranks part.
enum class Parting : std::uint8_t {
  kTogether,  // all have said their last word, and nothing is on its way from anybody
  kEarly,     // this one goes, and others go on
  kLost,      // one does not answer, or data does not move
};

class Transport {
 public:
  virtual ~Transport() = default;

  virtual std::uint32_t rank() const noexcept = 0;
  virtual std::uint32_t ranks() const noexcept = 0;
  virtual std::string library() const = 0;  // its name and version
  virtual std::string host() const = 0;     // on which this rank runs

  virtual void send(std::uint32_t to, Channel channel, std::span<const std::byte> data, Ticket ticket) = 0;
  virtual void receive(std::uint32_t from, Channel channel, std::span<std::byte> data, Ticket ticket) = 0;

  // The library's own collectives, in place; slices in bytes. `data` is at most most_bytes().
  virtual std::size_t most_bytes() const noexcept = 0;
  virtual void all_gather(std::span<std::byte> data, std::span<const SlicePart> parts, Ticket ticket) = 0;
  virtual void broadcast(std::span<std::byte> data, std::uint32_t root, Ticket ticket) = 0;
  // fp32 sums; what is not the root's, or not the own slice, is undefined afterwards. A library without: neither is
  // called, and every sum is made of messages, in a tree.
  virtual bool has_sums() const noexcept { return true; }
  virtual void reduce(std::span<std::byte> data, std::uint32_t root, Ticket ticket) = 0;
  virtual void reduce_scatter(std::span<std::byte> data, std::span<const std::uint64_t> slices, Ticket ticket) = 0;

  // Moves things on. How many tickets are in `over` now, at most its size.
  virtual std::size_t poll(std::span<Ticket> over) = 0;
  virtual std::string failure() const = 0;  // empty: none

  // The last call. Takes back what nothing has come for, unless somebody is lost: then nothing of the library's is
  // called any more. False: the library still knows memory that was named, which
  // must stay where it is.
  virtual bool close(Parting parting) noexcept = 0;
};

}  // namespace spillway
