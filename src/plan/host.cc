#include "src/plan/layout.h"

#include <algorithm>
#include <functional>

#include "kernels/checksum.h"
#include "kernels/norm.h"
#include "swap/manifest.h"

namespace spillway {
namespace {

// Tiles on their way while the update computes on one for each node.
constexpr std::uint64_t kBuffersRead = 2, kBuffersWritten = 1;
constexpr std::size_t kPassingGradients = 3;  // one coming down, one being updated, and the largest
constexpr std::uint64_t kPreferredChunks = 32;
constexpr std::uint64_t kSpillChunks = 8;
constexpr std::uint64_t kLeastChunks = 2;
constexpr std::uint64_t kStagedElements = 4 << 20, kLeastStagedElements = 128 << 10;

class HostLayout {
 public:
  explicit HostLayout(PlanDraft& draft)
      : draft_(draft), config_(draft.config), model_(draft.model), plan_(draft.plan) {}

  void run() {
    HostPlan& host = plan_.host;
    host.reads_ahead = config_.knobs.pipeline_read.value_or(true);
    host.writes_behind = config_.knobs.pipeline_write.value_or(true);
    PlanArena arena(Placement::kHost, plan_.ledger);
    if (!draft_.caller) {
      host.norms = arena.take("gradient norm", plan_.blocks.size() * sizeof(NormResult));
      host.overflow = arena.take("gradient norm", kPage);
    }
    if (plan_.has_store) host.record = arena.take("manifest record", record_bytes(record_form(plan_)));
    for (TilePlace& tile : plan_.tile_places) {
      for (Part part : {Part::kWeights, Part::kStates}) {
        if (tile.home[index_of(part)] == Placement::kHost) keep_in_host(arena, tile, part);
      }
    }
    for (BlockPlan& block : plan_.blocks) {
      if (auto& home = block.accumulator_home) home = arena.take(kAccumulators, home->bytes);
    }
    host.chunk_bytes = std::clamp(align_up(config_.io_block_bytes, kGranuleBytes), kMiB, 4 * kMiB);
    const bool chunks = !draft_.weights_stay() && anything_on_nvme();  // the caller's weights are not
    if (draft_.caller) {
      place_for_caller(arena);
    } else if (!plan_.gradients_in_hbm) {
      place_gradients(arena, chunks);
    }
    if (plan_.rank.count > 1) host.others = arena.take("a tile of another rank", other_tile_bytes());
    host.buffer_bytes = buffer_bytes();
    const HomeBytes activations = activation_home_bytes(draft_);
    const std::uint64_t moving = align_up(model_.kept_moving_bytes, kPage);
    const std::uint64_t kept = align_up(model_.kept_host_bytes, kPage);
    const std::uint64_t least_kept = moving + (plan_.has_store ? 0 : kept);
    const std::uint64_t least = arena.used() + host.buffer_bytes + (chunks ? kLeastChunks * host.chunk_bytes : 0) +
                                activations.least + least_kept;
    if (least > config_.host_bytes.value_or(least)) {
      refuse_budget("host_bytes", *config_.host_bytes, least, "of pinned host memory");
    }
    take_more_passing(arena, (config_.host_bytes.value_or(UINT64_MAX) - least) / 2);
    const std::uint64_t preferred = arena.used() + preferred_buffers() * host.buffer_bytes +
                                    (chunks ? preferred_chunks() * host.chunk_bytes : 0) + activations.all + moving +
                                    kept;
    const std::uint64_t budget = config_.host_bytes.value_or(preferred);
    divide_pipeline(arena, budget - activations.least - least_kept, chunks);
    place_activation_homes(draft_, arena, budget - least_kept);
    place_kept(kept, moving, budget - arena.used());
    cache_in_host(arena, budget - plan_.kept.host_bytes);
    plan_.ledger.host_budget = budget;
  }

 private:
  // As activations: host memory as far as it goes, NVMe for the rest.
  void place_kept(std::uint64_t wanted, std::uint64_t moving, std::uint64_t left) {
    const std::uint64_t in_host = std::min(wanted, align_down(left - moving, kPage));
    plan_.kept.host_bytes = in_host + moving;
    plan_.kept.nvme_bytes = align_up(model_.kept_nvme_bytes, kPage) + wanted - in_host;
    const auto list = [this](const char* purpose, std::uint64_t bytes) {
      if (bytes > 0) plan_.ledger.reservations.push_back({Placement::kHost, purpose, bytes, true});
    };
    list(kKept, in_host);
    list("block inputs on their way", moving);
  }

