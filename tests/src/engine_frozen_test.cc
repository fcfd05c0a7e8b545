// What no update changes is read once, as far as there is room for it, and the rest once a pass.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "spillway/bf16.h"
#include "spillway/error.h"
#include "spillway/export.h"
#include "spillway/snapshot.h"
#include "spillway/units.h"
#include "src/plan/plan.h"
#include "src/plan/schedule.h"
#include "tests/aio/temp_files.h"
#include "tests/src/plan/schedule_check.h"
#include "tests/src/toy_trainer.h"

namespace spillway {
namespace {

using ::testing::HasSubstr;
using testing::TempStore;

constexpr std::uint32_t kBlocks = 12;
constexpr std::uint64_t kElements = 128 * kKiB, kBlockBytes = 2 * kElements;  // a tile each

// Passes over a model that is not trained: forward visits alone.
ModelDescription inference_model() {
  ModelDescription model;
  for (std::uint32_t b = 0; b < kBlocks; ++b) {
    const std::string name = "h." + std::to_string(b);
    model.blocks.push_back({name, {{.name = name + ".weight", .shape = {kElements}, .trainable = false}}});
    model.visits.push_back({b, Pass::kForward});
  }
  return model;
}

Config inference_config(const TempStore& store) {
  Config config = testing::toy_config(Placement::kNvme, Placement::kNvme, DType::kBFloat16, store.path());
  config.tile_elements = kElements;
  config.commit_every = 1;
  return config;
}

// With room in HBM for so many blocks, and no more than what the pipeline needs of host memory.
Config with_room_for(std::uint64_t blocks, const TempStore& store) {
  Config config = inference_config(store);
  const Plan plan = make_plan(config, inference_model());
  std::uint64_t places = 0;
  for (const Region& place : plan.hbm.places) places += place.bytes;
  config.hbm_bytes = plan.ledger.total(Placement::kHbm) - places + blocks * kBlockBytes;
  std::uint64_t cached = 0;  // the tile buffers that nothing is updated in
  for (const TilePlace& tile : plan.tile_places) {
    if (tile.home[index_of(Part::kWeights)] == Placement::kHost) cached += extent_bytes(tile.shape, Part::kWeights);
  }
  config.host_bytes = plan.ledger.total(Placement::kHost) - cached;
  return config;
}

struct Passes {
  explicit Passes(const Config& config) : engine(Engine::create(config, model)) {
    engine->import_weights(testing::toy_weights());
  }

  // Every block has its weights, wherever they come from.
  void pass() {
    for (std::uint32_t b = 0; b < kBlocks; ++b) {
      const Lease lease = engine->acquire(b, Pass::kForward, engine->stream());
      engine->stream().synchronize();
      std::vector<float> expected(kElements);
      testing::toy_weights()(b, 0, 0, expected);
      const auto* bits = static_cast<const std::uint16_t*>(lease.weight(0));
      std::uint64_t wrong = 0;
      for (std::uint64_t i = 0; i < kElements; ++i) wrong += bits[i] != float_to_bf16(expected[i]);
      EXPECT_EQ(wrong, 0u) << "block " << b;
    }
  }
  StepReport passes(int count) {
    for (; count > 0; --count) pass();
    return engine->step({});
  }

