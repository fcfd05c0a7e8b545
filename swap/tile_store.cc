#include "swap/tile_store.h"

#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "kernels/checksum.h"
#include "spillway/error.h"
#include "spillway/log.h"

namespace spillway {
namespace {

constexpr std::uint64_t kStoreMagic = 0x3145524f54535053;  // "SPSTORE1"
constexpr double kLockPatienceSeconds = 10;   // the kernel may still finish a killed holder's writes
constexpr double kGlancePatienceSeconds = 1;  // to tell a store in use from one that merely exists

struct Superblock {
  std::uint64_t magic;
  std::uint32_t format_version;
  std::uint32_t slots;
  std::uint64_t fingerprint;
  std::uint64_t tiles;
  std::uint64_t description_bytes;  // used
  std::uint64_t total_bytes;
  std::uint64_t scratch_bytes;
  std::uint64_t description_checksum;
  std::uint64_t checksum;  // of the bytes before this field
};

// O_DIRECT needs aligned memory.
struct AlignedBuffer {
  explicit AlignedBuffer(std::uint64_t bytes)
      : size(bytes), data(static_cast<std::byte*>(std::aligned_alloc(4096, bytes))) {
    std::memset(data, 0, size);
  }
  ~AlignedBuffer() { std::free(data); }
  AlignedBuffer(const AlignedBuffer&) = delete;
  AlignedBuffer& operator=(const AlignedBuffer&) = delete;
  std::span<std::byte> bytes() const { return {data, size}; }
  std::uint64_t size;
  std::byte* data;
};

std::uint64_t superblock_checksum(const Superblock& block) {
  return granule_checksum({reinterpret_cast<const std::byte*>(&block), offsetof(Superblock, checksum)});
}

StoreGeometry geometry_of(const TileStore::Created& shape) {
  return {.description_bytes = align_up(shape.identity.description.size() + 1, kExtentAlignment),
          .record_bytes = record_bytes(shape.tiles.size()),
          .scratch_bytes = shape.scratch_bytes,
          .slots = shape.slots};
}

Superblock read_superblock(const File& file) {
  AlignedBuffer buffer(kExtentAlignment);
  const std::string path = file.path().string();
  if (file.size_bytes() < kExtentAlignment) {
    throw Error(Code::kCorrupt, {path, "too short to be a store", 0, "start over with --fresh"});
  }
  file.read_at(0, buffer.bytes());
  Superblock block;
  std::memcpy(&block, buffer.data, sizeof block);
  if (block.magic != kStoreMagic) {
    throw Error(Code::kCorrupt, {path, "not a Spillway store, or its creation was cut short", 0,
                                 "name another nvme_path, or start over with --fresh"});
  }
  if (block.format_version > kFormatVersion) {
    throw Error(Code::kUnsupported,
                {path,
                 "written by a newer version (store format " + std::to_string(block.format_version) +
                     ", this one reads up to " + std::to_string(kFormatVersion) + ")",
                 0, "use that version, or start over with --fresh"});
  }
  if (block.checksum != superblock_checksum(block) || block.description_bytes > block.total_bytes) {
    throw Error(Code::kCorrupt, {path, "the superblock is damaged", 0, "start over with --fresh"});
  }
  if (const std::uint64_t size = file.size_bytes(); size < block.total_bytes) {
    throw Error(Code::kCorrupt,
                {path, "cut short: it has " + std::to_string(size) + " bytes of " + std::to_string(block.total_bytes),
                 0, "copy it again, or start over with --fresh"});
  }
  return block;
}

std::string description_of(const File& file, const Superblock& block) {
  AlignedBuffer buffer(align_up(block.description_bytes + 1, kExtentAlignment));
  file.read_at(kExtentAlignment, buffer.bytes());
  std::string text(reinterpret_cast<const char*>(buffer.data), block.description_bytes);
  if (granule_checksum(std::as_bytes(std::span(text))) != block.description_checksum) {
    throw Error(Code::kCorrupt,
                {file.path().string(), "the model description is damaged", 0, "start over with --fresh"});
  }
  return text;
}

// False for a store whose run was cut short before its first commit: there is nothing in it to lose.
bool holds_a_step(const File& file) {
  Superblock block;
  try {
    block = read_superblock(file);
  } catch (const Error&) {
    return true;  // damaged, of a newer version, or no store at all: not this run's to judge
  }
  if (block.slots < 2) return true;
  const std::uint64_t bytes = record_bytes(block.tiles);
  const std::uint64_t first = kExtentAlignment + align_up(block.description_bytes + 1, kExtentAlignment);
  AlignedBuffer buffer(bytes);
  for (std::uint64_t record = 0; record < 4; ++record) {
    Manifest manifest;
    file.read_at(first + record * bytes, buffer.bytes());
    if (decode_record(buffer.bytes(), block.fingerprint, block.tiles, manifest) != RecordState::kEmpty) return true;
  }
  return false;
}

File open_locked(const std::filesystem::path& directory) {
  const auto path = directory / kStoreFileName;
  if (!TileStore::exists(directory)) {
    throw Error(Code::kNotFound,
                {directory.string(), "holds no store", 0, "check the path, or start a run without --resume"});
  }
  File file = File::open(path, {.writable = true, .create = false, .direct = true});
  file.lock(kLockPatienceSeconds);
  return file;
}

}  // namespace

std::uint64_t TileStore::disk_bytes(const Created& shape) {
  return lay_out_store(shape.tiles, geometry_of(shape)).total_bytes;
}

std::uint64_t free_disk_bytes(const std::filesystem::path& directory) {
  struct statvfs info;
  if (::statvfs(directory.c_str(), &info) != 0) {
    throw Error(Code::kIo, {directory.string(), "its free space cannot be read", errno, "check the path"});
  }
  return static_cast<std::uint64_t>(info.f_bavail) * info.f_frsize;
}

std::uint64_t TileStore::file_bytes(const std::filesystem::path& directory) {
  struct stat info;
  return ::lstat((directory / kStoreFileName).c_str(), &info) == 0 ? static_cast<std::uint64_t>(info.st_size) : 0;
}

bool TileStore::exists(const std::filesystem::path& directory) {
  struct stat info;
  return ::lstat((directory / kStoreFileName).c_str(), &info) == 0;
}

TileStore::TileStore(File file, const Created& shape)
    : file_(std::move(file)),
      fingerprint_(shape.identity.fingerprint),
      slots_(shape.slots),
      layout_(lay_out_store(shape.tiles, geometry_of(shape))) {
  committed_.tiles.resize(shape.tiles.size());
  committed_.blob.reserve(kBlobCapacity);
  next_ = committed_;
  next_.blob.reserve(kBlobCapacity);
  written_.resize(shape.tiles.size());
}

std::unique_ptr<TileStore> TileStore::create(const std::filesystem::path& directory, const Created& shape,
                                             bool replace) {
  const auto path = directory / kStoreFileName;
  const auto fresh = directory / (std::string(kStoreFileName) + ".new");
  // The old store is locked while it is replaced, so that nobody trains in it meanwhile; it goes only when the new file
  // has its space.
  std::unique_ptr<File> old;
  if (exists(directory)) {
    old = std::make_unique<File>(File::open(path, {.writable = true, .create = false, .direct = false}));
    old->lock(replace ? kLockPatienceSeconds : kGlancePatienceSeconds);
    if (!replace && holds_a_step(*old)) {
      throw Error(Code::kExists,
                  {path.string(), "a store exists", 0, "go on with --resume, or start over with --fresh"});
    }
    if (free_disk_bytes(directory) < disk_bytes(shape)) {
      ::unlink(path.c_str());
      old.reset();  // its space comes back with its last descriptor
    }
  }
  if (::access(fresh.c_str(), F_OK) == 0) {  // left by a run that was cut short, or one that is at it right now
    File::open(fresh, {.writable = true, .create = false, .direct = false}).lock(0);
    ::unlink(fresh.c_str());
  }
  File file = File::open(fresh, {.writable = true, .create = true, .direct = true});
  std::unique_ptr<TileStore> store;
  try {
    file.lock(0);
    file.preallocate(disk_bytes(shape));
    store.reset(new TileStore(std::move(file), shape));
    store->write_superblock(shape);
    store->file_.rename_to(path);
  } catch (...) {
    ::unlink(fresh.c_str());
    throw;
  }
  return store;
}

void TileStore::write_superblock(const Created& shape) {
  const std::string& text = shape.identity.description;
  AlignedBuffer description(geometry_of(shape).description_bytes);
  std::memcpy(description.data, text.data(), text.size());
  file_.write_at(layout_.description_offset, description.bytes());
  // fallocate gives zeros, a reused device might not: an old record must never pass for one of this store.
  AlignedBuffer zeros(kExtentAlignment);
  for (const auto& record : layout_.record_offset) {
    for (std::uint64_t copy : record) file_.write_at(copy, zeros.bytes());
  }
  Superblock block{.magic = kStoreMagic,
                   .format_version = kFormatVersion,
                   .slots = slots_,
                   .fingerprint = fingerprint_,
                   .tiles = shape.tiles.size(),
                   .description_bytes = text.size(),
                   .total_bytes = layout_.total_bytes,
                   .scratch_bytes = shape.scratch_bytes,
                   .description_checksum = granule_checksum(std::as_bytes(std::span(text))),
                   .checksum = 0};
  block.checksum = superblock_checksum(block);
  std::memcpy(zeros.data, &block, sizeof block);
  file_.write_at(0, zeros.bytes());
  file_.sync();
}

std::unique_ptr<TileStore> TileStore::open(const std::filesystem::path& directory, const Created& shape) {
  File file = open_locked(directory);
  const Superblock block = read_superblock(file);
  const std::string path = file.path().string();
  if (block.slots < 2) {
    throw Error(Code::kUnsupported, {path, "made with commit_every 0: one slot a tile, no resume", 0,
                                     "start over with --fresh; commit_every 1 makes every step resumable"});
  }
  if (block.fingerprint != shape.identity.fingerprint || block.tiles != shape.tiles.size()) {
    throw Error(Code::kInvalidArgument,
                {path, "made for another model, weight type or tile size", 0,
                 "use the model and settings it was made with, name another nvme_path, or start over with --fresh"});
  }
  Created as_stored = shape;
  as_stored.slots = block.slots;
  as_stored.scratch_bytes = block.scratch_bytes;
  as_stored.identity.description.resize(block.description_bytes);
  std::unique_ptr<TileStore> store(new TileStore(std::move(file), as_stored));
  if (store->layout_.total_bytes != block.total_bytes) {
    throw Error(Code::kCorrupt, {path, "the superblock does not fit the model", 0, "start over with --fresh"});
  }
  store->load_manifest();
  return store;
}

std::string TileStore::read_description(const std::filesystem::path& directory) {
  const File file = open_locked(directory);
  return description_of(file, read_superblock(file));
}

void TileStore::load_manifest() {
  std::vector<std::vector<std::byte>> records;
  const std::uint64_t bytes = record_bytes(layout_.tiles.size());
  AlignedBuffer buffer(bytes);
  for (const auto& record : layout_.record_offset) {
    for (std::uint64_t copy : record) {
      file_.read_at(copy, buffer.bytes());
      records.emplace_back(buffer.data, buffer.data + bytes);
    }
  }
  ManifestChoice choice = choose_manifest(records, fingerprint_, layout_.tiles.size());
  if (!choice.manifest) {
    throw Error(Code::kCorrupt, {file_.path().string(), "holds no committed step", 0,
                                 "its run was cut short before the first commit; start over with --fresh"});
  }
  if (choice.others_damaged) {
    log(LogLevel::kWarning, file_.path().string() + ": the newest manifest record is damaged; going back to step " +
                                std::to_string(choice.manifest->step) + " and checking every byte of it");
    verify_all(*choice.manifest);
  }
  committed_ = std::move(*choice.manifest);
  committed_.blob.reserve(kBlobCapacity);
  next_ = committed_;
  next_.blob.reserve(kBlobCapacity);
}

void TileStore::verify_all(const Manifest& manifest) {
  AlignedBuffer buffer(kGranuleBytes);
  std::vector<std::uint64_t> granules;
  for (std::size_t t = 0; t < layout_.tiles.size(); ++t) {
    for (std::size_t part = 0; part < kParts; ++part) {
      const Extent& extent = layout_.tiles[t].extent[manifest.tiles[t].slot][part];
      if (extent.bytes == 0) continue;
      granules.clear();
      for (std::uint64_t done = 0; done < extent.bytes; done += kGranuleBytes) {
        const auto granule = buffer.bytes().first(std::min(kGranuleBytes, extent.bytes - done));
        file_.read_at(extent.offset + done, granule);
        granules.push_back(granule_checksum(granule));
      }
      if (extent_checksum(granules) != manifest.tiles[t].checksum[part]) {
        throw Error(Code::kCorrupt, {file_.path().string(),
                                     "tile " + std::to_string(t) + " at offset " + std::to_string(extent.offset) +
                                         " does not match its checksum",
                                     0, "no intact step is left; start over with --fresh"});
      }
    }
  }
}

TileStore::Slot TileStore::readable(std::uint32_t tile) const {
  const TileCommit& commit = committed_.tiles[tile];
  Slot slot;
  for (std::size_t part = 0; part < kParts; ++part) {
    const bool newer = written_[tile].part[part];
    const std::uint32_t index = newer ? commit.slot ^ 1u : commit.slot;
    slot.extent[part] = layout_.tiles[tile].extent[index][part];
    slot.checksum[part] = newer ? written_[tile].checksum[part] : commit.checksum[part];
  }
  return slot;
}

TileStore::Slot TileStore::writable(std::uint32_t tile) const {
  Slot slot;
  const std::uint32_t index = committed_.tiles[tile].slot ^ 1u;
  for (std::size_t part = 0; part < kParts; ++part) slot.extent[part] = layout_.tiles[tile].extent[index][part];
  return slot;
}

void TileStore::note_written(std::uint32_t tile, Part part, std::uint64_t checksum) {
  Written& written = written_[tile];
  if (!written.part[0] && !written.part[1]) ++written_count_;
  written.part[index_of(part)] = true;
  written.checksum[index_of(part)] = checksum;
}

void TileStore::forget_written() {
  for (Written& written : written_) written = {};
  written_count_ = 0;
}

void TileStore::commit(std::uint64_t step, std::span<const std::byte> blob, StoreThread& thread,
                       std::span<std::byte> buffer) {
  next_.sequence = committed_.sequence + 1;
  next_.step = step;
  next_.blob.assign(blob.begin(), blob.end());
  for (std::size_t t = 0; t < written_.size(); ++t) {
    next_.tiles[t] = committed_.tiles[t];
    const Written& written = written_[t];
    if (!written.part[0] && !written.part[1]) continue;
    next_.tiles[t].slot ^= 1u;
    for (std::size_t part = 0; part < kParts; ++part) {
      const bool empty = layout_.tiles[t].extent[0][part].bytes == 0;
      SPILLWAY_CHECK(written.part[part] || empty, "a commit covers both parts of a tile");
      next_.tiles[t].checksum[part] = written.checksum[part];
    }
  }
  IoBatch batch(thread);
  batch.add({.op = IoOp::kSync, .priority = IoPriority::kUrgent});
  batch.wait();
  const auto record = buffer.first(commit_buffer_bytes());
  encode_record(next_, fingerprint_, record);
  for (std::uint64_t copy : layout_.record_offset[next_.sequence % 2]) {
    batch.add({.op = IoOp::kWrite,
               .priority = IoPriority::kUrgent,
               .offset = copy,
               .buffer = record.data(),
               .bytes = record.size()});
  }
  batch.wait();
  batch.add({.op = IoOp::kSync, .priority = IoPriority::kUrgent});
  batch.wait();
  std::swap(committed_, next_);
  forget_written();
}

}  // namespace spillway
