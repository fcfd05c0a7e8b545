#include "tools/doctor/path.h"

#include <sys/quota.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <random>

#include "spillway/rank_directory.h"
#include "spillway/units.h"
#include "swap/store_files.h"
#include "swap/tile_store.h"
#include "tools/drive/endurance.h"
#include "tools/drive/test_file.h"
#include "tools/drive/text_file.h"
#include "tools/terminal/heard.h"

namespace spillway::doctor {
namespace {

namespace fs = std::filesystem;
using drive::read_line;

constexpr std::uint64_t kTrial = kMiB;
constexpr const char* kBlockDevices = "/sys/class/block";

void read_space(PathInfo& facts, std::uint32_t ranks) {
  struct statvfs space {};
  if (::statvfs(facts.directory.c_str(), &space) != 0) return;
  facts.counts_space = space.f_blocks > 0;
  facts.no_inodes = space.f_files > 0 && space.f_favail == 0;
  facts.total_bytes = std::uint64_t{space.f_blocks} * space.f_frsize;
  facts.free_bytes = std::uint64_t{space.f_bavail} * space.f_frsize;
  try {
    facts.store_bytes = TileStore::file_bytes(facts.path);
    for (std::uint32_t r = 0; ranks > 1 && r < ranks; ++r)
      facts.store_bytes += TileStore::file_bytes(directory_of_rank(facts.path, r));
  } catch (const Error&) {  // what is in its place will be said by a run
  }
}

// The tighter of what this user and its group have left; root has no quota.
std::optional<std::uint64_t> quota_left(const std::string& source) {
  if (::geteuid() == 0) return std::nullopt;
  std::optional<std::uint64_t> left;
  const auto ask = [&](int kind, unsigned id) {
    struct dqblk quota {};
    if (::quotactl(QCMD(Q_GETQUOTA, kind), source.c_str(), static_cast<int>(id), reinterpret_cast<caddr_t>(&quota)) !=
        0)
      return;
    const std::uint64_t hard = quota.dqb_bhardlimit * kKiB;  // in blocks of 1 KiB (quotactl(2))
    if (hard > 0) left = std::min(left.value_or(UINT64_MAX), hard - std::min<std::uint64_t>(hard, quota.dqb_curspace));
  };
  ask(USRQUOTA, ::geteuid());
  ask(GRPQUOTA, ::getegid());
  return left;
}

DiskInfo disk_info(const std::string& name) {
  DiskInfo disk;
  unsigned major = 0, minor = 0;
  if (std::sscanf(read_line(fs::path(kBlockDevices) / name / "dev").c_str(), "%u:%u", &major, &minor) != 2) return disk;
  disk.drive = drive::drive_of(major, minor);
  if (const auto answer = drive::read_endurance(disk.drive); answer.endurance) {
    disk.percent_used = answer.endurance->percent_used;
  }
  if (disk.drive.pci.empty()) return disk;
  disk.slot_most = drive::link_of(disk.drive.pci.parent_path(), "max");
  if (const int node = drive::number_of(read_line(disk.drive.pci / "numa_node"), -1); node >= 0) disk.node = node;
  return disk;
}

void read_drive(PathInfo& facts) {
  facts.mount = drive::mount_of(facts.directory);
  facts.drive = drive::drive_of(facts.mount);
  facts.disks = disks_of(facts.drive);
  facts.encrypted = read_line(fs::path(kBlockDevices) / facts.drive.name / "dm/uuid").starts_with("CRYPT-");
}

// The ladder over this very file: libaio, for one, wants direct I/O.
void try_engines(File& file, IoEngineKind wanted, PathInfo& facts) {
  File* const files[] = {&file};
  try {
    facts.engine = IoQueue::create({.engine = wanted}, files, {})->describe();
  } catch (const Error& error) {
    facts.engine_refused = error.parts().object + ": " + error.parts().happened;
  }
}

void write_and_read_back(File& file, PathInfo& facts) {
  AlignedBuffer out(kTrial), in(kTrial);
  std::mt19937_64 random(std::random_device{}());
  for (std::uint64_t at = 0; at < kTrial; at += sizeof(std::uint64_t)) {
    const std::uint64_t word = random();
    std::memcpy(out.data.get() + at, &word, sizeof word);
  }
  file.write_at(0, out.bytes());
  file.sync();
  file.read_at(0, in.bytes());
  facts.written = true;
  facts.intact = std::memcmp(out.data.get(), in.data.get(), kTrial) == 0;
}

void try_file(PathInfo& facts, IoEngineKind engine) {
  terminal::Heard heard;
  try {
    drive::TestFile trial(facts.directory, 0);  // a full drive still grants a file without a byte
    facts.direct = trial.file().direct();
    facts.alignment = trial.file().alignment();
    try_engines(trial.file(), engine, facts);
    trial.file().preallocate(kTrial);  // as a store is, and with its remarks
    write_and_read_back(trial.file(), facts);
  } catch (const Error& error) {
    facts.failed = error.parts();
  }
  const std::string before = facts.directory.string() + "/";
  for (const std::string& line : heard.lines()) {
    if (terminal::Heard::hangs(line)) facts.hung = line.substr(line.find(": ") + 2);
    if (!line.starts_with(before)) continue;  // the machine's lines say the rest
    facts.remarks.push_back(line.substr(line.find(": ") + 2));
  }
}

// The path, or the nearest of its parents of whose name there is something.
fs::path nearest(const fs::path& path) {
  std::error_code error;
  fs::path at = (fs::absolute(path, error) / "").parent_path();  // without a slash at its end
  while (!at.empty() && fs::symlink_status(at, error).type() == fs::file_type::not_found) at = at.parent_path();
  return at;
}

}  // namespace

std::vector<DiskInfo> disks_of(const drive::DriveInfo& drive) {
  std::vector<DiskInfo> disks;
  if (drive.name.empty()) return disks;
  for (const std::string& name : drive::disks_below(drive.name)) disks.push_back(disk_info(name));
  return disks;
}

PathInfo path_info(const fs::path& path, IoEngineKind engine, std::uint32_t ranks) {
  PathInfo facts;
  std::error_code error;
  facts.path = fs::canonical(path, error);
  if (error) facts.path = path;
  const fs::path there = nearest(path);
  facts.directory = fs::canonical(there, error);
  if (error || !fs::is_directory(facts.directory, error)) {
    facts.directory.clear();
    facts.failed = ErrorParts{there.string(),
                              error.value() == ENOENT ? "is not there"
                              : error                 ? "cannot be entered"
                                                      : "is not a directory",
                              error.value(), ""};
    return facts;
  }
  read_space(facts, ranks);
  read_drive(facts);
  facts.quota_left = quota_left(facts.mount.source);
  try_file(facts, engine);
  return facts;
}

}  // namespace spillway::doctor
