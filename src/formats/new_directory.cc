#include "src/formats/new_directory.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <linux/fs.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <thread>
#include <utility>

#include "spillway/error.h"
#include "src/formats/plain_file.h"

namespace spillway {
namespace {

constexpr const char* kMarker = ".spillway-partial";
constexpr int kAttempts = 10;  // to make a directory that others take for a leftover
constexpr std::chrono::milliseconds kPause(10);
constexpr std::string_view kEnding = ".partial", kReplaced = ".replaced";

std::filesystem::path partial_path(const std::filesystem::path& place, std::string_view what = "") {
  return place.parent_path() / fmt::format(".{}{}{}", place.filename().string(), what, kEnding);
}

std::filesystem::path directory_above(const std::filesystem::path& place) {
  return place.has_parent_path() ? place.parent_path() : std::filesystem::path(".");
}

// `model/` is `model`, and a link is what it leads to: that is replaced, and the link stays.
std::filesystem::path resolved(const std::filesystem::path& place) {
  const std::filesystem::path plain = place.has_filename() ? place : place.parent_path();
  std::error_code error;
  if (!std::filesystem::is_symlink(plain, error)) return plain;
  const std::filesystem::path target = std::filesystem::canonical(plain, error);
  if (error) fail_file(plain, "cannot be followed", error.value());
  return target;
}

bool is_there(const std::filesystem::path& path) {
  struct stat status {};
  return ::lstat(path.c_str(), &status) == 0;
}

// An empty file: it must find room on a full drive, before a directory is removed.
void mark(const std::filesystem::path& directory) { PlainFile::create(directory / kMarker).close(); }

// The names of everything but the marker, sorted.
std::vector<std::string> list(const std::filesystem::path& directory, std::error_code& error) {
  std::vector<std::string> names;
  for (auto entry = std::filesystem::directory_iterator(directory, error); !error && entry != end(entry);
       entry.increment(error)) {
    const std::string name = entry->path().filename().string();
    if (name != kMarker) names.push_back(name);
  }
  std::ranges::sort(names);
  return names;
}

// Removes a partial directory that was left behind. What does not say that it is one, what holds a directory and what
// another process is writing stays as it is.
void empty_and_remove(const std::filesystem::path& partial, const DirectoryLock& lock) {
  const int fd = lock.directory();
  struct stat status {};
  const bool marked = ::fstatat(fd, kMarker, &status, AT_SYMLINK_NOFOLLOW) == 0 && S_ISREG(status.st_mode);
  std::error_code error;
  const std::vector<std::string> names = list(partial, error);
  const auto is_directory = [&](const std::string& name) {
    return ::fstatat(fd, name.c_str(), &status, AT_SYMLINK_NOFOLLOW) != 0 || S_ISDIR(status.st_mode);
  };
  if (error || (!marked && !names.empty()) || std::ranges::any_of(names, is_directory)) return;
  for (const std::string& name : names) ::unlinkat(fd, name.c_str(), 0);
  ::unlinkat(fd, kMarker, 0);  // last: until then it says what this is
  ::rmdir(partial.c_str());
}

// What was set aside for a new directory that did not come gets its name back.
void remove_leftover(const std::filesystem::path& leftover) {
  const DirectoryLock lock = DirectoryLock::take(leftover, Links::kRefuse);
  if (!lock) return;
  const std::filesystem::path place = std::filesystem::path(leftover).replace_extension();
  if (leftover.extension() != kReplaced || is_there(place)) {
    empty_and_remove(leftover, lock);
  } else if (is_there(leftover / kMarker) && ::rename(leftover.c_str(), place.c_str()) == 0) {
    remove_file(place / kMarker);
  }
}

void remove_leftovers(const std::filesystem::path& parent) {
  std::vector<std::filesystem::path> found;
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator(parent, ignored)) {
    const std::string name = entry.path().filename().string();
    if ((name.starts_with('.') && name.ends_with(kEnding)) || name.ends_with(kReplaced)) found.push_back(entry.path());
  }
  for (const auto& path : found) remove_leftover(path);
}

// A new directory and its lock; none while there is one of that name. Until it is locked, who looks for leftovers
// beside it takes it for one and removes it: then there is none either.
DirectoryLock make_locked(const std::filesystem::path& partial, const std::filesystem::path& place) {
  if (::mkdir(partial.c_str(), 0755) != 0) {
    if (errno != EEXIST) fail_file(place, "cannot be made", errno);
    return {};
  }
  DirectoryLock lock = DirectoryLock::take(partial, Links::kRefuse);
  if (!lock && errno != ENOENT && errno != EWOULDBLOCK) fail_file(partial, "cannot be opened", errno);
  if (lock && !lock.is_named(partial)) lock = {};
  return lock;
}

// Gives `made` the name of the directory that is there. The result is where that one is now; it stays when this fails.
std::filesystem::path replace(const std::filesystem::path& made, const std::filesystem::path& place) {
  mark(place);  // it may be removed as soon as it has another name
  if (::renameat2(AT_FDCWD, made.c_str(), AT_FDCWD, place.c_str(), RENAME_EXCHANGE) == 0) return made;
  const int error = errno;
  const std::filesystem::path aside = place.string() + std::string(kReplaced);
  const auto held = DirectoryLock::take(place, Links::kRefuse);  // who looks for leftovers meanwhile takes it for none
  try {
    if (error != EINVAL && error != ENOSYS) fail_file(place, "cannot be replaced", error);
    // The file system cannot do it in one step.
    rename_file(place, aside);
    rename_file(made, place);
    return aside;
  } catch (...) {
    ::rename(aside.c_str(), place.c_str());
    remove_file(place / kMarker);
    throw;
  }
}

}  // namespace

