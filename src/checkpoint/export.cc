#include "spillway/export.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kernels/checksum.h"
#include "spillway/error.h"
#include "src/checkpoint/file_names.h"
#include "src/checkpoint/model_writer.h"
#include "src/checkpoint/run_inspection.h"
#include "src/checkpoint/run_reader.h"
#include "src/checkpoint/snapshot_record.h"
#include "src/checkpoint/store_inspection.h"
#include "src/checkpoint/tile_values.h"
#include "src/config/table.h"
#include "src/formats/element_count.h"
#include "src/formats/new_directory.h"
#include "src/formats/plain_file.h"
#include "src/plan/description.h"
#include "src/plan/plan.h"
#include "swap/tile_store.h"

namespace spillway {
namespace {

std::uint64_t value_bytes(const ModelDescription& model) {
  std::uint64_t elements = 0;
  for (const Block& block : model.blocks) {
    for (const Parameter& parameter : block.parameters) elements += count_elements(parameter.name, parameter.shape);
  }
  return elements * sizeof(float);
}

// Files of a model hold numbers under names that a loader knows.
void refuse_bytes(const ModelDescription& model) {
  for (const Block& block : model.blocks) {
    const auto found = std::ranges::find_if(block.parameters, &Parameter::bytes);
    if (found == block.parameters.end()) continue;
    throw Error(Code::kUnsupported,
                {found->name, "is kept as bytes of the program's own, a quantized weight say, and cannot be exported",
                 0, "export what was trained (in Python export() writes a peft model's adapters)"});
  }
}

constexpr std::string_view kBaseLeftOpen = R"("base_model_name_or_path": null)";

std::string with_base(const std::string& config, const std::string& base) {
  const std::size_t at = base.empty() ? config.npos : config.find(kBaseLeftOpen);
  if (at == config.npos) return config;
  return fmt::format(R"({}"base_model_name_or_path": {}{})", config.substr(0, at), json_string(base),
                     config.substr(at + kBaseLeftOpen.size()));
}

// What is written of a model: its adapters alone, where it has some and not all of it is asked for.
class ExportedPart {
 public:
  ExportedPart(const ModelDescription& model, const ExportOptions& options)
      : adapters_(!options.whole &&
                  std::ranges::find(model.attachments, kAdapterConfig, &Attachment::name) != model.attachments.end()) {
    if (!adapters_) {
      model_ = model;
      return;
    }
    for (const Block& block : model.blocks) {
      Block part{.name = block.name, .parameters = {}};
      auto& index = index_.emplace_back();
      for (const Parameter& parameter : block.parameters) {
        index.push_back(part.parameters.size());
        if (parameter.name.starts_with(kAdapterPrefix)) part.parameters.push_back(parameter);
      }
      blocks_.push_back(part.parameters.empty() ? kNone : static_cast<std::uint32_t>(model_.blocks.size()));
      if (!part.parameters.empty()) model_.blocks.push_back(std::move(part));
    }
    for (const Attachment& file : model.attachments) {
      if (file.name == kAdapterConfig) model_.attachments.push_back({file.name, with_base(file.text, options.base)});
    }
  }

  const ModelDescription& model() const { return model_; }
  bool adapters() const { return adapters_; }
  std::string stem() const { return adapters_ ? kAdapterStem : "model"; }
  bool has(std::uint32_t block) const { return !adapters_ || blocks_[block] != kNone; }
  // Of blocks of which there is something, all parameters' values.
  WeightSink to(const WeightSink& sink, const ModelDescription& whole) const {
    if (!adapters_) return sink;
    return [this, &sink, &whole](std::uint32_t block, std::uint32_t parameter, std::uint64_t first,
                                 std::span<const float> values) {
      if (!has(block) || !whole.blocks[block].parameters[parameter].name.starts_with(kAdapterPrefix)) return;
      sink(blocks_[block], static_cast<std::uint32_t>(index_[block][parameter]), first, values);
    };
  }

