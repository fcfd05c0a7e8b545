#include "tools/drive/drive.h"

#include <fmt/format.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <sstream>
#include <string_view>

#include "tools/drive/text_file.h"

namespace spillway::drive {
namespace {

namespace fs = std::filesystem;

std::uint64_t number_in(const fs::path& file) { return number_of(read_line(file), std::uint64_t{0}); }

// Spaces and the like stand as octal escapes: `\040`.
std::string unescaped(std::string_view text) {
  std::string plain;
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '\\' && i + 3 < text.size()) {
      plain += static_cast<char>(std::strtol(std::string(text.substr(i + 1, 3)).c_str(), nullptr, 8));
      i += 3;
    } else {
      plain += text[i];
    }
  }
  return plain;
}

bool is_below(const std::string& path, const std::string& mount_point) {
  if (mount_point == "/") return true;
  return path.starts_with(mount_point) && (path.size() == mount_point.size() || path[mount_point.size()] == '/');
}

// `none [mq-deadline] kyber` names all; the one in brackets is in use.
std::string in_brackets(const std::string& text) {
  const std::size_t open = text.find('['), close = text.find(']');
  return open == std::string::npos || close < open ? text : text.substr(open + 1, close - open - 1);
}

// A hypervisor's or a cloud's drive, by its driver or by the name it gives itself.
bool looks_virtual(const std::string& name, const std::string& model) {
  constexpr std::array kNames = {"QEMU", "Virtual", "VIRTUAL", "VBOX", "Amazon", "nvme_card", "Google", "Msft"};
  if (name.starts_with("vd") || name.starts_with("xvd")) return true;
  return std::any_of(kNames.begin(), kNames.end(), [&](const char* word) { return model.find(word) != model.npos; });
}

// The NVMe controller of a namespace. With multipath support the namespace hangs on a subsystem that lists controllers.
fs::path controller_of(const fs::path& block) {
  std::error_code error;
  const fs::path device = fs::canonical(block / "device", error);
  if (error || fs::exists(device / "firmware_rev", error)) return device;
  for (const auto& entry : fs::directory_iterator(device, error)) {
    const std::string name = entry.path().filename().string();
    if (name.starts_with("nvme") && name.find('n', 1) == std::string::npos) return fs::canonical(entry.path(), error);
  }
  return device;
}

std::optional<double> celsius_in(const fs::path& file) {
  const std::uint64_t millis = number_in(file);
  if (millis == 0) return std::nullopt;
  return static_cast<double>(millis) / 1000;
}

void add_nvme(const fs::path& block, DriveInfo& drive) {
  const fs::path controller = controller_of(block);
  drive.firmware = read_line(controller / "firmware_rev");
  if (drive.model.empty()) drive.model = read_line(controller / "model");
  std::error_code ignored;
  drive.pci = fs::canonical(controller / "device", ignored);
  drive.link_now = link_of(controller / "device", "current");
  drive.link_most = link_of(controller / "device", "max");
  // Beside the controller; older kernels hang it on the PCI device.
  for (const fs::path& place : {controller, controller / "device/hwmon"}) {
    for (const auto& entry : fs::directory_iterator(place, ignored)) {
      if (!entry.path().filename().string().starts_with("hwmon")) continue;
      drive.celsius = celsius_in(entry.path() / "temp1_input");
      drive.celsius_limit = celsius_in(entry.path() / "temp1_max");
    }
  }
}

}  // namespace

std::string link_of(const fs::path& device, const char* which) {
  const std::string speed = read_line(device / fmt::format("{}_link_speed", which));
  const std::string width = read_line(device / fmt::format("{}_link_width", which));
  if (speed.empty() || speed.find("nknown") != std::string::npos || width.empty() || width == "0") return "";
  const std::string number = speed.substr(0, speed.find(" GT/s"));
  return fmt::format("{} GT/s × {}", number, width);
}

MountInfo mount_of(const fs::path& path, const std::string& mountinfo) {
  const std::string where = fs::canonical(path).string();
  MountInfo found;
  std::size_t longest = 0;
  std::istringstream lines(mountinfo);
  // `36 35 98:0 /root /mount/point rw,noatime shared:1 - ext3 /dev/root rw,errors=continue` (man 5 proc)
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    std::string id, parent, device, root, point, options, word, type, source, more;
    words >> id >> parent >> device >> root >> point >> options;
    while (words >> word && word != "-") {
    }
    words >> type >> source >> more;
    point = unescaped(point);
    // Of mounts on one another the last one is seen.
    if (!is_below(where, point) || point.size() < longest) continue;
    longest = point.size();
    found = {type, unescaped(source), options + (more.empty() ? "" : "," + more), point};
    std::sscanf(device.c_str(), "%u:%u", &found.major, &found.minor);
  }
  return found;
}