  // Memory of its own for every gradient, where the budget has room for that beside a pipeline of two buffers. Else
  // blocks from the first on keep theirs, whose gradients are complete last and used first, as far as the whole
  // pipeline leaves room, and the others are spilled.
  void place_gradients(PlanArena& arena, bool chunks) {
    std::uint64_t own = 0;
    for (BlockPlan& block : plan_.blocks) {
      block.gradient.bytes = block.gradient_elements * draft_.element_bytes();
      if (block.early && complete_in_one_visit(block)) {
        block.gradient_home = std::nullopt;
        passing_.push_back(block.gradient.bytes);
      } else {
        own += align_up(block.gradient.bytes, kPage);
      }
    }
    const std::uint64_t budget = config_.host_bytes.value_or(UINT64_MAX);
    std::ranges::sort(passing_, std::greater<>());
    if (!passing_.empty()) plan_.host.passing.push_back(arena.take("gradients", passing_[0]));
    const std::uint64_t activations = activation_home_bytes(draft_).least;
    const auto pipeline = [&](std::uint64_t buffers, std::uint64_t chunk_count) {
      return arena.used() + buffers * buffer_bytes() + (chunks ? chunk_count * plan_.host.chunk_bytes : 0) +
             activations;
    };
    const auto spill = [this](Placement from, Placement to) {
      for (BlockPlan& block : plan_.blocks) {
        if (block.gradient_home == from) block.gradient_home = to;
      }
    };
    const bool comfortable = own + pipeline(2, kPreferredChunks / 4) <= budget;
    const std::uint64_t least = own + pipeline(1, kLeastChunks);
    spill(Placement::kHost, Placement::kNvme);  // buffers have room for a gradient then
    const std::uint64_t least_spilled = pipeline(1, kLeastChunks) + kLeastChunks * plan_.host.chunk_bytes;
    const bool saves = least_spilled < least && (least_spilled <= budget || least > budget);
    const bool all = !plan_.has_store || comfortable || !saves;
    if (all) {
      spill(Placement::kNvme, Placement::kHost);
    } else {
      const std::uint64_t spill_bytes = kSpillChunks * plan_.host.chunk_bytes;
      const bool roomy = pipeline(preferred_buffers(), preferred_chunks()) + spill_bytes <= budget;
      plan_.host.spill_chunks =
          arena.take("gradients on their way to nvme", (roomy ? kSpillChunks : kLeastChunks) * plan_.host.chunk_bytes);
    }
    std::uint64_t needed = all ? 0 : pipeline(preferred_buffers(), preferred_chunks());
    for (BlockPlan& block : plan_.blocks) {
      const std::uint64_t bytes = block.gradient.bytes;
      if (!block.gradient_home) continue;
      if (!all && (needed += align_up(bytes, kPage)) > budget) break;
      block.gradient_home = Placement::kHost;
      block.gradient = arena.take("gradients", bytes);
    }
    // What is spilled is read again beside its tile, once all of the step is written.
    for (BlockPlan& block : plan_.blocks) block.early &= block.gradient_home != Placement::kNvme;
  }

  // A block's leaf sums, and what the caller's weights are told apart by; gradients that are kept.
  void place_for_caller(PlanArena& arena) {
    std::uint64_t most = 0, units = 0;
    for (BlockPlan& block : plan_.blocks) {
      most = std::max(most, block.gradient_elements);
      block.gradient.bytes = block.gradient_elements * draft_.element_bytes();
      if (draft_.caller->gradients) block.gradient = arena.take("gradients", block.gradient.bytes);
    }
    plan_.host.norms = arena.take("gradient norm", div_up(most, std::uint64_t{kNormLeaf}) * sizeof(double));
    for (const TilePlace& tile : plan_.tile_places) units += tile.shape.count / kPartitionUnit;
    if (config_.weights != DType::kFloat32)
      plan_.host.weight_checksums = arena.take("checksums of weights", units * sizeof(std::uint64_t));
    std::uint64_t gradient = 0;
    for (const TilePlan& tile : plan_.tiles) gradient = std::max(gradient, tile.range.count * draft_.element_bytes());
    if (plan_.has_store) plan_.host.tile_gradient = arena.take("tiles being updated", gradient);
    place_staging(arena);
  }

