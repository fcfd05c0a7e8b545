// What happens to a run whose drive fails, whose bytes rot or whose process dies: a clear error, nothing more from that
// engine, and from the last commit on the same bits as if nothing had happened.
#include <gtest/gtest.h>

#include <csignal>
#include <cstdlib>
#include <fstream>
#include <thread>

#include "spillway/error.h"
#include "spillway/store.h"
#include "src/plan/plan.h"
#include "swap/tile_store.h"
#include "tests/aio/temp_files.h"
#include "tests/error_of.h"
#include "tests/src/named_budget.h"
#include "tests/src/toy_trainer.h"

namespace spillway {
namespace {

using testing::error_of;
using testing::TempStore;
using testing::toy_config;
using testing::ToyTrainer;

constexpr std::uint32_t kBlocks = 4, kMicroBatches = 2;
constexpr std::uint64_t kWidth = 2000;
constexpr DType kType = DType::kBFloat16;

const ModelDescription& model() {
  static const ModelDescription description = testing::toy_model(kBlocks, kWidth, kMicroBatches);
  return description;
}

struct Training {
  Training(const Config& config, OnExisting on_existing)
      : engine(Engine::create(config, model(), {.on_existing = on_existing})),
        trainer{*engine, model(), kType, kMicroBatches} {
    if (on_existing != OnExisting::kResume) engine->import_weights(testing::toy_weights());
  }
  void run(int steps) {
    for (int s = 0; s < steps; ++s) trainer.run_step();
  }
  std::unique_ptr<Engine> engine;
  ToyTrainer trainer;
};

struct GivenUp {};

std::vector<std::uint32_t> uninterrupted(int steps) {
  Training training(toy_config(Placement::kHbm, Placement::kHbm, kType, ""), OnExisting::kRefuse);
  training.run(steps);
  return testing::exported(*training.engine);
}

class Recovery : public ::testing::Test {
 protected:
  std::filesystem::path store_file() const { return store_.path() / kStoreFileName; }

  // Where the committed bytes of a tile's part lie; no engine may have the store open.
  Extent committed(std::uint32_t tile, Part part) const {
    const auto store = TileStore::open(store_.path(), store_shape(make_plan(config_, model())));
    return store->readable(tile).extent[index_of(part)];
  }
  // Doing it twice undoes it.
  void flip_bit(std::uint64_t offset) const {
    std::fstream file(store_file(), std::ios::in | std::ios::out | std::ios::binary);
    file.seekg(static_cast<std::streamoff>(offset));
    const int old = file.get();
    file.seekp(static_cast<std::streamoff>(offset));
    file.put(static_cast<char>(old ^ 4));
  }
  static void expect_stopped(Engine& engine) {
    const void* data = engine.workspace().data();
    const std::function<void()> calls[] = {[&] { engine.acquire(0, Pass::kForward, engine.stream()); },
                                           [&] {
                                             engine.push_gradient({0, 0, data, DType::kFloat32}, engine.stream());
                                           },
                                           [&] { engine.step(); }, [&] { engine.flush(); },
                                           [&] { testing::exported(engine); }};
    for (const auto& call : calls) {
      const Error error = error_of(call);
      EXPECT_EQ(error.code(), Code::kIo);
      EXPECT_NE(std::string(error.what()).find("stopped after an earlier error"), std::string::npos) << error.what();
      EXPECT_EQ(error.parts().remedy, Remedy::kReopen);
      EXPECT_EQ(error.parts().happened.find("on_existing"), std::string::npos) << "in words of one client";
    }
  }
  // From the last commit to step 6.
  void expect_same_bits_from(std::uint64_t step, const Config& config) const {
    Training training(config, OnExisting::kResume);
    ASSERT_EQ(training.engine->current_step(), step);
    training.run(6 - static_cast<int>(step));
    EXPECT_EQ(testing::exported(*training.engine), uninterrupted(6));
  }

