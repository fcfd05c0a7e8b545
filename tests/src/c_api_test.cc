// What a caller of the API for C can get wrong, and what it is told. How it trains is c_example.c's.
#include "spillway/c_api.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <string>
#include <thread>
#include <utility>

#include "tests/temp_directory.h"

namespace {

using ::testing::HasSubstr;

constexpr const char* kConfig = R"({"train_batch_size": 1, "gradient_clipping": 0})";
constexpr uint64_t kShape[] = {8, 4};

struct CApi : ::testing::Test {
  void SetUp() override {
    ASSERT_EQ(SPILLWAY_OK, spillway_config_parse(kConfig, "test", &config));
    ASSERT_EQ(SPILLWAY_OK, spillway_model_add_block(model, "a"));
    ASSERT_EQ(SPILLWAY_OK, spillway_model_add_parameter(model, 0, "a", kShape, 2, 1, 1));
    spillway_model_set_workspace(model, 4096);
  }
  void TearDown() override {
    spillway_engine_destroy(engine);
    spillway_model_destroy(model);
    spillway_config_destroy(config);
  }
  void create() { ASSERT_EQ(SPILLWAY_OK, spillway_engine_create(config, model, nullptr, &engine)); }

  spillway_config* config = nullptr;
  spillway_model* model = spillway_model_create();
  spillway_engine* engine = nullptr;
};

#define EXPECT_REFUSED(call, message)         \
  EXPECT_EQ(SPILLWAY_INVALID_ARGUMENT, call); \
  EXPECT_THAT(spillway_error_message(), HasSubstr(message))

TEST_F(CApi, WhatIsMissingIsNamed) {
  spillway_config* none = nullptr;
  EXPECT_REFUSED(spillway_config_parse(nullptr, "x", &none), "json: is null");
  EXPECT_REFUSED(spillway_config_parse("{", "file", &none), "file:1:");
  EXPECT_EQ(nullptr, none);
  EXPECT_REFUSED(spillway_model_add_block(model, nullptr), "name: is null");
  EXPECT_REFUSED(spillway_model_attach(model, "config.json", nullptr), "text: is null");
  EXPECT_REFUSED(spillway_model_add_parameter(model, 0, "b", nullptr, 2, 1, 1), "b: is null");
  EXPECT_REFUSED(spillway_model_add_parameter(model, 7, "b", kShape, 2, 1, 1), "b: there is no block 7");
  create();
  EXPECT_REFUSED(spillway_engine_import_weights(engine, nullptr, nullptr), "source: is null");
  EXPECT_EQ(SPILLWAY_OK, spillway_engine_discard_step(engine)) << "none is under way";
  EXPECT_EQ(SPILLWAY_OK, spillway_engine_set_learning_rate(engine, 1e-4));
  EXPECT_REFUSED(spillway_engine_set_learning_rate(engine, -1), "-1 is no learning rate");
  EXPECT_REFUSED(spillway_engine_export(engine, nullptr, SPILLWAY_FLOAT32, 0), "directory: is null");
}

// The message is the library's, and a client that has other words puts them there.
TEST_F(CApi, WhatToDoIsACode) {
  constexpr const char* kSmall = R"({"train_batch_size": 1, "spillway": {"hbm_bytes": "1KiB"}})";
  spillway_config* small = nullptr;
  ASSERT_EQ(SPILLWAY_OK, spillway_config_parse(kSmall, "test", &small));
  ASSERT_EQ(SPILLWAY_DOES_NOT_FIT, spillway_engine_create(small, model, nullptr, &engine));
  EXPECT_EQ(SPILLWAY_REMEDY_RAISE_BUDGET, spillway_error_remedy());
  ASSERT_NE(nullptr, spillway_error_remedy_value(1));
  const std::string size = spillway_error_remedy_value(1), message = spillway_error_message();
  EXPECT_STREQ("hbm_bytes", spillway_error_remedy_value(0));
  EXPECT_EQ(nullptr, spillway_error_remedy_value(2));
  EXPECT_THAT(message, testing::EndsWith("; set spillway.hbm_bytes to \"" + size + "\" or more"));
  EXPECT_THAT(spillway_error_message_in("{}={}"), testing::EndsWith(" of device memory; hbm_bytes=" + size));
  EXPECT_THAT(spillway_error_message_in(""), testing::EndsWith(" of device memory"));
  EXPECT_EQ(message, spillway_error_message()) << "stays";
  spillway_config_destroy(small);

  EXPECT_REFUSED(spillway_model_add_block(model, nullptr), "name: is null");
  EXPECT_EQ(SPILLWAY_REMEDY_NONE, spillway_error_remedy());
  EXPECT_EQ(nullptr, spillway_error_remedy_value(0));
  EXPECT_STREQ("name: is null", spillway_error_message_in("anything"));
}

TEST_F(CApi, ASecondTextGoesOverAConfiguration) {
  constexpr const char* kTuned = R"({"aio": {"block_size": 65536}, "spillway": {"threads": 0.5}})";
  spillway_config* tuned = nullptr;
  EXPECT_REFUSED(spillway_config_parse_with(kConfig, "test", kTuned, "tuned", &tuned), "tuned:1:");
  EXPECT_REFUSED(spillway_config_parse_with(kConfig, "test", nullptr, "tuned", &tuned), "overlay: is null");
  constexpr const char* kDepth = R"({"aio": {"block_size": 65536, "queue_depth": 4}})";
  ASSERT_EQ(SPILLWAY_OK, spillway_config_parse_with(kConfig, "test", kDepth, "tuned", &tuned));
  std::swap(config, tuned);
  spillway_config_destroy(tuned);
  create();
}

TEST_F(CApi, TheScheduleIsAsked) {
  spillway_config* scheduled = nullptr;
  constexpr const char* kWarmup = R"({"train_batch_size": 1, "optimizer": {"type": "AdamW"},
    "scheduler": {"type": "WarmupLR",
                  "params": {"warmup_num_steps": 4, "warmup_min_lr": 0.5, "warmup_max_lr": 1}}})";
  ASSERT_EQ(SPILLWAY_OK, spillway_config_parse(kWarmup, "test", &scheduled));
  std::swap(config, scheduled);
  spillway_config_destroy(scheduled);
  create();
  EXPECT_EQ(0.5, spillway_engine_next_learning_rate(engine));
  EXPECT_EQ(SPILLWAY_OK, spillway_engine_set_learning_rate(engine, 0.125));
  EXPECT_EQ(0.125, spillway_engine_next_learning_rate(engine));
}

