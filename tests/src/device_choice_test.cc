#include "src/engine/device_choice.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "kernels/cuda/loader.h"
#include "kernels/host_device.h"
#include "kernels/workers.h"
#include "spillway/engine.h"
#include "spillway/error.h"
#include "src/config/table.h"
#include "tests/src/pretended_nodes.h"
#include "tests/src/toy_trainer.h"

namespace spillway {
namespace {

using ::testing::HasSubstr;

// Rows of a device that there is in this test alone, beside the host's.
template <const auto& unavailable>
constexpr DeviceType kPretended = {
    .kind = static_cast<DeviceKind>(kDeviceNames.size()),
    .name = "pretended",
    .hbm = "memory of another maker's",
    .on_cpu = false,
    .create = [](std::uint64_t bytes, HostWorkers& workers) { return create_host_device({2 * bytes}, workers); },
    .unavailable = [] { return std::string(unavailable); },
    .remedy = [] { return std::string("put it in"); },
    .driver_seen = [] { return true; }};
constexpr char kHere[] = "", kLost[] = "it is not in its slot";
DeviceType host() { return device_of(DeviceKind::kHost); }

TEST(DeviceChoice, TheDeviceOfARunNeedNotBeHere) {
  const std::string missing = cuda_unavailable();
  Config config;
  config.device = DeviceKind::kHost;
  EXPECT_EQ(choose_device(config.device).kind(), DeviceKind::kHost);
  EXPECT_EQ(choose_device(config.device).why_missing(), "") << "nobody asked for it";
  EXPECT_TRUE(choose_device(config.device).here());

  config.device = DeviceKind::kCuda;
  EXPECT_EQ(choose_device(config.device).kind(), DeviceKind::kCuda);
  EXPECT_EQ(choose_device(config.device).why_missing(), missing);
  EXPECT_EQ(choose_device(config.device).here(), missing.empty());
  if (missing.empty()) {
    EXPECT_EQ(resolve_device(config), DeviceKind::kCuda);
  } else {
    EXPECT_THROW(resolve_device(config), Error);
  }

  config.device.reset();
  EXPECT_EQ(choose_device(config.device).kind(), missing.empty() ? DeviceKind::kCuda : DeviceKind::kHost);
  EXPECT_EQ(choose_device(config.device).why_missing(), missing);
  EXPECT_TRUE(choose_device(config.device).here());
  EXPECT_EQ(resolve_device(config), choose_device(config.device).kind());
}

TEST(DeviceChoice, AutoTakesTheFirstDeviceThatIsHere) {
  const auto workers = create_workers(1);
  const DeviceType with[] = {kPretended<kHere>, host()}, without[] = {kPretended<kLost>, host()};
  const Config config;
  EXPECT_EQ(choose_device(config.device, with).type, &with[0]);
  EXPECT_TRUE(choose_device(config.device, with).missing.empty());
  EXPECT_EQ(create_device(config, 4096, *workers, with)->hbm().size(), 8192u) << "its own row makes it";

  EXPECT_EQ(choose_device(config.device, without).type, &without[1]);
  EXPECT_EQ(choose_device(config.device, without).why_missing(), kLost);
  EXPECT_EQ(create_device(config, 4096, *workers, without)->hbm().size(), 4096u);
}

TEST(DeviceChoice, OneThatIsAskedForIsNotReplaced) {
  const auto workers = create_workers(1);
  const DeviceType without[] = {kPretended<kLost>, host()};
  Config config;
  config.device = without[0].kind;
  EXPECT_FALSE(choose_device(config.device, without).here());
  try {
    create_device(config, 4096, *workers, without);
    FAIL() << "there is none";
  } catch (const Error& error) {
    EXPECT_STREQ(
        error.what(),
        "spillway.device: is pretended, and there is none: it is not in its slot; put it in; \"host\" emulates "
        "a GPU in RAM");
  }
}

TEST(DeviceChoice, AnIdleGpuIsSaidWithItsReason) {
  DeviceType without[] = {kPretended<kLost>, host()};
  EXPECT_EQ(idle_gpu(choose_device(std::nullopt, without)),
            "spillway.device is auto, and the CPU computes beside an idle GPU: it is not in its slot; put it in");
  without[0].driver_seen = [] { return false; };
  EXPECT_EQ(idle_gpu(choose_device(std::nullopt, without)), "");
  const DeviceType with[] = {kPretended<kHere>, host()};
  EXPECT_EQ(idle_gpu(choose_device(std::nullopt, with)), "");
}

TEST(DeviceChoice, EveryDeviceHasARowAndItsNameInTheConfiguration) {
  ASSERT_EQ(devices().size(), kDeviceNames.size());
  EXPECT_EQ(devices().back().unavailable(), "") << "auto ends with one that is everywhere";
  EXPECT_EQ(device_named("auto"), nullptr);
  const auto key = std::ranges::find(config_keys(), "spillway.device", &ConfigKey::path);
  for (std::size_t kind = 0; kind < kDeviceNames.size(); ++kind) {
    const DeviceType& device = device_of(static_cast<DeviceKind>(kind));
    EXPECT_EQ(device.name, kDeviceNames[kind]);
    EXPECT_EQ(device_named(device.name), &device);
    EXPECT_THAT(std::string(key->doc), HasSubstr(std::string(device.name) + ": " + std::string(device.hbm)));
    if (!device.unavailable().empty()) {
      EXPECT_NE(device.remedy(), "") << device.name;
    }
  }
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
