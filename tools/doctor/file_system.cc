#include "tools/doctor/checks.h"

#include <fmt/format.h>

#include <algorithm>
#include <string_view>
#include <utility>

#include "tools/terminal/tell.h"

namespace spillway::doctor {
namespace {

constexpr const char* kOnTheDrive = "a directory on ext4, xfs or btrfs on the drive itself";

struct Quirk {
  std::string_view type;  // as /proc/self/mountinfo has it
  Status status;
  const char* what;
  const char* slower_by;
  const char* repair;
};
constexpr Quirk kQuirks[] = {
    {"overlay", Status::kSlower, "the container's own layer: the store goes with the container",
     "every file is on the file system below, through one more layer; the probe shows how fast",
     "docker run -v /directory/on/the/drive:/store …, and the store there"},
    {"9p", Status::kSlower, "files of another system, one message at a time (WSL: a drive of Windows)",
     "a round trip for each request; the probe shows how much",
     "a directory on the ext4 of WSL, or a drive given to it by wsl --mount"},
    {"virtiofs", Status::kSlower, "files of the virtual machine's host",
     "a round trip for each request; the probe shows how much",
     "a virtual drive (virtio-blk) with a file system of its own"},
    {"zfs", Status::kSlower, "copy-on-write that cannot be switched off: a full drive can fail a later write",
     "every rewrite moves a whole record; the probe shows how much", "a zvol or a partition with ext4 or xfs on it"},
    {"bcachefs", Status::kSlower, "copy-on-write", "every rewrite takes new blocks; the probe shows how much",
     kOnTheDrive},
    {"vfat", Status::kBroken, "no file is larger than 4 GiB, and nothing survives a power cut for sure", "",
     kOnTheDrive},
    {"exfat", Status::kSlower, "no journal, and space is taken by writing zeros",
     "the first step begins late; the probe shows the rest", kOnTheDrive},
    {"ntfs3", Status::kSlower, "a file system of Windows", "the probe shows how much", kOnTheDrive},
    {"fuseblk", Status::kSlower, "a file system in user space (ntfs-3g)",
     "each request visits one more process; the probe shows how much", kOnTheDrive},
    {"ecryptfs", Status::kSlower, "every file is encrypted on its own",
     "no direct I/O, and the CPU encrypts every byte", kOnTheDrive},
};

bool has_option(const std::string& options, std::string_view wanted) {
  for (std::size_t at = 0; at < options.size();) {
    const std::size_t end = std::min(options.find(',', at), options.size());
    if (std::string_view(options).substr(at, end - at) == wanted) return true;
    at = end + 1;
  }
  return false;
}

Finding finding(Status status, std::string seen, std::string by = "", std::string repair = "") {
  return {"", "", status, std::move(seen), std::move(by), std::move(repair)};
}

}  // namespace

Finding judge_file_system(const drive::MountInfo& mount) {
  if (mount.type.empty()) return finding(Status::kSkipped, "the kernel does not name it");
  const std::string name = fmt::format("{} from {}", mount.type, mount.source);
  const auto remount = [&](const char* option) {
    return fmt::format("sudo mount -o remount,{} {}", option, terminal::shell_word(mount.point));
  };
  if (has_option(mount.options, "ro")) {
    return finding(Status::kBroken, name + ", mounted read-only", "", remount("rw"));
  }
  switch (drive::medium_of(mount.type)) {
    case drive::Medium::kMemory:
      return finding(Status::kBroken,
                     fmt::format("{} is memory: a store there takes RAM outside the budgets and is gone after a reboot",
                                 mount.type),
                     "", kOnTheDrive);
    case drive::Medium::kNetwork:
      // 9p and virtiofs have words of their own below.
      if (mount.type != "9p" && mount.type != "virtiofs") {
        return finding(Status::kSlower, name + ", over a network",
                       "the rates are those of network and server; the probe shows them as they are now", kOnTheDrive);
      }
      break;
    case drive::Medium::kOverlay:
    case drive::Medium::kDrive: break;
  }
  const bool layered = drive::medium_of(mount.type) == drive::Medium::kOverlay;
  const std::string_view type = layered ? std::string_view("overlay") : std::string_view(mount.type);
  const auto quirk = std::ranges::find(kQuirks, type, &Quirk::type);
  if (quirk != std::end(kQuirks)) {
    return finding(quirk->status, fmt::format("{}: {}", name, quirk->what), quirk->slower_by, quirk->repair);
  }
  if (mount.type.starts_with("fuse.")) {
    return finding(Status::kSlower, name + ": a file system in user space",
                   "each request visits one more process; the probe shows how much", kOnTheDrive);
  }
  if (has_option(mount.options, "data=journal")) {
    return finding(Status::kSlower, name + " with data=journal", "every byte is written twice, and direct I/O is off",
                   fmt::format("data=ordered for {} in /etc/fstab, then mount it anew", mount.point));
  }
  if (has_option(mount.options, "sync")) {
    return finding(Status::kSlower, name + " with the option sync", "every write waits for the drive's flash",
                   remount("async"));
  }
  if (mount.type == "btrfs") {
    return finding(Status::kOk, name + "; copy-on-write is switched off for the store's files");
  }
  return finding(Status::kOk, name);
}

}  // namespace spillway::doctor
