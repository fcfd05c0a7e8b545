// Opens the plugin: beside the program or library that this is part of, else where the dynamic linker looks.
#include "tools/models/ops/ops_plugin.h"

#include <dlfcn.h>

#include <cstring>
#include <filesystem>
#include <string>

#include "spillway/error.h"

namespace spillway::models {
namespace {

[[noreturn]] void unsupported(std::string object, std::string happened, std::string hint) {
  throw Error(
      Code::kUnsupported,
      {.object = std::move(object), .happened = std::move(happened), .errno_value = 0, .hint = std::move(hint)});
}

std::filesystem::path beside() {
  Dl_info info{};
  if (::dladdr(reinterpret_cast<const void*>(&create_ops), &info) == 0 || info.dli_fname == nullptr) return {};
  std::error_code failure;
  const auto self = std::filesystem::canonical(info.dli_fname, failure);
  return failure ? std::filesystem::path() : self.parent_path() / kOpsPlugin;
}

void* open_library() {
  const std::filesystem::path near = beside();
  std::error_code ignored;
  const bool is_near = !near.empty() && std::filesystem::exists(near, ignored);
  // A plugin that lies beside the program is the program's: if it cannot be opened, that is what to say.
  void* library = ::dlopen(is_near ? near.c_str() : kOpsPlugin, RTLD_NOW | RTLD_LOCAL);
  if (library != nullptr) return library;
  const char* why = ::dlerror();
  const std::string reason = why != nullptr ? why : "the dynamic linker does not say why";
  if (reason.find("libcublasLt") != std::string::npos) {
    unsupported("device cuda", reason,
                "install CUDA 13's cuBLAS (libcublasLt.so.13; `pip install nvidia-cublas` beside spillway-cuda), or "
                "name its directory in LD_LIBRARY_PATH");
  }
  unsupported(
      "device cuda", reason,
      "the wheel spillway_cuda of `tools/wheel.sh --cuda` brings it, and so does a build with nvcc 12.8 or newer; "
      "elsewhere name its directory in LD_LIBRARY_PATH");
}

const OpsPlugin& open_plugin() {
  void* library = open_library();
  using Entry = const OpsPlugin* (*)();
  const auto entry = reinterpret_cast<Entry>(::dlsym(library, kOpsPluginEntry));
  if (entry == nullptr) {
    unsupported(kOpsPlugin, std::string("has no function ") + kOpsPluginEntry, "install Spillway's own file");
  }
  const OpsPlugin* plugin = entry();
  if (std::strcmp(plugin->interface, kOpsInterface) != 0) {
    unsupported(kOpsPlugin, std::string("is of version ") + plugin->interface + ", the program of " + kOpsInterface,
                "install Spillway and spillway-cuda of one version, or both from one build");
  }
  return *plugin;
}

}  // namespace

std::unique_ptr<Ops> create_ops(DeviceKind device, const Shape& shape, unsigned threads, Fusion fusion) {
  if (device == DeviceKind::kHost) {
    if (fusion != Fusion::kAuto) unsupported("--fuse", "the host device has no such choice", "leave it out");
    return create_host_ops(shape, threads);
  }
  static const OpsPlugin& plugin = open_plugin();  // an error is thrown again by the next call, which tries again
  return plugin.create(shape, fusion);
}

}  // namespace spillway::models
