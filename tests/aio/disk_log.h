// What reached a disk, in order, and what a power cut at any point of it may leave: everything that was synced, and of
// the rest whatever a fate says, sector by sector. Pure: one recorded run gives any number of crashed disks.
//
//   begin a ─ begin b ─ end a ─ begin sync ─ end b ─ end sync ─ …     `a` is durable after the end of the sync, `b` is
//   0         1         2       3            4       5                not: the sync began before it had ended
//
// Names of files are durable once their directory was synced, as far as they were there when that began; so are those
// of directories. Sizes belong to the files.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

namespace spillway::testing {

inline constexpr std::uint64_t kDiskSector = 512;  // the least that any drive stores or loses as a whole

enum class DiskOp : std::uint8_t { kOpen, kRead, kWrite, kResize, kSync, kRename, kUnlink, kSyncDirectory };

struct DiskChange {
  static constexpr std::size_t kNever = SIZE_MAX;

  DiskOp op = DiskOp::kWrite;  // kOpen: a new file; reads are no changes
  std::size_t begun = 0, ended = kNever;
  std::uint32_t file = 0;               // of kOpen, kWrite, kResize, kSync
  std::string name = {}, to = {};       // below the disk's root; of a kSyncDirectory the directory's
  std::uint64_t offset = 0;             // of kResize the size
  std::vector<std::string> holds = {};  // kSyncDirectory: the directories in it
  std::shared_ptr<const std::vector<std::byte>> data = {};

  bool done(std::size_t at) const { return ended < at; }
};

// The files of a disk at rest.
struct DiskImage {
  std::set<std::string> directories;
  std::map<std::string, std::uint32_t> entries;  // names to files
  std::map<std::uint32_t, std::vector<std::byte>> contents;

  // The disk as files below `root`, whatever was there before.
  void store_in(const std::filesystem::path& root) const;
};

struct DiskLog {
  DiskImage base;  // durable
  std::vector<DiskChange> changes;
  std::size_t positions = 0;  // a crash at p comes after the begins and ends 0 … p - 1
  std::uint32_t next_file = 0;

  bool durable(const DiskChange& made, std::size_t at) const;  // a write, or a file's new name
};

// What becomes of what was not synced.
struct DiskFate {
  std::function<bool(const DiskChange&, std::uint64_t sector)> stored;  // of a write, counted from its start
  std::function<bool(const DiskChange&)> applied;                       // of a change of size
  // So many of `most` changes of a directory's names, from the first on: file systems keep these in order.
  std::function<std::size_t(const std::string& directory, std::size_t most)> names;
};
DiskFate everything_stored();
DiskFate seeded_fate(std::uint64_t seed);

DiskImage image_at(const DiskLog& log, std::size_t at, const DiskFate& fate);

// A process that is killed at `at` leaves its disk running: what had ended is there for the next one to see, what was
// under way is or is not, and what was not synced still may be lost. The log ends with that.
DiskLog killed_at(const DiskLog& log, std::size_t at, std::uint64_t seed);

}  // namespace spillway::testing
