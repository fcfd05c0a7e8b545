#include "tools/plan/alternatives.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <span>

#include "spillway/error.h"
#include "spillway/units.h"
#include "tools/terminal/amount.h"
#include "tools/terminal/remedies.h"

namespace spillway::planning {
namespace {

constexpr std::uint64_t kMostTiles = 12'000;  // of a plan among many
constexpr Effort kQuick{.most_tiles = 400, .choosing_tiles = 200, .tries = 6};
constexpr double kLeastEffect = 0.01;

struct Kind {
  Placement states, parameters;
  const char* stages;
  std::optional<std::uint32_t> stage = {};
};
// With one rank the stages differ in what may be offloaded alone: parameters with stage 3.
constexpr Kind kKinds[] = {
    {Placement::kHbm, Placement::kHbm, "0-3"}, {Placement::kHost, Placement::kHbm, "1-3"},
    {Placement::kHost, Placement::kHost, "3"}, {Placement::kNvme, Placement::kHbm, "1-3"},
    {Placement::kNvme, Placement::kHost, "3"}, {Placement::kHost, Placement::kNvme, "3"},
    {Placement::kNvme, Placement::kNvme, "3"},
};
// With several also in what each owns a part of; 1 and 2 are one.
constexpr Kind kKindsOfRanks[] = {
    {Placement::kHbm, Placement::kHbm, "0", 0},    {Placement::kHbm, Placement::kHbm, "1-2", 2},
    {Placement::kHbm, Placement::kHbm, "3", 3},    {Placement::kHost, Placement::kHbm, "1-2", 2},
    {Placement::kHost, Placement::kHbm, "3", 3},   {Placement::kHost, Placement::kHost, "3", 3},
    {Placement::kNvme, Placement::kHbm, "1-2", 2}, {Placement::kNvme, Placement::kHbm, "3", 3},
    {Placement::kNvme, Placement::kHost, "3", 3},  {Placement::kHost, Placement::kNvme, "3", 3},
    {Placement::kNvme, Placement::kNvme, "3", 3},
};

// Of a power of two from a MiB on: `16 GiB`.
std::string power_text(std::uint64_t bytes) {
  std::size_t unit = 0;
  for (bytes /= kMiB; bytes >= 1024 && unit < 3; bytes /= 1024) ++unit;
  constexpr const char* kUnits[] = {"MiB", "GiB", "TiB", "PiB"};
  return fmt::format("{} {}", bytes, kUnits[unit]);
}

class Finder {
 public:
  Finder(const Question& question, const DescribedModel& described, std::size_t most)
      : asked_(question), described_(described), most_(most) {
    base_ = asked_.config;
    found_.tile_elements = tile_elements();
    base_.tile_elements = found_.tile_elements;
  }

  Alternatives run() {
    for (const Kind& kind : kinds()) found_.table.push_back(row_of(kind));
    const auto chosen = std::ranges::find(found_.table, true, &PlacementRow::chosen);
    if (chosen == found_.table.end() || !chosen->refused.empty()) return std::move(found_);
    seconds_ = chosen->seconds;
    offer_placements();
    offer_memory("host memory", &Config::host_bytes, chosen->bytes->host);
    offer_memory("GPU memory", &Config::hbm_bytes, chosen->bytes->hbm);
    offer_batches();
    offer_machine(*chosen);
    offer_commits();
    std::ranges::stable_sort(found_.changes, {}, &Change::effect);
    if (found_.changes.size() > most_) found_.changes.resize(most_);
    return std::move(found_);
  }

 private:
  std::span<const Kind> kinds() const {
    if (asked_.run.ranks.all > 1) return kKindsOfRanks;
    return kKinds;
  }

  // Tiles so large that each of many plans takes a hundredth of a second.
  std::uint64_t tile_elements() const {
    const std::uint64_t wanted = described_.parameters / kMostTiles;
    std::uint64_t elements = base_.tile_elements;
    while (elements < wanted) elements *= 2;
    return elements;
  }

