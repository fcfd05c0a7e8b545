// Exports trained weights as a directory that Hugging Face's loaders take: safetensors and the model's attachments
// (`config.json`).
//
// Where a model's tensors have other names in files than in memory, or are pieces of those in memory, an attachment
// kFileNames says so; it is not written itself: {"tensors": [["in files", "in memory", first element, dimensions …],
// …], "unsaid": ["in memory", …]}. A tensor that is not named there has the same name in both; one that is unsaid is
// refused (kUnsupported).
//
// A model with an attachment kAdapterConfig has low-rank adapters, tensors whose names begin with kAdapterPrefix. They
// alone are exported, in adapter_model.safetensors and with that attachment, as peft saves them.
//
// Where `config.json` names a type (`torch_dtype`, `dtype`), the exported one names that of the tensors beside it.
// Values stream through one tile of memory. A new directory is either complete or not there; into one that exists the
// model is written whole as well (see SafetensorsWriter), file by file, beside what is there.
// Thread: the engine's, one at a time. Errors: kExists, kCorrupt, kIo, kNotFound, kBusy, kInvalidArgument.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "spillway/dtype.h"
#include "spillway/engine.h"
#include "spillway/model.h"
#include "spillway/safetensors.h"
#include "spillway/store.h"

namespace spillway {

inline constexpr const char* kFileNames = "spillway_names.json";
inline constexpr const char* kAdapterConfig = "adapter_config.json";
inline constexpr const char* kAdapterPrefix = "base_model.";
inline constexpr const char* kAdapterStem = "adapter_model";  // SafetensorsWriterOptions::stem

struct ExportOptions {
  // fp32: the exact master weights. bf16, fp16: the weights that forward and backward use, rounded where those are of
  // another type. A weight that fp16 rounds to infinity is refused (kInvalidArgument), naming the tensor.
  DType type = DType::kFloat32;
  std::uint64_t max_file_bytes = kMaxFileBytes;  // of tensor data; above it the model is sharded
  bool replace = false;  // a model that is in the directory already: refused (kExists), or replaced
  bool whole = false;    // of a model with adapters: all of it, in model.safetensors
  // For adapters: their base model, as peft's AutoPeftModel opens it, where kAdapterConfig leaves it open
  // ("base_model_name_or_path": null). Empty: it stays open, and whoever loads the adapters names it.
  std::string base = {};
  // Of the values, at 4 bytes each. What it throws ends the export, which leaves nothing then.
  std::function<void(std::uint64_t done, std::uint64_t bytes)> progress = {};
};

void export_model(Engine& engine, const ModelDescription& model, const std::filesystem::path& directory,
                  ExportOptions options);

// The same with weights that `weights` hands to the sink, once. For several ranks: all of them call
// Engine::export_weights(), exact for fp32, and one writes.
void export_model(const ModelDescription& model, const std::filesystem::path& directory, ExportOptions options,
                  const std::function<void(const WeightSink& sink)>& weights);

struct ExportedStore {
  std::uint64_t step = 0;
  DType weights = DType::kFloat32;  // the run's own type
  bool adapters = false;            // and nothing else
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