  const ModelDescription model = inference_model();
  std::unique_ptr<Engine> engine;
};

// Of weights, from NVMe, in a pass of the steady state.
std::uint64_t planned_read(const Config& config) {
  const ScheduleInput input = schedule_input(make_plan(config, inference_model()), {}, {});
  const Schedule schedule = make_schedule(input);
  testing::check_schedule(input, schedule);
  return schedule.traffic.nvme_read;
}

TEST(EngineFrozen, PassesOverAModelThatFitsReadItOnce) {
  TempStore store;
  const Config config = with_room_for(kBlocks, store);
  EXPECT_EQ(planned_read(config), 0u);
  Passes run(config);
  EXPECT_EQ(run.passes(1).nvme_read_bytes, kBlocks * kBlockBytes);
  for (int step = 0; step < 2; ++step) {
    const StepReport report = run.passes(5);
    EXPECT_EQ(report.nvme_read_bytes, 0u);
    EXPECT_EQ(report.h2d_bytes, 0u);
    EXPECT_EQ(report.visit_hits, kBlocks) << "of the last pass";
  }
}

TEST(EngineFrozen, WhatDoesNotFitIsReadOncePerPass) {
  // The others take turns in two places, and in one where kept ones lie between them.
  constexpr std::pair<std::uint64_t, std::uint64_t> kCases[] = {{3, 11}, {4, 10}, {8, 6}, {11, 2}};
  for (const auto& [room, fetched] : kCases) {
    TempStore store;
    const Config config = with_room_for(room, store);
    EXPECT_EQ(planned_read(config), fetched * kBlockBytes) << room;
    Passes run(config);
    run.passes(2);
    constexpr std::uint64_t kPasses = 10, kInFlight = 2 * kBlockBytes;
    for (const bool steps : {false, true}) {
      std::uint64_t read = 0;
      for (std::uint64_t pass = 0; pass < kPasses; pass += steps ? 1 : kPasses) {
        read += run.passes(steps ? 1 : kPasses).nvme_read_bytes;
      }
      EXPECT_LE(read, kPasses * fetched * kBlockBytes + kInFlight) << room << " steps " << steps;
      EXPECT_GE(read + kInFlight, kPasses * fetched * kBlockBytes) << room << " steps " << steps;
    }
  }
}

// What has no place in HBM has its home in host memory, as far as that has room; nothing has both.
TEST(EngineFrozen, HostMemoryKeepsWhatHbmDoesNot) {
  for (const std::uint64_t in_hbm : {3u, 8u}) {
    const std::uint64_t fetched = kBlocks - (in_hbm - 2);
    for (const std::uint64_t in_host : {std::uint64_t{2}, fetched}) {
      TempStore store;
      Config more = with_room_for(in_hbm, store);
      *more.host_bytes += in_host * kBlockBytes;
      EXPECT_EQ(planned_read(more), (fetched - in_host) * kBlockBytes);
      Passes run(more);
      run.passes(2);
      const std::uint64_t read = run.passes(10).nvme_read_bytes, in_flight = 2 * kBlockBytes;
      EXPECT_LE(read, 10 * (fetched - in_host) * kBlockBytes + (in_host == fetched ? 0 : in_flight));
    }
  }
}

// Same bits whatever stays, and what is trained is never stale.
TEST(EngineFrozen, TrainingTheRestGivesTheSameBits) {
  ModelDescription model = testing::toy_model(6, 3000, 2);
  for (const std::uint32_t b : {1u, 2u, 4u}) {
    for (Parameter& parameter : model.blocks[b].parameters) parameter.trainable = false;
  }
  const auto train = [&](Placement placement, std::uint64_t more) {
    TempStore store;
    Config config = testing::toy_config(placement, placement, DType::kBFloat16, store.path());
    if (placement == Placement::kNvme) {
      const Plan usual = make_plan(config, model);
      config.hbm_bytes = usual.ledger.total(Placement::kHbm) + more * usual.hbm.places.back().bytes;
      const auto stay = blocks_that_stay(make_plan(config, model));
      EXPECT_EQ(std::ranges::count(stay, 1), std::min<std::uint64_t>(more, 3));
    }
    auto engine = Engine::create(config, model);
    engine->import_weights(testing::toy_weights());
    testing::ToyTrainer trainer{*engine, model, config.weights, 2};
    for (int step = 0; step < 4; ++step) {
      for (std::uint32_t b = 0; b < 4; ++b) engine->acquire(b, Pass::kForward, engine->stream());  // and an evaluation
      trainer.run_step();
    }
    return testing::exported(*engine);
  };
  const auto bits = train(Placement::kHbm, 0);
  for (const std::uint64_t more : {0u, 1u, 2u, 3u, 5u}) EXPECT_EQ(train(Placement::kNvme, more), bits) << more;
}

// Every pattern of 16 bits, those of NaN too, as the upper half of a float; in fp32 the lower half has them as well.
void every_pattern(std::uint64_t first, std::span<float> out, DType type) {
  for (std::uint64_t i = 0; i < out.size(); ++i) {
    const auto bits = static_cast<std::uint32_t>(first + i) & 0xffffu;
    out[i] = std::bit_cast<float>(bits << 16 | (type == DType::kFloat32 ? bits : 0));
  }
}

void expect_every_pattern(Engine& engine, DType type) {
  const Lease lease = engine.acquire(0, Pass::kForward, engine.stream());
  engine.stream().synchronize();
  const std::uint64_t size = size_of(type);
  std::vector<std::byte> wanted(kElements * size);
  for (std::uint64_t i = 0; i < kElements; ++i) {
    const auto half = static_cast<std::uint16_t>(i);
    for (std::uint64_t at = 0; at < size; at += 2) std::memcpy(wanted.data() + i * size + at, &half, 2);
  }
  EXPECT_EQ(std::memcmp(lease.weight(1), wanted.data(), wanted.size()), 0) << name_of(type);
}

TEST(EngineFrozen, BytesPassAsTheyAre) {
  for (const DType type : kDTypes) {
    TempStore store, other, place;
    ModelDescription model = testing::toy_model(1, 500, 1);
    model.blocks[0].parameters.push_back({.name = "packed", .shape = {kElements}, .trainable = false, .bytes = true});
    const std::uint32_t packed = static_cast<std::uint32_t>(model.blocks[0].parameters.size()) - 1;
    std::swap(model.blocks[0].parameters[1], model.blocks[0].parameters[packed]);
    const WeightSource source = [&](std::uint32_t block, std::uint32_t p, std::uint64_t first, std::span<float> out) {
      if (block == 0 && p == 1) return every_pattern(first, out, type);
      testing::toy_weights()(block, p, first, out);
    };
    const auto config = [&](const TempStore& at) {
      return testing::toy_config(Placement::kNvme, Placement::kNvme, type, at.path());
    };
    const auto snapshot = place.path() / "snapshot";
    {
      auto engine = Engine::create(config(store), model);
      engine->import_weights(source);
      expect_every_pattern(*engine, type);
      engine->begin_save(snapshot, {});
      engine->finish_save();
      EXPECT_THAT([&] { export_model(*engine, model, place.path() / "out", {}); },
                  ::testing::ThrowsMessage<Error>(HasSubstr("packed: is kept as bytes of the program's own")));
    }
    expect_every_pattern(*Engine::create(config(store), model, {.on_existing = OnExisting::kResume}), type);
    expect_every_pattern(*Engine::create(config(other), model, {.snapshot = snapshot}), type);
    EXPECT_THAT([&] { export_store({store.path()}, place.path() / "out", {}); },
                ::testing::ThrowsMessage<Error>(HasSubstr("packed: is kept as bytes of the program's own")));
    EXPECT_THAT([&] { export_snapshot(snapshot, place.path() / "out", {}); },
                ::testing::ThrowsMessage<Error>(HasSubstr("packed: is kept as bytes of the program's own")));
    model.blocks[0].parameters[1].bytes = false;
    EXPECT_THAT([&] { Engine::create(config(store), model, {.on_existing = OnExisting::kResume}); },
                ::testing::ThrowsMessage<Error>(HasSubstr("packed [131072] bytes (here: packed [131072] frozen)")));
    TempStore third;
    EXPECT_THAT([&] { Engine::create(config(third), model, {.snapshot = snapshot}); },
                ::testing::ThrowsMessage<Error>(HasSubstr("parameter packed was bytes there, here it is numbers")));
  }
}

TEST(EngineFrozen, OnlyWhatTrainsIsToldOfAnOptimizerThatAFileLeftOut) {
  const testing::CapturedLog log;
  for (const bool trained : {false, true}) {
    ModelDescription model = testing::toy_model(1, 500, 1);
    for (Block& block : model.blocks)
      for (Parameter& parameter : block.parameters) parameter.trainable = trained;
    Config config = config_from_json("{\"train_batch_size\": 1}", "c.json");
    Engine::create(config, model);
    EXPECT_EQ(log.count("optimizer: there is no such section: AdamW with lr 0.001; the Hugging Face trainer"), trained)
        << log.all();
  }
}

}  // namespace
}  // namespace spillway
