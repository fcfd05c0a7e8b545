// Brings whole tiles into host memory and back: for the update, import, export, resume and commit.
//
//   start_load(tile, b) ─ reads under way ─► memory = finish_load(b)   (verified) ─► caller works on memory
//   start_save(b, kind) ─ writes and copies under way ─► finish_save(b)             buffer b is free again
//
// A part whose home is host memory is used in place; the others pass through buffer b. A tile whose parts are all in
// place may use a number after the buffers' own, which has no memory. It does not choose tiles or buffers (UpdateQueue
// does) and never computes on a tile. One thread at a time (the engine's); transfers run on the store's and the
// device's threads. Nothing is allocated after construction. Errors: kIo, kCorrupt.
// Read next: tile_place.h (where a tile lives), tile_store.h (which slot is read and written), store_thread.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "kernels/device.h"
#include "kernels/tile_update.h"
#include "swap/stall_meter.h"
#include "swap/store_thread.h"
#include "swap/tile_place.h"
#include "swap/tile_store.h"

namespace spillway {

struct TileMemory {
  std::byte* part[kParts] = {};  // null: the tile has no such part
};

enum class Load : std::uint8_t {
  kHome,   // the current bytes, from wherever they live
  kStore,  // every part from its slot on NVMe: on resume, when nothing is at home yet
};

enum class Save : std::uint8_t {
  kUpdated,   // after Adam: what every update writes
  kNew,       // after import: every part, every home
  kCommit,    // what no update wrote since the last commit
  kRestored,  // after a load from the store: homes only, nothing is written to NVMe
};

struct TileMoverParts {
  Device* device = nullptr;
  HostWorkers* workers = nullptr;
  Stream* h2d = nullptr;
  Stream* d2h = nullptr;
  StoreThread* thread = nullptr;  // null together with `store`: a run without NVMe
  TileStore* store = nullptr;
  std::span<const TilePlace> tiles;
  std::span<std::byte> host;     // arena that host offsets refer to
  std::span<std::byte> buffers;  // `count` buffers of buffer_bytes, in registered host memory
  std::uint64_t buffer_bytes = 0;
  std::uint32_t count = 1;
  std::uint32_t numbers = 0;  // as many as `count` or more: those after are for tiles that are in place alone
  std::function<std::string(std::uint32_t tile)> name_of;  // for error messages
  Watch watch = {};
};

class TileMover {
 public:
  explicit TileMover(TileMoverParts parts);
  ~TileMover();

  std::uint32_t buffers() const noexcept { return parts_.count; }  // that any tile may pass through
  bool idle(std::uint32_t buffer) const;                           // nothing under way: start_load will not block
  bool read(std::uint32_t buffer) const;  // of a load: nothing is on its way from NVMe any more

  // What the transfers of all buffers have completed so far, and waiting for more: there must be some under way.
  std::uint64_t completed() const { return progress_.count(); }
  void wait_completed_beyond(std::uint64_t count) const { progress_.wait_beyond(count); }

  void start_load(std::uint32_t tile, std::uint32_t buffer, Load from = Load::kHome);
  TileMemory finish_load(std::uint32_t buffer);
  // The same in two halves, for an update that computes checksums in its own pass: the bytes are there, and the update
  // fills what expected_hashes() asks for, before it and after it; then verify() or an error.
  TileMemory arrive(std::uint32_t buffer);
  // Between start_load() and arrive(): the tile's gradient too, which was spilled to `from`, comes into the buffer.
  void load_gradient(std::uint32_t buffer, const Extent& from, std::uint64_t checksum);
  // Where it lies, and where its checksums go; empty without one.
  ExtentHashes expected_gradient(std::uint32_t buffer);
  ExtentHashes expected_hashes(std::uint32_t buffer, Part part, Save kind);
  void verify(std::uint32_t buffer);
  // Like a finished load, without bringing anything: for import, which writes every byte.
  TileMemory blank(std::uint32_t tile, std::uint32_t buffer);
  // `delivered`, unless null: a device address where the weights are copied too, on the h2d stream.
  void start_save(std::uint32_t buffer, Save kind, std::byte* delivered = nullptr);
  void finish_save(std::uint32_t buffer);
  void finish_saves();
  // Blocks until what is written of a tile in [first, end) can be read.
  void finish_saves_of(std::uint32_t first, std::uint32_t end);
  // What was saved since the last commit is not to be read any more.
  void forget_written() { parts_.store->forget_written(); }
  // Ends the use of a loaded buffer without saving.
  void drop(std::uint32_t buffer) { buffers_[buffer]->state = State::kFree; }

  std::uint64_t h2d_bytes() const noexcept { return h2d_bytes_; }
  std::uint64_t d2h_bytes() const noexcept { return d2h_bytes_; }

  // Payload of the tiles saved by updates, and how much of it did not come from NVMe.
  struct Hits {
    std::uint64_t bytes = 0, hit_bytes = 0;
  };
  Hits hits() const noexcept { return hits_; }

 private:
  enum class State : std::uint8_t { kFree, kLoading, kLoaded, kSaving };
  struct Buffer {
    Buffer(StoreThread* thread, IoProgress* progress)
        : io(thread ? std::make_unique<IoBatch>(*thread, progress) : nullptr) {}
    State state = State::kFree;
    std::uint32_t tile = 0;
    TileMemory memory;
    bool read[kParts] = {};  // came from NVMe: to be verified
    bool copied = false;     // `copies` was recorded for this use
    std::unique_ptr<IoBatch> io;
    std::unique_ptr<Event> copies;
    // Checksums of granules, by part: as they came, and as they go when an update has computed them.
    std::vector<std::uint64_t> before[kParts], after[kParts];
    std::span<std::byte> gradient;  // that was spilled
    Extent gradient_extent;
    std::uint64_t gradient_checksum = 0;
    std::vector<std::uint64_t> gradient_before;
    bool hashed[kParts] = {};  // `after` holds those of the bytes in memory
  };

  TileMemory memory_of(std::uint32_t tile, std::uint32_t buffer) const;
  std::span<std::uint64_t> granules(std::vector<std::uint64_t>& of, const Buffer& buffer, std::size_t part) const;
  void hash(const Buffer& buffer, std::size_t part, std::vector<std::uint64_t>& into) const;
  void wait(Buffer& buffer);
  bool to_slot(const Buffer& buffer, Part part, Save kind) const;

  TileMoverParts parts_;
  IoProgress progress_;
  std::vector<std::unique_ptr<Buffer>> buffers_;
  std::uint64_t h2d_bytes_ = 0, d2h_bytes_ = 0;
  Hits hits_;
};

}  // namespace spillway