  // Pieces are as small as an eighth of the budget asks for. Three: one comes, one is updated, and one goes.
  void place_staging(PlanArena& arena) {
    using Staging = CallerMemory::Staging;
    const Staging wanted = draft_.caller->staging;
    if (wanted == Staging::kNone) return;
    const std::uint64_t slots = wanted == Staging::kMuch ? 3 : 1;
    std::uint64_t largest = 0;
    for (const TilePlan& tile : plan_.tiles) largest = std::max(largest, tile.range.count);
    std::uint64_t& elements = plan_.host.staged_elements;
    elements = wanted == Staging::kMuch ? kStagedElements : kLeastStagedElements;
    const auto bytes = [&] { return slots * 2 * elements * draft_.element_bytes(); };
    while (elements > kLeastStagedElements && bytes() > config_.host_bytes.value_or(UINT64_MAX) / 8) elements /= 2;
    elements = std::min(elements, largest);
    plan_.host.staging = arena.take("tensors on their way", bytes());
  }

  // A caller that names its visits brings one block's gradients after the other's, but for blocks that come back.
  bool complete_in_one_visit(const BlockPlan& block) const {
    return plan_.visits_given && std::ranges::count_if(plan_.visits, [&](const Visit& visit) {
                                   return visit.pass == Pass::kBackward && &plan_.blocks[visit.block] == &block;
                                 }) == 1;
  }

  // Only the first need have room for the largest.
  void take_more_passing(PlanArena& arena, std::uint64_t room) {
    for (std::size_t i = 1; i < std::min(kPassingGradients, passing_.size()); ++i) {
      if (passing_[1] * i > room) return;
      plan_.host.passing.push_back(arena.take("gradients", passing_[1]));
    }
  }

  // A tile, with its gradient where that is spilled.
  std::uint64_t buffer_bytes() const {
    std::uint64_t bytes = mover_buffer_bytes(plan_.tile_places), gradient = 0;
    for (const TilePlan& tile : plan_.tiles) {
      if (!tile.range.trainable || plan_.blocks[tile.block].gradient_home != Placement::kNvme) continue;
      gradient = std::max(gradient, align_up(tile.range.count * draft_.element_bytes(), kExtentAlignment));
    }
    return bytes + gradient;
  }

  // Another rank's may be larger by a unit of the partition.
  std::uint64_t other_tile_bytes() const {
    std::uint64_t most = 0;
    for (TilePlace tile : plan_.tile_places) {
      tile.shape.count += kPartitionUnit;
      most = std::max(most, mover_buffer_bytes({&tile, 1}));
    }
    return most;
  }

  void keep_in_host(PlanArena& arena, TilePlace& tile, Part part) {
    tile.home[index_of(part)] = Placement::kHost;
    tile.offset[index_of(part)] =
        arena.take(part == Part::kWeights ? "weights" : "optimizer states", extent_bytes(tile.shape, part)).offset;
  }

  bool anything_on_nvme() const {
    return std::ranges::any_of(plan_.tile_places,
                               [](const TilePlace& t) { return t.home[index_of(Part::kWeights)] == Placement::kNvme; });
  }

  std::uint64_t preferred_buffers() const {
    const HostPlan& host = plan_.host;
    std::uint64_t count =
        draft_.nodes + (host.reads_ahead ? kBuffersRead : 0) + (host.writes_behind ? kBuffersWritten : 0);
    if (const auto wanted = config_.knobs.optimizer_buffer_count) {
      count = std::min<std::uint64_t>(*wanted, plan_.tiles.size());
    }
    return align_up(count, draft_.nodes);
  }

  // offload_param's buffers hold a parameter each in DeepSpeed, here they are a limit on what is in flight.
  std::uint64_t preferred_chunks() const {
    constexpr std::uint64_t kTheirCount = 5, kTheirSize = 100'000'000;  // DeepSpeed's defaults, for the one not set
    const auto &count = config_.knobs.param_buffer_count, &size = config_.knobs.param_buffer_size;
    if (!count && !size) return kPreferredChunks;
    const double bytes = static_cast<double>(count.value_or(kTheirCount)) *
                         static_cast<double>(size.value_or(kTheirSize)) * static_cast<double>(draft_.element_bytes());
    const double chunks = std::min(bytes / static_cast<double>(plan_.host.chunk_bytes), double{kPreferredChunks});
    return std::max(static_cast<std::uint64_t>(chunks), kLeastChunks);
  }

