// Moves a block's weights into HBM: NVMe → chunk of pinned host memory → HBM, or straight from host memory where a tile
// lives there. Chunks are recycled when their copy is done; a block never lies in host memory whole.
//
//   start(fetch) ─► reads, as chunks come free ─► checksum of each granule ─► copy on the h2d stream ─► chunk free
//   wait_open(fetch): all bytes are verified and every copy is enqueued; fetch.ready is recorded after the last one,
//   also when the fetch has failed
//
// It does not know which blocks are fetched when, and never touches the I/O queue: it posts reads to the StoreThread.
// When a read completes it looks which copies are done. The stream is asked to report that only while less than half of
// the chunks are being read and a fetch waits for more: such a report holds a GPU's stream up for as long as a copy.
//
// start() and wait_open(): the engine's thread. The rest runs on the store's thread. A fetch that is under way owns its
// pieces; nothing is allocated after construction when fetches are reused.
// Read next: store_thread.h for the way of a read to the drive, then on_io() in block_fetcher.cc for the way back.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "kernels/device.h"
#include "swap/block_pieces.h"
#include "swap/extents.h"
#include "swap/stall_meter.h"
#include "swap/store_thread.h"

namespace spillway {

class TileStore;

struct FetchPiece {
  std::uint32_t tile = 0;   // or activation: what name_of is asked for
  std::byte* to = nullptr;  // device address
  std::uint64_t payload_bytes = 0;
  const std::byte* resident = nullptr;  // address when the tile lives in host memory or HBM; else:
  Extent extent = {};                   // on NVMe
  std::uint64_t checksum = 0;
  bool in_hbm = false;  // `resident` is a device address
};

// One block on its way. Belongs to the caller; must stay alive until it is open.
class BlockFetch {
 public:
  BlockFetch(Device& device, std::size_t max_pieces, std::size_t max_granules);

  std::vector<FetchPiece> pieces;  // filled by the caller before start()
  Event* after = nullptr;          // the h2d stream waits for it first: the place is free from then on
  Event* source = nullptr;         // and for this: what is resident in host memory is there from then on
  Event& ready() { return *ready_; }

 private:
  friend class BlockFetcher;
  enum class State : std::uint8_t { kIdle, kRunning, kOpen, kFailed };

  std::unique_ptr<Event> ready_;
  State state_ = State::kIdle;  // guarded by the fetcher's mutex
  std::optional<Error> failure_;
  std::uint64_t mismatch_offset_ = 0;  // of the extent, when the failure is kCorrupt
  // Store's thread only:
  std::size_t piece_ = 0;           // next to start
  std::uint64_t piece_offset_ = 0;  // next byte of it
  bool waited_ = false;             // for `after` and `source`
  std::size_t chunks_out_ = 0;
  PieceSums sums_;
};

class BlockFetcher : public IoHandler {
 public:
  // `chunks` is cut into pieces of chunk_bytes (a multiple of the granule); it must lie in registered host memory.
  // name_of: what a piece is (`weights of tile 3 …`), for error messages; `store`, unless null, knows what to do about
  // bytes that do not match. At most `most_fetches` are under way at a time.
  BlockFetcher(StoreThread& thread, Device& device, Stream& h2d, std::span<std::byte> chunks, std::uint64_t chunk_bytes,
               std::function<std::string(std::uint32_t tile)> name_of, Watch watch = {}, std::size_t most_fetches = 64,
               const TileStore* store = nullptr);
  ~BlockFetcher() override;

  std::size_t most_fetches() const noexcept { return most_fetches_; }
  void start(BlockFetch& fetch);
  bool open(const BlockFetch& fetch) const;
  // Blocks until the fetch is open; throws kIo or kCorrupt.
  void wait_open(BlockFetch& fetch);

  std::uint64_t copied_bytes() const noexcept { return copied_bytes_.load(std::memory_order_relaxed); }

 private:
  struct Chunk {
    std::byte* memory = nullptr;
    BlockFetch* fetch = nullptr;
    std::size_t piece = 0;
    std::uint64_t offset = 0, bytes = 0;
    std::unique_ptr<Event> copied;
    bool in_use = false;
  };

  void on_io(const IoRequest& request, const IoCompletion& completion) override;
  void on_wake() override;
  void begin(BlockFetch& fetch);
  void pump();
  bool pump(BlockFetch& fetch);  // false: out of chunks
  void wait_events(BlockFetch& fetch);
  void copy_resident(BlockFetch& fetch, const FetchPiece& piece);
  void read_chunk(BlockFetch& fetch, Chunk& chunk);
  void check(BlockFetch& fetch, const Chunk& chunk);
  void copy(BlockFetch& fetch, Chunk& chunk);
  void finish(BlockFetch& fetch);
  void fail(BlockFetch& fetch, Error error);
  void recycle();
  void ask_for_wake();
  Chunk* free_chunk();
  static void copies_done(void* fetcher);

  StoreThread& thread_;
  Device& device_;
  Stream& h2d_;
  std::uint64_t chunk_bytes_;
  std::function<std::string(std::uint32_t tile)> name_of_;
  Watch watch_;
  const std::size_t most_fetches_;
  const TileStore* const store_;
  std::vector<std::unique_ptr<Chunk>> chunks_;
  // Store's thread only:
  std::vector<BlockFetch*> active_;  // in order of start
  std::vector<Chunk*> copying_;      // in the order of their copies
  std::size_t reading_ = 0;
  std::atomic<bool> asked_ = false;  // the stream will wake the thread
  std::atomic<std::uint64_t> copied_bytes_ = 0;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<BlockFetch*> started_;
  std::uint32_t reads_out_ = 0;  // chunk reads whose handler has not returned
  std::uint32_t calls_out_ = 0;  // of copies_done() that have not returned
};

}  // namespace spillway
