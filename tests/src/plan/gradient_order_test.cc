// The gradients of a run come down in the order of its schedule, from the same staging; and what the run told the
// policy, told once more, has the same answers.
//
// This program is linked with `--wrap` (meson.build), so that what engine and schedule tell a GradientMemory, and what
// the engine then gives to the d2h link, arrives here and goes on. The linker knows these by their mangled names.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <optional>
#include <set>
#include <span>
#include <tuple>
#include <vector>

#include "src/engine/clip_guess.h"
#include "src/plan/schedule_program.h"
#include "src/plan/step_policies.h"
#include "swap/block_spiller.h"
#include "swap/timeline.h"
#include "tests/src/toy_trainer.h"

namespace spillway {
namespace {

enum class Told : std::uint8_t { kBegin, kCome, kStage, kComplete, kUpdated, kCopied, kWritten };

struct Event {
  Told what = Told::kBegin;
  std::uint32_t subject = 0;  // block or staging
  std::optional<GradientStaging> staging = {};
  std::optional<GradientDown> down = {};
  bool operator==(const Event&) const = default;
};

// What went to the d2h link: a block's gradient or parts of it, or a tile on its way to NVMe.
struct Move {
  std::uint32_t block = 0;
  std::uint64_t bytes = 0;
  bool operator==(const Move&) const = default;
};
struct Spilled {
  std::uint64_t offset = 0, bytes = 0, payload = 0;  // of the extent; from the scratch area's begin
  bool operator==(const Spilled&) const = default;
};

// One thread at a time, the caller's. Null: nothing is recorded.
std::vector<Event>* events = nullptr;
std::vector<Move>* moves = nullptr;
std::vector<Spilled>* spills = nullptr;

void note(const Event& event) {
  if (events) events->push_back(event);
}

}  // namespace

#define SPILLWAY_WRAPPED(name, mangled, result, ...)      \
  result real_##name(__VA_ARGS__) asm("__real_" mangled); \
  result wrapped_##name(__VA_ARGS__) asm("__wrap_" mangled);

SPILLWAY_WRAPPED(begin, "_ZN8spillway14GradientMemory10begin_stepEv", void, GradientMemory* memory)
SPILLWAY_WRAPPED(come, "_ZN8spillway14GradientMemory4comeEj", void, GradientMemory* memory, std::uint32_t block)
SPILLWAY_WRAPPED(stage, "_ZN8spillway14GradientMemory5stageEj", GradientStaging, GradientMemory* memory,
                 std::uint32_t block)
SPILLWAY_WRAPPED(complete, "_ZN8spillway14GradientMemory8completeEj", GradientDown, GradientMemory* memory,
                 std::uint32_t block)
SPILLWAY_WRAPPED(updated, "_ZN8spillway14GradientMemory7updatedEj", void, GradientMemory* memory, std::uint32_t block)
SPILLWAY_WRAPPED(copied, "_ZN8spillway14GradientMemory6copiedEv", void, GradientMemory* memory)
SPILLWAY_WRAPPED(written, "_ZN8spillway14GradientMemory7writtenEj", void, GradientMemory* memory, std::uint32_t staging)
SPILLWAY_WRAPPED(mark, "_ZN8spillway8Timeline5beginERKNS_4SpanERNS_6StreamE", Timeline::Mark*, Timeline* timeline,
                 const Span& span, Stream& stream)
SPILLWAY_WRAPPED(spill, "_ZN8spillway12BlockSpiller5startERNS_10BlockSpillE", void, BlockSpiller* spiller,
                 BlockSpill& spill)

void wrapped_begin(GradientMemory* memory) {
  note({.what = Told::kBegin});
  real_begin(memory);
}
void wrapped_come(GradientMemory* memory, std::uint32_t block) {
  note({.what = Told::kCome, .subject = block});
  real_come(memory, block);
}
GradientStaging wrapped_stage(GradientMemory* memory, std::uint32_t block) {
  const GradientStaging answer = real_stage(memory, block);
  note({.what = Told::kStage, .subject = block, .staging = answer});
  return answer;
}
GradientDown wrapped_complete(GradientMemory* memory, std::uint32_t block) {
  const GradientDown answer = real_complete(memory, block);
  note({.what = Told::kComplete, .subject = block, .down = answer});
  return answer;
}
void wrapped_updated(GradientMemory* memory, std::uint32_t block) {
  note({.what = Told::kUpdated, .subject = block});
  real_updated(memory, block);
}
void wrapped_copied(GradientMemory* memory) {
  note({.what = Told::kCopied});
  real_copied(memory);
}
void wrapped_written(GradientMemory* memory, std::uint32_t staging) {
  note({.what = Told::kWritten, .subject = staging});
  real_written(memory, staging);
}
Timeline::Mark* wrapped_mark(Timeline* timeline, const Span& span, Stream& stream) {
  const auto block = static_cast<std::uint32_t>(span.subject);
  if (moves && span.kind == SpanKind::kGradientDown) moves->push_back({.block = block, .bytes = span.bytes});
  return real_mark(timeline, span, stream);
}
void wrapped_spill(BlockSpiller* spiller, BlockSpill& spill) {
  for (const SpillPiece& piece : spill.pieces) {
    if (spills) spills->push_back({piece.extent.offset, piece.extent.bytes, piece.payload_bytes});
  }
  real_spill(spiller, spill);
}

namespace {

using testing::TempStore;
using testing::ToyTrainer;

constexpr std::uint32_t kBlocks = 7, kMicroBatches = 2;
constexpr int kSteps = 6;

struct Record {
  std::vector<Event> events;
  std::vector<Move> moves;
  std::vector<Spilled> spills;
};

class Recording {
 public:
  explicit Recording(Record& record) {
    events = &record.events;
    moves = &record.moves;
    spills = &record.spills;
  }
  ~Recording() {
    events = nullptr;
    moves = nullptr;
    spills = nullptr;
  }
};

void replay(const Plan& plan, const std::vector<Event>& told) {
  GradientMemory memory(step_policies(plan).gradients);
  for (std::size_t i = 0; i < told.size(); ++i) {
    Event again{.what = told[i].what, .subject = told[i].subject};
    switch (again.what) {
      case Told::kBegin: memory.begin_step(); break;
      case Told::kCome: memory.come(again.subject); break;
      case Told::kStage: again.staging = memory.stage(again.subject); break;
      case Told::kComplete: again.down = memory.complete(again.subject); break;
      case Told::kUpdated: memory.updated(again.subject); break;
      case Told::kCopied: memory.copied(); break;
      case Told::kWritten: memory.written(again.subject); break;
    }
    ASSERT_EQ(again, told[i]) << "event " << i;
  }
}

// What no clock decides: which staging a block gets and what that waits for, what goes down from there, and what a
// step's end finds written and copied. When the caller's parts come is not the schedule's, and what early updates have
// left free by then is a matter of time, and so is the memory that a gradient passes.
std::vector<Event> in_order(const std::vector<Event>& told) {
  std::vector<Event> kept;
  for (Event event : told) {
    if (event.what == Told::kCome || event.what == Told::kUpdated) continue;
    const auto same = [&](const Event& e) { return e.what == Told::kStage && e.subject == event.subject; };
    const auto step = std::find_if(kept.rbegin(), kept.rend(), [](const Event& e) { return e.what == Told::kBegin; });
    if (event.what == Told::kStage && std::find_if(kept.rbegin(), step, same) != step) continue;
    if (event.down) event.down->passing.reset();
    kept.push_back(event);
  }
  return kept;
}

// What the memory counts on, whoever tells it: a block comes in the step in which it is staged. So whatever has no home
// goes down to memory that it passes, and nothing else does.
void expect_rules_kept(const Plan& plan, const std::vector<Event>& told) {
  std::set<std::uint32_t> come;
  for (const Event& event : told) {
    if (event.what == Told::kBegin) come.clear();
    if (event.what == Told::kCome) come.insert(event.subject);
    if (event.what == Told::kStage) {
      EXPECT_TRUE(come.contains(event.subject)) << "block " << event.subject;
    }
    if (!event.down) continue;
    EXPECT_EQ(event.down->passing.has_value(), !plan.blocks[event.down->block].gradient_home.has_value());
  }
}

std::vector<std::uint32_t> updated_of(const std::vector<Event>& told) {
  std::vector<std::uint32_t> blocks;
  for (const Event& event : told) {
    if (event.what == Told::kUpdated) blocks.push_back(event.subject);
  }
  return blocks;
}

struct Scheduled {
  std::vector<Move> moves;
  std::vector<Spilled> spills;
};

Scheduled on_the_link(const Plan& plan, const std::vector<ScheduleOp>& ops) {
  Scheduled found;
  std::uint32_t last_tile = kNothing;
  for (const ScheduleOp& op : ops) {
    if (op.kind == OpKind::kStep) last_tile = kNothing;
    if (op.kind != OpKind::kCopyGradient && op.kind != OpKind::kSpillGradient) continue;
    const TilePlan& tile = plan.tiles[op.tile];
    if (plan.blocks[op.block].gradient_home == Placement::kNvme) {
      if (op.tile != last_tile) found.spills.push_back({.offset = tile.gradient.offset});
      (op.kind == OpKind::kCopyGradient ? found.spills.back().payload : found.spills.back().bytes) += op.bytes;
    } else if (last_tile != kNothing && plan.tiles[last_tile].block == op.block) {
      found.moves.back().bytes += op.bytes;
    } else {
      found.moves.push_back({.block = op.block, .bytes = op.bytes});
    }
    last_tile = op.tile;
  }
  return found;
}

Plan compare(const std::function<void(Config&)>& change,
             const ModelDescription& model = testing::toy_model(kBlocks, 20'000, kMicroBatches)) {
  TempStore store;
  Config config = testing::toy_config(Placement::kNvme, Placement::kNvme, DType::kBFloat16, store.path());
  config.tile_elements = 16 * kKiB;
  config.commit_every = 1;
  change(config);
  const Plan plan = make_plan(config, model);
  Record run, planned;
  {
    EngineOptions options;
    options.trace = store.path() / "trace.json";
    const Recording recording(run);
    auto engine = Engine::create(config, model, options);
    engine->import_weights(testing::toy_weights());
    ToyTrainer trainer{*engine, model, config.weights, kMicroBatches};
    trainer.in_turn = std::ranges::count(model.visits, Visit{0, Pass::kForward}) > 1;
    for (int step = 0; step < kSteps; ++step) trainer.run_step();
  }
  EXPECT_FALSE(run.events.empty());
  replay(plan, run.events);

  Plan scheduled = plan;
  for (const std::uint32_t block : speculated_blocks(plan, *config.speculative_blocks)) {
    scheduled.blocks[block].early = true;
  }
  const ScheduleInput input = schedule_input(scheduled, {}, {});
  ScheduleProgram program(input);
  {
    const Recording recording(planned);
    for (int step = 0; step < kSteps; ++step) program.add_step();
  }
  // After its last step the engine has begun another.
  while (!run.events.empty() && run.events.back().what == Told::kBegin) run.events.pop_back();
  EXPECT_EQ(in_order(run.events), in_order(planned.events));
  expect_rules_kept(plan, run.events);
  expect_rules_kept(plan, planned.events);
  if (!plan.blocks[1].speculative) {  // guesses begin after two steps
    EXPECT_EQ(updated_of(run.events), updated_of(planned.events));
  }
  const Scheduled link = on_the_link(plan, program.ops());
  EXPECT_EQ(run.moves, link.moves);
  const std::uint64_t scratch =
      plan.has_store ? space_bytes(store_shape(plan)) - align_up(plan.scratch_bytes, kExtentAlignment) : 0;
  for (Spilled& spilled : run.spills) spilled.offset -= scratch;
  EXPECT_EQ(run.spills, link.spills);
  return plan;
}

TEST(GradientOrder, IsTheSchedulesWhereGradientsHaveMemoryOfTheirOwn) {
  compare([](Config&) {});
  compare([](Config& config) { config.states = Placement::kHost; });
  compare([](Config& config) { config.parameters = Placement::kHbm; });
}

TEST(GradientOrder, IsTheSchedulesWhereTheyPass) {
  const Plan plan = compare([](Config& config) { config.gradient_clipping = 0; });
  EXPECT_FALSE(plan.host.passing.empty());
}

TEST(GradientOrder, IsTheSchedulesOnAGuess) {
  const Plan plan = compare([](Config& config) {
    config.gradient_clipping = 1e9;
    config.speculative_blocks = 3;
  });
  EXPECT_TRUE(plan.blocks[1].speculative);
}

TEST(GradientOrder, IsTheSchedulesWhereTheyAreSpilled) {
  const ModelDescription model = testing::toy_model(kBlocks, 60'000, kMicroBatches);
  const Plan plan = compare([](Config& config) { config.host_bytes = 8 * kMiB; }, model);
  EXPECT_GT(plan.spill_bytes, 0u);
}

// The least budget that does: few chunks are asked for, so that what is beside them may be small.
TEST(GradientOrder, IsTheSchedulesWhereSomeAreSpilled) {
  const ModelDescription model = testing::toy_model(kBlocks, 60'000, kMicroBatches);
  const auto kept = [](const Plan& plan) {
    return std::ranges::count(plan.blocks, Home(Placement::kHost), &BlockPlan::gradient_home);
  };
  const Plan plan = compare(
      [&](Config& config) {
        config.knobs.param_buffer_count = 1;
        config.knobs.param_buffer_size = 1;
        for (config.host_bytes = 8 * kMiB; config.host_bytes < 64 * kMiB; *config.host_bytes += 256 * kKiB) {
          if (kept(make_plan(config, model)) > 0) return;
        }
      },
      model);
  EXPECT_GT(plan.spill_bytes, 0u);
  EXPECT_GT(kept(plan), 0);
}

TEST(GradientOrder, IsTheSchedulesWhereSumsMove) {
  const ModelDescription model = testing::toy_model(kBlocks, 20'000, kMicroBatches, true, true);
  compare([](Config&) {}, model);
}

TEST(GradientOrder, IsTheSchedulesWhereABlockIsFrozen) {
  ModelDescription model = testing::toy_model(kBlocks, 20'000, kMicroBatches);
  for (Parameter& parameter : model.blocks[3].parameters) parameter.trainable = false;
  compare([](Config&) {}, model);
}

}  // namespace
}  // namespace spillway
