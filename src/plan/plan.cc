#include "src/plan/plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <set>
#include <utility>

#include "spillway/error.h"
#include "spillway/io_queue.h"
#include "src/plan/communication.h"
#include "src/plan/layout.h"
#include "src/plan/plan_summary.h"
#include "src/plan/state_sections.h"
#include "swap/policy/part_sums.h"
#include "swap/superblock.h"

namespace spillway {
namespace {

class Planner {
 public:
  Planner(const Config& config, const ModelDescription& model, unsigned nodes, Rank peers)
      : draft_{config, model, nodes, {}}, config_(config), model_(model), plan_(draft_.plan), trains_(trains(model)) {
    plan_.peers = peers;
    plan_.rank = config.stage == 0 ? Rank{} : peers;
  }

  Plan run() {
    prepare();
    lay_out_hbm(draft_);
    if (!updates_inside_backward()) lay_out_host(draft_);
    mark_speculative();
    lay_out_nvme(draft_);
    return std::move(plan_);
  }

  Plan run_with_caller(CallerMemory memory) {
    draft_.caller = memory;
    prepare();
    lay_out_host(draft_);
    lay_out_nvme(draft_);
    return std::move(plan_);
  }

  // What every budget has in common; after it, what HBM alone does with the configuration's.
  void prepare() {
    check_config();
    check_model(model_);
    check_weight_type(model_, config_.weights);
    cut_blocks();
    part_sums();
    order_visits();
    plan_.has_store = !config_.nvme_paths.empty();
    plan_.slots = config_.commit_every == 0u ? 1 : 2;
    plan_.gradients_in_hbm = states() == Placement::kHbm;
    choose_homes();
  }
  Plan hbm_alone() const {
    PlanDraft draft = draft_;
    lay_out_hbm(draft);
    return std::move(draft.plan);
  }

 private:
  static bool trains(const ModelDescription& model) {
    return std::ranges::any_of(
        model.blocks, [](const Block& block) { return std::ranges::any_of(block.parameters, &Parameter::trainable); });
  }
  // A model of which nothing is trained has no states: nobody need say where they would lie.
  Placement states() const { return trains_ ? config_.states : config_.parameters; }

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
    check_reduced_states(config_, model_);
    check_placements();
  }

  void check_placements() const {
    if (draft_.caller && config_.states == Placement::kHbm) {
      throw Error(Code::kInvalidArgument, {"zero_optimization.offload_optimizer",
                                           "leaves the optimizer states on the device, which is the caller's", 0,
                                           "set offload_optimizer.device to \"cpu\" or \"nvme\""});
    }
    if (!draft_.caller && states() == Placement::kHbm && config_.parameters != Placement::kHbm) {
      throw Error(Code::kInvalidArgument, {"zero_optimization.offload_param",
                                           "is set while offload_optimizer keeps the optimizer states on the device", 0,
                                           "set offload_optimizer.device to \"cpu\" or \"nvme\" too"});
    }
    const bool parameters_on_nvme = !draft_.caller && config_.parameters == Placement::kNvme;
    const bool needs_path = states() == Placement::kNvme || parameters_on_nvme;
    if (needs_path && config_.nvme_paths.empty()) {
      throw Error(Code::kInvalidArgument, {"nvme_path", "is missing while something is offloaded to nvme", 0,
                                           std::string("name a directory on the drive in offload_") +
                                               (trains_ ? "optimizer" : "param") + ".nvme_path"});
    }
    if (config_.nvme_paths.size() > kMostStorePaths) {
      throw Error(Code::kInvalidArgument,
                  {"spillway.nvme_paths", fmt::format("{} are named", config_.nvme_paths.size()), 0,
                   fmt::format("at most {}", kMostStorePaths)});
    }
    if (config_.stage == 0 && plan_.peers.count > 1 && !config_.nvme_paths.empty()) {
      throw Error(Code::kUnsupported, {"zero_optimization.stage",
                                       "0 leaves all of the model on each of several ranks, "
                                       "and a store is of what one rank owns",
                                       0, "set it to 1, 2 or 3, or leave nvme_path out"});
    }
    const std::size_t paths = std::max<std::size_t>(1, config_.nvme_paths.size());
    if (config_.io_depth * paths > kLargestDepth) {
      throw Error(Code::kInvalidArgument,
                  {"aio.queue_depth", fmt::format("is {} for each of {} paths", config_.io_depth, paths), 0,
                   fmt::format("choose 1 to {}", kLargestDepth / paths)});
    }
  }

