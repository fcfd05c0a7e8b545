#include "src/checkpoint/store_inspection.h"
#include "src/formats/element_count.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>

#include "spillway/error.h"
#include "src/config/loss_scaler.h"
#include "swap/store_check.h"
#include "swap/tile_store.h"

namespace spillway {
namespace {

void count_parameters(StoreInfo& info) {
  for (const Block& block : info.model.blocks) {
    for (const Parameter& parameter : block.parameters) {
      const std::uint64_t elements = count_elements(parameter.name, parameter.shape);
      info.parameters += elements;
      info.trainable += parameter.trainable ? elements : 0;
    }
  }
}

// Off the front of a blob. A record without one is shown as it is: its run can say more.
std::optional<LossScalerState> take_loss_scale(std::vector<std::byte>& blob) {
  const auto state = LossScalerState::decode(std::span(blob).first(std::min(blob.size(), LossScalerState::kBytes)));
  if (state) blob.erase(blob.begin(), blob.begin() + LossScalerState::kBytes);
  return state;
}

}  // namespace

StoredModel read_stored_model(const StoreFiles& files) {
  const std::string object = files.files().front().path().string();
  StoredModel stored = parse_store_description(TileStore::read_description(files), object);
  stored.rank = {files.superblock().rank, files.superblock().ranks};
  // An element takes at least 2 bytes, of its rank.
  const std::uint64_t ranks = stored.rank.count;
  std::uint64_t left = std::min(files.superblock().total_bytes / 2, UINT64_MAX / ranks) * ranks;
  for (const Block& block : stored.model.blocks) {
    for (const Parameter& parameter : block.parameters) {
      const std::uint64_t elements = count_elements(parameter.name, parameter.shape);
      if (elements > left) {
        throw Error(Code::kCorrupt, object, "the model that it describes is larger than the store", 0,
                    Remedy::kReplace);
      }
      left -= elements;
    }
  }
  return stored;
}

Plan plan_of_store(const StoredModel& stored, const std::vector<std::filesystem::path>& paths) {
  Config config = config_of(stored);
  config.states = config.parameters = Placement::kNvme;
  config.nvme_paths = paths;
  return make_plan(config, stored.model, 1, stored.rank);
}

OpenStore::OpenStore(StoreFiles opened, const std::vector<std::filesystem::path>& paths)
    : files(std::move(opened)),
      stored(read_stored_model(files)),
      plan(plan_of_store(stored, paths)),
      layout(TileStore::read_layout(files, store_shape(plan))),
      choice(TileStore::read_records(files, layout)),
      object_(files.files().front().path().string()) {}

StoreShape OpenStore::shape() const {
  StoreShape shape = store_shape(plan);
  shape.name_of = [this](std::uint32_t tile) { return name_of(tile); };
  return shape;
}

StoreInfo info_of(const OpenStore& store) {
  const Superblock& block = store.files.superblock();
  StoreInfo info;
  info.format = block.format_version;
  info.fingerprint = block.fingerprint;
  if (block.format_version >= kTwoSuperblocksFormat)
    info.run = fmt::format("{:016x}{:016x}", block.run_id[0], block.run_id[1]);
  info.rank = block.rank;
  info.ranks = block.ranks;
  info.model = store.stored.model;
  info.weights = store.stored.weights;
  info.optimizer = store.stored.optimizer;
  info.moments = store.stored.moments;
  count_parameters(info);
  info.tile_elements = store.stored.tile_elements;
  info.tiles = block.tiles;
  info.slots = block.slots;
  for (const TileExtents& tile : store.layout.tiles) {
    info.weight_bytes += tile.extent[0][index_of(Part::kWeights)].bytes;
    info.state_bytes += tile.extent[0][index_of(Part::kStates)].bytes;
  }
  info.scratch_bytes = block.scratch_bytes;
  for (const File& file : store.files.files()) {
    const auto i = static_cast<std::size_t>(&file - store.files.files().data());
    info.files.push_back(
        {file.path(), store.files.stripes().shares()[i], file.size_bytes(), store.files.superblock_damaged(i)});
  }
  info.in_use = store.files.in_use();
  info.records = store.choice.copies;
  info.newest_lost = store.choice.others_damaged;
  if (block.slots < 2) return info;  // what its records name is overwritten by every step
  if (store.choice.manifest) {
    info.step = store.choice.manifest->step;
    info.blob = store.choice.manifest->blob;
  }
  if (store.choice.older) {
    info.older_step = store.choice.older->step;
    info.older_blob = store.choice.older->blob;
  }
  if (info.weights != DType::kFloat16) return info;
  if (const auto state = take_loss_scale(info.blob)) {
    info.loss_scale = state->scale;
    info.skipped_steps = state->skipped;
  }
  take_loss_scale(info.older_blob);
  return info;
}

StoreInfo inspect_store(const std::vector<std::filesystem::path>& paths) {
  return info_of(OpenStore(StoreFiles::open_read_only(paths), paths));
}

void refuse_to_verify(const OpenStore& store) {
  if (store.files.in_use()) {
    throw Error(Code::kBusy,
                {store.object(), "is in use: a run writes what would be read", 0, "verify it when that has ended"});
  }
  if (store.files.superblock().slots < 2) {
    throw Error(Code::kUnsupported, {store.object(), "made with commit_every 0: it keeps no step to verify", 0,
                                     "there is only the model or the snapshots that its run has written"});
  }
  if (!store.choice.manifest) {
    throw Error(Code::kCorrupt, store.object(), "holds no committed step", 0, Remedy::kReplace);
  }
}

std::uint64_t step_bytes(const StoreLayout& layout) {
  std::uint64_t bytes = 0;
  for (const TileExtents& tile : layout.tiles) {
    for (const Extent& extent : tile.extent[0]) bytes += extent.bytes;
  }
  return bytes;
}

CheckedStore verify_step(OpenStore& store, const Manifest& manifest, const CheckOptions& options) {
  CheckedStore checked;
  checked.step = manifest.step;
  const auto on_bad = [&](const BadBytes& bad) {
    ++checked.bad_extents;
    if (!options.on_bad) return;
    options.on_bad({.name = name_of_part(bad.tile, bad.part, [&](std::uint32_t tile) { return store.name_of(tile); }),
                    .file = bad.place.file->path(),
                    .offset = bad.place.offset,
                    .bytes = bad.extent.bytes,
                    .error = bad.error});
  };
  checked.bytes = check_extents(store.files, store.layout, manifest, {.bad = on_bad, .progress = options.progress});
  return checked;
}

CheckedStore verify_store(const std::vector<std::filesystem::path>& paths, const CheckOptions& options) {
  OpenStore store(StoreFiles::open_read_only(paths), paths);
  refuse_to_verify(store);
  return verify_step(store, *store.choice.manifest, options);
}

std::uint64_t roll_back_store(const std::vector<std::filesystem::path>& paths, const CheckOptions& options) {
  const StoredModel stored = read_stored_model(StoreFiles::open_read_only(paths));
  if (stored.rank.count > 1) {
    throw Error(Code::kInvalidArgument, {(paths.front() / kStoreFileName).string(),
                                         fmt::format("is the store of rank {} of {}, which go back together",
                                                     stored.rank.index, stored.rank.count),
                                         0, "name the directory that has those of all ranks, rank0 and so on"});
  }
  const Plan plan = plan_of_store(stored, paths);
  StoreShape shape = store_shape(plan);
  shape.name_of = [&](std::uint32_t tile) { return tile_name(plan, stored.model, tile); };
  return TileStore::roll_back(paths, shape, options.progress);
}

}  // namespace spillway