  Prediction predict_with(const Config& config, const Rates& rates) const {
    return predict(config, described_, rates, asked_.nodes, kQuick, asked_.run.ranks.all);
  }

  Config placed(const Kind& kind) const {
    Config config = base_;
    config.states = kind.states;
    config.parameters = kind.parameters;
    if (kind.stage) config.stage = *kind.stage;
    if (kind.stage == 0u) config.nvme_paths.clear();  // a store is of what one rank owns
    const bool drive = kind.states == Placement::kNvme || kind.parameters == Placement::kNvme;
    if (drive && config.nvme_paths.empty()) config.nvme_paths = {"nvme_path"};
    return config;
  }

  PlacementRow row_of(const Kind& kind) const {
    PlacementRow row{.states = kind.states, .parameters = kind.parameters, .stages = kind.stages};
    row.chosen = kind.states == base_.states && kind.parameters == base_.parameters &&
                 (!kind.stage || *kind.stage == (base_.stage == 1 ? 2 : base_.stage));
    const Config config = placed(kind);
    try {
      const Prediction made = predict_with(config, asked_.rates);
      row.bytes = totals_of(made.plan);
      row.seconds = made.step.seconds;
      row.limit = spillway::name_of(made.schedule.limit());
    } catch (const Error& error) {
      if (error.code() != Code::kDoesNotFit) throw;
      row.refused = terminal::hint_of(error);
      const ErrorParts& parts = error.parts();
      if (parts.remedy == Remedy::kRaiseBudget || parts.remedy == Remedy::kRaiseBudgetOrHalve) {
        row.needs = parts.values[0];
        row.needed_bytes = static_cast<std::uint64_t>(terminal::size_of_text(parts.values[1]).value_or(0));
      }
      row.bytes = without_budgets(config);
    }
    return row;
  }

  // What it would take.
  std::optional<TierBytes> without_budgets(Config config) const {
    config.hbm_bytes = config.host_bytes = config.nvme_bytes = std::nullopt;
    try {
      return totals_of(make_plan(config, described_.model, asked_.nodes, {0, asked_.run.ranks.all}));
    } catch (const Error&) {
      return std::nullopt;
    }
  }

  struct Offer {
    std::string what;
    Config config;
    std::optional<Rates> rates = {};
    double tokens = 1;  // of a step, as a multiple of the run's
    const DescribedModel* described = nullptr;
  };
  std::optional<Change> tried(Offer offer) const {
    try {
      const Prediction made =
          predict(offer.config, offer.described != nullptr ? *offer.described : described_,
                  offer.rates ? *offer.rates : asked_.rates, asked_.nodes, kQuick, asked_.run.ranks.all);
      return Change{.what = std::move(offer.what),
                    .effect = made.step.seconds / offer.tokens / seconds_ - 1,
                    .seconds = made.step.seconds,
                    .bytes = totals_of(made.plan)};
    } catch (const Error& error) {
      if (error.code() != Code::kDoesNotFit && error.code() != Code::kInvalidArgument) throw;
      return std::nullopt;
    }
  }
  void keep(std::optional<Change> change) {
    if (change && change->effect <= -kLeastEffect) found_.changes.push_back(std::move(*change));
  }
  void offer(Offer offer) { keep(tried(std::move(offer))); }

  void offer_placements() {
    const PlacementRow* best = nullptr;
    for (const PlacementRow& row : found_.table) {
      // A drive that is not there is no advice.
      const bool drive = row.states == Placement::kNvme || row.parameters == Placement::kNvme;
      if (row.chosen || !row.refused.empty() || (drive && !asked_.has_drive)) continue;
      if (best == nullptr || row.seconds < best->seconds) best = &row;
    }
    if (best == nullptr) return;
    keep(Change{.what = fmt::format("optimizer states in {} and parameters in {}", name_of(best->states),
                                    name_of(best->parameters)),
                .effect = best->seconds / seconds_ - 1,
                .seconds = best->seconds,
                .bytes = best->bytes});
  }

