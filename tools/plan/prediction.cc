#include "tools/plan/prediction.h"

#include <algorithm>
#include <array>

#include "src/engine/commit_interval.h"
#include "src/engine/step_predictor.h"

namespace spillway::planning {
namespace {

constexpr std::array kBytes = {&ScheduleTile::elements,     &ScheduleTile::read_bytes,
                               &ScheduleTile::write_bytes,  &ScheduleTile::fetch_bytes,
                               &ScheduleTile::weight_bytes, &ScheduleTile::gradient_bytes,
                               &ScheduleTile::commit_bytes, &ScheduleTile::commit_d2h_bytes,
                               &ScheduleTile::spill_bytes,  &ScheduleTile::commit_read_bytes};

bool move_alike(const ScheduleTile& a, const ScheduleTile& b) {
  return a.block == b.block &&
         std::ranges::all_of(kBytes, [&](auto bytes) { return (a.*bytes > 0) == (b.*bytes > 0); });
}

StepInfo info_of(const Schedule& schedule) { return {schedule.seconds(), schedule.traffic}; }

StepInfo mean_of(const StepInfo& usual, const StepInfo& committed, std::uint32_t every) {
  const double share = 1.0 / every;
  const auto mean = [&](auto one, auto other) {
    return static_cast<double>(one) * (1 - share) + static_cast<double>(other) * share;
  };
  StepInfo facts{.seconds = mean(usual.seconds, committed.seconds), .traffic = {}};
  for (const auto bytes :
       {&ScheduleTraffic::nvme_read, &ScheduleTraffic::nvme_write, &ScheduleTraffic::h2d, &ScheduleTraffic::d2h,
        &ScheduleTraffic::gathered, &ScheduleTraffic::scattered, &ScheduleTraffic::leaves}) {
    facts.traffic.*bytes = static_cast<std::uint64_t>(mean(usual.traffic.*bytes, committed.traffic.*bytes));
  }
  return facts;
}

class Predictor {
 public:
  Predictor(const Config& config, const DescribedModel& described, const Rates& rates, unsigned nodes,
            const Effort& effort, std::uint32_t ranks)
      : config_(config), effort_(effort), plan_(result_.plan) {
    plan_ = make_plan(config, described.model, nodes, {0, ranks});
    std::vector<bool> kept;
    for (const BlockPlan& block : plan_.blocks) kept.push_back(block.insides_kept);
    for (std::size_t b = 0; b < plan_.blocks.size(); ++b) {
      if (described.model.blocks[b].inside_bytes == 0) continue;
      ++result_.visits_with_insides;
      result_.visits_recomputed += !kept[b];
    }
    MachineRates links = rates.links;
    if (plan_.gradients_in_hbm) links.update_seconds = rates.device_update_seconds;
    input_ = schedule_input(plan_, links, visit_seconds(described, rates.compute, kept), nodes);
    choosing_ = input_;
    result_.joined = join_tiles(input_, effort.most_tiles);
    join_tiles(choosing_, std::min(effort.choosing_tiles, effort.most_tiles));
  }

  Prediction run() {
    const bool can_commit = input_.commits;
    const bool chooses = can_commit && !config_.commit_every && written_back();
    std::uint32_t every = can_commit ? config_.commit_every.value_or(1) : 0;
    choose_speculation(every == 1 && !chooses);
    speculate(input_, plan_, result_.speculative);
    Schedule committed;
    if (every > 0) committed = schedule(true);
    if (every != 1 || chooses) {
      result_.schedule = schedule(false);
      if (every > 0) result_.commit_seconds = committed.seconds() - result_.schedule.seconds();
      if (chooses) every = commit_interval(result_.commit_seconds, committed.seconds());
    }
    if (every == 1) result_.schedule = committed;
    result_.commit_every = every;
    result_.step =
        every > 1 ? mean_of(info_of(result_.schedule), info_of(committed), every) : info_of(result_.schedule);
    result_.clipped = result_.step;
    if (result_.speculative > 0) {
      speculate(input_, plan_, 0);
      result_.clipped = info_of(schedule(true));
    }
    if (every > 0) add_records(every);
    return std::move(result_);
  }

