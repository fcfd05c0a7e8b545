#include "kernels/process_limits.h"

#include <sched.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <sstream>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

namespace spillway {
namespace {

namespace fs = std::filesystem;

// v2 (Documentation/admin-guide/cgroup-v2.rst): `cpu.max` holds "max 100000" or "<quota> <period>".
std::optional<double> quota_v2(const fs::path& directory) {
  std::ifstream file(directory / "cpu.max");
  double quota = 0, period = 0;  // "max" fails to parse as a number: no limit here
  if (file >> quota >> period && quota > 0 && period > 0) return quota / period;
  return std::nullopt;
}

// v1 (Documentation/scheduler/sched-bwc.rst): two files; a quota of -1 means no limit.
std::optional<double> quota_v1(const fs::path& directory) {
  std::ifstream quota_file(directory / "cpu.cfs_quota_us"), period_file(directory / "cpu.cfs_period_us");
  double quota = 0, period = 0;
  if (quota_file >> quota && period_file >> period && quota > 0 && period > 0) return quota / period;
  return std::nullopt;
}

// v2: `memory.max`, "max" or bytes. v1: a huge number means no limit.
std::optional<double> memory_in(const fs::path& directory, const char* name) {
  std::ifstream file(directory / name);
  double bytes = 0;
  if (file >> bytes && bytes > 0 && bytes < 0x1p62) return bytes;
  return std::nullopt;
}
std::optional<double> memory_v2(const fs::path& directory) { return memory_in(directory, "memory.max"); }
std::optional<double> memory_v1(const fs::path& directory) { return memory_in(directory, "memory.limit_in_bytes"); }

// The value after `name` in a file of lines of names and numbers; 0 when it is not there.
double value_in(const fs::path& path, const std::string& name) {
  std::ifstream file(path);
  std::string found;
  for (double value = 0; file >> found >> value;) {
    if (found == name) return value;
  }
  return 0;
}

std::optional<double> left_of(std::optional<double> limit, double used, double cached) {
  if (limit) *limit -= std::clamp(used - cached, 0.0, *limit);
  return limit;
}
std::optional<double> memory_left_v2(const fs::path& directory) {
  const fs::path stat = directory / "memory.stat";
  return left_of(memory_v2(directory), memory_in(directory, "memory.current").value_or(0),
                 value_in(stat, "inactive_file") + value_in(stat, "active_file"));
}
std::optional<double> memory_left_v1(const fs::path& directory) {
  const fs::path stat = directory / "memory.stat";
  return left_of(memory_v1(directory), memory_in(directory, "memory.usage_in_bytes").value_or(0),
                 value_in(stat, "total_inactive_file") + value_in(stat, "total_active_file"));
}

// A cgroup's limit also binds the groups below it, so every directory up to the mount counts. In a container without a
// cgroup namespace the path names directories of the host that the mount does not show; those are simply not there.
using ReadLimit = std::optional<double> (*)(const fs::path& directory);
void tighten(std::optional<double>& tightest, const fs::path& mount, const fs::path& group, ReadLimit read_limit) {
  fs::path directory = mount;
  const auto tighten_here = [&] {
    if (const auto limit = read_limit(directory)) tightest = std::min(tightest.value_or(*limit), *limit);
  };
  tighten_here();
  for (const auto& part : group.relative_path()) {
    directory /= part;
    tighten_here();
  }
}

std::optional<double> tightest_limit(const CgroupFiles& files, const std::string& controller, ReadLimit v2,
                                     ReadLimit v1) {
  std::optional<double> tightest;
  std::ifstream membership(files.membership);
  // One line a hierarchy: "0::/user.slice" (v2) or "4:cpu,cpuacct:/docker/1f" (v1); see cgroups(7).
  for (std::string line; std::getline(membership, line);) {
    const auto first = line.find(':');
    const auto second = line.find(':', first == std::string::npos ? first : first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const fs::path group = line.substr(second + 1);
    if (controllers.empty()) {
      tighten(tightest, files.root, group, v2);
      continue;
    }
    std::istringstream names(controllers);
    bool named = false;
    for (std::string name; std::getline(names, name, ',');) named = named || name == controller;
    if (!named) continue;
    // Mounted under the name of the hierarchy, or of the controller alone.
    tighten(tightest, files.root / controllers, group, v1);
    if (controllers != controller) tighten(tightest, files.root / controller, group, v1);
  }
  return tightest;
}

std::optional<std::uint64_t> whole(std::optional<double> bytes) {
  if (!bytes) return std::nullopt;
  return static_cast<std::uint64_t>(*bytes);
}

}  // namespace

std::optional<double> cpu_quota(const CgroupFiles& files) { return tightest_limit(files, "cpu", quota_v2, quota_v1); }

std::optional<std::uint64_t> memory_limit(const CgroupFiles& files) {
  return whole(tightest_limit(files, "memory", memory_v2, memory_v1));
}

std::optional<std::uint64_t> memory_left(const CgroupFiles& files) {
  return whole(tightest_limit(files, "memory", memory_left_v2, memory_left_v1));
}

std::uint64_t available_memory() {
  std::ifstream file("/proc/meminfo");
  std::string key;
  std::uint64_t kib = 0;
  while (file >> key) {
    if (key == "MemAvailable:" && file >> kib) return kib * kKiB;
    file.ignore(1 << 10, '\n');
  }
  return UINT64_MAX;
}

std::optional<std::uint64_t> address_space_left() {
  struct rlimit limit {};
  if (getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return std::nullopt;
  std::uint64_t pages = 0;  // in use: the first number of proc(5)'s statm
  if (!(std::ifstream("/proc/self/statm") >> pages)) return std::nullopt;
  const std::uint64_t used = pages * static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE));
  return limit.rlim_cur - std::min<std::uint64_t>(used, limit.rlim_cur);
}

std::vector<unsigned> affinity_cpus() {
  std::vector<unsigned> cpus;
  // The mask must be at least as large as the kernel's own, which only trying tells (sched_getaffinity(2)).
  for (std::size_t sets = 1; sets <= 64; sets *= 2) {
    std::vector<cpu_set_t> mask(sets);
    const std::size_t bytes = sets * sizeof(cpu_set_t);
    if (sched_getaffinity(0, bytes, mask.data()) != 0) continue;
    for (unsigned cpu = 0; cpu < bytes * 8; ++cpu) {
      if (CPU_ISSET_S(cpu, bytes, mask.data())) cpus.push_back(cpu);
    }
    return cpus;
  }
  for (unsigned cpu = 0; cpu < std::max(1u, std::thread::hardware_concurrency()); ++cpu) cpus.push_back(cpu);
  return cpus;
}

}  // namespace spillway
