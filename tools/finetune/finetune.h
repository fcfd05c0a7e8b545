// `spillway finetune`: configuration, model and data in; steps, a log and a trained model out.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>

#include "tools/finetune/evaluation.h"
#include "tools/finetune/snapshots.h"
#include "tools/models/ops/ops.h"

namespace spillway::models::finetune {

struct FinetuneOptions {
  std::filesystem::path config, model, data;
  std::filesystem::path aio;  // what `spillway sweep --json` wrote, put over the configuration; empty: nothing
  std::filesystem::path out, log, trace;  // empty: none
  std::uint64_t steps = 0;                // number of the last step
  std::uint32_t sequence = 256;
  std::optional<std::uint64_t> shuffle;  // seed of the order of rows; none: as they lie
  Fusion fusion = Fusion::kAuto;         // of the `cuda` device
  bool resume = false, fresh = false;
  SnapshotOptions snapshots;
  EvaluationOptions evaluation;
  std::filesystem::path adapter;  // of peft's, to begin with; empty: new ones
  std::filesystem::path load;     // a snapshot to begin with, or a directory of them; empty: none
};

// 0, or what the signal that ended it makes of it (terminal/interrupt.h). Errors: spillway::Error.
int finetune(const FinetuneOptions& options);

}  // namespace spillway::models::finetune
