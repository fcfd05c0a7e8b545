// What a directory for a store is like: its file system, the drive below, what a file there can do. No root needed;
// a file of the doctor's own loses its name as soon as it is open, so nothing is left behind.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "spillway/error.h"
#include "tools/doctor/probe.h"
#include "tools/doctor/run_requirements.h"
#include "tools/drive/drive.h"

namespace spillway::doctor {

// A drive that lies below a path: the block device itself, or one of those that a RAID, LVM or dm-crypt is made of.
struct DiskInfo {
  drive::DriveInfo drive;
  std::string slot_most = {};                 // the PCIe link that its slot could do; empty: not shown
  std::optional<int> node = {};               // NUMA
  std::optional<unsigned> percent_used = {};  // of the life that its vendor rates it for; root only
};

struct PathInfo {
  std::filesystem::path path = {};
  // What is looked at: the path, or the nearest of its parents that is there, in which a run makes the rest. Empty:
  // neither is a directory.
  std::filesystem::path directory = {};
  drive::MountInfo mount;
  drive::DriveInfo drive;  // what the file system lies on
  std::vector<DiskInfo> disks = {};
  bool encrypted = false;  // by dm-crypt

  std::uint64_t total_bytes = 0, free_bytes = 0;
  bool counts_space = false;      // else the file system does not say what is free
  bool no_inodes = false;         // nor for a file without a byte
  std::uint64_t store_bytes = 0;  // of a store that is there already
  std::optional<std::uint64_t> quota_left = {};

  // Of a file made there. A failure that ended the trial early is in `failed`.
  std::optional<ErrorParts> failed = {};
  bool written = false;  // some bytes were written, synced and read back
  bool intact = false;   // and they were the same
  bool direct = false;
  std::uint32_t alignment = 1;
  std::vector<std::string> remarks = {};  // of the library on the file: what the file system did not grant
  std::string engine_refused = {};        // why it takes no engine that the machine grants, or not the one asked for
  std::string engine = {};                // the one it takes

  std::optional<ProbeInfo> probe = {};
  std::string no_probe = {};                    // why there is none
  std::optional<ErrorParts> probe_failed = {};  // a transfer of it did
  std::string hung = {};                        // what made no progress for half a minute, in the trial or the probe
};

// Everything but the probe. `engine`: the one that the configuration asks for; `ranks`: that have their stores there.
PathInfo path_info(const std::filesystem::path& path, IoEngineKind engine, std::uint32_t ranks = 1);

// What the drives behind a block device say of themselves now.
std::vector<DiskInfo> disks_of(const drive::DriveInfo& drive);

}  // namespace spillway::doctor
