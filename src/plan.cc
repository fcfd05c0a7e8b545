#include "src/plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <set>

#include "kernels/norm.h"
#include "spillway/error.h"
#include "src/description.h"
#include "swap/manifest.h"
#include "swap/tile_mover.h"
#include "swap/tile_store.h"

namespace spillway {
namespace {

constexpr std::uint64_t kPage = 4096;
constexpr std::uint32_t kPreferredPlaces = 3;  // one computing, one arriving, one being given back
constexpr std::uint64_t kBuffersOnTheWay = 3;  // tiles read and written while the update computes on one for each node
constexpr std::uint64_t kPreferredChunks = 32;
constexpr std::uint64_t kLeastChunks = 2;

// Hands out addresses of an arena and lists what for.
class Arena {
 public:
  Arena(Placement tier, Ledger& ledger) : tier_(tier), ledger_(ledger) {}

  Region take(const std::string& purpose, std::uint64_t bytes) {
    const Region region{used_, bytes};
    if (bytes == 0) return region;
    const std::uint64_t padded = align_up(bytes, kPage);
    used_ += padded;
    for (Reservation& line : ledger_.reservations) {
      if (line.tier == tier_ && line.purpose == purpose) {
        line.bytes += padded;
        return region;
      }
    }
    ledger_.reservations.push_back({tier_, purpose, padded});
    return region;
  }
  std::uint64_t used() const { return used_; }

 private:
  Placement tier_;
  Ledger& ledger_;
  std::uint64_t used_ = 0;
};

// The largest unit that names the number exactly, in the configuration's own words: a hint taken literally must fit,
// and must be the smallest that does.
std::string size_text(std::uint64_t bytes) {
  if (bytes > 0 && bytes % kMiB == 0) return fmt::format("{}MiB", bytes / kMiB);
  if (bytes > 0 && bytes % kKiB == 0) return fmt::format("{}KiB", bytes / kKiB);
  return fmt::format("{}B", bytes);
}

[[noreturn]] void refuse(const char* key, std::uint64_t have, std::uint64_t need, const char* what) {
  throw Error(Code::kDoesNotFit, {fmt::format("spillway.{}", key),
                                  fmt::format("{} is too small: this plan needs at least {} of {}", size_text(have),
                                              size_text(need), what),
                                  0, fmt::format("set spillway.{} to \"{}\" or more", key, size_text(need))});
}

class Planner {
 public:
  Planner(const Config& config, const ModelDescription& model, unsigned nodes)
      : config_(config), model_(model), nodes_(nodes) {}

  Plan run() {
    check_config();
    check_attachments();
    cut_blocks();
    order_visits();
    plan_.has_store = !config_.nvme_paths.empty();
    plan_.slots = config_.commit_every == 0u ? 1 : 2;
    plan_.gradients_in_hbm = config_.states == Placement::kHbm;
    choose_homes();
    lay_out_hbm();
    lay_out_host();
    lay_out_nvme();
    return std::move(plan_);
  }

 private:
  bool weights_stay() const { return config_.parameters == Placement::kHbm; }
  std::uint64_t element_bytes() const { return size_of(config_.weights); }

  void check_config() const {
    if (config_.tile_elements == 0 || config_.tile_elements % kPartitionUnit != 0) {
      throw Error(Code::kInvalidArgument,
                  {"spillway.tile_elements", fmt::format("{} is not a multiple of 1,024", config_.tile_elements), 0,
                   "take 4194304, the default"});
    }
    // Padding has no gradient and no moments: without epsilon its update would be 0 / 0.
    const bool divides = has_exp_avg_sq(config_.optimizer.kind);
    if (divides && !(static_cast<float>(config_.optimizer.epsilon) > 0)) {
      throw Error(Code::kInvalidArgument,
                  {"optimizer.params.eps",
                   fmt::format("is 0 in fp32, so that {} would divide 0 by 0", name_of(config_.optimizer.kind)), 0,
                   "take the default"});
    }
    check_placements();
  }

  // They are written as files beside exported weights.
  void check_attachments() const {
    for (const Attachment& attachment : model_.attachments) {
      if (is_plain_file_name(attachment.name)) continue;
      throw Error(Code::kInvalidArgument,
                  {"attachment \"" + attachment.name + "\"", "is not a plain file name", 0, "leave directories out"});
    }
  }

