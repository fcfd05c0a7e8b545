// Opens libspillway_mpi.so.
#include "src/comm/mpi_plugin.h"

#include <string>

#include "kernels/plugin_file.h"
#include "spillway/error.h"
#include "spillway/version.h"

namespace spillway {
namespace {

constexpr const char* kBuildOne = "a build of Spillway with libopenmpi-dev installed brings it (-Dmpi=enabled)";
constexpr const char* kMatchingMpi =
    "install the library and its plugin of Spillway " SPILLWAY_VERSION " from one build";

const MpiPlugin& opened_mpi_plugin() {
  const auto opened = open_plugin<MpiPlugin>({.name = kMpiPlugin,
                                              .entry = kMpiPluginEntry,
                                              .interface = kMpiInterface,
                                              .part = reinterpret_cast<const void*>(&open_mpi_transport),
                                              .get_one = kBuildOne,
                                              .matching_one = kMatchingMpi});
  if (opened.table != nullptr) return *opened.table;
  const bool no_library = !opened.loaded && opened.why.find("libmpi") != std::string::npos;
  throw Error(Code::kUnsupported,
              {"communicator mpi", (opened.loaded ? "" : "its plugin was not opened: ") + opened.why, 0,
               no_library ? "install Open MPI (Debian: openmpi-bin)" : opened.remedy});
}

}  // namespace

std::unique_ptr<Transport> open_mpi_transport(const MpiOptions& options) {
  static const MpiPlugin& plugin = opened_mpi_plugin();  // an error is thrown again by the next call, which tries again
  return plugin.open(options);
}

}  // namespace spillway