TEST_F(CApi, DestroyingAnEngineKeepsItsLastStep) {
  const spillway::TempDirectory store;
  const std::string seldom =
      R"({"train_batch_size": 1, "spillway": {"commit_every": 3, "nvme_paths": [")" + store.path().string() + R"("]}})";
  spillway_config_destroy(std::exchange(config, nullptr));
  ASSERT_EQ(SPILLWAY_OK, spillway_config_parse(seldom.c_str(), "test", &config));
  create();
  const auto zeros = [](void*, uint32_t, uint32_t, uint64_t, float* out, uint64_t count) {
    return std::fill_n(out, count, 0.f), 0;
  };
  ASSERT_EQ(SPILLWAY_OK, spillway_engine_import_weights(engine, zeros, nullptr));
  void* gradient = spillway_engine_workspace(engine, nullptr);
  for (int step = 1; step <= 2; ++step) {
    ASSERT_EQ(SPILLWAY_OK, spillway_engine_push_gradient(engine, 0, 0, gradient, SPILLWAY_FLOAT32, nullptr));
    ASSERT_EQ(SPILLWAY_OK, spillway_engine_step(engine, "two", 3, nullptr)) << spillway_error_message();
  }
  spillway_engine_destroy(std::exchange(engine, nullptr));
  const spillway_options resume = {SPILLWAY_RESUME, nullptr, nullptr};
  ASSERT_EQ(SPILLWAY_OK, spillway_engine_create(config, model, &resume, &engine)) << spillway_error_message();
  EXPECT_EQ(2u, spillway_engine_current_step(engine));
  EXPECT_EQ(3u, spillway_engine_blob(engine, nullptr, 0));
}