  void check_placements() const {
    if (config_.states == Placement::kHbm && config_.parameters != Placement::kHbm) {
      throw Error(Code::kInvalidArgument, {"zero_optimization.offload_param",
                                           "is set while offload_optimizer keeps the optimizer states on the device", 0,
                                           "set offload_optimizer.device to \"cpu\" or \"nvme\" too"});
    }
    const bool needs_path = config_.states == Placement::kNvme || config_.parameters == Placement::kNvme;
    if (needs_path && config_.nvme_paths.empty()) {
      throw Error(Code::kInvalidArgument, {"nvme_path", "is missing while something is offloaded to nvme", 0,
                                           "name a directory on the drive in offload_optimizer.nvme_path"});
    }
    if (config_.nvme_paths.size() > kMostStorePaths) {
      throw Error(Code::kInvalidArgument,
                  {"spillway.nvme_paths", fmt::format("{} are named", config_.nvme_paths.size()), 0,
                   fmt::format("at most {}", kMostStorePaths)});
    }
    if (config_.weights == DType::kFloat16) {
      throw Error(Code::kUnsupported, {"fp16", "is not supported by this version", 0, "use bf16"});
    }
  }

  void cut_blocks() {
    if (model_.blocks.empty())
      throw Error(Code::kInvalidArgument, {"model", "has no blocks", 0, "describe at least one"});
    plan_.groups = group_parameters(config_, model_);
    std::set<std::string> names;
    for (std::uint32_t b = 0; b < model_.blocks.size(); ++b) {
      for (const Parameter& parameter : model_.blocks[b].parameters) {
        if (parameter.trainable && parameter.pushes == 0) {
          throw Error(Code::kInvalidArgument, {parameter.name, "is trainable but expects no gradient", 0,
                                               "set Parameter::pushes to 1 or more, or trainable to false"});
        }
        if (names.insert(parameter.name).second) continue;
        throw Error(Code::kInvalidArgument,
                    {parameter.name, "is described twice", 0, "a parameter belongs to one block"});
      }
      BlockPlan block;
      block.partition = partition_block(model_.blocks[b]);
      block.first_tile = static_cast<std::uint32_t>(plan_.tiles.size());
      for (const TileRange& range : cut_tiles(block.partition, config_.tile_elements, 0, 1)) {
        auto groups =
            range.trainable ? ranges_of(block.partition, plan_.groups.parameter[b], range) : std::vector<GroupRange>{};
        plan_.tiles.push_back({b, range, std::move(groups)});
        plan_.tile_places.push_back({.shape = {.count = range.count,
                                               .type = config_.weights,
                                               .trainable = range.trainable,
                                               .optimizer = config_.optimizer.kind}});
      }
      block.tiles = static_cast<std::uint32_t>(plan_.tiles.size()) - block.first_tile;
      plan_.blocks.push_back(std::move(block));
    }
  }

  void order_visits() {
    plan_.visits = model_.visits;
    plan_.visits_given = !model_.visits.empty();
    const auto blocks = static_cast<std::uint32_t>(model_.blocks.size());
    for (const Visit& visit : plan_.visits) {
      if (visit.block >= blocks)
        throw Error(Code::kInvalidArgument,
                    {"model", "a visit names a block that does not exist", 0, "use the indices of the description"});
    }
    if (plan_.visits_given) return;
    for (std::uint32_t b = 0; b < blocks; ++b) plan_.visits.push_back({b, Pass::kForward});
    for (std::uint32_t b = blocks; b-- > 0;) plan_.visits.push_back({b, Pass::kBackward});
  }

  // Homes as configured; "nvme" tiles may still move up to host memory when there is room (cache_in_host).
  void choose_homes() {
    auto home = [](Placement placement) {
      return placement == Placement::kHbm ? Home::kHbm : placement == Placement::kHost ? Home::kHost : Home::kNvme;
    };
    for (TilePlace& tile : plan_.tile_places) {
      tile.home[index_of(Part::kStates)] = home(config_.states);
      Home& weights = tile.home[index_of(Part::kWeights)];
      weights = home(config_.parameters);
      // The CPU update needs the weights beside the states.
      if (weights == Home::kHbm && tile.shape.trainable) weights = home(config_.states);
    }
  }

  // The block's gradient needs an fp32 accumulator; and does it live longer than one visit?
  bool accumulates(std::uint32_t block) const {
    return std::ranges::any_of(model_.blocks[block].parameters,
                               [](const Parameter& p) { return p.trainable && p.pushes > 1; });
  }
  bool visited_once_backward(std::uint32_t block) const {
    return plan_.visits_given && std::ranges::count_if(plan_.visits, [block](const Visit& v) {
                                   return v.block == block && v.pass == Pass::kBackward;
                                 }) == 1;
  }

