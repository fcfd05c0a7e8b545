// What a caller of the API for C can get wrong, and what it is told. How it trains is c_example.c's.
#include "spillway/c_api.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <filesystem>
#include <numeric>
#include <string>
#include <thread>
#include <utility>

#include "tests/sized.h"
#include "tests/temp_directory.h"

namespace {

using ::spillway::testing::sized;
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
  void import_zeros() {
    const auto zeros = [](void*, uint32_t, uint32_t, uint64_t, float* out, uint64_t count) {
      return std::fill_n(out, count, 0.f), 0;
    };
    ASSERT_EQ(SPILLWAY_OK, spillway_engine_import_weights(engine, zeros, nullptr));
  }

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
  EXPECT_REFUSED(spillway_engine_describe(engine, nullptr, nullptr), "line: is null");
  EXPECT_REFUSED(spillway_engine_step(engine, nullptr, 4, nullptr), "blob: is null");
  EXPECT_REFUSED(spillway_engine_acquire(engine, 0, SPILLWAY_FORWARD, nullptr, nullptr), "lease: is null");
  EXPECT_REFUSED(spillway_engine_import_weights(engine, nullptr, nullptr), "source: is null");
  EXPECT_EQ(SPILLWAY_OK, spillway_engine_discard_step(engine)) << "none is under way";
  EXPECT_EQ(SPILLWAY_OK, spillway_engine_set_learning_rate(engine, 1e-4));
  EXPECT_REFUSED(spillway_engine_set_learning_rate(engine, -1), "-1 is no learning rate");
  EXPECT_REFUSED(spillway_engine_export(engine, nullptr, nullptr), "directory: is null");
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
  EXPECT_REFUSED(spillway_config_parse_with(kConfig, "test", kTuned, "tuned", nullptr, &tuned), "tuned:1:");
  EXPECT_REFUSED(spillway_config_parse_with(kConfig, "test", kTuned, nullptr, nullptr, &tuned),
                 "overlay_name: is null");
  constexpr const char* kDepth = R"({"aio": {"block_size": 65536, "queue_depth": 4}})";
  ASSERT_EQ(SPILLWAY_OK, spillway_config_parse_with(kConfig, "test", kDepth, "tuned", nullptr, &tuned));
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
  import_zeros();
  void* gradient = spillway_engine_workspace(engine, nullptr);
  for (int step = 1; step <= 2; ++step) {
    ASSERT_EQ(SPILLWAY_OK, spillway_engine_push_gradient(engine, 0, 0, gradient, 32, SPILLWAY_FLOAT32, nullptr));
    ASSERT_EQ(SPILLWAY_OK, spillway_engine_step(engine, "two", 3, nullptr)) << spillway_error_message();
  }
  spillway_engine_destroy(std::exchange(engine, nullptr));
  auto resume = sized<spillway_options>();
  resume.on_existing = SPILLWAY_RESUME;
  ASSERT_EQ(SPILLWAY_OK, spillway_engine_create(config, model, &resume, &engine)) << spillway_error_message();
  EXPECT_EQ(2u, spillway_engine_current_step(engine));
  EXPECT_EQ(3u, spillway_engine_blob(engine, nullptr, 0));
}

TEST_F(CApi, NumbersThatNoEnumerationHasAreRefused) {
  EXPECT_REFUSED(spillway_model_add_visit(model, 0, 7), "spillway_pass: no such value: 7");
  auto options = sized<spillway_options>();
  options.on_existing = 3;
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
  auto options = sized<spillway_import_options>();
  options.tag = "tag";
  options.weights = &none;
  EXPECT_REFUSED(import(from.c_str(), to.c_str(), &options), "spillway_dtype: no such value: 3");
  options.weights = nullptr;
  EXPECT_EQ(SPILLWAY_NOT_FOUND, import(from.c_str(), to.c_str(), &options));
  EXPECT_THAT(spillway_error_message(), HasSubstr("saved/tag: is not there"));
  EXPECT_EQ(SPILLWAY_NOT_FOUND, import(from.c_str(), to.c_str(), nullptr));
  EXPECT_THAT(spillway_error_message(), HasSubstr("it has no file `latest`"));
  EXPECT_EQ(1, std::distance(std::filesystem::directory_iterator(folder), {}));
}

