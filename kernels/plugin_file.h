// Opens a plugin of the library's own, in the folder of the program or library that this is part of, else where the
// dynamic linker looks. Its one function returns a table that begins with
//
//   std::uint32_t interface;   // read before anything else
//   const char* version;       // of Spillway, which must be the library's; read before what follows
//
// Never closed: CUDA's and MPI's libraries do not unload cleanly.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>

#include "spillway/version.h"

namespace spillway {

struct PluginFile {
  const char *name = nullptr, *entry = nullptr;
  std::uint32_t interface = 0;
  const void* part = nullptr;  // of the program or library: one of its functions
  // What to do where there is none, and where it is another build's.
  const char *get_one = nullptr, *matching_one = nullptr;
};

template <typename Table>
struct OpenedPlugin {
  const Table* table = nullptr;  // null: it is none of ours
  std::string why = {}, remedy = {};
  bool loaded = false;  // by the dynamic linker
};

// The address of its function.
OpenedPlugin<void> load_plugin(const PluginFile& file);

template <typename Table>
OpenedPlugin<Table> open_plugin(const PluginFile& file) {
  const OpenedPlugin<void> loaded = load_plugin(file);
  if (loaded.table == nullptr) return {nullptr, loaded.why, loaded.remedy, loaded.loaded};
  const Table* table = reinterpret_cast<const Table* (*)()>(const_cast<void*>(loaded.table))();
  const std::string name = file.name;
  if (table->interface != file.interface) {
    return {nullptr, name + " belongs to another version of Spillway than " SPILLWAY_VERSION, file.matching_one, true};
  }
  if (std::strcmp(table->version, SPILLWAY_VERSION) != 0) {
    return {nullptr, name + " is of Spillway " + table->version + ", and this is " SPILLWAY_VERSION, file.matching_one,
            true};
  }
  return {table, {}, {}, true};
}

}  // namespace spillway
