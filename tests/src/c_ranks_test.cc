// Ranks over the API for C. What a communicator does over any transport is communicator_test.cc's; with GPUs,
// tests/emulated_gpu/c_ranks_test.cc's.
#include "spillway/c_ranks.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <filesystem>
#include <numeric>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/src/c_pipes.h"
#include "tests/temp_directory.h"

namespace {

using spillway::testing::Pipes;
using spillway::testing::run_ranks_on_pipes;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::StartsWith;

TEST(CRanks, BytesOfOneRankComeToAll) {
  run_ranks_on_pipes(3, [](uint32_t rank, spillway_communicator* communicator) {
    EXPECT_EQ(rank, spillway_communicator_rank(communicator));
    EXPECT_EQ(3u, spillway_communicator_ranks(communicator));
    std::vector<uint32_t> values(100'000), expected(values.size());
    std::iota(expected.begin(), expected.end(), 7);
    if (rank == 1) values = expected;
    ASSERT_EQ(SPILLWAY_OK, spillway_communicator_broadcast(communicator, values.data(), values.size() * 4, 1));
    EXPECT_EQ(expected, values);
    EXPECT_EQ(SPILLWAY_INVALID_ARGUMENT, spillway_communicator_broadcast(communicator, values.data(), 4, 3));
  });
}

// What others are told by it is communicator_failures_suite.cc's.
TEST(CRanks, ARankSaysThatItIsAtWorkAndThatItEnds) {
  run_ranks_on_pipes(2, [](uint32_t rank, spillway_communicator* communicator) {
    EXPECT_EQ(SPILLWAY_OK, spillway_communicator_note_work(communicator));
    EXPECT_EQ(SPILLWAY_OK, spillway_communicator_note_ending(communicator, rank == 1));
    char bytes[2] = {};
    EXPECT_EQ(SPILLWAY_IO, spillway_communicator_broadcast(communicator, bytes, 1 + rank, 0));
    EXPECT_THAT(spillway_error_message(), HasSubstr(rank == 0 ? ": rank 1 (" : ": this rank ends before it; "));
  });
  EXPECT_EQ(SPILLWAY_INVALID_ARGUMENT, spillway_communicator_note_work(nullptr));
  EXPECT_EQ(SPILLWAY_INVALID_ARGUMENT, spillway_communicator_note_ending(nullptr, 1));
}

constexpr uint64_t kCount = 3 * 1024 + 512;  // no multiple of the ranks' parts

// A model of one tensor, whose gradients are small whole numbers, so that any order of their sums has the same bits:
// in step s it is gradients[s] + slope * (i % 7). SGD without clipping goes by their size,
// not as Adam does, which goes the same way by their mean.
std::vector<float> trained(spillway_communicator* communicator, uint32_t ranks, float slope,
                           const std::vector<float>& gradients) {
  spillway_config* config = nullptr;
  spillway_engine* engine = nullptr;
  spillway_model* model = spillway_model_create();
  const std::string rows = std::to_string(ranks);
  const std::string text = R"({"train_batch_size": )" + rows + R"(, "gradient_clipping": 0,
          "optimizer": {"type": "SGD", "params": {"lr": 0.125}},
          "spillway": {"device": "host", "tile_elements": 1024}})";
  EXPECT_EQ(SPILLWAY_OK, spillway_config_parse_for(ranks, text.c_str(), "test", nullptr, nullptr, nullptr, &config))
      << spillway_error_message();
  spillway_model_add_block(model, "a");
  spillway_model_add_parameter(model, 0, "a", &kCount, 1, 1, 1);
  spillway_model_set_workspace(model, kCount * sizeof(float));
  EXPECT_EQ(SPILLWAY_OK, spillway_engine_create_on(communicator, config, model, nullptr, &engine))
      << spillway_error_message();
  const auto ones = [](void*, uint32_t, uint32_t, uint64_t, float* out, uint64_t count) {
    return std::fill_n(out, count, 1.f), 0;
  };
  EXPECT_EQ(SPILLWAY_OK, spillway_engine_import_weights(engine, ones, nullptr));
  auto* const gradient = static_cast<float*>(spillway_engine_workspace(engine, nullptr));
  for (const float step : gradients) {
    for (const spillway_pass pass : {SPILLWAY_FORWARD, SPILLWAY_BACKWARD}) {
      spillway_lease* lease = nullptr;
      EXPECT_EQ(SPILLWAY_OK, spillway_engine_acquire(engine, 0, pass, nullptr, &lease)) << spillway_error_message();
      EXPECT_EQ(SPILLWAY_OK, spillway_lease_release(lease));
    }
    spillway_stream_synchronize(engine, nullptr);
    for (uint64_t i = 0; i < kCount; ++i) gradient[i] = step + slope * static_cast<float>(i % 7);
    EXPECT_EQ(SPILLWAY_OK, spillway_engine_push_gradient(engine, 0, 0, gradient, kCount, SPILLWAY_FLOAT32, nullptr));
    EXPECT_EQ(SPILLWAY_OK, spillway_engine_step(engine, nullptr, 0, nullptr)) << spillway_error_message();
  }
  std::vector<float> weights(kCount);
  const auto keep = [](void* to, uint32_t, uint32_t, uint64_t first, const float* values, uint64_t count) {
    return std::copy_n(values, count, static_cast<float*>(to) + first), 0;
  };
  EXPECT_EQ(SPILLWAY_OK, spillway_engine_export_weights(engine, 1, keep, weights.data()));
  spillway_engine_destroy(engine);
  spillway_model_destroy(model);
  spillway_config_destroy(config);
  return weights;
}

