// Opening a store: what it says of itself, which of its commits is the last one, and going back to the one before.
// Files are found and locked before that (store_files_open.cc); bytes of tiles are compared by store_check.h.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <optional>
#include <thread>
#include <utility>

#include "kernels/checksum.h"
#include "spillway/error.h"
#include "spillway/log.h"
#include "spillway/units.h"
#include "swap/store_check.h"
#include "swap/tile_store.h"

namespace spillway {

void TileStore::refuse_one_slot(const StoreFiles& files) {
  const std::uint32_t slots = files.superblock().slots;
  if (slots >= 2) return;
  if (slots == kSlotsOfTensors) {
    throw Error(Code::kInvalidArgument, files.files().front().path().string(), "is a store of named tensors", 0,
                Hint("name another nvme_path for a training run"));
  }
  throw Error(Code::kUnsupported, files.files().front().path().string(),
              "made with commit_every 0: it keeps no step to resume or export", 0, Remedy::kReplaceAndKeepSteps);
}

RecordForm TileStore::form_of(const Superblock& block) {
  return {.version = block.format_version,
          .fingerprint = block.fingerprint,
          .tiles = block.tiles,
          .parameters = block.parameters};
}

// Only who looks at the store without its run needs the description: a run brings its own. But one that tells of state
// arrays which this version does not know is refused (kUnsupported).
void TileStore::check_description(const StoreShape& shape) {
  const Superblock& block = files_.superblock();
  const StoreIdentity& identity = shape.identity;
  const std::string own =
      identity.as_of_format ? identity.as_of_format(identity.description, block.format_version) : identity.description;
  const std::string path = files_.files().front().path().string();
  try {
    const std::string stored = read_description(files_);
    if (stored == own || !identity.difference) return;
    log(LogLevel::kWarning, fmt::format("{}: made with {}; that is what an export of the store will have", path,
                                        identity.difference(stored, own)));
  } catch (const Error& failure) {
    if (failure.code() == Code::kUnsupported) throw;
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

std::unique_ptr<TileStore> TileStore::found(StoreFiles files, const StoreShape& shape, const Progress& progress) {
  refuse_one_slot(files);
  StoreLayout layout = read_layout(files, shape);
  std::unique_ptr<TileStore> store(new TileStore(std::move(files), shape, std::move(layout)));
  store->slots_ = store->files_.superblock().slots;
  store->form_ = form_of(store->files_.superblock());
  store->load_manifest(shape, progress);
  return store;
}

std::unique_ptr<TileStore> TileStore::open(const StorePaths& paths, const StoreShape& shape) {
  auto store = found(StoreFiles::find(paths.directories, kLockPatienceSeconds), shape);
  store->begin(shape);
  return store;
}

RankCommits TileStore::commits() const noexcept {
  RankCommits commits{.last = Commit{committed_.sequence, committed_.step}, .before = {}};
  if (before_) commits.before = {before_->sequence, before_->step};
  return commits;
}

void TileStore::check_before(const StoreShape& shape, const Progress& progress) {
  check_older(files_, layout_, *before_, shape, progress);
}

void TileStore::begin(const StoreShape& shape, bool at_before) {
  files_.repair();
  if (at_before) {
    log(LogLevel::kWarning,
        fmt::format(
            "{}: {}step {} was not committed by all ranks and is given up; going on from step {}, which all have",
            files_.files().front().path().string(), committed_.step == before_->step ? "what was written after " : "",
            committed_.step, before_->step));
    forget_newest(files_, layout_, committed_);
    go_to_before();
  }
  before_.reset();
  std::vector<std::filesystem::path> directories;
  for (const File& file : files_.files()) directories.push_back(file.path().parent_path());
  try {
    StoreFiles::remove_leftovers(directories, 0);  // of a run that was to replace this store and was cut short
  } catch (const Error&) {                         // they only take room
  }
  check_description(shape);
  reserve(shape.least_scratch_bytes);
  // What was read need not be durable: the run before may have been killed between writing its record and syncing it.
  // From here on the slots that only the older record names are overwritten.
  rewrite_record();
  files_.sync();
  unverified_ = older_step_.has_value();
}

void TileStore::go_to_before() {
  committed_ = std::move(*before_);
  make_room();
  older_step_.reset();
}

std::unique_ptr<TileStore> TileStore::open_to_read(const StorePaths& paths, const StoreShape& shape) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::duration<double>(kLockPatienceSeconds);
  while (true) {
    StoreFiles files = StoreFiles::open_read_only(paths.directories);
    if (!files.in_use()) return found(std::move(files), shape);
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

std::uint64_t TileStore::roll_back(const StorePaths& paths, const StoreShape& shape, const Progress& progress) {
  StoreFiles files = StoreFiles::open(paths.directories, kLockPatienceSeconds);
  refuse_one_slot(files);
  const StoreLayout layout = read_layout(files, shape);
  ManifestChoice choice = read_records(files, layout);
  if (!choice.manifest || !choice.older) {
    throw Error(Code::kCorrupt, files.files().front().path().string(), "holds no other committed step to go back to", 0,
                Remedy::kRestoreOrReplace);
  }
  check_older(files, layout, *choice.older, shape, progress);
  take_older(files, layout, choice, 1);
  return choice.older->step;
}

void TileStore::check_older(StoreFiles& files, const StoreLayout& layout, const Manifest& older,
                            const StoreShape& shape, const Progress& progress) {
  const Hint hint(Remedy::kNothingWasChanged, {std::to_string(older.step)});
  check_extents(
      files, layout, older,
      {.bad = [&](const BadBytes& bad) { throw bad_bytes_error(bad, shape.name_of, hint); }, .progress = progress});
}

void TileStore::take_older(StoreFiles& files, const StoreLayout& layout, ManifestChoice& choice,
                           std::uint64_t counts_on) {
  choice.older->sequence = choice.manifest->sequence + counts_on;
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
}

// One copy after the other: as long as one is whole the commit is there, and whoever opens the stores next comes to the
// same decision.
void TileStore::forget_newest(StoreFiles& files, const StoreLayout& layout, const Manifest& newest) {
  AlignedBuffer zeros(record_bytes(form_of(files.superblock())));
  for (const std::uint64_t copy : layout.record_offset[newest.sequence % 2]) {
    files.write_at(copy, zeros.bytes());
    files.sync();
  }
}

RankCommits TileStore::commits_of(const ManifestChoice& choice) {
  RankCommits commits;
  if (choice.manifest) commits.last = {choice.manifest->sequence, choice.manifest->step};
  if (choice.older) commits.before = {choice.older->sequence, choice.older->step};
  return commits;
}

namespace {

[[noreturn]] void refuse_as_other(const StoreFiles& files, const StoreShape& shape) {
  const std::string path = files.files().front().path().string();
  std::string what;
  Remedy remedy = Remedy::kItsSettingsOrReplace;
  try {
    if (shape.identity.difference) {
      const std::string stored = TileStore::read_description(files), &own = shape.identity.description;
      what = shape.identity.difference(stored, own);
      if (shape.identity.remedy) remedy = shape.identity.remedy(stored, own);
    }
  } catch (const Error& failure) {  // damaged as well: that they differ counts
    if (failure.code() == Code::kUnsupported) throw;
  }
  what = what.empty() ? "made for another model, weight type, optimizer or tile size" : "made with " + what;
  throw Error(Code::kInvalidArgument, path, std::move(what), 0, remedy);
}

}  // namespace

void TileStore::refuse_other_model(const StoreFiles& files, const StoreShape& shape) {
  if (files.superblock().fingerprint != shape.identity.fingerprint) refuse_as_other(files, shape);
}

StoreLayout TileStore::read_layout(const StoreFiles& files, const StoreShape& shape) {
  const Superblock& block = files.superblock();
  const std::string path = files.files().front().path().string();
  const Rank own = shape.identity.rank;
  if (own != Rank{block.rank, block.ranks}) {
    throw Error(Code::kInvalidArgument, {path,
                                         fmt::format("is the store of rank {} of {}, and this is rank {} of {}",
                                                     block.rank, block.ranks, own.index, own.count),
                                         0, "name the store of this rank, or run as many as there were"});
  }
  const bool same_shape = block.tiles == shape.tiles.size() &&
                          (block.format_version < kUpdateCountsFormat || block.parameters == shape.parameters);
  if (block.fingerprint != shape.identity.fingerprint || !same_shape) refuse_as_other(files, shape);
  StoreShape as_stored = shape;
  as_stored.slots = block.slots;
  as_stored.scratch_bytes = block.scratch_bytes;
  // Only the text's length matters here: where things lie follows from sizes alone.
  as_stored.identity.description.resize(block.description_bytes);
  StoreLayout layout = lay_out_store(shape.tiles, store_geometry(as_stored, form_of(block)));
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

// Records lie before all tiles.
bool TileStore::has_commit(const StoreFiles& files) {
  StoreShape shape;
  // Without the model's tiles: that is enough to find the records.
  shape.identity.description.resize(files.superblock().description_bytes);
  const StoreLayout layout = lay_out_store({}, store_geometry(shape, form_of(files.superblock())));
  return read_records(files, layout).manifest.has_value();
}

void TileStore::load_manifest(const StoreShape& shape, const Progress& progress) {
  const std::string path = files_.files().front().path().string();
  ManifestChoice choice = read_records(files_, layout_);
  if (!choice.manifest) {
    throw Error(Code::kCorrupt, path, "holds no committed step: its commit records are damaged", 0,
                Remedy::kCheckRecordsAndRestore);
  }
  committed_ = std::move(*choice.manifest);
  make_room();
  if (choice.older) older_step_ = choice.older->step;
  before_ = std::move(choice.older);
  // The older record's slots may be half overwritten by the step whose record is lost: only reading tells.
  if (choice.others_damaged) {
    log(LogLevel::kWarning, fmt::format("{}: the newest manifest record is damaged, and so is its copy; going back to "
                                        "step {} and checking every byte of it",
                                        path, committed_.step));
    check_extents(
        files_, layout_, committed_,
        {.bad = [&](const BadBytes& bad) { throw bad_bytes_error(bad, shape.name_of, Remedy::kNoStepIsLeft); },
         .progress = progress});
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

namespace {

RunId run_of(const StoreFiles& files) {
  const Superblock& block = files.superblock();
  return {{block.run_id[0], block.run_id[1]}};
}

std::optional<StoreFiles> find_named(const StorePaths& paths, FoundStores::Purpose purpose) {
  if (!TileStore::exists(paths)) return std::nullopt;
  if (purpose == FoundStores::Purpose::kInspect) return StoreFiles::open_read_only(paths.directories);
  try {
    return StoreFiles::find(paths.directories, TileStore::kLockPatienceSeconds);
  } catch (const Error& failure) {
    if (purpose != FoundStores::Purpose::kReplace || failure.code() == Code::kBusy) throw;
    return std::nullopt;
  }
}

std::optional<StoreFiles> find_committed(const StorePaths& paths, StoreFiles::Use use) {
  std::optional<StoreFiles> found = StoreFiles::find_waiting(paths.directories, use, TileStore::kLockPatienceSeconds);
  try {
    if (found && TileStore::has_commit(*found)) return found;
  } catch (const Error&) {  // not a whole one
  }
  return std::nullopt;
}

}  // namespace

FoundStores::FoundStores(const StorePaths& paths, Purpose purpose)
    : named(find_named(paths, purpose)),
      waiting(
          find_committed(paths, purpose == Purpose::kInspect ? StoreFiles::Use::kInspect : StoreFiles::Use::kWrite)) {}

std::optional<StoreFiles> FoundStores::inspect_named(const StorePaths& paths) {
  return find_named(paths, Purpose::kInspect);
}

std::optional<StoreFiles> FoundStores::inspect_waiting(const StorePaths& paths) {
  return find_committed(paths, StoreFiles::Use::kInspect);
}

RankStores FoundStores::runs() const {
  RankStores runs;
  if (named) runs.named = run_of(*named);
  if (waiting) runs.waiting = run_of(*waiting);
  return runs;
}

}  // namespace spillway
