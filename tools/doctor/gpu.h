// NVIDIA GPUs, their driver and NCCL, as a program that was linked to neither finds them.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tools/doctor/machine.h"

namespace spillway::doctor {

struct PciGpu {
  std::string address = {};                   // 0000:01:00.0
  std::string link_now = {}, link_most = {};  // `16.0 GT/s × 16`; empty: not shown
  std::string module = {};                    // the kernel's driver of it: nvidia, nouveau, vfio-pci; empty: none
  std::optional<int> node = {};               // NUMA
};
struct CudaDevice {
  std::string name = {};
  std::uint64_t bytes = 0;
  int capability = 0;  // 90 of compute capability 9.0; 0: not known
};
struct GpuInfo {
  std::vector<PciGpu> cards = {};              // of NVIDIA
  std::vector<std::string> device_files = {};  // /dev/nvidia0, /dev/nvidiactl, …; none in WSL
  std::vector<std::string> forbidden = {};     // of them, what this user may not open
  std::string module_version = {};             // of the loaded kernel module, 550.54.15
  std::string visible = {};                    // CUDA_VISIBLE_DEVICES, when it is set
  bool visible_set = false;

  bool library = false;              // libcuda.so.1 was found
  std::string library_refused = {};  // why not, as the dynamic linker says it
  int init = 0;                      // what cuInit returned
  std::string init_name = {};        // CUDA_ERROR_NO_DEVICE
  int driver_cuda = 0;               // the newest CUDA that the driver serves: 12040 for 12.4
  std::vector<CudaDevice> devices = {};
  std::string unusable = {};       // why this program cannot compute on one; empty: it can
  std::string plugin_remedy = {};  // what to do where that is for want of its plugin
  int toolkit_cuda = 0;            // of the toolkit in /usr/local/cuda; 0: none
  int nccl = 0;                    // 22105 for 2.21.5; 0: libnccl.so.2 was not found
};
GpuInfo gpu_info(const Roots& roots = {});

}  // namespace spillway::doctor