TEST(CRanks, TrainWhatOneRankTrainsWithTheSumsOfTheirGradients) {
  std::array<std::vector<float>, 2> together;
  run_ranks_on_pipes(2, [&](uint32_t rank, spillway_communicator* communicator) {
    const auto of = static_cast<float>(rank);
    together[rank] = trained(communicator, 2, 1, {1 + of, -5 - of, 3 + 3 * of});
  });
  EXPECT_EQ(together[0], together[1]) << "both have all of it";
  EXPECT_NE(1.f, together[0][0]);
  EXPECT_EQ(trained(nullptr, 1, 2, {3, -11, 9}), together[0]);
  EXPECT_NE(trained(nullptr, 1, 1, {1.5, -5.5, 4.5}), together[0]) << "their means";
}

// What the log is told comes from inside of the call that makes an engine, on every rank.
thread_local spillway_communicator* own = nullptr;
thread_local std::vector<std::string> refusals;

TEST(CRanks, ACollectiveDoesNotComeInBetweenWhileAnEngineIsMade) {
  const auto meddle = [](void*, int, const char*) {
    if (own == nullptr) return;
    char byte = 0;
    const bool refused = spillway_communicator_broadcast(own, &byte, 1, 0) == SPILLWAY_INVALID_ARGUMENT;
    refusals.emplace_back(refused ? spillway_error_message() : "went through");
  };
  spillway_set_log(meddle, nullptr);
  run_ranks_on_pipes(2, [](uint32_t, spillway_communicator* communicator) {
    own = communicator;
    trained(communicator, 2, 1, {});
    own = nullptr;
    EXPECT_THAT(refusals, Not(IsEmpty()));
    EXPECT_THAT(refusals, Each(StartsWith("spillway_communicator_broadcast: was called from inside of another call")));
    char byte = 0;
    EXPECT_EQ(SPILLWAY_OK, spillway_communicator_broadcast(communicator, &byte, 1, 0));
  });
  spillway_set_log(nullptr, nullptr);
}

TEST(CRanks, TheBatchIsDividedAmongThem) {
  const char* text = R"({"train_batch_size": 12, "train_micro_batch_size_per_gpu": 2})";
  spillway_config* config = nullptr;
  ASSERT_EQ(SPILLWAY_OK, spillway_config_parse_for(3, text, "test", nullptr, nullptr, nullptr, &config));
  EXPECT_EQ(2u, spillway_config_gradient_accumulation(config));
  spillway_config_destroy(config);
  EXPECT_EQ(SPILLWAY_INVALID_ARGUMENT, spillway_config_parse_for(5, text, "test", nullptr, nullptr, nullptr, &config));
  EXPECT_EQ(SPILLWAY_INVALID_ARGUMENT, spillway_config_parse_for(0, text, "test", nullptr, nullptr, nullptr, &config));
}

TEST(CRanks, ATableThatCannotBeMeantIsRefused) {
  Pipes pipes(2);
  spillway_communicator* none = nullptr;
  const auto refused = [&](spillway_transport table, const char* why) {
    EXPECT_EQ(SPILLWAY_INVALID_ARGUMENT, spillway_communicator_create(&table, nullptr, &none));
    EXPECT_THAT(spillway_error_message(), HasSubstr(why));
  };
  EXPECT_EQ(SPILLWAY_INVALID_ARGUMENT, spillway_communicator_create(nullptr, nullptr, &none));
  spillway_transport table = pipes.table(0);
  table.send = nullptr;
  refused(table, "spillway_transport.send: is null");
  table = pipes.table(0);
  table.rank = 2;
  refused(table, "rank 2 of 2 ranks; count ranks from 0");
  table = pipes.table(0);
  table.struct_size = 0;
  refused(table, "its struct_size is 0");
  EXPECT_EQ(SPILLWAY_INVALID_ARGUMENT, spillway_message_over(nullptr, nullptr));
  EXPECT_EQ(SPILLWAY_INVALID_ARGUMENT, spillway_communicator_destroy(reinterpret_cast<spillway_communicator*>(&table)));
  EXPECT_EQ(SPILLWAY_OK, spillway_communicator_destroy(nullptr));
}

TEST(CRanks, ARankThatNeverComesIsNamed) {
  Pipes pipes(2);
  const spillway_transport table = pipes.table(1);
  spillway_communicator* none = nullptr;
  spillway_communicator_options options = {};
  options.struct_size = sizeof options;
  options.patience_seconds = 0.2;
  EXPECT_EQ(SPILLWAY_IO, spillway_communicator_create(&table, &options, &none));
  EXPECT_THAT(spillway_error_message(), HasSubstr("no progress in 0.2 s: rank 0 does not answer"));
}

