// Training on several NUMA nodes, pretended ones, is training on one: the same bits wherever tensors live.
#include <gtest/gtest.h>
#include <sched.h>

#include <algorithm>
#include <string>
#include <vector>

#include "spillway/error.h"
#include "spillway/log.h"
#include "tests/src/named_budget.h"
#include "tests/src/pretended_nodes.h"
#include "tests/src/toy_trainer.h"

namespace spillway {
namespace {

using testing::PretendedNodes;

constexpr std::uint32_t kBlocks = 4, kMicroBatches = 2;

struct Trained {
  std::vector<std::uint32_t> bits;
  std::vector<std::string> lines;  // of the log that speak of nodes
};

// With the smallest host memory that the plan accepts: one buffer.
void tighten(Config& config, const ModelDescription& model) {
  config.host_bytes = 1;
  try {
    Engine::create(config, model);
  } catch (const Error& error) {
    config.host_bytes = testing::named_bytes(error);
  }
}

Trained train(unsigned nodes, Placement parameters, Placement states, DType type, bool tight = false) {
  Trained result;
  const testing::TempStore store;
  const PretendedNodes pretended(nodes);
  const ModelDescription model = testing::toy_model(kBlocks, 3000, kMicroBatches);
  Config config = testing::toy_config(parameters, states, type, store.path());
  config.threads = 2 * nodes;
  if (tight) tighten(config, model);
  set_log_sink([&](LogLevel, std::string_view line) {
    if (line.find("NUMA") != std::string_view::npos) result.lines.emplace_back(line);
  });
  {
    auto engine = Engine::create(config, model);
    engine->import_weights(testing::toy_weights());
    testing::ToyTrainer trainer{*engine, model, type, kMicroBatches};
    trainer.brings = [](const testing::ToyPush& push) {  // a tile's ranges are then other ones on each node
      const bool left_out = (push.step + push.block) % 3 == push.parameter;
      return left_out ? testing::Brings::kNothing : testing::Brings::kGradient;
    };
    for (int s = 0; s < 4; ++s) trainer.run_step();
    result.bits = testing::exported(*engine);
    for (int s = 0; s < 2; ++s) trainer.run_step();  // what export cancelled is read ahead again
    const auto after = testing::exported(*engine);
    result.bits.insert(result.bits.end(), after.begin(), after.end());
  }
  set_log_sink({});
  return result;
}

const std::pair<Placement, Placement> kPlacements[] = {{Placement::kHost, Placement::kHost},
                                                       {Placement::kHbm, Placement::kNvme},
                                                       {Placement::kHost, Placement::kNvme},
                                                       {Placement::kNvme, Placement::kNvme}};

TEST(EngineNodes, TrainTheBitsOfOne) {
  for (const auto& [parameters, states] : kPlacements) {
    for (DType type : {DType::kBFloat16, DType::kFloat32}) {
      const Trained one = train(1, parameters, states, type);
      EXPECT_TRUE(one.lines.empty());
      for (unsigned nodes : {2u, 3u}) {
        const Trained several = train(nodes, parameters, states, type);
        ASSERT_EQ(several.lines.size(), 1u);
        EXPECT_TRUE(several.lines[0] ==
                        std::to_string(nodes) + " NUMA nodes: each updates the tiles in its own memory" ||
                    several.lines[0].starts_with("cannot place memory on NUMA nodes"))  // not everywhere one may
            << several.lines[0];
        EXPECT_TRUE(several.bits == one.bits)
            << nodes << " nodes, " << name_of(type) << ", weights " << static_cast<int>(parameters) << ", states "
            << static_cast<int>(states);
      }
    }
  }
}

TEST(EngineNodes, WithRoomForOneTileNodesWorkOnItTogetherAndThatIsSaid) {
  const Trained one = train(1, Placement::kNvme, Placement::kNvme, DType::kBFloat16, true);
  const Trained two = train(2, Placement::kNvme, Placement::kNvme, DType::kBFloat16, true);
  EXPECT_EQ(two.lines, std::vector<std::string>{
                           "too few tile buffers (1) for 2 NUMA nodes: tiles are updated one at a time by all "
                           "threads, some of them far from its memory; raise spillway.host_bytes"});
  EXPECT_TRUE(two.bits == one.bits);
}

TEST(EngineNodes, TheDeviceUpdateKnowsNoNodes) {
  const Trained one = train(1, Placement::kHbm, Placement::kHbm, DType::kFloat32);
  const Trained two = train(2, Placement::kHbm, Placement::kHbm, DType::kFloat32);
  EXPECT_TRUE(two.lines.empty());
  EXPECT_TRUE(two.bits == one.bits);
}

TEST(EngineNodes, TheThreadThatTrainsKeepsItsBinding) {
  cpu_set_t before, after;
  ASSERT_EQ(sched_getaffinity(0, sizeof before, &before), 0);
  train(2, Placement::kHost, Placement::kHost, DType::kBFloat16);
  ASSERT_EQ(sched_getaffinity(0, sizeof after, &after), 0);
  EXPECT_TRUE(CPU_EQUAL(&before, &after));
}

}  // namespace
}  // namespace spillway
