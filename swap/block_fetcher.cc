#include "swap/block_fetcher.h"

#include <algorithm>

#include "kernels/checksum.h"
#include "swap/tile_store.h"

namespace spillway {
namespace {
constexpr std::uint64_t kResidentCopyBytes =
    4 * kMiB;  // host memory needs no chunks, but a long copy blocks the others
}

BlockFetch::BlockFetch(Device& device, std::size_t max_pieces, std::size_t max_granules)
    : ready_(device.create_event()) {
  pieces.reserve(max_pieces);
  sums_.reserve(max_pieces, max_granules);
}

BlockFetcher::BlockFetcher(StoreThread& thread, Device& device, Stream& h2d, std::span<std::byte> chunks,
                           std::uint64_t chunk_bytes, std::function<std::string(std::uint32_t tile)> name_of,
                           Watch watch, std::size_t most_fetches, const TileStore* store)
    : thread_(thread),
      device_(device),
      h2d_(h2d),
      chunk_bytes_(chunk_bytes),
      name_of_(std::move(name_of)),
      watch_(watch),
      most_fetches_(most_fetches),
      store_(store) {
  SPILLWAY_CHECK(chunk_bytes % kGranuleBytes == 0, "a chunk holds whole granules");
  for (std::uint64_t at = 0; chunk_bytes > 0 && at + chunk_bytes <= chunks.size(); at += chunk_bytes) {
    chunks_.push_back(std::make_unique<Chunk>());
    chunks_.back()->memory = chunks.data() + at;
    chunks_.back()->copied = device.create_polled_event();
  }
  copying_.reserve(chunks_.size());
  active_.reserve(most_fetches);
  started_.reserve(most_fetches);
}

BlockFetcher::~BlockFetcher() {
  h2d_.synchronize();
  {
    std::unique_lock lock(mutex_);
    // Reads write into the chunks, and callbacks name this object: both must be over before either goes.
    changed_.wait(lock, [this] { return reads_out_ == 0 && calls_out_ == 0 && started_.empty(); });
  }
  thread_.retire(*this);
}

void BlockFetcher::start(BlockFetch& fetch) {
  {
    std::lock_guard lock(mutex_);
    SPILLWAY_CHECK(fetch.state_ != BlockFetch::State::kRunning, "a fetch under way is not started again");
    // Only noted: reads are posted by the store's thread, in on_wake().
    fetch.state_ = BlockFetch::State::kRunning;
    fetch.failure_.reset();
    started_.push_back(&fetch);
  }
  thread_.wake(*this);
}

bool BlockFetcher::open(const BlockFetch& fetch) const {
  std::lock_guard lock(mutex_);
  return fetch.state_ == BlockFetch::State::kOpen;
}

void BlockFetcher::wait_open(BlockFetch& fetch) {
  const StallMeter::Wait wait(watch_.stalls, StallCause::kRead);
  std::unique_lock lock(mutex_);
  SPILLWAY_CHECK(fetch.state_ != BlockFetch::State::kIdle, "only a started fetch can open");
  changed_.wait(lock, [&fetch] { return fetch.state_ != BlockFetch::State::kRunning; });
  if (fetch.state_ != BlockFetch::State::kFailed) return;
  if (!store_ || fetch.failure_->code() != Code::kCorrupt) throw *fetch.failure_;
  ErrorParts parts = fetch.failure_->parts();
  throw Error(Code::kCorrupt, std::move(parts.object), std::move(parts.happened), parts.errno_value,
              store_->way_back(fetch.mismatch_offset_));  // here, on the engine's thread, where the store is used
}

// Everything below runs on the store's thread, but copies_done().

void BlockFetcher::on_wake() {
  {
    std::lock_guard lock(mutex_);
    active_.insert(active_.end(), started_.begin(), started_.end());
    for (BlockFetch* fetch : started_) begin(*fetch);
    started_.clear();
    changed_.notify_all();
  }
  pump();
}

void BlockFetcher::begin(BlockFetch& fetch) {
  fetch.piece_ = 0;
  fetch.piece_offset_ = 0;
  fetch.waited_ = false;
  fetch.chunks_out_ = 0;
  fetch.sums_.begin(fetch.pieces);
}

void BlockFetcher::pump() {
  recycle();
  bool more_chunks = true;
  for (std::size_t i = 0; more_chunks && i < active_.size();) {  // the fetches after one without wait their turn
    BlockFetch& fetch = *active_[i];
    more_chunks = pump(fetch);
    if (fetch.piece_ == fetch.pieces.size() && fetch.chunks_out_ == 0) {
      active_.erase(active_.begin() + static_cast<std::ptrdiff_t>(i));
      finish(fetch);
    } else {
      ++i;
    }
  }
  // Reads that come back call pump() again. Only where too few are out for that does the device have to report a copy's
  // end.
  if (!more_chunks) ask_for_wake();
}

bool BlockFetcher::pump(BlockFetch& fetch) {
  return start_pieces(
      fetch.pieces, fetch.piece_, [&](const FetchPiece& piece) { copy_resident(fetch, piece); },
      [&] {
        Chunk* const chunk = free_chunk();
        if (chunk) read_chunk(fetch, *chunk);
        return chunk != nullptr;
      });
}

void BlockFetcher::wait_events(BlockFetch& fetch) {
  // Once for each fetch, before its first copy: the place may still be read, and what comes from host memory may not be
  // there yet. Both waits are the stream's.
  if (fetch.waited_) return;
  for (Event* event : {fetch.after, fetch.source}) {
    if (event) device_.wait(h2d_, *event);
  }
  fetch.waited_ = true;
}

void BlockFetcher::copy_resident(BlockFetch& fetch, const FetchPiece& piece) {
  wait_events(fetch);
  const StreamSpan span(watch_.timeline,
                        {.kind = SpanKind::kCopyUp, .subject = piece.tile, .bytes = piece.payload_bytes}, h2d_);
  for (std::uint64_t at = 0; at < piece.payload_bytes; at += kResidentCopyBytes) {
    const std::uint64_t bytes = std::min(kResidentCopyBytes, piece.payload_bytes - at);
    const CopyKind kind = piece.in_hbm ? CopyKind::kDeviceToDevice : CopyKind::kHostToDevice;
    device_.copy_async(kind, piece.to + at, piece.resident + at, bytes, h2d_);
  }
  if (!piece.in_hbm) copied_bytes_.fetch_add(piece.payload_bytes, std::memory_order_relaxed);
}

void BlockFetcher::read_chunk(BlockFetch& fetch, Chunk& chunk) {
  const FetchPiece& piece = fetch.pieces[fetch.piece_];
  chunk.in_use = true;
  chunk.fetch = &fetch;
  chunk.piece = fetch.piece_;
  chunk.offset = fetch.piece_offset_;
  chunk.bytes = std::min(chunk_bytes_, piece.extent.bytes - chunk.offset);
  fetch.piece_offset_ += chunk.bytes;
  if (fetch.piece_offset_ == piece.extent.bytes) {
    fetch.piece_offset_ = 0;
    ++fetch.piece_;
  }
  ++fetch.chunks_out_;
  const auto index = static_cast<std::uint64_t>(
      std::find_if(chunks_.begin(), chunks_.end(), [&chunk](const auto& c) { return c.get() == &chunk; }) -
      chunks_.begin());
  ++reading_;
  {
    std::lock_guard lock(mutex_);
    ++reads_out_;
  }
  // Urgent: the caller's stream waits for weights, and for nothing that an update reads or writes. This is the store's
  // thread, so post() hands the request straight to the queue.
  thread_.post({.op = IoOp::kRead,
                .priority = IoPriority::kUrgent,
                .file = kStripedSpace,
                .offset = piece.extent.offset + chunk.offset,
                .buffer = chunk.memory,
                .bytes = chunk.bytes,
                .tag = index},
               *this);
}

void BlockFetcher::on_io(const IoRequest& request, const IoCompletion& completion) {
  // Last, also when the queue has failed and pump() throws: whoever waits for the fetch may destroy the fetcher as soon
  // as no read is out.
  struct ReadIsBack {
    BlockFetcher& fetcher;
    ~ReadIsBack() {
      std::lock_guard lock(fetcher.mutex_);
      --fetcher.reads_out_;
      fetcher.changed_.notify_all();
    }
  } const last{*this};
  // Back from the ring: the bytes are verified, copied on, and the chunks that are free by now read the next ones.
  Chunk& chunk = *chunks_[request.tag];
  BlockFetch& fetch = *chunk.fetch;
  --fetch.chunks_out_;
  --reading_;
  if (completion.error != 0) fail(fetch, io_error(thread_, request, completion));
  // A failed fetch takes no more bytes, but every read that is out must come back before its chunk is free.
  if (fetch.failure_) {
    chunk.in_use = false;
  } else {
    check(fetch, chunk);
    copy(fetch, chunk);
  }
  pump();
}

void BlockFetcher::check(BlockFetch& fetch, const Chunk& chunk) {
  const FetchPiece& piece = fetch.pieces[chunk.piece];
  const TimedSpan span(watch_.timeline, SpanKind::kChecksum, piece.tile, chunk.bytes);
  const auto sum = fetch.sums_.add(chunk.piece, chunk.offset, {chunk.memory, chunk.bytes});
  if (!sum || *sum == piece.checksum) return;
  const StoreThread::FileOffset place = thread_.place_of(piece.extent.offset);
  if (!fetch.failure_) fetch.mismatch_offset_ = piece.extent.offset;
  fail(fetch, Error(Code::kCorrupt, {place.file.path().string(),
                                     name_of_(piece.tile) + " at offset " + std::to_string(place.offset) +
                                         " do not match their checksum",
                                     0, "check the drive"}));
}

// Bytes may travel before their extent is verified; the lease opens only when all of it is.
void BlockFetcher::copy(BlockFetch& fetch, Chunk& chunk) {
  const FetchPiece& piece = fetch.pieces[chunk.piece];
  const std::uint64_t bytes =
      chunk.offset < piece.payload_bytes ? std::min(chunk.bytes, piece.payload_bytes - chunk.offset) : 0;
  if (bytes == 0 || fetch.failure_) {
    chunk.in_use = false;
    return;
  }
  wait_events(fetch);
  {
    const StreamSpan span(watch_.timeline, {.kind = SpanKind::kCopyUp, .subject = piece.tile, .bytes = bytes}, h2d_);
    device_.copy_async(CopyKind::kHostToDevice, piece.to + chunk.offset, chunk.memory, bytes, h2d_);
  }
  // The chunk is free when the copy has ended, not now: recycle() asks for this event.
  device_.record(*chunk.copied, h2d_);
  copying_.push_back(&chunk);
  copied_bytes_.fetch_add(bytes, std::memory_order_relaxed);
}

void BlockFetcher::recycle() {
  // Copies end in the order in which they were enqueued, so the search stops at the first that has not.
  const auto under_way =
      std::ranges::find_if_not(copying_, [this](const Chunk* chunk) { return device_.done(*chunk->copied); });
  std::for_each(copying_.begin(), under_way, [](Chunk* chunk) { chunk->in_use = false; });
  copying_.erase(copying_.begin(), under_way);
}

void BlockFetcher::ask_for_wake() {
  if (copying_.empty() || 2 * reading_ > chunks_.size() || asked_) return;
  asked_ = true;
  {
    std::lock_guard lock(mutex_);
    ++calls_out_;
  }
  device_.call_async(&BlockFetcher::copies_done, this, h2d_);
}

void BlockFetcher::copies_done(void* argument) {  // a thread of the device
  BlockFetcher& fetcher = *static_cast<BlockFetcher*>(argument);
  fetcher.asked_ = false;
  fetcher.thread_.wake(fetcher);
  std::lock_guard lock(fetcher.mutex_);
  --fetcher.calls_out_;
  fetcher.changed_.notify_all();
}

BlockFetcher::Chunk* BlockFetcher::free_chunk() {
  for (auto& chunk : chunks_) {
    if (!chunk->in_use) return chunk.get();
  }
  return nullptr;
}

void BlockFetcher::fail(BlockFetch& fetch, Error error) {
  if (fetch.failure_) return;
  fetch.failure_ = std::move(error);
  fetch.piece_ = fetch.pieces.size();  // start nothing more; reads under way come back and are dropped
}

void BlockFetcher::finish(BlockFetch& fetch) {
  wait_events(fetch);
  // Copies are enqueued, not done. `ready` tells streams when they are; kOpen tells the host that all bytes were
  // verified.
  device_.record(fetch.ready(), h2d_);
  std::lock_guard lock(mutex_);
  fetch.state_ = fetch.failure_ ? BlockFetch::State::kFailed : BlockFetch::State::kOpen;
  changed_.notify_all();
}

}  // namespace spillway
