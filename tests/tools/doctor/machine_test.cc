// What the doctor makes of facts about the machine and its GPUs; no machine is asked.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "spillway/units.h"
#include "tools/doctor/checks.h"

namespace spillway::doctor {
namespace {

using testing::HasSubstr;

// The finding of this check; a failure without one.
Finding of(const Findings& findings, const std::string& check) {
  for (const Finding& finding : findings) {
    if (finding.check == check) return finding;
  }
  ADD_FAILURE() << "no finding of " << check;
  return {};
}

bool has(const Findings& findings, const std::string& check) {
  return std::ranges::count(findings, check, &Finding::check) > 0;
}

RingInfo whole_ring() {
  RingInfo ring;
  ring.ladder = {{IoEngineKind::kIoUring, ""}, {IoEngineKind::kLibaio, ""}, {IoEngineKind::kThreads, ""}};
  ring.granted = "io_uring (single issuer, deferred task run, registered buffers, unregistered files)";
  ring.disabled = 0;
  return ring;
}

RingInfo refused_ring(const std::string& why, int disabled = 0) {
  RingInfo ring = whole_ring();
  ring.ladder[0].refused = why;
  ring.granted = "";
  ring.disabled = disabled;
  return ring;
}

TEST(DoctorMachine, ARingThatIsGrantedIsFine) {
  const Findings findings = check_ring(whole_ring(), {.release = "6.1.0"}, {});
  EXPECT_EQ(of(findings, "io_uring").status, Status::kOk);
  EXPECT_EQ(of(findings, "memlock").status, Status::kOk);
}

TEST(DoctorMachine, ARefusedRingIsNamedWithItsPriceAndItsCommand) {
  struct Case {
    const char* why;
    int disabled;
    KernelInfo kernel;
    const char* repair;
  };
  const Case cases[] = {
      {"EPERM (kernel.io_uring_disabled is 2)", 2, {.release = "6.6.0"}, "sysctl -w kernel.io_uring_disabled=0"},
      {"EPERM (x)",
       0,
       {.release = "6.1.0", .container = "docker", .seccomp = true},
       "docker run --security-opt seccomp"},
      {"EPERM (x)", 0, {.release = "6.1.0", .container = "podman", .seccomp = true}, "podman run --security-opt"},
      {"EPERM (x)", 0, {.release = "6.1.0", .container = "kubernetes"}, "pod's specification"},
      {"EPERM (x)", 0, {.release = "6.1.0", .seccomp = true}, "SystemCallFilter"},
      {"EACCES (x)", 0, {.release = "6.1.0"}, "dmesg"},
      {"ENOMEM (x)", 1, {.release = "6.6.0"}, "memlock unlimited"},  // root may, in spite of the sysctl
      {"ENOMEM (x)", -1, {.release = "5.10.0"}, "memlock unlimited"},
      {"EMFILE (x)", -1, {.release = "6.1.0"}, "ulimit -n"},
      {"the kernel is older than 5.11", -1, {.release = "5.4.0-150-generic"}, "install a kernel"},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.why + std::string(c.repair));
    const Findings findings = check_ring(refused_ring(c.why, c.disabled), c.kernel, {});
    const Finding finding = of(findings, "io_uring");
    EXPECT_EQ(finding.status, Status::kSlower);
    EXPECT_THAT(finding.seen, HasSubstr(c.why));
    EXPECT_EQ(finding.slower_by, "using libaio, about 50 % more CPU");
    EXPECT_THAT(finding.repair, HasSubstr(c.repair));
    EXPECT_FALSE(has(findings, "memlock"));  // only a ring registers buffers
  }
}

TEST(DoctorMachine, TheLadderGoesOnBelowLibaio) {
  RingInfo ring = refused_ring("ENOSYS (x)");
  ring.ladder[1].refused = "EAGAIN (fs.aio-max-nr)";
  const Finding finding = of(check_ring(ring, {.release = "6.1.0"}, {}), "io_uring");
  EXPECT_EQ(finding.slower_by, "using threads, about 450 % more CPU");
  EXPECT_THAT(finding.seen, HasSubstr("libaio: EAGAIN"));
}

TEST(DoctorMachine, AnEngineAskedForByNameIsHadOrBroken) {
  RunRequirements required;
  required.engine = IoEngineKind::kIoUring;
  EXPECT_EQ(of(check_ring(refused_ring("EPERM"), {.release = "6.1.0"}, required), "io_uring").status, Status::kBroken);
}

TEST(DoctorMachine, MemlockMustHoldAllOfHostMemory) {
  RingInfo ring = whole_ring();
  const KernelInfo kernel{.release = "6.1.0"};
  ring.lockable_bytes = 8 * kMiB;
  EXPECT_EQ(of(check_ring(ring, kernel, {}), "memlock").status, Status::kSlower);  // no run fits that
  RunRequirements required;
  required.host_bytes = 8 * kMiB;
  EXPECT_EQ(of(check_ring(ring, kernel, required), "memlock").status, Status::kOk);
  required.host_bytes = 8 * kMiB + 1;
  const Finding finding = of(check_ring(ring, kernel, required), "memlock");
  EXPECT_EQ(finding.status, Status::kSlower);
  EXPECT_THAT(finding.slower_by, HasSubstr("about 75 % more CPU"));
}

TEST(DoctorMachine, AnOldKernelIsSlower) {
  RingInfo old = whole_ring();
  old.granted = "io_uring (single issuer, cooperative task run, registered buffers, unregistered files)";
  EXPECT_EQ(of(check_kernel({.release = "6.0.9"}, old), "kernel").status, Status::kSlower);
  EXPECT_EQ(of(check_kernel({.release = "6.1.0-18-amd64"}, whole_ring()), "kernel").status, Status::kOk);
  EXPECT_THAT(of(check_kernel({.release = "5.10.0"}, refused_ring("x")), "kernel").slower_by, HasSubstr("50 % more"));
  // A new kernel whose ring is refused has nothing missing.
  EXPECT_EQ(of(check_kernel({.release = "6.8.0"}, refused_ring("x")), "kernel").status, Status::kOk);
}

TEST(DoctorMachine, WslAndContainersAreNamed) {
  const Findings findings = check_kernel({.release = "5.15.1-microsoft-standard-WSL2", .wsl = true}, whole_ring());
  EXPECT_EQ(of(findings, "wsl").status, Status::kSlower);
  EXPECT_THAT(of(findings, "wsl").repair, HasSubstr(".wslconfig"));
  EXPECT_THAT(of(check_kernel({.release = "6.1.0", .container = "docker"}, whole_ring()), "container").seen,
              HasSubstr("docker"));
}

MemoryInfo roomy() {
  MemoryInfo memory;
  memory.total_bytes = 64 * kGiB;
  memory.available_bytes = 60 * kGiB;
  memory.overcommit = 0;
  memory.arena_tried = true;
  memory.huge_share = 1.0;
  return memory;
}

TEST(DoctorMachine, MemoryIsJudgedByWhatARunTakes) {
  RunRequirements required;
  EXPECT_EQ(worst_of(check_memory(roomy(), required)), Status::kOk);
  required.memory_bytes = 60 * kGiB - 200 * kMiB;
  EXPECT_EQ(of(check_memory(roomy(), required), "memory").status, Status::kOk);
  *required.memory_bytes += 1;
  EXPECT_EQ(of(check_memory(roomy(), required), "memory").status, Status::kSlower);
  required.memory_bytes = 60 * kGiB - 16 * kMiB;
  const Finding full = of(check_memory(roomy(), required), "memory");
  EXPECT_EQ(full.status, Status::kSlower) << "the engine starts such a run";
  EXPECT_THAT(full.repair, HasSubstr("end other programs"));
  *required.memory_bytes += 1;
  EXPECT_EQ(of(check_memory(roomy(), required), "memory").status, Status::kBroken);
  MemoryInfo limited = roomy();
  limited.cgroup_bytes = 64 * kGiB;
  limited.cgroup_left = 16 * kGiB;
  EXPECT_THAT(of(check_memory(limited, required), "memory").repair, HasSubstr("cgroup's limit"));
}

TEST(DoctorMachine, ARefusedPlanIsTheFirstWord) {
  RunRequirements required;
  required.refused = "spillway.hbm_bytes: the plan needs more";
  required.remedy = "set hbm_bytes to 3 GiB";
  const Findings findings = check_memory(roomy(), required);
  EXPECT_EQ(findings.front().check, "plan");
  EXPECT_EQ(findings.front().status, Status::kBroken);
  EXPECT_EQ(findings.front().repair, required.remedy);
}

TEST(DoctorMachine, WhatMakesMemoryScarceOrSlowIsFound) {
  const RunRequirements required{.memory_bytes = 10 * kGiB};
  MemoryInfo memory = roomy();
  memory.swap_bytes = 8 * kGiB;
  memory.swap_used_bytes = 3 * kGiB;
  EXPECT_EQ(of(check_memory(memory, required), "swap").status, Status::kOk);  // less than a twentieth of RAM
  memory.swap_used_bytes = 4 * kGiB;
  EXPECT_EQ(of(check_memory(memory, required), "swap").status, Status::kSlower);

  memory = roomy();
  memory.overcommit = 2;
  memory.commit_left_bytes = 11 * kGiB;
  EXPECT_EQ(of(check_memory(memory, required), "overcommit").status, Status::kOk);
  memory.commit_left_bytes = 10 * kGiB;
  EXPECT_EQ(of(check_memory(memory, required), "overcommit").repair, "sudo sysctl -w vm.overcommit_memory=0");
  memory.commit_left_bytes = 0;  // and nobody said what a run takes
  EXPECT_EQ(of(check_memory(memory, {}), "overcommit").status, Status::kOk);

  memory = roomy();
  memory.address_space = 10 * kGiB;
  EXPECT_EQ(of(check_memory(memory, required), "address space").status, Status::kBroken);
  memory.address_space = 11 * kGiB;
  EXPECT_EQ(of(check_memory(memory, required), "address space").status, Status::kOk);

  memory = roomy();
  memory.small_pages = "transparent_hugepage/enabled is never";
  EXPECT_THAT(of(check_memory(memory, required), "huge pages").slower_by, HasSubstr("7 to 20 %"));
  memory = roomy();
  memory.huge_share = 0.4;
  EXPECT_THAT(of(check_memory(memory, required), "huge pages").repair, HasSubstr("compact_memory"));
  memory = roomy();
  memory.hugetlb_bytes = 4 * kGiB;
  EXPECT_THAT(of(check_memory(memory, required), "hugetlbfs").repair, HasSubstr("vm.nr_hugepages=0"));
}

TEST(DoctorMachine, LimitsOfTheShell) {
  EXPECT_EQ(worst_of(check_limits({}, {})), Status::kOk);
  EXPECT_EQ(of(check_limits({.open_files = 63, .file_bytes = {}}, {}), "open files").status, Status::kBroken);
  EXPECT_EQ(of(check_limits({.open_files = 64, .file_bytes = {}}, {}), "open files").status, Status::kOk);
  const LimitInfo limits{.open_files = {}, .file_bytes = kGiB};
  EXPECT_EQ(of(check_limits(limits, {}), "file size").status, Status::kOk);
  RunRequirements required;
  required.store_bytes = 2 * kGiB;
  EXPECT_EQ(of(check_limits(limits, required), "file size").status, Status::kBroken);
  required.paths = {"/mnt/a", "/mnt/b"};  // half of it on each
  EXPECT_EQ(of(check_limits(limits, required), "file size").status, Status::kOk);
  *required.store_bytes += 1;
  EXPECT_THAT(of(check_limits(limits, required), "file size").seen,
              HasSubstr("the store's file on a path takes 1.0 GiB"));
  required.store_bytes = 2 * kGiB;
  required.rates = {3, 1};
  EXPECT_THAT(of(check_limits(limits, required), "file size").seen, HasSubstr("takes 1.5 GiB"));
}

TEST(DoctorMachine, RanksShareMemory) {
  MemoryInfo memory = roomy();
  RunRequirements required;
  required.memory_bytes = 2 * kGiB;
  memory.available_bytes = 4 * kGiB;
  EXPECT_EQ(of(check_memory(memory, required), "memory").status, Status::kOk);
  required.ranks = 2;
  EXPECT_EQ(of(check_memory(memory, required), "memory").status, Status::kBroken);
  EXPECT_THAT(of(check_memory(memory, required), "memory").seen, HasSubstr("the arenas of 2 ranks take 4 GiB"));
  memory.address_space = 3 * kGiB;  // of each
  EXPECT_EQ(of(check_memory(memory, required), "address space").status, Status::kOk);
}

TEST(DoctorMachine, ProcessorAndClock) {
  CpuInfo cpu{.target = "AVX2", .cpus = 8, .quota = {}, .nodes = {0}, .driver = "", .governor = "", .preference = ""};
  EXPECT_EQ(worst_of(check_cpu(cpu)), Status::kOk);
  cpu.quota = 2.0;
  EXPECT_EQ(of(check_cpu(cpu), "cpu quota").slower_by, "75 % less time to compute");
  cpu.target = "scalar";
  EXPECT_EQ(of(check_cpu(cpu), "cpu").status, Status::kSlower);

  struct Case {
    const char *driver, *governor, *preference;
    Status status;
  };
  const Case cases[] = {
      {"", "", "", Status::kSkipped},
      {"acpi-cpufreq", "schedutil", "", Status::kOk},
      {"acpi-cpufreq", "powersave", "", Status::kSlower},
      {"intel_cpufreq", "powersave", "", Status::kSlower},
      {"intel_pstate", "powersave", "balance_performance", Status::kOk},  // its ordinary way
      {"intel_pstate", "powersave", "power", Status::kSlower},
      {"amd-pstate-epp", "powersave", "power", Status::kSlower},
      {"amd-pstate-epp", "performance", "performance", Status::kOk},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(std::string(c.driver) + " " + c.governor + " " + c.preference);
    cpu.driver = c.driver;
    cpu.governor = c.governor;
    cpu.preference = c.preference;
    EXPECT_EQ(of(check_cpu(cpu), "clock").status, c.status);
  }
  cpu.driver = "acpi-cpufreq";
  cpu.governor = "powersave";
  cpu.lowest_khz = 800'000;
  cpu.highest_khz = 4'700'000;
  EXPECT_EQ(of(check_cpu(cpu), "clock").slower_by, "the clock stays at 0.8 of 4.7 GHz");
}

GpuInfo card() {
  GpuInfo gpu;
  PciGpu pci;
  pci.address = "0000:01:00.0";
  pci.link_now = "2.5 GT/s × 16";
  pci.link_most = "16.0 GT/s × 16";
  pci.module = "nvidia";
  pci.node = 1;
  gpu.cards.push_back(pci);
  gpu.device_files = {"/dev/nvidia0", "/dev/nvidiactl"};
  gpu.module_version = "550.54.15";
  gpu.library = true;
  gpu.driver_cuda = 12040;
  gpu.devices = {{"NVIDIA GeForce RTX 4090", 24 * kGiB}};
  return gpu;
}

TEST(DoctorMachine, AGpuThatWorks) {
  const Findings findings = check_gpu(card(), {});
  EXPECT_EQ(worst_of(findings), Status::kOk);
  EXPECT_EQ(of(findings, "cuda").seen, "NVIDIA GeForce RTX 4090, 24 GiB; driver 550.54.15, for CUDA 12.4");
  EXPECT_THAT(of(findings, "gpu link").seen, HasSubstr("slower while it is idle"));
  EXPECT_EQ(of(findings, "nccl").status, Status::kSkipped);
  EXPECT_EQ(gpu_node(card()), 1);
}

TEST(DoctorMachine, AKindOfGpuThatNoTestRanOnIsSaid) {
  GpuInfo gpu = card();
  gpu.devices.front().capability = 90;  // an H100's
  EXPECT_THAT(of(check_gpu(gpu, {}), "cuda").seen, testing::Not(HasSubstr("capability")));
  gpu.devices.front().capability = 89;
  EXPECT_THAT(of(check_gpu(gpu, {}), "cuda").seen, HasSubstr("have not run on one of compute capability 8.9 yet"));
  EXPECT_EQ(of(check_gpu(gpu, {}), "cuda").status, Status::kOk);
}

TEST(DoctorMachine, AGpuThatTheProgramCannotUseIsBroken) {
  GpuInfo gpu = card();
  gpu.unusable = "the driver serves CUDA 12.4 and this was built with 13.0";
  const Findings findings = check_gpu(gpu, {});
  EXPECT_EQ(of(findings, "cuda").status, Status::kBroken);
  EXPECT_THAT(of(findings, "cuda").seen, HasSubstr("RTX 4090, 24 GiB; driver 550.54.15, for CUDA 12.4; Spillway cannot "
                                                   "use it: the driver serves CUDA 12.4 and this was built with 13.0"));
  EXPECT_THAT(of(findings, "cuda").repair, HasSubstr("a driver as new as that"));
}

TEST(DoctorMachine, AMissingPluginIsNoFaultOfTheDriver) {
  GpuInfo gpu = card();
  gpu.unusable = "the plugin of the cuda device was not opened";
  gpu.plugin_remedy = "the wheel spillway_cuda of `tools/wheel.sh --cuda` brings it";
  EXPECT_EQ(of(check_gpu(gpu, {}), "cuda").repair, gpu.plugin_remedy);
}

TEST(DoctorMachine, WithoutAGpuThereIsNothingToSay) {
  GpuInfo none;
  none.library_refused = "libcuda.so.1: cannot open shared object file";
  EXPECT_EQ(of(check_gpu(none, {}), "cuda").status, Status::kSkipped);
  EXPECT_THAT(of(check_gpu(none, {.wsl = true}), "cuda").seen, HasSubstr("driver in Windows"));
  none.library = true;  // a driver without a card
  none.init = 100;
  EXPECT_EQ(of(check_gpu(none, {}), "cuda").status, Status::kSkipped);
}

TEST(DoctorMachine, ADriverThatFailsIsNamedWithItsCommand) {
  struct Case {
    const char* name;
    void (*take_away)(GpuInfo&, KernelInfo&);
    const char *seen, *repair;
  };
  const Case cases[] = {
      {"no library",
       [](GpuInfo& g, KernelInfo&) {
         g.library = false;
         g.cards[0].module = "nouveau";
       },
       "nouveau", "apt install nvidia-driver"},
      {"container",
       [](GpuInfo& g, KernelInfo& k) {
         g.library = false;
         k.container = "docker";
       },
       "no driver for programs", "docker run --gpus all"},
      {"mismatch",
       [](GpuInfo& g, KernelInfo&) {
         g.init = 803;
         g.init_name = "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH";
       },
       "550.54.15", "reboot"},
      {"forbidden",
       [](GpuInfo& g, KernelInfo&) {
         g.init = 304;
         g.forbidden = {"/dev/nvidia0"};
       },
       "may not open /dev/nvidia0", "usermod"},
      {"hidden",
       [](GpuInfo& g, KernelInfo&) {
         g.init = 100;
         g.visible_set = true;
       },
       "CUDA_VISIBLE_DEVICES is ''", "unset CUDA_VISIBLE_DEVICES"},
      {"no module",
       [](GpuInfo& g, KernelInfo&) {
         g.init = 100;
         g.module_version = "";
       },
       "not loaded", "modprobe nvidia"},
      {"suspend", [](GpuInfo& g, KernelInfo&) { g.init = 999; }, "(999)", "modprobe -r nvidia_uvm"},
      {"no device", [](GpuInfo& g, KernelInfo&) { g.devices.clear(); }, "no device", "CUDA_VISIBLE_DEVICES"},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.name);
    GpuInfo gpu = card();
    KernelInfo kernel;
    c.take_away(gpu, kernel);
    const Finding finding = of(check_gpu(gpu, kernel), "cuda");
    EXPECT_EQ(finding.status, Status::kBroken);
    EXPECT_THAT(finding.seen, HasSubstr(c.seen));
    EXPECT_THAT(finding.repair, HasSubstr(c.repair));
  }
}

TEST(DoctorMachine, LinkAndToolkitOfAGpu) {
  GpuInfo gpu = card();
  gpu.cards[0].link_now = "16.0 GT/s × 4";
  gpu.toolkit_cuda = 12060;  // a minor version ahead runs
  Findings findings = check_gpu(gpu, {});
  EXPECT_EQ(of(findings, "gpu link").slower_by, "at most 7.9 instead of 31.5 GB/s between host and GPU");
  EXPECT_EQ(of(findings, "cuda toolkit").status, Status::kOk);
  gpu.toolkit_cuda = 13000;
  EXPECT_EQ(of(check_gpu(gpu, {}), "cuda toolkit").status, Status::kBroken);
  gpu.nccl = 22105;
  EXPECT_EQ(of(check_gpu(gpu, {}), "nccl").seen, "2.21.5");
}

}  // namespace
}  // namespace spillway::doctor