  // A power of two more, from an eighth of what there is to twice as much: the next one only where it brings half as
  // much again. A little more may be worse than nothing: it is a cache of tiles, whose commits are no longer free.
  void offer_memory(const char* what, std::optional<std::uint64_t> Config::*budget, std::uint64_t now) {
    const std::uint64_t have = (base_.*budget).value_or(now);
    const std::uint64_t unit = std::bit_floor(std::max<std::uint64_t>(have / 4, kMiB));
    std::optional<Change> best;
    for (const std::uint64_t more : {unit, 2 * unit, 4 * unit, 8 * unit}) {
      Config config = base_;
      config.*budget = have + more;
      auto change = tried({.what = fmt::format("{} more {}", power_text(more), what), .config = config});
      if (change && (!best || change->effect < std::min(1.5 * best->effect, best->effect) - 0.005))
        best = std::move(change);
    }
    keep(std::move(best));
  }

  void offer_batches() {
    for (const bool micro : {true, false}) {
      Config config = base_;
      std::uint32_t& count = micro ? config.micro_batch : config.gradient_accumulation;
      if (count > (1u << 20)) continue;
      count *= 2;
      try {
        const DescribedModel described = describe(asked_.shape, config, asked_.run);
        offer({.what = fmt::format("{} {} in place of {}",
                                   micro ? "train_micro_batch_size_per_gpu" : "gradient_accumulation_steps", count,
                                   count / 2),
               .config = config,
               .tokens = 2,
               .described = &described});
      } catch (const Error&) {  // no advice
      }
    }
  }

  void offer_machine(const PlacementRow& chosen) {
    const auto with = [&](const std::string& what, const auto& change) {
      Offer offer{.what = what, .config = base_, .rates = asked_.rates};
      change(*offer.rates);
      keep(tried(std::move(offer)));
    };
    if (chosen.bytes->nvme > 0) {
      with("a second drive like what is there", [](Rates& rates) {
        for (double* rate : {&rates.links.nvme_read, &rates.links.nvme_write, &rates.links.nvme_mixed}) *rate *= 2;
      });
    }
    with("a device that computes twice as fast", [](Rates& rates) {
      for (double* rate : {&rates.compute.forward, &rates.compute.backward, &rates.compute.head}) *rate *= 2;
      rates.compute.push_seconds /= 2;
    });
    if (chosen.states != Placement::kHbm) {
      with("an optimizer twice as fast: more cores, faster memory",
           [](Rates& rates) { rates.links.update_seconds /= 2; });
    }
    if (asked_.run.ranks.all > 1) {
      with("a network twice as fast", [](Rates& rates) { rates.links.network *= 2; });
    }
    if (!asked_.rates.links.device_on_cores && chosen.parameters != Placement::kHbm) {
      with("a link to the device twice as fast", [](Rates& rates) {
        rates.links.h2d *= 2;
        rates.links.d2h *= 2;
      });
    }
  }

  void offer_commits() {
    if (base_.commit_every == 0u || base_.nvme_paths.empty()) return;
    Config config = base_;
    config.commit_every = 0;
    offer({.what = "commit_every 0: no step survives a crash, and half the disk", .config = config});
  }

  const Question& asked_;
  const DescribedModel& described_;
  const std::size_t most_;
  Config base_;
  double seconds_ = 0;  // of a step of the run, planned with the same effort
  Alternatives found_;
};

}  // namespace

TierBytes totals_of(const Plan& plan) {
  return {.hbm = plan.ledger.total(Placement::kHbm),
          .host = plan.ledger.total(Placement::kHost),
          .nvme = plan.ledger.total(Placement::kNvme)};
}

const char* name_of(Placement placement) {
  return placement == Placement::kHbm ? "hbm" : placement == Placement::kHost ? "host" : "nvme";
}

Alternatives find_alternatives(const Question& question, const DescribedModel& described, std::size_t most) {
  return Finder(question, described, most).run();
}

}  // namespace spillway::planning
