#include "src/plan/layout.h"

#include <algorithm>
#include <functional>
#include <optional>
#include <utility>

#include "kernels/norm.h"

namespace spillway {
namespace {

constexpr std::uint32_t kPreferredPlaces = 3;  // one computing, one arriving, one being given back

class HbmLayout {
 public:
  // `kept`: blocks that have places of their own before others share any.
  explicit HbmLayout(PlanDraft& draft, std::vector<std::uint32_t> kept = {})
      : draft_(draft), config_(draft.config), model_(draft.model), plan_(draft.plan), kept_(std::move(kept)) {}

  void run() {
    HbmPlan& hbm = plan_.hbm;
    PlanArena arena(Placement::kHbm, plan_.ledger);
    hbm.workspace = arena.take("model workspace", model_.workspace_bytes);
    std::vector<std::uint64_t> weights, gradients;
    std::uint64_t shared_accumulator = 0, most_weights = 0, most_trainable = 0;
    std::vector<std::uint32_t> accumulating;  // with other blocks' gradients between their own
    for (std::uint32_t b = 0; b < plan_.blocks.size(); ++b) {
      BlockPlan& block = plan_.blocks[b];
      const std::uint64_t bytes = block.partition.elements * draft_.element_bytes();
      // Of the rank that has most, so that all lay out the same.
      const std::uint64_t gradient = gradient_elements(block.partition, {0, plan_.rank.count}) * draft_.element_bytes();
      most_trainable = std::max(most_trainable, block.partition.trainable_elements);
      if (!std::ranges::binary_search(kept_, b)) weights.push_back(align_up(bytes, kPage));
      if (!block_is_held(b)) most_weights = std::max(most_weights, align_up(bytes, kPage));
      gradients.push_back(gradient);
      if (draft_.weights_stay()) place_weights(arena, block);
      if (plan_.gradients_in_hbm) {
        block.gradient_home = Placement::kHbm;
        block.gradient = arena.take("gradients", gradient);
      }
      if (!accumulates(b)) continue;
      block.accumulator_shared = visited_once_backward(b) && !takes_any_number(model_.blocks[b]);
      if (block.accumulator_shared) {
        shared_accumulator = std::max(shared_accumulator, accumulator_bytes(b));
      } else {
        accumulating.push_back(b);
      }
    }
    if (!draft_.weights_stay()) place_own_weights(arena);
    for (auto* sizes : {&weights, &gradients}) std::ranges::sort(*sizes, std::greater<>());
    const Region shared = arena.take(kAccumulators, shared_accumulator);
    for (std::uint32_t b = 0; b < plan_.blocks.size(); ++b) {
      BlockPlan& block = plan_.blocks[b];
      if (block.accumulator_shared) block.accumulator = {shared.offset, accumulator_bytes(b)};
    }
    if (!plan_.gradients_in_hbm) {
      for (std::uint64_t bytes : {gradients[0], gradients[std::min<std::size_t>(1, gradients.size() - 1)]}) {
        hbm.staging.push_back(arena.take("gradients on their way down", bytes));
      }
    }
    hbm.leaves = arena.take("gradient norm", most_trainable / kNormLeaf * 8);
    hbm.norms = arena.take("gradient norm", plan_.blocks.size() * sizeof(NormResult));
    if (plan_.gradients_in_hbm) {
      place_states(arena);
      hbm.finite = arena.take("gradient norm", 4);
    }
    // What everything needs comes first, then what overlaps copies with compute, then what saves work: an activation
    // that stays costs no link a byte, kept inner activations save their block's second forward. A place more for
    // weights than are of use in turn saves 2 bytes of reading a parameter, so it comes last.
    const std::uint64_t activations = least_activation_bytes(model_) + shared_insides_bytes();
    std::uint64_t held = 0;  // whatever else there is room for
    for (const std::uint32_t b : kept_) held += block_is_held(b) ? place_bytes(b) : 0;
    const std::uint64_t rest = (draft_.weights_stay() ? 0 : most_weights) + held + activations;
    place_accumulators(arena, accumulating, rest);
    const std::uint64_t least = arena.used() + rest;
    if (least > budget()) refuse_budget("hbm_bytes", budget(), least, "of device memory");
    for (const std::uint32_t b : kept_) take_place(arena, place_bytes(b), b);
    if (!draft_.weights_stay()) take_places(arena, weights, kLeastPlaces, budget() - activations);
    take_more_accumulators(arena, budget() - activations);
    if (!draft_.weights_stay()) {
      take_places(arena, weights, preferred_places(), budget() - activations);
      follow_knobs();
      take_owned_places(arena, budget() - activations);
    }
    place_activations(draft_, arena, budget() - shared_insides_bytes());
    keep_accumulators(arena, budget() - shared_insides_bytes());
    place_insides(arena, config_.hbm_bytes.value_or(0));
    const std::uint64_t left = config_.hbm_bytes ? budget() - arena.used() : 0;
    const std::uint64_t may_live = most_live_bytes() - std::min(most_live_bytes(), live_bytes_);
    room_ = {.bytes = shared_bytes() + std::min(left, may_live), .shared = shared_places()};
    if (!draft_.weights_stay()) take_more_places(arena, weights);
    plan_.ledger.hbm_budget = config_.hbm_bytes.value_or(arena.used());
  }

