// Ranks over the API for C that train on GPUs, joined over the caller's own messages; GPUs and NCCL are emulated. Ranks
// are threads of this process, each on a GPU of its own; of the fifth there is no code for.
#include <cuda_runtime_api.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

#include "tests/src/c_pipes.h"
#include "tests/temp_directory.h"

namespace spillway {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::run_ranks_on_pipes;
using ::testing::StartsWith;

constexpr uint32_t kMicroBatches = 4, kSteps = 3, kBlocks = 3;
constexpr int kOld = 4;                                             // a GPU
constexpr std::array<uint64_t, 2> kCounts = {3 * 1024 + 512, 700};  // elements of a block's parameters

// Before anything is asked of a GPU.
class Gpus {
 public:
  Gpus() {
    ::setenv("SPILLWAY_EMULATED_GPUS", "5", 1);
    ::setenv("SPILLWAY_EMULATED_GPU_OLD", std::to_string(kOld).c_str(), 1);
    ::setenv("SPILLWAY_EMULATED_GPU_LOG", calls().c_str(), 1);
  }
  std::string calls() const { return directory_.path() / "calls"; }

 private:
  TempDirectory directory_;
};
const Gpus gpus;

// Noise, so that another order of a sum has other bits.
float noise(uint64_t step, uint64_t micro_batch, uint64_t place, uint64_t i) {
  uint64_t x = ((step * 31 + micro_batch) * 31 + place) * 1'000'003 + i;
  x = (x ^ x >> 31) * 0x9e3779b97f4a7c15;
  x = (x ^ x >> 29) * 0xbf58476d1ce4e5b9;
  return static_cast<float>(static_cast<double>(x >> 40) / (1 << 24) - 0.5);
}

struct Layout {
  const char* name;
  const char* zero;  // its section, with {} for a directory
};

struct Trained {
  std::vector<float> weights;
  std::vector<double> norms;
  spillway_device_kind device = SPILLWAY_DEVICE_HOST;
  bool operator==(const Trained& other) const { return weights == other.weights && norms == other.norms; }
};

std::string config_of(const char* device, const std::string& zero) {
  return fmt::format(R"({{"train_batch_size": {}, "train_micro_batch_size_per_gpu": 1, "gradient_clipping": 1.0,
    "bf16": {{"enabled": true}}, "optimizer": {{"type": "AdamW", "params": {{"lr": 0.01}}}}, "zero_optimization": {},
    "spillway": {{"device": "{}", "sum_groups": {}, "tile_elements": 1024, "hbm_bytes": "2MiB"}}}})",
                     kMicroBatches, zero, device, kMicroBatches);
}

// What a program has for an engine, and gives back.
class Engine {
 public:
  Engine(spillway_communicator* communicator, uint32_t ranks, const std::string& config) {
    EXPECT_EQ(SPILLWAY_OK,
              spillway_config_parse_for(ranks, config.c_str(), "test", nullptr, nullptr, nullptr, &config_))
        << spillway_error_message();
    model_ = spillway_model_create();
    const uint32_t of_rank = kMicroBatches / ranks;
    for (uint32_t block = 0; block < kBlocks; ++block) {
      spillway_model_add_block(model_, std::to_string(block).c_str());
      for (const uint64_t count : kCounts)
        spillway_model_add_parameter(model_, block, fmt::format("{}.{}", block, count).c_str(), &count, 1, 1, of_rank);
    }
    for (uint32_t i = 0; i < of_rank; ++i) {
      for (uint32_t block = 0; block < kBlocks; ++block) spillway_model_add_visit(model_, block, SPILLWAY_FORWARD);
      for (uint32_t block = kBlocks; block-- > 0;) spillway_model_add_visit(model_, block, SPILLWAY_BACKWARD);
    }
    spillway_model_set_workspace(model_, kCounts[0] * sizeof(float));
    status = spillway_engine_create_on(communicator, config_, model_, nullptr, &engine_);
    if (status != SPILLWAY_OK) failure = spillway_error_message();
  }
  ~Engine() {
    EXPECT_EQ(SPILLWAY_OK, spillway_engine_destroy(engine_)) << spillway_error_message();
    spillway_model_destroy(model_);
    spillway_config_destroy(config_);
  }
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  spillway_device_kind device() const { return spillway_engine_device(engine_); }

