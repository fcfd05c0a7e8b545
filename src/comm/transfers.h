// The data of collectives that all ranks have agreed on: cut into pieces that a library's calls can take (MPI counts in
// int), several on their way at a time, started in the same order on every rank whatever arrives first. Pieces are so
// short that one is over within any patience, on any network on which somebody would train: that is seen as progress,
// and what a library has moved of a piece is not.
//
// A sum in a tree is made of messages between two ranks. The owner of a slice gets every other rank's part of it, chunk
// by chunk, and adds them up in the tree's order; a rank sends and receives what it would in a ring.
//
//   chunk k of the own slice   ◄── ranks - 1 receives into one half of the scratch memory   while k - 1 is added up
//   chunk k of other slices    ──► ranks - 1 sends from where the gradient lies, rounded there first if 16 bits travel
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "spillway/communicator.h"
#include "src/comm/conversation.h"
#include "src/comm/transport.h"

namespace spillway {

// The same on every rank.
struct TransferLimits {
  std::uint64_t scratch_bytes = 16 * kMiB;
  // All of a reduce_scatter in one call of the library, up to here: its own sums know how to share the work.
  std::size_t direct_bytes = 64 * kMiB;
  // Else what a call gets, of all slices together in an all_gather, of one otherwise: progress is seen as often.
  std::size_t piece_bytes = 8 * kMiB;
};

class Transfers {
 public:
  // Tickets from `ticket` on are its own.
  Transfers(Transport& transport, const TransferLimits& limits, Ticket ticket);

  // At most kAhead that are not over. The call's slices stay valid.
  void begin(std::uint64_t number, const Collective& call);
  bool any() const noexcept { return !begun_.empty(); }
  bool start_more();         // whether it did
  void take(Ticket ticket);  // one of its own is over
  // One whose data is where it belongs, each once.
  std::optional<std::uint64_t> next_over();

 private:
  struct Transfer {
    std::uint64_t number = 0;
    Collective call;
    std::uint64_t chunk = 0, chunks = 0;  // the next one to start
    std::uint32_t rank = 0;               // in it: the next one, of what goes slice by slice
    bool direct = false;
    std::array<std::size_t, 2> out{};                    // pieces that are not over; of a tree by half of the scratch
    std::array<std::optional<std::uint64_t>, 2> adds{};  // the chunk that is added up when they are
    bool all_started() const noexcept { return chunk == chunks; }
  };

  bool is_tree(const Collective& call) const noexcept;
  SlicePart part(const Transfer& transfer, std::uint32_t rank, std::uint64_t chunk, std::uint64_t chunk_bytes) const;
  std::span<std::byte> piece(const Transfer& transfer, std::uint32_t rank, std::uint64_t chunk,
                             std::uint64_t chunk_bytes) const;
  std::size_t travelling(const Transfer& transfer, std::size_t bytes) const noexcept;
  void start_chunk_of_tree(Transfer& transfer);
  void start_piece(Transfer& transfer);
  void add_up(Transfer& transfer, std::size_t half);
  std::byte* received(std::size_t half, std::uint32_t rank);

  Transport& transport_;
  const TransferLimits limits_;
  const Ticket first_;
  const std::uint64_t tree_chunk_bytes_, gather_chunk_bytes_;
  std::vector<std::byte> scratch_;
  std::array<Transfer, kAhead> transfers_;
  std::vector<std::uint64_t> begun_;  // numbers, in their order
  std::vector<const float*> parts_;   // what is added up
  std::vector<SlicePart> gathered_;   // what one all_gather of the library brings
  std::size_t pieces_out_ = 0;
};

}  // namespace spillway
