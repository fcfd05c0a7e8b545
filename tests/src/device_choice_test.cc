#include "src/engine/device_choice.h"

#include <gtest/gtest.h>

#include "spillway/engine.h"
#include "spillway/error.h"
#include "tests/src/pretended_nodes.h"
#include "tests/src/toy_trainer.h"

namespace spillway {
namespace {

TEST(DeviceChoice, TheDeviceOfARunNeedNotBeHere) {
  const std::string missing = cuda_unavailable();
  Config config;
  config.device = DeviceKind::kHost;
  EXPECT_EQ(choose_device(config).kind, DeviceKind::kHost);
  EXPECT_EQ(choose_device(config).no_cuda, "") << "nobody asked for it";
  EXPECT_TRUE(choose_device(config).here());

  config.device = DeviceKind::kCuda;
  EXPECT_EQ(choose_device(config).kind, DeviceKind::kCuda);
  EXPECT_EQ(choose_device(config).no_cuda, missing);
  EXPECT_EQ(choose_device(config).here(), missing.empty());
  if (missing.empty()) {
    EXPECT_EQ(resolve_device(config), DeviceKind::kCuda);
  } else {
    EXPECT_THROW(resolve_device(config), Error);
  }

  config.device.reset();
  EXPECT_EQ(choose_device(config).kind, missing.empty() ? DeviceKind::kCuda : DeviceKind::kHost);
  EXPECT_EQ(choose_device(config).no_cuda, missing);
  EXPECT_TRUE(choose_device(config).here());
  EXPECT_EQ(resolve_device(config), choose_device(config).kind);
}

TEST(DeviceChoice, AnIdleGpuIsSaidWithItsReason) {
  EXPECT_EQ(idle_gpu(false, "no NVIDIA driver (libcuda.so.1) was found", ""), "");
  EXPECT_EQ(idle_gpu(true, "the plugin was not opened", "`pip install spillway-cuda` brings it"),
            "spillway.device is auto, and the CPU computes beside an idle GPU: the plugin was not opened; "
            "`pip install spillway-cuda` brings it");
  EXPECT_NE(idle_gpu(true, "the GPU is too old", "").find("spillway doctor"), std::string::npos);
}

TEST(DeviceChoice, ComputeThreadsAreThoseThatTheEngineStarts) {
  const ModelDescription model = testing::toy_model(2, 300, 1);
  for (const unsigned nodes : {1u, 2u}) {
    const testing::PretendedNodes pretended(nodes);
    for (const unsigned threads : {0u, 1u, 3u, 4u}) {
      Config config = testing::toy_config(Placement::kHost, Placement::kHost, DType::kFloat32, {});
      config.device = DeviceKind::kHost;
      config.threads = threads;
      const unsigned said = compute_threads(config);
      if (threads > 0) {
        EXPECT_EQ(said, threads);
      }
      unsigned started = 0;
      const auto engine = Engine::create(config, model);
      engine->stream().launch([&](HostWorkers& workers) { started = workers.threads(); });
      engine->stream().synchronize();
      EXPECT_EQ(started, said) << threads << " threads on " << nodes << " nodes";
      // As a configuration's own they are the same ones again.
      config.threads = said;
      EXPECT_EQ(compute_threads(config), said);
    }
  }
}

}  // namespace
}  // namespace spillway
