#include "swap/tile_store.h"

#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <optional>

#include "kernels/checksum.h"
#include "spillway/error.h"
#include "spillway/log.h"

namespace spillway {
namespace {

constexpr double kLockPatienceSeconds = 10;   // the kernel may still finish a killed holder's writes
constexpr double kGlancePatienceSeconds = 1;  // to tell a store in use from one that merely exists

StoreGeometry geometry_of(const TileStore::Created& shape) {
  return {.description_bytes = align_up(shape.identity.description.size() + 1, kExtentAlignment),
          .record_bytes = record_bytes(shape.tiles.size()),
          .scratch_bytes = shape.scratch_bytes,
          .slots = shape.slots};
}

std::string description_of(const StoreFiles& files) {
  const Superblock& block = files.superblock();
  AlignedBuffer buffer(align_up(block.description_bytes + 1, kExtentAlignment));
  files.read_at(kExtentAlignment, buffer.bytes());
  std::string text(reinterpret_cast<const char*>(buffer.data.get()), block.description_bytes);
  if (granule_checksum(std::as_bytes(std::span(text))) != block.description_checksum) {
    throw Error(Code::kCorrupt, {files.place_of(kExtentAlignment).file->path().string(),
                                 "the model description is damaged", 0, "start over with --fresh"});
  }
  return text;
}

// False for a store whose run was cut short before its first commit: there is nothing in it to lose.
bool holds_a_step(const StorePaths& paths) {
  try {
    const StoreFiles files = StoreFiles::open(paths.directories, kGlancePatienceSeconds);
    const Superblock& block = files.superblock();
    if (block.slots < 2) return true;
    const std::uint64_t bytes = record_bytes(block.tiles);
    const std::uint64_t first = kExtentAlignment + align_up(block.description_bytes + 1, kExtentAlignment);
    AlignedBuffer buffer(bytes);
    for (std::uint64_t record = 0; record < 4; ++record) {
      Manifest manifest;
      files.read_at(first + record * bytes, buffer.bytes());
      const RecordState state = decode_record(buffer.bytes(), block.fingerprint, block.tiles, manifest);
      // The first commit goes to the second record: damaged beside an empty first one, it was torn.
      if (state == RecordState::kValid || (state == RecordState::kDamaged && record < 2)) return true;
    }
    return false;
  } catch (const Error& failure) {
    if (failure.code() == Code::kBusy) throw;
    return true;  // damaged, incomplete, of another version, or no store at all: not this run's to judge
  }
}

std::filesystem::path store_file(const std::filesystem::path& directory) { return directory / kStoreFileName; }

}  // namespace

std::uint64_t TileStore::space_bytes(const Created& shape) {
  return lay_out_store(shape.tiles, geometry_of(shape)).total_bytes;
}

std::uint64_t TileStore::disk_bytes(const Created& shape, std::size_t paths) {
  return StoreFiles::disk_bytes(space_bytes(shape), paths);
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
  return ::lstat(store_file(directory).c_str(), &info) == 0 ? static_cast<std::uint64_t>(info.st_size) : 0;
}

bool TileStore::exists(const StorePaths& paths) { return StoreFiles::exist(paths.directories); }

TileStore::TileStore(StoreFiles files, const Created& shape)
    : files_(std::move(files)),
      fingerprint_(shape.identity.fingerprint),
      slots_(shape.slots),
      layout_(lay_out_store(shape.tiles, geometry_of(shape))) {
  committed_.tiles.resize(shape.tiles.size());
  committed_.blob.reserve(kBlobCapacity);
  next_ = committed_;
  next_.blob.reserve(kBlobCapacity);
  written_.resize(shape.tiles.size());
}

std::unique_ptr<TileStore> TileStore::create(const StorePaths& paths, const Created& shape, bool replace) {
  const auto& directories = paths.directories;
  if (!replace && exists(paths) && holds_a_step(paths)) {
    const auto found = std::find_if(directories.begin(), directories.end(), [](const auto& d) { return exists(d); });
    throw Error(Code::kExists,
                {store_file(*found).string(), "a store exists", 0, "go on with --resume, or start over with --fresh"});
  }
  std::vector<std::uint32_t> shares = paths.shares;
  if (shares.empty()) shares.assign(directories.size(), 1);
  const StripeMap stripes = StoreFiles::stripes_of(shares);
  // The old store is locked while it is replaced, so that nobody trains in it meanwhile; it goes only when the new
  // files have their space, or when there is no other way.
  std::vector<File> old;
  for (std::uint32_t i = 0; i < directories.size(); ++i) {
    const auto path = store_file(directories[i]);
    if (!exists(directories[i])) continue;
    old.push_back(File::open(path, {.writable = true, .create = false, .direct = false}));
    old.back().lock(kLockPatienceSeconds);
    if (free_disk_bytes(directories[i]) < stripes.file_bytes(i, space_bytes(shape))) {
      ::unlink(path.c_str());
      old.pop_back();  // its space comes back with its last descriptor
    }
  }
  StoreFiles files = StoreFiles::create(directories, shares, space_bytes(shape));
  std::unique_ptr<TileStore> store(new TileStore(std::move(files), shape));
  store->write_description(shape);
  store->files_.publish();
  return store;
}

void TileStore::write_description(const Created& shape) {
  const std::string& text = shape.identity.description;
  AlignedBuffer description(geometry_of(shape).description_bytes);
  std::memcpy(description.data.get(), text.data(), text.size());
  files_.write_at(layout_.description_offset, description.bytes());
  // fallocate gives zeros, a reused device might not: an old record must never pass for one of this store.
  AlignedBuffer zeros(kExtentAlignment);
  for (const auto& record : layout_.record_offset) {
    for (std::uint64_t copy : record) files_.write_at(copy, zeros.bytes());
  }
  Superblock block{};
  block.slots = slots_;
  block.fingerprint = fingerprint_;
  block.tiles = shape.tiles.size();
  block.description_bytes = text.size();
  block.total_bytes = layout_.total_bytes;
  block.scratch_bytes = shape.scratch_bytes;
  block.description_checksum = granule_checksum(std::as_bytes(std::span(text)));
  files_.write_superblocks(block);
}

std::unique_ptr<TileStore> TileStore::open(const StorePaths& paths, const Created& shape) {
  StoreFiles files = StoreFiles::open(paths.directories, kLockPatienceSeconds);
  const Superblock block = files.superblock();
  const std::string path = files.files().front().path().string();
  if (block.slots < 2) {
    throw Error(Code::kUnsupported, {path, "made with commit_every 0: one slot a tile, no resume", 0,
                                     "start over with --fresh; commit_every 1 makes every step resumable"});
  }
  if (block.fingerprint != shape.identity.fingerprint || block.tiles != shape.tiles.size()) {
    throw Error(Code::kInvalidArgument,
                {path, "made for another model, weight type, optimizer or tile size", 0,
                 "use the model and settings it was made with, name another nvme_path, or start over with --fresh"});
  }
  Created as_stored = shape;
  as_stored.slots = block.slots;
  as_stored.scratch_bytes = block.scratch_bytes;
  as_stored.identity.description.resize(block.description_bytes);
  std::unique_ptr<TileStore> store(new TileStore(std::move(files), as_stored));
  if (store->layout_.total_bytes != block.total_bytes) {
    throw Error(Code::kCorrupt, {path, "the superblock does not fit the model", 0, "start over with --fresh"});
  }
  store->load_manifest();
  // What was read need not be durable: the run before may have been killed between writing its record and syncing it.
  // From here on the slots that only the older record names are overwritten.
  store->files_.sync();
  store->grow_scratch(shape.least_scratch_bytes);
  return store;
}

// The scratch area is the end of the space and of no run but this one: the superblock goes on to say what the store was
// made with.
void TileStore::grow_scratch(std::uint64_t least_bytes) {
  const std::uint64_t total = layout_.scratch_offset + align_up(least_bytes, kExtentAlignment);
  if (total <= layout_.total_bytes) return;
  files_.grow(total);
  layout_.total_bytes = total;
}

std::string TileStore::read_description(const StorePaths& paths) {
  return description_of(StoreFiles::open(paths.directories, kLockPatienceSeconds));
}

void TileStore::load_manifest() {
  std::vector<std::vector<std::byte>> records;
  const std::uint64_t bytes = record_bytes(layout_.tiles.size());
  AlignedBuffer buffer(bytes);
  std::optional<Error> unreadable;
  for (const auto& record : layout_.record_offset) {
    for (std::uint64_t copy : record) {
      records.emplace_back();
      try {
        files_.read_at(copy, buffer.bytes());
        records.back().assign(buffer.data.get(), buffer.data.get() + bytes);
      } catch (const Error& failure) {  // as good as damaged: it has a copy
        log(LogLevel::kWarning, std::string(failure.what()) + "; it is a manifest record, of which there are others");
        unreadable = failure;
      }
    }
  }
  ManifestChoice choice = choose_manifest(records, fingerprint_, layout_.tiles.size());
  if (!choice.manifest && unreadable) throw *unreadable;
  if (!choice.manifest) {
    const char* hint = choice.others_damaged
                           ? "its commit records are damaged; check the drive, or start over with --fresh"
                           : "its run was cut short before the first commit; start over with --fresh";
    throw Error(Code::kCorrupt, {files_.files().front().path().string(), "holds no committed step", 0, hint});
  }
  if (choice.others_damaged) {
    log(LogLevel::kWarning, files_.files().front().path().string() +
                                ": the newest manifest record is damaged; going back to step " +
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
        files_.read_at(extent.offset + done, granule);
        granules.push_back(granule_checksum(granule));
      }
      if (extent_checksum(granules) != manifest.tiles[t].checksum[part]) {
        const StoreFiles::Place place = files_.place_of(extent.offset);
        throw Error(Code::kCorrupt, {place.file->path().string(),
                                     "tile " + std::to_string(t) + " at offset " + std::to_string(place.offset) +
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

TileStore::Slot TileStore::committed(std::uint32_t tile) const {
  const TileCommit& commit = committed_.tiles[tile];
  Slot slot;
  for (std::size_t part = 0; part < kParts; ++part) {
    slot.extent[part] = layout_.tiles[tile].extent[commit.slot][part];
    slot.checksum[part] = commit.checksum[part];
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
  batch.add({.op = IoOp::kSync, .priority = IoPriority::kUrgent, .file = kStripedSpace});
  batch.wait();
  const auto record = buffer.first(commit_buffer_bytes());
  encode_record(next_, fingerprint_, record);
  for (std::uint64_t copy : layout_.record_offset[next_.sequence % 2]) {
    batch.add({.op = IoOp::kWrite,
               .priority = IoPriority::kUrgent,
               .file = kStripedSpace,
               .offset = copy,
               .buffer = record.data(),
               .bytes = record.size()});
  }
  batch.wait();
  batch.add({.op = IoOp::kSync, .priority = IoPriority::kUrgent, .file = kStripedSpace});
  batch.wait();
  std::swap(committed_, next_);
  forget_written();
}

}  // namespace spillway