  TempStore store_;
  Config config_ = toy_config(Placement::kNvme, Placement::kNvme, kType, store_.path());
};

// Tiles before it would have been updated by then, in the slots of the step to go back to.
TEST_F(Recovery, AFlippedBitIsFoundBeforeTheStepBeforeIsOverwritten) {
  const Plan plan = make_plan(config_, model());
  const std::uint32_t tile = plan.blocks[2].first_tile + 1;
  for (const Part part : {Part::kWeights, Part::kStates}) {
    Training(config_, OnExisting::kReplace).run(3);
    const Extent extent = committed(tile, part);
    flip_bit(extent.offset + extent.bytes - 1);                  // the padding belongs to it as well
    { Training(config_, OnExisting::kResume).engine->flush(); }  // no step: nothing is read for one
    const Error error = error_of([&] { Training(config_, OnExisting::kResume).run(1); });
    EXPECT_EQ(error.code(), Code::kCorrupt);
    EXPECT_EQ(error.parts().object, store_file().string());
    EXPECT_EQ(error.parts().happened, std::string(part == Part::kStates ? "states" : "weights") +
                                          " of tile 1 of block h.2 (h.2.weight …) at offset " +
                                          std::to_string(extent.offset) + " do not match their checksum");
    EXPECT_NE(error.parts().hint.find("spillway store " + store_.path().string() + " --rollback goes back to step 2"),
              std::string::npos)
        << error.what();
    EXPECT_EQ(TileStore::roll_back(store_.path(), store_shape(plan), {}), 2u);
    expect_same_bits_from(2, config_);
  }
}

// What it reads besides, other steps read for the update of the step before; blocks that are updated inside backward
// are read once more. The tiles that are read ahead at the end of a step count in it or in the next: so one step may
// have up to all buffers more than it uses, and another as many fewer.
TEST_F(Recovery, TheFirstStepOfAResumedRunReadsNoMoreThanAnyOtherWithClipping) {
  for (const double clipping : {0.5, 0.0}) {
    config_.gradient_clipping = clipping;
    std::vector<std::uint32_t> wanted;
    {
      Training undisturbed(config_, OnExisting::kReplace);
      undisturbed.run(6);
      wanted = testing::exported(*undisturbed.engine);
    }
    Training(config_, OnExisting::kReplace).run(3);
    Training training(config_, OnExisting::kResume);
    const StepReport first = training.trainer.run_step();
    const Plan plan = make_plan(config_, model());
    const std::uint64_t ahead = 2 * plan.host.buffers_count * plan.host.buffer_bytes;
    for (int step = 0; step < 2; ++step) {
      const StepReport other = training.trainer.run_step();
      EXPECT_GT(first.nvme_read_bytes, 0u);
      EXPECT_LE(first.nvme_read_bytes, (clipping > 0 ? 1 : 2) * other.nvme_read_bytes + ahead);
      EXPECT_LE(first.nvme_write_bytes, other.nvme_write_bytes);
    }
    EXPECT_EQ(testing::exported(*training.engine), wanted);
  }
}

TEST_F(Recovery, WhatIsSavedOrExportedBeforeTheFirstStepOfAResumedRunIsVerifiedOnce) {
  const auto wanted = uninterrupted(3);
  for (const int visits : {0, 2}) {
    Training(config_, OnExisting::kReplace).run(3);
    const TempStore directory;
    const std::filesystem::path snapshot = directory.path() / "snapshot";
    Training training(config_, OnExisting::kResume);
    for (int v = 0; v < visits; ++v) {
      const auto block = static_cast<std::uint32_t>(v);
      training.engine->acquire(block, Pass::kForward, training.engine->stream());
    }
    EXPECT_EQ(testing::exported(*training.engine), wanted);
    training.engine->begin_save(snapshot, {});
    training.engine->finish_save();
    training.engine->discard_step();
    training.run(3);
    EXPECT_EQ(testing::exported(*training.engine), uninterrupted(6));
  }
}

TEST_F(Recovery, AFlippedBitInStatesIsNamedBeforeItIsUsed) {
  Training(config_, OnExisting::kRefuse).run(4);
  const Plan plan = make_plan(config_, model());
  const std::uint32_t tile = plan.blocks[2].first_tile + 1;
  const Extent states = committed(tile, Part::kStates);
  Training(config_, OnExisting::kReplace).run(3);
  {
    Training training(config_, OnExisting::kResume);
    training.run(1);
    training.engine->flush();
    flip_bit(states.offset + 1234);
    const Error error = error_of([&] {
      training.run(1);
      training.engine->flush();  // the update is made then, or in the next step
    });
    EXPECT_EQ(error.code(), Code::kCorrupt);
    EXPECT_EQ(error.parts().object, store_file().string());
    EXPECT_EQ(error.parts().happened, "states of tile 1 of block h.2 (h.2.weight …) at offset " +
                                          std::to_string(states.offset) + " do not match their checksum");
    // Found when tiles before it were updated, in the slots of step 3.
    EXPECT_NE(error.parts().hint.find("part of step 4, the last committed one, and no other is left"),
              std::string::npos)
        << error.what();
    expect_stopped(*training.engine);
  }
  flip_bit(states.offset + 1234);
  expect_same_bits_from(4, config_);
}

// There is one step, so that nothing is verified ahead of its use.
TEST_F(Recovery, AFlippedBitInWeightsIsFoundBeforeALeaseOpens) {
  { Training(config_, OnExisting::kRefuse).engine->flush(); }
  const std::uint32_t tile = make_plan(config_, model()).blocks[3].first_tile;
  const Extent weights = committed(tile, Part::kWeights);
  for (std::uint64_t at : {weights.offset, weights.offset + weights.bytes - 1}) {  // the padding belongs to it as well
    flip_bit(at);
    {
      Training training(config_, OnExisting::kResume);
      for (std::uint32_t b = 0; b < 3; ++b) training.engine->acquire(b, Pass::kForward, training.engine->stream());
      const Error error = error_of([&] { training.engine->acquire(3, Pass::kForward, training.engine->stream()); });
      EXPECT_EQ(error.code(), Code::kCorrupt);
      EXPECT_EQ(error.parts().happened, "weights of tile 0 of block h.3 (h.3.weight) at offset " +
                                            std::to_string(weights.offset) + " do not match their checksum");
      EXPECT_NE(error.parts().hint.find("part of step 0, the last committed one, and no other is left"),
                std::string::npos)
          << error.what();
      expect_stopped(*training.engine);
    }
    flip_bit(at);
  }
  expect_same_bits_from(0, config_);
}

// The file shrinks under the engine: reads come up short, in the middle of step 4.
TEST_F(Recovery, AReadThatFailsInTheMiddleOfAStepStopsTheRunAtTheLastCommit) {
  for (IoEngineKind io : {IoEngineKind::kAuto, IoEngineKind::kThreads}) {
    config_.io_engine = io;
    const std::filesystem::path copy = store_.path() / "copy";
    {
      Training training(config_, OnExisting::kReplace);
      training.run(3);
      training.engine->flush();
      std::filesystem::copy_file(store_file(), copy, std::filesystem::copy_options::overwrite_existing);
      int visits = 0;
      training.trainer.between = [&] {
        if (++visits == 4) std::filesystem::resize_file(store_file(), 1 << 20);
      };
      const Error error = error_of([&] { training.run(1); });
      EXPECT_EQ(error.code(), Code::kIo);
      EXPECT_EQ(error.parts().object, store_file().string());
      EXPECT_NE(error.parts().happened.find("at offset"), std::string::npos) << error.what();
      expect_stopped(*training.engine);
    }
    std::filesystem::rename(copy, store_file());
    expect_same_bits_from(3, config_);
  }
}

// What nobody finds any more survives nothing; what is in memory is not lost with it.
TEST_F(Recovery, AStoreThatIsRemovedMovedOrCutShortIsSaidAndTheModelIsStillThere) {
  config_.host_bytes = 64 * kMiB;  // all tiles are cached: nothing is read
  const auto wanted = uninterrupted(7);
  const std::filesystem::path elsewhere = store_.path() / "elsewhere";
  const std::pair<const char*, std::function<void()>> losses[] = {
      {"removed", [&] { std::filesystem::remove(store_file()); }},
      {"moved", [&] { std::filesystem::rename(store_file(), elsewhere); }},
      {"replaced",
       [&] { std::ofstream(elsewhere) << "not a store", std::filesystem::rename(elsewhere, store_file()); }},
      {"emptied", [&] { std::filesystem::resize_file(store_file(), 0); }},
      {"overwritten", [&] { std::ofstream(store_file()) << "not a store"; }},
      {"cut short", [&] { std::filesystem::resize_file(store_file(), 3 * kExtentAlignment); }}};
  for (const auto& [name, lose] : losses) {
    SCOPED_TRACE(name);
    Training training(config_, OnExisting::kReplace);
    training.run(2);
    training.engine->flush();
    testing::CapturedLog log;
    lose();
    EXPECT_EQ(error_of([&] { training.engine->flush(); }).code(), Code::kNotFound);  // with nothing more to write
    training.run(3);
    EXPECT_EQ(training.trainer.run_step().durable_step, 0u);
    EXPECT_EQ(training.trainer.run_step().durable_step, 0u);
    EXPECT_EQ(log.count("was removed, moved or cut short while its run goes on, so no step is kept"), 1u) << log.all();
    const Error error = error_of([&] { training.engine->flush(); });
    EXPECT_EQ(error.code(), Code::kNotFound);
    EXPECT_EQ(error.parts().object, store_file().string());
    EXPECT_EQ(testing::exported(*training.engine), wanted);
  }
}

TEST_F(Recovery, AStoreThatIsCutShortUnderARunIsNotSaidToGoOn) {
  Training training(config_, OnExisting::kReplace);
  training.run(2);
  std::filesystem::resize_file(store_file(), 12 * kExtentAlignment);
  const std::string said = error_of([&] { training.run(3); }).what();
  EXPECT_EQ(said.find("resume"), std::string::npos) << said;
  EXPECT_NE(said.find("start over with on_existing replace"), std::string::npos) << said;
}

TEST_F(Recovery, AStoreThatIsMovedBackHasAllSteps) {
  {
    Training training(config_, OnExisting::kRefuse);
    training.run(2);
    std::filesystem::rename(store_file(), store_.path() / "elsewhere");
    training.run(2);
    EXPECT_EQ(error_of([&] { training.engine->flush(); }).code(), Code::kNotFound);
    std::filesystem::rename(store_.path() / "elsewhere", store_file());
    EXPECT_NO_THROW(training.engine->flush());
  }
  expect_same_bits_from(4, config_);
}

TEST_F(Recovery, AStoreOfARelativePathStaysWhereTheRunBegan) {
  const std::filesystem::path before = std::filesystem::current_path();
  std::filesystem::current_path(store_.path().parent_path());
  config_.nvme_paths = {store_.path().filename()};
  {
    Training training(config_, OnExisting::kRefuse);
    std::filesystem::current_path(before);
    training.run(3);
    EXPECT_NO_THROW(training.engine->flush());
  }
  config_.nvme_paths = {store_.path()};
  expect_same_bits_from(3, config_);
}

TEST_F(Recovery, AFlushInsideAStepTakesNothingOfItIntoARemovedStore) {
  config_.gradient_clipping = 0;  // blocks are updated in backward
  Training training(config_, OnExisting::kRefuse);
  training.run(1);
  const auto after_one = testing::exported(*training.engine);
  std::filesystem::remove(store_file());
  EXPECT_EQ(error_of([&] { training.engine->flush(); }).code(), Code::kNotFound);
  std::uint32_t visits = 0;
  training.trainer.between = [&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));  // for what is updated early
    if (++visits < 2 * kBlocks + 4) return;                      // after the last push
    EXPECT_EQ(error_of([&] { training.engine->flush(); }).code(), Code::kNotFound);
    throw GivenUp();
  };
  EXPECT_THROW(training.trainer.run_step(), GivenUp);
  training.engine->discard_step();
  EXPECT_EQ(testing::exported(*training.engine), after_one);
}