TEST_F(CApi, NumbersThatNoEnumerationHasAreRefused) {
  EXPECT_REFUSED(spillway_model_add_visit(model, 0, 7), "spillway_pass: no such value: 7");
  spillway_options options = {3, nullptr, nullptr};
  EXPECT_REFUSED(spillway_engine_create(config, model, &options, &engine), "spillway_on_existing: no such value: 3");
  create();
  spillway_lease* lease = nullptr;
  EXPECT_REFUSED(spillway_engine_acquire(engine, 0, -1, nullptr, &lease), "spillway_pass");
  EXPECT_EQ(nullptr, lease);
}

TEST_F(CApi, AnImportThatCannotBeMadeLeavesNothing) {
  const std::filesystem::path folder = std::filesystem::path(::testing::TempDir()) / "c_api_import";
  std::filesystem::remove_all(folder);
  std::filesystem::create_directories(folder / "saved");
  const std::string from = folder / "saved", to = folder / "snapshot";
  const auto import = [&](const char* directory, const char* snapshot, const spillway_import_options* options) {
    return spillway_import_deepspeed(directory, model, snapshot, options, nullptr, nullptr);
  };
  EXPECT_REFUSED(import(nullptr, to.c_str(), nullptr), "directory: is null");
  EXPECT_REFUSED(import(from.c_str(), nullptr, nullptr), "snapshot: is null");
  const spillway_dtype none = 3;
  spillway_import_options options = {"tag", &none, 0, nullptr, nullptr};
  EXPECT_REFUSED(import(from.c_str(), to.c_str(), &options), "spillway_dtype: no such value: 3");
  options.weights = nullptr;
  EXPECT_EQ(SPILLWAY_NOT_FOUND, import(from.c_str(), to.c_str(), &options));
  EXPECT_THAT(spillway_error_message(), HasSubstr("saved/tag: is not there"));
  EXPECT_EQ(SPILLWAY_NOT_FOUND, import(from.c_str(), to.c_str(), nullptr));
  EXPECT_THAT(spillway_error_message(), HasSubstr("it has no file `latest`"));
  EXPECT_EQ(1, std::distance(std::filesystem::directory_iterator(folder), {}));
}

TEST_F(CApi, AFunctionOfTheCallersThatFailsEndsTheImport) {
  create();
  const auto fails = [](void*, uint32_t, uint32_t, uint64_t, float*, uint64_t) { return 5; };
  EXPECT_REFUSED(spillway_engine_import_weights(engine, fails, nullptr),
                 "weights: the caller's function failed with 5");
  const auto throws = [](void*, uint32_t, uint32_t, uint64_t, float*, uint64_t) -> int { throw 5; };
  EXPECT_EQ(SPILLWAY_UNEXPECTED, spillway_engine_import_weights(engine, throws, nullptr));
}

TEST_F(CApi, MessagesAreTheThreads) {
  EXPECT_REFUSED(spillway_model_add_block(model, nullptr), "name: is null");
  std::thread([] { EXPECT_STREQ("", spillway_error_message()); }).join();
  EXPECT_STREQ("name: is null", spillway_error_message());
}

TEST_F(CApi, FactsReachTheCaller) {
  create();
  std::string facts, purposes;
  spillway_engine_describe(
      engine, [](void* user, const char* line) { static_cast<std::string*>(user)->append(line); }, &facts);
  EXPECT_THAT(facts, HasSubstr("device: host device"));
  spillway_engine_ledger(
      engine,
      [](void* user, spillway_tier, const char* purpose, uint64_t) {
        static_cast<std::string*>(user)->append(purpose);
      },
      &purposes);
  EXPECT_THAT(purposes, HasSubstr("model workspace"));
  EXPECT_EQ(SPILLWAY_DEVICE_HOST, spillway_engine_device(engine));
  EXPECT_EQ(SPILLWAY_FLOAT32, spillway_config_weights(config));
  EXPECT_THAT(spillway_config_settings(config), HasSubstr(R"("optimizer.params.eps": 1e-08)"));
  EXPECT_EQ(0, spillway_engine_predicted_step_seconds(engine));
  EXPECT_EQ(0u, spillway_engine_current_step(engine));
  uint64_t bytes = 0;
  EXPECT_NE(nullptr, spillway_engine_workspace(engine, &bytes));
  EXPECT_EQ(4096u, bytes);
}

}  // namespace
