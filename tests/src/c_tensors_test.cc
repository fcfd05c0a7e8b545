// Named tensors by the API for C: what it has of tensor_store.h, and what a caller can get wrong.
#include "spillway/c_tensors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "tests/sized.h"
#include "tests/temp_directory.h"

namespace {

using ::spillway::testing::sized;
using ::testing::HasSubstr;

struct CTensors : ::testing::Test {
  void TearDown() override { spillway_tensor_store_close(store); }

  spillway_status open(uint64_t hbm_bytes) {
    spillway_tensor_store_close(std::exchange(store, nullptr));
    const std::string directory = folder.path().string();
    const char* const path = directory.c_str();
    auto options = sized<spillway_tensor_store_options>();
    options.paths = &path;
    options.path_count = 1;
    options.nvme_bytes = 32 << 20;
    options.host_bytes = 2 << 20;
    options.on_existing = SPILLWAY_RESUME;
    options.hbm_bytes = hbm_bytes;
    options.device = device;
    return spillway_tensor_store_open(&options, &store);
  }
  spillway_status put(const char* name, const std::vector<float>& values, bool on_device) {
    const uint64_t dims[] = {values.size()};
    spillway_tensor_to_put tensor = {};
    tensor.name = name;
    tensor.type = "float32";
    tensor.dims = dims;
    tensor.dim_count = 1;
    tensor.data = values.data();
    tensor.bytes = values.size() * sizeof(float);
    tensor.on_device = on_device;
    return spillway_tensor_store_put(store, &tensor, 1);
  }
  std::vector<float> get(const char* name, std::size_t count, bool on_device) {
    std::vector<float> values(count);
    spillway_tensor_to_get tensor = {};
    tensor.name = name;
    tensor.out = values.data();
    tensor.bytes = count * sizeof(float);
    tensor.on_device = on_device;
    EXPECT_EQ(SPILLWAY_OK, spillway_tensor_store_get(store, &tensor, 1)) << spillway_error_message();
    return values;
  }
  spillway_tensor_info info(const char* name) {
    spillway_tensor_info found = {};
    const auto copy = [](void* to, const spillway_tensor_info* from) {
      *static_cast<spillway_tensor_info*>(to) = *from;
    };
    EXPECT_EQ(SPILLWAY_OK, spillway_tensor_store_describe(store, name, copy, &found));
    return found;
  }

