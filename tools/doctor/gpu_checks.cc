#include "tools/doctor/checks.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <string>
#include <utility>

#include "tools/terminal/amount.h"

namespace spillway::doctor {
namespace {

// CUresult (cuda.h).
constexpr int kNoDevice = 100, kSystemDriverMismatch = 803, kUnknown = 999;

Finding finding(const char* check, Status status, std::string seen, std::string by = "", std::string repair = "") {
  return {"", check, status, std::move(seen), std::move(by), std::move(repair)};
}

std::string cuda_version(int number) { return fmt::format("{}.{}", number / 1000, number % 1000 / 10); }

bool anything_there(const GpuInfo& gpu) { return !gpu.cards.empty() || !gpu.device_files.empty(); }

std::string what_is_there(const GpuInfo& gpu) {
  if (!gpu.cards.empty()) return fmt::format("an NVIDIA GPU at {}", gpu.cards.front().address);
  return gpu.device_files.front();
}

Finding no_library(const GpuInfo& gpu, const KernelInfo& kernel) {
  std::string seen = fmt::format("{}, and no driver for programs: {}", what_is_there(gpu), gpu.library_refused);
  std::string repair = "sudo apt install nvidia-driver   # Debian's name; or your distribution's";
  if (!kernel.container.empty()) {
    repair =
        fmt::format("{} …   # with nvidia-container-toolkit on the host",
                    kernel.container == "podman" ? "podman run --device nvidia.com/gpu=all" : "docker run --gpus all");
  } else if (!gpu.cards.empty() && gpu.cards.front().module != "nvidia" && !gpu.cards.front().module.empty()) {
    seen += fmt::format("; the kernel's driver of it is {}", gpu.cards.front().module);
  }
  return finding("cuda", Status::kBroken, std::move(seen), "", std::move(repair));
}

Finding init_failed(const GpuInfo& gpu) {
  const std::string seen = fmt::format("cuInit: {} ({})", gpu.init_name, gpu.init);
  const auto broken = [&](std::string more, std::string repair) {
    return finding("cuda", Status::kBroken, seen + more, "", std::move(repair));
  };
  if (!gpu.forbidden.empty()) {
    return broken(fmt::format("; this user may not open {}", fmt::join(gpu.forbidden, ", ")),
                  "sudo usermod -aG video,render $USER   # then log in again; ls -l shows the group it takes");
  }
  switch (gpu.init) {
    case kSystemDriverMismatch:
      return broken(fmt::format("; the kernel module is {}, the library of another version", gpu.module_version),
                    "sudo reboot   # the driver was updated, and the module of before is still loaded");
    case kNoDevice:
      if (gpu.visible_set) {
        return broken(fmt::format("; CUDA_VISIBLE_DEVICES is '{}'", gpu.visible), "unset CUDA_VISIBLE_DEVICES");
      }
      if (gpu.module_version.empty()) return broken("; the kernel module is not loaded", "sudo modprobe nvidia");
      return broken("", "nvidia-smi; sudo dmesg | grep -i nvrm");
    case kUnknown:
      return broken("",
                    "sudo modprobe -r nvidia_uvm && sudo modprobe nvidia_uvm   # usual after a suspend; in a "
                    "container nvidia-uvm may be missing in /dev");
    default: return broken("", "nvidia-smi; sudo dmesg | grep -i nvrm");
  }
}

// Width counts: an idle GPU lowers its link's speed, and raises it when there is something to move.
Finding check_link(const PciGpu& card) {
  double now_rate = 0, most_rate = 0;
  unsigned now = 0, most = 0;
  const bool known = std::sscanf(card.link_now.c_str(), "%lf GT/s × %u", &now_rate, &now) == 2 &&
                     std::sscanf(card.link_most.c_str(), "%lf GT/s × %u", &most_rate, &most) == 2;
  if (!known) return finding("gpu link", Status::kSkipped, card.address + ": the kernel does not show it");
  const std::string seen = fmt::format("{} at {} of {}", card.address, card.link_now, card.link_most);
  if (now >= most) {
    return finding("gpu link", Status::kOk, seen + (now_rate < most_rate ? "; slower while it is idle" : ""));
  }
  const double could = link_gb_per_s(card.link_most).value_or(0);
  return finding("gpu link", Status::kSlower, seen,
                 fmt::format("at most {:.1f} instead of {:.1f} GB/s between host and GPU", could * now / most, could),
                 "the slot next to the CPU, and no M.2 slot that takes its lanes: see the mainboard's manual");
}

Finding check_toolkit(const GpuInfo& gpu) {
  const std::string seen =
      fmt::format("toolkit {}, driver for CUDA {}", cuda_version(gpu.toolkit_cuda), cuda_version(gpu.driver_cuda));
  // Minor versions of one major run on each other's drivers from 11 on (CUDA Compatibility, NVIDIA).
  if (gpu.toolkit_cuda / 1000 <= gpu.driver_cuda / 1000) return finding("cuda toolkit", Status::kOk, seen);
  return finding("cuda toolkit", Status::kBroken, seen + ": programs built with it do not start", "",
                 fmt::format("a driver for CUDA {} or newer, or an older toolkit", cuda_version(gpu.toolkit_cuda)));
}

// Compute capabilities on which the suites have run (docs/gpu-results.md).
constexpr std::array kSeen{90};

std::string not_seen(const CudaDevice& device) {
  if (device.capability == 0 || std::ranges::find(kSeen, device.capability) != kSeen.end()) return "";
  return fmt::format(
      "; Spillway's own tests have not run on one of compute capability {}.{} yet: bench/gpu.py does that",
      device.capability / 10, device.capability % 10);
}

}  // namespace

Findings check_gpu(const GpuInfo& gpu, const KernelInfo& kernel) {
  Findings findings;
  if (!anything_there(gpu) && (!gpu.library || gpu.init == kNoDevice)) {
    findings.push_back(finding("cuda", Status::kSkipped,
                               std::string("no NVIDIA GPU shows itself; Spillway computes on the CPU") +
                                   (kernel.wsl ? "; a GPU takes NVIDIA's driver in Windows, and none in WSL" : "")));
    return findings;
  }
  if (!gpu.library) {
    findings.push_back(no_library(gpu, kernel));
  } else if (gpu.init != 0) {
    findings.push_back(init_failed(gpu));
  } else if (gpu.devices.empty()) {
    findings.push_back(
        finding("cuda", Status::kBroken, "the driver shows no device", "", "unset CUDA_VISIBLE_DEVICES"));
  } else {
    std::string names;
    for (const CudaDevice& device : gpu.devices) {
      names += fmt::format("{}{}, {}", names.empty() ? "" : "; ", device.name, terminal::text_of_size(device.bytes));
    }
    names += fmt::format("; driver {}, for CUDA {}",
                         gpu.module_version.empty() ? "of an unknown version" : gpu.module_version,
                         cuda_version(gpu.driver_cuda));
    if (!gpu.unusable.empty()) {
      findings.push_back(finding("cuda", Status::kBroken, names + "; Spillway cannot use it: " + gpu.unusable, "",
                                 gpu.plugin_remedy.empty()
                                     ? "a driver as new as that, or Spillway built here, with nvcc 12.8 or newer"
                                     : gpu.plugin_remedy));
    } else {
      findings.push_back(finding("cuda", Status::kOk, names + not_seen(gpu.devices.front())));
    }
  }
  for (const PciGpu& card : gpu.cards) findings.push_back(check_link(card));
  if (gpu.toolkit_cuda > 0 && gpu.driver_cuda > 0) findings.push_back(check_toolkit(gpu));
  findings.push_back(gpu.nccl > 0
                         ? finding("nccl", Status::kOk,
                                   fmt::format("{}.{}.{}", gpu.nccl / 10000, gpu.nccl / 100 % 100, gpu.nccl % 100))
                         : finding("nccl", Status::kSkipped, "no libnccl.so.2; one GPU needs none"));
  return findings;
}

std::optional<int> gpu_node(const GpuInfo& gpu) {
  for (const PciGpu& card : gpu.cards) {
    if (card.node) return card.node;
  }
  return std::nullopt;
}

}  // namespace spillway::doctor
