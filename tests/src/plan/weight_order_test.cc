// The engine and the schedule ask one policy about weights, and tell it the same: what a run did, step by step, is what
// its schedule says, in its order. And a policy that is told once more what a run told it answers the same.
//
// This program is linked with `--wrap` (meson.build), so that what the engine and its policy say to each other arrives
// here and goes on. The linker knows these by their mangled names.
#include <gtest/gtest.h>
#include <rapidjson/document.h>

#include <algorithm>
#include <fstream>
#include <functional>
#include <optional>
#include <set>
#include <sstream>
#include <string>
#include <variant>
#include <vector>

#include "spillway/error.h"
#include "spillway/units.h"
#include "src/engine/clip_guess.h"
#include "src/plan/schedule.h"
#include "src/plan/step_policies.h"
#include "swap/policy/weight_residency.h"
#include "tests/src/named_budget.h"
#include "tests/src/toy_trainer.h"

namespace spillway {
namespace {

using testing::TempStore;
using testing::ToyTrainer;

constexpr std::uint32_t kBlocks = 6, kMicroBatches = 2;
constexpr int kSteps = 6, kSteady = 4;  // guesses begin after the second

// What the policy was told, what it asked of the update, and what it answered, in order.
struct Told {
  WeightEvent event;
  std::vector<std::uint32_t> visits;
};
struct Asked {
  std::optional<std::uint32_t> block;  // none: whether it has begun
  WeightsFrom from = WeightsFrom::kNewest;
  bool begun = false;
};
struct Journal {
  std::vector<std::variant<Told, WeightAction>> entries;
  std::vector<Asked> asked;
};
Journal* journal = nullptr;  // null: nothing is recorded

class AskedUpdate final : public UpdateView {
 public:
  explicit AskedUpdate(const UpdateView& real) : real_(real) {}
  bool begun() const override {
    journal->asked.push_back({.block = {}, .begun = real_.begun()});
    return journal->asked.back().begun;
  }
  WeightsFrom weights_from(std::uint32_t block) const override {
    journal->asked.push_back({.block = block, .from = real_.weights_from(block)});
    return journal->asked.back().from;
  }

 private:
  const UpdateView& real_;
};
std::optional<AskedUpdate> asked_update;  // the engine's, while it is recorded

// Answers as the run's update did.
class AnsweringUpdate final : public UpdateView {
 public:
  explicit AnsweringUpdate(const std::vector<Asked>& asked) : asked_(asked) {}
  bool begun() const override { return next({}).begun; }
  WeightsFrom weights_from(std::uint32_t block) const override { return next(block).from; }

 private:
  Asked next(std::optional<std::uint32_t> block) const {
    EXPECT_LT(next_, asked_.size());
    if (next_ == asked_.size()) return {};
    EXPECT_EQ(asked_[next_].block, block) << "question " << next_;
    return asked_[next_++];
  }

