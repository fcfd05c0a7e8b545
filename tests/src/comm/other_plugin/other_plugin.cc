// Stands where libspillway_mpi.so should: of another version than the library's. Which kind of other it is, is told in
// SPILLWAY_OTHER_PLUGIN. Nothing of it but the version may be asked for.
#include <cstdlib>
#include <cstring>

#include "src/comm/mpi_plugin.h"

extern "C" [[gnu::visibility("default")]] const spillway::MpiPlugin* spillway_mpi_plugin() {
  static spillway::MpiPlugin plugin{.interface = spillway::kMpiInterface, .version = "0.0.9", .open = {}};
  const char* told = std::getenv("SPILLWAY_OTHER_PLUGIN");
  if (told != nullptr && std::strcmp(told, "interface") == 0) plugin.interface = spillway::kMpiInterface - 1;
  return &plugin;
}