TEST(CRanks, AFunctionThatFailsEndsTheOthersToo) {
  Pipes pipes(2);
  std::array<std::string, 2> messages;
  std::vector<std::thread> threads;
  for (uint32_t rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      spillway_transport table = pipes.table(rank);
      if (rank == 1) {
        table.receive = [](void*, uint32_t, spillway_channel, void*, uint64_t, spillway_message*) { return 3; };
      }
      spillway_communicator* made = nullptr;
      char byte = 0;
      // The other one may have been there for long enough to open it.
      if (spillway_communicator_create(&table, nullptr, &made) == SPILLWAY_OK) {
        EXPECT_EQ(SPILLWAY_IO, spillway_communicator_broadcast(made, &byte, 1, 0));
      }
      messages[rank] = spillway_error_message();
      spillway_communicator_destroy(made);
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::string& message : messages)
    EXPECT_THAT(message, HasSubstr("rank 1: pipes: from or to rank 0: receive returned 3"));
}

TEST(CRanks, AStoreThatIsNotThereIsNotRolledBack) {
  const char* const path = "/nonexistent/rank0";
  uint64_t step = 7;
  EXPECT_EQ(SPILLWAY_NOT_FOUND, spillway_roll_back_store(&path, 1, &step));
  EXPECT_THAT(spillway_error_message(), HasSubstr(path));
  EXPECT_EQ(SPILLWAY_INVALID_ARGUMENT, spillway_roll_back_store(nullptr, 1, nullptr));
  EXPECT_EQ(7U, step);
}

using Commits = std::vector<std::pair<uint64_t, std::string>>;

Commits commits_of(const char* store) {
  Commits commits;
  const auto note = [](void* to, uint64_t step, const void* blob, size_t bytes) {
    static_cast<Commits*>(to)->emplace_back(step, std::string(static_cast<const char*>(blob), bytes));
  };
  EXPECT_EQ(SPILLWAY_OK, spillway_store_commits(&store, 1, note, &commits)) << spillway_error_message();
  return commits;
}

// Whatever step it is committed as, what is imported is known by what the caller keeps with it.
TEST(CRanks, AStoreShowsBothOfItsCommits) {
  const spillway::TempDirectory directory;
  const std::string store = directory / "store";
  for (const char* type : {"fp16", "bf16"}) {
    std::filesystem::remove_all(store);
    spillway_config* config = nullptr;
    spillway_optimizer* optimizer = nullptr;
    spillway_model* model = spillway_model_create();
    const std::string text = std::string(R"({"train_batch_size": 1, ")") + type + R"(": {"enabled": true},
        "optimizer": {"type": "Adam"}, "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
        "spillway": {"device": "host", "tile_elements": 1024, "nvme_paths": [")" +
                             store + R"("]}})";
    ASSERT_EQ(SPILLWAY_OK, spillway_config_parse(text.c_str(), "test", &config)) << spillway_error_message();
    spillway_model_add_block(model, "a");
    spillway_model_add_parameter(model, 0, "a", &kCount, 1, 1, 1);
    ASSERT_EQ(SPILLWAY_OK, spillway_optimizer_create(config, model, nullptr, &optimizer)) << spillway_error_message();
    std::vector<uint16_t> weights(kCount);
    const spillway_tensor tensor = {.weight = weights.data(), .gradient = nullptr};
    EXPECT_EQ(SPILLWAY_INVALID_ARGUMENT,
              spillway_optimizer_set_blob(optimizer, std::string(20'000, 'x').data(), 20'000));
    EXPECT_EQ(SPILLWAY_OK, spillway_optimizer_set_blob(optimizer, "begun", 5));
    EXPECT_EQ(SPILLWAY_OK, spillway_optimizer_import_weights(optimizer, &tensor, 1)) << spillway_error_message();
    EXPECT_EQ(commits_of(store.c_str()), (Commits{{0, "begun"}}));
    EXPECT_EQ(SPILLWAY_OK, spillway_optimizer_set_blob(optimizer, "loaded", 6));
    const auto zeros = [](void*, spillway_optimizer_state, uint32_t, uint64_t, float* out, uint64_t count) {
      return std::fill_n(out, count, 0.f), 0;
    };
    const uint64_t updates = 0;
    EXPECT_EQ(SPILLWAY_OK, spillway_optimizer_import_state(optimizer, 0, &updates, 0, &tensor, 1, zeros, nullptr))
        << spillway_error_message();
    EXPECT_EQ(commits_of(store.c_str()), (Commits{{0, "loaded"}, {0, "begun"}}));
    spillway_optimizer_destroy(optimizer);
    EXPECT_EQ(commits_of(store.c_str()), (Commits{{0, "loaded"}, {0, "begun"}}));
    spillway_model_destroy(model);
    spillway_config_destroy(config);
  }
  const char* const nowhere = "/nonexistent/rank0";
  EXPECT_EQ(SPILLWAY_INVALID_ARGUMENT, spillway_store_commits(&nowhere, 1, nullptr, nullptr));
}

}  // namespace
