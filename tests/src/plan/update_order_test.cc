// A run reads, updates and writes its tiles in the order of its schedule, and does so because the queue of the update
// says it: what the queue was told in a run brings the same answers from another.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

#include "spillway/units.h"
#include "src/engine/clip_guess.h"
#include "src/plan/node_tiles.h"
#include "src/plan/schedule.h"
#include "swap/policy/update_queue.h"
#include "swap/tile_mover.h"
#include "tests/src/pretended_nodes.h"
#include "tests/src/toy_trainer.h"

namespace spillway {
namespace {

constexpr std::uint32_t kBlocks = 8, kMicroBatches = 2;
constexpr int kSteps = 4;

// A call of a queue, and what it has answered.
struct Call {
  std::variant<std::vector<std::uint32_t>, std::pair<QueueEvent, std::uint32_t>, Moves, std::pair<Turns, std::uint32_t>,
               std::tuple<std::size_t, bool, bool>>
      call;
  std::variant<std::monostate, bool, std::optional<TileMove>, std::optional<TileTurn>, TileEnd> answer;
};

struct Moved {
  OpKind kind;
  std::uint32_t tile, buffer;
  bool operator==(const Moved&) const = default;
};

// What the engine under test does; the linker brings its calls here.
struct Watched {
  bool on = false;
  std::optional<UpdateQueueOptions> options;
  std::vector<Call> calls;
  std::vector<Moved> moved;
  std::vector<std::uint32_t> tile_of;  // by buffer
  bool finishing = false;              // a load, with its check
};
Watched watched;

void watch() {
  watched = {};
  watched.on = true;
}

std::uint32_t& tile_in(std::uint32_t buffer) {
  if (watched.tile_of.size() <= buffer) watched.tile_of.resize(buffer + 1);
  return watched.tile_of[buffer];
}

void note(Call call) {
  if (watched.on) watched.calls.push_back(std::move(call));
}

}  // namespace

// The functions below have no other name than what the linker makes of it.
#define SPILLWAY_WATCHED(result, name, mangled, ...)      \
  result real_##name(__VA_ARGS__) asm("__real_" mangled); \
  result watched_##name(__VA_ARGS__) asm("__wrap_" mangled)

SPILLWAY_WATCHED(void, queue, "_ZN8spillway11UpdateQueueC1ENS_18UpdateQueueOptionsE", UpdateQueue*,
                 UpdateQueueOptions*);
SPILLWAY_WATCHED(bool, expect, "_ZN8spillway11UpdateQueue6expectESt4spanIKjLm18446744073709551615EE", UpdateQueue*,
                 std::span<const std::uint32_t>);
SPILLWAY_WATCHED(void, tell, "_ZN8spillway11UpdateQueue4tellENS_10QueueEventEj", UpdateQueue*, QueueEvent,
                 std::uint32_t);
SPILLWAY_WATCHED(std::optional<TileMove>, next_move, "_ZN8spillway11UpdateQueue9next_moveENS_5MovesE", UpdateQueue*,
                 Moves);
SPILLWAY_WATCHED(std::optional<TileTurn>, next_turn, "_ZN8spillway11UpdateQueue9next_turnENS_5TurnsEj", UpdateQueue*,
                 Turns, std::uint32_t);
SPILLWAY_WATCHED(TileEnd, end_tile, "_ZN8spillway11UpdateQueue8end_tileEmbb", UpdateQueue*, std::size_t, bool, bool);
SPILLWAY_WATCHED(void, start_load, "_ZN8spillway9TileMover10start_loadEjjNS_4LoadE", TileMover*, std::uint32_t,
                 std::uint32_t, Load);
SPILLWAY_WATCHED(void, load_gradient, "_ZN8spillway9TileMover13load_gradientEjRKNS_6ExtentEm", TileMover*,
                 std::uint32_t, const Extent&, std::uint64_t);
SPILLWAY_WATCHED(TileMemory, arrive, "_ZN8spillway9TileMover6arriveEj", TileMover*, std::uint32_t);
SPILLWAY_WATCHED(TileMemory, finish_load, "_ZN8spillway9TileMover11finish_loadEj", TileMover*, std::uint32_t);
SPILLWAY_WATCHED(void, start_save, "_ZN8spillway9TileMover10start_saveEjNS_4SaveEPSt4byte", TileMover*, std::uint32_t,
                 Save, std::byte*);
#undef SPILLWAY_WATCHED

void watched_queue(UpdateQueue* queue, UpdateQueueOptions* options) {
  if (watched.on) watched.options = *options;
  real_queue(queue, options);
}
bool watched_expect(UpdateQueue* queue, std::span<const std::uint32_t> blocks) {
  const bool answer = real_expect(queue, blocks);
  note({std::vector<std::uint32_t>(blocks.begin(), blocks.end()), answer});
  return answer;
}
void watched_tell(UpdateQueue* queue, QueueEvent event, std::uint32_t subject) {
  real_tell(queue, event, subject);
  note({std::pair(event, subject), std::monostate()});
}
std::optional<TileMove> watched_next_move(UpdateQueue* queue, Moves allowed) {
  const auto answer = real_next_move(queue, allowed);
  note({allowed, answer});
  return answer;
}
std::optional<TileTurn> watched_next_turn(UpdateQueue* queue, Turns which, std::uint32_t block) {
  const auto answer = real_next_turn(queue, which, block);
  note({std::pair(which, block), answer});
  return answer;
}
TileEnd watched_end_tile(UpdateQueue* queue, std::size_t position, bool finite, bool delivered) {
  const TileEnd answer = real_end_tile(queue, position, finite, delivered);
  note({std::tuple(position, finite, delivered), answer});
  return answer;
}
void watched_start_load(TileMover* mover, std::uint32_t tile, std::uint32_t buffer, Load from) {
  tile_in(buffer) = tile;
  watched.moved.push_back({OpKind::kReadTile, tile, buffer});
  real_start_load(mover, tile, buffer, from);
}
void watched_load_gradient(TileMover* mover, std::uint32_t buffer, const Extent& from, std::uint64_t checksum) {
  watched.moved.push_back({OpKind::kReadGradient, tile_in(buffer), buffer});
  real_load_gradient(mover, buffer, from, checksum);
}
// Of an update alone: all else asks for a load's end with its check. That asks for this one in the mover's own file,
// which not every linker brings here.
TileMemory watched_arrive(TileMover* mover, std::uint32_t buffer) {
  if (!watched.finishing) watched.moved.push_back({OpKind::kUpdate, tile_in(buffer), buffer});
  return real_arrive(mover, buffer);
}
TileMemory watched_finish_load(TileMover* mover, std::uint32_t buffer) {
  watched.finishing = true;
  const TileMemory memory = real_finish_load(mover, buffer);
  watched.finishing = false;
  return memory;
}
void watched_start_save(TileMover* mover, std::uint32_t buffer, Save kind, std::byte* delivered) {
  const OpKind written = kind == Save::kUpdated ? OpKind::kWriteTile : OpKind::kHashTile;  // the latter at a commit
  watched.moved.push_back({written, tile_in(buffer), buffer});
  real_start_save(mover, buffer, kind, delivered);
}

namespace {

using testing::TempStore;
using testing::ToyTrainer;

using Kinds = std::vector<OpKind>;

// What moves of these kinds, as the schedule has it: of a tile that has bytes there.
std::vector<Moved> of_kinds(const std::vector<Moved>& moved, const ScheduleInput& input, const Kinds& kinds) {
  std::vector<Moved> found;
  for (Moved one : moved) {
    const ScheduleTile& tile = input.tiles[one.tile];
    if (one.kind == OpKind::kReadTile && tile.read_bytes == 0) continue;
    if (one.kind == OpKind::kWriteTile && tile.write_bytes == 0) continue;
    if (one.kind == OpKind::kHashTile) one.kind = OpKind::kWriteTile;
    if (std::ranges::count(kinds, one.kind) > 0) found.push_back(one);
  }
  return found;
}

// The run is cut where a step returns, so that it begins anywhere in the order of a step.
void expect_order(const char* link, const std::vector<Moved>& run, const std::vector<Moved>& step, std::size_t cut) {
  if (run.empty() && step.empty()) return;  // nothing of it moves there
  ASSERT_FALSE(step.empty()) << link;
  EXPECT_LE(run.size(), kSteps * step.size() + cut) << link;
  EXPECT_GE(run.size() + cut, kSteps * step.size()) << link;
  for (std::size_t first = 0; first < step.size(); ++first) {
    std::size_t same = 0;
    while (same < run.size() && run[same] == step[(first + same) % step.size()]) ++same;
    if (same == run.size()) return;
  }
  ADD_FAILURE() << link << ": another order than the schedule's";
}

// Of what both tell, whatever their clocks say.
std::set<QueueEvent> told_in(const std::vector<Call>& calls) {
  std::set<QueueEvent> told;
  for (const Call& call : calls) {
    const auto* event = std::get_if<std::pair<QueueEvent, std::uint32_t>>(&call.call);
    if (!event) continue;
    for (const QueueEvent both :
         {QueueEvent::kComplete, QueueEvent::kFetched, QueueEvent::kTurnDone, QueueEvent::kBegin, QueueEvent::kEnd}) {
      if (event->first == both) told.insert(both);
    }
  }
  return told;
}

// What must be asked next after a call: nothing, or what may move, until nothing does.
std::optional<Moves> moves_after(const Call& call) {
  if (const auto* known = std::get_if<std::vector<std::uint32_t>>(&call.call); known && std::get<bool>(call.answer))
    return Moves::kAll;
  if (const auto* told = std::get_if<std::pair<QueueEvent, std::uint32_t>>(&call.call)) {
    switch (told->first) {
      case QueueEvent::kComplete:
      case QueueEvent::kFetched:
      case QueueEvent::kBeginCheck:
      case QueueEvent::kTurnDone: return Moves::kAll;
      case QueueEvent::kBegin: return Moves::kGradients;
      default: break;
    }
  }
  return std::nullopt;
}

// What the queue counts on: whatever brings work, or ends a turn, is followed by the moves that come of it; of each
// turn all moves are made before a tile of it ends; and tiles are waited for once every gradient is complete, not
// before.
void expect_rules_kept(std::span<const Call> calls) {
  bool moved = true, waited = false;
  std::optional<Moves> due;
  std::optional<TileTurn> turn;
  for (std::size_t i = 0; i < calls.size(); ++i) {
    const Call& call = calls[i];
    if (const auto* allowed = std::get_if<Moves>(&call.call)) {
      ASSERT_TRUE(!due || *allowed >= *due) << "call " << i;
      if (!std::get<std::optional<TileMove>>(call.answer)) due.reset(), moved = moved || *allowed == Moves::kAll;
      continue;
    }
    ASSERT_FALSE(due) << "call " << i;
    due = moves_after(call);
    if (const auto* told = std::get_if<std::pair<QueueEvent, std::uint32_t>>(&call.call)) {
      if (told->first == QueueEvent::kBegin || told->first == QueueEvent::kEnd) waited = false;
      ASSERT_FALSE(waited && told->first == QueueEvent::kComplete) << "call " << i;
    } else if (const auto* which = std::get_if<std::pair<Turns, std::uint32_t>>(&call.call)) {
      waited = waited || which->first == Turns::kEarlyAll;
      if (const auto& next = std::get<std::optional<TileTurn>>(call.answer)) turn = next, moved = false;
    } else if (std::holds_alternative<std::tuple<std::size_t, bool, bool>>(call.call)) {
      ASSERT_TRUE(moved || turn->kind == TileTurn::Kind::kPassOver) << "call " << i;
    }
  }
}

// The schedule begins in the middle of a step: after it.
std::size_t first_begin(const std::vector<Call>& calls) {
  const auto begins = [](const Call& call) {
    const auto* told = std::get_if<std::pair<QueueEvent, std::uint32_t>>(&call.call);
    return told && told->first == QueueEvent::kBegin;
  };
  return static_cast<std::size_t>(std::ranges::find_if(calls, begins) - calls.begin());
}

// What has been read and written is told, so that tiles are read ahead: by the schedule's clock, where it always has.
void expect_pipelined(const std::vector<Call>& calls) {
  bool moved = true, reads_ahead = false;
  std::size_t saved = 0, written = 0, read = 0;
  for (const Call& call : calls) {
    if (const auto* told = std::get_if<std::pair<QueueEvent, std::uint32_t>>(&call.call)) {
      written += told->first == QueueEvent::kWritten;
      read += told->first == QueueEvent::kRead;
    } else if (std::holds_alternative<Moves>(call.call)) {
      const auto& move = std::get<std::optional<TileMove>>(call.answer);
      if (move && move->kind == TileMove::Kind::kLoad && moved) reads_ahead = true;
      moved = moved || !move;
    } else if (std::holds_alternative<std::pair<Turns, std::uint32_t>>(call.call)) {
      if (std::get<std::optional<TileTurn>>(call.answer)) moved = false;
    } else if (std::holds_alternative<std::tuple<std::size_t, bool, bool>>(call.call)) {
      saved += std::get<TileEnd>(call.answer) == TileEnd::kSave;
    }
  }
  // What is updated in place is neither read nor written.
  const auto& in_place = watched.options->in_place;
  const bool passes = in_place.empty() || std::ranges::count(in_place, 0) > 0;
  if (passes && saved > 4 * watched.options->buffers) {
    EXPECT_GT(written, 0u);
  }
  if (watched.options->early_planned && watched.options->reads_ahead) {
    EXPECT_GT(read, 0u);
  }
  EXPECT_EQ(reads_ahead, passes && watched.options->reads_ahead);
}

struct Case {
  Placement parameters = Placement::kNvme, states = Placement::kNvme;
  std::function<void(Config&)> change = [](Config&) {};
  unsigned nodes = 1;
};

Plan compare(const Case& of) {
  const testing::PretendedNodes pretended(of.nodes);
  const ModelDescription model = testing::toy_model(kBlocks, 60'000, kMicroBatches);
  TempStore store;
  Config config = testing::toy_config(of.parameters, of.states, DType::kBFloat16, store.path());
  config.threads = 2 * of.nodes;
  config.tile_elements = 64 * kKiB;
  config.commit_every = 1;
  of.change(config);
  const Plan plan = make_plan(config, model, of.nodes);
  Plan scheduled = plan;
  for (const std::uint32_t block : speculated_blocks(plan, *config.speculative_blocks)) {
    scheduled.blocks[block].early = true;
  }
  const ScheduleInput input = schedule_input(scheduled, {}, {}, of.nodes);
  EXPECT_EQ(input.policies.updates.nodes, of.nodes);
  watch();
  const Schedule schedule = make_schedule(input);
  const std::set<QueueEvent> planned_events = told_in(watched.calls);
  expect_pipelined(watched.calls);
  expect_rules_kept(std::span(watched.calls).subspan(first_begin(watched.calls)));
  std::vector<Moved> step;
  for (const ScheduleOp& op : std::span(schedule.ops).subspan(schedule.second)) {
    if (op.tile != kNothing) step.push_back({op.kind, op.tile, op.buffer});
  }

  watch();
  auto engine = Engine::create(config, model);
  engine->import_weights(testing::toy_weights());
  ToyTrainer trainer{*engine, model, config.weights, kMicroBatches};
  for (int i = 0; i < 4; ++i) trainer.run_step();  // guesses begin after the second
  watched.moved.clear();
  for (int i = 0; i < kSteps; ++i) trainer.run_step();
  const std::vector<Moved> moved = std::exchange(watched.moved, {});
  watched.on = false;
  EXPECT_EQ(told_in(watched.calls), planned_events);

  const std::size_t cut = 2 * std::size_t{plan.host.buffers_count};
  const auto both = [&](const char* link, const Kinds& kinds) {
    std::vector<Moved> planned;
    for (const Moved& one : step) {
      if (std::ranges::count(kinds, one.kind) > 0) planned.push_back(one);
    }
    expect_order(link, of_kinds(moved, input, kinds), planned, cut);
  };
  both("reads", {OpKind::kReadTile, OpKind::kReadGradient});
  both("updates", {OpKind::kUpdate});
  both("writes", {OpKind::kWriteTile});
  // Each tile is written after its update, and before the next one's.
  if (of.nodes == 1) both("updates and writes", {OpKind::kUpdate, OpKind::kWriteTile});
  return plan;
}

std::pair<bool, std::string> again(UpdateQueue& queue, const Call& call) {
  if (const auto* blocks = std::get_if<std::vector<std::uint32_t>>(&call.call))
    return {queue.expect(*blocks) == std::get<bool>(call.answer), "expect"};
  if (const auto* told = std::get_if<std::pair<QueueEvent, std::uint32_t>>(&call.call)) {
    queue.tell(told->first, told->second);
    return {true, "tell"};
  }
  if (const auto* allowed = std::get_if<Moves>(&call.call))
    return {queue.next_move(*allowed) == std::get<std::optional<TileMove>>(call.answer), "next_move"};
  if (const auto* which = std::get_if<std::pair<Turns, std::uint32_t>>(&call.call)) {
    const auto turn = queue.next_turn(which->first, which->second);
    return {turn == std::get<std::optional<TileTurn>>(call.answer), "next_turn"};
  }
  const auto [position, finite, delivered] = std::get<std::tuple<std::size_t, bool, bool>>(call.call);
  return {queue.end_tile(position, finite, delivered) == std::get<TileEnd>(call.answer), "end_tile"};
}

void expect_replayed() {
  watched.on = false;
  ASSERT_TRUE(watched.options);
  UpdateQueue fresh(*watched.options);
  for (std::size_t i = 0; i < watched.calls.size(); ++i) {
    const auto [same, name] = again(fresh, watched.calls[i]);
    ASSERT_TRUE(same) << name << ", call " << i;
  }
  EXPECT_GT(watched.calls.size(), 500u);
  expect_rules_kept(watched.calls);
}

void nothing(Config&) {}
void without_clipping(Config& config) { config.gradient_clipping = 0; }

TEST(UpdateOrder, IsTheSchedulesWhateverLivesWhere) {
  for (const Placement parameters : {Placement::kNvme, Placement::kHost, Placement::kHbm}) {
    for (const Placement states : {Placement::kNvme, Placement::kHost}) {
      SCOPED_TRACE("placements " + std::to_string(static_cast<int>(parameters)) + " and " +
                   std::to_string(static_cast<int>(states)));
      compare({parameters, states, nothing});
      expect_replayed();
    }
  }
}

TEST(UpdateOrder, IsTheSchedulesWithoutClipping) {
  const Plan plan = compare({.change = without_clipping});
  EXPECT_TRUE(plan.early_blocks);
  expect_replayed();
}

TEST(UpdateOrder, IsTheSchedulesWhenBlocksAreGuessed) {
  for (const std::uint32_t blocks : {1u, 3u, kBlocks}) {
    SCOPED_TRACE(blocks);
    compare({.change = [blocks](Config& config) {
      config.gradient_clipping = 1e9;
      config.speculative_blocks = blocks;
    }});
    expect_replayed();
  }
}

TEST(UpdateOrder, IsTheSchedulesWhenGradientsAreSpilled) {
  const Plan plan = compare({.change = [](Config& config) { config.host_bytes = 8 * kMiB; }});
  EXPECT_GT(plan.spill_bytes, 0u);
  expect_replayed();
}

TEST(UpdateOrder, IsTheSchedulesWithNothingReadAheadOrWrittenBehind) {
  for (const bool reads : {false, true}) {
    compare({.change = [reads](Config& config) {
      config.knobs.pipeline_read = reads;
      config.knobs.pipeline_write = false;
    }});
    expect_replayed();
  }
}

TEST(UpdateOrder, IsTheSchedulesOnSeveralNodes) {
  compare({.nodes = 2});
  expect_replayed();
  compare({.change = without_clipping, .nodes = 2});
  expect_replayed();
}

// Its tiles are passed over, those before the poisoned one too, and so is what completes after it.
TEST(UpdateOrder, StopsInsideBackwardAtAGradientThatIsNotFinite) {
  const ModelDescription model = testing::toy_model(kBlocks, 60'000, 1);
  TempStore store;
  Config config = testing::toy_config(Placement::kNvme, Placement::kNvme, DType::kBFloat16, store.path());
  config.tile_elements = 64 * kKiB;
  config.commit_every = 1;
  config.gradient_clipping = 0;
  const Plan plan = make_plan(config, model);
  auto engine = Engine::create(config, model);
  engine->import_weights(testing::toy_weights());
  ToyTrainer trainer{*engine, model, config.weights, 1};
  trainer.poison_block = 4;
  ASSERT_GT(plan.blocks[4].tiles, 2u);  // the NaN is in the middle
  trainer.run_step();
  engine->flush();
  watch();
  trainer.poison_step = 2;
  EXPECT_THROW(trainer.run_step(), Error);
  watched.on = false;
  std::set<std::uint32_t> updated;
  for (const Call& call : watched.calls) {
    const auto* turn = std::get_if<std::optional<TileTurn>>(&call.answer);
    if (turn && *turn && (*turn)->kind == TileTurn::Kind::kUpdate) updated.insert((*turn)->block);
  }
  EXPECT_EQ(updated, (std::set<std::uint32_t>{5, 6, 7, 8}));
}

// What the schedule knows nothing of: a snapshot, an export, a resume.
TEST(UpdateOrder, ComesFromTheQueueBesideTheSchedule) {
  const ModelDescription model = testing::toy_model(kBlocks, 20'000, 1);
  TempStore store;
  const TempStore directory;
  Config config = testing::toy_config(Placement::kNvme, Placement::kNvme, DType::kBFloat16, store.path());
  config.tile_elements = 64 * kKiB;
  config.commit_every = 1;
  config.gradient_clipping = 1e9;
  config.speculative_blocks = 4;
  watch();
  {
    auto engine = Engine::create(config, model);
    engine->import_weights(testing::toy_weights());
    ToyTrainer trainer{*engine, model, config.weights, 1};
    for (int i = 0; i < 4; ++i) trainer.run_step();
    engine->begin_save(directory.path() / "saved", {});
    trainer.run_step();
    engine->finish_save();
    engine->export_weights(true, [](auto&&...) {});
    trainer.run_step();
  }
  expect_replayed();
  watch();
  {
    auto engine = Engine::create(config, model, {.on_existing = OnExisting::kResume});
    ToyTrainer trainer{*engine, model, config.weights, 1};
    for (int i = 0; i < 3; ++i) trainer.run_step();
  }
  expect_replayed();
}

}  // namespace
}  // namespace spillway