NewDirectory NewDirectory::create(const std::filesystem::path& place, bool replace) {
  NewDirectory made;
  made.place_ = resolved(place);
  made.partial_ = partial_path(made.place_);
  made.replace_ = replace;
  const std::filesystem::path parent = directory_above(made.place_);
  remove_leftovers(parent);
  if (!replace && is_there(made.place_))
    throw Error(Code::kExists, {made.place_.string(), "is there already", 0, "name another directory, or remove it"});
  if (const std::error_code error = make_directories(parent)) fail_file(made.place_, "cannot be made", error.value());
  for (int attempt = 1; !(made.lock_ = make_locked(made.partial_, made.place_)); ++attempt) {
    if (attempt == kAttempts) {
      throw Error(Code::kBusy, {made.partial_.string(), "is there, and nothing that a run has left behind", 0,
                                "wait for the process that writes it, or remove it"});
    }
    std::this_thread::sleep_for(kPause);
  }
  mark(made.partial_);
  return made;
}

NewDirectory::~NewDirectory() {
  if (lock_) empty_and_remove(partial_, lock_);
}

void NewDirectory::finish() {
  sync_directory(partial_);
  std::filesystem::path old;
  if (replace_ && is_there(place_)) {
    old = replace(partial_, place_);
  } else {
    rename_file(partial_, place_);  // fails on whatever may have come there meanwhile, unless it is an empty directory
  }
  const DirectoryLock held = std::move(lock_);  // it may have the name of a leftover, and has the mark of one
  remove_file(place_ / kMarker);
  sync_directory(directory_above(place_));
  if (!old.empty()) remove_leftover(old);
}

void remove_directory(const std::filesystem::path& named) {
  const std::filesystem::path place = resolved(named), partial = partial_path(place, ".removed");
  remove_leftover(partial);
  mark(place);
  rename_file(place, partial);
  sync_directory(directory_above(place));
  remove_leftover(partial);
}

std::vector<std::string> names_in(const std::filesystem::path& directory) {
  std::error_code error;
  std::vector<std::string> names = list(directory, error);
  if (error) fail_file(directory, "cannot be read", error.value());
  return names;
}

}  // namespace spillway
