// Opens libspillway_mpi.so: beside the program or library that this is part of, else where the dynamic linker looks.
#include "src/comm/mpi_plugin.h"

#include <dlfcn.h>

#include <cstring>
#include <filesystem>
#include <string>

#include "spillway/error.h"
#include "spillway/version.h"

namespace spillway {
namespace {

constexpr const char* kBuildOne = "a build of Spillway with libopenmpi-dev installed brings it (-Dmpi=enabled)";
constexpr const char* kMatchingMpi =
    "install the library and its plugin of Spillway " SPILLWAY_VERSION " from one build";

[[noreturn]] void no_mpi(const std::string& why, const char* remedy) {
  throw Error(Code::kUnsupported, {"communicator mpi", why, 0, remedy});
}

std::filesystem::path mpi_plugin_beside() {
  Dl_info info{};
  if (::dladdr(reinterpret_cast<const void*>(&open_mpi_transport), &info) == 0 || info.dli_fname == nullptr) return {};
  std::error_code failure;
  const auto self = std::filesystem::canonical(info.dli_fname, failure);
  return failure ? std::filesystem::path() : self.parent_path() / kMpiPlugin;
}

// Never closed: MPI's libraries do not unload cleanly.
const MpiPlugin& opened_mpi_plugin() {
  std::error_code ignored;
  const std::filesystem::path near = mpi_plugin_beside();
  const bool is_near = !near.empty() && std::filesystem::exists(near, ignored);
  // One that lies beside the program is the program's: if it cannot be opened, that is what to say.
  void* library = ::dlopen(is_near ? near.c_str() : kMpiPlugin, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* why = ::dlerror();
    const std::string reason = why != nullptr ? why : "it cannot be opened";
    const bool no_library = reason.find("libmpi") != std::string::npos;
    no_mpi("its plugin was not opened: " + reason, no_library ? "install Open MPI (Debian: openmpi-bin)"
                                                   : is_near  ? kMatchingMpi
                                                              : kBuildOne);
  }
  using Entry = const MpiPlugin* (*)();
  const auto entry = reinterpret_cast<Entry>(::dlsym(library, kMpiPluginEntry));
  if (entry == nullptr) no_mpi(std::string(kMpiPlugin) + " is not Spillway's", kMatchingMpi);
  const MpiPlugin* plugin = entry();
  if (plugin->interface != kMpiInterface) {
    no_mpi(std::string(kMpiPlugin) + " belongs to another version of Spillway than " SPILLWAY_VERSION, kMatchingMpi);
  }
  if (std::strcmp(plugin->version, SPILLWAY_VERSION) != 0) {
    no_mpi(std::string(kMpiPlugin) + " is of Spillway " + plugin->version + ", and this is " SPILLWAY_VERSION,
           kMatchingMpi);
  }
  return *plugin;
}

}  // namespace

std::unique_ptr<Transport> open_mpi_transport(const MpiOptions& options) {
  static const MpiPlugin& plugin = opened_mpi_plugin();  // an error is thrown again by the next call, which tries again
  return plugin.open(options);
}

}  // namespace spillway