  void lay_out_hbm() {
    HbmPlan& hbm = plan_.hbm;
    Arena arena(Placement::kHbm, plan_.ledger);
    hbm.workspace = arena.take("model workspace", model_.workspace_bytes);
    std::vector<std::uint64_t> weights, gradients;
    std::uint64_t shared_accumulator = 0;
    for (std::uint32_t b = 0; b < plan_.blocks.size(); ++b) {
      BlockPlan& block = plan_.blocks[b];
      const std::uint64_t bytes = block.partition.elements * element_bytes();
      const std::uint64_t gradient = block.partition.trainable_elements * element_bytes();
      weights.push_back(align_up(bytes, kPage));
      gradients.push_back(gradient);
      if (weights_stay()) place_weights(arena, block);
      if (plan_.gradients_in_hbm) block.gradient = arena.take("gradients", gradient);
      if (!accumulates(b)) continue;
      const std::uint64_t fp32 = block.partition.trainable_elements * 4;
      block.accumulator_shared = visited_once_backward(b);
      if (block.accumulator_shared) {
        shared_accumulator = std::max(shared_accumulator, fp32);
      } else {
        block.accumulator = arena.take("gradient accumulators (fp32)", fp32);
      }
    }
    for (auto* sizes : {&weights, &gradients}) std::ranges::sort(*sizes, std::greater<>());
    const Region shared = arena.take("gradient accumulators (fp32)", shared_accumulator);
    for (BlockPlan& block : plan_.blocks) {
      if (block.accumulator_shared) block.accumulator = {shared.offset, block.partition.trainable_elements * 4};
    }
    if (!plan_.gradients_in_hbm) {
      for (std::uint64_t bytes : {gradients[0], gradients[std::min<std::size_t>(1, gradients.size() - 1)]}) {
        hbm.staging.push_back(arena.take("gradients on their way down", bytes));
      }
    }
    const std::uint64_t leaves = div_up(gradients[0] / element_bytes(), static_cast<std::uint64_t>(kNormLeaf));
    hbm.leaves = arena.take("gradient norm", leaves * 8);
    hbm.norms = arena.take("gradient norm", plan_.blocks.size() * sizeof(NormResult));
    if (plan_.gradients_in_hbm) {
      place_states(arena);
      hbm.finite = arena.take("gradient norm", 4);
    }
    if (!weights_stay()) take_places(arena, weights);
    const std::uint64_t budget = config_.hbm_bytes.value_or(arena.used());
    if (arena.used() > budget) refuse("hbm_bytes", budget, arena.used(), "device memory");
    plan_.ledger.hbm_budget = budget;
  }

  void place_weights(Arena& arena, BlockPlan& block) {
    block.weights = arena.take("weights", block.partition.elements * element_bytes());
    for (std::uint32_t t = block.first_tile; t < block.first_tile + block.tiles; ++t) {
      const std::uint64_t offset = block.weights.offset + plan_.tiles[t].range.first * element_bytes();
      TilePlace& place = plan_.tile_places[t];
      if (place.home[index_of(Part::kWeights)] == Home::kHbm) {
        place.offset[index_of(Part::kWeights)] = offset;
      } else {
        place.hbm_weights = offset;
      }
    }
  }

  void place_states(Arena& arena) {
    for (TilePlace& tile : plan_.tile_places) {
      tile.offset[index_of(Part::kStates)] =
          arena.take("optimizer states", payload_bytes(tile.shape, Part::kStates)).offset;
    }
  }

  // The first place holds the largest block, every other one the second largest: an embedding is often many times a
  // layer's size, and only one place need have room for it. `sizes` falls.
  void take_places(Arena& arena, const std::vector<std::uint64_t>& sizes) {
    const std::uint64_t budget = config_.hbm_bytes.value_or(UINT64_MAX);
    if (arena.used() + sizes[0] > budget) refuse("hbm_bytes", budget, arena.used() + sizes[0], "device memory");
    const std::size_t most = std::min<std::size_t>(kPreferredPlaces, sizes.size());
    for (std::size_t p = 0; p < most; ++p) {
      const std::uint64_t bytes = sizes[std::min<std::size_t>(p, 1)];
      if (arena.used() + bytes > budget) break;
      plan_.hbm.places.push_back(arena.take("weights of blocks on loan", bytes));
    }
  }