  // Buffers for the update and chunks for fetches, as many of both as the budget gives, up to what is of use.
  void divide_pipeline(PlanArena& arena, std::uint64_t budget, bool chunks) {
    HostPlan& host = plan_.host;
    std::uint64_t left = budget - arena.used() - host.buffer_bytes - (chunks ? kLeastChunks * host.chunk_bytes : 0);
    std::uint64_t buffer_count = 1, chunk_count = chunks ? kLeastChunks : 0;
    const bool staged =
        plan_.has_store && std::ranges::any_of(plan_.tile_places, [](const TilePlace& t) {
          return t.shape.trainable && (written_by_update(t, Part::kWeights) || written_by_update(t, Part::kStates));
        });
    auto grow = [&left](std::uint64_t& count, std::uint64_t most, std::uint64_t bytes) {
      const std::uint64_t more = std::min(most > count ? most - count : 0, bytes > 0 ? left / bytes : 0);
      count += more;
      left -= more * bytes;
    };
    if (chunks) grow(chunk_count, preferred_chunks() / 4, host.chunk_bytes);
    const std::uint64_t buffers = staged ? preferred_buffers() : plan_.gradients_in_hbm ? 1 : draft_.nodes;
    grow(buffer_count, std::min<std::uint64_t>(buffers, plan_.tiles.size()), host.buffer_bytes);
    if (const std::uint64_t odd = buffer_count % draft_.nodes; odd < buffer_count) {
      buffer_count -= odd;
      left += odd * host.buffer_bytes;
    }
    if (chunks) grow(chunk_count, preferred_chunks(), host.chunk_bytes);
    host.buffers_count = static_cast<std::uint32_t>(buffer_count);
    host.buffers = arena.take("tiles being updated", buffer_count * host.buffer_bytes);
    host.chunks = arena.take("weights in flight", chunk_count * host.chunk_bytes);
  }

  // What is left of an explicit budget keeps a fixed set of tiles: the visit order is cyclic, so recency would be the
  // worst choice. Weights first: they are read for the update and in backward, states once.
  void cache_in_host(PlanArena& arena, std::uint64_t budget) {
    const auto stay = blocks_that_stay(plan_);
    for (Part part : {Part::kWeights, Part::kStates}) {
      std::vector<TilePlace*> tiles;
      for (std::size_t t = 0; t < plan_.tile_places.size(); ++t) {
        if (plan_.tile_places[t].home[index_of(part)] != Placement::kNvme) continue;
        // What is updated early is taken back on NVMe, and committed at every step: it must not wait for a commit.
        if (plan_.early_blocks && part == Part::kStates) continue;
        const std::uint32_t block = plan_.tiles[t].block;
        if (plan_.blocks[block].early || stay[block] != 0) continue;  // what stays in HBM is read once anyway
        tiles.push_back(&plan_.tile_places[t]);
      }
      spread_in_host(arena, budget, tiles, part);
    }
  }

  // Evenly over the tiles, so that the drive has something to read while those in memory are used; the first ones are
  // on NVMe, as they are read before their turn. What is left then goes to the first for which it is enough.
  void spread_in_host(PlanArena& arena, std::uint64_t budget, const std::vector<TilePlace*>& tiles, Part part) {
    const auto bytes_of = [part](const TilePlace& tile) { return align_up(extent_bytes(tile.shape, part), kPage); };
    std::uint64_t all = 0, elements = 0, seen = 0, kept = 0;
    for (const TilePlace* tile : tiles) {
      all += bytes_of(*tile);
      elements += tile->shape.count;
    }
    std::uint64_t elements_left = UINT64_MAX;
    if (part == Part::kWeights) elements_left = config_.knobs.max_in_cpu.value_or(UINT64_MAX);
    if (all == 0) return;
    const double of_memory = static_cast<double>(budget - arena.used()) / static_cast<double>(all);
    const double of_elements = static_cast<double>(elements_left) / static_cast<double>(elements);
    const double share = std::min({of_memory, of_elements, 1.0});
    for (const bool spread : {true, false}) {
      for (TilePlace* tile : tiles) {
        const std::uint64_t bytes = bytes_of(*tile);
        seen += bytes;
        if (tile->home[index_of(part)] == Placement::kHost) continue;
        if (spread && static_cast<double>(kept + bytes) > share * static_cast<double>(seen)) continue;
        if (arena.used() + bytes > budget || tile->shape.count > elements_left) continue;
        elements_left -= tile->shape.count;
        kept += bytes;
        keep_in_host(arena, *tile, part);
      }
    }
  }

  PlanDraft& draft_;
  const Config& config_;
  const ModelDescription& model_;
  Plan& plan_;
  std::vector<std::uint64_t> passing_;  // bytes of the gradients that pass, falling
};

}  // namespace

void lay_out_host(PlanDraft& draft) { HostLayout(draft).run(); }

}  // namespace spillway
