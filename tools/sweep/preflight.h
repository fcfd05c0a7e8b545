// What is to be known about a path before anything is measured on it, and whether it can be measured at all.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "tools/drive/drive.h"
#include "tools/sweep/point.h"

namespace spillway::sweep {

struct PathInfo {
  std::filesystem::path path;
  drive::MountInfo mount;
  drive::DriveInfo drive;
  std::uint64_t free_bytes = 0;
  bool direct = false;          // direct I/O, as the test file got it
  std::uint32_t alignment = 1;  // what a request must be a multiple of then
  std::vector<std::string> warnings;
};

// Throws when the path is missing, is no directory, or (unless `buffered_allowed`) is memory instead of a drive.
PathInfo examine_path(const std::filesystem::path& path, bool buffered_allowed);

// How large a test file may be and is: `wanted`, or what suits the free space when that is 0. Throws kDoesNotFit.
std::uint64_t test_bytes(const PathInfo& facts, std::uint64_t wanted);

// Adds what the open test file says. Throws when direct I/O is missing, unless `buffered_allowed`.
void note_direct_io(PathInfo& facts, bool direct, std::uint32_t alignment, bool buffered_allowed);

// Warnings about what the figures may not show, given the size of the test.
void warn_of_caches(PathInfo& facts, std::uint64_t test_bytes);

// An engine that this machine grants, or the reason why not.
struct WayInfo {
  Way way;
  std::string refused;  // empty: it is there
};

struct MachineInfo {
  std::string kernel, processor;
  unsigned processors = 0;
  std::uint64_t memory_bytes = 0;
  std::string locked_memory;  // `unlimited`, `8 MiB`
};
MachineInfo examine_machine();

}  // namespace spillway::sweep