// The run has what the store says of its model, and brings it back.
TEST_F(Recovery, ADamagedDescriptionIsWrittenAnewByTheRunThatGoesOn) {
  Training(config_, OnExisting::kRefuse).run(3);
  flip_bit(kExtentAlignment + 5);
  const Error error = error_of([&] { inspect_store({store_.path()}); });
  EXPECT_EQ(error.code(), Code::kCorrupt);
  EXPECT_NE(error.parts().hint.find("a run with on_existing resume"), std::string::npos) << error.what();
  testing::CapturedLog log;
  expect_same_bits_from(3, config_);
  EXPECT_EQ(log.count("the model description was damaged; it is whole again"), 1u) << log.all();
  EXPECT_EQ(inspect_store({store_.path()}).model.blocks.size(), model().blocks.size());

  flip_bit(kExtentAlignment + 5);
  ModelDescription other = model();
  other.attachments = {{"config.json", "of another model"}};  // whose description is longer
  Engine::create(config_, other, {.on_existing = OnExisting::kResume});
  EXPECT_EQ(log.count("cannot be read; the store cannot be exported"), 1u) << log.all();
}

TEST_F(Recovery, AnAttachmentThatIsAnotherOneIsNamed) {
  ModelDescription described = model();
  for (const char* text : {"of one model", "of another"}) {
    described.attachments = {{"config.json", text}};
    Engine::create(config_, described, {.on_existing = OnExisting::kReplace})->import_weights(testing::toy_weights());
  }
  described.attachments = {{"config.json", "of one model"}};
  const testing::CapturedLog log;
  Engine::create(config_, described, {.on_existing = OnExisting::kResume});
  EXPECT_EQ(log.count("made with another config.json; that is what an export of the store will have"), 1u) << log.all();
}

