// A CPU below hardware FMA, which Highway is made to take this one for: what that costs is said, and no bit changes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <hwy/targets.h>

#include <string>
#include <vector>

#include "kernels/optimizer.h"
#include "spillway/offload_optimizer.h"
#include "tests/src/toy_trainer.h"

namespace spillway {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::Not;

const auto kSaysTheCost =
    Contains(HasSubstr("cpu: has no vector instructions with fused multiply-add (AVX2, NEON), so "
                       "Adam takes about 17 times as long"));

struct Trained {
  std::vector<std::uint32_t> bits;
  std::vector<std::string> of_engine, of_optimizer;
};

Trained train(DType type) {
  const testing::TempStore store;
  const ModelDescription model = testing::toy_model(2, 3000, 1);
  Config config = testing::toy_config(Placement::kHost, Placement::kNvme, type, store.path());
  config.device = DeviceKind::kHost;
  const auto engine = Engine::create(config, model);
  engine->import_weights(testing::toy_weights());
  testing::ToyTrainer trainer{*engine, model, type, 1};
  for (int step = 0; step < 3; ++step) trainer.run_step();
  config.nvme_paths.clear();
  config.parameters = config.states = Placement::kHost;
  return {testing::exported(*engine), engine->describe(), OffloadOptimizer::create(config, model)->describe()};
}

TEST(NoVectors, AreSaidAndChangeNoBit) {
  if (!slow_optimizers().empty()) GTEST_SKIP() << "this CPU has none";
  for (const DType type : {DType::kFloat32, DType::kBFloat16}) {
    const Trained usual = train(type);
    EXPECT_THAT(usual.of_engine, Not(kSaysTheCost));
    hwy::DisableTargets(HWY_AVX2 | HWY_AVX3 | HWY_AVX3_DL);
    const Trained slow = train(type);
    hwy::DisableTargets(0);
    EXPECT_THAT(slow.of_engine, kSaysTheCost);
    EXPECT_THAT(slow.of_optimizer, kSaysTheCost);
    EXPECT_EQ(usual.bits, slow.bits);
  }
}

}  // namespace
}  // namespace spillway