  void lay_out_host() {
    HostPlan& host = plan_.host;
    Arena arena(Placement::kHost, plan_.ledger);
    if (!plan_.gradients_in_hbm) {
      for (BlockPlan& block : plan_.blocks) {
        block.gradient = arena.take("gradients", block.partition.trainable_elements * element_bytes());
      }
    }
    host.norms = arena.take("gradient norm", plan_.blocks.size() * sizeof(NormResult) + kPage);
    if (plan_.has_store) host.record = arena.take("manifest record", record_bytes(plan_.tiles.size()));
    for (TilePlace& tile : plan_.tile_places) {
      for (Part part : {Part::kWeights, Part::kStates}) {
        if (tile.home[index_of(part)] == Home::kHost) keep_in_host(arena, tile, part);
      }
    }
    host.buffer_bytes = mover_buffer_bytes(plan_.tile_places);
    host.chunk_bytes = std::clamp(align_up(config_.io_block_bytes, kGranuleChunk), kMiB, 4 * kMiB);
    const bool chunks = !weights_stay() && anything_on_nvme();
    const std::uint64_t least = arena.used() + host.buffer_bytes + (chunks ? kLeastChunks * host.chunk_bytes : 0);
    const std::uint64_t preferred =
        arena.used() + preferred_buffers() * host.buffer_bytes + (chunks ? kPreferredChunks * host.chunk_bytes : 0);
    const std::uint64_t budget = config_.host_bytes.value_or(preferred);
    if (least > budget) refuse("host_bytes", budget, least, "pinned host memory");
    divide_pipeline(arena, budget, chunks);
    cache_in_host(arena, budget);
    plan_.ledger.host_budget = budget;
  }

  static constexpr std::uint64_t kGranuleChunk = 256 * kKiB;

  void keep_in_host(Arena& arena, TilePlace& tile, Part part) {
    tile.home[index_of(part)] = Home::kHost;
    tile.offset[index_of(part)] =
        arena.take(part == Part::kWeights ? "weights" : "optimizer states", extent_bytes(tile.shape, part)).offset;
  }

  bool anything_on_nvme() const {
    return std::ranges::any_of(plan_.tile_places,
                               [](const TilePlace& t) { return t.home[index_of(Part::kWeights)] == Home::kNvme; });
  }

  std::uint64_t preferred_buffers() const { return align_up(nodes_ + kBuffersOnTheWay, nodes_); }

  // Buffers for the update and chunks for fetches, as many of both as the budget gives, up to what is of use.
  void divide_pipeline(Arena& arena, std::uint64_t budget, bool chunks) {
    HostPlan& host = plan_.host;
    std::uint64_t left = budget - arena.used() - host.buffer_bytes - (chunks ? kLeastChunks * host.chunk_bytes : 0);
    std::uint64_t buffer_count = 1, chunk_count = chunks ? kLeastChunks : 0;
    const bool staged = std::ranges::any_of(plan_.tile_places, [](const TilePlace& t) {
      return t.shape.trainable && (written_by_update(t, Part::kWeights) || written_by_update(t, Part::kStates));
    });
    auto grow = [&left](std::uint64_t& count, std::uint64_t most, std::uint64_t bytes) {
      const std::uint64_t more = std::min(most > count ? most - count : 0, bytes > 0 ? left / bytes : 0);
      count += more;
      left -= more * bytes;
    };
    if (chunks) grow(chunk_count, kPreferredChunks / 4, host.chunk_bytes);
    const std::uint64_t buffers = staged ? preferred_buffers() : plan_.gradients_in_hbm ? 1 : nodes_;
    grow(buffer_count, std::min<std::uint64_t>(buffers, plan_.tiles.size()), host.buffer_bytes);
    if (const std::uint64_t odd = buffer_count % nodes_; odd < buffer_count) {
      buffer_count -= odd;
      left += odd * host.buffer_bytes;
    }
    if (chunks) grow(chunk_count, kPreferredChunks, host.chunk_bytes);
    host.buffers_count = static_cast<std::uint32_t>(buffer_count);
    host.buffers = arena.take("tiles being updated", buffer_count * host.buffer_bytes);
    host.chunks = arena.take("weights in flight", chunk_count * host.chunk_bytes);
  }