TEST_F(CApi, HandlesThatAreNoneAreAnswered) {
  create();
  import_zeros();
  spillway_lease* lease = nullptr;
  ASSERT_EQ(SPILLWAY_OK, spillway_engine_acquire(engine, 0, SPILLWAY_FORWARD, nullptr, &lease));
  spillway_config* const dead_config = std::exchange(config, nullptr);
  spillway_model* const dead_model = std::exchange(model, nullptr);
  spillway_engine* const dead_engine = std::exchange(engine, nullptr);
  EXPECT_EQ(SPILLWAY_OK, spillway_config_destroy(dead_config));
  EXPECT_EQ(SPILLWAY_OK, spillway_model_destroy(dead_model));
  EXPECT_EQ(SPILLWAY_OK, spillway_engine_destroy(dead_engine)) << "with a lease that is held";
  int32_t number = 0;
  spillway_engine* made = nullptr;
  // Null, given back, and of another kind or none.
  const auto engines = {static_cast<spillway_engine*>(nullptr), dead_engine,
                        reinterpret_cast<spillway_engine*>(dead_config), reinterpret_cast<spillway_engine*>(&number)};
  for (spillway_engine* none : engines) {
    uint64_t bytes = 0;
    EXPECT_REFUSED(spillway_engine_flush(none), "spillway_engine: is n");
    EXPECT_REFUSED(spillway_engine_step(none, nullptr, 0, nullptr), "spillway_engine: is n");
    EXPECT_REFUSED(spillway_engine_acquire(none, 0, SPILLWAY_FORWARD, nullptr, &lease), "spillway_engine: is n");
    EXPECT_REFUSED(spillway_stream_synchronize(none, nullptr), "spillway_engine: is n");
    EXPECT_EQ(0u, spillway_engine_current_step(none));
    EXPECT_EQ(0u, spillway_engine_blob(none, nullptr, 4));
    EXPECT_EQ(nullptr, spillway_engine_workspace(none, &bytes));
    EXPECT_EQ(-1, spillway_engine_device(none));
    EXPECT_TRUE(std::isnan(spillway_engine_loss_scale(none)));
    EXPECT_THAT(spillway_error_message(), HasSubstr("spillway_engine: is n"));
  }
  EXPECT_REFUSED(spillway_engine_destroy(dead_engine), "spillway_engine: is no handle that lives");
  EXPECT_REFUSED(spillway_lease_release(lease), "spillway_lease: is no handle that lives");
  EXPECT_EQ(nullptr, spillway_lease_weight(lease, 0));
  EXPECT_EQ(nullptr, spillway_lease_weight(nullptr, 0));
  EXPECT_REFUSED(spillway_config_destroy(dead_config), "spillway_config: is no handle that lives");
  EXPECT_REFUSED(spillway_model_destroy(dead_model), "spillway_model: is no handle that lives");
  EXPECT_REFUSED(spillway_model_add_block(dead_model, "b"), "spillway_model: is no handle that lives");
  EXPECT_REFUSED(spillway_engine_create(dead_config, dead_model, nullptr, &made), "spillway_config: is no handle");
  EXPECT_REFUSED(spillway_engine_create(nullptr, nullptr, nullptr, &made), "spillway_config: is null");
  EXPECT_EQ(-1, spillway_config_weights(dead_config));
  EXPECT_EQ(nullptr, spillway_config_settings(nullptr));
  for (const auto null_is_fine : {spillway_lease_release(nullptr), spillway_stream_destroy(nullptr),
                                  spillway_activation_release(nullptr), spillway_engine_destroy(nullptr)}) {
    EXPECT_EQ(SPILLWAY_OK, null_is_fine);
  }
}