TEST_F(Recovery, AStoreInUseIsBusyForEveryOtherEngine) {
  Training holder(config_, OnExisting::kRefuse);
  EXPECT_EQ(error_of([&] { Engine::create(config_, model()); }).code(), Code::kBusy);
  // Each waits for some seconds, in case the holder has just died: so both at once.
  std::thread replacing([&] {
    const Error error = error_of([&] { Engine::create(config_, model(), {.on_existing = OnExisting::kReplace}); });
    EXPECT_EQ(error.code(), Code::kBusy) << error.what();
  });
  const Error error = error_of([&] { Engine::create(config_, model(), {.on_existing = OnExisting::kResume}); });
  EXPECT_EQ(error.code(), Code::kBusy) << error.what();
  replacing.join();
  holder.run(2);
  EXPECT_EQ(testing::exported(*holder.engine), uninterrupted(2));
}

TEST_F(Recovery, AnEngineThatGoesWithoutFlushKeepsItsLastFinishedStep) {
  config_.commit_every = 3;
  Training(config_, OnExisting::kRefuse).run(2);
  expect_same_bits_from(2, config_);
  {
    Training training(config_, OnExisting::kReplace);
    training.run(5);
    std::uint32_t visits = 0;
    training.trainer.between = [&] {
      if (++visits > kBlocks + 3) throw GivenUp();  // some gradients have been pushed
    };
    EXPECT_THROW(training.trainer.run_step(), GivenUp);
  }
  expect_same_bits_from(5, config_);
}

