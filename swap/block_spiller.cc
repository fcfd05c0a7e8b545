#include "swap/block_spiller.h"

#include <algorithm>
#include <cstring>

#include "kernels/checksum.h"

namespace spillway {
namespace {
constexpr std::uint64_t kSpilledCopyBytes = 4 * kMiB;  // a long copy blocks the others
}

BlockSpill::BlockSpill(Device& device, std::size_t max_pieces, std::size_t max_granules)
    : left_(device.create_event()) {
  pieces.reserve(max_pieces);
  sums_.reserve(max_pieces, max_granules);
}

BlockSpiller::BlockSpiller(StoreThread& thread, Device& device, Stream& d2h, std::span<std::byte> chunks,
                           std::uint64_t chunk_bytes, std::size_t most_spills, StallMeter* stalls)
    : thread_(thread), device_(device), d2h_(d2h), chunk_bytes_(chunk_bytes), stalls_(stalls) {
  SPILLWAY_CHECK(chunk_bytes % kGranuleBytes == 0, "a chunk holds whole granules");
  for (std::uint64_t at = 0; chunk_bytes > 0 && at + chunk_bytes <= chunks.size(); at += chunk_bytes) {
    chunks_.push_back(std::make_unique<Chunk>());
    chunks_.back()->owner = this;
    chunks_.back()->memory = chunks.data() + at;
    chunks_.back()->index = chunks_.size() - 1;
  }
  active_.reserve(most_spills);
  started_.reserve(most_spills);
}

BlockSpiller::~BlockSpiller() {
  {
    std::unique_lock lock(mutex_);
    // Writes read from the chunks, and callbacks name them: both must be over before they go.
    changed_.wait(lock, [this] { return under_way_ == 0 && copies_out_ == 0; });
  }
  thread_.retire(*this);
}

void BlockSpiller::start(BlockSpill& spill) {
  {
    std::lock_guard lock(mutex_);
    SPILLWAY_CHECK(spill.state_ != BlockSpill::State::kCopying && spill.state_ != BlockSpill::State::kLeft,
                   "a spill under way is not started again");
    SPILLWAY_CHECK(under_way_ < active_.capacity(), "there are as many spills as the spiller was made for");
    spill.state_ = BlockSpill::State::kCopying;
    spill.failure_.reset();
    ++under_way_;
    started_.push_back(&spill);
  }
  thread_.wake(*this);
}

void BlockSpiller::wait_left(BlockSpill& spill) {
  const StallMeter::Wait wait(stalls_, StallCause::kWrite);
  std::unique_lock lock(mutex_);
  SPILLWAY_CHECK(spill.state_ != BlockSpill::State::kIdle, "only a started spill can leave");
  changed_.wait(lock, [&spill] { return spill.state_ != BlockSpill::State::kCopying; });
  if (spill.state_ == BlockSpill::State::kFailed) throw *spill.failure_;
}

void BlockSpiller::wait_written(BlockSpill& spill) {
  const StallMeter::Wait wait(stalls_, StallCause::kWrite);
  std::unique_lock lock(mutex_);
  SPILLWAY_CHECK(spill.state_ != BlockSpill::State::kIdle, "only a started spill can be written");
  changed_.wait(lock, [&spill] {
    return spill.state_ == BlockSpill::State::kWritten || spill.state_ == BlockSpill::State::kFailed;
  });
  if (spill.state_ == BlockSpill::State::kFailed) throw *spill.failure_;
}

bool BlockSpiller::left(const BlockSpill& spill) const {
  std::lock_guard lock(mutex_);
  return spill.state_ != BlockSpill::State::kCopying;
}

bool BlockSpiller::written(const BlockSpill& spill) const {
  std::lock_guard lock(mutex_);
  return spill.state_ == BlockSpill::State::kWritten || spill.state_ == BlockSpill::State::kFailed;
}

// Everything below runs on the store's thread, but chunk_landed().

void BlockSpiller::on_wake() {
  {
    std::lock_guard lock(mutex_);
    for (BlockSpill* spill : started_) begin(*spill);
    active_.insert(active_.end(), started_.begin(), started_.end());
    started_.clear();
  }
  write_landed();
  pump();
}

void BlockSpiller::begin(BlockSpill& spill) {
  spill.piece_ = 0;
  spill.piece_offset_ = 0;
  spill.waited_after_ = spill.all_copied_ = false;
  spill.chunks_out_ = 0;
  spill.sums_.begin(spill.pieces);
}

void BlockSpiller::pump() {
  for (std::size_t i = 0; i < active_.size();) {
    BlockSpill& spill = *active_[i];
    const bool more_chunks = pump(spill);
    if (spill.piece_ == spill.pieces.size() && !spill.all_copied_) {
      // Copies are enqueued, not done: the event says when HBM may be reused.
      spill.all_copied_ = true;
      wait_after(spill);  // also when there was nothing to copy
      device_.record(spill.left(), d2h_);
      // A spill that failed is finished once, below, when its last chunk is back.
      if (!spill.failure_) finish(spill, BlockSpill::State::kLeft);
    }
    if (spill.all_copied_ && spill.chunks_out_ == 0) {
      active_.erase(active_.begin() + static_cast<std::ptrdiff_t>(i));
      finish(spill, spill.failure_ ? BlockSpill::State::kFailed : BlockSpill::State::kWritten);
    } else {
      ++i;
    }
    if (!more_chunks) return;  // the spills after this one wait their turn
  }
}

bool BlockSpiller::pump(BlockSpill& spill) {
  return start_pieces(
      spill.pieces, spill.piece_, [&](const SpillPiece& piece) { copy_resident(spill, piece); },
      [&] {
        Chunk* const chunk = free_chunk();
        if (chunk) copy_to_chunk(spill, *chunk);
        return chunk != nullptr;
      });
}

void BlockSpiller::wait_after(BlockSpill& spill) {
  // Once a spill, before its first copy: a wait holds back everything on the stream that comes later.
  if (spill.after && !spill.waited_after_) device_.wait(d2h_, *spill.after);
  spill.waited_after_ = true;
}

void BlockSpiller::copy_resident(BlockSpill& spill, const SpillPiece& piece) {
  wait_after(spill);
  for (std::uint64_t at = 0; at < piece.payload_bytes; at += kSpilledCopyBytes) {
    const std::uint64_t bytes = std::min(kSpilledCopyBytes, piece.payload_bytes - at);
    device_.copy_async(CopyKind::kDeviceToHost, piece.resident + at, piece.from + at, bytes, d2h_);
  }
  copied_bytes_.fetch_add(piece.payload_bytes, std::memory_order_relaxed);
}

void BlockSpiller::copy_to_chunk(BlockSpill& spill, Chunk& chunk) {
  const SpillPiece& piece = spill.pieces[spill.piece_];
  chunk.spill = &spill;
  chunk.piece = spill.piece_;
  chunk.offset = spill.piece_offset_;
  chunk.bytes = std::min(chunk_bytes_, piece.extent.bytes - chunk.offset);
  spill.piece_offset_ += chunk.bytes;
  if (spill.piece_offset_ == piece.extent.bytes) {
    spill.piece_offset_ = 0;
    ++spill.piece_;
  }
  ++spill.chunks_out_;
  wait_after(spill);
  const std::uint64_t bytes =
      chunk.offset < piece.payload_bytes ? std::min(chunk.bytes, piece.payload_bytes - chunk.offset) : 0;
  {
    std::lock_guard lock(mutex_);
    ++copies_out_;
  }
  if (bytes > 0) device_.copy_async(CopyKind::kDeviceToHost, chunk.memory, piece.from + chunk.offset, bytes, d2h_);
  // The host cannot ask a write to wait for an event, so the device's thread says when the bytes are there. It only
  // sets a flag: the write is posted by the store's thread.
  device_.call_async(&BlockSpiller::chunk_landed, &chunk, d2h_);
  copied_bytes_.fetch_add(bytes, std::memory_order_relaxed);
}

void BlockSpiller::chunk_landed(void* argument) {  // a thread of the device
  Chunk& chunk = *static_cast<Chunk*>(argument);
  BlockSpiller& spiller = *chunk.owner;
  chunk.landed.store(true, std::memory_order_release);
  spiller.thread_.wake(spiller);
  // Last, and under the lock: the spiller may be destroyed as soon as no copy is out.
  std::lock_guard lock(spiller.mutex_);
  --spiller.copies_out_;
  spiller.changed_.notify_all();
}

void BlockSpiller::write_landed() {
  for (auto& chunk : chunks_) {
    if (!chunk->landed.load(std::memory_order_acquire)) continue;
    chunk->landed.store(false, std::memory_order_relaxed);
    // A failed spill writes nothing more; its chunks come back all the same.
    if (chunk->spill->failure_) {
      give_back(*chunk);
    } else {
      write(*chunk);
    }
  }
}

void BlockSpiller::write(Chunk& chunk) {
  BlockSpill& spill = *chunk.spill;
  SpillPiece& piece = spill.pieces[chunk.piece];
  // The extent is longer than the payload; its rest is zeros and belongs to the checksum.
  if (chunk.offset + chunk.bytes > piece.payload_bytes) {
    const std::uint64_t used = piece.payload_bytes - std::min(chunk.offset, piece.payload_bytes);
    std::memset(chunk.memory + used, 0, chunk.bytes - used);
  }
  if (const auto sum = spill.sums_.add(chunk.piece, chunk.offset, {chunk.memory, chunk.bytes})) piece.checksum = *sum;
  thread_.post({.op = IoOp::kWrite,
                .priority = IoPriority::kNormal,
                .file = kStripedSpace,
                .offset = piece.extent.offset + chunk.offset,
                .buffer = chunk.memory,
                .bytes = chunk.bytes,
                .tag = chunk.index},
               *this);
}

void BlockSpiller::on_io(const IoRequest& request, const IoCompletion& completion) {
  Chunk& chunk = *chunks_[request.tag];
  BlockSpill& spill = *chunk.spill;
  if (completion.error != 0 && !spill.failure_) {
    spill.failure_ = io_error(thread_, request, completion);
    spill.piece_ = spill.pieces.size();  // copy nothing more; what is on its way comes back and is dropped
  }
  give_back(chunk);
  pump();
}

void BlockSpiller::give_back(Chunk& chunk) {
  --chunk.spill->chunks_out_;
  chunk.spill = nullptr;
}

BlockSpiller::Chunk* BlockSpiller::free_chunk() {
  for (auto& chunk : chunks_) {
    if (!chunk->spill) return chunk.get();
  }
  return nullptr;
}

void BlockSpiller::finish(BlockSpill& spill, BlockSpill::State state) {
  std::lock_guard lock(mutex_);
  spill.state_ = state;
  // kLeft is half of the way: the bytes are out of HBM and not yet on the drive.
  if (state != BlockSpill::State::kLeft) --under_way_;
  changed_.notify_all();
}

}  // namespace spillway