  void cut_blocks() {
    if (model_.blocks.empty())
      throw Error(Code::kInvalidArgument, {"model", "has no blocks", 0, "describe at least one"});
    plan_.groups = group_parameters(config_, model_);
    std::uint64_t elements = 0;  // of the blocks before
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
      block.partition = partition_block(model_.blocks[b],
                                        [this](const Parameter& parameter) { return states_of(config_, parameter); });
      block.shares = share_sections(block.partition, plan_.rank);
      block.first_tile = static_cast<std::uint32_t>(plan_.tiles.size());
      for (const TileRange& range : cut_tiles(block.partition, config_.tile_elements, plan_.rank)) {
        std::vector<GroupRange> groups;
        if (range.trainable) ranges_of(block.partition, plan_.groups.parameter[b], range, groups);
        plan_.tiles.push_back({b, range, block.gradient_elements, std::move(groups)});
        block.gradient_elements += range.trainable ? range.count : 0;
        plan_.tile_places.push_back({.shape = {.count = range.count,
                                               .type = config_.weights,
                                               .trainable = range.trainable,
                                               .optimizer = config_.optimizer.kind,
                                               .states = range.states,
                                               .index = elements + range.first}});
      }
      elements += block.partition.elements;
      block.tiles = static_cast<std::uint32_t>(plan_.tiles.size()) - block.first_tile;
      plan_.blocks.push_back(std::move(block));
    }
    if (plan_.tiles.empty()) {
      throw Error(Code::kUnsupported, {"model",
                                       fmt::format("is too small for {} ranks: rank {} would own nothing of it",
                                                   plan_.rank.count, plan_.rank.index),
                                       0, "start fewer"});
    }
  }

