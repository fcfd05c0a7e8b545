#include "spillway/export.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "kernels/checksum.h"
#include "spillway/error.h"
#include "src/checkpoint/file_names.h"
#include "src/checkpoint/model_writer.h"
#include "src/checkpoint/run_inspection.h"
#include "src/checkpoint/snapshot_record.h"
#include "src/checkpoint/store_inspection.h"
#include "src/checkpoint/tile_values.h"
#include "src/formats/element_count.h"
#include "src/formats/new_directory.h"
#include "src/formats/plain_file.h"
#include "src/plan/description.h"
#include "src/plan/plan.h"
#include "swap/store_check.h"
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

// A new directory is complete or not there. One that exists is filled as it is: it may be a mount point or a link, and
// hold what belongs beside a model.
void write_model(const ModelDescription& model, const std::filesystem::path& directory, const ExportOptions& options,
                 const std::function<void(const WeightSink&)>& walk) {
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
                                  .alone = !made}});
    const std::uint64_t bytes = value_bytes(model);
    std::uint64_t done = 0;
    const WeightSink sink = [&](std::uint32_t block, std::uint32_t parameter, std::uint64_t first,
                                std::span<const float> values) { writer.write(block, parameter, first, values); };
    walk([&](std::uint32_t block, std::uint32_t parameter, std::uint64_t first, std::span<const float> values) {
      names.write(block, parameter, first, values, sink);
      done += values.size_bytes();
      if (options.progress) options.progress(done, bytes);
    });
    writer.finish();
  }
  if (made) made->finish();
}

// A tile of a store that no engine has open, read and verified into memory.
class TileReader {
 public:
  TileReader(const Plan& plan, const ModelDescription& model)
      : plan_(plan), model_(model), memory_(align_up(plan.host.buffer_bytes, std::uint64_t{4096})) {}

  TileMemory read(const TileStore& store, std::uint32_t tile) {
    const TileStore::Slot slot = store.readable(tile);
    TileMemory memory;
    std::uint64_t at = 0;
    for (std::size_t part = 0; part < kParts; ++part) {
      const std::uint64_t bytes = slot.extent[part].bytes;
      if (bytes == 0) continue;
      const std::span<std::byte> extent = memory_.bytes().subspan(at, bytes);
      memory.part[part] = extent.data();
      store.files().read_at(slot.extent[part].offset, extent);
      granules_.resize(div_up(bytes, kGranuleBytes));
      granule_checksums(extent, granules_);
      if (extent_checksum(granules_) != slot.checksum[part]) {
        const auto name_of = [this](std::uint32_t t) { return tile_name(plan_, model_, t); };
        throw mismatch_error(name_of_part(tile, static_cast<Part>(part), name_of),
                             store.files().place_of(slot.extent[part].offset),
                             store.way_back(slot.extent[part].offset));
      }
      at += bytes;
    }
    return memory;
  }

 private:
  const Plan& plan_;
  const ModelDescription& model_;
  AlignedBuffer memory_;
  std::vector<std::uint64_t> granules_;
};

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

// Hands a tensor to `sink` as the given block, verified behind its last value: a failure leaves no model.
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
  write_model(model, directory, options,
              [&](const WeightSink& sink) { engine.export_weights(options.type == DType::kFloat32, sink); });
}

void export_model(const ModelDescription& model, const std::filesystem::path& directory, ExportOptions options,
                  const std::function<void(const WeightSink& sink)>& weights) {
  write_model(model, directory, options, weights);
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
  write_model(model, directory, options, [&](const WeightSink& sink) {
    // Those that were frozen are as they were used already.
    const WeightSink rounded = [&](std::uint32_t block, std::uint32_t p, std::uint64_t first,
                                   std::span<const float> values) {
      std::vector<float> used(values.size());
      std::ranges::transform(values, used.begin(), [&](float v) { return trained_weight(v, record.facts.weights); });
      sink(block, p, first, used);
    };
    const bool exact = options.type == DType::kFloat32;
    std::uint32_t block = 0;
    for (const TensorEntry& entry : weights->tensors())
      read_tensor(*weights, entry, record, block++, exact ? sink : rounded);
  });
  return {.step = record.facts.step, .weights = record.facts.weights};
}

ExportedStore export_store(const std::vector<std::filesystem::path>& paths, const std::filesystem::path& directory,
                           ExportOptions options) {
  const StoredModel stored = read_stored_model(StoreFiles::open_to_look(paths));
  if (stored.rank.count > 1) {
    throw Error(Code::kUnsupported,
                {paths.front().string(),
                 fmt::format("has the part of rank {} of {} of a model alone", stored.rank.index, stored.rank.count), 0,
                 "export the directory that has the stores of all ranks, rank0 and so on"});
  }
  const Plan plan = plan_of_store(stored, paths);
  const auto store = TileStore::open_to_read(paths, store_shape(plan));
  TileReader reader(plan, stored.model);
  write_model(stored.model, directory, options, [&](const WeightSink& sink) {
    for (std::uint32_t t = 0; t < plan.tiles.size(); ++t) {
      read_tile(plan, t, reader.read(*store, t), options.type == DType::kFloat32, sink);
    }
  });
  return {.step = store->committed().step, .weights = stored.weights};
}

namespace {

// The stores of all ranks, at the newest step that all have.
struct RunReader {
  explicit RunReader(const RunPaths& paths);

  // Every rank's tiles, in the order that a model is written in.
  void read(bool exact, const WeightSink& sink);

  struct Part {
    StoredModel stored;
    Plan plan;
    std::unique_ptr<TileStore> store;
  };
  std::vector<std::unique_ptr<Part>> parts;
  Commit commit;
};

RunReader::RunReader(const RunPaths& paths) {
  auto run = open_when_free(paths);
  const auto common = newest_common(run->commits());
  for (const auto& rank : run->ranks) TileStore::refuse_one_slot(rank->files);
  if (!common) throw no_common_step(paths[0].front(), run->commits());
  commit = *common;
  for (const auto& rank : run->ranks) {
    auto part = std::make_unique<Part>(Part{rank->stored, rank->plan, nullptr});
    part->store = TileStore::found(std::move(rank->files), store_shape(part->plan));
    if (part->store->commits().last != common) part->store->go_to_before();
    parts.push_back(std::move(part));
  }
}

void RunReader::read(bool exact, const WeightSink& sink) {
  struct Next {
    std::uint32_t block;
    std::uint64_t first;  // in its flat vector
    std::uint32_t rank, tile;
    auto operator<=>(const Next&) const = default;
  };
  std::vector<Next> order;
  std::vector<TileReader> readers;
  for (std::uint32_t rank = 0; rank < parts.size(); ++rank) {
    readers.emplace_back(parts[rank]->plan, parts[rank]->stored.model);
    const auto& tiles = parts[rank]->plan.tiles;
    for (std::uint32_t t = 0; t < tiles.size(); ++t) order.push_back({tiles[t].block, tiles[t].range.first, rank, t});
  }
  std::ranges::sort(order);
  for (const Next& next : order) {
    const Part& part = *parts[next.rank];
    read_tile(part.plan, next.tile, readers[next.rank].read(*part.store, next.tile), exact, sink);
  }
}

}  // namespace

ExportedStore export_run(const RunPaths& paths, const std::filesystem::path& directory, ExportOptions options) {
  RunReader run(paths);
  const StoredModel& stored = run.parts[0]->stored;
  write_model(stored.model, directory, options,
              [&](const WeightSink& sink) { run.read(options.type == DType::kFloat32, sink); });
  return {.step = run.commit.step, .weights = stored.weights};
}

}  // namespace spillway