  WeightsRoom weights_room() const { return room_; }

 private:
  bool block_is_held(std::uint32_t block) const {
    return model_.blocks[block].held && std::ranges::binary_search(kept_, block);
  }
  // The block's gradient needs an fp32 accumulator; and does it live longer than one visit?
  bool accumulates(std::uint32_t block) const {
    const bool joined = plan_.peers.count > 1;  // with other ranks', before it is rounded
    return std::ranges::any_of(model_.blocks[block].parameters,
                               [joined](const Parameter& p) { return p.trainable && (joined || p.pushes > 1); });
  }
  bool visited_once_backward(std::uint32_t block) const {
    return plan_.visits_given && std::ranges::count_if(plan_.visits, [block](const Visit& v) {
                                   return v.block == block && v.pass == Pass::kBackward;
                                 }) == 1;
  }

  std::uint64_t accumulator_bytes(std::uint32_t block) const {
    return plan_.blocks[block].partition.trainable_elements * 4 * plan_.blocks[block].sum_slots;
  }

  // A place for each, where an explicit budget leaves room for the rest. Else their home is host memory, and they take
  // turns in at least one that fits any of them.
  void place_accumulators(PlanArena& arena, std::vector<std::uint32_t>& blocks, std::uint64_t rest) {
    std::uint64_t all = 0;
    for (const std::uint32_t b : blocks) all += align_up(accumulator_bytes(b), kPage);
    if (blocks.size() < 2 || arena.used() + all + rest <= budget()) {
      for (const std::uint32_t b : blocks)
        plan_.blocks[b].accumulator = arena.take(kAccumulators, accumulator_bytes(b));
      return;
    }
    std::ranges::stable_sort(blocks, std::greater<>(), [this](std::uint32_t b) { return accumulator_bytes(b); });
    for (const std::uint32_t b : blocks) plan_.blocks[b].accumulator_home = {0, accumulator_bytes(b)};
    moving_ = blocks;
    plan_.hbm.accumulators.push_back(arena.take(kAccumulators, accumulator_bytes(moving_[0])));
  }

  // One more, so that one comes and another leaves while a block computes.
  void take_more_accumulators(PlanArena& arena, std::uint64_t budget) {
    if (moving_.empty() || arena.used() + align_up(accumulator_bytes(moving_[1]), kPage) > budget) return;
    plan_.hbm.accumulators.push_back(arena.take(kAccumulators, accumulator_bytes(moving_[1])));
  }

  // Each that stays saves both ways of every visit between its block's first and last. The two largest move: the places
  // have room for them.
  void keep_accumulators(PlanArena& arena, std::uint64_t budget) {
    for (std::size_t i = 2; i < moving_.size(); ++i) {
      const std::uint64_t bytes = accumulator_bytes(moving_[i]);
      if (arena.used() + align_up(bytes, kPage) > budget) continue;
      plan_.blocks[moving_[i]].accumulator = arena.take(kAccumulators, bytes);
      plan_.blocks[moving_[i]].accumulator_home.reset();
    }
  }

  void place_weights(PlanArena& arena, BlockPlan& block) {
    block.weights = arena.take("weights", block.partition.elements * draft_.element_bytes());
    for (std::uint32_t t = block.first_tile; t < block.first_tile + block.tiles; ++t) {
      const std::uint64_t offset = block.weights.offset + plan_.tiles[t].range.first * draft_.element_bytes();
      TilePlace& place = plan_.tile_places[t];
      if (place.home[index_of(Part::kWeights)] == Placement::kHbm) {
        place.offset[index_of(Part::kWeights)] = offset;
      } else {
        place.hbm_weights = offset;
      }
    }
  }

