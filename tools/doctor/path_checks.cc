#include "tools/doctor/checks.h"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <set>
#include <string_view>
#include <system_error>
#include <utility>

#include "spillway/units.h"
#include "tools/terminal/amount.h"
#include "tools/terminal/tell.h"

namespace spillway::doctor {
namespace {

using terminal::text_of_size;

std::string store_takes(const RunRequirements& required) {
  return required.ranks == 1 ? "the store takes" : fmt::format("the stores of {} ranks take", required.ranks);
}

// Findings about one path.
class Path {
 public:
  Path(const PathInfo& facts, const RunRequirements& required) : facts_(facts), required_(required) {}

  Findings check() {
    if (facts_.directory.empty()) {
      broken("path", facts_.failed->object + " " + error_text(*facts_.failed),
             facts_.failed->errno_value == ENOENT || facts_.failed->errno_value == 0
                 ? fmt::format("mount the drive, then mkdir -p {}", word())
                 : fmt::format("sudo chown $USER {}   # and let this user pass the directories above it", word()));
      return std::move(findings_);
    }
    if (to_be_made()) {
      ok("path", fmt::format("a run makes it in {}, which these lines are about; mount its drive first if it has one",
                             facts_.directory.string()));
    }
    check_file_system();
    check_writing();
    check_direct();
    check_remarks();
    if (!facts_.engine_refused.empty()) {
      broken("engine", facts_.engine_refused, "spillway.io_engine \"auto\" takes what is to be had");
    }
    check_space();
    check_drive();
    for (const DiskInfo& disk : facts_.disks) check_disk(disk);
    check_probe();
    if (!facts_.hung.empty()) broken("hanging", facts_.hung, "see sudo dmesg and sudo smartctl -a of the drive");
    return std::move(findings_);
  }

 private:
  static std::string error_text(const ErrorParts& parts) {
    if (parts.errno_value == 0) return parts.happened;
    return fmt::format("{} ({})", parts.happened, std::generic_category().message(parts.errno_value));
  }

  void add(const char* check, Status status, std::string seen, std::string by, std::string repair) {
    findings_.push_back({facts_.path.string(), check, status, std::move(seen), std::move(by), std::move(repair)});
  }
  void ok(const char* check, std::string seen) { add(check, Status::kOk, std::move(seen), "", ""); }
  void skipped(const char* check, std::string seen) { add(check, Status::kSkipped, std::move(seen), "", ""); }
  void slower(const char* check, std::string seen, std::string by, std::string repair) {
    add(check, Status::kSlower, std::move(seen), std::move(by), std::move(repair));
  }
  void broken(const char* check, std::string seen, std::string repair) {
    add(check, Status::kBroken, std::move(seen), "", std::move(repair));
  }
  std::string word() const { return terminal::shell_word(facts_.path.string()); }
  std::string mount_point() const { return terminal::shell_word(facts_.mount.point); }
  bool to_be_made() const { return facts_.directory != facts_.path; }
  bool full() const {
    return facts_.failed && (facts_.failed->errno_value == ENOSPC || facts_.failed->errno_value == EDQUOT);
  }

  void check_file_system() {
    const Finding finding = judge_file_system(facts_.mount);
    add("file system", finding.status, finding.seen, finding.slower_by, finding.repair);
  }

  void check_writing() {
    if (facts_.written && facts_.intact) return ok("writing", "what was written and synced was read back");
    if (facts_.written) {
      return broken("writing", "what was read back is not what was written",
                    "take nothing that matters from this drive; see sudo dmesg and sudo smartctl -a");
    }
    if (full()) return skipped("writing", "no space for a file");
    if (!facts_.failed) return skipped("writing", "not tried");
    std::string repair = "see what sudo dmesg says of the drive";
    switch (facts_.failed->errno_value) {
      case EROFS:
        repair = fmt::format(
            "sudo mount -o remount,rw {}   # after a look at sudo dmesg: the kernel does this to a "
            "drive that fails",
            mount_point());
        break;
      case EACCES:
      case EPERM:
        repair = fmt::format("{}sudo chown $USER {}", to_be_made() ? fmt::format("sudo mkdir -p {} && ", word()) : "",
                             word());
        break;
      case EMFILE:
      case ENFILE: repair = "ulimit -n 4096"; break;
      case EFBIG: repair = "ulimit -f unlimited"; break;
      default: break;
    }
    broken("writing", error_text(*facts_.failed), std::move(repair));
  }

  void check_direct() {
    // Made no file: there is nothing to say, and why stands in the line above.
    if (facts_.engine.empty() && facts_.engine_refused.empty()) return skipped("direct I/O", "no file to try it on");
    if (!facts_.direct) {
      return slower("direct I/O", fmt::format("{} grants none", facts_.mount.type),
                    "every byte is copied once more, and the page cache takes memory outside the budgets",
                    "a directory on ext4, xfs or btrfs on the drive itself");
    }
    ok("direct I/O", fmt::format("granted, in multiples of {}", facts_.alignment));
  }

