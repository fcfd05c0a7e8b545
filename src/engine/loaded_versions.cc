#include "src/engine/loaded_versions.h"

#include <dlfcn.h>
#include <link.h>

#include <filesystem>
#include <string>
#include <vector>

#include "spillway/error.h"
#include "spillway/version.h"

namespace spillway {
namespace {

// Also of those that somebody's packaging gave a name with a hash, and of the plugins, which have no version to ask
// for.
int note_name(dl_phdr_info* info, std::size_t, void* names) {
  const std::filesystem::path path(info->dlpi_name != nullptr ? info->dlpi_name : "");
  if (path.filename().native().starts_with("libspillway")) {
    static_cast<std::vector<std::string>*>(names)->push_back(path.native());
  }
  return 0;
}

// Empty: it says none.
std::string version_of(const std::string& name) {
  void* library = ::dlopen(name.c_str(), RTLD_LAZY | RTLD_NOLOAD);
  if (library == nullptr) return {};
  const auto version = reinterpret_cast<const char* (*)()>(::dlsym(library, "spillway_version"));
  std::string said = version != nullptr ? version() : "";
  ::dlclose(library);
  return said;
}

}  // namespace

void refuse_other_versions() {
  std::vector<std::string> names;  // the linker's lock is held while it tells them
  ::dl_iterate_phdr(note_name, &names);
  for (const std::string& name : names) {
    const std::string version = version_of(name);
    if (version.empty() || version == SPILLWAY_VERSION) continue;
    throw Error(Code::kUnsupported,
                {"libspillway", "is of version " SPILLWAY_VERSION ", and the process has " + name + " of " + version, 0,
                 "let all that this process loads use one; SPILLWAY_LIBRARY names that of the Python package"});
  }
}

}  // namespace spillway
