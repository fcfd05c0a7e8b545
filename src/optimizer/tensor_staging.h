// Pieces of tensors that do not lie in host memory row by row, on their way through slots of a staging area. The
// carrier copies the next ones while the update computes, and gives back what it has computed:
//
//   carrier | bring 0 | bring 1 | bring 2, give 0 | bring 3, give 1 |
//   update  |         | 0       | 1               | 2               |
//
// A slot has room for a chunk, weights and gradients: consecutive pieces of one tile. All threads: the caller's.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "spillway/offload_optimizer.h"
#include "src/plan/plan.h"

namespace spillway {

struct TensorPiece {
  std::uint32_t tensor = 0;
  std::uint32_t count = 0;  // elements
  std::uint64_t first = 0;  // of the tensor's
  std::uint64_t at = 0;     // of the tile's
};

inline bool is_elsewhere(const void* address) { return address == elsewhere(); }

class TensorStaging {
 public:
  struct Chunk {
    std::size_t first = 0, end = 0;  // pieces
    std::uint64_t at = 0;            // where the first begins in its tile
  };
  // What a pass over the tiles, from the first to the last, has brought.
  enum class Brings : std::uint8_t {
    kNothing,
    kWeights,
    kWeightsAndGradients,
    kUpdated,  // both, of tensors that have a gradient
  };
  struct Slot {
    std::byte *weights = nullptr, *gradients = nullptr;
    std::uint32_t index = 0;
  };

  // `pieces`: of all tiles; `first_piece`: by tile, and after the last. All must outlive it.
  TensorStaging(const Plan& plan, std::span<const TensorPiece> pieces, std::span<const std::size_t> first_piece,
                std::span<std::byte> memory, TensorCarrier* carrier);

  std::span<const Chunk> chunks(std::uint32_t tile) const {
    return std::span(chunks_).subspan(first_chunk_[tile], first_chunk_[tile + 1] - first_chunk_[tile]);
  }
  std::span<const Chunk> chunks() const { return chunks_; }
  TensorCarrier* carrier() const { return carrier_; }
  std::span<std::byte> memory() const { return memory_; }

  void begin(std::span<const OptimizerTensor> tensors, Brings brings);
  // Whether some of it is brought in this pass.
  bool brought(const Chunk& chunk) const;
  // Waits for what is brought, chunk after chunk, and has the next ones brought.
  Slot arrive(const Chunk& chunk);
  // A slot with nothing on its way.
  Slot take();
  void release(const Slot& slot) { slots_[slot.index].chunk.reset(); }
  // The weights of the chunk that are elsewhere begin to go there; the slot is free when they are.
  void give(const Chunk& chunk, const Slot& slot);
  // All that was given is there.
  void finish();
  // The same without a word of what failed, where the pass ends by an error.
  void abandon() noexcept;

 private:
  struct SlotState {
    std::optional<std::size_t> chunk;  // brought
    bool moving = false;               // to be waited for
  };
  Slot slot(std::uint32_t index) const;
  void wait(std::uint32_t index);
  void bring(std::size_t chunk);
  bool asks_weight(const OptimizerTensor& tensor) const;
  bool asks_gradient(const OptimizerTensor& tensor) const;
  // Calls work(first piece, piece after the last) for each tensor of the chunk.
  template <typename Work>
  void for_each_tensor(const Chunk& chunk, Work&& work) const;

  const std::uint64_t element_;  // bytes
  const std::uint64_t chunk_elements_;
  const std::span<const TensorPiece> pieces_;
  const std::span<std::byte> memory_;
  TensorCarrier* const carrier_;
  std::vector<Chunk> chunks_;
  std::vector<std::size_t> first_chunk_;  // by tile, and after the last
  std::vector<SlotState> slots_;
  std::span<const OptimizerTensor> tensors_;  // of the pass
  Brings brings_ = Brings::kNothing;
  std::size_t next_ = 0;    // chunk to be brought
  std::uint32_t turn_ = 0;  // slot to be taken, if it is free
};

// A pass that waits for its copies, whatever ends it.
class StagedPass {
 public:
  StagedPass(TensorStaging& staging, std::span<const OptimizerTensor> tensors, TensorStaging::Brings brings)
      : staging_(staging) {
    staging_.begin(tensors, brings);
  }
  ~StagedPass() { staging_.abandon(); }
  StagedPass(const StagedPass&) = delete;
  StagedPass& operator=(const StagedPass&) = delete;
  void finish() { staging_.finish(); }

 private:
  TensorStaging& staging_;
};

}  // namespace spillway
