#include "spillway/export.h"

#include <algorithm>
#include <cstdlib>
#include <numeric>

#include "kernels/checksum.h"
#include "spillway/error.h"
#include "spillway/safetensors.h"
#include "src/description.h"
#include "src/plain_file.h"
#include "src/plan.h"
#include "src/store_inspection.h"
#include "src/tile_values.h"

namespace spillway {
namespace {

// Tensors in the order in which a sink sees them: block after block, inside a block by place in the flat vector.
class ModelWriter {
 public:
  ModelWriter(const ModelDescription& model, const std::filesystem::path& directory, ExportOptions options)
      : model_(model), directory_(directory) {
    std::vector<TensorSpec> specs;
    index_.resize(model.blocks.size());
    for (std::size_t b = 0; b < model.blocks.size(); ++b) {
      const auto& parameters = model.blocks[b].parameters;
      const BlockPartition partition = partition_block(model.blocks[b]);
      std::vector<std::uint32_t> order(parameters.size());
      std::iota(order.begin(), order.end(), 0u);
      std::ranges::sort(order, {}, [&](std::uint32_t p) { return partition.parameters[p].first; });
      index_[b].resize(parameters.size());
      for (std::uint32_t p : order) {
        index_[b][p] = specs.size();
        specs.push_back({parameters[p].name, parameters[p].shape});
      }
    }
    writer_.emplace(
        SafetensorsWriter::create(directory, std::move(specs), {.type = options.type, .replace = options.replace}));
  }

  WeightSink sink() {
    return [this](std::uint32_t block, std::uint32_t parameter, std::uint64_t first, std::span<const float> values) {
      writer_->write(index_[block][parameter], first, values);
    };
  }

  ~ModelWriter() {
    for (const auto& path : leftovers_) remove_file(path);
  }
  ModelWriter(const ModelWriter&) = delete;
  ModelWriter& operator=(const ModelWriter&) = delete;

  // Attachments get their names just before the weights get theirs, which make the directory a model.
  void finish() {
    for (const Attachment& attachment : model_.attachments) {
      leftovers_.push_back(directory_ / ("." + attachment.name + ".partial"));
      PlainFile file = PlainFile::create(leftovers_.back());
      file.write_at(0, std::as_bytes(std::span(attachment.text)));
      file.sync();
      file.close();
    }
    for (std::size_t a = 0; a < leftovers_.size(); ++a) {
      const auto path = directory_ / model_.attachments[a].name;
      rename_file(leftovers_[a], path);
      leftovers_[a] = path;
    }
    writer_->finish();
    leftovers_.clear();
  }

 private:
  const ModelDescription& model_;
  std::filesystem::path directory_;
  std::vector<std::vector<std::size_t>> index_;
  std::optional<SafetensorsWriter> writer_;
  std::vector<std::filesystem::path> leftovers_;  // files to remove unless all of it succeeds
};

// A tile of a store that no engine has open, read and verified into memory.
class TileReader {
 public:
  TileReader(const Plan& plan, const ModelDescription& model)
      : plan_(plan),
        model_(model),
        memory_(
            static_cast<std::byte*>(std::aligned_alloc(4096, align_up(plan.host.buffer_bytes, std::uint64_t{4096})))) {}
  ~TileReader() { std::free(memory_); }
  TileReader(const TileReader&) = delete;
  TileReader& operator=(const TileReader&) = delete;

  TileMemory read(const TileStore& store, std::uint32_t tile) {
    const TileStore::Slot slot = store.readable(tile);
    TileMemory memory;
    std::uint64_t at = 0;
    for (std::size_t part = 0; part < kParts; ++part) {
      const std::uint64_t bytes = slot.extent[part].bytes;
      if (bytes == 0) continue;
      memory.part[part] = memory_ + at;
      store.files().read_at(slot.extent[part].offset, {memory_ + at, bytes});
      granules_.clear();
      for (std::uint64_t g = 0; g < bytes; g += kGranuleBytes) {
        granules_.push_back(granule_checksum({memory_ + at + g, std::min(kGranuleBytes, bytes - g)}));
      }
      if (extent_checksum(granules_) != slot.checksum[part]) {
        const StoreFiles::Place place = store.files().place_of(slot.extent[part].offset);
        throw Error(Code::kCorrupt, {place.file->path().string(),
                                     std::string(part == index_of(Part::kWeights) ? "weights" : "states") + " of " +
                                         tile_name(plan_, model_, tile) + " at offset " + std::to_string(place.offset) +
                                         " do not match their checksum",
                                     0, store.way_back(slot.extent[part].offset)});
      }
      at += bytes;
    }
    return memory;
  }

 private:
  const Plan& plan_;
  const ModelDescription& model_;
  std::byte* memory_;
  std::vector<std::uint64_t> granules_;
};

}  // namespace

void export_model(Engine& engine, const ModelDescription& model, const std::filesystem::path& directory,
                  ExportOptions options) {
  ModelWriter writer(model, directory, options);
  engine.export_weights(options.type == DType::kFloat32, writer.sink());
  writer.finish();
}

ExportedStore export_store(const std::vector<std::filesystem::path>& paths, const std::filesystem::path& directory,
                           ExportOptions options) {
  const StoredModel stored = parse_store_description(TileStore::read_description(paths), paths.front().string());
  const Plan plan = plan_of_store(stored, paths);
  const auto store = TileStore::open(paths, store_shape(plan));
  ModelWriter writer(stored.model, directory, options);
  const WeightSink sink = writer.sink();
  TileReader reader(plan, stored.model);
  for (std::uint32_t t = 0; t < plan.tiles.size(); ++t) {
    read_tile(plan, t, reader.read(*store, t), options.type == DType::kFloat32, sink);
  }
  writer.finish();
  return {.step = store->committed().step, .weights = stored.weights};
}

}  // namespace spillway