  // What is left of an explicit budget keeps a fixed set of tiles: the visit order is cyclic, so recency would be the
  // worst choice. Weights first: they are read three times a step, states once.
  void cache_in_host(Arena& arena, std::uint64_t budget) {
    auto fits = [&](const TilePlace& tile, Part part) {
      return arena.used() + align_up(extent_bytes(tile.shape, part), kPage) <= budget;
    };
    for (Part part : {Part::kWeights, Part::kStates}) {
      for (TilePlace& tile : plan_.tile_places) {
        if (tile.home[index_of(part)] != Home::kNvme || !fits(tile, part)) continue;
        keep_in_host(arena, tile, part);
      }
    }
  }

  void lay_out_nvme() {
    if (!plan_.has_store) return;
    std::vector<TileShape> shapes;
    for (const TilePlace& tile : plan_.tile_places) shapes.push_back(tile.shape);
    plan_.scratch_bytes = std::min<std::uint64_t>(64 * kMiB, plan_.host.buffer_bytes * plan_.host.buffers_count);
    plan_.scratch_bytes = align_down(plan_.scratch_bytes, kExtentAlignment);
    plan_.identity = describe_store(config_, model_);
    const auto bytes_with = [&](std::uint32_t slots) {
      TileStore::Created shape = store_shape(plan_);
      shape.slots = slots;
      return TileStore::disk_bytes(shape, config_.nvme_paths.size());
    };
    plan_.store_bytes = bytes_with(plan_.slots);
    const std::uint64_t tiles = slots_bytes(shapes);
    plan_.ledger.reservations.push_back({Placement::kNvme, fmt::format("tiles, {} slots each", plan_.slots), tiles});
    plan_.ledger.reservations.push_back(
        {Placement::kNvme, "manifest, description, probe area", plan_.store_bytes - tiles});
    plan_.ledger.nvme_budget = config_.nvme_bytes.value_or(plan_.store_bytes);
    if (plan_.store_bytes > plan_.ledger.nvme_budget) {
      std::string hint = fmt::format("set spillway.nvme_bytes to \"{}\" or more", size_text(plan_.store_bytes));
      if (plan_.slots == 2 && bytes_with(1) <= plan_.ledger.nvme_budget) {
        hint += ", or spillway.commit_every to 0 (one slot a tile, half the disk, no resume)";
      }
      throw Error(Code::kDoesNotFit, {"spillway.nvme_bytes",
                                      fmt::format("{} is too small: this plan needs at least {} of disk",
                                                  size_text(plan_.ledger.nvme_budget), size_text(plan_.store_bytes)),
                                      0, hint});
    }
  }

  std::uint64_t slots_bytes(const std::vector<TileShape>& shapes) const {
    std::uint64_t sum = 0;
    for (const TileShape& shape : shapes) {
      const std::uint64_t slot = extent_bytes(shape, Part::kWeights) + extent_bytes(shape, Part::kStates);
      sum += slot * (shape.trainable ? plan_.slots : 1);
    }
    return sum;
  }

  const Config& config_;
  const ModelDescription& model_;
  const std::uint64_t nodes_;
  Plan plan_;
};

}  // namespace

Plan make_plan(const Config& config, const ModelDescription& model, unsigned nodes) {
  return Planner(config, model, nodes).run();
}

TileStore::Created store_shape(const Plan& plan) {
  TileStore::Created shape;
  for (const TilePlace& tile : plan.tile_places) shape.tiles.push_back(tile.shape);
  shape.slots = plan.slots;
  shape.scratch_bytes = plan.scratch_bytes;
  shape.identity = plan.identity;
  return shape;
}

std::uint64_t Ledger::total(Placement tier) const {
  std::uint64_t sum = 0;
  for (const Reservation& line : reservations) sum += line.tier == tier ? line.bytes : 0;
  return sum;
}

std::string tile_name(const Plan& plan, const ModelDescription& model, std::uint32_t tile) {
  const TilePlan& t = plan.tiles[tile];
  const BlockPlan& block = plan.blocks[t.block];
  std::string names;
  for (std::size_t p = 0; p < block.partition.parameters.size(); ++p) {
    const ParameterPlace& place = block.partition.parameters[p];
    if (place.first >= t.range.first + t.range.count || place.first + place.count <= t.range.first) continue;
    if (!names.empty()) {
      names += " …";
      break;
    }
    names = model.blocks[t.block].parameters[p].name;
  }
  return fmt::format("tile {} of block {} ({})", tile - block.first_tile, model.blocks[t.block].name, names);
}

}  // namespace spillway