  spillway::TempDirectory folder;
  spillway_tensor_store* store = nullptr;
  spillway_device_choice device = SPILLWAY_DEVICE_CHOICE_HOST;
};

TEST_F(CTensors, HbmIsATierOfTheirs) {
  ASSERT_EQ(SPILLWAY_OK, open(2 << 20)) << spillway_error_message();
  spillway_device_choice made = SPILLWAY_DEVICE_CHOICE_AUTO;
  ASSERT_EQ(SPILLWAY_OK, spillway_tensor_store_device(store, &made));
  EXPECT_EQ(SPILLWAY_DEVICE_CHOICE_HOST, made);
  const std::vector<float> up(250'000, 1.5f), down(100, 2.5f);
  ASSERT_EQ(SPILLWAY_OK, put("up", up, true));
  ASSERT_EQ(SPILLWAY_OK, put("down", down, false));
  EXPECT_TRUE(info("up").in_hbm && !info("up").on_nvme);
  EXPECT_TRUE(!info("down").in_hbm && info("down").in_host);
  EXPECT_EQ(up, get("up", up.size(), true));
  EXPECT_EQ(up, get("up", up.size(), false));

  const void* memory = nullptr;
  ASSERT_EQ(SPILLWAY_OK, spillway_tensor_store_pin(store, "down", SPILLWAY_HBM, &memory));
  EXPECT_EQ(0, std::memcmp(memory, down.data(), down.size() * sizeof(float)));
  EXPECT_TRUE(info("down").in_hbm && info("down").pinned_in_hbm && !info("down").pinned);
  EXPECT_EQ(SPILLWAY_INVALID_ARGUMENT, put("down", down, true));
  EXPECT_THAT(spillway_error_message(), HasSubstr("down: is pinned in HBM"));
  EXPECT_EQ(SPILLWAY_OK, spillway_tensor_store_unpin(store, "down", SPILLWAY_HBM));
  EXPECT_EQ(SPILLWAY_OK, spillway_tensor_store_pin(store, "down", SPILLWAY_HOST, nullptr));
  EXPECT_EQ(SPILLWAY_OK, spillway_tensor_store_unpin(store, "down", SPILLWAY_HOST));

  auto stats = sized<spillway_tensor_store_stats>();
  ASSERT_EQ(SPILLWAY_OK, spillway_tensor_store_stats_now(store, &stats));
  EXPECT_EQ(2u << 20, stats.hbm_capacity);
  EXPECT_EQ(1'003'520u + 4096, stats.hbm_bytes);
  EXPECT_EQ(2u, stats.hbm_hits);
  EXPECT_EQ(0u, stats.hbm_evictions);

  ASSERT_EQ(SPILLWAY_OK, spillway_tensor_store_commit(store, nullptr));
  ASSERT_EQ(SPILLWAY_OK, open(2 << 20));
  const char* const names[] = {"up", "down"};
  size_t there = 0;
  ASSERT_EQ(SPILLWAY_OK, spillway_tensor_store_prefetch(store, names, 2, SPILLWAY_HBM, &there));
  EXPECT_EQ(2u, there);
  EXPECT_EQ(up, get("up", up.size(), true));
  EXPECT_EQ(down, get("down", down.size(), false));
}

TEST_F(CTensors, WhatCannotBeMeantIsRefused) {
  ASSERT_EQ(SPILLWAY_OK, open(0));
  spillway_device_choice made = SPILLWAY_DEVICE_CHOICE_CUDA;
  ASSERT_EQ(SPILLWAY_OK, spillway_tensor_store_device(store, &made));
  EXPECT_EQ(SPILLWAY_DEVICE_CHOICE_AUTO, made);
  const std::vector<float> values(10, 1.f);
  EXPECT_EQ(SPILLWAY_UNSUPPORTED, put("a", values, true));
  EXPECT_THAT(spillway_error_message(), HasSubstr("has no HBM; give hbm_bytes when it is opened"));
  ASSERT_EQ(SPILLWAY_OK, put("a", values, false));
  const char* const name = "a";
  EXPECT_EQ(SPILLWAY_UNSUPPORTED, spillway_tensor_store_prefetch(store, &name, 1, SPILLWAY_HBM, nullptr));
  EXPECT_EQ(SPILLWAY_INVALID_ARGUMENT, spillway_tensor_store_pin(store, name, SPILLWAY_NVME, nullptr));
  EXPECT_EQ(SPILLWAY_INVALID_ARGUMENT, spillway_tensor_store_unpin(store, name, 7));
  EXPECT_THAT(spillway_error_message(), HasSubstr("spillway_tier: no such value: 7"));
  device = 3;
  EXPECT_EQ(SPILLWAY_INVALID_ARGUMENT, open(2 << 20));
  EXPECT_THAT(spillway_error_message(), HasSubstr("spillway_device_choice: no such value: 3"));
}

// A program that was compiled before there was HBM says nothing of it.
TEST_F(CTensors, AShorterStructHasNone) {
  auto options = sized<spillway_tensor_store_options>();
  options.host_bytes = 2 << 20;
  options.hbm_bytes = UINT64_MAX;
  options.struct_size = offsetof(spillway_tensor_store_options, hbm_bytes);
  ASSERT_EQ(SPILLWAY_OK, spillway_tensor_store_open(&options, &store)) << spillway_error_message();
  auto stats = sized<spillway_tensor_store_stats>();
  stats.struct_size = offsetof(spillway_tensor_store_stats, hbm_bytes);
  stats.hbm_bytes = 77;
  ASSERT_EQ(SPILLWAY_OK, spillway_tensor_store_stats_now(store, &stats));
  EXPECT_EQ(77u, stats.hbm_bytes) << "what is beyond its end is left alone";
}

}  // namespace
