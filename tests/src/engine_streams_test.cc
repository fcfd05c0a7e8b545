// Callers with streams of their own. The host device adopts none, but does not ask whose a stream is: another one of
// its kind has streams to give.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>
#include <utility>

#include "kernels/device.h"
#include "kernels/host_device.h"
#include "kernels/workers.h"
#include "tests/src/named_budget.h"
#include "tests/src/toy_trainer.h"

namespace spillway {
namespace {

using testing::TempStore;

constexpr std::uint32_t kBlocks = 3;
constexpr std::uint64_t kCount = 5000;

float weight_of(std::uint32_t block) { return 1 + static_cast<float>(block); }

struct Tiers {
  const char* name;
  Placement parameters, states;
};
constexpr Tiers kTiers[] = {{"hbm", Placement::kHbm, Placement::kHbm},
                            {"states in host memory", Placement::kHbm, Placement::kHost},
                            {"states on nvme", Placement::kHbm, Placement::kNvme},
                            {"host memory", Placement::kHost, Placement::kHost},
                            {"nvme", Placement::kNvme, Placement::kNvme}};

// Each micro-batch goes through the whole model.
ModelDescription model_of(std::uint32_t micro_batches) {
  ModelDescription model;
  for (std::uint32_t b = 0; b < kBlocks; ++b) {
    const std::string name = "h." + std::to_string(b);
    model.blocks.push_back({name, {{.name = name + ".weight", .shape = {kCount}, .pushes = micro_batches}}});
  }
  for (std::uint32_t m = 0; m < micro_batches; ++m) {
    for (std::uint32_t b = 0; b < kBlocks; ++b) model.visits.push_back({b, Pass::kForward});
    for (std::uint32_t b = kBlocks; b-- > 0;) model.visits.push_back({b, Pass::kBackward});
  }
  model.activations.push_back({.bytes = kCount * sizeof(float)});
  model.workspace_bytes = 2 * kCount * sizeof(float);
  return model;
}

struct Caller {
  std::unique_ptr<HostWorkers> workers = create_workers(1);
  std::unique_ptr<Device> device = create_host_device({.hbm_bytes = 4096}, *workers);
  std::unique_ptr<Stream> first = device->create_stream("first"), second = device->create_stream("second");
};

// So late that whoever does not wait for what comes after is there before it.
void hold(Stream& stream) {
  stream.launch([](HostWorkers&) { std::this_thread::sleep_for(std::chrono::milliseconds(150)); });
}

void fill(Stream& stream, void* to, float value) {
  stream.launch([=](HostWorkers&) { std::fill_n(static_cast<float*>(to), kCount, value); });
}

// What is there once the stream gets there: its value, if it is the same everywhere.
void read(Stream& stream, const void* from, float& value) {
  value = -1;
  stream.launch([from, out = &value](HostWorkers&) {
    const auto* begin = static_cast<const float*>(from);
    if (std::all_of(begin, begin + kCount, [begin](float f) { return f == *begin; })) *out = *begin;
  });
}

class EngineStreams : public ::testing::Test {
 protected:
  void TearDown() override { end(); }
  // What the engine lent is not there any longer.
  void end() {
    for (Stream* stream : {caller.first.get(), caller.second.get()}) stream->synchronize();
    engine.reset();
  }
  void make(const Tiers& tiers, std::uint32_t micro_batches, bool least_hbm = false) {
    end();
    Config config = testing::toy_config(tiers.parameters, tiers.states, DType::kFloat32, store.path());
    const ModelDescription model = model_of(micro_batches);
    if (least_hbm) {
      try {
        config.hbm_bytes = 1;
        Engine::create(config, model);
      } catch (const Error& error) {
        config.hbm_bytes = testing::named_bytes(error);
      }
    }
    engine = Engine::create(config, model, {.on_existing = OnExisting::kReplace});
    engine->import_weights([](std::uint32_t block, std::uint32_t, std::uint64_t, std::span<float> values) {
      std::ranges::fill(values, weight_of(block));
    });
  }

  // The gradient of every element of block b is b + `gain`.
  void micro_batch(Stream& stream, float gain, bool held = false) {
    for (std::uint32_t b = 0; b < kBlocks; ++b) engine->acquire(b, Pass::kForward, stream);
    for (std::uint32_t b = kBlocks; b-- > 0;) {
      const Lease lease = engine->acquire(b, Pass::kBackward, stream);
      if (std::exchange(held, false)) hold(stream);
      fill(stream, engine->workspace().data(), static_cast<float>(b) + gain);
      engine->push_gradient({.block = b, .parameter = 0, .data = engine->workspace().data()}, stream);
    }
  }