TEST_F(CApi, APlaceThatIsGivenAwayAnewIsNotTheOldHandles) {
  create();
  import_zeros();
  spillway_lease *first = nullptr, *second = nullptr;
  ASSERT_EQ(SPILLWAY_OK, spillway_engine_acquire(engine, 0, SPILLWAY_FORWARD, nullptr, &first));
  EXPECT_REFUSED(spillway_engine_step(engine, nullptr, 0, nullptr), "a lease is still held");
  EXPECT_EQ(SPILLWAY_OK, spillway_lease_release(first));
  ASSERT_EQ(SPILLWAY_OK, spillway_engine_acquire(engine, 0, SPILLWAY_BACKWARD, nullptr, &second));
  EXPECT_NE(first, second);
  EXPECT_REFUSED(spillway_lease_release(first), "spillway_lease: is no handle that lives");
  EXPECT_EQ(nullptr, spillway_lease_weight(first, 0));
  EXPECT_NE(nullptr, spillway_lease_weight(second, 0));
  EXPECT_EQ(nullptr, spillway_lease_weight(second, 1));
  EXPECT_THAT(spillway_error_message(), HasSubstr("block a: there is no parameter 1"));
  EXPECT_EQ(SPILLWAY_OK, spillway_lease_release(second));
}

TEST_F(CApi, ASecondThreadAtTheSameTimeIsAnswered) {
  create();
  import_zeros();
  struct Seen {
    spillway_engine* engine;
    spillway_lease* lease;
    std::thread releasing;
  } seen{engine, nullptr, {}};
  ASSERT_EQ(SPILLWAY_OK, spillway_engine_acquire(engine, 0, SPILLWAY_FORWARD, nullptr, &seen.lease));
  const auto sink = [](void* user, uint32_t, uint32_t, uint64_t, const float*, uint64_t) {
    Seen& all = *static_cast<Seen*>(user);
    EXPECT_REFUSED(spillway_engine_flush(all.engine), "spillway_engine_flush: was called from inside of another call");
    EXPECT_REFUSED(spillway_engine_destroy(all.engine), "was called from inside of another call");
    EXPECT_EQ(0u, spillway_engine_current_step(all.engine));
    std::thread([&all] {
      EXPECT_EQ(SPILLWAY_BUSY, spillway_engine_flush(all.engine));
      EXPECT_THAT(spillway_error_message(), HasSubstr("spillway_engine_flush: was called while another thread's call"));
      EXPECT_EQ(SPILLWAY_BUSY, spillway_engine_destroy(all.engine));
    }).join();
    all.releasing = std::thread([&all] {  // both wait
      EXPECT_EQ(1, spillway_engine_loss_scale(all.engine));
      EXPECT_EQ(SPILLWAY_OK, spillway_lease_release(all.lease));
    });
    return 0;
  };
  EXPECT_EQ(SPILLWAY_OK, spillway_engine_export_weights(engine, 1, sink, &seen));
  seen.releasing.join();
  void* gradient = spillway_engine_workspace(engine, nullptr);
  EXPECT_EQ(SPILLWAY_OK, spillway_engine_push_gradient(engine, 0, 0, gradient, 32, SPILLWAY_FLOAT32, nullptr));
  EXPECT_EQ(SPILLWAY_OK, spillway_engine_step(engine, nullptr, 0, nullptr)) << "nothing is held";
}

