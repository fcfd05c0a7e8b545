// What the doctor reads out of /proc and /sys, from copies made here.
#include <gtest/gtest.h>

#include <filesystem>
#include <string>
#include <vector>

#include "spillway/units.h"
#include "tests/tools/drive/system_tree.h"
#include "tools/doctor/gpu.h"
#include "tools/doctor/machine.h"
#include "tools/doctor/path.h"

namespace spillway::doctor {
namespace {

namespace fs = std::filesystem;

class DoctorInfo : public SystemTree {
 protected:
  const Roots roots_ = {.proc = root_ / "proc", .sys = root_ / "sys", .root = root_};
};

TEST_F(DoctorInfo, KernelWslAndSeccomp) {
  write("proc/sys/kernel/osrelease", "5.15.146.1-Microsoft-standard-WSL2");
  write("proc/self/status", "Name:\tspillway\nSeccomp:\t2\nSeccomp_filters:\t1");
  const KernelInfo kernel = kernel_info(roots_);
  EXPECT_EQ(kernel.release, "5.15.146.1-Microsoft-standard-WSL2");
  EXPECT_TRUE(kernel.wsl);
  EXPECT_TRUE(kernel.seccomp);
  EXPECT_EQ(kernel.container, "");
  write("proc/self/status", "Seccomp:\t0");
  write("proc/sys/kernel/osrelease", "6.1.0-18-amd64");
  EXPECT_FALSE(kernel_info(roots_).seccomp);
  EXPECT_FALSE(kernel_info(roots_).wsl);
}

TEST_F(DoctorInfo, ContainersByWhatTheyLeaveAround) {
  write("proc/1/cgroup", "12:pids:/lxc/box\n0::/");
  EXPECT_EQ(kernel_info(roots_).container, "lxc");
  write(".dockerenv", "");
  EXPECT_EQ(kernel_info(roots_).container, "docker");
  write("proc/1/cgroup", "0::/kubepods.slice/kubepods-burstable.slice");
  EXPECT_EQ(kernel_info(roots_).container, "kubernetes");
  write("run/systemd/container", "systemd-nspawn");
  EXPECT_EQ(kernel_info(roots_).container, "systemd-nspawn");
  write("run/.containerenv", "");
  EXPECT_EQ(kernel_info(roots_).container, "podman");
}

TEST_F(DoctorInfo, MemoryAndWhatLimitsIt) {
  write("proc/meminfo",
        "MemTotal:       65536 kB\nMemAvailable:   32768 kB\nSwapTotal:       4096 kB\nSwapFree:        1024 kB\n"
        "CommitLimit:    10240 kB\nCommitted_AS:    4096 kB\nHugetlb:         2048 kB");
  write("proc/sys/vm/overcommit_memory", "2");
  write("proc/self/cgroup", "0::/box");
  write("sys/fs/cgroup/box/memory.max", "1048576");
  write("sys/kernel/mm/transparent_hugepage/enabled", "always madvise [never]");
  const MemoryInfo memory = memory_info(roots_);
  EXPECT_EQ(memory.total_bytes, 64 * kMiB);
  EXPECT_EQ(memory.available_bytes, 32 * kMiB);
  EXPECT_EQ(memory.swap_bytes, 4 * kMiB);
  EXPECT_EQ(memory.swap_used_bytes, 3 * kMiB);
  EXPECT_EQ(memory.overcommit, 2);
  EXPECT_EQ(memory.commit_left_bytes, 6 * kMiB);
  EXPECT_EQ(memory.hugetlb_bytes, 2 * kMiB);
  EXPECT_EQ(memory.cgroup_bytes, kMiB);
  EXPECT_EQ(memory.small_pages, "transparent_hugepage/enabled is never");
  EXPECT_FALSE(memory.huge_share.has_value());
}

TEST_F(DoctorInfo, AnArenaIsTouchedOnlyWhereThereIsRoom) {
  write("sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never");
  write("proc/meminfo", "MemTotal: 4194304 kB\nMemAvailable: 1048575 kB");
  EXPECT_FALSE(memory_info(roots_).huge_share.has_value());
  write("proc/meminfo", "MemTotal: 4194304 kB\nMemAvailable: 1048576 kB");
  const MemoryInfo memory = memory_info(roots_);
  if (!memory.small_pages.empty()) GTEST_SKIP() << "this kernel has no huge pages: " << memory.small_pages;
  EXPECT_TRUE(memory.huge_share.has_value());
}

TEST_F(DoctorInfo, RingSaysWhatItsSysctlIs) {
  EXPECT_EQ(ring_info(roots_).disabled, -1);
  write("proc/sys/kernel/io_uring_disabled", "2");
  const RingInfo ring = ring_info(roots_);
  EXPECT_EQ(ring.disabled, 2);
  ASSERT_EQ(ring.ladder.size(), 3u);
  EXPECT_EQ(ring.ladder[0].kind, IoEngineKind::kIoUring);
  EXPECT_EQ(ring.ladder[0].refused.empty(), !ring.granted.empty());
  EXPECT_EQ(ring.ladder[2].refused, "");  // threads are always to be had
}

TEST_F(DoctorInfo, LockedMemoryDoesNotCountWithTheCapability) {
  write("proc/self/status", "CapEff:\t0000000000004000");  // CAP_IPC_LOCK alone
  EXPECT_FALSE(ring_info(roots_).lockable_bytes.has_value());
}

TEST_F(DoctorInfo, CardsOfTheBusAndTheirDriver) {
  const fs::path bus = "sys/bus/pci/devices";
  write(bus / "0000:01:00.0/vendor", "0x10de");
  write(bus / "0000:01:00.0/class", "0x030000");
  write(bus / "0000:01:00.0/current_link_speed", "16.0 GT/s PCIe");
  write(bus / "0000:01:00.0/current_link_width", "8");
  write(bus / "0000:01:00.0/max_link_speed", "16.0 GT/s PCIe");
  write(bus / "0000:01:00.0/max_link_width", "16");
  write(bus / "0000:01:00.0/numa_node", "1");
  link(bus / "0000:01:00.0/driver", "sys/bus/pci/drivers/nouveau");
  write(bus / "0000:01:00.1/vendor", "0x10de");  // its sound
  write(bus / "0000:01:00.1/class", "0x040300");
  write(bus / "0000:02:00.0/vendor", "0x8086");
  write(bus / "0000:02:00.0/class", "0x030000");
  write("dev/nvidia0", "");
  write("dev/nvidiactl", "");
  write("dev/nvidia-modeset", "");
  write("proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 2024");
  write("usr/local/cuda/version.json", R"({"cuda" : {"name" : "CUDA SDK", "version" : "12.4.1"}})");
  const GpuInfo gpu = gpu_info(roots_);
  ASSERT_EQ(gpu.cards.size(), 1u);
  EXPECT_EQ(gpu.cards[0].address, "0000:01:00.0");
  EXPECT_EQ(gpu.cards[0].link_now, "16.0 GT/s × 8");
  EXPECT_EQ(gpu.cards[0].link_most, "16.0 GT/s × 16");
  EXPECT_EQ(gpu.cards[0].module, "nouveau");
  EXPECT_EQ(gpu.cards[0].node, 1);
  EXPECT_EQ(gpu.device_files, (std::vector<std::string>{root_ / "dev/nvidia0", root_ / "dev/nvidiactl"}));
  EXPECT_TRUE(gpu.forbidden.empty());
  EXPECT_EQ(gpu.module_version, "550.54.15");
  EXPECT_EQ(gpu.toolkit_cuda, 12040);
  write("proc/driver/nvidia/version",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  (dvs-builder@U22)");
  EXPECT_EQ(gpu_info(roots_).module_version, "580.159.04");
}

}  // namespace
}  // namespace spillway::doctor