  TempStore store;
  Caller caller;
  std::unique_ptr<Engine> engine;
  std::atomic<bool> has_run = false;
};

TEST_F(EngineStreams, WhatIsEnqueuedBehindTheLastGradientReadsTheWeightsThatItWasLent) {
  for (const Tiers& tiers : kTiers) {
    make(tiers, 1);
    micro_batch(*caller.first, 1);
    float seen[kBlocks];
    hold(*caller.first);
    for (std::uint32_t b = 0; b < kBlocks; ++b) {
      const Lease lease = engine->acquire(b, Pass::kForward, *caller.first);
      read(*caller.first, lease.weight(0), seen[b]);
    }
    engine->step();
    float updated[kBlocks];
    for (std::uint32_t b = 0; b < kBlocks; ++b) {
      const Lease lease = engine->acquire(b, Pass::kForward, *caller.first);
      read(*caller.first, lease.weight(0), updated[b]);
    }
    caller.first->synchronize();
    for (std::uint32_t b = 0; b < kBlocks; ++b) {
      EXPECT_EQ(seen[b], weight_of(b)) << tiers.name << " block " << b;
      EXPECT_LT(updated[b], weight_of(b));
      EXPECT_GT(updated[b], 0.9f * weight_of(b));
    }
  }
}

TEST_F(EngineStreams, MicroBatchesOnDifferentStreamsAreAddedInTheOrderOfTheirPushes) {
  for (const Tiers& tiers : kTiers) {
    for (const bool least_hbm : {false, true}) {  // sums in host memory, where they may be
      std::vector<std::uint32_t> expected, seen;
      for (const bool alone : {true, false}) {
        make(tiers, 3, least_hbm);
        micro_batch(*caller.first, 0.1f, !alone);
        micro_batch(alone ? *caller.first : *caller.second, 3e7f);
        micro_batch(alone ? *caller.first : engine->stream(), -2e7f);
        engine->step();
        (alone ? expected : seen) = testing::exported(*engine);
      }
      EXPECT_EQ(seen, expected) << tiers.name << (least_hbm ? " with the least HBM" : "");
    }
  }
}

TEST_F(EngineStreams, APlaceIsGivenAwayBehindEveryStreamThatItWasLentTo) {
  for (const bool together : {false, true}) {
    make(kTiers[4], 1, true);  // one place
    for (const std::uint32_t b : {0u, 1u}) engine->acquire(b, Pass::kForward, *caller.first);
    float seen;
    {
      Lease forward = engine->acquire(2, Pass::kForward, *caller.first);
      hold(*caller.first);
      read(*caller.first, forward.weight(0), seen);
      if (!together) forward.release();
      const Lease backward = engine->acquire(2, Pass::kBackward, *caller.second);
      forward.release();
    }
    engine->acquire(1, Pass::kBackward, *caller.second);
    end();
    EXPECT_EQ(seen, weight_of(2)) << together;
  }
}

TEST_F(EngineStreams, AnActivationIsWrittenBehindEveryStreamThatReadsIt) {
  make(kTiers[0], 1);
  float seen;
  {
    const ActivationLease written = engine->acquire_activation(0, Access::kWrite, *caller.first);
    fill(*caller.first, written.data(), 1);
  }
  {
    ActivationLease first = engine->acquire_activation(0, Access::kRead, *caller.first);
    ActivationLease second = engine->acquire_activation(0, Access::kRead, *caller.second);
    hold(*caller.first);
    read(*caller.first, first.data(), seen);
    first.release();
    second.release();
  }
  {
    const ActivationLease written = engine->acquire_activation(0, Access::kWrite, *caller.second);
    fill(*caller.second, written.data(), 2);
  }
  caller.second->synchronize();
  caller.first->synchronize();
  EXPECT_EQ(seen, 1);
}

TEST_F(EngineStreams, ADiscardedStepHasRun) {
  make(kTiers[1], 2);
  engine->acquire(0, Pass::kForward, *caller.first);
  hold(*caller.first);
  caller.first->launch([this](HostWorkers&) { has_run = true; });
  engine->discard_step();
  EXPECT_TRUE(has_run);
}

}  // namespace
}  // namespace spillway