  // A rank's slices of blocks that it gets the rest of from others.
  void place_own_weights(PlanArena& arena) {
    place_own(arena, "weights", Part::kWeights, [this](bool trainable) {
      return config_.parameters == Placement::kHbm && (!trainable || plan_.gradients_in_hbm);
    });
  }
  void place_states(PlanArena& arena) {
    place_own(arena, "optimizer states", Part::kStates, [](bool) { return true; });
  }
  // As much as the rank takes that has most, so that all lay out the same.
  void place_own(PlanArena& arena, const char* purpose, Part part, const std::function<bool(bool trainable)>& here) {
    const std::uint64_t before = arena.used();
    for (TilePlace& tile : plan_.tile_places) {
      if (here(tile.shape.trainable))
        tile.offset[index_of(part)] = arena.take(purpose, payload_bytes(tile.shape, part)).offset;
    }
    const std::uint64_t own = arena.used() - before;
    if (plan_.rank.count == 1 || own == 0) return;
    std::uint64_t most = own;
    for (std::uint32_t r = 0; r < plan_.rank.count; ++r) {
      std::uint64_t bytes = 0;
      for (const BlockPlan& block : plan_.blocks) {
        for (const TileRange& range : cut_tiles(block.partition, config_.tile_elements, {r, plan_.rank.count})) {
          TileShape shape = plan_.tile_places[0].shape;
          shape.count = range.count, shape.trainable = range.trainable, shape.states = range.states;
          if (here(range.trainable)) bytes += align_up(payload_bytes(shape, part), kPage);
        }
      }
      most = std::max(most, bytes);
    }
    if (most > own) arena.take(purpose, most - own);
  }

  std::uint64_t budget() const { return config_.hbm_bytes.value_or(UINT64_MAX); }

  // The first place holds the largest block, the next ones the second largest: an embedding is often many times a
  // layer's size, and only one place need have room for it. `sizes` falls. Two places are kept whatever
  // max_live_parameters says: with one, fetch and compute take turns.
  void take_places(PlanArena& arena, const std::vector<std::uint64_t>& sizes, std::size_t most, std::uint64_t budget) {
    for (std::size_t p = shared_places(); p < std::min(most, sizes.size()); ++p) {
      const std::uint64_t bytes = sizes[std::min<std::size_t>(p, 1)];
      if (arena.used() + bytes > budget || (p >= kLeastPlaces && live_bytes_ + bytes > most_live_bytes())) break;
      take_place(arena, bytes, std::nullopt);
    }
  }

  // Of the blocks whose inner activations are not kept, one micro-batch at a time.
  std::uint64_t shared_insides_bytes() const {
    std::uint64_t most = 0;
    for (const Block& block : model_.blocks) most = std::max(most, block.inside_bytes);
    return align_up(most, kPage);
  }

  // Kept for as many blocks as fit; with all of them there is no need for memory that blocks share.
  void place_insides(PlanArena& arena, std::uint64_t budget) {
    std::uint64_t all = 0;
    for (const Block& block : model_.blocks) all += align_up(block.inside_bytes * model_.micro_batches, kPage);
    const bool fit = arena.used() + all <= budget;
    if (!fit) plan_.hbm.insides = arena.take("inner activations of blocks, in turn", shared_insides_bytes());
    for (std::size_t b = 0; b < plan_.blocks.size(); ++b) {
      const std::uint64_t one = model_.blocks[b].inside_bytes, bytes = one * model_.micro_batches;
      if (one == 0) continue;
      BlockPlan& block = plan_.blocks[b];
      block.insides_kept = arena.used() + align_up(bytes, kPage) <= budget;
      block.insides = block.insides_kept ? arena.take("inner activations of blocks, kept for backward", bytes)
                                         : Region{plan_.hbm.insides.offset, one};
    }
  }

  std::uint64_t place_bytes(std::uint32_t block) const {
    return align_up(plan_.blocks[block].partition.elements * draft_.element_bytes(), kPage);
  }

  void take_place(PlanArena& arena, std::uint64_t bytes, std::optional<std::uint32_t> owner) {
    plan_.hbm.places.push_back(arena.take("weights of blocks on loan", bytes));
    plan_.hbm.owners.push_back(owner);
    live_bytes_ += bytes;
  }

  std::uint64_t bytes_of(std::uint64_t parameters) const {
    return parameters < UINT64_MAX / kPage ? parameters * draft_.element_bytes() : UINT64_MAX;
  }
  std::uint64_t most_live_bytes() const { return bytes_of(config_.knobs.max_live_parameters.value_or(UINT64_MAX)); }

  void follow_knobs() {
    plan_.hbm.reuse_bytes = bytes_of(config_.knobs.max_reuse_distance.value_or(UINT64_MAX));
    plan_.hbm.prefetch_bytes = bytes_of(config_.knobs.prefetch_bucket_size.value_or(UINT64_MAX));
  }

