#include "swap/tile_mover.h"

#include <algorithm>
#include <cstring>

#include "kernels/checksum.h"
#include "swap/store_check.h"

namespace spillway {
namespace {

constexpr std::size_t kWeightsIndex = index_of(Part::kWeights);

// A buffer holds weights, then states, then a spilled gradient: each padded, as extents are.
std::uint64_t buffer_offset(const TileShape& shape, std::size_t part) {
  return part == kWeightsIndex ? 0 : extent_bytes(shape, Part::kWeights);
}

}  // namespace

TileMover::TileMover(TileMoverParts parts) : parts_(std::move(parts)) {
  SPILLWAY_CHECK(parts_.buffers.size() >= parts_.count * parts_.buffer_bytes, "the buffers lie in their piece");
  // Numbers beyond the buffers are for tiles that live in memory: they have a state, and no memory to pass through.
  for (std::uint32_t b = 0; b < std::max(parts_.count, parts_.numbers); ++b) {
    buffers_.push_back(std::make_unique<Buffer>(parts_.thread, &progress_));
    buffers_.back()->copies = parts_.device->create_event();
    if (b >= parts_.count) continue;
    buffers_.back()->gradient_before.resize(div_up(parts_.buffer_bytes, kGranuleBytes) + 1);
    for (std::size_t part = 0; part < kParts; ++part) {
      for (auto* granules : {&buffers_.back()->before[part], &buffers_.back()->after[part]})
        granules->resize(div_up(parts_.buffer_bytes, kGranuleBytes) + 1);
    }
  }
}

TileMover::~TileMover() {
  for (auto& buffer : buffers_) {
    // Requests and copies under way name the buffers' memory.
    if (buffer->io) buffer->io->wait_nothrow();
    parts_.device->synchronize(*buffer->copies);
  }
}

TileMemory TileMover::memory_of(std::uint32_t tile, std::uint32_t index) const {
  const TilePlace& place = parts_.tiles[tile];
  TileMemory memory;
  for (std::size_t part = 0; part < kParts; ++part) {
    if (payload_bytes(place.shape, static_cast<Part>(part)) == 0) continue;
    if (place.home[part] == Placement::kHost) {
      memory.part[part] = parts_.host.data() + place.offset[part];
      continue;
    }
    SPILLWAY_CHECK(index < parts_.count, "what is not in place passes through a buffer");
    memory.part[part] = parts_.buffers.data() + index * parts_.buffer_bytes + buffer_offset(place.shape, part);
  }
  return memory;
}

bool TileMover::idle(std::uint32_t index) const {
  const Buffer& buffer = *buffers_[index];
  if (buffer.state == State::kFree) return true;
  // A save that is over counts as free: the next load ends it without waiting.
  return buffer.state == State::kSaving && (!buffer.io || buffer.io->done()) &&
         (!buffer.copied || parts_.device->done(*buffer.copies));
}

bool TileMover::read(std::uint32_t index) const {
  const Buffer& buffer = *buffers_[index];
  return buffer.state != State::kLoading || !buffer.io || buffer.io->done();
}

void TileMover::start_load(std::uint32_t tile, std::uint32_t index, Load from) {
  Buffer& buffer = *buffers_[index];
  if (buffer.state == State::kSaving) finish_save(index);
  SPILLWAY_CHECK(buffer.state == State::kFree, "a buffer holds one tile at a time");
  const TilePlace& place = parts_.tiles[tile];
  buffer.state = State::kLoading;
  buffer.tile = tile;
  buffer.memory = memory_of(tile, index);
  buffer.gradient = {};
  buffer.copied = false;
  for (std::size_t part = 0; part < kParts; ++part) {
    buffer.read[part] = buffer.hashed[part] = false;
    // On resume nothing is at home yet: whatever the home, the bytes come from the store.
    const Route route = route_of(from == Load::kStore ? Placement::kNvme : place.home[part]);
    if (!buffer.memory.part[part]) continue;
    const std::uint64_t bytes = payload_bytes(place.shape, static_cast<Part>(part));
    if (route.copied) {
      const StreamSpan span(parts_.watch.timeline, {.kind = SpanKind::kCopyDown, .subject = tile, .bytes = bytes},
                            *parts_.d2h);
      parts_.device->copy_async(CopyKind::kDeviceToHost, buffer.memory.part[part],
                                parts_.device->hbm().data() + place.offset[part], bytes, *parts_.d2h);
      parts_.device->record(*buffer.copies, *parts_.d2h);
      buffer.copied = true;
      d2h_bytes_ += bytes;
      // The checksum of an extent covers its padding, which no copy from HBM brings.
      const std::uint64_t padded = extent_bytes(place.shape, static_cast<Part>(part));
      std::memset(buffer.memory.part[part] + bytes, 0, padded - bytes);
      continue;
    }
    // Host memory is the home: the update works there, and there is nothing to move.
    if (!route.read) continue;
    // Normal priority: reads for an update give way to the weights that a forward pass waits for.
    const Extent extent = parts_.store->readable(tile).extent[part];
    buffer.io->add({.op = IoOp::kRead,
                    .priority = IoPriority::kNormal,
                    .file = kStripedSpace,
                    .offset = extent.offset,
                    .buffer = buffer.memory.part[part],
                    .bytes = extent.bytes});
    buffer.read[part] = true;
  }
}

void TileMover::load_gradient(std::uint32_t index, const Extent& from, std::uint64_t checksum) {
  Buffer& buffer = *buffers_[index];
  SPILLWAY_CHECK(buffer.state == State::kLoading, "a gradient comes with its tile");
  const TileShape& shape = parts_.tiles[buffer.tile].shape;
  const std::uint64_t at = extent_bytes(shape, Part::kWeights) + extent_bytes(shape, Part::kStates);
  SPILLWAY_CHECK(at + from.bytes <= parts_.buffer_bytes, "a buffer holds a tile and its gradient");
  buffer.gradient = parts_.buffers.subspan(index * parts_.buffer_bytes + at, from.bytes);
  buffer.gradient_extent = from;
  buffer.gradient_checksum = checksum;
  buffer.io->add({.op = IoOp::kRead,
                  .priority = IoPriority::kNormal,
                  .file = kStripedSpace,
                  .offset = from.offset,
                  .buffer = buffer.gradient.data(),
                  .bytes = from.bytes});
}

ExtentHashes TileMover::expected_gradient(std::uint32_t index) {
  Buffer& buffer = *buffers_[index];
  if (buffer.gradient.empty()) return {};
  const std::span<std::uint64_t> before(buffer.gradient_before);
  return {.bytes = buffer.gradient,
          .before = before.first(div_up(buffer.gradient.size(), kGranuleBytes)),
          .after = {},
          .arrays = element_bytes(parts_.tiles[buffer.tile].shape, Part::kWeights)};
}

void TileMover::wait(Buffer& buffer) {
  if (buffer.copied) {
    const StallMeter::Wait wait(parts_.watch.stalls, StallCause::kCopy);
    parts_.device->synchronize(*buffer.copies);
  }
  if (!buffer.io) return;
  const bool saving = buffer.state == State::kSaving;
  const StallMeter::Wait wait(parts_.watch.stalls, saving ? StallCause::kWrite : StallCause::kRead);
  buffer.io->wait();
}

TileMemory TileMover::arrive(std::uint32_t index) {
  Buffer& buffer = *buffers_[index];
  SPILLWAY_CHECK(buffer.state == State::kLoading, "only a started load can finish");
  wait(buffer);
  buffer.state = State::kLoaded;
  return buffer.memory;
}

TileMemory TileMover::finish_load(std::uint32_t index) {
  const TileMemory memory = arrive(index);
  Buffer& buffer = *buffers_[index];
  for (std::size_t part = 0; part < kParts; ++part) {
    // Here on the workers; an update hashes in its own pass over memory instead.
    if (buffer.read[part]) hash(buffer, part, buffer.before[part]);
  }
  verify(index);
  return memory;
}

std::span<std::uint64_t> TileMover::granules(std::vector<std::uint64_t>& of, const Buffer& buffer,
                                             std::size_t part) const {
  const std::uint64_t bytes = extent_bytes(parts_.tiles[buffer.tile].shape, static_cast<Part>(part));
  return std::span(of).first(div_up(bytes, kGranuleBytes));
}

ExtentHashes TileMover::expected_hashes(std::uint32_t index, Part part, Save kind) {
  Buffer& buffer = *buffers_[index];
  const std::size_t p = index_of(part);
  ExtentHashes hashes;
  if (!buffer.memory.part[p]) return hashes;
  const TileShape& shape = parts_.tiles[buffer.tile].shape;
  hashes.bytes = {buffer.memory.part[p], extent_bytes(shape, part)};
  hashes.arrays = element_bytes(shape, part);
  if (buffer.read[p]) hashes.before = granules(buffer.before[p], buffer, p);
  // The sums of the new bytes are wanted only where they go to a slot; a commit or an export hashes for itself.
  buffer.hashed[p] = to_slot(buffer, part, kind);
  if (buffer.hashed[p]) hashes.after = granules(buffer.after[p], buffer, p);
  return hashes;
}

void TileMover::verify(std::uint32_t index) {
  Buffer& buffer = *buffers_[index];
  const auto refuse = [&](const char* what, const Extent& extent) {
    const StoreFiles::FileOffset place = parts_.store->files().place_of(extent.offset);
    throw mismatch_error(std::string(what) + " of " + parts_.name_of(buffer.tile), place,
                         parts_.store->way_back(extent.offset));
  };
  const ExtentHashes gradient = expected_gradient(index);
  if (!gradient.before.empty() && extent_checksum(gradient.before) != buffer.gradient_checksum) {
    refuse("gradients", buffer.gradient_extent);
  }
  for (std::size_t part = 0; part < kParts; ++part) {
    if (!buffer.read[part]) continue;
    const TileStore::Slot slot = parts_.store->readable(buffer.tile);
    if (extent_checksum(granules(buffer.before[part], buffer, part)) == slot.checksum[part]) continue;
    refuse(part == kWeightsIndex ? "weights" : "states", slot.extent[part]);
  }
}

TileMemory TileMover::blank(std::uint32_t tile, std::uint32_t index) {
  Buffer& buffer = *buffers_[index];
  if (buffer.state == State::kSaving) finish_save(index);
  SPILLWAY_CHECK(buffer.state == State::kFree, "a buffer holds one tile at a time");
  buffer.state = State::kLoaded;
  buffer.tile = tile;
  buffer.memory = memory_of(tile, index);
  buffer.gradient = {};
  buffer.copied = false;
  for (std::size_t part = 0; part < kParts; ++part) {
    buffer.read[part] = buffer.hashed[part] = false;
    if (!buffer.memory.part[part]) continue;
    std::memset(buffer.memory.part[part], 0, extent_bytes(parts_.tiles[tile].shape, static_cast<Part>(part)));
  }
  return buffer.memory;
}

void TileMover::hash(const Buffer& buffer, std::size_t part, std::vector<std::uint64_t>& into) const {
  const std::uint64_t bytes = extent_bytes(parts_.tiles[buffer.tile].shape, static_cast<Part>(part));
  granule_checksums({buffer.memory.part[part], bytes}, granules(into, buffer, part), *parts_.workers);
}

bool TileMover::to_slot(const Buffer& buffer, Part part, Save kind) const {
  const TilePlace& place = parts_.tiles[buffer.tile];
  if (!parts_.store || !buffer.memory.part[index_of(part)]) return false;
  switch (kind) {
    case Save::kUpdated: return written_by_update(place, part);
    case Save::kNew: return true;
    case Save::kCommit: return !parts_.store->written(buffer.tile, part);
    case Save::kRestored: return false;
  }
  return false;
}

void TileMover::start_save(std::uint32_t index, Save kind, std::byte* delivered) {
  Buffer& buffer = *buffers_[index];
  SPILLWAY_CHECK(buffer.state == State::kLoaded, "only a loaded tile is saved");
  const TilePlace& place = parts_.tiles[buffer.tile];
  buffer.state = State::kSaving;
  buffer.copied = false;
  auto copy = [&](std::byte* to, std::size_t part) {
    const std::uint64_t bytes = payload_bytes(place.shape, static_cast<Part>(part));
    const StreamSpan span(parts_.watch.timeline, {.kind = SpanKind::kCopyUp, .subject = buffer.tile, .bytes = bytes},
                          *parts_.h2d);
    parts_.device->copy_async(CopyKind::kHostToDevice, to, buffer.memory.part[part], bytes, *parts_.h2d);
    parts_.device->record(*buffer.copies, *parts_.h2d);
    buffer.copied = true;
    h2d_bytes_ += bytes;
  };
  auto copy_to_hbm = [&](std::uint64_t offset, std::size_t part) { copy(parts_.device->hbm().data() + offset, part); };
  // First, before any write: the next forward pass waits for these weights.
  if (delivered) copy(delivered, kWeightsIndex);
  for (std::size_t part = 0; part < kParts; ++part) {
    if (!buffer.memory.part[part]) continue;
    if (kind == Save::kUpdated) {
      const std::uint64_t bytes = payload_bytes(place.shape, static_cast<Part>(part));
      hits_.bytes += bytes;
      hits_.hit_bytes += buffer.read[part] ? 0 : bytes;
    }
    if (kind != Save::kCommit && route_of(place.home[part]).copied) copy_to_hbm(place.offset[part], part);
    if (kind != Save::kCommit && part == kWeightsIndex && place.hbm_weights) copy_to_hbm(*place.hbm_weights, part);
    if (!to_slot(buffer, static_cast<Part>(part), kind)) continue;
    if (!buffer.hashed[part]) hash(buffer, part, buffer.after[part]);
    const std::uint64_t sum = extent_checksum(granules(buffer.after[part], buffer, part));
    const Extent extent = parts_.store->writable(buffer.tile).extent[part];
    buffer.io->add({.op = IoOp::kWrite,
                    .priority = IoPriority::kNormal,
                    .file = kStripedSpace,
                    .offset = extent.offset,
                    .buffer = buffer.memory.part[part],
                    .bytes = extent.bytes});
    // Noted when the write starts, not when it ends: whoever reads the tile waits for the save first
    // (finish_saves_of()), and a commit syncs only after all of them.
    parts_.store->note_written(buffer.tile, static_cast<Part>(part), sum);
  }
}

void TileMover::finish_saves() {
  for (std::uint32_t b = 0; b < buffers_.size(); ++b) finish_save(b);
}

void TileMover::finish_saves_of(std::uint32_t first, std::uint32_t end) {
  for (std::uint32_t b = 0; b < buffers_.size(); ++b) {
    if (buffers_[b]->tile >= first && buffers_[b]->tile < end) finish_save(b);
  }
}

void TileMover::finish_save(std::uint32_t index) {
  Buffer& buffer = *buffers_[index];
  if (buffer.state != State::kSaving) return;
  try {
    wait(buffer);
  } catch (...) {
    // The slot is noted as written and is not: no commit may name it.
    if (parts_.store) parts_.store->note_lost();
    throw;
  }
  buffer.state = State::kFree;
}

}  // namespace spillway