 private:
  static constexpr std::uint32_t kNone = UINT32_MAX;
  const bool adapters_;
  ModelDescription model_;
  std::vector<std::uint32_t> blocks_;            // of model_, by block of the whole
  std::vector<std::vector<std::size_t>> index_;  // of a parameter in its block
};

// A new directory is complete or not there. A directory that exists is filled as it is: it may be a mount point or a
// link, and hold what belongs beside a model. Returns whether these are adapters.
bool write_model(const ModelDescription& whole, const std::filesystem::path& directory, const ExportOptions& options,
                 const std::function<void(const WeightSink&, const ExportedPart&)>& walk) {
  const ExportedPart part(whole, options);
  const ModelDescription& model = part.model();
  refuse_bytes(model);
  const FileNames names(model);
  std::optional<NewDirectory> made;
  std::error_code ignored;
  if (std::filesystem::exists(directory / kSnapshotFile, ignored)) {
    throw Error(Code::kExists, {directory.string(), "is a snapshot, whose exact weights would be replaced", 0,
                                "name another directory"});
  }
  if (!std::filesystem::exists(directory, ignored)) made.emplace(NewDirectory::create(directory));
  {
    ModelWriter writer(names.model(), made ? made->path() : directory,
                       {.files = {.type = options.type,
                                  .max_file_bytes = options.max_file_bytes,
                                  .replace = options.replace,
                                  .stem = part.stem(),
                                  .alone = !made}});
    const std::uint64_t bytes = value_bytes(model);
    std::uint64_t done = 0;
    const WeightSink sink = [&](std::uint32_t block, std::uint32_t parameter, std::uint64_t first,
                                std::span<const float> values) { writer.write(block, parameter, first, values); };
    const WeightSink counted = [&](std::uint32_t block, std::uint32_t parameter, std::uint64_t first,
                                   std::span<const float> values) {
      names.write(block, parameter, first, values, sink);
      done += values.size_bytes();
      if (options.progress) options.progress(done, bytes);
    };
    walk(part.to(counted, whole), part);
    writer.finish();
  }
  if (made) made->finish();
  return part.adapters();
}

// A snapshot as write_model() takes it: each tensor a block of its own, in the order of names.
ModelDescription described(const SafetensorsReader& weights, const SnapshotRecord& record,
                           const std::filesystem::path& directory) {
  ModelDescription model;
  for (const TensorEntry& entry : weights.tensors())
    model.blocks.push_back({entry.name, {{.name = entry.name, .shape = entry.shape, .bytes = !entry.type}}});
  for (const std::string& file : record.files) {
    if (file.ends_with(".safetensors") || file.ends_with(".safetensors.index.json") || !is_plain_file_name(file))
      continue;
    // The record lists what the run wrote; what lies there now may be a link that somebody has put in its place.
    model.attachments.push_back({file, read_attachment(record, directory, file, Links::kRefuse)});
  }
  return model;
}

// Hands a tensor to `sink` as the given block, verified after its last value: a failure leaves no model.
void read_tensor(SafetensorsReader& reader, const TensorEntry& entry, const SnapshotRecord& record, std::uint32_t block,
                 const WeightSink& sink) {
  std::vector<float> values(64 * 1024);
  RunningChecksum checksum;
  for (std::uint64_t at = 0; at < entry.elements; at += values.size()) {
    const std::span<float> piece = std::span(values).first(std::min<std::uint64_t>(values.size(), entry.elements - at));
    reader.read(entry, at, piece);
    checksum.add(std::as_bytes(piece));
    sink(block, 0, at, piece);
  }
  const auto expected = record.checksums.find(entry.name);
  if (expected != record.checksums.end() && expected->second == checksum.value()) return;
  throw Error(Code::kCorrupt, {reader.file(entry).string(), "tensor " + entry.name + " does not match its checksum", 0,
                               "check the drive; export another snapshot"});
}

}  // namespace

void export_model(Engine& engine, const ModelDescription& model, const std::filesystem::path& directory,
                  ExportOptions options) {
  write_model(model, directory, options, [&](const WeightSink& sink, const ExportedPart&) {
    engine.export_weights(options.type == DType::kFloat32, sink);
  });
}

void export_model(const ModelDescription& model, const std::filesystem::path& directory, ExportOptions options,
                  const std::function<void(const WeightSink& sink)>& weights) {
  write_model(model, directory, options, [&](const WeightSink& sink, const ExportedPart&) { weights(sink); });
}

ExportedStore export_snapshot(const std::filesystem::path& snapshot, const std::filesystem::path& directory,
                              ExportOptions options) {
  std::optional<SafetensorsReader> weights;
  ModelDescription model;
  const SnapshotRecord record = read_snapshot(snapshot, [&](const SnapshotRecord& opened) {
    if (opened.frozen_left_out) {
      throw Error(Code::kInvalidArgument, {snapshot.string(), "was saved without the frozen weights", 0,
                                           "load it into a run of its model (Engine::load_snapshot), and export that"});
    }
    weights = SafetensorsReader::open(snapshot);
    model = described(*weights, opened, snapshot);
  });
  const auto walk = [&](const WeightSink& sink, const ExportedPart& part) {
    // Those that were frozen are as they were used already.
    const WeightSink rounded = [&](std::uint32_t block, std::uint32_t p, std::uint64_t first,
                                   std::span<const float> values) {
      std::vector<float> used(values.size());
      std::ranges::transform(values, used.begin(), [&](float v) { return trained_weight(v, record.facts.weights); });
      sink(block, p, first, used);
    };
    const bool exact = options.type == DType::kFloat32;
    std::uint32_t block = 0;
    for (const TensorEntry& entry : weights->tensors()) {
      if (part.has(block)) read_tensor(*weights, entry, record, block, exact ? sink : rounded);
      ++block;
    }
  };
  const bool adapters = write_model(model, directory, options, walk);
  return {.step = record.facts.step, .weights = record.facts.weights, .adapters = adapters};
}

ExportedStore export_store(const std::vector<std::filesystem::path>& paths, const std::filesystem::path& directory,
                           ExportOptions options) {
  const StoredModel stored = read_stored_model(StoreFiles::open_read_only(paths));
  if (stored.rank.count > 1) {
    throw Error(Code::kUnsupported,
                {paths.front().string(),
                 fmt::format("has the part of rank {} of {} of a model alone", stored.rank.index, stored.rank.count), 0,
                 "export the directory that has the stores of all ranks, rank0 and so on"});
  }
  const Plan plan = plan_of_store(stored, paths);
  const auto store = TileStore::open_to_read(paths, store_shape(plan));
  const auto name_of = [&](std::uint32_t tile) { return tile_name(plan, stored.model, tile); };
  TileReader reader(plan.host.buffer_bytes);
  const auto walk = [&](const WeightSink& sink, const ExportedPart& part) {
    for (std::uint32_t t = 0; t < plan.tiles.size(); ++t) {
      if (!part.has(plan.tiles[t].block)) continue;
      read_tile(plan, t, reader.read(*store, t, name_of), options.type == DType::kFloat32, sink);
    }
  };
  const bool adapters = write_model(stored.model, directory, options, walk);
  return {.step = store->committed().step, .weights = stored.weights, .adapters = adapters};
}

namespace {

// Every rank's tiles, in the order that a model is written in.
void read_run(RunReader& run, bool exact, const WeightSink& sink, const ExportedPart& exported) {
  for (const auto& [block, first, rank, tile] : run.tiles()) {
    if (exported.has(block)) read_tile(run.plan(rank), tile, run.read(rank, tile), exact, sink);
  }
}

}  // namespace

ExportedStore export_run(const RunPaths& paths, const std::filesystem::path& directory, ExportOptions options) {
  RunReader run(*open_when_free(paths));
  const StoredModel& stored = run.stored();
  const auto walk = [&](const WeightSink& sink, const ExportedPart& part) {
    read_run(run, options.type == DType::kFloat32, sink, part);
  };
  const bool adapters = write_model(stored.model, directory, options, walk);
  return {.step = run.commit().step, .weights = stored.weights, .adapters = adapters};
}

}  // namespace spillway
