// The caller's tensors as tiles see them: which piece of which tensor lies where in a tile, and weights on their way
// between the two. Tensors count from 0, block after block as the model is described.
//
//   tile     | tensor 3, end | tensor 4 ░| tensor 5, begin |     ░: padding to a multiple of 1,024 elements
//   pieces   | piece | piece | piece     | piece | piece   |     at most 16 Ki elements each
//
// A 16-bit weight has a finer value in the states. It is told apart from one that the caller has written since the last
// update by a checksum for each unit of 1,024 elements: what is written begins anew, and nothing is left of the finer
// value. An fp32 weight is its own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "spillway/device.h"
#include "spillway/offload_optimizer.h"
#include "spillway/optimizer.h"
#include "src/optimizer/tensor_staging.h"
#include "src/plan/plan.h"
#include "swap/tile_mover.h"

namespace spillway {

class CallerTensors {
 public:
  struct Memory {
    std::span<std::byte> checksums;  // one each unit, where weights have 16 bits
    std::span<std::byte> staging;
  };
  // `memory`: the plan's. `carrier`: null for none. All must outlive it.
  CallerTensors(const Plan& plan, const ModelDescription& model, const Memory& memory, TensorCarrier* carrier);
  CallerTensors(const CallerTensors&) = delete;
  CallerTensors& operator=(const CallerTensors&) = delete;

  std::uint32_t count() const { return static_cast<std::uint32_t>(names_.size()); }
  const std::string& name(std::uint32_t tensor) const { return *names_[tensor]; }
  std::uint32_t index(std::uint32_t block, std::uint32_t parameter) const { return first_of_[block] + parameter; }
  std::uint32_t block(std::uint32_t tensor) const { return block_of_[tensor]; }
  std::uint32_t parameter(std::uint32_t tensor) const { return tensor - first_of_[block_of_[tensor]]; }
  // All tiles' pieces, tile after tile, and those of one.
  std::span<const TensorPiece> pieces() const { return pieces_; }
  std::span<const TensorPiece> pieces(std::uint32_t tile) const {
    return std::span(pieces_).subspan(first_piece_[tile], first_piece_[tile + 1] - first_piece_[tile]);
  }
  std::uint32_t tile_of(std::size_t piece) const;
  TensorStaging& staging() { return *staging_; }
  const TensorStaging& staging() const { return *staging_; }

  // `arrays`: the tile's, whose states are given. Where the caller has written weights of the piece, their finer values
  // are no longer those of the states.
  void renew(std::uint32_t tile, const TensorPiece& piece, const void* weight, const OptimizerTile& arrays) const;
  // From now on the weights of the piece are what an update left.
  void note(std::uint32_t tile, const TensorPiece& piece, const void* weight);

  // Tile after tile, in a pass of the staging area where tensors are elsewhere:
  // The tensors' weights into a tile's memory; padding is zeros. True: the caller has written some of them, so that
  // renew_all() is to follow. `gradients`, unless null: where these go, in the tile's order; one that a tensor has not
  // is left as it is there.
  bool gather(std::uint32_t tile, const TileMemory& memory, std::byte* gradients,
              std::span<const OptimizerTensor> tensors, HostWorkers& workers);
  // renew() of all pieces of a tile, whose memory has its states and the tensors' weights.
  void renew_all(std::uint32_t tile, const TileMemory& memory, HostWorkers& workers) const;
  // The tensors' weights into the memory of a tile, finer values and all, and noted: whatever was there before.
  void take(std::uint32_t tile, const TileMemory& memory, std::span<const OptimizerTensor> tensors,
            HostWorkers& workers);
  // A tile's weights into the tensors, noted.
  void scatter(std::uint32_t tile, const TileMemory& memory, std::span<const OptimizerTensor> tensors,
               HostWorkers& workers);
  // The piece of a tile's arrays, beside the tensor itself, or what the staging area has of it.
  OptimizerTile arrays_of(const TensorPiece& piece, const OptimizerTile& tile, const OptimizerTensor& tensor,
                          const TensorStaging::Slot& slot = {}, std::uint64_t slot_begins = 0) const;

 private:
  // Calls unit(checksum, offset in the piece, elements) for each.
  template <typename Unit>
  void for_each_unit(std::uint32_t tile, const TensorPiece& piece, Unit&& unit) const;
  void fetch(std::uint32_t tile, std::byte* weights, std::byte* gradients, std::span<const OptimizerTensor> tensors,
             HostWorkers& workers);
  void deliver(std::uint32_t tile, const std::byte* weights, std::span<const OptimizerTensor> tensors,
               HostWorkers& workers);

  const Plan& plan_;
  const std::uint64_t element_;  // bytes
  std::span<std::uint64_t> checksums_;
  std::vector<const std::string*> names_;           // by tensor
  std::vector<std::uint32_t> first_of_, block_of_;  // by block: its first tensor; by tensor
  std::vector<TensorPiece> pieces_;
  std::vector<std::size_t> first_piece_, first_unit_;  // by tile, and after the last
  std::optional<TensorStaging> staging_;
};

}  // namespace spillway