  Trained train(uint32_t rank, uint32_t ranks) {
    Trained trained{.weights = {}, .norms = {}, .device = device()};
    const auto begin = [](void*, uint32_t block, uint32_t parameter, uint64_t first, float* out, uint64_t count) {
      for (uint64_t i = 0; i < count; ++i) out[i] = noise(0, block, parameter, first + i);
      return 0;
    };
    EXPECT_EQ(SPILLWAY_OK, spillway_engine_import_weights(engine_, begin, nullptr)) << spillway_error_message();
    for (uint64_t step = 1; step <= kSteps; ++step) {
      const uint32_t of_rank = kMicroBatches / ranks;
      for (uint32_t m = rank * of_rank; m < (rank + 1) * of_rank; ++m) pass(step, m);
      spillway_step_report report = {};
      report.struct_size = sizeof report;
      EXPECT_EQ(SPILLWAY_OK, spillway_engine_step(engine_, nullptr, 0, &report)) << spillway_error_message();
      trained.norms.push_back(report.gradient_norm);
    }
    const auto keep = [](void* to, uint32_t, uint32_t, uint64_t, const float* values, uint64_t count) {
      auto& all = *static_cast<std::vector<float>*>(to);
      return all.insert(all.end(), values, values + count), 0;
    };
    EXPECT_EQ(SPILLWAY_OK, spillway_engine_export_weights(engine_, 1, keep, &trained.weights))
        << spillway_error_message();
    return trained;
  }

  spillway_status status = SPILLWAY_OK;
  std::string failure;

 private:
  void visit(uint32_t block, spillway_pass pass, const std::function<void()>& work = {}) {
    spillway_lease* lease = nullptr;
    ASSERT_EQ(SPILLWAY_OK, spillway_engine_acquire(engine_, block, pass, nullptr, &lease)) << spillway_error_message();
    if (work) work();
    EXPECT_EQ(SPILLWAY_OK, spillway_lease_release(lease));
  }
  void pass(uint64_t step, uint32_t micro_batch) {
    for (uint32_t block = 0; block < kBlocks; ++block) visit(block, SPILLWAY_FORWARD);
    for (uint32_t block = kBlocks; block-- > 0;) {
      visit(block, SPILLWAY_BACKWARD, [&] {
        for (uint32_t parameter = 0; parameter < kCounts.size(); ++parameter) push(step, micro_batch, block, parameter);
      });
    }
  }
  void push(uint64_t step, uint32_t micro_batch, uint32_t block, uint32_t parameter) {
    std::vector<float> gradient(kCounts[parameter]);
    for (uint64_t i = 0; i < gradient.size(); ++i)
      gradient[i] = noise(step, micro_batch, block * kCounts.size() + parameter, i);
    spillway_stream_synchronize(engine_, nullptr);
    void* const workspace = spillway_engine_workspace(engine_, nullptr);
    const size_t bytes = gradient.size() * sizeof(float);
    if (device() == SPILLWAY_DEVICE_CUDA) {
      EXPECT_EQ(cudaSuccess, cudaMemcpy(workspace, gradient.data(), bytes, cudaMemcpyHostToDevice));
    } else {
      std::memcpy(workspace, gradient.data(), bytes);
    }
    EXPECT_EQ(SPILLWAY_OK, spillway_engine_push_gradient_of(engine_, micro_batch, block, parameter, workspace,
                                                            gradient.size(), SPILLWAY_FLOAT32, nullptr))
        << spillway_error_message();
  }

  spillway_config* config_ = nullptr;
  spillway_model* model_ = nullptr;
  spillway_engine* engine_ = nullptr;
};

