#include "src/plan/layout.h"

#include <fmt/format.h>

#include <algorithm>

#include "spillway/error.h"
#include "src/plan/description.h"

namespace spillway {
namespace {

class NvmeLayout {
 public:
  explicit NvmeLayout(PlanDraft& draft)
      : draft_(draft), config_(draft.config), model_(draft.model), plan_(draft.plan) {}

  void run() {
    if (!plan_.has_store) return;
    std::vector<TileShape> shapes;
    for (const TilePlace& tile : plan_.tile_places) shapes.push_back(tile.shape);
    plan_.nvme.probe_bytes = align_down(
        std::min<std::uint64_t>(64 * kMiB, plan_.host.buffer_bytes * plan_.host.buffers_count), kExtentAlignment);
    place_spilled_gradients();
    plan_.nvme.activations.offset = plan_.spill_bytes;
    const std::uint64_t activations = plan_.nvme.activations.bytes;
    plan_.scratch_bytes = std::max(plan_.nvme.probe_bytes, plan_.spill_bytes + activations);
    plan_.identity = describe_store(config_, model_);
    plan_.identity.rank = plan_.rank;
    const auto bytes_with = [&](std::uint32_t slots) {
      StoreShape shape = store_shape(plan_);
      shape.slots = slots;
      return disk_bytes(shape, config_.nvme_paths.size());
    };
    plan_.store_bytes = bytes_with(plan_.slots);
    const std::uint64_t tiles = slots_bytes(shapes);
    plan_.ledger.reservations.push_back({Placement::kNvme, fmt::format("tiles, {} slots each", plan_.slots), tiles});
    if (plan_.spill_bytes > 0) plan_.ledger.reservations.push_back({Placement::kNvme, "gradients", plan_.spill_bytes});
    if (activations > 0) plan_.ledger.reservations.push_back({Placement::kNvme, "activations", activations});
    plan_.ledger.reservations.push_back({Placement::kNvme, "manifest, description, probe area",
                                         plan_.store_bytes - tiles - plan_.spill_bytes - activations});
    const std::uint64_t kept = plan_.kept.nvme_bytes, all = plan_.store_bytes + kept;
    if (kept > 0) plan_.ledger.reservations.push_back({Placement::kNvme, kKept, kept, true});
    plan_.ledger.nvme_budget = config_.nvme_bytes.value_or(all);
    if (all > plan_.ledger.nvme_budget) {
      const bool half_fits = plan_.slots == 2 && bytes_with(1) + kept <= plan_.ledger.nvme_budget;
      const std::string needed = size_text(all);
      throw Error(Code::kDoesNotFit, "spillway.nvme_bytes",
                  fmt::format("{} is too small: this plan needs at least {} of disk",
                              size_text(plan_.ledger.nvme_budget), needed),
                  0, {half_fits ? Remedy::kRaiseBudgetOrHalve : Remedy::kRaiseBudget, {"nvme_bytes", needed}});
    }
  }

 private:
  void place_spilled_gradients() {
    for (TilePlan& tile : plan_.tiles) {
      if (!tile.range.trainable || plan_.blocks[tile.block].gradient_home != Placement::kNvme) continue;
      tile.gradient = {plan_.spill_bytes, align_up(tile.range.count * draft_.element_bytes(), kExtentAlignment)};
      plan_.spill_bytes += tile.gradient.bytes;
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

  PlanDraft& draft_;
  const Config& config_;
  const ModelDescription& model_;
  Plan& plan_;
};

}  // namespace

void lay_out_nvme(PlanDraft& draft) { NvmeLayout(draft).run(); }

}  // namespace spillway
