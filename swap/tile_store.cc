#include "swap/tile_store.h"

#include <fmt/format.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <optional>
#include <utility>

#include "kernels/checksum.h"
#include "spillway/error.h"
#include "spillway/log.h"
#include "spillway/rank_directory.h"
#include "swap/store_check.h"

namespace spillway {
namespace {

constexpr double kGlancePatienceSeconds = 1;  // to tell a store in use from one that merely exists

std::filesystem::path store_file(const std::filesystem::path& directory) { return directory / kStoreFileName; }

[[noreturn]] void refuse_store_in(const std::filesystem::path& directory) {
  const auto path = store_file(directory);
  try {
    File::open(path, {.writable = true, .direct = false}).lock(kGlancePatienceSeconds);
  } catch (const Error& failure) {
    if (failure.code() == Code::kBusy) throw;
  }
  throw Error(Code::kExists, path.string(), "a store exists", 0, Remedy::kResumeOrReplace);
}

}  // namespace

std::uint64_t free_disk_bytes(const std::filesystem::path& directory) {
  struct statvfs info;
  if (::statvfs(directory.c_str(), &info) != 0) {
    throw Error(Code::kIo, {directory.string(), "its free space cannot be read", errno, "check the path"});
  }
  return static_cast<std::uint64_t>(info.f_bavail) * info.f_frsize;
}

std::uint64_t TileStore::file_bytes(const std::filesystem::path& directory) {
  std::uint64_t bytes = 0;
  for (const auto& path : {store_file(directory), StoreFiles::temporary_name(directory)}) {
    struct stat info;
    // What another name leads to as well does not become free when this one goes.
    if (::lstat(path.c_str(), &info) != 0 || info.st_nlink > 1) continue;
    bytes += std::min<std::uint64_t>(info.st_size, std::uint64_t{512} * info.st_blocks);  // it may have holes
  }
  return bytes;
}

bool TileStore::exists(const StorePaths& paths) { return StoreFiles::exist(paths.directories); }

TileStore::TileStore(StoreFiles files, const StoreShape& shape, StoreLayout layout)
    : files_(std::move(files)),
      form_(record_form(shape)),
      slots_(shape.slots),
      ranks_(shape.identity.rank.count),
      layout_(std::move(layout)) {
  committed_.tiles.resize(shape.tiles.size());
  make_room();
  written_.resize(shape.tiles.size());
}

// No commit allocates.
void TileStore::make_room() {
  for (Manifest* manifest : {&committed_, &next_}) {
    if (manifest == &next_) next_ = committed_;
    manifest->update_counts.reserve(form_.parameters);
    manifest->blob.reserve(kBlobCapacity);
  }
}

std::unique_ptr<TileStore> TileStore::create(const StorePaths& paths, const StoreShape& shape, bool replace,
                                             const std::function<void()>& before_loss) {
  if (!replace) refuse_existing(paths);
  auto store = reserve_new(paths, shape, replace ? Existing::kMakesRoom : Existing::kNone);
  if (before_loss && store->takes_over()) before_loss();
  store->make(shape, StoreFiles::new_run());
  return store;
}

void TileStore::refuse_existing(const StorePaths& paths) {
  for (const auto& directory : paths.directories) {
    if (exists(directory)) refuse_store_in(directory);
  }
}

std::vector<std::uint32_t> TileStore::shares_of(const StorePaths& paths) {
  return paths.shares.empty() ? std::vector<std::uint32_t>(paths.directories.size(), 1) : paths.shares;
}

std::unique_ptr<TileStore> TileStore::drafted(StoreFiles files, const StoreShape& shape) {
  StoreLayout layout = lay_out_store(shape.tiles, store_geometry(shape, record_form(shape)));
  return std::unique_ptr<TileStore>(new TileStore(std::move(files), shape, std::move(layout)));
}

std::unique_ptr<TileStore> TileStore::reserve_beside(const StorePaths& paths, const StoreShape& shape) {
  StoreFiles::remove_leftovers(paths.directories, kLockPatienceSeconds);
  return drafted(StoreFiles::create(paths.directories, shares_of(paths), space_bytes(shape)), shape);
}

std::unique_ptr<TileStore> TileStore::reserve_new(const StorePaths& paths, const StoreShape& shape, Existing existing) {
  const auto& directories = paths.directories;
  StoreFiles::remove_leftovers(directories, kLockPatienceSeconds);
  const std::vector<std::uint32_t> shares = shares_of(paths);
  const StripeMap stripes = StoreFiles::stripes_of(shares);
  std::vector<File> old;
  std::vector<std::optional<File>> cramped(directories.size());
  std::vector<bool> held(directories.size());
  for (std::uint32_t i = 0; existing != Existing::kNone && i < directories.size(); ++i) {
    if (!exists(directories[i])) continue;
    const auto path = store_file(directories[i]);
    File file = open_locked(path, {.writable = true, .direct = true}, kLockPatienceSeconds);
    held[i] = true;
    // What another name leads to as well stays, and what others may write is no place for a new store.
    const bool both = existing == Existing::kStays ||
                      free_disk_bytes(directories[i]) >= StoreFiles::file_bytes(stripes, i, space_bytes(shape));
    struct stat info;
    if (both || ::fstat(file.fd(), &info) != 0 || info.st_nlink > 1 || !StoreFiles::is_ours(file)) {
      old.push_back(std::move(file));
    } else {
      cramped[i] = std::move(file);
    }
  }
  StoreFiles files = StoreFiles::create(directories, shares, space_bytes(shape), std::move(cramped));
  // A store gets its name only from who holds a file under the temporary one: what came since we looked is complete,
  // and there will be no other.
  for (std::size_t i = 0; i < directories.size(); ++i) {
    if (!held[i] && exists(directories[i])) refuse_store_in(directories[i]);
  }
  auto store = drafted(std::move(files), shape);
  // Locked until the new store has its name, so that no run trains in what is about to go.
  store->replaced_ = std::move(old);
  return store;
}

void TileStore::make(const StoreShape& shape, const RunId& run) {
  if (files_.takes_over()) files_.take_over(space_bytes(shape));
  write_description(shape, run);
}

void TileStore::write_text(const std::string& description) {
  AlignedBuffer buffer(align_up(description.size() + 1, kExtentAlignment));
  std::memcpy(buffer.data.get(), description.data(), description.size());
  files_.write_at(layout_.description_offset, buffer.bytes());
}

void TileStore::write_description(const StoreShape& shape, const RunId& run) {
  const std::string& text = shape.identity.description;
  write_text(text);
  // fallocate gives zeros, a reused device might not: an old record must never pass for one of this store.
  AlignedBuffer zeros(kExtentAlignment);
  for (const auto& record : layout_.record_offset) {
    for (std::uint64_t copy : record) files_.write_at(copy, zeros.bytes());
  }
  Superblock block{};
  block.slots = slots_;
  block.fingerprint = form_.fingerprint;
  std::ranges::copy(run.word, block.run_id);
  block.rank = shape.identity.rank.index;
  block.ranks = shape.identity.rank.count;
  block.tiles = form_.tiles;
  block.parameters = form_.parameters;
  block.description_bytes = text.size();
  block.total_bytes = layout_.total_bytes;
  block.scratch_bytes = shape.scratch_bytes;
  block.description_checksum = granule_checksum(std::as_bytes(std::span(text)));
  files_.write_superblocks(block);
}

Hint TileStore::way_back(std::uint64_t offset) const {
  if (slots_ < 2) return Remedy::kCheckDriveAndReplace;
  if (files_.cut_short(layout_.total_bytes)) return Remedy::kCutShort;
  const auto behind = std::ranges::upper_bound(layout_.tiles, offset, {}, [](const TileExtents& tile) {
    return tile.extent[0][index_of(Part::kWeights)].offset;
  });
  const auto tile = static_cast<std::size_t>(behind - layout_.tiles.begin()) - 1;  // before all tiles: no such index
  const auto holds = [&](std::uint32_t slot) {
    return tile < layout_.tiles.size() && std::ranges::any_of(layout_.tiles[tile].extent[slot], [&](const Extent& e) {
             return offset >= e.offset && offset - e.offset < e.bytes;
           });
  };
  const std::uint32_t slot = tile < layout_.tiles.size() ? committed_.tiles[tile].slot : 0;
  const std::string step = std::to_string(committed_.step);
  if (!holds(slot)) {
    return {Remedy::kCheckDriveAndGoBack, {step}};
  }
  if (!older_step_ || holds(slot ^ 1u)) {
    return {Remedy::kCheckDriveAndRestore, {step}};
  }
  std::string paths;
  for (const File& file : files_.files()) {
    if (!paths.empty()) paths += ' ';
    std::filesystem::path directory = file.path().parent_path();
    // Ranks go back together: what is named is the directory that has all of theirs.
    if (ranks_ > 1 && directory.filename() == directory_of_rank("", files_.superblock().rank))
      directory = directory.parent_path();
    paths += directory.string();
  }
  return {Remedy::kCheckDriveAndRollBack, {step, paths, std::to_string(*older_step_)}};
}

TileStore::Slot TileStore::readable(std::uint32_t tile) const {
  const TileCommit& commit = committed_.tiles[tile];
  Slot slot;
  for (std::size_t part = 0; part < kParts; ++part) {
    // What was written since the last commit lies in the other slot.
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
  SPILLWAY_CHECK(!unverified_, "a step is overwritten once the newer one is known to be whole");
  SPILLWAY_CHECK(!awaits_others_, "a step is overwritten once all ranks have committed the newer one");
  Slot slot;
  const std::uint32_t index = committed_.tiles[tile].slot ^ 1u;
  for (std::size_t part = 0; part < kParts; ++part) slot.extent[part] = layout_.tiles[tile].extent[index][part];
  return slot;
}

void TileStore::note_written(std::uint32_t tile, Part part, std::uint64_t checksum) {
  // The slot belonged to the step before the last commit, which cannot be gone back to any more.
  older_step_.reset();
  Written& written = written_[tile];
  written.part[index_of(part)] = true;
  written.checksum[index_of(part)] = checksum;
}

void TileStore::forget_written() {
  for (Written& written : written_) written = {};
}

bool TileStore::keeps_update_counts() const noexcept { return form_.version >= kUpdateCountsFormat; }

void TileStore::commit(std::uint64_t step, std::span<const std::byte> blob, StoreThread& thread,
                       std::span<std::byte> buffer, std::span<const std::uint64_t> update_counts) {
  SPILLWAY_CHECK(!awaits_others_, "no rank commits twice before all have committed once");
  if (lost_) {
    throw Error(Code::kIo, files_.files().front().path().string(), "a write since the last commit failed", 0,
                files_.cut_short(layout_.total_bytes) ? Remedy::kCutShort : Remedy::kResume);
  }
  if (!update_counts.empty() && form_.version < kUpdateCountsFormat) {
    throw Error(Code::kUnsupported, files_.files().front().path().string(),
                fmt::format("store format {} has no room for how often each parameter was updated, and some had no "
                            "gradient in this step",
                            form_.version),
                0, Remedy::kRenewStore);
  }
  // The two records alternate: sequence % 2 chooses the one to overwrite, which is never the newest.
  next_.sequence = committed_.sequence + 1;
  next_.step = step;
  next_.update_counts.assign(update_counts.begin(), update_counts.end());
  next_.blob.assign(blob.begin(), blob.end());
  for (std::size_t t = 0; t < written_.size(); ++t) {
    next_.tiles[t] = committed_.tiles[t];
    const Written& written = written_[t];
    if (!written.part[0] && !written.part[1]) continue;
    next_.tiles[t].slot ^= 1u;
    for (std::size_t part = 0; part < kParts; ++part) {
      // One bit chooses the slot of both parts, so both must have been written to it.
      const bool empty = layout_.tiles[t].extent[0][part].bytes == 0;
      SPILLWAY_CHECK(written.part[part] || empty, "a commit covers both parts of a tile");
      next_.tiles[t].checksum[part] = written.checksum[part];
    }
  }
  // First sync: every byte that the record will name is on the drive before the record is.
  IoBatch batch(thread);
  batch.add({.op = IoOp::kSync, .priority = IoPriority::kUrgent, .file = kStripedSpace});
  batch.wait();
  const auto record = buffer.first(commit_buffer_bytes());
  encode_record(next_, form_, record);
  // Two copies, so that a bad sector costs one of them. A crash that tears both leaves the other record.
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
  // Durable from here on. What was the committed step is the one that can be gone back to, until note_written() begins
  // to overwrite it.
  if (committed_.sequence > 0) older_step_ = committed_.step;
  std::swap(committed_, next_);
  forget_written();
  if (ranks_ > 1) {
    // Durable under the temporary name: this rank's commit counts, and the store's name waits for all ranks.
    files_.keep();
    awaits_others_ = true;
  } else {
    get_name();
  }
}

void TileStore::note_all_committed() {
  if (std::exchange(awaits_others_, false)) get_name();
}

void TileStore::get_name() {
  files_.publish();
  replaced_.clear();
}

}  // namespace spillway
