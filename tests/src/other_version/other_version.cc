// A libspillway.so of the version that SPILLWAY_OTHER_VERSION names.
#include <cstdlib>

extern "C" [[gnu::visibility("default")]] const char* spillway_version() {
  return std::getenv("SPILLWAY_OTHER_VERSION");
}
