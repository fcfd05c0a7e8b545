// What libspillway_mpi.so exports: one function, spillway_mpi_plugin, that returns this table. It is opened when a
// communicator over MPI is asked for, so that library and wheel need no MPI.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "src/comm/transport.h"

namespace spillway {

// Changes whenever Transport, this table or a type that crosses it does.
inline constexpr std::uint32_t kMpiInterface = 3;
inline constexpr const char* kMpiPlugin = "libspillway_mpi.so";
inline constexpr const char* kMpiPluginEntry = "spillway_mpi_plugin";

struct MpiOptions {
  std::optional<std::int32_t> comm = {};  // of the program's
  double patience_seconds = 60;
};

struct MpiPlugin {
  std::uint32_t interface = 0;    // read before anything else
  const char* version = nullptr;  // of Spillway, which is the library's; read before what follows
  // Initializes MPI where nobody has. Throws kUnsupported and kIo.
  std::unique_ptr<Transport> (*open)(const MpiOptions& options);
};

// The plugin's. Throws kUnsupported where it is missing, or not the library's.
std::unique_ptr<Transport> open_mpi_transport(const MpiOptions& options);

}  // namespace spillway