 private:
  // The engine guesses only where each step is committed.
  void choose_speculation(bool guesses) {
    if (!guesses || std::ranges::none_of(plan_.blocks, &BlockPlan::speculative)) return;
    result_.speculative =
        config_.speculative_blocks ? *config_.speculative_blocks : best_speculation(choosing_, plan_, effort_.tries);
  }
  bool written_back() const {
    return std::ranges::any_of(plan_.tile_places, [](const TilePlace& tile) {
      return tile.shape.trainable &&
             (!written_by_update(tile, Part::kWeights) || !written_by_update(tile, Part::kStates));
    });
  }
  Schedule schedule(bool commits) {
    input_.commits = commits;
    return make_schedule(input_);
  }
  // Two copies of the manifest's record a commit, which are no tiles.
  void add_records(std::uint32_t every) {
    for (StepInfo* facts : {&result_.step, &result_.clipped})
      facts->traffic.nvme_write += 2 * plan_.host.record.bytes / every;
  }

  const Config& config_;
  const Effort& effort_;
  Prediction result_;
  Plan& plan_;
  ScheduleInput input_, choosing_;
};

}  // namespace

std::uint64_t join_tiles(ScheduleInput& input, std::uint64_t most) {
  const std::uint64_t together = div_up<std::uint64_t>(input.tiles.size(), std::max<std::uint64_t>(most, 1));
  if (together <= 1) return 1;
  UpdateQueueOptions& updates = input.policies.updates;
  const auto in_place = [&updates](std::size_t t) { return !updates.in_place.empty() && updates.in_place[t] != 0; };
  std::vector<ScheduleTile> tiles;
  std::vector<std::uint64_t> counts;  // of those that are one
  std::vector<std::uint8_t> placed;   // UpdateQueueOptions::in_place
  std::vector<std::uint32_t> became(input.tiles.size());
  for (std::size_t t = 0; t < input.tiles.size(); ++t) {
    const ScheduleTile& tile = input.tiles[t];
    // The last of its kind in its block: kinds may alternate.
    std::size_t into = tiles.size();
    for (std::size_t j = tiles.size(); j-- > 0 && tiles[j].block == tile.block && into == tiles.size();) {
      if (move_alike(tiles[j], tile) && (placed[j] != 0) == in_place(t)) into = j;
    }
    if (into == tiles.size() || counts[into] == together) {
      into = tiles.size();
      tiles.push_back(tile);
      counts.push_back(1);
      placed.push_back(in_place(t));
    } else {
      for (const auto bytes : kBytes) tiles[into].*bytes += tile.*bytes;
      ++counts[into];
    }
    became[t] = static_cast<std::uint32_t>(into);
  }
  for (std::size_t b = 0; b < input.blocks.size(); ++b) {
    ScheduleBlock& block = input.blocks[b];
    if (block.tiles == 0) continue;
    const auto first = became.begin() + block.first_tile;
    const std::uint32_t last = *std::max_element(first, first + block.tiles);
    block.first_tile = *first;
    block.tiles = last - block.first_tile + 1;
    updates.blocks[b] = {block.first_tile, block.tiles};
  }
  std::vector<std::uint32_t> order;
  std::vector<bool> there(tiles.size());
  for (const std::uint32_t tile : updates.order) {
    if (there[became[tile]]) continue;
    there[became[tile]] = true;
    order.push_back(became[tile]);
  }
  input.chunk_bytes *= together;  // weights go through them in pieces that grow with the tiles
  updates.trainable.assign(tiles.size(), 0);
  for (std::size_t t = 0; t < tiles.size(); ++t) updates.trainable[t] = tiles[t].elements > 0;
  if (!updates.in_place.empty()) updates.in_place = std::move(placed);
  input.tiles = std::move(tiles);
  updates.order = std::move(order);
  return *std::ranges::max_element(counts);
}

Prediction predict(const Config& config, const DescribedModel& described, const Rates& rates, unsigned nodes,
                   const Effort& effort, std::uint32_t ranks) {
  return Predictor(config, described, rates, nodes, effort, ranks).run();
}

}  // namespace spillway::planning