void choose(int gpu) { ASSERT_EQ(cudaSuccess, cudaSetDevice(gpu)); }

// What rank 0 has, after all have been found to have the same. No ranks: one process without a communicator.
Trained trained_by(uint32_t ranks, const char* device, const Layout& layout) {
  const TempDirectory directory;
  const std::string config = config_of(device, fmt::format(fmt::runtime(layout.zero), directory.path().string()));
  std::vector<Trained> each(ranks);
  if (ranks == 0) {
    each.emplace_back(Engine(nullptr, 1, config).train(0, 1));
  } else {
    run_ranks_on_pipes(ranks, [&](uint32_t rank, spillway_communicator* communicator) {
      choose(static_cast<int>(rank));
      Engine engine(communicator, ranks, config);
      ASSERT_EQ("", engine.failure);
      each[rank] = engine.train(rank, ranks);
    });
  }
  EXPECT_THAT(each, Each(each[0]));
  EXPECT_EQ(kSteps, each[0].norms.size());
  return each[0];
}

class Layouts : public ::testing::TestWithParam<Layout> {};

TEST_P(Layouts, OneTwoAndFourGpusTrainWhatTheHostTrains) {
  const Trained wanted = trained_by(0, "host", GetParam());
  ASSERT_GT(wanted.norms[0], 1) << "clipped";
  for (const uint32_t ranks : {0u, 1u, 2u, 4u}) {
    const Trained found = trained_by(ranks, ranks == 2 ? "auto" : "cuda", GetParam());
    EXPECT_EQ(SPILLWAY_DEVICE_CUDA, found.device);
    EXPECT_EQ(wanted, found) << ranks << " ranks";
  }
  EXPECT_EQ(wanted, trained_by(2, "host", GetParam()));
}

INSTANTIATE_TEST_SUITE_P(
    CRanks, Layouts,
    ::testing::Values(Layout{"hbm", R"({{"stage": 1}})"},
                      Layout{"nvme", R"({{"stage": 3, "offload_param": {{"device": "nvme", "nvme_path": "{0}"}},
                 "offload_optimizer": {{"device": "nvme", "nvme_path": "{0}"}}}})"}),
    [](const auto& info) { return info.param.name; });

// Two ranks, each with a GPU and a device in its configuration: what they are told, and whose engines train where.
struct Outcome {
  std::array<spillway_status, 2> status{};
  std::array<std::string, 2> failures;
  std::array<spillway_device_kind, 2> devices{};
  std::vector<std::string> warnings;
};

std::vector<std::string> warned;

Outcome outcome_of(std::array<int, 2> chosen, std::array<const char*, 2> devices) {
  Outcome outcome;
  warned.clear();
  spillway_set_log(
      [](void*, int warning, const char* line) {
        if (warning != 0) warned.emplace_back(line);  // one call at a time
      },
      nullptr);
  run_ranks_on_pipes(2, [&](uint32_t rank, spillway_communicator* communicator) {
    choose(chosen[rank]);
    {
      Engine engine(communicator, 2, config_of(devices[rank], R"({"stage": 1})"));
      outcome.status[rank] = engine.status;
      outcome.failures[rank] = engine.failure;
      if (engine.status == SPILLWAY_OK) outcome.devices[rank] = engine.device();
    }
    uint32_t number = rank;  // they still talk
    EXPECT_EQ(SPILLWAY_OK, spillway_communicator_broadcast(communicator, &number, sizeof number, 1));
    EXPECT_EQ(1u, number);
  });
  spillway_set_log(nullptr, nullptr);
  outcome.warnings = warned;
  return outcome;
}

TEST(CRanksDevice, AutoIsTheCpuWhereARankHasNoGpuAndOneLineSaysWhose) {
  const Outcome outcome = outcome_of({0, kOld}, {"auto", "auto"});
  EXPECT_THAT(outcome.failures, Each(""));
  EXPECT_THAT(outcome.devices, Each(SPILLWAY_DEVICE_HOST));
  EXPECT_THAT(
      outcome.warnings,
      ElementsAre("spillway.device is auto, and all ranks use the CPU: rank 1 has no GPU (the GPU is of compute "
                  "capability 7.5, and this was built for 8.0, 8.6, 9.0)"));
}

