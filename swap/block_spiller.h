// Moves memory of the device out of it: HBM → chunk of pinned host memory → NVMe, or straight to host memory where that
// is its place. The way back is the BlockFetcher's. Chunks are recycled as soon as they are written.
//
//   start(spill) ─► copies on the d2h stream, as chunks come free ─► checksum of each granule ─► write ─► chunk free
//   wait_left(spill): every copy is enqueued; spill.left() is recorded after the last one, and with that event the HBM
//   may be reused
//   wait_written(spill): everything on NVMe is written, and the checksums of its pieces are known
//
// It writes scratch only, never a slot of a tile: those are TileMover's. start() and the waits: the engine's thread.
// The rest runs on the store's thread. A spill that is under way owns its pieces; nothing is allocated after
// construction when spills are reused. Errors: kIo, from the waits.
// Read next: store_thread.h.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "kernels/device.h"
#include "swap/block_pieces.h"
#include "swap/extents.h"
#include "swap/stall_meter.h"
#include "swap/store_thread.h"

namespace spillway {

struct SpillPiece {
  const std::byte* from = nullptr;  // device address
  std::uint64_t payload_bytes = 0;
  std::byte* resident = nullptr;  // host address when the piece goes to host memory; else:
  Extent extent = {};             // on NVMe; zeros are written after the payload
  std::uint64_t checksum = 0;     // of the whole extent; set when the spill is written
};

// Memory on its way out. Belongs to the caller; must stay alive until it is written.
class BlockSpill {
 public:
  BlockSpill(Device& device, std::size_t max_pieces, std::size_t max_granules);

  std::vector<SpillPiece> pieces;  // filled by the caller before start()
  Event* after = nullptr;          // the d2h stream waits for it first: the memory holds its bytes from then on
  Event& left() { return *left_; }

 private:
  friend class BlockSpiller;
  enum class State : std::uint8_t { kIdle, kCopying, kLeft, kWritten, kFailed };

  std::unique_ptr<Event> left_;
  State state_ = State::kIdle;  // guarded by the spiller's mutex
  std::optional<Error> failure_;
  // Store's thread only:
  std::size_t piece_ = 0;           // next to copy
  std::uint64_t piece_offset_ = 0;  // next byte of it
  bool waited_after_ = false, all_copied_ = false;
  std::size_t chunks_out_ = 0;
  PieceSums sums_;
};

class BlockSpiller : public IoHandler {
 public:
  // `chunks` is cut into pieces of chunk_bytes (a multiple of the granule); it must lie in registered host memory.
  // At most `most_spills` are under way at one time. `stalls`, unless null, is told of waits.
  BlockSpiller(StoreThread& thread, Device& device, Stream& d2h, std::span<std::byte> chunks, std::uint64_t chunk_bytes,
               std::size_t most_spills, StallMeter* stalls = nullptr);
  ~BlockSpiller() override;  // waits for everything under way

  void start(BlockSpill& spill);
  // Blocks until the last copy is enqueued.
  void wait_left(BlockSpill& spill);
  // Blocks until everything is written. What went to host memory is there once left() has come.
  void wait_written(BlockSpill& spill);
  // The waits will not block.
  bool left(const BlockSpill& spill) const;
  bool written(const BlockSpill& spill) const;

  std::uint64_t copied_bytes() const noexcept { return copied_bytes_.load(std::memory_order_relaxed); }

 private:
  struct Chunk {
    BlockSpiller* owner = nullptr;
    std::byte* memory = nullptr;
    std::uint64_t index = 0;
    BlockSpill* spill = nullptr;  // null: free
    std::size_t piece = 0;
    std::uint64_t offset = 0, bytes = 0;
    std::atomic<bool> landed = false;  // set by the device's thread
  };

  void on_io(const IoRequest& request, const IoCompletion& completion) override;
  void on_wake() override;
  static void begin(BlockSpill& spill);
  void pump();
  bool pump(BlockSpill& spill);  // false: out of chunks
  void wait_after(BlockSpill& spill);
  void copy_resident(BlockSpill& spill, const SpillPiece& piece);
  void copy_to_chunk(BlockSpill& spill, Chunk& chunk);
  void write_landed();
  void write(Chunk& chunk);
  void give_back(Chunk& chunk);
  void finish(BlockSpill& spill, BlockSpill::State state);
  Chunk* free_chunk();
  static void chunk_landed(void* chunk);

  StoreThread& thread_;
  Device& device_;
  Stream& d2h_;
  std::uint64_t chunk_bytes_;
  StallMeter* stalls_;
  std::vector<std::unique_ptr<Chunk>> chunks_;
  std::vector<BlockSpill*> active_;  // store's thread only, in order of start
  std::atomic<std::uint64_t> copied_bytes_ = 0;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<BlockSpill*> started_;
  std::size_t under_way_ = 0;     // spills started, not yet written or failed
  std::uint32_t copies_out_ = 0;  // chunk copies whose callback has not returned
};

}  // namespace spillway