TEST_F(Recovery, TilesInMemoryAreCommittedByTheEnginesEnd) {
  config_ = toy_config(Placement::kHost, Placement::kHost, kType, "");
  config_.nvme_paths = {store_.path()};
  config_.commit_every = 100;
  Training(config_, OnExisting::kRefuse).run(4);
  expect_same_bits_from(4, config_);
}

TEST_F(Recovery, AnEngineThatIsToCommitNothingDoesNotAtItsEndEither) {
  config_.commit_every = 0;
  Training(config_, OnExisting::kRefuse).run(2);
  EXPECT_EQ(error_of([&] { Training(config_, OnExisting::kResume); }).code(), Code::kUnsupported);
}

TEST_F(Recovery, AFlippedBitInASpilledGradientIsNamedAndNeverUsed) {
  const ModelDescription large = testing::toy_model(2, 300'000, 1);  // more than the memory that spilling takes
  config_.tile_elements = 1 << 16;
  config_.host_bytes = 1;
  config_.host_bytes = testing::named_bytes(error_of([&] { make_plan(config_, large); }));
  const Plan plan = make_plan(config_, large);
  const std::uint32_t tile = static_cast<std::uint32_t>(plan.tiles.size()) - 1;
  ASSERT_GT(plan.tiles[tile].gradient.bytes, 0u);
  {
    auto engine = Engine::create(config_, large);
    engine->import_weights(testing::toy_weights());
    ToyTrainer trainer{*engine, large, kType, 1};
    trainer.run_step();  // the last tile is updated, and its gradient read, in the next forward pass
    const std::uint64_t at = space_bytes(store_shape(plan)) - plan.scratch_bytes + plan.tiles[tile].gradient.offset;
    flip_bit(at + 321);
    const Error error = error_of([&] { trainer.run_step(); });
    EXPECT_EQ(error.code(), Code::kCorrupt);
    EXPECT_EQ(error.parts().happened, "gradients of " + tile_name(plan, large, tile) + " at offset " +
                                          std::to_string(at) + " do not match their checksum");
    EXPECT_NE(error.parts().hint.find("step 0, the last committed one, is not affected"), std::string::npos)
        << error.what();
    expect_stopped(*engine);
  }
  EXPECT_EQ(Engine::create(config_, large, {.on_existing = OnExisting::kResume})->current_step(), 0u);
}

// The same with a process that dies: in a child, which starts this test anew and takes its directory from the parent.
TEST_F(Recovery, AKilledProcessIsBackAtItsLastCommit) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  if (const char* parent = std::getenv("SPILLWAY_CRASH_STORE")) config_.nvme_paths = {parent};
  ::setenv("SPILLWAY_CRASH_STORE", config_.nvme_paths.front().c_str(), 1);
  for (const bool resident : {false, true}) {
    // Tiles in memory reach the drive at a commit only.
    Config config = config_;
    if (resident) config.states = Placement::kHost;
    config.commit_every = 3;
    EXPECT_EXIT(
        {
          Training training(config, OnExisting::kReplace);
          training.run(4);
          training.trainer.between = [visits = 0]() mutable {
            if (++visits == 8) ::raise(SIGKILL);  // in backward of step 5
          };
          training.run(1);
        },
        ::testing::KilledBySignal(SIGKILL), "");
    expect_same_bits_from(3, config);
  }
  ::unsetenv("SPILLWAY_CRASH_STORE");
}