  // With parts, every parameter has pushes of each; of a tied one those of one use come before those of another.
  void part_sums() {
    const std::uint32_t groups = config_.sum_groups, ranks = plan_.peers.count;
    const std::uint64_t micro_batches = std::uint64_t{config_.gradient_accumulation} * ranks;
    const bool of_ranks = groups == 1;  // a part each, in whatever order is fastest
    if (!of_ranks && (!std::has_single_bit(groups) || micro_batches % groups != 0 || groups % ranks != 0)) {
      const std::string by = ranks > 1 ? fmt::format(" on {} ranks", ranks) : "";
      throw Error(
          Code::kInvalidArgument,
          {"spillway.sum_groups", fmt::format("{} with {} micro-batches a step{}", groups, micro_batches, by), 0,
           ranks > 1 ? "take a power of two that divides the micro-batches of all ranks, and is a multiple of the ranks"
                     : "take a power of two that divides gradient_accumulation_steps"});
    }
    if (const std::string why = refusal_of_communication(config_); !why.empty())
      throw Error(Code::kInvalidArgument, {"communication_data_type", why, 0, kOneOfTheTwo});
    const std::uint32_t parts = of_ranks ? 1 : groups / ranks;
    plan_.micro_batches = config_.gradient_accumulation;
    plan_.sum_parts = parts;
    plan_.wire = ranks > 1 ? config_.communication : DType::kFloat32;
    plan_.sums = of_ranks && ranks > 1 ? Sums::kFastest : Sums::kTree;
    if (parts == 1) return;
    for (std::uint32_t b = 0; b < plan_.blocks.size(); ++b) {
      BlockPlan& block = plan_.blocks[b];
      for (const Parameter& parameter : model_.blocks[b].parameters) {
        if (!parameter.trainable) continue;
        if (parameter.pushes != kAnyPushes && parameter.pushes % parts != 0) {
          throw Error(Code::kInvalidArgument,
                      {parameter.name,
                       fmt::format("expects {} gradients a step, which are no {} parts", parameter.pushes, parts), 0,
                       "push each part's (Gradient::micro_batch), or leave spillway.sum_groups out"});
        }
        block.sums_in_order &= parameter.in_order;
      }
      block.sum_slots = PartSums::slots(parts, block.sums_in_order);
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
    for (TilePlace& tile : plan_.tile_places) {
      tile.home[index_of(Part::kStates)] = states();
      Home& weights = tile.home[index_of(Part::kWeights)];
      weights = draft_.caller ? std::nullopt : Home(config_.parameters);
      // The CPU update needs the weights beside the states.
      if (weights == Placement::kHbm && tile.shape.trainable) weights = states();
    }
  }

  // What an update inside backward overwrote is still there, in the slots of the last commit.
  bool rolls_back() const {
    return states() == Placement::kNvme && config_.parameters == Placement::kNvme &&
           config_.commit_every.value_or(1) == 1 && draft_.nodes <= 1;
  }

  // Without clipping a block that can be rolled back need not wait for the other gradients. False: the host tier is not
  // laid out yet. Where memory caches half of the tiles and more, that saves more than updating early does, and only
  // what lies on NVMe can be rolled back.
  bool updates_inside_backward() {
    if (config_.gradient_clipping > 0 || !rolls_back()) return false;
    try {
      PlanDraft late = draft_;
      lay_out_host(late);
      if (2 * bytes_on_nvme(late.plan) <= bytes_on_nvme(plan_)) return false;
    } catch (const Error&) {  // gradients do not fit; early ones take less
    }
    const Plan none_early = plan_;
    mark_early();
    plan_.early_blocks = true;
    lay_out_host(draft_);
    if (std::ranges::any_of(plan_.blocks, &BlockPlan::early)) return true;
    plan_ = none_early;
    return false;
  }

  static std::uint64_t bytes_on_nvme(const Plan& plan) {
    std::uint64_t sum = 0;
    for (const TilePlace& tile : plan.tile_places) {
      for (Part part : {Part::kWeights, Part::kStates}) {
        if (tile.home[index_of(part)] == Placement::kNvme) sum += extent_bytes(tile.shape, part);
      }
    }
    return sum;
  }

  // With clipping the gradients stay, so that a block that can be rolled back may be updated on a guess, and once more.
  void mark_speculative() {
    if (config_.gradient_clipping <= 0 || !rolls_back()) return;
    for (std::uint32_t b = 0; b < plan_.blocks.size(); ++b) {
      BlockPlan& block = plan_.blocks[b];
      const auto tiles = std::span(plan_.tile_places).subspan(block.first_tile, block.tiles);
      const bool on_nvme = std::ranges::all_of(tiles, [](const TilePlace& tile) {
        return std::ranges::all_of(tile.home, [](const Home& home) { return home == Placement::kNvme; });
      });
      block.speculative = on_nvme && block.gradient_home == Placement::kHost && may_be_early(b);
    }
  }

  // All but the last block visited, and those whose gradients are complete with its: the others are known by then.
  void mark_early() {
    for (std::uint32_t b = 0; b < plan_.blocks.size(); ++b) plan_.blocks[b].early = may_be_early(b);
  }
  bool may_be_early(std::uint32_t b) const {
    return b != plan_.visits.back().block && !model_.blocks[b].held &&
           plan_.blocks[b].partition.trainable_elements > 0 && !takes_any_number(model_.blocks[b]);
  }

  PlanDraft draft_;
  const Config& config_;
  const ModelDescription& model_;
  Plan& plan_;
  const bool trains_;
};

}  // namespace

Plan make_optimizer_plan(const Config& config, const ModelDescription& model, CallerMemory memory) {
  return Planner(config, model, 1, {}).run_with_caller(memory);
}

std::string size_text(std::uint64_t bytes) {
  if (bytes > 0 && bytes % kMiB == 0) return fmt::format("{}MiB", bytes / kMiB);
  if (bytes > 0 && bytes % kKiB == 0) return fmt::format("{}KiB", bytes / kKiB);
  return fmt::format("{}B", bytes);
}

