// The names in a directory: they are on the drive once the directory is synced, which syncing the files does not do.
#pragma once

#include <filesystem>

namespace spillway {

struct DirectorySync {
  bool opened = false;
  int error = 0;  // errno value, of opening or syncing
};

// Makes durable what was made, renamed and removed in the directory.
DirectorySync sync_names(const std::filesystem::path& directory) noexcept;

}  // namespace spillway
