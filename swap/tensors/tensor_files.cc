#include "swap/tensors/tensor_files.h"

#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include "kernels/checksum.h"
#include "spillway/error.h"
#include "spillway/log.h"

namespace spillway {
namespace {

constexpr std::uint64_t kRootOffset = kExtentAlignment;  // after the superblock
constexpr std::uint32_t kRoots = 2, kCopies = 2;
// Each copy lies in an extent of its own, so that no write of one can tear another.
constexpr std::uint64_t kBegin = kRootOffset + kRoots * kCopies * kExtentAlignment;
// Beside the tensors: two tables of a store of small blocks, and one whose tensors have long names.
constexpr std::uint64_t room_for_tables(std::uint64_t bytes) { return bytes / 256 + kMiB; }

std::uint64_t offset_of_root(std::uint64_t commit, std::uint32_t copy) {
  return kRootOffset + (commit % kRoots * kCopies + copy) * kExtentAlignment;
}

void refuse_tiles(const StoreFiles& files) {
  if (files.superblock().slots == kSlotsOfTensors) return;
  throw Error(Code::kInvalidArgument, {files.files().front().path().string(), "is the store of a training run", 0,
                                       "name another directory for a store of tensors"});
}

std::uint64_t total_of(const StoreFiles& files) {
  const std::uint64_t total = files.superblock().total_bytes;
  if (total > kBegin) return total;
  throw Error(Code::kCorrupt, files.files().front().path().string(), "the superblock is damaged", 0, Remedy::kReplace);
}

}  // namespace

TensorFiles::TensorFiles(StoreFiles files, std::uint64_t total_bytes)
    : files_(std::move(files)), free_(kBegin, total_bytes), capacity_(total_bytes - kBegin) {
  for (const File& file : files_.files()) {
    if (std::max(file.alignment(), file.memory_alignment()) <= kTensorAlignment) continue;
    throw Error(Code::kUnsupported,
                {file.path().string(), fmt::format("its drive moves {} bytes at a time", file.alignment()), 0,
                 "name a path on a drive with sectors of 4 KiB at the most"});
  }
}

std::unique_ptr<TensorFiles> TensorFiles::create(std::span<const std::filesystem::path> directories,
                                                 std::uint64_t bytes) {
  const std::vector<std::uint32_t> shares(directories.size(), 1);
  const std::uint64_t total = kBegin + align_up(bytes + room_for_tables(bytes), kExtentAlignment);
  std::unique_ptr<TensorFiles> made(new TensorFiles(StoreFiles::create(directories, shares, total), total));
  const AlignedBuffer zeros(kExtentAlignment);
  for (std::uint64_t at = kRootOffset; at < kBegin; at += kExtentAlignment) made->files_.write_at(at, zeros.bytes());
  Superblock block{};
  block.slots = kSlotsOfTensors;
  block.ranks = 1;
  block.total_bytes = total;
  made->files_.write_superblocks(block);
  return made;
}

std::unique_ptr<TensorFiles> TensorFiles::open(std::span<const std::filesystem::path> directories,
                                               double patience_seconds) {
  StoreFiles files = StoreFiles::find(directories, patience_seconds);
  refuse_tiles(files);
  const std::uint64_t total = total_of(files);
  files.repair();
  std::unique_ptr<TensorFiles> opened(new TensorFiles(std::move(files), total));
  opened->read_newest();
  if (opened->damaged_root_)
    log(LogLevel::kWarning, fmt::format("{}: a copy of what a commit says could not be read; the store goes on from "
                                        "commit {}",
                                        directories.front().string(), opened->commits()));
  // A crash may have left a root that is there and not durable: it is, before what only the one before it names is
  // overwritten.
  if (opened->commits() > 0) opened->write_root(opened->root_);
  return opened;
}

std::unique_ptr<TensorFiles> TensorFiles::open_read_only(std::span<const std::filesystem::path> directories) {
  StoreFiles files = StoreFiles::open_read_only(directories);
  refuse_tiles(files);
  const std::uint64_t total = total_of(files);
  std::unique_ptr<TensorFiles> opened(new TensorFiles(std::move(files), total));
  opened->read_newest();
  return opened;
}

std::vector<std::byte> TensorFiles::read_table(const TableRoot& root) const {
  std::vector<std::byte> table;
  for (const Extent& part : root.parts) {
    AlignedBuffer buffer(part.bytes);
    files_.read_at(part.offset, buffer.bytes());
    table.insert(table.end(), buffer.bytes().begin(), buffer.bytes().end());
  }
  table.resize(root.bytes);
  return table;
}

// A commit that was cut short leaves the root before it. What is worth a word is one that nothing explains but damage:
// both of its copies unreadable, or its table another than it names.
std::optional<TableRoot> TensorFiles::newest_root() {
  std::vector<TableRoot> roots;
  AlignedBuffer buffer(kRootBytes);
  bool any = false;
  damaged_root_ = false;
  for (std::uint64_t i = 0; i < kRoots; ++i) {
    std::uint32_t damaged = 0;
    std::optional<TableRoot> found;
    for (std::uint32_t copy = 0; copy < kCopies; ++copy) {
      TableRoot root;
      RootState state = RootState::kDamaged;
      try {
        files_.read_at(offset_of_root(i, copy), buffer.bytes());
        state = decode_root(buffer.bytes(), root);
      } catch (const Error&) {  // a bad sector; the other copy may be readable
      }
      any |= state != RootState::kEmpty;
      damaged += state == RootState::kDamaged;
      if (state == RootState::kValid && (!found || root.commit > found->commit)) found = root;
    }
    damaged_root_ |= damaged > 0;
    if (found) roots.push_back(*found);
  }
  if (!roots.empty()) return *std::ranges::max_element(roots, {}, &TableRoot::commit);
  if (!any) return std::nullopt;  // no commit yet
  throw Error(Code::kCorrupt, files_.files().front().path().string(), "what its commits say cannot be read", 0,
              Remedy::kReplace);
}

bool TensorFiles::take_newest() {
  const std::uint64_t total = kBegin + capacity_;
  free_ = FreeRanges(kBegin, total);
  const auto ends = [&](const Extent& part) { return part.offset + part.bytes > total; };
  std::optional<std::vector<ReadRecord>> read;
  if (std::ranges::none_of(root_.parts, ends)) {
    const std::vector<std::byte> table = read_table(root_);
    if (granule_checksum(table) == root_.checksum) read = decode_table(table);
  }
  bool fits = read.has_value();
  // Two tensors, or a tensor and the table, that claim the same bytes show here.
  for (const Extent& part : root_.parts) fits = fits && free_.take_at(part);
  for (std::size_t i = 0; fits && i < read->size(); ++i) {
    for (const Extent& part : (*read)[i].record.parts) fits = fits && free_.take_at(part);
  }
  if (!fits) return false;
  tensors_ = std::move(*read);
  next_table_bytes_ = root_.bytes;
  return true;
}

void TensorFiles::read_newest() {
  auto newest = newest_root();
  while (newest) {
    root_ = std::move(*newest);
    if (take_newest()) return;
    // A process that has the store may have made commits since the root was read, and overwritten what it named.
    newest = files_.in_use() ? newest_root() : std::nullopt;
    if (newest && newest->commit != root_.commit) continue;
    throw Error(Code::kCorrupt, files_.files().front().path().string(),
                fmt::format("the table of commit {} is damaged", root_.commit), 0, Remedy::kCheckDriveAndReplace);
  }
}

void TensorFiles::refuse_uncertain() const {
  if (!uncertain_) return;
  throw Error(Code::kIo, {files_.files().front().path().string(), "the last commit failed in the middle", 0,
                          "open the store again: it is at that commit or at the one before"});
}

// One copy after the other: a crash damages one at the most.
void TensorFiles::write_root(const TableRoot& root) {
  AlignedBuffer buffer(kRootBytes);
  encode_root(root, buffer.bytes());
  for (std::uint32_t copy = 0; copy < kCopies; ++copy) {
    files_.write_at(offset_of_root(root.commit, copy), buffer.bytes());
    files_.sync();
  }
}

// The next commit's table needs a place beside this one's; and beside that the one after it, which may be as long, and
// has this one's place then.
std::uint64_t TensorFiles::kept_for_tables() const {
  const std::uint64_t now = align_up(root_.bytes, kTensorAlignment),
                      next = align_up(next_table_bytes_, kTensorAlignment);
  return next + (next > now ? next - now : 0);
}

// A table lies in a few ranges.
std::uint64_t TensorFiles::free_for_tensors() const {
  return free_.free_bytes_in(kMostTableParts) < kept_for_tables() ? 0 : free_.free_bytes() - kept_for_tables();
}

bool TensorFiles::take_parts(const std::string& name, TensorRecord& record) {
  const std::uint64_t bytes = record.padded_bytes();
  if (bytes > free_.free_bytes()) return false;
  record.parts = free_.take_in_parts(bytes);
  next_table_bytes_ += table_bytes(name, record);
  if (free_.free_bytes_in(kMostTableParts) >= kept_for_tables()) return true;
  for (const Extent& part : give_up(name, record)) free_.give_back(part);
  return false;
}

std::vector<Extent> TensorFiles::give_up(const std::string& name, TensorRecord& record) {
  next_table_bytes_ -= table_bytes(name, record);
  return std::exchange(record.parts, {});
}

TensorFiles::Draft TensorFiles::begin_commit(std::span<const NamedRecord> tensors) {
  refuse_uncertain();
  Draft draft;
  draft.table = encode_table(tensors);
  draft.root.commit = root_.commit + 1;
  draft.root.bytes = draft.table.size();
  draft.root.checksum = granule_checksum(draft.table);
  draft.root.parts = free_.take_in_parts(align_up(draft.root.bytes, kTensorAlignment));
  if (!draft.root.parts.empty() && draft.root.parts.size() <= kMostTableParts) return draft;
  Error full(Code::kDoesNotFit,
             {"nvme_bytes",
              fmt::format("no room is left for the table of commit {}, {} bytes", draft.root.commit, draft.root.bytes),
              0, "remove tensors, or make the store larger"});
  abandon_commit(std::move(draft));
  throw full;
}

void TensorFiles::make_commit(const Draft& draft) {
  for (const File& file : files_.files()) {
    // A commit into a file that has lost its name would be found by nobody.
    if (file.at_its_path()) continue;
    throw Error(Code::kIo, {file.path().string(), "was removed or replaced by another process", 0,
                            "copy out what the store has, and begin another one"});
  }
  std::span<const std::byte> rest(draft.table);
  for (const Extent& part : draft.root.parts) {
    AlignedBuffer buffer(part.bytes);
    const auto piece = rest.first(std::min<std::uint64_t>(part.bytes, rest.size()));
    std::ranges::copy(piece, buffer.data.get());
    rest = rest.subspan(piece.size());
    files_.write_at(part.offset, buffer.bytes());
  }
  files_.sync();
  try {
    write_root(draft.root);
  } catch (...) {
    uncertain_ = true;  // which of the two a crash would leave: both must stay whole
    throw;
  }
}

void TensorFiles::end_commit(Draft draft) {
  // The table before is not needed any more: the new root is durable.
  for (const Extent& part : root_.parts) free_.give_back(part);
  root_ = std::move(draft.root);
}

void TensorFiles::abandon_commit(Draft draft) {
  if (uncertain_) return;  // it may have been made
  for (const Extent& part : draft.root.parts) free_.give_back(part);
}

}  // namespace spillway
