#include "tools/doctor/gpu.h"

#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <sstream>

#include "kernels/cuda/loader.h"
#include "tools/drive/drive.h"
#include "tools/drive/text_file.h"

namespace spillway::doctor {
namespace {

namespace fs = std::filesystem;
using drive::read_line;

class Library {
 public:
  explicit Library(const char* name) : handle_(::dlopen(name, RTLD_NOW | RTLD_LOCAL)) {
    if (const char* why = handle_ ? nullptr : ::dlerror()) refused_ = why;
  }
  // Never closed: the driver's library starts threads and leaves them behind.
  bool loaded() const { return handle_ != nullptr; }
  const std::string& refused() const { return refused_; }

  // Null when the library has no such function.
  template <class Function>
  Function* find(const char* name) const {
    return reinterpret_cast<Function*>(::dlsym(handle_, name));
  }

 private:
  void* handle_;
  std::string refused_;
};

// The driver API's types and numbers, as cuda.h has them: a CUresult and a CUdevice are an int.
constexpr int kCapabilityMajor = 75, kCapabilityMinor = 76;

void ask_driver(GpuInfo& facts) {
  const Library driver("libcuda.so.1");
  facts.library = driver.loaded();
  facts.library_refused = driver.refused();
  if (!driver.loaded()) return;
  const auto init = driver.find<int(unsigned)>("cuInit");
  const auto version = driver.find<int(int*)>("cuDriverGetVersion");
  const auto count = driver.find<int(int*)>("cuDeviceGetCount");
  const auto name = driver.find<int(char*, int, int)>("cuDeviceGetName");
  const auto memory = driver.find<int(std::size_t*, int)>("cuDeviceTotalMem_v2");
  const auto attribute = driver.find<int(int*, int, int)>("cuDeviceGetAttribute");
  const auto error_name = driver.find<int(int, const char**)>("cuGetErrorName");
  if (!init || !version || !count || !name || !memory || !error_name) {
    facts.library = false;
    facts.library_refused = "libcuda.so.1 lacks functions of CUDA's driver API";
    return;
  }
  version(&facts.driver_cuda);
  facts.init = init(0);
  if (const char* text = nullptr; facts.init != 0) {
    facts.init_name = error_name(facts.init, &text) == 0 && text ? text : "an unknown error";
    return;
  }
  int devices = 0;
  count(&devices);
  for (int device = 0; device < devices; ++device) {
    std::array<char, 256> text{};
    std::size_t bytes = 0;
    if (name(text.data(), text.size() - 1, device) != 0 || memory(&bytes, device) != 0) continue;
    int major = 0, minor = 0;
    const bool known = attribute && attribute(&major, kCapabilityMajor, device) == 0 &&
                       attribute(&minor, kCapabilityMinor, device) == 0;
    facts.devices.push_back({text.data(), bytes, known ? 10 * major + minor : 0});
  }
}

void ask_nccl(GpuInfo& facts) {
  const Library nccl("libnccl.so.2");
  if (!nccl.loaded()) return;
  if (const auto version = nccl.find<int(int*)>("ncclGetVersion")) version(&facts.nccl);
}

// 12040 of `"version" : "12.4.1"` below "cuda" in version.json, or of `CUDA Version 10.2.89` in version.txt.
int toolkit_version(const fs::path& toolkit) {
  for (const auto& [file, before] :
       {std::pair("version.json", "\"CUDA SDK\""), std::pair("version.txt", "CUDA Version")}) {
    const std::string text = drive::contents_of(toolkit / file);
    const std::size_t named = text.find(before);
    if (named == std::string::npos) continue;
    const std::string key = "\"version\"";
    std::size_t at = text.find(key, named);
    at = at == std::string::npos ? named : at + key.size();
    at = text.find_first_of("0123456789", at);
    int major = 0, minor = 0;
    if (at != std::string::npos && std::sscanf(text.c_str() + at, "%d.%d", &major, &minor) == 2) {
      return major * 1000 + minor * 10;
    }
  }
  return 0;
}

// `NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue …`, or of the open module `NVIDIA UNIX Open Kernel
// Module for x86_64  580.159.04  Release Build …`: the first word of digits and dots.
std::string module_version(const fs::path& file) {
  std::istringstream line(read_line(file));
  for (std::string word; line >> word;) {
    if (word.find('.') != std::string::npos && word.find_first_not_of("0123456789.") == std::string::npos) return word;
  }
  return "";
}

void read_bus(const Roots& roots, GpuInfo& facts) {
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(roots.sys / "bus/pci/devices", error)) {
    // Display controllers are of class 03; 0x10de is NVIDIA.
    if (read_line(entry.path() / "vendor") != "0x10de" || !read_line(entry.path() / "class").starts_with("0x03"))
      continue;
    PciGpu card;
    card.address = entry.path().filename().string();
    card.link_now = drive::link_of(entry.path(), "current");
    card.link_most = drive::link_of(entry.path(), "max");
    std::error_code none;
    card.module = fs::canonical(entry.path() / "driver", none).filename().string();
    if (const int node = drive::number_of(read_line(entry.path() / "numa_node"), -1); node >= 0) card.node = node;
    facts.cards.push_back(std::move(card));
  }
  std::ranges::sort(facts.cards, {}, &PciGpu::address);
}

void read_files(const Roots& roots, GpuInfo& facts) {
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(roots.root / "dev", error)) {
    const std::string name = entry.path().filename().string();
    const bool of_nvidia =
        name == "nvidiactl" || name == "nvidia-uvm" ||
        (name.starts_with("nvidia") && name.find_first_not_of("0123456789", 6) == std::string::npos && name.size() > 6);
    if (!of_nvidia) continue;
    facts.device_files.push_back(entry.path().string());
    if (::access(entry.path().c_str(), R_OK | W_OK) != 0) facts.forbidden.push_back(entry.path().string());
  }
  std::ranges::sort(facts.device_files);
  std::ranges::sort(facts.forbidden);
}

}  // namespace

GpuInfo gpu_info(const Roots& roots) {
  GpuInfo facts;
  read_bus(roots, facts);
  read_files(roots, facts);
  facts.module_version = module_version(roots.proc / "driver/nvidia/version");
  if (const char* visible = std::getenv("CUDA_VISIBLE_DEVICES")) {
    facts.visible = visible;
    facts.visible_set = true;
  }
  facts.toolkit_cuda = toolkit_version(roots.root / "usr/local/cuda");
  ask_driver(facts);
  facts.unusable = cuda_unavailable();
  facts.plugin_remedy = cuda_plugin_remedy();
  ask_nccl(facts);
  return facts;
}

}  // namespace spillway::doctor
