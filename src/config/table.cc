#include "src/config/table.h"

#include <vector>

namespace spillway {

std::span<const ConfigKey> config_keys() {
  static const std::vector<ConfigKey> keys = [] {
    std::vector<ConfigKey> all;
    for (const auto section : {batch_keys(), optimizer_keys(), scheduler_keys(), precision_keys(),
                               zero_optimization_keys(), aio_keys(), spillway_keys()}) {
      all.insert(all.end(), section.begin(), section.end());
    }
    return all;
  }();
  return keys;
}

}  // namespace spillway
