// What `spillway store` says of a store of named tensors.
#pragma once

#include <filesystem>
#include <vector>

namespace spillway::store {

struct PrintTensors {
  bool verify = false, json = false;
};
// The command's exit code.
int print_tensors(const std::vector<std::filesystem::path>& paths, const PrintTensors& options);

}  // namespace spillway::store