MountInfo mount_of(const fs::path& path) { return mount_of(path, contents_of("/proc/self/mountinfo")); }

DriveInfo drive_of(unsigned major, unsigned minor, const fs::path& sys) {
  DriveInfo drive;
  std::error_code error;
  fs::path block = fs::canonical(sys / "dev/block" / fmt::format("{}:{}", major, minor), error);
  if (error) return drive;
  if (fs::exists(block / "partition", error)) block = block.parent_path();
  drive.name = block.filename().string();
  drive.bytes = number_in(block / "size") * 512;  // always in units of 512
  const fs::path queue = block / "queue";
  drive.sector_bytes = static_cast<std::uint32_t>(number_in(queue / "logical_block_size"));
  drive.largest_request_bytes = number_in(queue / "max_sectors_kb") * 1024;
  drive.scheduler = in_brackets(read_line(queue / "scheduler"));
  drive.write_cache = read_line(queue / "write_cache");
  if (const std::string turns = read_line(queue / "rotational"); !turns.empty()) drive.rotational = turns == "1";
  drive.model = read_line(block / "device/model");
  if (drive.name.starts_with("nvme")) add_nvme(block, drive);
  if (drive.model.empty()) drive.model = read_line(block / "md/level");  // a RAID says how it is made
  drive.is_virtual = looks_virtual(drive.name, drive.model);
  for (const auto& entry : fs::directory_iterator(block / "slaves", error)) {
    drive.parts.push_back(entry.path().filename().string());
  }
  std::sort(drive.parts.begin(), drive.parts.end());
  return drive;
}

DriveInfo drive_of(const MountInfo& mount) {
  if (mount.major != 0) return drive_of(mount.major, mount.minor);
  struct stat status {};
  if (!mount.source.starts_with("/dev/") || ::stat(mount.source.c_str(), &status) != 0) return {};
  return drive_of(major(status.st_rdev), minor(status.st_rdev));
}

std::vector<std::string> disks_below(const std::string& device, const fs::path& sys) {
  std::error_code error;
  fs::path block = fs::canonical(sys / "class/block" / device, error);
  if (error) return {device};
  if (fs::exists(block / "partition", error)) block = block.parent_path();
  std::vector<std::string> disks;
  for (const auto& part : fs::directory_iterator(block / "slaves", error)) {
    for (std::string& disk : disks_below(part.path().filename().string(), sys)) disks.push_back(std::move(disk));
  }
  if (disks.empty()) disks.push_back(block.filename().string());
  std::ranges::sort(disks);
  disks.erase(std::unique(disks.begin(), disks.end()), disks.end());
  return disks;
}

std::optional<std::uint64_t> moved_bytes(const DriveInfo& drive, const fs::path& sys) {
  if (drive.name.empty()) return std::nullopt;
  std::istringstream counters(read_line(sys / "block" / drive.name / "stat"));
  // Documentation/block/stat.rst: requests, merges, sectors and milliseconds of reads, then the same of writes.
  std::uint64_t reads = 0, merged = 0, read_sectors = 0, wait = 0, writes = 0, write_sectors = 0;
  if (!(counters >> reads >> merged >> read_sectors >> wait >> writes >> merged >> write_sectors)) return std::nullopt;
  return (read_sectors + write_sectors) * 512;
}

Medium medium_of(const std::string& type) {
  constexpr std::array<std::string_view, 3> kMemory = {"tmpfs", "ramfs", "devtmpfs"};
  constexpr std::array<std::string_view, 3> kOverlay = {"overlay", "aufs", "fuse.fuse-overlayfs"};
  constexpr std::array<std::string_view, 20> kNetwork = {
      "nfs",  "nfs4",     "cifs",         "smb3",           "smbfs",
      "9p",   "virtiofs", "ceph",         "fuse.glusterfs", "lustre",
      "gpfs", "beegfs",   "beegfs_nodev", "fuse.sshfs",     "fuse.ceph",
      "afs",  "ocfs2",    "gfs2",         "fuse.s3fs",      "fuse.gcsfuse"};
  const auto among = [&](const auto& list) { return std::find(list.begin(), list.end(), type) != list.end(); };
  if (among(kMemory)) return Medium::kMemory;
  if (among(kOverlay)) return Medium::kOverlay;
  return among(kNetwork) ? Medium::kNetwork : Medium::kDrive;
}

}  // namespace spillway::drive
