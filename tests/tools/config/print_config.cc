// Prints as JSON what the configuration loader makes of a ds_config.json and a file that goes over it.
#include <fmt/format.h>

#include <cstdio>

#include "spillway/config.h"

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  try {
    const spillway::Config config = spillway::load_config(argv[1], argv[2]);
    fmt::print("{{\"block_size\": {}, \"queue_depth\": {}, \"io_engine\": \"{}\", \"nvme_paths\": [",
               config.io_block_bytes, config.io_depth, name_of(config.io_engine));
    for (const auto& path : config.nvme_paths) {
      fmt::print("{}\"{}\"", path == config.nvme_paths.front() ? "" : ", ", path.string());
    }
    fmt::print("]}}\n");
    return 0;
  } catch (const std::exception& error) {
    fmt::print(stderr, "{}\n", error.what());
    return 1;
  }
}
