#include "tools/sweep/preflight.h"

#include <fmt/format.h>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <thread>

#include "spillway/error.h"
#include "spillway/units.h"
#include "tools/drive/text_file.h"
#include "tools/terminal/amount.h"

namespace spillway::sweep {
namespace {

using terminal::text_of_size;

namespace fs = std::filesystem;

constexpr std::uint64_t kLeastTest = 16 * kMiB, kUsualTest = 2 * kGiB, kMostUsualTest = 8 * kGiB;
constexpr const char* kUnlessTold = "measure it all the same with --allow-buffered";

[[noreturn]] void refuse(Code code, const fs::path& path, std::string happened, int error, std::string hint) {
  throw Error(
      code, {.object = path.string(), .happened = std::move(happened), .errno_value = error, .hint = std::move(hint)});
}

// A drive's own memory is about a thousandth of its size. (A host's page cache is of any size and not to be known.)
std::uint64_t beyond_cache(const drive::DriveInfo& drive) { return align_up(2 * drive.bytes / 1000, kGiB); }

void warn_of_medium(PathInfo& facts) {
  const auto warn = [&](std::string text) { facts.warnings.push_back(std::move(text)); };
  switch (drive::medium_of(facts.mount.type)) {
    case drive::Medium::kMemory: warn(fmt::format("{} is memory, not a drive", facts.mount.type)); break;
    case drive::Medium::kOverlay:
      warn(fmt::format("{} puts the file on the file system below it; in a container, mount a volume of the drive",
                       facts.mount.type));
      break;
    case drive::Medium::kNetwork:
      warn(
          fmt::format("{} is a network file system: the rates are those of network and server, now", facts.mount.type));
      break;
    case drive::Medium::kDrive: break;
  }
}

void warn_of_drive(PathInfo& facts) {
  const drive::DriveInfo& drive = facts.drive;
  if (drive.link_now != drive.link_most && !drive.link_now.empty() && !drive.link_most.empty()) {
    facts.warnings.push_back(
        fmt::format("the PCIe link runs at {} of {}: another slot may be faster, unless the drive "
                    "was just saving power",
                    drive.link_now, drive.link_most));
  }
  if (drive.is_virtual) {
    facts.warnings.push_back(
        fmt::format("{} is a virtual drive: its host may cache, throttle and share it", drive.name));
  }
}

}  // namespace

PathInfo examine_path(const fs::path& path, bool buffered_allowed) {
  PathInfo facts;
  std::error_code error;
  facts.path = fs::canonical(path, error);
  if (error) refuse(Code::kNotFound, path, "cannot be found", error.value(), "name a directory on the drive");
  if (!fs::is_directory(facts.path, error)) {
    refuse(Code::kInvalidArgument, path, "is not a directory", 0, "name a directory on the drive");
  }
  facts.mount = drive::mount_of(facts.path);
  facts.drive = drive::drive_of(facts.mount);
  struct statvfs space {};
  if (::statvfs(facts.path.c_str(), &space) != 0) {
    refuse(Code::kIo, path, "its file system does not answer", errno, "check the drive");
  }
  facts.free_bytes = std::uint64_t{space.f_bavail} * space.f_frsize;
  if (drive::medium_of(facts.mount.type) == drive::Medium::kMemory && !buffered_allowed) {
    refuse(Code::kUnsupported, path, fmt::format("is on {}, which is memory, not a drive", facts.mount.type), 0,
           fmt::format("name a directory on the drive, or {}", kUnlessTold));
  }
  warn_of_medium(facts);
  warn_of_drive(facts);
  return facts;
}

std::uint64_t test_bytes(const PathInfo& facts, std::uint64_t wanted) {
  if (wanted == 0) {
    const std::uint64_t usual = std::clamp(beyond_cache(facts.drive), kUsualTest, kMostUsualTest);
    const std::uint64_t bytes = align_down(std::min(usual, facts.free_bytes / 4), kLeastTest);
    if (bytes >= kLeastTest) return bytes;
    refuse(Code::kDoesNotFit, facts.path,
           fmt::format("has {} of free space, and a sweep leaves three quarters of it alone",
                       text_of_size(facts.free_bytes)),
           ENOSPC, fmt::format("free at least {}, or say --size yourself", text_of_size(4 * kLeastTest)));
  }
  const std::uint64_t bytes = align_down(wanted, kLeastTest);
  if (bytes < kLeastTest) {
    throw Error(Code::kInvalidArgument, {.object = "--size",
                                         .happened = fmt::format("{} is too small", text_of_size(wanted)),
                                         .errno_value = 0,
                                         .hint = fmt::format("use at least {}", text_of_size(kLeastTest))});
  }
  if (bytes > facts.free_bytes) {
    refuse(
        Code::kDoesNotFit, facts.path,
        fmt::format("--size {} is more than the {} that are free", text_of_size(bytes), text_of_size(facts.free_bytes)),
        ENOSPC, "choose a smaller --size, or free some space");
  }
  return bytes;
}

void note_direct_io(PathInfo& facts, bool direct, std::uint32_t alignment, bool buffered_allowed) {
  facts.direct = direct;
  facts.alignment = alignment;
  if (direct) return;
  if (!buffered_allowed) {
    refuse(Code::kUnsupported, facts.path,
           fmt::format("{} grants no direct I/O, so the page cache would be measured, not the drive", facts.mount.type),
           0, fmt::format("name a directory on another file system, or {}", kUnlessTold));
  }
  facts.warnings.push_back(
      fmt::format("no direct I/O on {}: the figures are those of the page cache", facts.mount.type));
}

void warn_of_caches(PathInfo& facts, std::uint64_t test_bytes) {
  if (facts.drive.bytes == 0 || test_bytes >= beyond_cache(facts.drive)) return;
  facts.warnings.push_back(fmt::format("a test of {} may fit a cache inside a drive of {}; --size {} would not",
                                       text_of_size(test_bytes), text_of_size(facts.drive.bytes),
                                       text_of_size(beyond_cache(facts.drive))));
}

MachineInfo examine_machine() {
  MachineInfo machine;
  struct utsname name {};
  if (::uname(&name) == 0) machine.kernel = fmt::format("{} {}", name.sysname, name.release);
  machine.processors = std::thread::hardware_concurrency();
  machine.processor = drive::field_of(drive::contents_of("/proc/cpuinfo"), "model name");
  machine.memory_bytes =
      static_cast<std::uint64_t>(::sysconf(_SC_PHYS_PAGES)) * static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
  struct rlimit limit {};
  const bool known = ::getrlimit(RLIMIT_MEMLOCK, &limit) == 0;
  machine.locked_memory = known && limit.rlim_cur != RLIM_INFINITY ? text_of_size(limit.rlim_cur) : "unlimited";
  return machine;
}

}  // namespace spillway::sweep
