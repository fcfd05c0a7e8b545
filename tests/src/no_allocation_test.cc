// From step 3 on the data path takes nothing from the heap: every byte of a run was reserved when it was created.
#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "kernels/workers.h"
#include "src/plan/plan.h"
#include "tests/heap_watch.h"
#include "tests/src/named_budget.h"
#include "tests/src/pretended_nodes.h"
#include "tests/src/toy_trainer.h"
#include "tests/src/uses_between_visits.h"
#include "tests/swap/activation_uses.h"

namespace spillway {
namespace {

using testing::toy_config;

constexpr std::uint32_t kMicroBatches = 2;

// Every thread that computes has done so when this returns. oneTBB allocates for a thread that comes for the first
// time, and on a busy machine one may come late.
void meet(Engine& engine) {
  engine.stream().launch([](HostWorkers& workers) {
    std::atomic<unsigned> arrived = 0;
    workers.parallel_for(workers.threads(), [&](std::size_t) {
      arrived.fetch_add(1);
      while (arrived < workers.threads()) std::this_thread::yield();
    });
  });
  engine.stream().synchronize();
}

// Allocations of the whole process in steps 3 to 6.
std::uint64_t allocations(
    const Config& config, const ModelDescription& model, std::uint32_t unplanned = 0, const EngineOptions& options = {},
    decltype(testing::ToyTrainer::brings) brings = [](auto&) { return testing::Brings::kGradient; },
    std::uint32_t passes = 0) {
  auto engine = Engine::create(config, model, options);
  engine->import_weights(testing::toy_weights());
  testing::ToyTrainer trainer{*engine, model, config.weights, kMicroBatches};
  trainer.brings = brings;
  trainer.between = [&] {
    for (std::uint32_t i = 0; i < unplanned; ++i) engine->acquire(i % 5, Pass::kForward, engine->stream());
  };
  const auto step = [&] {
    for (std::uint32_t v = 0; v < passes * model.blocks.size(); ++v) {
      engine->acquire(v % static_cast<std::uint32_t>(model.blocks.size()), Pass::kForward, engine->stream());
    }
    trainer.run_step();
  };
  for (int s = 0; s < 2; ++s) step();
  meet(*engine);
  start_heap_watch();
  for (int s = 0; s < 4; ++s) step();
  const std::uint64_t count = stop_heap_watch();
  if (count > 0) print_heap_watch();
  EXPECT_EQ(engine->current_step(), 6u);
  return count;
}

TEST(NoAllocation, TheWatchSeesEveryKindOfAllocationOnEveryThread) {
  std::thread idle;
  start_heap_watch();
  // volatile: the compiler may leave out an allocation whose memory nobody looks at.
  void* volatile memory[] = {::operator new(10), std::malloc(10), std::calloc(1, 10), std::aligned_alloc(64, 64)};
  const std::uint64_t mine = stop_heap_watch();
  EXPECT_EQ(mine, 4u);
  ::operator delete(memory[0]);
  for (int i = 1; i < 4; ++i) std::free(memory[i]);
  start_heap_watch();
  std::thread([] { std::free(std::malloc(100)); }).join();
  EXPECT_GE(stop_heap_watch(), 1u);
}

TEST(NoAllocation, FromStepThreeOnWhereverTensorsLive) {
  const std::pair<Placement, Placement> placements[] = {{Placement::kNvme, Placement::kNvme},
                                                        {Placement::kHost, Placement::kNvme},
                                                        {Placement::kHbm, Placement::kHost},
                                                        {Placement::kHbm, Placement::kHbm}};
  const ModelDescription model = testing::toy_model(5, 3000, kMicroBatches);
  for (const auto& [parameters, states] : placements) {
    for (const auto& [type, clipping] :
         {std::pair(DType::kBFloat16, 1.0), std::pair(DType::kFloat32, 1.0), std::pair(DType::kBFloat16, 0.0)}) {
      testing::TempStore store;
      Config config = toy_config(parameters, states, type, store.path());
      config.gradient_clipping = clipping;
      EXPECT_EQ(allocations(config, model), 0u)
          << name_of(type) << ", clipping " << clipping << ", weights " << static_cast<int>(parameters) << ", states "
          << static_cast<int>(states);
    }
  }
}

TEST(NoAllocation, WithParametersThatAreLeftOutOfSteps) {
  const ModelDescription model = testing::toy_model(5, 3000, kMicroBatches);
  for (const Placement placement : {Placement::kNvme, Placement::kHost, Placement::kHbm}) {
    testing::TempStore store;
    const Config config = toy_config(placement, placement, DType::kBFloat16, store.path());
    const auto brings = [](const testing::ToyPush& push) {
      return (push.block + push.step) % 3 == push.parameter ? testing::Brings::kNothing : testing::Brings::kGradient;
    };
    EXPECT_EQ(allocations(config, model, 0, {}, brings), 0u) << static_cast<int>(placement);
  }
}

TEST(NoAllocation, WithAPlaceForEveryOfManyBlocksAndWithFew) {
  const ModelDescription model = testing::toy_model(80, 1000, kMicroBatches);
  for (const std::optional<std::uint64_t> live : {std::optional<std::uint64_t>{}, std::optional<std::uint64_t>{0}}) {
    testing::TempStore store;
    Config config = toy_config(Placement::kHost, Placement::kNvme, DType::kBFloat16, store.path());
    config.hbm_bytes = 16 << 20;
    config.knobs.max_live_parameters = config.knobs.max_reuse_distance = live;
    EXPECT_EQ(make_plan(config, model).hbm.places.size(), live ? 2u : 81u);
    EXPECT_EQ(allocations(config, model), 0u) << live.has_value();
  }
}

// With so few spans the ring is full in step 3.
TEST(NoAllocation, WithATrace) {
  const ModelDescription model = testing::toy_model(5, 3000, kMicroBatches);
  for (Placement placement : {Placement::kNvme, Placement::kHost, Placement::kHbm}) {
    for (std::size_t spans : {std::size_t{100}, std::size_t{1} << 16}) {
      testing::TempStore store;
      const Config config = toy_config(placement, placement, DType::kBFloat16, store.path() / "store");
      EXPECT_EQ(allocations(config, model, 0, {.trace = store.path() / "trace.json", .trace_spans = spans}), 0u);
    }
  }
}

TEST(NoAllocation, WithEitherIoEngineAndAnyNumberOfThreads) {
  const ModelDescription model = testing::toy_model(5, 3000, kMicroBatches);
  for (IoEngineKind io : {IoEngineKind::kAuto, IoEngineKind::kThreads}) {
    for (unsigned threads : {1u, 4u}) {
      testing::TempStore store;
      Config config = toy_config(Placement::kNvme, Placement::kNvme, DType::kBFloat16, store.path());
      config.io_engine = io;
      config.threads = threads;
      EXPECT_EQ(allocations(config, model), 0u) << threads << " threads";
    }
  }
}

TEST(NoAllocation, OnSeveralNodes) {
  const ModelDescription model = testing::toy_model(5, 3000, kMicroBatches);
  for (unsigned nodes : {2u, 3u}) {
    const testing::PretendedNodes pretended(nodes);
    for (Placement placement : {Placement::kNvme, Placement::kHost}) {
      testing::TempStore store;
      Config config = toy_config(placement, placement, DType::kBFloat16, store.path());
      config.threads = 2 * nodes;
      EXPECT_EQ(allocations(config, model), 0u) << nodes << " nodes";
    }
  }
}

// As an evaluation between two steps makes them.
TEST(NoAllocation, WithManyVisitsOutOfPlan) {
  testing::TempStore store;
  EXPECT_EQ(allocations(toy_config(Placement::kNvme, Placement::kNvme, DType::kBFloat16, store.path()),
                        testing::toy_model(5, 3000, kMicroBatches), 9),
            0u);
}

// Passes over the whole model, as an evaluation or a text in the making has them.
TEST(NoAllocation, WithPassesBetweenSteps) {
  const ModelDescription model = testing::toy_model(5, 3000, kMicroBatches);
  for (const std::uint64_t more : {0u, 2u, 5u}) {
    testing::TempStore store;
    Config config = toy_config(Placement::kNvme, Placement::kNvme, DType::kBFloat16, store.path());
    const Plan plan = make_plan(config, model);
    config.hbm_bytes = plan.ledger.total(Placement::kHbm) + more * plan.hbm.places.back().bytes;
    EXPECT_EQ(allocations(
                  config, model, 0, {}, [](auto&) { return testing::Brings::kGradient; }, 3),
              0u)
        << more;
  }
}

// Many on their way at a time, down and up, in host memory and on NVMe.
TEST(NoAllocation, WithActivationsThatMove) {
  constexpr std::uint32_t kBlocks = 5, kHeld = 2, kParts = 2 * kBlocks + 4;
  ModelDescription model = testing::toy_model(kBlocks, 3000, kMicroBatches);
  model.activation_uses = testing::transformer_uses(kBlocks, 40);
  model.activations.assign((kBlocks + 1) * 40, {.bytes = 20'000});
  model.activations_held = kHeld;
  for (const bool on_nvme : {false, true}) {
    testing::TempStore store;
    Config config = toy_config(Placement::kNvme, Placement::kNvme, DType::kBFloat16, store.path());
    config.hbm_bytes = make_plan(config, model).ledger.total(Placement::kHbm) - (2 << 20);
    if (on_nvme) {
      config.host_bytes = 1;
      try {
        make_plan(config, model);
      } catch (const Error& error) {
        config.host_bytes = testing::named_bytes(error);
      }
    }
    const Plan plan = make_plan(config, model);
    ASSERT_FALSE(plan.activations.uses.empty());
    EXPECT_EQ(on_nvme, plan.nvme.activations.bytes > 0);
    auto engine = Engine::create(config, model);
    engine->import_weights(testing::toy_weights());
    testing::ToyTrainer trainer{*engine, model, config.weights, kMicroBatches};
    testing::UsesBetweenVisits uses(*engine, model, kHeld, kParts);
    trainer.between = [&] { uses.run_part(); };
    for (int s = 0; s < 2; ++s) trainer.run_step();
    meet(*engine);
    start_heap_watch();
    for (int s = 0; s < 4; ++s) trainer.run_step();
    const std::uint64_t count = stop_heap_watch();
    if (count > 0) print_heap_watch();
    EXPECT_EQ(count, 0u) << (on_nvme ? "on nvme" : "in host memory");
    EXPECT_EQ(uses.wrong(), 0u);
  }
}

// The order of visits that step 1 recorded is planned anew for step 2, and never again.
TEST(NoAllocation, WithAnOrderThatWasLearnt) {
  testing::TempStore store;
  EXPECT_EQ(allocations(toy_config(Placement::kNvme, Placement::kNvme, DType::kBFloat16, store.path()),
                        testing::toy_model(5, 3000, kMicroBatches, false)),
            0u);
}

}  // namespace
}  // namespace spillway
