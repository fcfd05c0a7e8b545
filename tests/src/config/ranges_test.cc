#include "src/config/ranges.h"

#include <gtest/gtest.h>

#include <functional>
#include <limits>

#include "spillway/error.h"

namespace spillway {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN(), kInfinity = std::numeric_limits<double>::infinity();

std::string refused_key(const std::function<void(Config&)>& fill) {
  Config config;
  fill(config);
  try {
    check_ranges(config);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Code::kInvalidArgument);
    return error.parts().object;
  }
  return "";
}

TEST(ConfigRanges, DefaultsAreInThem) {
  EXPECT_EQ(refused_key([](Config&) {}), "");
  EXPECT_EQ(refused_key([](Config& c) { c.gradient_clipping = 1e37; }), "");
  for (const OptimizerKind kind : kOptimizerKinds) {
    EXPECT_EQ(refused_key([&](Config& c) { c.optimizer.kind = kind; }), "");
  }
  for (const ScheduleKind kind : {ScheduleKind::kWarmup, ScheduleKind::kWarmupDecay, ScheduleKind::kWarmupCosine}) {
    EXPECT_EQ(refused_key([&](Config& c) { c.schedule = {.kind = kind, .total_steps = 10}; }), "");
  }
}

TEST(ConfigRanges, WhatAFileMayNotHoldIsRefusedByItsKey) {
  const struct {
    const char* key;
    std::function<void(Config&)> fill;
  } cases[] = {
      {"gradient_clipping", [](Config& c) { c.gradient_clipping = -1; }},
      {"gradient_clipping", [](Config& c) { c.gradient_clipping = kNan; }},
      {"gradient_clipping", [](Config& c) { c.gradient_clipping = kInfinity; }},
      {"optimizer.params.lr", [](Config& c) { c.optimizer.learning_rate = -1; }},
      {"optimizer.params.lr", [](Config& c) { c.optimizer.learning_rate = kNan; }},
      {"optimizer.params.betas", [](Config& c) { c.optimizer.beta1 = 1; }},
      {"optimizer.params.betas", [](Config& c) { c.optimizer.beta2 = 2; }},
      {"optimizer.params.betas", [](Config& c) { c.optimizer.beta2 = kNan; }},
      {"optimizer.params.weight_decay", [](Config& c) { c.optimizer.weight_decay = kNan; }},
      {"train_batch_size", [](Config& c) { c.micro_batch = 0; }},
      {"aio.queue_depth", [](Config& c) { c.io_depth = 0; }},
      {"aio.block_size", [](Config& c) { c.io_block_bytes = 5000; }},
      {"spillway.threads", [](Config& c) { c.threads = 200'000; }},
      {"spillway.nvme_rates", [](Config& c) { c.nvme_rates = {kNan}; }},
      {"spillway.nvme_rates", [](Config& c) { c.nvme_rates = {-1}; }},
      {"spillway.nvme_rates",
       [](Config& c) {
         c.nvme_paths = {"/a"}, c.nvme_rates = {1, 2, 3};
       }},
      {"spillway.nvme_paths", [](Config& c) { c.nvme_paths = {""}; }},
      {"spillway.nvme_paths",
       [](Config& c) {
         c.nvme_paths = {"/a", "/b", "/a/"};
       }},
      {"Config::schedule.given_lr", [](Config& c) { c.schedule.given_lr = kNan; }},
      {"spillway.parameter_groups.lr",
       [](Config& c) {
         c.parameter_groups = {{{"*"}, -1.0, {}}};
       }},
      {"scheduler.params.total_num_steps", [](Config& c) { c.schedule.kind = ScheduleKind::kWarmupDecay; }},
  };
  for (const auto& [key, fill] : cases) EXPECT_EQ(refused_key(fill), key);
}

}  // namespace
}  // namespace spillway