TEST_F(CApi, StructsOfOtherVersionsAreUnderstood) {
  spillway_options options = {};
  EXPECT_REFUSED(spillway_engine_create(config, model, &options, &engine), "spillway_options: its struct_size is 0");
  struct {
    spillway_options known;
    uint64_t more;
  } later = {{}, 1};
  later.known.struct_size = sizeof later;
  EXPECT_EQ(SPILLWAY_UNSUPPORTED, spillway_engine_create(config, model, &later.known, &engine));
  EXPECT_THAT(spillway_error_message(), HasSubstr("says something that this version of the library does not know"));
  later.more = 0;
  ASSERT_EQ(SPILLWAY_OK, spillway_engine_create(config, model, &later.known, &engine)) << spillway_error_message();
  import_zeros();
  const auto step = [&](spillway_step_report* report) {
    void* gradient = spillway_engine_workspace(engine, nullptr);
    EXPECT_EQ(SPILLWAY_OK, spillway_engine_push_gradient(engine, 0, 0, gradient, 32, SPILLWAY_FLOAT32, nullptr));
    return spillway_engine_step(engine, nullptr, 0, report);
  };
  spillway_step_report report = {};
  EXPECT_REFUSED(step(&report), "spillway_step_report: its struct_size is 0");
  ASSERT_EQ(SPILLWAY_OK, spillway_engine_discard_step(engine)) << "the step was not made";
  std::memset(&report, 0x5a, sizeof report);
  report.struct_size = offsetof(spillway_step_report, gradient_norm);  // a header that ends there
  EXPECT_EQ(SPILLWAY_OK, step(&report));
  EXPECT_EQ(1u, report.step);
  double untouched = 0;
  std::memset(&untouched, 0x5a, sizeof untouched);
  EXPECT_EQ(untouched, report.gradient_norm);
  struct {
    spillway_step_report known;
    uint64_t more;
  } longer = {{}, 7};
  longer.known.struct_size = sizeof longer;
  EXPECT_EQ(SPILLWAY_OK, step(&longer.known));
  EXPECT_EQ(2u, longer.known.step);
  EXPECT_EQ(0u, longer.more);
  EXPECT_EQ(uint32_t{SPILLWAY_API_VERSION}, spillway_api_version());
}

// A forward visit writes an activation, the insides and a gradient, all of it on the stream.
TEST_F(CApi, ActivationsInsidesAndWorkReachTheCaller) {
  ASSERT_EQ(SPILLWAY_OK, spillway_model_set_insides(model, 0, 4096));
  EXPECT_REFUSED(spillway_model_set_insides(model, 1, 4096), "there is no block 1");
  ASSERT_EQ(SPILLWAY_OK, spillway_model_set_micro_batches(model, 2));
  ASSERT_EQ(SPILLWAY_OK, spillway_model_add_activation(model, 32 * sizeof(float)));
  EXPECT_REFUSED(spillway_model_add_activation_use(model, 0, 3, 0), "spillway_access: no such value: 3");
  ASSERT_EQ(SPILLWAY_OK, spillway_model_accept_dtype(model, SPILLWAY_FLOAT32));
  create();
  import_zeros();
  uint64_t bytes = 0;
  int32_t kept = -1;
  void* const insides = spillway_engine_insides(engine, 0, &bytes, &kept);
  EXPECT_NE(nullptr, insides);
  EXPECT_EQ(kept == 1 ? 8192u : 4096u, bytes);
  EXPECT_EQ(1, spillway_engine_in_hbm(engine, insides, bytes));
  EXPECT_EQ(0, spillway_engine_in_hbm(engine, &bytes, sizeof bytes));
  EXPECT_EQ(nullptr, spillway_engine_insides(engine, 1, &bytes, &kept));
  EXPECT_EQ(0u, spillway_engine_budget(engine, 3));
  EXPECT_GE(spillway_engine_budget(engine, SPILLWAY_HBM), bytes);

  spillway_activation* activation = nullptr;
  ASSERT_EQ(SPILLWAY_OK, spillway_engine_acquire_activation(engine, 0, SPILLWAY_WRITE, nullptr, &activation));
  EXPECT_REFUSED(spillway_engine_acquire_activation(engine, 7, SPILLWAY_WRITE, nullptr, &activation), "activation");
  auto* const data = static_cast<float*>(spillway_activation_data(activation));
  EXPECT_REFUSED(spillway_stream_launch(engine, nullptr, nullptr, nullptr), "work: is null");
  const auto fill = [](void* user, spillway_workers* workers) {
    EXPECT_GE(spillway_workers_threads(workers), 1u);
    spillway_workers_parallel_for(
        workers, 32, [](void* to, size_t i) { static_cast<float*>(to)[i] = static_cast<float>(i == 3); }, user);
  };
  ASSERT_EQ(SPILLWAY_OK, spillway_stream_launch(engine, nullptr, fill, data));
  EXPECT_REFUSED(spillway_engine_push_gradient(engine, 0, 0, data, 31, SPILLWAY_FLOAT32, nullptr), "has 31 elements");
  EXPECT_REFUSED(spillway_engine_push_gradient(engine, 0, 0, data + 1, 0, SPILLWAY_FLOAT32, nullptr),
                 "do not lie in memory that the engine has lent");
  ASSERT_EQ(SPILLWAY_OK, spillway_engine_push_gradient(engine, 0, 0, data, 32, SPILLWAY_FLOAT32, nullptr));
  EXPECT_EQ(SPILLWAY_OK, spillway_activation_release(activation));
  EXPECT_EQ(nullptr, spillway_activation_data(activation));
  auto report = sized<spillway_step_report>();
  ASSERT_EQ(SPILLWAY_OK, spillway_engine_step(engine, nullptr, 0, &report)) << spillway_error_message();
  EXPECT_EQ(1, report.gradient_norm);
  double stalls = 0;
  for (const double seconds : report.stalls) stalls += seconds;
  EXPECT_DOUBLE_EQ(report.stall_seconds, stalls);

  const spillway::TempDirectory folder;
  const std::string snapshot = folder.path() / "snapshot", exported = folder.path() / "model";
  auto facts = sized<spillway_snapshot_info>();
  EXPECT_EQ(SPILLWAY_NOT_FOUND, spillway_find_snapshot(snapshot.c_str(), &facts));
  ASSERT_EQ(SPILLWAY_OK, spillway_engine_begin_save(engine, snapshot.c_str(), nullptr));
  ASSERT_EQ(SPILLWAY_OK, spillway_engine_finish_save(engine));
  EXPECT_EQ(SPILLWAY_OK, spillway_find_snapshot(snapshot.c_str(), &facts));
  EXPECT_EQ(1u, facts.step);
  uint64_t step = 0;
  EXPECT_EQ(SPILLWAY_OK, spillway_export_snapshot(snapshot.c_str(), exported.c_str(), nullptr, &step));
  EXPECT_EQ(1u, step);
  EXPECT_EQ(SPILLWAY_NOT_FOUND, spillway_engine_load_snapshot(engine, exported.c_str()));
  EXPECT_EQ(SPILLWAY_OK, spillway_engine_load_snapshot(engine, snapshot.c_str())) << spillway_error_message();
  EXPECT_EQ(1u, spillway_engine_current_step(engine));
  EXPECT_EQ(SPILLWAY_OK, spillway_remove_snapshot(snapshot.c_str()));
}

