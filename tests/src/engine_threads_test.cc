// Two threads that call one engine at the same time, and calls from inside of a call.
#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <optional>
#include <thread>

#include "spillway/engine.h"
#include "spillway/error.h"
#include "tests/src/toy_trainer.h"

namespace spillway {
namespace {

constexpr DType kType = DType::kBFloat16;

Code code_of(const std::function<void()>& work) {
  try {
    work();
  } catch (const Error& error) {
    return error.code();
  }
  ADD_FAILURE() << "nothing was refused";
  return Code::kUnsupported;
}

TEST(EngineThreads, ASecondThreadAtTheSameTimeIsRefused) {
  const testing::TempStore store;
  const ModelDescription model = testing::toy_model(4, 2000, 2);
  const auto made = Engine::create(testing::toy_config(Placement::kNvme, Placement::kNvme, kType, store.path()), model);
  Engine& engine = *made;
  engine.import_weights(testing::toy_weights());
  testing::ToyTrainer trainer{engine, model, kType, 2};
  trainer.run_step();
  std::optional<Lease> lease(engine.acquire(0, Pass::kForward, engine.stream()));
  const std::function<void()> calls[] = {
      [&] { engine.acquire(0, Pass::kForward, engine.stream()); },
      [&] {
        engine.push_gradient({0, 0, engine.workspace().data(), DType::kFloat32}, engine.stream());
      },
      [&] { engine.step(); },
      [&] { engine.discard_step(); },
      [&] { engine.flush(); },
      [&] { engine.set_learning_rate(1); },
      [&] { engine.begin_save(store.path() / "snapshot", {}); },
      [&] { engine.export_weights(true, [](auto...) {}); }};
  std::thread asking, releasing;
  engine.export_weights(true, [&](auto...) {
    if (releasing.joinable()) return;
    for (const auto& call : calls) EXPECT_EQ(code_of(call), Code::kInvalidArgument);
    EXPECT_EQ(engine.current_step(), 1u) << "a value may be asked for";
    std::thread([&] {
      for (const auto& call : calls) EXPECT_EQ(code_of(call), Code::kBusy);
    }).join();
    asking = std::thread([&] { EXPECT_EQ(engine.current_step(), 1u); });  // waits
    releasing = std::thread([&] { lease.reset(); });                      // does so, too
  });
  asking.join();
  releasing.join();
  engine.discard_step();
  EXPECT_EQ(trainer.run_step().step, 2u);
}

// Who only looks keeps nobody from training.
TEST(EngineThreads, AskingForValuesRefusesNoCall) {
  const testing::TempStore store;
  const ModelDescription model = testing::toy_model(4, 2000, 2);
  const auto engine =
      Engine::create(testing::toy_config(Placement::kNvme, Placement::kNvme, kType, store.path()), model);
  engine->import_weights(testing::toy_weights());
  testing::ToyTrainer trainer{*engine, model, kType, 2};
  std::atomic<bool> over = false;
  std::thread watching([&] {
    std::uint64_t last = 0;
    while (!over) {
      const std::uint64_t step = engine->current_step();
      EXPECT_GE(step, last);
      EXPECT_FALSE(engine->describe().empty());
      last = step;
    }
  });
  for (std::uint64_t step = 1; step <= 10; ++step) EXPECT_EQ(trainer.run_step().step, step);
  over = true;
  watching.join();
}

}  // namespace
}  // namespace spillway