TEST(CRanksDevice, CudaIsRefusedOnAllWhereARankHasNoGpu) {
  const Outcome outcome = outcome_of({0, kOld}, {"cuda", "auto"});
  EXPECT_THAT(outcome.status, Each(SPILLWAY_UNSUPPORTED));
  EXPECT_THAT(outcome.failures, Each(StartsWith("rank 1: spillway.device: is cuda, and there is none: the GPU is of")));
}

TEST(CRanksDevice, TwoDevicesAreRefusedOnAll) {
  const Outcome outcome = outcome_of({0, 1}, {"host", "cuda"});
  EXPECT_THAT(outcome.status, Each(SPILLWAY_INVALID_ARGUMENT));
  EXPECT_THAT(outcome.failures,
              Each("spillway.device: is host on rank 0, and cuda on rank 1; give all ranks the same"));
}

TEST(CRanksDevice, AutoBesideTheHostIsTheHost) {
  const Outcome outcome = outcome_of({0, 1}, {"auto", "host"});
  EXPECT_THAT(outcome.devices, Each(SPILLWAY_DEVICE_HOST));
  EXPECT_THAT(outcome.warnings,
              ElementsAre("spillway.device is auto, and all ranks use the CPU: rank 1 asks for the host"));
  EXPECT_THAT(outcome_of({kOld, 1}, {"auto", "host"}).warnings, IsEmpty()) << "no GPU is idle";
}

TEST(CRanksDevice, AutoBesideCudaIsCuda) {
  const Outcome outcome = outcome_of({0, 1}, {"auto", "cuda"});
  EXPECT_THAT(outcome.failures, Each(""));
  EXPECT_THAT(outcome.devices, Each(SPILLWAY_DEVICE_CUDA));
}

TEST(CRanksDevice, TwoRanksDoNotShareAGpu) {
  const char* const why = "communicator nccl: ranks 0 and 1 have the same GPU; give each rank one of its own, by ";
  const Outcome refused = outcome_of({1, 1}, {"cuda", "cuda"});
  EXPECT_THAT(refused.status, Each(SPILLWAY_INVALID_ARGUMENT));
  EXPECT_THAT(refused.failures, Each(StartsWith(why)));
  const Outcome told = outcome_of({1, 1}, {"auto", "auto"});
  EXPECT_THAT(told.devices, Each(SPILLWAY_DEVICE_HOST));
  EXPECT_THAT(told.warnings, ElementsAre(AllOf(StartsWith("spillway.device is auto, "), HasSubstr(why))));
}

// Of NCCL, as the emulated GPU has noted them.
size_t joins() {
  std::ifstream log(gpus.calls());
  size_t count = 0;
  for (std::string line; std::getline(log, line);) count += line == "ncclCommInitRank";
  return count;
}

TEST(CRanksDevice, EnginesOfOneCommunicatorAreJoinedOnce) {
  const std::string config = config_of("cuda", R"({"stage": 1})");
  const size_t before = joins();
  run_ranks_on_pipes(2, [&](uint32_t rank, spillway_communicator* communicator) {
    choose(static_cast<int>(rank) + 1);
    Engine first(communicator, 2, config);
    const Trained trained = first.train(rank, 2);
    Engine second(communicator, 2, config);
    ASSERT_EQ("", second.failure);
    EXPECT_EQ(trained, second.train(rank, 2)) << "beside the other one";
    choose(rank == 0 ? 1 : 3);
    EXPECT_THAT(
        Engine(communicator, 2, config).failure,
        StartsWith("rank 1: communicator nccl: GPU 3 is current, and another one was joined; make all engines"));
  });
  EXPECT_EQ(before + 2, joins());
}

}  // namespace
}  // namespace spillway