  // param_persistence_threshold: small parameters stay on the device. Weights move in blocks here, so that it means
  // blocks that hold nothing else.
  void take_owned_places(PlanArena& arena, std::uint64_t budget) {
    if (!config_.knobs.param_persistence_threshold) return;
    const std::uint64_t most = config_.knobs.model_persistence_threshold.value_or(UINT64_MAX);
    std::uint64_t persistent = 0;
    for (std::uint32_t b = 0; b < plan_.blocks.size(); ++b) {
      const BlockPartition& block = plan_.blocks[b].partition;
      const bool small = std::ranges::all_of(block.parameters, [this](const ParameterPlace& p) {
        return p.count <= *config_.knobs.param_persistence_threshold;
      });
      const std::uint64_t bytes = place_bytes(b);
      if (!small || std::ranges::binary_search(kept_, b)) continue;
      if (persistent + block.elements > most || arena.used() + bytes > budget) continue;
      persistent += block.elements;
      take_place(arena, bytes, b);
    }
  }

  // What is left of an explicit budget: blocks that stay in HBM between forward and backward are not fetched again. A
  // byte more of a place saves a byte a step, so the places are as large as the next blocks, largest first. Left alone
  // where they would bring nothing.
  void take_more_places(PlanArena& arena, const std::vector<std::uint64_t>& sizes) {
    if (!config_.hbm_bytes) return;
    const std::size_t before = plan_.hbm.places.size(), owned = before - shared_places() - kept_.size();
    HbmPlan with = plan_.hbm;
    std::uint64_t used = arena.used(), live = live_bytes_;
    for (std::size_t p = shared_places(); p + owned < sizes.size(); ++p) {
      if (used + sizes[p] > budget() || live + sizes[p] > most_live_bytes()) continue;
      with.places.push_back({0, sizes[p]});
      with.owners.emplace_back();
      used += sizes[p];
      live += sizes[p];
    }
    const auto hits = [this](const HbmPlan& hbm) {
      return std::ranges::count(planned_visits(plan_, hbm), false, &VisitPlace::fetch);
    };
    if (hits(with) <= hits(plan_.hbm)) return;
    std::vector<bool> visited(with.places.size());
    for (const VisitPlace& visit : planned_visits(plan_, with)) visited[visit.place] = true;
    for (std::size_t p = before; p < with.places.size(); ++p) {
      if (visited[p]) take_place(arena, with.places[p].bytes, std::nullopt);
    }
  }

  std::size_t shared_places() const {
    return static_cast<std::size_t>(
        std::ranges::count_if(plan_.hbm.owners, [](const auto& owner) { return !owner.has_value(); }));
  }

  // With nothing but frozen blocks to take turns a place less is a block more that stays.
  std::size_t preferred_places() const {
    return kept_.empty() || anything_trained(plan_) ? kPreferredPlaces : kLeastPlaces;
  }

  std::uint64_t shared_bytes() const {
    std::uint64_t bytes = 0;
    for (std::size_t p = 0; p < plan_.hbm.places.size(); ++p) {
      if (!plan_.hbm.owners[p]) bytes += align_up(plan_.hbm.places[p].bytes, kPage);
    }
    return bytes;
  }

  PlanDraft& draft_;
  const Config& config_;
  const ModelDescription& model_;
  Plan& plan_;
  const std::vector<std::uint32_t> kept_;  // rising
  WeightsRoom room_;
  std::uint64_t live_bytes_ = 0;       // of all places
  std::vector<std::uint32_t> moving_;  // blocks whose accumulators have their home in host memory, largest first
};

}  // namespace

bool takes_any_number(const Block& block) {
  return std::ranges::any_of(block.parameters,
                             [](const Parameter& p) { return p.trainable && p.pushes == kAnyPushes; });
}

// Frozen blocks stay from step to step where that fetches less than what the same room would keep from forward to
// backward.
void lay_out_hbm(PlanDraft& draft) {
  std::vector<std::uint32_t> held;
  for (std::uint32_t b = 0; !draft.weights_stay() && b < draft.model.blocks.size(); ++b) {
    if (draft.model.blocks[b].held) held.push_back(b);
  }
  std::optional<PlanDraft> other;
  if (!draft.weights_stay() && !blocks_that_may_stay(draft.plan).empty()) other.emplace(draft);
  HbmLayout layout(draft, held);
  layout.run();
  if (!other) return;
  std::vector<std::uint32_t> kept = choose_kept(draft.plan, layout.weights_room());
  own_where_alone(draft.plan);
  if (kept.empty()) return;
  kept.insert(kept.end(), held.begin(), held.end());
  std::ranges::sort(kept);
  HbmLayout(*other, std::move(kept)).run();
  own_where_alone(other->plan);
  if (fetched_bytes(other->plan) < fetched_bytes(draft.plan)) draft.plan = std::move(other->plan);
}

}  // namespace spillway
