#include "kernels/plugin_file.h"

#include <dlfcn.h>

#include <filesystem>

namespace spillway {
namespace {

std::filesystem::path path_beside(const PluginFile& file) {
  Dl_info info{};
  if (::dladdr(file.part, &info) == 0 || info.dli_fname == nullptr) return {};
  std::error_code failure;
  const auto self = std::filesystem::canonical(info.dli_fname, failure);
  return failure ? std::filesystem::path() : self.parent_path() / file.name;
}

}  // namespace

OpenedPlugin<void> load_plugin(const PluginFile& file) {
  std::error_code ignored;
  const std::filesystem::path near = path_beside(file);
  const bool is_near = !near.empty() && std::filesystem::exists(near, ignored);
  // A plugin that lies beside the program is the program's: if it cannot be opened, that is what to say.
  void* library = ::dlopen(is_near ? near.c_str() : file.name, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* why = ::dlerror();
    return {nullptr, why != nullptr ? why : "it cannot be opened", is_near ? file.matching_one : file.get_one, false};
  }
  void* entry = ::dlsym(library, file.entry);
  if (entry == nullptr) return {nullptr, std::string(file.name) + " is not Spillway's", file.matching_one, true};
  return {entry, {}, {}, true};
}

}  // namespace spillway
