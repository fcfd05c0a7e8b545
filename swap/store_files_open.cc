// Opening the files of a store that exists: to use it, or to look at it. Making one: store_files.cc. Its superblocks:
// store_superblocks.cc.
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "spillway/error.h"
#include "spillway/log.h"
#include "swap/store_files.h"

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

}  // namespace

// A crash came between two names, so that the first paths may still have the names of what was to be replaced. Calls
// each(i, file) for those that wait for theirs. To write them: each is locked, for which a process that was killed and
// has not quite ended is waited for.
template <class Each>
void for_each_unpublished(std::span<const std::filesystem::path> directories, std::optional<double> patience_to_write,
                          Each each) {
  try {
    if (directories.size() < 2 || !StoreFiles::exist(directories.last(1))) return;
    const Superblock last =
        StoreFiles::superblock_of(File::open(directories.back() / kStoreFileName, {.direct = false}));
    for (std::size_t i = directories.size() - 1; i-- > 0;) {
      const auto name = StoreFiles::temporary_name(directories[i]);
      if (::access(name.c_str(), F_OK) != 0) continue;
      File file = File::open(name, {.writable = patience_to_write.has_value(), .direct = true});
      if (patience_to_write) file.lock(*patience_to_write);
      const Superblock block = StoreFiles::superblock_of(file);
      const bool same = std::memcmp(block.store_id, last.store_id, sizeof last.store_id) == 0;
      if (same && block.part == i && block.parts == directories.size()) each(i, file);
    }
  } catch (const Error&) {  // what is wrong with them is said of those that are opened
  }
}

StoreFiles StoreFiles::open(std::span<const std::filesystem::path> directories, double patience_seconds) {
  StoreFiles opened = find(directories, patience_seconds);
  opened.repair();
  return opened;
}

StoreFiles StoreFiles::find(std::span<const std::filesystem::path> directories, double patience_seconds) {
  std::vector<std::optional<File>> unpublished(directories.size());
  for_each_unpublished(directories, patience_seconds, [&](std::size_t i, File& file) {
    if (file.at_its_path()) unpublished[i] = std::move(file);
  });
  std::vector<File> files;
  bool waiting = false;
  for (std::size_t i = 0; i < directories.size(); ++i) {
    if (unpublished[i]) {
      files.push_back(std::move(*unpublished[i]));
      waiting = true;
    } else {
      check_there(directories[i], directories.size(), Remedy::kCheckPathOrBegin);
      files.push_back(
          open_locked(directories[i] / kStoreFileName, {.writable = true, .direct = true}, patience_seconds));
    }
    refuse_others(files.back());
  }
  StoreFiles found = assemble(std::move(files));
  if (waiting) found.names_ = Names::kWaiting;
  return found;
}

std::optional<StoreFiles> StoreFiles::find_waiting(std::span<const std::filesystem::path> directories, Use use,
                                                   double patience_seconds) {
  const bool writable = use == Use::kWrite;
  try {
    std::vector<File> files;
    for (const auto& directory : directories) {
      files.push_back(File::open(temporary_name(directory), {.writable = writable, .direct = true}));
    }
    // All are there. Of a store between two names the last one is not, and this process may hold the others.
    for (File& file : files) {
      if (writable) file.lock(patience_seconds);
      if (!writable && !file.lock_shared()) return std::nullopt;
      if (!file.at_its_path() || !is_ours(file)) return std::nullopt;
    }
    StoreFiles found = assemble(std::move(files));
    found.names_ = Names::kWaiting;
    return found;
  } catch (const Error&) {  // none, not a whole one, or another process is making it
    return std::nullopt;
  }
}

void StoreFiles::repair() {
  publish();
  for (std::uint32_t i = 0; i < files_.size(); ++i) {
    if (!parts_[i].damaged) continue;
    // A file that lost its end gets it again first; the second copy lies after all that belongs to the space.
    files_[i].preallocate(part_bytes(i, block_.total_bytes));
    place_second(i);
    mend_copies(i, false);
  }
}

StoreFiles StoreFiles::open_read_only(std::span<const std::filesystem::path> directories) {
  if (directories.empty()) {
    throw Error(Code::kInvalidArgument, {"store", "no path is named", 0, "name the directory of each of its files"});
  }
  std::vector<File> files;
  bool in_use = false;
  std::vector<std::filesystem::path> unpublished(directories.size());
  for_each_unpublished(directories, std::nullopt,
                       [&](std::size_t i, const File& file) { unpublished[i] = file.path(); });
  for (std::size_t i = 0; i < directories.size(); ++i) {
    auto name = unpublished[i];
    if (name.empty()) {
      check_there(directories[i], directories.size(), "check the path: its run's configuration has it as nvme_path");
      name = directories[i] / kStoreFileName;
    }
    files.push_back(File::open(name, {.writable = false, .direct = true}));
    // A shared lock keeps a run from opening the store while it is looked at; a run that has it already is only noted.
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
    // Longer is fine: a file may have been made for a larger scratch area.
    if (size >= wanted) continue;
    throw Error(Code::kCorrupt, opened.files_[i].path().string(),
                fmt::format("cut short: it has {} bytes of {}", size, wanted), 0, Remedy::kCopyAgainOrReplace);
  }
  return opened;
}

bool StoreFiles::is_ours(const File& file) { return is_ours_alone(file.fd()); }

}  // namespace spillway
