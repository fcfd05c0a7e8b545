// Trained weights out of Spillway, as a directory that Hugging Face's loaders take: safetensors and the model's
// attachments (`config.json`).
//
// Where a model's tensors have other names in files than in memory, or are pieces of those, an attachment kFileNames
// says it, and is not written itself: {"tensors": [["in files", "in memory", first element, dimensions …], …],
// "unsaid": ["in memory", …]}. What is not named there has one name; what is unsaid is refused (kUnsupported).
//
// Where `config.json` names a type (`torch_dtype`, `dtype`), it names that of the tensors beside it.
// Values stream through one tile of memory. A new directory is either complete or not there; into one that exists the
// model comes whole as well (see SafetensorsWriter), file by file, beside what is there.
// Thread: the engine's, one at a time. Errors: kExists, kCorrupt, kIo, kNotFound, kBusy, kInvalidArgument.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <vector>

#include "spillway/dtype.h"
#include "spillway/engine.h"
#include "spillway/model.h"
#include "spillway/safetensors.h"
#include "spillway/store.h"

namespace spillway {

inline constexpr const char* kFileNames = "spillway_names.json";

struct ExportOptions {
  // fp32: the exact master weights. bf16, fp16: the weights that forward and backward use, rounded where those are of
  // another type. A weight that fp16 rounds to infinity is refused (kInvalidArgument), naming the tensor.
  DType type = DType::kFloat32;
  std::uint64_t max_file_bytes = kMaxFileBytes;  // of tensor data; above it the model is sharded
  bool replace = false;  // a model that is in the directory already: refused (kExists), or replaced
  // Of the values, at 4 bytes each. What it throws ends the export, which leaves nothing then.
  std::function<void(std::uint64_t done, std::uint64_t bytes)> progress = {};
};

void export_model(Engine& engine, const ModelDescription& model, const std::filesystem::path& directory,
                  ExportOptions options);

// Of weights that `weights` hands to the sink, once: where several ranks train a model all of them call
// Engine::export_weights(), exact for fp32, and one writes.
void export_model(const ModelDescription& model, const std::filesystem::path& directory, ExportOptions options,
                  const std::function<void(const WeightSink& sink)>& weights);

struct ExportedStore {
  std::uint64_t step = 0;
  DType weights = DType::kFloat32;  // the run's own type
};

// The same from a store that no process has open, at its last committed step, every byte verified. `paths`: all of the
// store's, in the order of spillway.nvme_paths; at least one.
ExportedStore export_store(const std::vector<std::filesystem::path>& paths, const std::filesystem::path& directory,
                           ExportOptions options);

// The same from the stores of all ranks of a run, at the newest step that all have (spillway/store.h: find_ranks says
// which they are): one model, as if one rank had trained it.
ExportedStore export_run(const RunPaths& paths, const std::filesystem::path& directory, ExportOptions options);

// The same from a snapshot (spillway/snapshot.h): fp32 are its exact weights. Every value is verified.
ExportedStore export_snapshot(const std::filesystem::path& snapshot, const std::filesystem::path& directory,
                              ExportOptions options);

}  // namespace spillway