void refuse_budget(const char* key, std::uint64_t have, std::uint64_t need, const char* what) {
  throw Error(Code::kDoesNotFit, fmt::format("spillway.{}", key),
              fmt::format("{} is too small: this plan needs at least {} {}", size_text(have), size_text(need), what), 0,
              {Remedy::kRaiseBudget, {key, size_text(need)}});
}

Plan make_plan(const Config& config, const ModelDescription& model, unsigned nodes, Rank peers) {
  Plan plan = Planner(config, model, nodes, peers).run();
  plan.facts =
      describe_plan(config, plan, [&](const Config& other) { return Planner(other, model, nodes, peers).run(); });
  return plan;
}

std::uint64_t bytes_to_keep_insides(const Config& config, const ModelDescription& model, const Plan& plan) {
  const auto count = [](const Plan& in) { return std::ranges::count_if(in.blocks, &BlockPlan::insides_kept); };
  const auto kept = count(plan);
  Config more = config;
  Planner planner(more, model, 1, plan.peers);  // nodes are of no concern to HBM
  planner.prepare();
  const auto keeps_another = [&](std::uint64_t bytes) {
    more.hbm_bytes = plan.ledger.hbm_budget + bytes;
    return count(planner.hbm_alone()) > kept;
  };
  std::uint64_t too_few = 0, enough = kMiB;
  while (!keeps_another(enough)) too_few = std::exchange(enough, 2 * enough);
  while (enough - too_few > kMiB) {
    const std::uint64_t middle = align_down(too_few + (enough - too_few) / 2, kMiB);
    (keeps_another(middle) ? enough : too_few) = middle;
  }
  return enough;
}

std::vector<VisitPlace> planned_visits(const Plan& plan, const HbmPlan& hbm) {
  std::vector<std::uint32_t> blocks;
  for (const Visit& visit : plan.visits) blocks.push_back(visit.block);
  std::vector<std::uint64_t> block_bytes, place_bytes;
  for (const BlockPlan& block : plan.blocks) {
    block_bytes.push_back(block.partition.elements * size_of(plan.tile_places[0].shape.type));
  }
  for (const Region& place : hbm.places) place_bytes.push_back(place.bytes);
  const auto filled = places_that_stay(hbm.owners, frozen_blocks(plan));
  return assign_places(blocks, block_bytes, place_bytes,
                       {.owners = hbm.owners, .reuse_bytes = hbm.reuse_bytes, .filled = filled});
}

std::vector<std::uint8_t> frozen_blocks(const Plan& plan) {
  std::vector<std::uint8_t> frozen;
  for (const BlockPlan& block : plan.blocks) frozen.push_back(block.partition.trainable_elements == 0);
  return frozen;
}

PlannedHits planned_hits(const Plan& plan) {
  PlannedHits hits;
  if (!plan.hbm.places.empty()) {
    hits.visits = plan.visits.size();
    for (const VisitPlace& visit : planned_visits(plan, plan.hbm)) hits.hits += !visit.fetch;
  }
  if (plan.gradients_in_hbm) return hits;
  for (const TilePlace& tile : plan.tile_places) {
    if (!tile.shape.trainable) continue;
    for (Part part : {Part::kWeights, Part::kStates}) {
      const std::uint64_t bytes = payload_bytes(tile.shape, part);
      hits.tile_bytes += bytes;
      hits.tile_hit_bytes += tile.home[index_of(part)] == Placement::kNvme ? 0 : bytes;
    }
  }
  return hits;
}

RecordForm record_form(const Plan& plan) {
  RecordForm form{.fingerprint = plan.identity.fingerprint, .tiles = plan.tiles.size(), .parameters = 0};
  for (const BlockPlan& block : plan.blocks) form.parameters += block.partition.parameters.size();
  return form;
}

StoreShape store_shape(const Plan& plan) {
  StoreShape shape;
  for (const TilePlace& tile : plan.tile_places) shape.tiles.push_back(tile.shape);
  shape.parameters = record_form(plan).parameters;
  shape.slots = plan.slots;
  shape.scratch_bytes = plan.scratch_bytes;
  shape.least_scratch_bytes = plan.spill_bytes + plan.nvme.activations.bytes;
  shape.identity = plan.identity;
  return shape;
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