// Budgets belong to a run, not to its store. Whatever they leave in memory, the bits are the same, and the store keeps
// the size that it was created with.
TEST_F(Recovery, AStoreGoesOnUnderOtherBudgetsWithTheSameBits) {
  config_.host_bytes = 1;
  config_.host_bytes = testing::named_bytes(error_of([&] { make_plan(config_, model()); }));
  Training(config_, OnExisting::kRefuse).run(1);
  const auto size = std::filesystem::file_size(store_file());
  const std::uint64_t least = *config_.host_bytes;
  const std::uint64_t more[] = {least + (1 << 20), least + (40 << 20), least + (48 << 20), least + (200 << 20)};
  std::uint64_t step = 1;
  for (std::uint64_t host : more) {
    config_.host_bytes = host;
    Training training(config_, OnExisting::kResume);
    EXPECT_EQ(training.engine->current_step(), step);
    training.run(1);
    training.engine->flush();
    ++step;
    EXPECT_EQ(testing::exported(*training.engine), uninterrupted(static_cast<int>(step)));
    EXPECT_EQ(std::filesystem::file_size(store_file()), size) << "with host_bytes " << host;
  }
  for (const TilePlace& tile : make_plan(config_, model()).tile_places) {
    EXPECT_TRUE(tile.home[0] == Placement::kHost && tile.home[1] == Placement::kHost)
        << "the last run kept every tile in memory";
  }
}

}  // namespace
}  // namespace spillway
