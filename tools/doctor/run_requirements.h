// What a run would take, as far as a configuration and a model say.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "spillway/io_queue.h"

namespace spillway::doctor {

struct RequirementOptions {
  std::filesystem::path config = {}, aio = {}, model = {};  // empty: not given; a model goes with a configuration
  std::uint32_t sequence = 256;                             // tokens of a row, as in finetune
  std::uint32_t ranks = 1;                                  // that train together, on this machine
};

struct RunRequirements {
  std::uint32_t ranks = 1;                         // each takes what follows
  std::optional<std::uint64_t> host_bytes = {};    // of the pinned arena
  std::optional<std::uint64_t> memory_bytes = {};  // RAM of the arenas; HBM is RAM where the CPU computes
  std::optional<std::uint64_t> store_bytes = {};   // of NVMe space

  std::optional<std::uint64_t> of_all_ranks(const std::optional<std::uint64_t>& bytes) const {
    return bytes ? std::optional(*bytes * ranks) : std::nullopt;
  }

  std::string refused = {};  // why there is no plan: it does not fit its budgets, or its device; empty: there is
  std::string remedy = {};   // the smallest change that fits, then
  std::string no_plan = {};  // why none was made of the model that is named; empty: it was
  std::vector<std::filesystem::path> paths = {};  // of the configuration
  std::vector<double> rates = {};                 // of these, which a store is striped by; empty: not said
  IoEngineKind engine = IoEngineKind::kAuto;
  std::uint64_t block_bytes = 1 << 20;
  std::uint32_t depth = 32;
};

// Reads the configuration, and with a model makes the plan of a run on this machine. Throws spillway::Error when one of
// the files is wrong.
RunRequirements requirements_of(const RequirementOptions& options);

}  // namespace spillway::doctor
