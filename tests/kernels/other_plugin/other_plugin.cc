// Stands where libspillway_cuda.so or libspillway_models_cuda.so should: of another version than the library's. Which
// kind of other it is, is told in SPILLWAY_OTHER_PLUGIN. Nothing of it but the version may be asked for.
#include <cstdlib>
#include <cstring>

#include "kernels/cuda/plugin.h"
#include "tools/models/ops/ops_plugin.h"

namespace {

bool is_told(const char* kind) {
  const char* told = std::getenv("SPILLWAY_OTHER_PLUGIN");
  return told != nullptr && std::strcmp(told, kind) == 0;
}

}  // namespace

extern "C" [[gnu::visibility("default")]] const spillway::CudaPlugin* spillway_cuda_plugin() {
  static spillway::CudaPlugin plugin{.interface = spillway::kCudaInterface,
                                     .version = "0.0.9",
                                     .unavailable = {},
                                     .current = {},
                                     .create = {},
                                     .set_log = {}};
  if (is_told("interface")) plugin.interface = spillway::kCudaInterface - 1;
  return &plugin;
}

extern "C" [[gnu::visibility("default")]] const spillway::models::OpsPlugin* spillway_models_cuda_ops() {
  static const spillway::models::OpsPlugin plugin{.interface = "0.0.9/2", .create = {}};
  return &plugin;
}