TEST_F(CApi, ATypeThatTheProgramDoesNotHandleIsRefused) {
  ASSERT_EQ(SPILLWAY_OK, spillway_model_accept_dtype(model, SPILLWAY_BFLOAT16));
  EXPECT_EQ(SPILLWAY_UNSUPPORTED, spillway_engine_create(config, model, nullptr, &engine));
  EXPECT_THAT(spillway_error_message(), HasSubstr("the program handles bf16 alone"));
  ASSERT_EQ(SPILLWAY_OK, spillway_model_accept_dtype(model, SPILLWAY_FLOAT32));
  create();
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

// The optimizer alone: every call, and what is wrong with some.
TEST(COptimizer, StepsKeepsAndGivesBack) {
  constexpr const char* kOffloaded = R"({"train_batch_size": 1, "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}})";
  spillway_config* config = nullptr;
  ASSERT_EQ(SPILLWAY_OK, spillway_config_parse(kOffloaded, "test", &config));
  spillway_model* model = spillway_model_create();
  spillway_model_add_block(model, "a");
  spillway_model_add_parameter(model, 0, "w", kShape, 2, 1, 1);
  spillway_tensor_carrier carrier = {};
  carrier.struct_size = sizeof carrier;
  spillway_optimizer_options options = {};
  options.struct_size = sizeof options, options.keep_gradients = 1, options.carrier = &carrier;
  spillway_optimizer* optimizer = nullptr;
  EXPECT_REFUSED(spillway_optimizer_create(config, model, &options, &optimizer), "bring: is null");
  carrier.bring = carrier.give = [](void*, const spillway_carried_piece*) { return 7; };
  carrier.wait = [](void*, uint32_t) { return 0; };
  carrier.leaf_sums = [](void*, uint32_t, double*, uint64_t) { return 7; };
  ASSERT_EQ(SPILLWAY_OK, spillway_optimizer_create(config, model, &options, &optimizer)) << spillway_error_message();
  uint64_t bytes = 0;
  auto* const gradient = static_cast<float*>(spillway_optimizer_gradient_memory(optimizer, 0, &bytes));
  ASSERT_NE(nullptr, gradient) << spillway_error_message();
  std::vector<float> weights(bytes / sizeof(float), 1);
  std::fill_n(gradient, weights.size(), 2.f);
  const spillway_tensor tensor = {.weight = weights.data(), .gradient = gradient};
  double norm = 0;
  uint32_t bad = 0;
  const spillway_tensor away = {.weight = SPILLWAY_ELSEWHERE, .gradient = SPILLWAY_ELSEWHERE};
  EXPECT_EQ(SPILLWAY_DEVICE, spillway_optimizer_gradient_norm(optimizer, &away, 1, &norm, &bad));
  EXPECT_STREQ("carrier: leaf_sums: failed with 7; its own message says why", spillway_error_message());
  EXPECT_NE(nullptr, spillway_optimizer_staging(optimizer, &bytes));
  EXPECT_REFUSED(spillway_optimizer_import_weights(optimizer, nullptr, 1), "tensors: is null");
  EXPECT_EQ(SPILLWAY_OK, spillway_optimizer_import_weights(optimizer, &tensor, 1)) << spillway_error_message();
  EXPECT_EQ(SPILLWAY_OK, spillway_optimizer_gradient_norm(optimizer, &tensor, 1, &norm, &bad));
  EXPECT_DOUBLE_EQ(4 * static_cast<double>(weights.size()), norm * norm);
  EXPECT_EQ(UINT32_MAX, bad);

  spillway_hyperparameters group = {};
  group.struct_size = sizeof group;
  group.learning_rate = 0.25, group.beta1 = 0.9, group.beta2 = 0.999, group.epsilon = 1e-8;
  const spillway_hyperparameters* const groups[] = {&group};
  const uint32_t group_of[] = {0};
  spillway_optimizer_step step = {};
  step.struct_size = sizeof step;
  step.tensors = &tensor, step.count = 1, step.groups = groups, step.group_count = 1, step.group_of = group_of;
  spillway_optimizer_report report = {};
  report.struct_size = sizeof report;
  EXPECT_EQ(SPILLWAY_OK, spillway_optimizer_make_step(optimizer, &step, &report)) << spillway_error_message();
  EXPECT_EQ(1u, report.step);
  EXPECT_EQ(1u, spillway_optimizer_current_step(optimizer));
  EXPECT_FLOAT_EQ(0.75f, weights.back());
  uint64_t count = 0;
  EXPECT_EQ(SPILLWAY_OK, spillway_optimizer_update_counts(optimizer, &count, 1));
  EXPECT_EQ(1u, count);
  const auto sink = [](void* sum, uint32_t, uint64_t, const float* values, uint64_t n) {
    return *static_cast<double*>(sum) = std::accumulate(values, values + n, *static_cast<double*>(sum)), 0;
  };
  double sum = 0;
  EXPECT_EQ(SPILLWAY_OK, spillway_optimizer_export_state(optimizer, SPILLWAY_EXP_AVG, &tensor, 1, sink, &sum));
  EXPECT_NEAR(0.2 * static_cast<double>(weights.size()), sum, 1e-4 * sum);
  EXPECT_REFUSED(spillway_optimizer_export_state(optimizer, 3, &tensor, 1, sink, &sum), "no such value: 3");
  step.group_of = nullptr;
  EXPECT_REFUSED(spillway_optimizer_make_step(optimizer, &step, nullptr), "group_of: is null");
  EXPECT_REFUSED(spillway_optimizer_save(optimizer, nullptr, nullptr, &tensor, 1), "directory: is null");
  EXPECT_EQ(SPILLWAY_OK, spillway_optimizer_destroy(optimizer));
  EXPECT_REFUSED(spillway_optimizer_destroy(optimizer), "is no handle that lives");
  EXPECT_EQ(0u, spillway_optimizer_current_step(optimizer));
  spillway_model_destroy(model);
  spillway_config_destroy(config);
}

}  // namespace