  void check_remarks() {
    for (const std::string& remark : facts_.remarks) {
      if (remark.find("cannot reserve space") != std::string::npos) {
        slower("reserving", facts_.mount.type + " cannot reserve space", "a new store is first written once with zeros",
               "a directory on ext4, xfs or btrfs on the drive itself");
      } else if (remark.find("copy-on-write") != std::string::npos) {
        slower("copy-on-write", "cannot be switched off",
               "every rewrite takes new blocks, and a full drive can fail it",
               fmt::format("chattr +C {}   # before a store is made there", word()));
      }
    }
  }

  void check_space() {
    if (!facts_.counts_space) return skipped("space", "the file system does not say what is free");
    std::uint64_t have = facts_.free_bytes + facts_.store_bytes;
    std::string seen = fmt::format("{} free of {}", text_of_size(facts_.free_bytes), text_of_size(facts_.total_bytes));
    if (facts_.store_bytes > 0) seen += fmt::format(", and {} of the store there", text_of_size(facts_.store_bytes));
    if (facts_.quota_left) {
      seen += fmt::format(", the quota leaves {}", text_of_size(*facts_.quota_left));
      have = std::min(have, *facts_.quota_left + facts_.store_bytes);
    }
    if (facts_.no_inodes) seen += ", and no inode for a file";
    // Several paths share a store; check_paths() judges that.
    const bool alone = required_.paths.size() <= 1;
    const auto store = required_.of_all_ranks(required_.store_bytes);
    if (alone && store) seen += fmt::format("; {} {}", store_takes(required_), text_of_size(*store));
    const std::uint64_t least = alone ? store.value_or(kLeastRoom) : kLeastRoom;
    if (have >= least && !(full() && facts_.store_bytes == 0)) return ok("space", seen);
    broken("space", seen,
           facts_.quota_left && *facts_.quota_left < facts_.free_bytes
               ? "sudo setquota …, or remove files of this user"
               : fmt::format("sudo du -xh {}--max-depth=2 {} | sort -h | tail   # shows what to remove",
                             facts_.no_inodes ? "--inodes " : "", mount_point()));
  }

  void check_drive() {
    const drive::DriveInfo& drive = facts_.drive;
    if (drive.name.empty()) return skipped("drive", "no block device shows itself behind " + facts_.mount.source);
    std::string seen = drive.name;
    if (!drive.model.empty()) seen += ", " + drive.model;
    if (drive.bytes > 0) seen += ", " + text_of_size(drive.bytes);
    if (drive.is_virtual) seen += ", virtual: its host may cache, throttle and share it";
    if (facts_.encrypted) {
      return slower("drive", seen + ", encrypted by dm-crypt", "the CPU encrypts every byte; the probe shows the rest",
                    fmt::format("sudo cryptsetup refresh --perf-no_read_workqueue --perf-no_write_workqueue "
                                "--persistent $(cat /sys/class/block/{}/dm/name)",
                                drive.name));
    }
    // What a virtual drive says of platters means nothing.
    if (drive.rotational.value_or(false) && !drive.is_virtual && !drive.name.starts_with("loop")) {
      return slower("drive", seen + ", a rotating disk", "far slower than flash; the probe shows how much",
                    "a directory on an SSD");
    }
    ok("drive", seen);
  }

  void check_disk(const DiskInfo& disk) {
    const drive::DriveInfo& drive = disk.drive;
    const auto now = link_gb_per_s(drive.link_now), most = link_gb_per_s(drive.link_most);
    if (now && most) {
      const std::string seen =
          fmt::format("{} at {}, the drive could do {}", drive.name, drive.link_now, drive.link_most);
      if (*now >= *most) {
        ok("link", fmt::format("{} at {}, all that the drive can do", drive.name, drive.link_now));
      } else {
        const auto slot = link_gb_per_s(disk.slot_most);
        slower("link", seen, fmt::format("at most {:.1f} instead of {:.1f} GB/s", *now, *most),
               slot && *slot >= *most
                   ? "the slot could do it: reseat the drive, and look for the slot's PCIe setting in "
                     "the firmware setup"
                   : "another slot: the mainboard's manual says which has more lanes or a newer PCIe");
      }
    }
    constexpr unsigned kWornOut = 100;
    if (disk.percent_used && *disk.percent_used >= kWornOut) {
      slower("wear", fmt::format("{} has used {} % of its rated life", drive.name, *disk.percent_used),
             "writes slow down, then fail", "another drive, before this one goes");
    } else if (disk.percent_used) {
      ok("wear", fmt::format("{} has used {} % of its rated life", drive.name, *disk.percent_used));
    }
    if (drive.celsius && !facts_.probe) {
      if (drive.celsius_limit && *drive.celsius >= *drive.celsius_limit) {
        slower("heat", fmt::format("{} is at {:.0f} °C", drive.name, *drive.celsius),
               fmt::format("it slows down from {:.0f} °C on", *drive.celsius_limit),
               "a heat sink, or air over the drive");
      } else {
        ok("heat", fmt::format("{} is at {:.0f} °C", drive.name, *drive.celsius));
      }
    }
  }

