#include "swap/store_files.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <new>

#include "spillway/error.h"
#include "spillway/log.h"

namespace spillway {
namespace {

void check_there(const std::filesystem::path& directory, std::size_t directories, Hint hint) {
  if (StoreFiles::exist(std::span(&directory, 1))) return;
  if (errno != ENOENT && errno != ENOTDIR)
    throw Error(Code::kIo,
                {directory.string(), "cannot be looked into", errno, "check who may read it, and its drive"});
  throw Error(Code::kNotFound, directory.string(), directories == 1 ? "holds no store" : "holds no part of a store", 0,
              std::move(hint));
}

[[noreturn]] void refuse_lost_name(const File& file) {
  throw Error(Code::kBusy, {file.path().string(), "was removed or replaced by another process while it was made", 0,
                            "let one run at a time make a store there"});
}

void draw_random(std::uint64_t (&id)[2]) {
  if (::getrandom(id, sizeof id, 0) == sizeof id) return;
  throw Error(Code::kIo, {"getrandom", "failed", errno, "the kernel's random numbers are needed to name a store"});
}

// What a set of files says about itself against how it is named.
void check_parts(std::span<const File> files, std::span<const Superblock> blocks) {
  const auto refuse = [](const File& file, std::string happened, std::string hint) {
    throw Error(Code::kInvalidArgument, {file.path().string(), std::move(happened), 0, std::move(hint)});
  };
  for (std::size_t i = 0; i < files.size(); ++i) {
    const Superblock& block = blocks[i];
    if (std::memcmp(block.store_id, blocks[0].store_id, sizeof block.store_id) != 0) {
      refuse(files[i], "is part of another store than " + files[0].path().string(), "name the paths of one store");
    }
    if (block.parts != files.size()) {
      refuse(files[i],
             fmt::format("is part {} of {} of its store, and {} path{} named", block.part + 1, block.parts,
                         files.size(), files.size() == 1 ? " is" : "s are"),
             "name all of its paths, in their order");
    }
    if (block.part != i) {
      refuse(files[i], fmt::format("is part {} of its store and named as part {}", block.part + 1, i + 1),
             "name the paths in the order in which the store was made");
    }
  }
}

// Nobody else can write it.
bool is_ours_alone(int fd) {
  struct stat info {};
  return ::fstat(fd, &info) == 0 && info.st_uid == ::geteuid() && (info.st_mode & (S_IWGRP | S_IWOTH)) == 0;
}

// Some file systems (NFS that squashes root, FAT, shares) give every file an owner or a mode of their own, a file made
// now as well.
bool tells_owners(const std::filesystem::path& directory) {
  std::string name = directory / ".spillway-owner-XXXXXX";
  const int fd = ::mkostemp(name.data(), O_CLOEXEC);
  if (fd < 0) return true;
  ::unlink(name.c_str());
  const bool ours = is_ours_alone(fd);
  ::close(fd);
  return ours;
}

// Whoever can write a store can make a run believe anything.
void refuse_others(const File& file) {
  if (StoreFiles::is_ours(file)) return;
  struct stat info {};
  ::fstat(file.fd(), &info);
  const std::string path = file.path().string();
  if (!tells_owners(file.path().parent_path())) {
    return log(LogLevel::kWarning, path + ": the file system does not tell who else can write it");
  }
  if (info.st_uid != ::geteuid()) {
    throw Error(Code::kInvalidArgument, {path, fmt::format("belongs to user {}, who can change it", info.st_uid), 0,
                                         "run as that user, or chown the store to the one who runs"});
  }
  throw Error(Code::kInvalidArgument,
              {path, "can be written by its group or by everybody", 0,
               fmt::format("take that from them, if you trust what it holds: chmod go-w {}", path)});
}

bool named_temporarily(const File& file) {
  return file.path() == StoreFiles::temporary_name(file.path().parent_path());
}

}  // namespace

File open_locked(const std::filesystem::path& path, const FileOptions& options, double patience_seconds) {
  while (true) {
    File file = File::open(path, options);
    file.lock(patience_seconds);
    // Who held the lock may have put another file in its place; the one that was locked belongs to no store any more.
    if (file.at_its_path()) return file;
  }
}

AlignedBuffer::AlignedBuffer(std::uint64_t bytes)
    : size(bytes), data(static_cast<std::byte*>(std::aligned_alloc(4096, bytes)), &std::free) {
  if (!data) throw std::bad_alloc();
  std::memset(data.get(), 0, size);
}

bool StoreFiles::exist(std::span<const std::filesystem::path> directories) {
  return std::any_of(directories.begin(), directories.end(), [](const auto& directory) {
    struct stat info;
    return ::lstat((directory / kStoreFileName).c_str(), &info) == 0;
  });
}

StripeMap StoreFiles::stripes_of(std::span<const std::uint32_t> shares) {
  return StripeMap(shares, kStripeUnitBytes, kExtentAlignment);
}

std::uint64_t StoreFiles::file_bytes(const StripeMap& stripes, std::uint32_t file, std::uint64_t total_bytes) {
  return stripes.file_bytes(file, total_bytes) + kExtentAlignment;
}

std::filesystem::path StoreFiles::temporary_name(const std::filesystem::path& directory) {
  return directory / (std::string(kStoreFileName) + ".new");
}

void StoreFiles::remove_leftovers(std::span<const std::filesystem::path> directories, double patience_seconds) {
  for (const auto& directory : directories) {
    const auto path = temporary_name(directory);
    std::optional<File> file;
    try {
      file = File::open(path, {.writable = true, .create = false, .direct = false});
    } catch (const Error& failure) {
      if (failure.code() == Code::kNotFound) continue;  // none, or not any more
      throw;
    }
    file->lock(patience_seconds);  // who is at it right now has that
    if (file->at_its_path()) ::unlink(path.c_str());
  }
}

// Several runs may begin at once: a file that has come since is another's while that one goes on, and it has the store.
File create_locked(const std::filesystem::path& directory) {
  constexpr int kAttempts = 10;
  for (int attempt = 1;; ++attempt) {
    try {
      File file = File::open(StoreFiles::temporary_name(directory), {.writable = true, .create = true, .direct = true});
      file.lock(0);
      return file;
    } catch (const Error& failure) {
      if (failure.code() != Code::kExists || attempt == kAttempts) throw;
    }
    StoreFiles::remove_leftovers(std::span(&directory, 1), 0);
  }
}

StoreFiles StoreFiles::create(std::span<const std::filesystem::path> directories, std::span<const std::uint32_t> shares,
                              std::uint64_t total_bytes, std::vector<std::optional<File>> in_place) {
  remove_leftovers(directories, 0);
  in_place.resize(directories.size());
  StoreFiles made({}, stripes_of(shares));
  made.temporary_ = true;
  made.files_.reserve(directories.size());
  made.bytes_before_.resize(directories.size());
  for (std::uint32_t i = 0; i < directories.size(); ++i) {
    if (in_place[i]) {
      made.files_.push_back(std::move(*in_place[i]));
      made.bytes_before_[i] = made.files_.back().size_bytes();
    } else {
      made.files_.push_back(create_locked(directories[i]));
    }
    if (!made.files_.back().at_its_path()) refuse_lost_name(made.files_.back());  // before it was locked
    made.files_.back().preallocate(file_bytes(made.stripes_, i, total_bytes));
  }
  return made;
}

bool StoreFiles::takes_over() const { return !std::ranges::all_of(files_, named_temporarily); }

void StoreFiles::take_over(std::uint64_t total_bytes) {
  for (std::uint32_t i = 0; i < files_.size(); ++i) {
    File& file = files_[i];
    if (named_temporarily(file)) continue;
    log(LogLevel::kInfo,
        file.path().string() + ": is overwritten now: the disk has no room for the store that replaces it, too");
    file.rename_to(temporary_name(file.path().parent_path()));
    if (::ftruncate(file.fd(), static_cast<off_t>(file_bytes(stripes_, i, total_bytes))) != 0)
      throw Error(Code::kIo, {file.path().string(), "cannot be cut to its size", errno, "check the drive"});
  }
}

StoreFiles::~StoreFiles() {
  if (!temporary_) return;
  for (std::size_t i = 0; i < files_.size(); ++i) {
    const File& file = files_[i];
    if (named_temporarily(file)) {
      if (file.at_its_path()) ::unlink(file.path().c_str());
    } else if (bytes_before_[i] > 0) {  // not taken over: its second superblock is where it ended
      [[maybe_unused]] const int ignored = ::ftruncate(file.fd(), static_cast<off_t>(bytes_before_[i]));
    }
  }
}

void StoreFiles::write_superblocks(Superblock block) {
  draw_random(block.store_id);
  draw_random(block.run_id);
  block.parts = static_cast<std::uint32_t>(files_.size());
  block.unit_bytes = stripes_.unit_bytes();
  for (std::size_t i = 0; i < files_.size(); ++i) {
    block.shares[i] = static_cast<std::uint8_t>(stripes_.shares()[i]);
  }
  parts_.assign(files_.size(), {});
  for (block.part = 0; block.part < files_.size(); ++block.part) {
    seal_superblock(block);
    std::memcpy(parts_[block.part].bytes.data(), &block, sizeof block);
    if (block.part == 0) block_ = block;
    place_second(block.part);
    write_copy(block.part, 0);
    write_copy(block.part, parts_[block.part].second);
  }
  sync();
}

// The first file gets its name last: a set whose last one has its name is finished by who opens it.
void StoreFiles::publish() {
  if (!temporary_) return;
  for (const File& file : files_) {
    if (!file.at_its_path()) refuse_lost_name(file);
  }
  // Only then is a first path's temporary name sure to be there for who finishes the set. A name that a file has
  // already is only made durable.
  for (File& file : files_) {
    if (files_.size() > 1) file.rename_to(file.path());
  }
  temporary_ = false;  // no file of it is removed any more
  for (std::size_t i = files_.size(); i-- > 0;) {
    files_[i].rename_to(files_[i].path().parent_path() / kStoreFileName);
  }
}

// A crash came between two names, so that the first paths may still have the names of what was to be replaced. Calls
// each(i, file) for those that wait for theirs; a writable file is locked.
template <class Each>
void for_each_unpublished(std::span<const std::filesystem::path> directories, bool writable, Each each) {
  try {
    if (directories.size() < 2 || !StoreFiles::exist(directories.last(1))) return;
    const Superblock last =
        StoreFiles::superblock_of(File::open(directories.back() / kStoreFileName, {.direct = false}));
    for (std::size_t i = directories.size() - 1; i-- > 0;) {
      const auto name = StoreFiles::temporary_name(directories[i]);
      if (::access(name.c_str(), F_OK) != 0) continue;
      File file = File::open(name, {.writable = writable, .direct = false});
      if (writable) file.lock(0);
      const Superblock block = StoreFiles::superblock_of(file);
      const bool same = std::memcmp(block.store_id, last.store_id, sizeof last.store_id) == 0;
      if (same && block.part == i && block.parts == directories.size()) each(i, file);
    }
  } catch (const Error&) {  // what is wrong with them is said of those that are opened
  }
}

StoreFiles StoreFiles::open(std::span<const std::filesystem::path> directories, double patience_seconds) {
  for_each_unpublished(directories, true,
                       [&](std::size_t i, File& file) { file.rename_to(directories[i] / kStoreFileName); });
  std::vector<File> files;
  for (const auto& directory : directories) {
    check_there(directory, directories.size(), Remedy::kCheckPathOrBegin);
    files.push_back(open_locked(directory / kStoreFileName, {.writable = true, .direct = true}, patience_seconds));
    refuse_others(files.back());
  }
  StoreFiles opened = assemble(std::move(files));
  for (std::uint32_t i = 0; i < opened.files_.size(); ++i) {
    if (!opened.parts_[i].damaged) continue;
    // A file that lost its end gets it again first; the second copy lies behind all that belongs to the space.
    opened.files_[i].preallocate(opened.part_bytes(i, opened.block_.total_bytes));
    opened.place_second(i);
    opened.mend_copies(i, false);
  }
  return opened;
}

StoreFiles StoreFiles::open_to_look(std::span<const std::filesystem::path> directories) {
  if (directories.empty()) {
    throw Error(Code::kInvalidArgument, {"store", "no path is named", 0, "name the directory of each of its files"});
  }
  std::vector<File> files;
  bool in_use = false;
  std::vector<std::filesystem::path> unpublished(directories.size());
  for_each_unpublished(directories, false, [&](std::size_t i, const File& file) { unpublished[i] = file.path(); });
  for (std::size_t i = 0; i < directories.size(); ++i) {
    auto name = unpublished[i];
    if (name.empty()) {
      check_there(directories[i], directories.size(), "check the path: its run's configuration has it as nvme_path");
      name = directories[i] / kStoreFileName;
    }
    files.push_back(File::open(name, {.writable = false, .direct = true}));
    in_use |= !files.back().lock_shared();
  }
  StoreFiles opened = assemble(std::move(files));
  opened.in_use_ = in_use;
  return opened;
}

StoreFiles StoreFiles::assemble(std::vector<File> files) {
  std::vector<PartBlock> parts;
  std::vector<Superblock> blocks;
  for (const File& file : files) {
    parts.push_back(read_part(file));
    blocks.push_back(parse_superblock(parts.back().bytes, file.path().string()));
  }
  check_parts(files, blocks);
  const std::vector<std::uint32_t> shares(blocks[0].shares, blocks[0].shares + blocks[0].parts);
  StoreFiles opened(std::move(files), StripeMap(shares, blocks[0].unit_bytes, kExtentAlignment));
  opened.block_ = blocks[0];
  opened.parts_ = std::move(parts);
  for (std::uint32_t i = 0; i < opened.files_.size(); ++i) {
    const std::uint64_t size = opened.files_[i].size_bytes();
    const std::uint64_t wanted = opened.stripes_.file_bytes(i, blocks[0].total_bytes);
    if (size >= wanted) continue;
    throw Error(Code::kCorrupt, opened.files_[i].path().string(),
                fmt::format("cut short: it has {} bytes of {}", size, wanted), 0, Remedy::kCopyAgainOrReplace);
  }
  return opened;
}

// The size alone does not tell: what is written behind the cut makes the file as long as before.
const File* StoreFiles::missing(std::uint64_t total_bytes) {
  for (std::uint32_t i = 0; i < files_.size(); ++i) {
    const File& file = files_[i];
    if (!file.at_its_path() || file.size_bytes() < part_bytes(i, total_bytes) || !mend_copies(i, true)) return &file;
  }
  return nullptr;
}

void StoreFiles::reserve(std::uint64_t total_bytes) {
  for (std::uint32_t i = 0; i < files_.size(); ++i) {
    files_[i].preallocate(part_bytes(i, total_bytes));
    const std::uint64_t before = parts_[i].second;
    place_second(i);
    if (parts_[i].second != before) write_copy(i, parts_[i].second);
  }
}

bool StoreFiles::cut_short(std::uint64_t total_bytes) const {
  for (std::uint32_t i = 0; i < files_.size(); ++i) {
    if (files_[i].size_bytes() < part_bytes(i, total_bytes)) return true;
  }
  return false;
}

bool StoreFiles::is_ours(const File& file) { return is_ours_alone(file.fd()); }

std::vector<File*> StoreFiles::pointers() {
  std::vector<File*> pointers;
  for (File& file : files_) pointers.push_back(&file);
  return pointers;
}

StoreFiles::Place StoreFiles::place_of(std::uint64_t offset) const {
  const std::uint32_t file = stripes_.file_of(offset);
  return {&files_[file], stripes_.next_on(file, offset).file_offset};
}

// Calls transfer(file, offset in it, part of `bytes`) for each run of the space that `bytes` cover, in order.
template <class Byte, class Transfer>
void StoreFiles::for_each_run(std::uint64_t offset, std::span<Byte> bytes, Transfer transfer) const {
  while (!bytes.empty()) {
    const std::uint32_t file = stripes_.file_of(offset);
    const StripeMap::Place run = stripes_.next_on(file, offset);
    const auto part = bytes.first(std::min<std::uint64_t>(run.bytes, bytes.size()));
    transfer(file, run.file_offset, part);
    offset += part.size();
    bytes = bytes.subspan(part.size());
  }
}

void StoreFiles::read_at(std::uint64_t offset, std::span<std::byte> out) const {
  for_each_run(offset, out,
               [this](std::uint32_t file, std::uint64_t at, auto part) { files_[file].read_at(at, part); });
}

void StoreFiles::write_at(std::uint64_t offset, std::span<const std::byte> bytes) {
  for_each_run(offset, bytes,
               [this](std::uint32_t file, std::uint64_t at, auto part) { files_[file].write_at(at, part); });
}

void StoreFiles::sync() {
  for (File& file : files_) file.sync();
}

}  // namespace spillway
