#include "src/plan/passes.h"

#include <algorithm>
#include <vector>

#include "spillway/error.h"
#include "src/plan/step_policies.h"

namespace spillway {
namespace {

// Between steps every update has been made.
struct NoUpdate final : UpdateView {
  bool begun() const override { return false; }
  WeightsFrom weights_from(std::uint32_t) const override { return WeightsFrom::kNewest; }
};

// Does at once what the policy answers, and counts by block what it fetches.
class Caller {
 public:
  Caller(const Plan& plan, const std::vector<std::uint32_t>& visits)
      : policy_(step_policies(plan).weights, no_update_), fetches_(plan.blocks.size()) {
    tell({.kind = WeightEvent::kBegin, .visits = visits, .pass_visits = first_pass(plan.visits)});
  }

  void tell(const WeightEvent& event) {
    policy_.tell(event);
    for (WeightAction action = policy_.next(); action.kind != WeightAction::kNothing; action = policy_.next()) {
      const auto [kind, block, place] = action;
      SPILLWAY_CHECK(kind != WeightAction::kRefuse, "one lease at a time finds a place");
      if (kind == WeightAction::kFetch) ++fetches_[block];
      if (kind == WeightAction::kLend) lent_ = place;
      if (kind == WeightAction::kWait || kind == WeightAction::kDrain) {
        policy_.tell({.kind = WeightEvent::kArrived, .place = place});
      }
    }
  }
  void pass(std::span<const std::uint32_t> visits) {
    for (std::size_t v = 0; v < visits.size(); ++v) {
      tell({.kind = WeightEvent::kAcquire, .block = visits[v], .visit = v});
      tell({.kind = WeightEvent::kRelease, .place = lent_});
    }
  }
  void forget_counts() { std::ranges::fill(fetches_, 0); }
  std::uint64_t fetches(std::uint32_t block) const { return fetches_[block]; }

 private:
  NoUpdate no_update_;
  WeightResidency policy_;
  std::uint32_t lent_ = 0;
  std::vector<std::uint64_t> fetches_;
};

}  // namespace

std::size_t first_pass(std::span<const Visit> visits) {
  return static_cast<std::size_t>(std::ranges::find(visits, Pass::kBackward, &Visit::pass) - visits.begin());
}

PassTraffic pass_traffic(const Plan& plan) {
  PassTraffic traffic;
  if (plan.hbm.places.empty()) return traffic;
  std::vector<std::uint32_t> visits;
  for (const Visit& visit : plan.visits) visits.push_back(visit.block);
  const auto pass = std::span(visits).first(first_pass(plan.visits));
  Caller caller(plan, visits);
  constexpr std::uint64_t kUntilTheSetIsThere = 4, kCounted = 8;
  for (std::uint64_t p = 0; p < kUntilTheSetIsThere + kCounted; ++p) {
    if (p == kUntilTheSetIsThere) caller.forget_counts();
    if (p > 0) caller.tell({.kind = WeightEvent::kAgain});
    caller.pass(pass);
  }
  for (std::uint32_t b = 0; b < plan.blocks.size(); ++b) {
    const BlockPlan& block = plan.blocks[b];
    std::uint64_t bytes = 0, on_nvme = 0;
    for (std::uint32_t t = block.first_tile; t < block.first_tile + block.tiles; ++t) {
      const TilePlace& tile = plan.tile_places[t];
      bytes += payload_bytes(tile.shape, Part::kWeights);
      if (tile.home[index_of(Part::kWeights)] == Placement::kNvme) on_nvme += extent_bytes(tile.shape, Part::kWeights);
    }
    if (std::ranges::find(pass, b) != pass.end()) traffic.weights += bytes;
    traffic.fetched += caller.fetches(b) * bytes;
    traffic.nvme_read += caller.fetches(b) * on_nvme;
  }
  traffic.fetched /= kCounted;
  traffic.nvme_read /= kCounted;
  return traffic;
}

}  // namespace spillway
