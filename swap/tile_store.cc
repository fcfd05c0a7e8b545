#include "swap/tile_store.h"

#include <fmt/format.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <optional>
#include <thread>

#include "kernels/checksum.h"
#include "spillway/error.h"
#include "spillway/log.h"
#include "swap/store_check.h"

namespace spillway {
namespace {

constexpr double kLockPatienceSeconds = 10;   // the kernel may still finish a killed holder's writes
constexpr double kGlancePatienceSeconds = 1;  // to tell a store in use from one that merely exists

RecordForm form_of(const TileStore::Created& shape) {
  return {.fingerprint = shape.identity.fingerprint, .tiles = shape.tiles.size(), .parameters = shape.parameters};
}

RecordForm form_of(const Superblock& block) {
  return {.fingerprint = block.fingerprint, .tiles = block.tiles, .parameters = block.parameters};
}

StoreGeometry geometry_of(const TileStore::Created& shape) {
  return {.description_bytes = align_up(shape.identity.description.size() + 1, kExtentAlignment),
          .record_bytes = record_bytes(form_of(shape)),
          .scratch_bytes = shape.scratch_bytes,
          .slots = shape.slots};
}

std::filesystem::path store_file(const std::filesystem::path& directory) { return directory / kStoreFileName; }

[[noreturn]] void refuse_existing(const std::filesystem::path& directory) {
  const auto path = store_file(directory);
  try {
    File::open(path, {.writable = true, .direct = false}).lock(kGlancePatienceSeconds);
  } catch (const Error& failure) {
    if (failure.code() == Code::kBusy) throw;
  }
  throw Error(Code::kExists, path.string(), "a store exists", 0, Remedy::kResumeOrReplace);
}

void refuse_one_slot(const StoreFiles& files) {
  if (files.superblock().slots >= 2) return;
  throw Error(Code::kUnsupported, files.files().front().path().string(),
              "made with commit_every 0: it keeps no step to resume or export", 0, Remedy::kReplaceAndKeepSteps);
}

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
  std::uint64_t bytes = 0;
  for (const auto& path : {store_file(directory), StoreFiles::temporary_name(directory)}) {
    struct stat info;
    if (::lstat(path.c_str(), &info) != 0 || info.st_nlink > 1) continue;
    bytes += std::min<std::uint64_t>(info.st_size, std::uint64_t{512} * info.st_blocks);  // it may have holes
  }
  return bytes;
}

bool TileStore::exists(const StorePaths& paths) { return StoreFiles::exist(paths.directories); }

TileStore::TileStore(StoreFiles files, const Created& shape, StoreLayout layout)
    : files_(std::move(files)), form_(form_of(shape)), slots_(shape.slots), layout_(std::move(layout)) {
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

std::unique_ptr<TileStore> TileStore::create(const StorePaths& paths, const Created& shape, bool replace,
                                             const std::function<void()>& before_loss) {
  const auto& directories = paths.directories;
  for (const auto& directory : directories) {
    if (!replace && exists(directory)) refuse_existing(directory);
  }
  StoreFiles::remove_leftovers(directories);
  std::vector<std::uint32_t> shares = paths.shares;
  if (shares.empty()) shares.assign(directories.size(), 1);
  const StripeMap stripes = StoreFiles::stripes_of(shares);
  std::vector<File> old;
  std::vector<std::optional<File>> cramped(directories.size());
  std::vector<bool> held(directories.size());
  for (std::uint32_t i = 0; replace && i < directories.size(); ++i) {
    if (!exists(directories[i])) continue;
    const auto path = store_file(directories[i]);
    File file = open_locked(path, {.writable = true, .direct = true}, kLockPatienceSeconds);
    held[i] = true;
    // What another name leads to as well stays.
    const bool both = free_disk_bytes(directories[i]) >= stripes.file_bytes(i, space_bytes(shape));
    struct stat info;
    if (both || ::fstat(file.fd(), &info) != 0 || info.st_nlink > 1) {
      old.push_back(std::move(file));
    } else {
      cramped[i] = std::move(file);
    }
  }
  StoreFiles files = StoreFiles::create(directories, shares, space_bytes(shape), std::move(cramped));
  // A store gets its name only from who holds a file under the temporary one: what came since we looked is complete,
  // and there will be no other.
  for (std::size_t i = 0; i < directories.size(); ++i) {
    if (!held[i] && exists(directories[i])) refuse_existing(directories[i]);
  }
  if (files.takes_over()) {
    if (before_loss) before_loss();
    files.take_over(space_bytes(shape));
  }
  StoreLayout layout = lay_out_store(shape.tiles, geometry_of(shape));
  std::unique_ptr<TileStore> store(new TileStore(std::move(files), shape, std::move(layout)));
  store->replaced_ = std::move(old);
  store->write_description(shape);
  return store;
}

void TileStore::write_text(const std::string& description) {
  AlignedBuffer buffer(align_up(description.size() + 1, kExtentAlignment));
  std::memcpy(buffer.data.get(), description.data(), description.size());
  files_.write_at(layout_.description_offset, buffer.bytes());
}

void TileStore::write_description(const Created& shape) {
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
  block.tiles = form_.tiles;
  block.parameters = form_.parameters;
  block.description_bytes = text.size();
  block.total_bytes = layout_.total_bytes;
  block.scratch_bytes = shape.scratch_bytes;
  block.description_checksum = granule_checksum(std::as_bytes(std::span(text)));
  files_.write_superblocks(block);
}

// Only who looks at the store without its run needs the description: a run brings its own.
void TileStore::check_description(const Created& shape) {
  const Superblock& block = files_.superblock();
  const std::string& own = shape.identity.description;
  const std::string path = files_.files().front().path().string();
  try {
    const std::string stored = read_description(files_);
    if (stored == own || !shape.identity.difference) return;
    log(LogLevel::kWarning, fmt::format("{}: made with {}; that is what an export of the store will have", path,
                                        shape.identity.difference(stored, own)));
  } catch (const Error& failure) {
    const bool same = failure.code() == Code::kCorrupt && own.size() == block.description_bytes &&
                      granule_checksum(std::as_bytes(std::span(own))) == block.description_checksum;
    if (same) write_text(own);
    log(LogLevel::kWarning,
        fmt::format(
            "{}: the model description {}", path,
            same ? "was damaged; it is whole again"
                 : "cannot be read; the store cannot be exported, and its model is written by this run or not at all"));
  }
}

std::unique_ptr<TileStore> TileStore::at_last_commit(StoreFiles files, const Created& shape) {
  refuse_one_slot(files);
  StoreLayout layout = read_layout(files, shape);
  std::unique_ptr<TileStore> store(new TileStore(std::move(files), shape, std::move(layout)));
  store->slots_ = store->files_.superblock().slots;
  store->load_manifest(shape);
  return store;
}

std::unique_ptr<TileStore> TileStore::open(const StorePaths& paths, const Created& shape) {
  auto store = at_last_commit(StoreFiles::open(paths.directories, kLockPatienceSeconds), shape);
  try {
    StoreFiles::remove_leftovers(paths.directories);  // of a run that was to replace this store and was cut short
  } catch (const Error&) {                            // they only take room
  }
  store->reserve(shape.least_scratch_bytes);
  store->check_description(shape);
  // What was read need not be durable: the run before may have been killed between writing its record and syncing it.
  // From here on the slots that only the older record names are overwritten.
  store->rewrite_record();
  store->files_.sync();
  return store;
}

std::unique_ptr<TileStore> TileStore::open_to_read(const StorePaths& paths, const Created& shape) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::duration<double>(kLockPatienceSeconds);
  while (true) {
    StoreFiles files = StoreFiles::open_to_look(paths.directories);
    if (!files.in_use()) return at_last_commit(std::move(files), shape);
    if (std::chrono::steady_clock::now() >= deadline) {
      throw Error(Code::kBusy, {files.files().front().path().string(), "is in use by another engine or process", 0,
                                "wait for it to end, or stop it"});
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
}

// Without direct I/O what was read came out of the page cache, which after a failed sync may be all that has it: the
// kernel takes such pages for written.
void TileStore::rewrite_record() {
  if (std::ranges::all_of(files_.files(), &File::direct)) return;
  AlignedBuffer record(commit_buffer_bytes());
  encode_record(committed_, form_, record.bytes());
  for (std::uint64_t copy : layout_.record_offset[committed_.sequence % 2]) {
    files_.write_at(copy, record.bytes());
    files_.sync();  // one after the other: whatever a crash leaves, one of them is whole
  }
}

std::uint64_t TileStore::roll_back(const StorePaths& paths, const Created& shape,
                                   const std::function<void(std::uint64_t done, std::uint64_t bytes)>& progress) {
  StoreFiles files = StoreFiles::open(paths.directories, kLockPatienceSeconds);
  refuse_one_slot(files);
  const StoreLayout layout = read_layout(files, shape);
  ManifestChoice choice = read_records(files, layout);
  if (!choice.manifest || !choice.older) {
    throw Error(Code::kCorrupt, files.files().front().path().string(), "holds no other committed step to go back to", 0,
                Remedy::kRestoreOrReplace);
  }
  const Hint hint(Remedy::kNothingWasChanged, {std::to_string(choice.older->step)});
  check_extents(
      files, layout, *choice.older,
      {.bad = [&](const BadBytes& bad) { throw bad_bytes_error(bad, shape.name_of, hint); }, .progress = progress});
  choice.older->sequence = choice.manifest->sequence + 1;
  const RecordForm form = form_of(files.superblock());
  AlignedBuffer buffer(record_bytes(form));
  encode_record(*choice.older, form, buffer.bytes());
  // One copy after the other, over the record's own, the damaged one first: whatever a crash leaves, one is whole.
  const std::size_t record = choice.older->sequence % 2;
  const std::size_t first = choice.copies[record][0].state == RecordState::kValid ? 1 : 0;
  for (const std::size_t copy : {first, 1 - first}) {
    files.write_at(layout.record_offset[record][copy], buffer.bytes());
    files.sync();
  }
  return choice.older->step;
}

StoreLayout TileStore::read_layout(const StoreFiles& files, const Created& shape) {
  const Superblock& block = files.superblock();
  const std::string path = files.files().front().path().string();
  if (block.fingerprint != shape.identity.fingerprint || block.tiles != shape.tiles.size() ||
      block.parameters != shape.parameters) {
    std::string what;
    try {
      if (shape.identity.difference) {
        what = shape.identity.difference(read_description(files), shape.identity.description);
      }
    } catch (const Error&) {  // damaged as well: that they differ counts
    }
    what = what.empty() ? "made for another model, weight type, optimizer or tile size" : "made with " + what;
    throw Error(Code::kInvalidArgument, path, std::move(what), 0, Remedy::kItsSettingsOrReplace);
  }
  Created as_stored = shape;
  as_stored.slots = block.slots;
  as_stored.scratch_bytes = block.scratch_bytes;
  as_stored.identity.description.resize(block.description_bytes);
  StoreLayout layout = lay_out_store(shape.tiles, geometry_of(as_stored));
  if (layout.total_bytes != block.total_bytes) {
    throw Error(Code::kCorrupt, path, "the superblock does not fit the model", 0, Remedy::kReplace);
  }
  return layout;
}

// All of the space, for a copy of a store may have holes. The scratch area is its end and of no run but this one: the
// superblock goes on to say what the store was made with.
void TileStore::reserve(std::uint64_t least_scratch_bytes) {
  const std::uint64_t needed = layout_.scratch_offset + align_up(least_scratch_bytes, kExtentAlignment);
  layout_.total_bytes = std::max(layout_.total_bytes, needed);
  files_.reserve(layout_.total_bytes);
}

std::string TileStore::read_description(const StoreFiles& files) {
  const Superblock& block = files.superblock();
  AlignedBuffer buffer(align_up(block.description_bytes + 1, kExtentAlignment));
  files.read_at(kExtentAlignment, buffer.bytes());
  std::string text(reinterpret_cast<const char*>(buffer.data.get()), block.description_bytes);
  if (granule_checksum(std::as_bytes(std::span(text))) != block.description_checksum) {
    throw Error(Code::kCorrupt, files.place_of(kExtentAlignment).file->path().string(),
                "the model description is damaged", 0, Remedy::kCheckDriveAndRewrite);
  }
  return text;
}

// A copy that cannot be read is as good as a damaged one: there is another.
ManifestChoice TileStore::read_records(const StoreFiles& files, const StoreLayout& layout) {
  std::vector<std::vector<std::byte>> records;
  const RecordForm form = form_of(files.superblock());
  const std::uint64_t bytes = record_bytes(form);
  AlignedBuffer buffer(bytes);
  std::optional<Error> unreadable;
  for (const auto& record : layout.record_offset) {
    for (std::uint64_t copy : record) {
      records.emplace_back();
      try {
        files.read_at(copy, buffer.bytes());
        records.back().assign(buffer.data.get(), buffer.data.get() + bytes);
      } catch (const Error& failure) {
        log(LogLevel::kWarning, std::string(failure.what()) + "; it is a manifest record, of which there are others");
        unreadable = failure;
      }
    }
  }
  ManifestChoice choice = choose_manifest(records, form);
  if (!choice.manifest && unreadable) throw *unreadable;
  return choice;
}

void TileStore::load_manifest(const Created& shape) {
  const std::string path = files_.files().front().path().string();
  ManifestChoice choice = read_records(files_, layout_);
  if (!choice.manifest) {
    throw Error(Code::kCorrupt, path, "holds no committed step: its commit records are damaged", 0,
                Remedy::kCheckRecordsAndRestore);
  }
  committed_ = std::move(*choice.manifest);
  make_room();
  if (choice.older) older_step_ = choice.older->step;
  if (choice.others_damaged) {
    log(LogLevel::kWarning, fmt::format("{}: the newest manifest record is damaged, and so is its copy; going back to "
                                        "step {} and checking every byte of it",
                                        path, committed_.step));
    check_extents(files_, layout_, committed_, {.bad = [&](const BadBytes& bad) {
                    throw bad_bytes_error(bad, shape.name_of, Remedy::kNoStepIsLeft);
                  }});
    return;
  }
  for (const auto& record : choice.copies) {
    for (const RecordCopy& copy : record) {
      if (copy.state != RecordState::kDamaged) continue;
      log(LogLevel::kWarning, fmt::format("{}: one of the two copies of a manifest record is damaged; going on from "
                                          "step {}, whose record is whole",
                                          path, committed_.step));
    }
  }
}

Hint TileStore::way_back(std::uint64_t offset) const {
  if (slots_ < 2) return Remedy::kCheckDriveAndReplace;
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
    paths += file.path().parent_path().string();
  }
  return {Remedy::kCheckDriveAndRollBack, {step, paths, std::to_string(*older_step_)}};
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
  older_step_.reset();
  Written& written = written_[tile];
  written.part[index_of(part)] = true;
  written.checksum[index_of(part)] = checksum;
}

void TileStore::forget_written() {
  for (Written& written : written_) written = {};
}

bool TileStore::keeps_update_counts() const noexcept { return form_.parameters > 0; }

void TileStore::commit(std::uint64_t step, std::span<const std::byte> blob, StoreThread& thread,
                       std::span<std::byte> buffer, std::span<const std::uint64_t> update_counts) {
  if (lost_) {
    throw Error(Code::kIo, files_.files().front().path().string(), "a write since the last commit failed", 0,
                Remedy::kResume);
  }
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
      const bool empty = layout_.tiles[t].extent[0][part].bytes == 0;
      SPILLWAY_CHECK(written.part[part] || empty, "a commit covers both parts of a tile");
      next_.tiles[t].checksum[part] = written.checksum[part];
    }
  }
  IoBatch batch(thread);
  batch.add({.op = IoOp::kSync, .priority = IoPriority::kUrgent, .file = kStripedSpace});
  batch.wait();
  const auto record = buffer.first(commit_buffer_bytes());
  encode_record(next_, form_, record);
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
  if (committed_.sequence > 0) older_step_ = committed_.step;
  std::swap(committed_, next_);
  forget_written();
  files_.publish();
  replaced_.clear();
}

}  // namespace spillway
