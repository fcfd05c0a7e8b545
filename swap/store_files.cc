#include "swap/store_files.h"

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

[[noreturn]] void refuse_lost_name(const File& file) {
  throw Error(Code::kBusy, {file.path().string(), "was removed or replaced by another process while it was made", 0,
                            "let one run at a time make a store there"});
}

void draw_random(std::uint64_t (&id)[2]) {
  if (::getrandom(id, sizeof id, 0) == sizeof id) return;
  throw Error(Code::kIo, {"getrandom", "failed", errno, "the kernel's random numbers are needed to name a store"});
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
    // Not stat: a link that leads nowhere has the name all the same.
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
  // Until the files have their names: if anything below throws, the destructor removes what was made.
  made.names_ = Names::kDraft;
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
    // A full disk is an error here, before the run, and never of a write during a step.
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
    // The name goes before the bytes do: a store that is half overwritten must not be found under it.
    file.rename_to(temporary_name(file.path().parent_path()));
    if (::ftruncate(file.fd(), static_cast<off_t>(file_bytes(stripes_, i, total_bytes))) != 0)
      throw Error(Code::kIo, {file.path().string(), "cannot be cut to its size", errno, "check the drive"});
  }
}

StoreFiles::~StoreFiles() {
  if (names_ != Names::kDraft) return;
  for (std::size_t i = 0; i < files_.size(); ++i) {
    const File& file = files_[i];
    if (named_temporarily(file)) {
      if (file.at_its_path()) ::unlink(file.path().c_str());
    } else if (bytes_before_[i] > 0) {  // not taken over: its second superblock is where it ended
      [[maybe_unused]] const int ignored = ::ftruncate(file.fd(), static_cast<off_t>(bytes_before_[i]));
    }
  }
}

RunId StoreFiles::new_run() {
  RunId run;
  draw_random(run.word);
  return run;
}

void StoreFiles::write_superblocks(Superblock block) {
  // The id tells files of this store from those of any other, also of one made from the same configuration.
  draw_random(block.store_id);
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

// A name that a file has already is only made durable.
void StoreFiles::keep() {
  if (names_ != Names::kDraft) return;
  for (const File& file : files_) {
    if (!file.at_its_path()) refuse_lost_name(file);
  }
  for (File& file : files_) file.rename_to(file.path());
  names_ = Names::kWaiting;
}

// The first file gets its name last: a set whose last one has its name is finished by who opens it, for which a first
// path's temporary name must be sure to be there.
void StoreFiles::publish() {
  if (names_ == Names::kOwn) return;
  for (const File& file : files_) {
    if (!file.at_its_path()) refuse_lost_name(file);
  }
  if (files_.size() > 1) keep();
  names_ = Names::kWaiting;  // no file of it is removed any more
  for (std::size_t i = files_.size(); i-- > 0;) {
    if (named_temporarily(files_[i])) files_[i].rename_to(files_[i].path().parent_path() / kStoreFileName);
  }
  names_ = Names::kOwn;
}

// The size alone does not tell: what is written beyond the cut makes the file as long as before.
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
    // A longer file ends elsewhere, and its second superblock lies at its end.
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

std::vector<File*> StoreFiles::pointers() {
  std::vector<File*> pointers;
  for (File& file : files_) pointers.push_back(&file);
  return pointers;
}

StoreFiles::FileOffset StoreFiles::place_of(std::uint64_t offset) const {
  const std::uint32_t file = stripes_.file_of(offset);
  return {&files_[file], stripes_.next_on(file, offset).file_offset};
}

// Calls transfer(file, offset in it, part of `bytes`) for each run of the space that `bytes` cover, in order.
template <class Byte, class Transfer>
void StoreFiles::for_each_run(std::uint64_t offset, std::span<Byte> bytes, Transfer transfer) const {
  while (!bytes.empty()) {
    const std::uint32_t file = stripes_.file_of(offset);
    const StripeMap::Extent run = stripes_.next_on(file, offset);
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
