// Opens libspillway_cuda.so: beside the program or library that this is part of, else where the dynamic linker looks.
#include <dlfcn.h>

#include <cstring>
#include <filesystem>
#include <string>

#include "kernels/cuda/plugin.h"
#include "spillway/error.h"
#include "spillway/log.h"
#include "spillway/version.h"

namespace spillway {
namespace {

struct Opened {
  const CudaPlugin* plugin = nullptr;
  std::string why;     // not
  std::string remedy;  // what to do then
};

constexpr const char* kGetOne = "`pip install spillway-cuda` brings it, and so does a build with nvcc 12.8 or newer";
constexpr const char* kMatchingOne = "install Spillway and spillway-cuda " SPILLWAY_VERSION ", or both from one build";

std::filesystem::path beside() {
  Dl_info info{};
  if (::dladdr(reinterpret_cast<const void*>(&create_cuda_device), &info) == 0 || info.dli_fname == nullptr) return {};
  std::error_code failure;
  const auto self = std::filesystem::canonical(info.dli_fname, failure);
  return failure ? std::filesystem::path() : self.parent_path() / kCudaPlugin;
}

// Never closed: CUDA's libraries do not unload cleanly.
Opened open_plugin() {
  std::error_code ignored;
  const std::filesystem::path near = beside();
  const bool is_near = !near.empty() && std::filesystem::exists(near, ignored);
  // One that lies beside the program is the program's: if it cannot be opened, that is what to say.
  void* library = ::dlopen(is_near ? near.c_str() : kCudaPlugin, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* why = ::dlerror();
    return {nullptr, why != nullptr ? why : "it cannot be opened", is_near ? kMatchingOne : kGetOne};
  }
  using Entry = const CudaPlugin* (*)();
  const auto entry = reinterpret_cast<Entry>(::dlsym(library, kCudaPluginEntry));
  if (entry == nullptr) return {nullptr, std::string(kCudaPlugin) + " is not Spillway's", kMatchingOne};
  const CudaPlugin* plugin = entry();
  if (plugin->interface != kCudaInterface) {
    return {nullptr, std::string(kCudaPlugin) + " belongs to another version of Spillway than " SPILLWAY_VERSION,
            kMatchingOne};
  }
  if (std::strcmp(plugin->version, SPILLWAY_VERSION) != 0) {
    return {nullptr,
            std::string(kCudaPlugin) + " is of Spillway " + plugin->version + ", and this is " SPILLWAY_VERSION,
            kMatchingOne};
  }
  plugin->set_log(internal::log_state());
  return {plugin, {}, {}};
}

const Opened& opened() {
  static const Opened once = open_plugin();
  return once;
}

}  // namespace

std::string cuda_unavailable() {
  if (opened().plugin == nullptr) {
    return "the plugin of the cuda device was not opened: " + opened().why;
  }
  return opened().plugin->unavailable();
}

std::string cuda_plugin_remedy() { return opened().remedy; }

std::unique_ptr<Device> create_cuda_device(const CudaDeviceOptions& options) {
  if (const std::string why = cuda_unavailable(); !why.empty()) {
    throw Error(Code::kUnsupported,
                {"device cuda", why, 0, opened().plugin ? "`spillway doctor` looks closer" : opened().remedy});
  }
  return opened().plugin->create(options);
}

}  // namespace spillway