  void check_probe() {
    if (facts_.probe_failed) {
      return broken("probe", error_text(*facts_.probe_failed), "see sudo dmesg and sudo smartctl -a of the drive");
    }
    if (!facts_.probe) return skipped("probe", facts_.no_probe);
    const Finding finding = judge_probe(*facts_.probe, facts_.drive, mount_point());
    add("probe", finding.status, finding.seen, finding.slower_by, finding.repair);
  }

  // Less than the smallest store that makes sense.
  static constexpr std::uint64_t kLeastRoom = 64 * kMiB;

  const PathInfo& facts_;
  const RunRequirements& required_;
  Findings findings_;
};

std::vector<std::string> disk_names(const PathInfo& facts) {
  std::vector<std::string> names;
  for (const DiskInfo& disk : facts.disks) names.push_back(disk.drive.name);
  std::ranges::sort(names);
  return names;
}

void check_shared_drives(std::span<const PathInfo> paths, Findings& findings) {
  for (std::size_t i = 0; i < paths.size(); ++i) {
    for (std::size_t j = 0; j < i; ++j) {
      std::vector<std::string> both;
      std::ranges::set_intersection(disk_names(paths[i]), disk_names(paths[j]), std::back_inserter(both));
      if (both.empty()) continue;
      findings.push_back({"", "paths", Status::kSlower,
                          fmt::format("{} and {} are on the same drive, {}", paths[j].path.string(),
                                      paths[i].path.string(), fmt::join(both, ", ")),
                          "a store striped over both is no faster than one, and gets in its own way",
                          fmt::format("leave one of them out of spillway.nvme_paths")});
    }
  }
}

void check_room_of_all(std::span<const PathInfo> paths, const RunRequirements& required, Findings& findings) {
  if (required.paths.size() < 2 || !required.store_bytes) return;
  std::uint64_t have = 0;
  std::set<std::pair<unsigned, unsigned>> counted;  // file systems
  for (const PathInfo& path : paths) {
    have += path.store_bytes;
    if (!path.mount.type.empty() && !counted.emplace(path.mount.major, path.mount.minor).second) continue;
    have += std::min(path.free_bytes, path.quota_left.value_or(UINT64_MAX));
  }
  const std::uint64_t store = *required.of_all_ranks(required.store_bytes);
  const std::string seen =
      fmt::format("{} on all paths together; {} {}", text_of_size(have), store_takes(required), text_of_size(store));
  if (have >= store) {
    findings.push_back({"", "space", Status::kOk, seen, "", ""});
  } else {
    findings.push_back({"", "space", Status::kBroken, seen, "",
                        "free some space, add a path to spillway.nvme_paths, or set spillway.commit_every to 0 (half "
                        "the disk, no resume: give finetune --out)"});
  }
}

}  // namespace

std::optional<double> link_gb_per_s(const std::string& link) {
  double transfers = 0;
  unsigned lanes = 0;
  if (std::sscanf(link.c_str(), "%lf GT/s × %u", &transfers, &lanes) != 2) return std::nullopt;
  // PCI Express Base Specification: 8b/10b up to 5 GT/s, 128b/130b to 32 GT/s, flits (242 of 256 bytes) from 64 on.
  const double code = transfers <= 5 ? 8.0 / 10 : transfers <= 32 ? 128.0 / 130 : 242.0 / 256;
  return transfers * lanes * code / 8;
}

Findings check_path(const PathInfo& facts, const RunRequirements& required) { return Path(facts, required).check(); }

Findings check_paths(std::span<const PathInfo> paths, const RunRequirements& required, const NodesInUse& nodes) {
  Findings findings;
  check_room_of_all(paths, required, findings);
  check_shared_drives(paths, findings);
  for (const PathInfo& path : paths) {
    for (const DiskInfo& disk : path.disks) {
      const auto far = [&](std::string from, std::string repair) {
        findings.push_back(
            {"", "numa", Status::kSlower, fmt::format("{} is on node {}, {}", disk.drive.name, *disk.node, from),
             "every byte between them crosses the link of the nodes; not measured here", std::move(repair)});
      };
      if (disk.node && nodes.gpu && *disk.node != *nodes.gpu) {
        far(fmt::format("the GPU on node {}", *nodes.gpu), "a slot of the GPU's node for the drive");
      }
      if (disk.node && std::ranges::count(nodes.cpus, static_cast<unsigned>(*disk.node)) == 0) {
        far(fmt::format("this process may use CPUs of {} only", fmt::join(nodes.cpus, ", ")),
            fmt::format("numactl --cpunodebind={} before the command, or no taskset and cpuset", *disk.node));
      }
    }
  }
  return findings;
}

}  // namespace spillway::doctor
