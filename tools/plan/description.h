// What the engine is told of a model and of what its visits compute, for any family that has a shape here.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "spillway/config.h"
#include "spillway/device.h"
#include "spillway/model.h"
#include "tools/models/shape.h"

namespace spillway::planning {

using models::ModelShape;

enum class Work : std::uint8_t { kEmbed, kForward, kHead, kBackward, kEmbedBackward };

// What a visit computes in one step, all micro-batches together.
struct VisitWork {
  Work work = Work::kEmbed;
  double flops = 0;
  double again_flops = 0;  // of a backward visit, once more what forward computed, unless its insides are kept
  double pushed = 0;       // kEmbedBackward: elements of the gradients handed over, which is all that takes time
};

// Whose loop goes around the engine's calls: all micro-batches through a block before the next, or, where the loop is
// around the model, each through all of it (docs/pytorch.md).
enum class Loop : std::uint8_t { kFinetune, kPyTorch };

// Processes with a device each.
struct RankCounts {
  std::uint32_t all = 1, on_a_host = 1;
};

struct RunShape {
  DeviceKind device = DeviceKind::kHost;
  bool device_here = true;       // false: this machine has no such device to ask
  std::uint32_t sequence = 256;  // tokens of a row; T5: of a row of the encoder, and of one of the decoder
  Loop loop = Loop::kFinetune;
  RankCounts ranks = {};
};

struct DescribedModel {
  ModelDescription model;
  std::vector<VisitWork> work;         // of each visit of the model
  std::uint64_t parameters = 0;        // elements of all tensors
  std::uint64_t tokens = 0;            // of a step
  std::vector<std::string> estimates;  // what is not exactly as a run has it, a sentence each; none: nothing
};

// The description that `spillway finetune` gives the engine, of GPT-2, which it trains; of a PyTorch loop, what the
// Python package would say of the model. Throws what the trainer refuses.
DescribedModel describe(const ModelShape& shape, const Config& config, const RunShape& run);

std::uint64_t count_parameters(const ModelDescription& model);

}  // namespace spillway::planning
