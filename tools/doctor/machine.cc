#include "tools/doctor/machine.h"

#include <fmt/format.h>
#include <sys/resource.h>

#include <algorithm>
#include <cctype>
#include <cstring>
#include <string_view>

#include "kernels/host_memory.h"
#include "kernels/optimizer.h"
#include "kernels/process_limits.h"
#include "kernels/topology.h"
#include "spillway/error.h"
#include "spillway/units.h"
#include "tools/drive/text_file.h"
#include "tools/terminal/heard.h"

namespace spillway::doctor {
namespace {

namespace fs = std::filesystem;
using drive::number_of;
using drive::read_line;

// Enough to be refused under a limit of nothing, little enough to be granted under every other.
constexpr std::uint64_t kTriedRegion = 64 * kKiB;
// Large enough to ask for huge pages; it is touched only where that hurts nobody.
constexpr std::uint64_t kTriedArena = 128 * kMiB, kRoomToTouchIt = kGiB;
constexpr unsigned kCapIpcLock = 14;  // linux/capability.h

std::string lower(std::string text) {
  std::ranges::transform(text, text.begin(), [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return text;
}

// `AnonHugePages:   2048 kB`
std::uint64_t bytes_in(std::string_view text, const char* key) {
  return number_of(drive::field_of(text, key), std::uint64_t{0}) * kKiB;
}

std::string container_of(const Roots& roots) {
  std::error_code ignored;
  if (fs::exists(roots.root / "run/.containerenv", ignored)) return "podman";
  if (std::string named = read_line(roots.root / "run/systemd/container"); !named.empty()) return named;
  const std::string groups = drive::contents_of(roots.proc / "1/cgroup");
  if (groups.find("kubepods") != std::string::npos) return "kubernetes";
  if (fs::exists(roots.root / ".dockerenv", ignored)) return "docker";
  for (const char* word : {"docker", "lxc", "containerd"}) {
    if (groups.find(word) != std::string::npos) return word;
  }
  return "";
}

std::optional<std::uint64_t> limit_of(decltype(RLIMIT_NOFILE) which) {
  struct rlimit limit {};
  if (::getrlimit(which, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return std::nullopt;
  return limit.rlim_cur;
}

// Whether the kernel counts memory that this process pins (io_uring_register(2): not with CAP_IPC_LOCK).
bool counts_locked_memory(const Roots& roots) {
  const std::string mask = drive::field_of(drive::contents_of(roots.proc / "self/status"), "CapEff");
  return mask.empty() || (std::strtoull(mask.c_str(), nullptr, 16) >> kCapIpcLock & 1) == 0;
}

// There was none to register, so that says nothing.
std::string without_files(std::string ring) {
  constexpr std::string_view kFiles = ", unregistered files";
  if (const std::size_t at = ring.find(kFiles); at != std::string::npos) ring.erase(at, kFiles.size());
  return ring;
}

std::uint64_t huge_bytes_here(const Roots& roots) {
  return bytes_in(drive::contents_of(roots.proc / "self/smaps_rollup"), "AnonHugePages");
}

void try_arena(const Roots& roots, MemoryInfo& memory) {
  terminal::Heard heard;
  try {
    HostArena arena(kTriedArena, kPinnedArena, roots.sys / "kernel/mm/transparent_hugepage");
    memory.arena_tried = true;
    if (!arena.huge_pages()) {
      const std::string line = heard.lines().empty() ? "" : heard.lines().back();
      const std::size_t open = line.find('('), close = line.find("):");
      memory.small_pages = open < close && close != std::string::npos ? line.substr(open + 1, close - open - 1) : line;
      return;
    }
    const std::uint64_t room = std::min(
        {memory.available_bytes, memory.cgroup_left.value_or(UINT64_MAX), memory.address_space.value_or(UINT64_MAX)});
    if (room < kRoomToTouchIt) return;
    const std::uint64_t before = huge_bytes_here(roots);
    std::memset(arena.memory().data(), 1, arena.memory().size());
    const std::uint64_t after = huge_bytes_here(roots);
    memory.huge_share = static_cast<double>(after - std::min(after, before)) / static_cast<double>(kTriedArena);
  } catch (const Error&) {  // what ulimit -v leaves is a fact of its own
  }
}

}  // namespace

KernelInfo kernel_info(const Roots& roots) {
  KernelInfo kernel;
  kernel.release = read_line(roots.proc / "sys/kernel/osrelease");
  kernel.wsl = lower(kernel.release).find("microsoft") != std::string::npos;
  kernel.container = container_of(roots);
  kernel.seccomp = drive::field_of(drive::contents_of(roots.proc / "self/status"), "Seccomp") == "2";
  return kernel;
}

RingInfo ring_info(const Roots& roots) {
  RingInfo ring;
  ring.disabled = number_of(read_line(roots.proc / "sys/kernel/io_uring_disabled"), -1);
  if (counts_locked_memory(roots)) ring.lockable_bytes = limit_of(RLIMIT_MEMLOCK);
  alignas(4096) std::byte memory[kTriedRegion];
  const std::span<std::byte> regions[] = {memory};
  for (const IoEngineKind kind : kIoEngines) {
    RungInfo rung{kind, ""};
    terminal::Heard heard;
    try {
      const auto queue = IoQueue::create({.engine = kind, .block_bytes = kTriedRegion}, {}, regions);
      if (kind == IoEngineKind::kIoUring) ring.granted = without_files(queue->describe());
    } catch (const Error& error) {
      rung.refused = error.parts().happened;
    }
    for (const std::string& line : heard.lines()) {
      if (line.starts_with("registered buffers")) ring.not_registered = line.substr(0, line.find(';'));
    }
    ring.ladder.push_back(std::move(rung));
  }
  return ring;
}

MemoryInfo memory_info(const Roots& roots) {
  MemoryInfo memory;
  const std::string info = drive::contents_of(roots.proc / "meminfo");
  memory.total_bytes = bytes_in(info, "MemTotal");
  memory.available_bytes = bytes_in(info, "MemAvailable");
  memory.swap_bytes = bytes_in(info, "SwapTotal");
  memory.swap_used_bytes = memory.swap_bytes - std::min(memory.swap_bytes, bytes_in(info, "SwapFree"));
  memory.hugetlb_bytes = bytes_in(info, "Hugetlb");
  memory.overcommit = number_of(read_line(roots.proc / "sys/vm/overcommit_memory"), -1);
  const std::uint64_t limit = bytes_in(info, "CommitLimit");
  memory.commit_left_bytes = limit - std::min(limit, bytes_in(info, "Committed_AS"));
  const CgroupFiles cgroups{.membership = roots.proc / "self/cgroup", .root = roots.sys / "fs/cgroup"};
  memory.cgroup_bytes = memory_limit(cgroups);
  memory.cgroup_left = memory_left(cgroups);
  memory.address_space = address_space_left();
  try_arena(roots, memory);
  return memory;
}

LimitInfo limit_info() { return {.open_files = limit_of(RLIMIT_NOFILE), .file_bytes = limit_of(RLIMIT_FSIZE)}; }

CpuInfo cpu_info(const Roots& roots) {
  CpuInfo cpu;
  cpu.target = optimizer_targets().front().name;
  const std::vector<unsigned> allowed = affinity_cpus();
  cpu.cpus = static_cast<unsigned>(allowed.size());
  cpu.quota = cpu_quota({.membership = roots.proc / "self/cgroup", .root = roots.sys / "fs/cgroup"});
  {
    terminal::Heard heard;  // that hwloc does not know the machine; it is one node then
    for (const CpuNode& node : usable_nodes()) cpu.nodes.push_back(node.os_index);
  }
  const fs::path clock = roots.sys / "devices/system/cpu" / fmt::format("cpu{}", allowed.front()) / "cpufreq";
  cpu.driver = read_line(clock / "scaling_driver");
  cpu.governor = read_line(clock / "scaling_governor");
  cpu.preference = read_line(clock / "energy_performance_preference");
  cpu.lowest_khz = number_of(read_line(clock / "scaling_min_freq"), std::uint64_t{0});
  cpu.highest_khz = number_of(read_line(clock / "cpuinfo_max_freq"), std::uint64_t{0});
  return cpu;
}

}  // namespace spillway::doctor