  const std::vector<Asked>& asked_;
  mutable std::size_t next_ = 0;
};

}  // namespace

#define SPILLWAY_WATCHED(result, name, mangled, ...)      \
  result real_##name(__VA_ARGS__) asm("__real_" mangled); \
  result watched_##name(__VA_ARGS__) asm("__wrap_" mangled)

SPILLWAY_WATCHED(void, policy, "_ZN8spillway15WeightResidencyC1ENS_22WeightResidencyOptionsERKNS_10UpdateViewE",
                 WeightResidency*, WeightResidencyOptions*, const UpdateView&);
SPILLWAY_WATCHED(void, tell, "_ZN8spillway15WeightResidency4tellERKNS_11WeightEventE", WeightResidency*,
                 const WeightEvent&);
SPILLWAY_WATCHED(WeightAction, next, "_ZN8spillway15WeightResidency4nextEv", WeightResidency*);
#undef SPILLWAY_WATCHED

void watched_policy(WeightResidency* policy, WeightResidencyOptions* options, const UpdateView& update) {
  if (journal) *journal = {};  // the plan had one before, which says what passes between steps fetch
  real_policy(policy, options, journal ? asked_update.emplace(update) : update);
}
void watched_tell(WeightResidency* policy, const WeightEvent& event) {
  if (journal) journal->entries.push_back(Told{event, {event.visits.begin(), event.visits.end()}});
  real_tell(policy, event);
}
WeightAction watched_next(WeightResidency* policy) {
  const WeightAction action = real_next(policy);
  if (journal) journal->entries.push_back(action);
  return action;
}

namespace {

// One thing that happens to a place: a block comes by a fetch or from its update, or is lent.
enum class What : std::uint8_t { kFetched, kUpdated, kLent };
struct Happened {
  What what = What::kFetched;
  std::uint32_t block = 0, place = 0;
  bool operator==(const Happened&) const = default;
};
void PrintTo(const Happened& happened, std::ostream* out) {
  constexpr const char* kNames[] = {"fetched", "updated", "lent"};
  *out << kNames[static_cast<int>(happened.what)] << " block " << happened.block << " place " << happened.place;
}
using Order = std::vector<Happened>;

// Of the schedule's steady step, from the operations that it issues.
Order order_of(const Schedule& schedule) {
  Order order;
  const auto ops = std::span(schedule.ops);
  for (std::size_t i = schedule.second; i < ops.size(); ++i) {
    const ScheduleOp& op = ops[i];
    const std::uint32_t place = op.place == kNothing ? op.block : op.place;  // weights that stay have one each
    if (op.kind == OpKind::kAcquire) order.push_back({What::kLent, op.block, place});
    if (op.kind != OpKind::kCopyWeights) continue;
    const bool from_update = op.buffer != kNothing && ops[op.after[0]].kind == OpKind::kUpdate;
    const Happened copied{from_update ? What::kUpdated : What::kFetched, op.block, place};
    if (order.empty() || order.back() != copied) order.push_back(copied);  // tile by tile, chunk by chunk
  }
  return order;
}

// Of each step of a run, from what its policy answered.
std::vector<Order> orders_of(const Journal& journal) {
  std::vector<Order> orders;
  for (const auto& entry : journal.entries) {
    if (const auto* told = std::get_if<Told>(&entry)) {
      const WeightEvent& event = told->event;
      if (event.kind == WeightEvent::kBegin) orders.emplace_back();
      if (event.kind == WeightEvent::kBrought) orders.back().push_back({What::kUpdated, event.block, event.place});
      EXPECT_NE(event.kind, WeightEvent::kFailed);
    } else {
      const auto& [kind, block, place] = std::get<WeightAction>(entry);
      if (kind == WeightAction::kFetch) orders.back().push_back({What::kFetched, block, place});
      if (kind == WeightAction::kLend) orders.back().push_back({What::kLent, block, place});
    }
  }
  return orders;
}

using Names = std::vector<std::string>;

void add_once(Names& names, const std::string& name) {
  if (names.empty() || names.back() != name) names.push_back(name);  // chunk by chunk
}

// Tiles that fetches copy up in the schedule's steady step, in order, and those whose update does.
struct CopiedUp {
  Names fetched;
  std::set<std::string> updated = {};
};
CopiedUp copied_up(const Schedule& schedule, const Plan& plan, const ModelDescription& model) {
  CopiedUp copied;
  const auto ops = std::span(schedule.ops);
  for (const ScheduleOp& op : ops.subspan(schedule.second)) {
    if (op.kind != OpKind::kCopyWeights) continue;
    const std::string name = tile_name(plan, model, op.tile);
    if (op.buffer != kNothing && ops[op.after[0]].kind == OpKind::kUpdate) {
      copied.updated.insert(name);
    } else {
      add_once(copied.fetched, name);
    }
  }
  return copied;
}

// Of a step of a run, from its timeline: what the link itself saw. A tile that its update copies up is fetched later.
Names fetched_in(const std::filesystem::path& trace, int step, std::set<std::string> updated) {
  std::stringstream text;
  text << std::ifstream(trace).rdbuf();
  rapidjson::Document json;
  json.Parse(text.str().c_str());
  const auto events = json["traceEvents"].GetArray();
  std::set<int> link;  // its lanes
  double begin = 0, end = 0;
  for (const auto& event : events) {
    const std::string name = event["name"].GetString();
    if (name == "thread_name" && std::string(event["args"]["name"].GetString()).starts_with("h2d"))
      link.insert(event["tid"].GetInt());
    if (name != "step " + std::to_string(step)) continue;
    begin = event["ts"].GetDouble();
    end = begin + event["dur"].GetDouble();
  }
  Names fetched;
  for (const auto& event : events) {
    if (event["ph"].GetString() != std::string("X") || !link.contains(event["tid"].GetInt())) continue;
    const double at = event["ts"].GetDouble();
    if (at < begin || at >= end || updated.erase(event["name"].GetString()) > 0) continue;
    add_once(fetched, event["name"].GetString());
  }
  EXPECT_TRUE(updated.empty());
  return fetched;
}

// Another policy answers all of it as the run's did.
void replay(const Plan& plan, const Journal& journal) {
  const AnsweringUpdate update(journal.asked);
  WeightResidency policy(step_policies(plan).weights, update);
  std::size_t answers = 0;
  for (const auto& entry : journal.entries) {
    if (const auto* told = std::get_if<Told>(&entry)) {
      WeightEvent event = told->event;
      event.visits = told->visits;
      policy.tell(event);
    } else {
      ASSERT_EQ(policy.next(), std::get<WeightAction>(entry)) << "answer " << answers;
      ++answers;
    }
  }
  EXPECT_GT(answers, 0u);
}

struct Case {
  Placement parameters = Placement::kNvme, states = Placement::kNvme;
  std::function<void(Config&)> change = [](Config&) {};
  ModelDescription model = testing::toy_model(kBlocks, 20'000, kMicroBatches);
  std::filesystem::path trace = {};
};

struct Compared {
  Plan plan;
  Order order;
  Schedule schedule;
};

Compared compare(const Case& of) {
  TempStore store;
  Config config = testing::toy_config(of.parameters, of.states, DType::kBFloat16, store.path());
  config.tile_elements = 32 * kKiB;
  config.commit_every = 1;
  of.change(config);
  Plan plan = make_plan(config, of.model);
  Plan scheduled = plan;
  for (const std::uint32_t block : speculated_blocks(plan, *config.speculative_blocks)) {
    scheduled.blocks[block].early = true;
  }
  const Schedule schedule = make_schedule(schedule_input(scheduled, {}, {}));
  const Order planned = order_of(schedule);

  Journal recorded;
  journal = &recorded;
  {
    EngineOptions options;
    options.trace = of.trace;
    const auto engine = Engine::create(config, of.model, options);
    engine->import_weights(testing::toy_weights());
    ToyTrainer trainer{*engine, of.model, config.weights, kMicroBatches};
    trainer.in_turn = std::ranges::count(of.model.visits, Visit{0, Pass::kForward}) > 1;
    for (int step = 0; step < kSteps; ++step) trainer.run_step();
  }
  journal = nullptr;
  replay(plan, recorded);
  const std::vector<Order> orders = orders_of(recorded);
  EXPECT_EQ(orders.size(), kSteps + 1u);  // one has begun when the engine ends
  for (std::size_t step = kSteady; step < kSteps; ++step) EXPECT_EQ(orders[step], planned) << "step " << step;
  return {std::move(plan), planned, schedule};
}

std::size_t count(const Order& order, What what) {
  return static_cast<std::size_t>(std::ranges::count(order, what, &Happened::what));
}

TEST(WeightOrder, IsTheSchedulesWhereverWeightsAndStatesLive) {
  for (const Placement states : {Placement::kNvme, Placement::kHost}) {
    for (const Placement parameters : {Placement::kNvme, Placement::kHost}) {
      const Compared compared = compare({.parameters = parameters, .states = states});
      EXPECT_GT(count(compared.order, What::kFetched), kBlocks / 2);
      EXPECT_GT(count(compared.order, What::kUpdated), kBlocks / 2);
    }
  }
}

// With one request at a time, and from host memory, the copies come in the order of the fetches, tile by tile.
TEST(WeightOrder, IsTheSchedulesOnTheLinkItself) {
  for (const Placement parameters : {Placement::kNvme, Placement::kHost}) {
    TempStore directory;
    const Case of{.parameters = parameters,
                  .change = [](Config& config) { config.io_depth = 1; },
                  .trace = directory.path() / "trace.json"};
    const Compared compared = compare(of);
    const CopiedUp planned = copied_up(compared.schedule, compared.plan, of.model);
    EXPECT_GT(planned.fetched.size(), kBlocks);
    for (int step = kSteady + 1; step <= kSteps; ++step) {
      EXPECT_EQ(fetched_in(of.trace, step, planned.updated), planned.fetched) << "step " << step;
    }
  }
}

TEST(WeightOrder, IsTheSchedulesOfWeightsThatStayInHbmAndAreNeverFetched) {
  for (const Placement states : {Placement::kNvme, Placement::kHost}) {
    compare(
        {.parameters = Placement::kHbm, .states = states, .change = [](Config& config) { config.hbm_bytes.reset(); }});
  }
}

TEST(WeightOrder, IsTheSchedulesWhenBlocksAreUpdatedInsideBackward) {
  const Compared compared = compare({.change = [](Config& config) { config.gradient_clipping = 0; }});
  EXPECT_TRUE(compared.plan.early_blocks);
  for (const std::uint32_t blocks : {1u, 3u, kBlocks}) {
    compare({.change = [blocks](Config& config) {
      config.gradient_clipping = 1e9;
      config.speculative_blocks = blocks;
    }});
  }
}

TEST(WeightOrder, IsTheSchedulesWithAPlaceLessOrMore) {
  const Case usual;
  for (const int more : {-1, 1, 2}) {
    const Compared compared = compare({.change = [&](Config& config) {
      const Plan plan = make_plan(config, usual.model);
      config.hbm_bytes = plan.ledger.total(Placement::kHbm) + more * plan.hbm.places.back().bytes;
    }});
    EXPECT_EQ(compared.plan.hbm.places.size(), 3u + more);
  }
}

TEST(WeightOrder, IsTheSchedulesWithFrozenBlocks) {
  Case frozen;
  for (const std::uint32_t b : {1u, 2u, 4u}) {
    for (Parameter& parameter : frozen.model.blocks[b].parameters) parameter.trainable = false;
  }
  const ModelDescription& model = frozen.model;
  for (const std::uint64_t more : {0, 1, 2}) {
    frozen.change = [&model, more](Config& config) {
      const Plan plan = make_plan(config, model);
      config.hbm_bytes = plan.ledger.total(Placement::kHbm) + more * plan.hbm.places.back().bytes;
    };
    compare(frozen);
  }
}

TEST(WeightOrder, IsTheSchedulesWhenEachMicroBatchGoesThroughTheWholeModel) {
  compare({.model = testing::toy_model(kBlocks, 20'000, kMicroBatches, true, true)});
}

TEST(WeightOrder, IsTheSchedulesWithDeepSpeedsKnobs) {
  Case usual;
  for (const std::uint64_t reuse : {std::uint64_t{0}, std::uint64_t{150'000}}) {
    for (const std::uint64_t ahead : {std::uint64_t{0}, std::uint64_t{1}, std::uint64_t{200'000}}) {
      compare({.change = [=](Config& config) {
        config.knobs.max_reuse_distance = reuse;
        config.knobs.prefetch_bucket_size = ahead;
      }});
    }
  }
}

}  // namespace
}  // namespace spillway
