// Parameters that get no gradient in some steps, on the GPU and on the host device: the same bits, whether the GPU
// updates them or the CPU does.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "spillway/engine.h"
#include "tests/src/toy_trainer.h"

namespace spillway {
namespace {

constexpr std::uint64_t kSteps = 6;

// Most parameters have neighbours of other counts in their tile.
bool brings(std::uint64_t step, std::uint32_t block, std::uint32_t parameter) {
  return (step + block * 2 + parameter) % 4 != 0;
}

// Gradients are noise, written from the host: the caller need not compute on the device.
std::vector<std::uint32_t> train(Config config, const ModelDescription& model) {
  const auto engine = Engine::create(config, model);
  engine->import_weights(testing::toy_weights());
  const bool gpu = engine->device_kind() == DeviceKind::kCuda;
  const auto push = [&](std::uint32_t block, std::uint32_t parameter) {
    const std::uint64_t step = engine->current_step() + 1;
    if (!brings(step, block, parameter)) {
      engine->push_gradient({.block = block, .parameter = parameter}, engine->stream());
      return;
    }
    std::vector<float> values(testing::count_of(model.blocks[block].parameters[parameter]));
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = testing::mixed(step, block * 16 + parameter, i);
    std::byte* const workspace = engine->workspace().data();
    const std::size_t bytes = values.size() * sizeof(float);
    engine->stream().synchronize();
    if (gpu) {
      ASSERT_EQ(cudaMemcpy(workspace, values.data(), bytes, cudaMemcpyHostToDevice), cudaSuccess);
    } else {
      std::memcpy(workspace, values.data(), bytes);
    }
    engine->push_gradient({.block = block, .parameter = parameter, .data = workspace}, engine->stream());
  };
  const auto blocks = static_cast<std::uint32_t>(model.blocks.size());
  while (engine->current_step() < kSteps) {
    for (std::uint32_t b = 0; b < blocks; ++b) engine->acquire(b, Pass::kForward, engine->stream());
    for (std::uint32_t b = blocks; b-- > 0;) {
      const Lease lease = engine->acquire(b, Pass::kBackward, engine->stream());
      for (std::uint32_t p = 0; p < model.blocks[b].parameters.size(); ++p) push(b, p);
    }
    engine->step();
  }
  return testing::exported(*engine);
}

TEST(LeftOut, TheSameBitsOnTheGpuAsOnTheHost) {
  ModelDescription model;
  for (std::uint32_t b = 0; b < 3; ++b) {
    Block block{.name = std::to_string(b), .parameters = {}};
    for (std::uint32_t p = 0; p < 4; ++p) {
      block.parameters.push_back({.name = block.name + "." + std::to_string(p), .shape = {1000 + 1500 * p}});
    }
    model.blocks.push_back(block);
  }
  model.workspace_bytes = 5500 * sizeof(float);
  for (const DType type : kDTypes) {
    const auto config_of = [type](Placement placement, const std::filesystem::path& store, DeviceKind device) {
      Config config = testing::toy_config(placement, placement, type, store);
      config.optimizer.kind = type == DType::kFloat32 ? OptimizerKind::kSgd : OptimizerKind::kAdam;
      config.optimizer.momentum = config.optimizer.dampening = 0.5;
      config.loss_scale = {.fixed = 1};
      config.device = device;
      return config;
    };
    const auto wanted = train(config_of(Placement::kHbm, {}, DeviceKind::kHost), model);
    for (const Placement placement : {Placement::kHbm, Placement::kHost, Placement::kNvme}) {
      const testing::TempStore store;
      EXPECT_TRUE(train(config_of(placement, store.path(), DeviceKind::kCuda), model) == wanted)
          << name_of(type) << ", placement " << static_cast<int>(placement);
    }
  }
}

}  // namespace
}  // namespace spillway
