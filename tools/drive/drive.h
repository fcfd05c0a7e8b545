// What the kernel says about the file system and the drive behind a path: /proc and /sys, no root needed.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

namespace spillway::drive {

struct MountInfo {
  std::string type;               // ext4, tmpfs, nfs4, …; empty: unknown
  std::string source;             // /dev/nvme0n1p1, server:/export, …
  std::string options;            // of the mount and of the file system
  std::string point;              // where it is mounted
  unsigned major = 0, minor = 0;  // 0:n has no block device of its own (btrfs, overlay, nfs)
};

// The mount that `path`, which must exist, lies on.
MountInfo mount_of(const std::filesystem::path& path);
// The same by the text of another /proc/self/mountinfo.
MountInfo mount_of(const std::filesystem::path& path, const std::string& mountinfo);

struct DriveInfo {
  std::string name;  // nvme0n1, vda; empty: no block device was found
  std::string model, firmware, scheduler, write_cache;
  std::string link_now, link_most;  // PCIe, `8.0 GT/s × 4`
  std::uint64_t bytes = 0, largest_request_bytes = 0;
  std::uint32_t sector_bytes = 0;
  std::optional<bool> rotational;
  std::filesystem::path pci;  // where /sys describes an NVMe drive's place on the bus; empty: not known
  std::optional<double> celsius;
  std::optional<double> celsius_limit;  // from which on the drive slows down to cool (NVMe: WCTEMP)
  bool is_virtual = false;              // a hypervisor's: its cache may be the host's memory
  std::vector<std::string> parts;       // the drives below an md or dm device
};

// `sys` stands in for /sys in tests.
DriveInfo drive_of(unsigned major, unsigned minor, const std::filesystem::path& sys = "/sys");

// The block device behind a mount: its own, or that of its source (btrfs).
DriveInfo drive_of(const MountInfo& mount);

// The disks that a block device is made of, or the one that it is (part of): names in /sys/class/block, as `device` is
// one, sorted. Two directories whose devices share one are on the same drive.
std::vector<std::string> disks_below(const std::string& device, const std::filesystem::path& sys = "/sys");

// Bytes that the drive has read and written since boot, for whomever; nothing when it does not count them.
std::optional<std::uint64_t> moved_bytes(const DriveInfo& drive, const std::filesystem::path& sys = "/sys");

enum class Medium : std::uint8_t { kDrive, kMemory, kOverlay, kNetwork };
Medium medium_of(const std::string& file_system_type);

// `8.0 GT/s × 4`: the PCIe link of a device's directory in /sys, as it is (`current`) or could be (`max`); empty when
// it does not say.
std::string link_of(const std::filesystem::path& device, const char* which);

}  // namespace spillway::drive
