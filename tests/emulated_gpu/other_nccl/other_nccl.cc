// Stands where libspillway_nccl.so should: of another version than the library's, or of another interface. Which one is
// told in SPILLWAY_OTHER_PLUGIN. Nothing of it but these may be asked for.
#include <cstdlib>
#include <cstring>

#include "src/comm/nccl_plugin.h"

extern "C" [[gnu::visibility("default")]] const spillway::NcclPlugin* spillway_nccl_plugin() {
  static spillway::NcclPlugin plugin{.interface = spillway::kNcclInterface,
                                     .version = "0.0.9",
                                     .make_id = {},
                                     .prepare = {},
                                     .connect = {},
                                     .set_log = {}};
  const char* told = std::getenv("SPILLWAY_OTHER_PLUGIN");
  if (told != nullptr && std::strcmp(told, "interface") == 0) plugin.interface = spillway::kNcclInterface + 1;
  return &plugin;
}
