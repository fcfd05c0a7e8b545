#include "tools/doctor/checks.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <numeric>
#include <string_view>
#include <utility>
#include <vector>

#include "aio/io_engine.h"
#include "kernels/host_memory.h"
#include "kernels/process_limits.h"
#include "spillway/units.h"
#include "tools/drive/load.h"
#include "tools/terminal/amount.h"

namespace spillway::doctor {
namespace {

using terminal::text_of_size;

Finding ok(const char* check, std::string seen) { return {"", check, Status::kOk, std::move(seen), "", ""}; }
Finding slower(const char* check, std::string seen, std::string by, std::string repair) {
  return {"", check, Status::kSlower, std::move(seen), std::move(by), std::move(repair)};
}
Finding broken(const char* check, std::string seen, std::string repair) {
  return {"", check, Status::kBroken, std::move(seen), "", std::move(repair)};
}

std::pair<int, int> version_of(const std::string& release) {
  int major = 0, minor = 0;
  std::sscanf(release.c_str(), "%d.%d", &major, &minor);
  return {major, minor};
}

// Where a container's limits are set.
std::string in_container(const std::string& container, const std::string& option, std::string otherwise) {
  if (container.empty()) return otherwise;
  if (container == "kubernetes") return fmt::format("in the pod's specification, what `docker run {}` does", option);
  return fmt::format("{} run {} …", container == "podman" ? "podman" : "docker", option);
}

std::string lock_repair(const KernelInfo& kernel) {
  return in_container(kernel.container, "--ulimit memlock=-1",
                      "echo \"$USER - memlock unlimited\" | sudo tee /etc/security/limits.d/spillway.conf   # then log "
                      "in again; a systemd unit takes LimitMEMLOCK=infinity");
}

std::string ring_repair(const RingInfo& ring, const KernelInfo& kernel, const std::string& why) {
  if (ring.disabled > 0 && why.find("io_uring_disabled") != std::string::npos)
    return "sudo sysctl -w kernel.io_uring_disabled=0";
  if (why.starts_with("EMFILE") || why.starts_with("ENFILE")) return "ulimit -n 4096";
  if (why.starts_with("ENOMEM")) return lock_repair(kernel);
  if (kernel.seccomp || !kernel.container.empty()) {
    return in_container(kernel.container, "--security-opt seccomp=unconfined",
                        "allow io_uring_setup, io_uring_enter and io_uring_register in the sandbox that this shell "
                        "runs in (systemd: SystemCallFilter=)");
  }
  if (version_of(kernel.release) < std::pair(5, 11)) return "install a kernel from 5.11 on, better 6.1";
  return "see what sudo dmesg says of io_uring (SELinux and AppArmor can refuse it, too)";
}

Finding check_lockable(const RingInfo& ring, const KernelInfo& kernel, const RunRequirements& required) {
  const std::string price = fmt::format("plain buffers, about {} % more CPU", kPlainBuffersPrice);
  if (!ring.lockable_bytes) {
    if (!ring.not_registered.empty()) {
      return slower("memlock", ring.not_registered, price, "see what sudo dmesg says of io_uring");
    }
    return ok("memlock", "no limit on pinned memory for this process");
  }
  const std::string limit = fmt::format("ulimit -l allows {} of pinned memory", text_of_size(*ring.lockable_bytes));
  if (required.host_bytes && *required.host_bytes <= *ring.lockable_bytes && ring.not_registered.empty()) {
    return ok("memlock", fmt::format("{}, host memory takes {}", limit, text_of_size(*required.host_bytes)));
  }
  return slower("memlock",
                required.host_bytes ? fmt::format("{}, host memory takes {}", limit, text_of_size(*required.host_bytes))
                                    : fmt::format("{}, and all of host_bytes is to be registered", limit),
                price, lock_repair(kernel));
}

std::string of_ranks(const RunRequirements& required) {
  return required.ranks == 1 ? "" : fmt::format(" of {} ranks", required.ranks);
}

// Of a rank's store, which has one on each path: as the rates say, or as large on each, which is the least that it is.
std::uint64_t largest_file(const RunRequirements& required) {
  const auto store = static_cast<double>(required.store_bytes.value_or(0));
  const auto paths = std::max<std::size_t>(1, required.paths.size());
  double share = 1 / static_cast<double>(paths);
  if (const std::vector<double>& rates = required.rates; rates.size() == paths)
    share = std::ranges::max(rates) / std::accumulate(rates.begin(), rates.end(), 0.0);
  return static_cast<std::uint64_t>(std::ceil(store * share));
}

Finding check_room(const MemoryInfo& memory, const RunRequirements& required) {
  std::string seen =
      fmt::format("{} available of {}", text_of_size(memory.available_bytes), text_of_size(memory.total_bytes));
  if (memory.cgroup_bytes) {
    seen += fmt::format(", this process's cgroup allows {}", text_of_size(*memory.cgroup_bytes));
    if (memory.cgroup_left) seen += fmt::format(" and leaves {}", text_of_size(*memory.cgroup_left));
  }
  if (!required.memory_bytes) return ok("memory", seen);
  const std::uint64_t have = std::min(memory.available_bytes, memory.cgroup_left.value_or(UINT64_MAX));
  const std::uint64_t arenas = *required.of_all_ranks(required.memory_bytes);
  seen += fmt::format("; the arenas{} take {} and the program{} up to {}", of_ranks(required), text_of_size(arenas),
                      required.ranks == 1 ? "" : "s", text_of_size(required.ranks * kOutsideArenas));
  if (arenas + required.ranks * kOutsideArenas <= have) return ok("memory", seen);
  const char* repair = have == memory.available_bytes
                           ? "end other programs, or lower spillway.host_bytes and spillway.hbm_bytes"
                           : "raise the cgroup's limit (docker run --memory …, systemd: MemoryMax=), or lower "
                             "spillway.host_bytes and spillway.hbm_bytes";
  // What the engine refuses; the program may do with less than it may take.
  if (arenas + required.ranks * kLeastOutside > have) return broken("memory", seen, repair);
  return slower("memory", seen, "a run may swap in the middle of a step, or be killed", repair);
}

Finding check_swap(const MemoryInfo& memory) {
  // From here on it is more than what idle programs leave there.
  constexpr double kMuch = 0.05;
  if (memory.swap_bytes == 0) return ok("swap", "off");
  const std::string seen =
      fmt::format("{} of {} in use", text_of_size(memory.swap_used_bytes), text_of_size(memory.swap_bytes));
  if (static_cast<double>(memory.swap_used_bytes) < kMuch * static_cast<double>(memory.total_bytes)) {
    return ok("swap", seen);
  }
  return slower("swap", seen, "memory is short already, and what is not pinned may go there in the middle of a step",
                "end what takes the memory (ps aux --sort=-rss | head), then sudo swapoff -a && sudo swapon -a");
}

Finding check_overcommit(const MemoryInfo& memory, const RunRequirements& required) {
  if (memory.overcommit < 0) return {"", "overcommit", Status::kSkipped, "this kernel does not say", "", ""};
  if (memory.overcommit != 2) return ok("overcommit", fmt::format("vm.overcommit_memory is {}", memory.overcommit));
  const std::string seen =
      fmt::format("vm.overcommit_memory is 2, which leaves {} to be mapped", text_of_size(memory.commit_left_bytes));
  const auto arenas = required.of_all_ranks(required.memory_bytes);
  if (!arenas || *arenas < memory.commit_left_bytes) return ok("overcommit", seen);
  return broken("overcommit", fmt::format("{}; the arenas{} take {}", seen, of_ranks(required), text_of_size(*arenas)),
                "sudo sysctl -w vm.overcommit_memory=0");
}

Finding check_address_space(const MemoryInfo& memory, const RunRequirements& required) {
  if (!memory.address_space) return ok("address space", "no limit (ulimit -v)");
  const std::uint64_t want = required.memory_bytes.value_or(0) + kOutsideArenas;
  const std::string seen = fmt::format("ulimit -v leaves {}", text_of_size(*memory.address_space));
  if (*memory.address_space >= want) return ok("address space", seen);
  return broken("address space", fmt::format("{}, at least {} are needed", seen, text_of_size(want)),
                "ulimit -v unlimited");
}

Findings check_huge_pages(const MemoryInfo& memory) {
  constexpr double kMost = 0.9;
  Findings findings;
  const std::string price = fmt::format("{} on small ones", kSmallPagesPrice);
  if (!memory.arena_tried) {
    findings.push_back({"", "huge pages", Status::kSkipped, "no address space to try an arena", "", ""});
  } else if (!memory.small_pages.empty()) {
    findings.push_back(slower("huge pages", memory.small_pages, price,
                              "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled"));
  } else if (memory.huge_share && *memory.huge_share < kMost) {
    findings.push_back(slower(
        "huge pages", fmt::format("{:.0f} % of an arena got some: memory is fragmented", 100 * *memory.huge_share),
        price, "echo 1 | sudo tee /proc/sys/vm/compact_memory"));
  } else {
    findings.push_back(ok("huge pages", memory.huge_share ? "granted, and given to an arena that was touched"
                                                          : "granted; not touched, memory is short"));
  }
  if (memory.hugetlb_bytes > 0) {
    findings.push_back(
        slower("hugetlbfs",
               fmt::format("{} are reserved there, and Spillway takes none of it", text_of_size(memory.hugetlb_bytes)),
               fmt::format("{} less for host_bytes", text_of_size(memory.hugetlb_bytes)),
               "sudo sysctl -w vm.nr_hugepages=0   # unless another program wants them"));
  }
  return findings;
}

Finding check_clock(const CpuInfo& cpu) {
  if (cpu.governor.empty()) return {"", "clock", Status::kSkipped, "the kernel shows no governor", "", ""};
  std::string seen = fmt::format("{}, governor {}", cpu.driver, cpu.governor);
  if (!cpu.preference.empty()) seen += fmt::format(", preference {}", cpu.preference);
  // In these drivers' active mode the CPU chooses its clock itself, and `powersave` is the ordinary choice; the
  // preference decides (Documentation/admin-guide/pm/intel_pstate.rst, amd-pstate.rst).
  const bool chooses_itself =
      cpu.driver == "intel_pstate" || cpu.driver == "amd-pstate-epp" || cpu.driver == "amd_pstate_epp";
  const std::string performance = "echo performance | sudo tee /sys/devices/system/cpu/cpu*/cpufreq/scaling_governor";
  if (chooses_itself) {
    if (cpu.preference != "power") return ok("clock", seen);
    return slower("clock", seen, "the clock rises late and not all the way; how much depends on the CPU",
                  "echo balance_performance | sudo tee "
                  "/sys/devices/system/cpu/cpu*/cpufreq/energy_performance_preference");
  }
  if (cpu.governor != "powersave") return ok("clock", seen);
  const std::string by =
      cpu.lowest_khz > 0 && cpu.highest_khz > cpu.lowest_khz
          ? fmt::format("the clock stays at {:.1f} of {:.1f} GHz", static_cast<double>(cpu.lowest_khz) / 1e6,
                        static_cast<double>(cpu.highest_khz) / 1e6)
          : "the clock stays at its lowest";
  return slower("clock", seen, by, performance);
}

}  // namespace

Findings check_kernel(const KernelInfo& kernel, const RingInfo& ring) {
  Findings findings;
  const auto version = version_of(kernel.release);
  const std::string name = "Linux " + kernel.release;
  if (version < std::pair(5, 11)) {
    findings.push_back(slower("kernel", name + " is older than 5.11: no io_uring for Spillway",
                              price_of(IoEngineKind::kLibaio), "install a kernel from 6.1 on"));
  } else if (!ring.granted.empty() && ring.granted.find("deferred task run") == std::string::npos) {
    findings.push_back(slower("kernel", name + " is older than 6.1: completions interrupt the thread that computes",
                              "more CPU for each completion; not measured here", "install a kernel from 6.1 on"));
  } else {
    findings.push_back(ok("kernel", name));
  }
  if (kernel.wsl) {
    findings.push_back(slower("wsl",
                              "Windows Subsystem for Linux: its drive is a file on Windows' drive, and its memory by "
                              "default a part of the machine's",
                              "the probe of a path shows what is left of the drive",
                              "memory=… below [wsl2] in %UserProfile%\\.wslconfig, then wsl --shutdown; stores belong "
                              "on the ext4 of WSL or on a drive of wsl --mount, never below /mnt/c"));
  }
  if (!kernel.container.empty()) {
    findings.push_back(ok("container", fmt::format("{}{}; its limits are in the lines around this one",
                                                   kernel.container, kernel.seccomp ? ", with a seccomp filter" : "")));
  }
  return findings;
}

Findings check_ring(const RingInfo& ring, const KernelInfo& kernel, const RunRequirements& required) {
  Findings findings;
  const auto granted = std::ranges::find(ring.ladder, std::string(), &RungInfo::refused);
  if (granted == ring.ladder.end()) {  // threads are always to be had but for memory and file descriptors
    findings.push_back(broken("io_uring", "no engine is to be had: " + ring.ladder.front().refused, "ulimit -n 4096"));
    return findings;
  }
  if (granted->kind == IoEngineKind::kIoUring) {
    findings.push_back(ok("io_uring", ring.granted));
    findings.push_back(check_lockable(ring, kernel, required));
    return findings;
  }
  const std::string& why = ring.ladder.front().refused;
  std::string seen = why;
  for (auto rung = std::next(ring.ladder.begin()); rung != granted; ++rung) {
    seen += fmt::format("; {}: {}", name_of(rung->kind), rung->refused);
  }
  const std::string repair = ring_repair(ring, kernel, why);
  if (required.engine == IoEngineKind::kIoUring) {
    findings.push_back(broken("io_uring", seen + "; spillway.io_engine asks for it by name", repair));
  } else {
    findings.push_back(
        slower("io_uring", seen, fmt::format("using {}, {}", name_of(granted->kind), price_of(granted->kind)), repair));
  }
  return findings;
}

Findings check_memory(const MemoryInfo& memory, const RunRequirements& required) {
  Findings findings;
  if (!required.refused.empty()) findings.push_back(broken("plan", required.refused, required.remedy));
  if (!required.no_plan.empty()) findings.push_back({"", "plan", Status::kSkipped, required.no_plan, "", ""});
  findings.push_back(check_room(memory, required));
  findings.push_back(check_swap(memory));
  findings.push_back(check_overcommit(memory, required));
  findings.push_back(check_address_space(memory, required));
  for (Finding& finding : check_huge_pages(memory)) findings.push_back(std::move(finding));
  return findings;
}

Findings check_limits(const LimitInfo& limits, const RunRequirements& required) {
  // One path and one file of weights do with 8; 16 paths and the shards of a large model are some tens.
  constexpr std::uint64_t kFiles = 64;
  Findings findings;
  if (limits.open_files && *limits.open_files < kFiles) {
    findings.push_back(broken("open files", fmt::format("ulimit -n is {}", *limits.open_files), "ulimit -n 4096"));
  } else {
    findings.push_back(
        ok("open files", limits.open_files ? fmt::format("ulimit -n is {}", *limits.open_files) : "no limit"));
  }
  if (!limits.file_bytes) return findings;
  const std::string seen = fmt::format("ulimit -f is {}", text_of_size(*limits.file_bytes));
  const std::uint64_t largest = largest_file(required);
  if (largest > *limits.file_bytes) {
    const char* what = required.paths.size() > 1 ? "the store's file on a path" : "the store";
    findings.push_back(
        broken("file size", fmt::format("{}, {} takes {}", seen, what, text_of_size(largest)), "ulimit -f unlimited"));
  } else {
    findings.push_back(ok("file size", seen));
  }
  return findings;
}

Findings check_cpu(const CpuInfo& cpu) {
  Findings findings;
  const std::string nodes =
      cpu.nodes.size() == 1 ? "one NUMA node" : fmt::format("NUMA nodes {}", fmt::join(cpu.nodes, ", "));
  const std::string seen = fmt::format("{} CPUs on {}", cpu.cpus, nodes);
  if (cpu.target == "scalar") {
    // bench/results/optimizer.jsonl: 16.9 ns a bf16 parameter on one thread against 0.9 with AVX2.
    findings.push_back(slower("cpu", seen + "; no vector instructions with fused multiply-add (AVX2, NEON)",
                              "Adam takes about 17 times as long",
                              "in a virtual machine pass the host's CPU on (QEMU: -cpu host); else another CPU"));
  } else {
    findings.push_back(ok("cpu", fmt::format("{}, kernels on {}", seen, cpu.target)));
  }
  if (cpu.quota && *cpu.quota < cpu.cpus) {
    findings.push_back(slower("cpu quota", fmt::format("the cgroup allows {:.1f} of {} CPUs", *cpu.quota, cpu.cpus),
                              fmt::format("{:.0f} % less time to compute", 100 * (1 - *cpu.quota / cpu.cpus)),
                              "docker run without --cpus; systemd: CPUQuota="));
  }
  findings.push_back(check_clock(cpu));
  return findings;
}

}  // namespace spillway::doctor
