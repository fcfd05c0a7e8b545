#include "swap/store_check.h"

#include <fmt/format.h>

#include <algorithm>
#include <vector>

#include "kernels/checksum.h"

namespace spillway {
namespace {

constexpr std::uint64_t kChunkBytes = 1 * kMiB;
// Enough in flight for every drive to be busy, however many there are, within 64 MiB.
constexpr std::uint64_t kMostChunks = 64, kChunksPerFile = 32;
static_assert(kChunkBytes % kGranuleBytes == 0);

// Tile after tile, its parts in order.
std::vector<Extent> extents_of(const StoreLayout& layout, const Manifest& manifest) {
  std::vector<Extent> extents;
  for (std::uint32_t t = 0; t < layout.tiles.size(); ++t) {
    for (const Part part : {Part::kWeights, Part::kStates}) {
      extents.push_back(layout.tiles[t].extent[manifest.tiles[t].slot][index_of(part)]);
    }
  }
  return extents;
}

std::uint64_t bytes_of(const std::vector<Extent>& extents) {
  std::uint64_t bytes = 0;
  for (const Extent& extent : extents) bytes += extent.bytes;
  return bytes;
}

class Checker {
 public:
  Checker(StoreFiles& files, const StoreLayout& layout, const Manifest& manifest, const ExtentCheck& check)
      : files_(files),
        manifest_(manifest),
        check_(check),
        extents_(extents_of(layout, manifest)),
        open_(extents_.size()),
        total_bytes_(bytes_of(extents_)),
        memory_(kChunkBytes * std::min<std::uint64_t>({kMostChunks, kChunksPerFile * files.files().size(),
                                                       div_up(total_bytes_, kChunkBytes) + 1})) {
    IoQueueOptions options;
    options.block_bytes = kChunkBytes;
    options.stripes = &files.stripes();
    const std::vector<File*> pointers = files.pointers();
    const std::span<std::byte> regions[] = {memory_.bytes()};
    queue_ = IoQueue::create(options, pointers, regions);
    chunks_.resize(memory_.size / kChunkBytes);
  }

  std::uint64_t run() {
    // All chunks are read at once; each that comes back reads the next bytes, so the drive is never without requests.
    for (std::size_t c = 0; c < chunks_.size(); ++c) read_next(c);
    IoCompletion completions[16];
    while (queue_->pending() > 0) {
      for (const IoCompletion& completion : queue_->wait(completions, -1)) {
        finish(chunks_[completion.tag], completion);
        read_next(completion.tag);
      }
      if (check_.progress) check_.progress(done_bytes_, total_bytes_);
    }
    return total_bytes_;
  }

 private:
  struct Chunk {
    std::size_t extent = 0;
    std::uint64_t at = 0, bytes = 0;
  };
  struct OpenExtent {
    std::vector<std::uint64_t> granules;  // while it is being read
    std::uint64_t left = 0;
    int error = 0;
  };

  const Extent& extent(std::size_t e) const { return extents_[e]; }
  std::span<std::byte> memory(const Chunk& chunk) const {
    const auto index = static_cast<std::size_t>(&chunk - chunks_.data());
    return memory_.bytes().subspan(index * kChunkBytes, chunk.bytes);
  }

  void read_next(std::size_t index) {
    while (next_ < open_.size() && at_ == extent(next_).bytes) {
      ++next_;
      at_ = 0;
    }
    if (next_ == open_.size()) return;
    const Extent& from = extent(next_);
    if (at_ == 0) {
      open_[next_].granules.resize(div_up(from.bytes, kGranuleBytes));
      open_[next_].left = from.bytes;
    }
    Chunk& chunk = chunks_[index];
    chunk = {.extent = next_, .at = at_, .bytes = std::min(kChunkBytes, from.bytes - at_)};
    at_ += chunk.bytes;
    queue_->submit({.op = IoOp::kRead,
                    .file = kStripedSpace,
                    .offset = from.offset + chunk.at,
                    .buffer = memory(chunk).data(),
                    .bytes = chunk.bytes,
                    .tag = index});
  }

  void finish(const Chunk& chunk, const IoCompletion& completion) {
    OpenExtent& open = open_[chunk.extent];
    if (completion.error != 0) open.error = completion.error;
    const std::size_t granules = div_up(chunk.bytes, kGranuleBytes);
    if (completion.error == 0)
      granule_checksums(memory(chunk), std::span(open.granules).subspan(chunk.at / kGranuleBytes, granules));
    open.left -= chunk.bytes;
    done_bytes_ += chunk.bytes;
    // Chunks of an extent come back in any order; the last one closes it.
    if (open.left > 0) return;
    const auto tile = static_cast<std::uint32_t>(chunk.extent / kParts);
    const std::size_t part = chunk.extent % kParts;
    const bool good = open.error == 0 && extent_checksum(open.granules) == manifest_.tiles[tile].checksum[part];
    const int error = open.error;
    // Only extents that are being read take memory.
    open.granules = {};
    if (good) return;
    const Extent& at = extent(chunk.extent);
    // Reported and gone on: one bad extent says nothing of the others.
    check_.bad({.tile = tile,
                .part = static_cast<Part>(part),
                .extent = at,
                .place = files_.place_of(at.offset),
                .error = error});
  }

  StoreFiles& files_;
  const Manifest& manifest_;
  const ExtentCheck& check_;
  const std::vector<Extent> extents_;
  std::vector<OpenExtent> open_;  // index as extents_
  const std::uint64_t total_bytes_;
  std::vector<Chunk> chunks_;
  std::size_t next_ = 0;  // extent to read next, and where in it
  std::uint64_t at_ = 0;
  std::uint64_t done_bytes_ = 0;
  AlignedBuffer memory_;
  std::unique_ptr<IoQueue> queue_;  // last: it waits for what is under way
};

}  // namespace

std::uint64_t check_extents(StoreFiles& files, const StoreLayout& layout, const Manifest& manifest,
                            const ExtentCheck& check) {
  return Checker(files, layout, manifest, check).run();
}

std::string name_of_part(std::uint32_t tile, Part part, const std::function<std::string(std::uint32_t)>& name_of) {
  return fmt::format("{} of {}", part == Part::kWeights ? "weights" : "states",
                     name_of ? name_of(tile) : fmt::format("tile {}", tile));
}

Error mismatch_error(const std::string& what, const StoreFiles::FileOffset& place, Hint hint) {
  return Error(Code::kCorrupt, place.file->path().string(),
               fmt::format("{} at offset {} do not match their checksum", what, place.offset), 0, std::move(hint));
}

Error bad_bytes_error(const BadBytes& bad, const std::function<std::string(std::uint32_t)>& name_of, Hint hint) {
  const std::string what = name_of_part(bad.tile, bad.part, name_of);
  if (bad.error == 0) return mismatch_error(what, bad.place, std::move(hint));
  return Error(Code::kCorrupt, bad.place.file->path().string(),
               fmt::format("{} at offset {} cannot be read", what, bad.place.offset), bad.error, std::move(hint));
}

}  // namespace spillway
