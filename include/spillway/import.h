// Training that DeepSpeed began, taken over: a ZeRO checkpoint in, a snapshot (spillway/snapshot.h) out, with which a
// run goes on where DeepSpeed stopped.
//
//   const auto facts = import_deepspeed("checkpoints", model, "snapshot", {.weights = DType::kBFloat16});
//   auto engine = Engine::create(config, model, {.snapshot = "snapshot"});  // at step facts.step
//
// (tests/src/import_example.cc is a whole program.) It takes checkpoints of ZeRO stage 3, 2 and 1 with Adam or AdamW,
// of any number of ranks, offloaded to NVMe or not: the fp32 master weights, exp_avg and exp_avg_sq of every parameter,
// bit for bit, Adam's step, and in fp16 the loss scale with its history. It refuses, with the reason, tensor and
// pipeline parallelism, experts, other optimizers, and anything that is not as DeepSpeed writes it.
//
// Files are not trusted: nothing in them is unpickled into objects or executed, and no name in them leads outside the
// checkpoint's directory. Values stream; memory does not grow with the model, but for its parameters' names. The
// snapshot is whole or not there. Thread: any, one import for a directory at a time. Errors: kInvalidArgument (what the
// checkpoint holds, or the model does not agree with it), kCorrupt, kNotFound, kExists, kIo.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "spillway/dtype.h"
#include "spillway/engine.h"
#include "spillway/model.h"
#include "spillway/safetensors.h"

namespace spillway {

struct ImportOptions {
  std::string tag = {};  // the checkpoint's directory, global_step100 say; empty: the one that `latest` names
  std::optional<DType> weights = {};  // of the run that goes on; not set: as DeepSpeed trained. fp16: if it did so
  bool verify = true;                 // first compares what is read with the CRC-32s in the files
  std::uint64_t max_file_bytes = kMaxFileBytes;  // of the snapshot's files; see SaveOptions
  std::function<void(std::uint64_t done, std::uint64_t bytes)> progress = {};  // of bytes to read
  // Gives the values of frozen parameters where the checkpoint has none of them, as DeepSpeed saves it with
  // exclude_frozen_parameters. Not set: such a checkpoint is refused.
  WeightSource frozen = {};
};

// What an optimizer's group of parameters was trained with. Not carried: a run's configuration says it.
struct DeepSpeedGroup {
  std::optional<double> learning_rate, beta1, beta2, epsilon, weight_decay;
};

// Of training in fp16: what losses were multiplied with when the checkpoint was saved.
struct DeepSpeedLossScale {
  double scale = 1;
  std::uint64_t clean = 0;       // steps since the last overflow, or the start
  std::uint32_t hysteresis = 1;  // overflows until the scale drops, that one included
};

struct DeepSpeedInfo {
  std::string tag, version;      // version: DeepSpeed's own
  std::uint32_t stage = 3;       // of ZeRO
  std::uint32_t ranks = 1;       // that the states were spread over
  std::uint64_t sub_groups = 0;  // flat tensors of a rank
  std::uint64_t swapped = 0;     // flat tensors, of all ranks, that come from NVMe's swap files
  std::uint64_t parameters = 0, elements = 0;
  std::uint64_t frozen_given = 0;                                  // parameters that ImportOptions::frozen had to give
  std::uint64_t optimizer_steps = 0;                               // updates that Adam has made
  std::uint64_t global_steps = 0, skipped_steps = 0, samples = 0;  // as the engine counted them
  std::optional<DType> weights;                  // that were trained; not set: the checkpoint does not say
  std::optional<std::uint64_t> schedule_steps;   // that a learning-rate schedule has made; not set: there was none
  std::optional<DeepSpeedLossScale> loss_scale;  // not set: not trained in fp16, or the checkpoint does not say
  DType snapshot_weights = DType::kFloat32;
  std::uint64_t step = 0;  // the snapshot's: Adam's, in fp16 with those that were skipped
  std::vector<DeepSpeedGroup> groups;
  std::vector<std::string> client_state;  // names of what the program saved beside it; not carried
};

// A parameter of `model` is found under its own name, with or without a prefix (`module.`, `transformer.`) that all of
// them share, or as one that shares its storage. `directory`: what save_checkpoint() was given, or a tag's directory
// in it. `snapshot` must not exist.
DeepSpeedInfo import_deepspeed(const std::filesystem::path& directory, const ModelDescription& model,
                               const std::filesystem::path& snapshot, const ImportOptions& options = {});

// The facts as one JSON object, with the snapshot that they are of: what `spillway import --json` prints. What is not
// set, or no finite number, is left out; texts have a '?' for each control character and each byte that is not UTF-8.
std::string info_json(const DeepSpeedInfo& facts, const std::filesystem::path& snapshot);

}  // namespace spillway
