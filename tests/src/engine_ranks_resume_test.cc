// A run goes on with another number of ranks: new stores are made from the old ones, with the same bits.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <mutex>
#include <string>
#include <vector>

#include "spillway/error.h"
#include "spillway/log.h"
#include "spillway/store.h"
#include "swap/store_files.h"
#include "tests/error_of.h"
#include "tests/src/comm/forwarding.h"
#include "tests/src/ranks_run.h"

namespace spillway::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr std::uint64_t kBefore = 2, kSteps = 4;

std::vector<std::string> names_below(const std::filesystem::path& root) {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(root))
    names.push_back(entry.path().lexically_relative(root).string());
  std::ranges::sort(names);
  return names;
}

std::vector<std::string> stores_of(std::uint32_t ranks) {
  if (ranks == 1) return {kStoreFileName};
  std::vector<std::string> names;
  for (std::uint32_t rank = 0; rank < ranks; ++rank) {
    names.push_back(fmt::format("rank{}", rank));
    names.push_back(fmt::format("rank{}/{}", rank, kStoreFileName));
  }
  return names;
}

// So many ranks before and after: the step, its bits, and those of the steps that follow. Three ranks have no sums in
// common with others, so what they go on from is compared with a snapshot of the same step.
void expect_to_go_on(std::uint32_t before, std::uint32_t after, RanksCase of) {
  SCOPED_TRACE(fmt::format("from {} to {}", before, after));
  const bool three = before == 3 || after == 3;
  of.sum_groups = three ? 1 : 4;
  of.micro_batches = three ? 12 : 4;
  const TempStore store, other;
  std::vector<std::uint32_t> last, wanted;
  train_on(before, of, store.path(), OnExisting::kRefuse, kBefore, [&](RankRun& run) {
    if (run.config.parameters == Placement::kHbm || run.config.states != Placement::kNvme) run.engine->flush();
    const auto bits = exported(*run.engine);
    run.engine->begin_save(other / "snapshot", {});
    run.engine->finish_save();
    if (run.rank == 0) last = bits;
  });
  RanksCase with_snapshot = of;
  train_on(after, with_snapshot, other / "again", OnExisting::kRefuse, 0, [&](RankRun& run) {
    run.engine->load_snapshot(other / "snapshot");
    run.until(kSteps);
    const auto bits = exported(*run.engine);
    if (run.rank == 0) wanted = bits;
  });
  train_on(after, of, store.path(), OnExisting::kResume, kBefore, [&](RankRun& run) {
    EXPECT_EQ(run.engine->current_step(), kBefore);
    EXPECT_TRUE(exported(*run.engine) == last) << "the step that was gone on from";
    run.until(kSteps);
    EXPECT_TRUE(exported(*run.engine) == wanted) << "the steps after it";
  });
  if (of.paths == 0) {
    EXPECT_EQ(names_below(store.path()), stores_of(after));
  }
  // It is a run like any other.
  train_on(after, of, store.path(), OnExisting::kResume, 0, [&](RankRun& run) {
    EXPECT_EQ(run.engine->current_step(), kSteps);
    EXPECT_TRUE(exported(*run.engine) == wanted);
  });
}

class RanksResume : public ::testing::TestWithParam<std::tuple<std::uint32_t, std::uint32_t>> {};
INSTANTIATE_TEST_SUITE_P(, RanksResume,
                         ::testing::Combine(::testing::Values(1u, 2u, 3u, 4u), ::testing::Values(1u, 2u, 3u, 4u)),
                         [](const auto& info) {
                           return fmt::format("{}To{}", std::get<0>(info.param), std::get<1>(info.param));
                         });

TEST_P(RanksResume, GoesOnWithTheSameBits) {
  const auto [before, after] = GetParam();
  expect_to_go_on(before, after, {.layout = layout_case("nvme")});
}

// Every third of them where few steps are asked for (SPILLWAY_STEPS, which tools/test.sh sets).
TEST(RanksResumeForms, GoOnInEveryLayout) {
  const std::pair<std::uint32_t, std::uint32_t> pairs[] = {{1, 2}, {4, 2}, {2, 4}, {2, 1}, {3, 4}};
  std::size_t next = 0;
  for (const LayoutCase& layout : layout_cases()) {
    SCOPED_TRACE(layout.name);
    const std::size_t number = next++;
    if (number % 3 != 0 && std::getenv("SPILLWAY_STEPS") != nullptr) continue;
    const auto [before, after] = pairs[number % std::size(pairs)];
    expect_to_go_on(before, after, {.layout = layout, .paths = 1});
  }
}

// A group of elements that share a scale is never cut, and what is rounded at random is so by its place in the model.
TEST(RanksResumeForms, GoOnWithEveryFormOfNumbers) {
  const std::pair<std::uint32_t, std::uint32_t> pairs[] = {{1, 4}, {4, 1}, {2, 3}, {4, 2}};
  std::size_t next = 0;
  for (const MomentFormat moments : kReducedFormats) {
    for (const DType type : {DType::kBFloat16, DType::kFloat16, DType::kFloat32}) {
      const auto [before, after] = pairs[next++ % std::size(pairs)];
      SCOPED_TRACE(fmt::format("{} {}", name_of(type), name_of(moments)));
      expect_to_go_on(before, after, {.layout = layout_case("nvme"), .type = type, .change = [&](Config& config) {
                                        config.moments = moments;
                                      }});
    }
  }
}

TEST(RanksResumeForms, GoOnInEveryStage) {
  const std::pair<std::uint32_t, std::uint32_t> pairs[] = {{2, 4}, {4, 2}, {1, 2}, {2, 1}};
  std::size_t next = 0;
  for (const char* name : {"hbm", "weights in hbm, states in host", "weights in hbm, states on nvme"}) {
    for (const std::uint32_t stage : {1u, 2u}) {
      SCOPED_TRACE(fmt::format("{}, stage {}", name, stage));
      const auto [before, after] = pairs[next++ % std::size(pairs)];
      expect_to_go_on(
          before, after,
          {.layout = layout_case(name), .change = [&](Config& config) { config.stage = stage; }, .paths = 1});
    }
  }
}

TEST(RanksResumeForms, GoOnWithFrozenParametersAndSeveralDrives) {
  RanksCase of{.layout = layout_case("nvme"), .paths = 2};
  of.describe = [](ModelDescription& model) {
    for (Parameter& parameter : model.blocks[2].parameters) parameter.trainable = false;
    model.blocks[3].parameters[1].trainable = false;
  };
  for (const auto& [before, after] : {std::pair(1u, 3u), std::pair(4u, 2u), std::pair(2u, 1u)})
    expect_to_go_on(before, after, of);
}

// Blocks of one or two units, of which some ranks own nothing.
TEST(RanksResumeForms, GoOnWhereSomeOwnNothing) {
  LayoutCase layout = layout_case("nvme");
  layout.width = 300;
  for (const auto& [before, after] : {std::pair(1u, 4u), std::pair(4u, 2u), std::pair(2u, 4u), std::pair(4u, 1u)})
    expect_to_go_on(before, after, {.layout = layout});
}

// A number of updates of its own has each parameter.
TEST(RanksResumeForms, GoOnWithWhatWasLeftOut) {
  const RanksCase of{.layout = layout_case("nvme")};
  const TempStore store;
  const auto left_out = [](RankRun& run) {
    run.trainer->brings = [](const ToyPush& push) {
      return push.block == 1 && push.parameter == 0 ? Brings::kNothing : Brings::kGradient;
    };
  };
  std::vector<std::uint32_t> wanted;
  for (const bool changes : {false, true}) {
    const TempStore place;
    train_on(4, of, place.path(), OnExisting::kRefuse, 0, [&](RankRun& run) {
      left_out(run);
      run.until(kBefore);
    });
    train_on(changes ? 2 : 4, of, place.path(), OnExisting::kResume, kSteps, [&](RankRun& run) {
      const auto bits = exported(*run.engine);
      EXPECT_TRUE(!changes || bits == wanted);
      if (!changes && run.rank == 0) wanted = bits;
    });
  }
}

// Skipped steps, and the loss scale that they have led to.
TEST(RanksResumeForms, GoOnWithTheLossScale) {
  const RanksCase of{.layout = layout_case("nvme"), .type = DType::kFloat16};
  std::vector<std::optional<double>> scales;
  for (const std::uint32_t after : {4u, 1u}) {
    const TempStore place;
    train_on(4, of, place.path(), OnExisting::kRefuse, kBefore);
    train_on(after, of, place.path(), OnExisting::kResume, kBefore, [&](RankRun& run) {
      const StepReport report = run.trainer->run_step();
      if (run.rank == 0) scales.push_back(report.loss_scale);
    });
  }
  ASSERT_EQ(scales.size(), 2u);
  EXPECT_TRUE(scales[0].has_value());
  EXPECT_EQ(scales[0], scales[1]);
}

class RanksResumeRefused : public ::testing::TestWithParam<std::tuple<std::uint32_t, std::uint32_t>> {
 protected:
  RanksResumeRefused() { train_on(before(), case_, store_.path(), OnExisting::kRefuse, kBefore); }
  std::uint32_t before() const { return std::get<0>(GetParam()); }
  std::uint32_t after() const { return std::get<1>(GetParam()); }
  std::filesystem::path of_rank(std::uint32_t rank) const { return place_of_rank(store_.path(), rank, before()); }

  // The same on all ranks, with nothing changed.
  Error refused(const RanksCase& of, bool writes = false) {
    const auto was = files_below(store_.path());
    std::vector<std::optional<Error>> errors(after());
    on_ranks(after(), [&](Communicator* communicator) {
      errors[communicator ? communicator->rank() : 0] =
          error_of([&] { RankRun(of, communicator, store_.path(), OnExisting::kResume); });
    });
    for (const auto& error : errors) EXPECT_EQ(std::string(error->what()), std::string(errors[0]->what()));
    EXPECT_TRUE(writes || files_below(store_.path()) == was) << "something was written";
    return *errors[0];
  }
  Error refused() { return refused(case_); }

  RanksCase case_{.layout = layout_case("nvme")};
  TempStore store_;
};
INSTANTIATE_TEST_SUITE_P(, RanksResumeRefused,
                         ::testing::Values(std::tuple(4u, 2u), std::tuple(2u, 4u), std::tuple(4u, 1u)));

TEST_P(RanksResumeRefused, AMissingPartIsNamed) {
  std::filesystem::rename(of_rank(1), store_ / "aside");
  const Error error = refused();
  EXPECT_EQ(error.code(), Code::kNotFound);
  EXPECT_THAT(error.what(), HasSubstr(of_rank(1).string() + ": holds no store: rank 1 of "));
  std::filesystem::rename(store_ / "aside", of_rank(1));
  train_on(after(), case_, store_.path(), OnExisting::kResume, kBefore);
}

TEST_P(RanksResumeRefused, DamageIsNamedAndTheOldRunStays) {
  const std::filesystem::path file = of_rank(1) / kStoreFileName;
  std::vector<BadExtent> bad;
  const std::uint64_t bytes = std::filesystem::file_size(file);
  for (std::uint64_t offset = bytes / 3; bad.empty() && offset < bytes; offset += 40'000) {
    std::fstream stream(file, std::ios::in | std::ios::out | std::ios::binary);
    stream.seekp(static_cast<std::streamoff>(offset));
    stream.put('x');
    stream.close();
    verify_run(find_ranks({store_.path()}), {.on_bad = [&](const BadExtent& extent) { bad.push_back(extent); }});
  }
  ASSERT_FALSE(bad.empty());
  const Error error = refused();
  EXPECT_EQ(error.code(), Code::kCorrupt);
  EXPECT_THAT(error.what(), HasSubstr(fmt::format("{}: {} at offset {} do not match their checksum", file.string(),
                                                  bad[0].name, bad[0].offset)));
}

TEST_P(RanksResumeRefused, AnotherModelOrOtherSettingsAreNamed) {
  RanksCase other = case_;
  other.change = [](Config& config) { config.tile_elements = 8192; };
  EXPECT_THAT(refused(other).what(), HasSubstr("made with tiles of 4096 elements (here: 8192)"));
  other = case_;
  other.describe = [](ModelDescription& model) { model.blocks[2].parameters[1].name = "another"; };
  EXPECT_THAT(refused(other).what(), HasSubstr("made with parameter 1 of block h.2: h.2.bias"));
}

// By one number of ranks alone: it takes as long as a killed process may take to end.
class RanksResumeBusy : public RanksResumeRefused {};
INSTANTIATE_TEST_SUITE_P(, RanksResumeBusy, ::testing::Values(std::tuple(4u, 1u)));

TEST_P(RanksResumeBusy, AStoreThatARunUsesIsNamed) {
  const auto held = StoreFiles::open(std::vector{of_rank(1)}, 1);
  const Error error = refused();
  EXPECT_EQ(error.code(), Code::kBusy);
  EXPECT_THAT(error.what(), HasSubstr(of_rank(1).string()));
}

// Of ranks whose stores do not all take the places of old ones.
class RanksResumePlaces : public RanksResumeRefused {};
INSTANTIATE_TEST_SUITE_P(, RanksResumePlaces, ::testing::Values(std::tuple(2u, 4u), std::tuple(4u, 1u)));

TEST_P(RanksResumePlaces, WhatLiesInANewStoresPlaceStays) {
  const std::uint32_t rank = after() == 4 ? 3 : 0;
  const auto place = place_of_rank(store_.path(), rank, after());
  std::filesystem::create_directories(place);
  std::ofstream(place / kStoreFileName) << "something else";
  const Error error = refused();
  EXPECT_EQ(error.code(), Code::kExists) << error.what();
}

// Several ranks have a place for a tile of another one already.
TEST(RanksResumeTold, NoMemoryBesideThePlanIsNeededWhereTheRanksHaveSome) {
  const RanksCase of{.layout = layout_case("nvme")};
  const TempStore store;
  train_on(4, of, store.path(), OnExisting::kRefuse, 1);
  std::mutex mutex;
  std::vector<std::string> told;
  set_log_sink([&](LogLevel, std::string_view message) {
    const std::lock_guard lock(mutex);
    if (message.find("become those of") != message.npos) told.emplace_back(message);
  });
  train_on(2, of, store.path(), OnExisting::kResume, 1);
  set_log_sink([](LogLevel, std::string_view) {});
  ASSERT_EQ(told.size(), 2u);
  for (const std::string& line : told) EXPECT_THAT(line, ::testing::EndsWith("MiB are free"));
}

// What both take is said before anything is written.
TEST(RanksResumeTold, TheDiskThatBothTake) {
  const RanksCase of{.layout = layout_case("nvme")};
  const TempStore store;
  train_on(2, of, store.path(), OnExisting::kRefuse, 1);
  std::uint64_t bytes = 0;
  for (const auto& [name, text] : files_below(store.path())) bytes += text.size();
  std::mutex mutex;
  std::vector<std::string> told;
  set_log_sink([&](LogLevel, std::string_view message) {
    const std::lock_guard lock(mutex);
    if (message.find("become those of") != message.npos) told.emplace_back(message);
  });
  train_on(1, of, store.path(), OnExisting::kResume, 1);
  set_log_sink([](LogLevel, std::string_view) {});
  ASSERT_EQ(told.size(), 1u);
  bytes += std::filesystem::file_size(store.path() / kStoreFileName);
  EXPECT_THAT(told[0], HasSubstr(fmt::format("{}: the stores of 2 ranks, at step 1, become those of 1 rank: together "
                                             "they take {} MiB of disk",
                                             store.path().string(), div_up(bytes, kMiB))));
  EXPECT_THAT(told[0], HasSubstr(" KiB of memory beside host_bytes read them"));
}

// The old store goes once every byte of the new run was read, by the first rank alone.
TEST(RanksResumeTold, WhoReadsAllOfARunThatHasJustBegunSaysThatItIsAtWork) {
  const RanksCase of{.layout = layout_case("nvme")};
  const TempStore store, aside;
  train_on(1, of, store.path(), OnExisting::kRefuse, 1);
  std::filesystem::copy(store.path() / kStoreFileName, aside / "old");
  train_on(2, of, store.path(), OnExisting::kResume, 1);
  const auto who_notes = [&] {
    std::array<bool, 2> notes{};
    run_ranks(2, [&](Communicator& communicator) {
      CountingWork counting(communicator);
      const RankRun run(of, &counting, store.path(), OnExisting::kResume);
      notes[run.rank] = counting.noted > 0;
    });
    return notes;
  };
  EXPECT_THAT(who_notes(), ElementsAre(false, false));
  std::filesystem::copy(aside / "old", store.path() / kStoreFileName);
  EXPECT_THAT(who_notes(), ElementsAre(true, false));
  EXPECT_FALSE(std::filesystem::exists(store.path() / kStoreFileName));
}

// A backup of an old store that somebody has put back is nobody's to remove.
TEST(RanksResumeTold, WhatIsPutBackLaterStays) {
  const RanksCase of{.layout = layout_case("nvme")};
  const TempStore store, aside;
  train_on(1, of, store.path(), OnExisting::kRefuse, 1);
  std::filesystem::copy(store.path() / kStoreFileName, aside / "old");
  train_on(2, of, store.path(), OnExisting::kResume, 3);
  std::filesystem::copy(aside / "old", store.path() / kStoreFileName);
  train_on(2, of, store.path(), OnExisting::kResume, 0,
           [](RankRun& run) { EXPECT_EQ(run.engine->current_step(), 3u); });
  EXPECT_TRUE(std::filesystem::exists(store.path() / kStoreFileName));
}

// Which is known from the last one, though the one between is gone.
TEST(RanksResumeTold, ABackupOfTheRunBeforeTheLastStaysAndTheLastGoesOn) {
  const RanksCase of{.layout = layout_case("nvme"), .micro_batches = 12, .sum_groups = 1};
  const TempStore store, aside;
  train_on(1, of, store.path(), OnExisting::kRefuse, 1);
  std::filesystem::copy(store.path() / kStoreFileName, aside / "old");
  train_on(2, of, store.path(), OnExisting::kResume, 2);
  train_on(3, of, store.path(), OnExisting::kResume, 3);
  std::filesystem::copy(aside / "old", store.path() / kStoreFileName);
  EXPECT_EQ(find_ranks({store.path()}).size(), 3u);
  for (const std::uint32_t ranks : {3u, 2u})
    train_on(ranks, of, store.path(), OnExisting::kResume, 0,
             [](RankRun& run) { EXPECT_EQ(run.engine->current_step(), 3u); });
  EXPECT_TRUE(std::filesystem::exists(store.path() / kStoreFileName));
}

// Of which a directory stands for every other reason: tests may run as root, who may remove any file.
TEST(RanksResumeTold, WhatCannotBeRemovedIsNamed) {
  const RanksCase of{.layout = layout_case("nvme")};
  const TempStore store;
  train_on(2, of, store.path(), OnExisting::kRefuse, 1);
  const std::filesystem::path left = store.path() / "rank5" / "spillway.store.new";
  std::filesystem::create_directories(left / "something");
  std::mutex mutex;
  std::vector<std::string> warned;
  set_log_sink([&](LogLevel level, std::string_view message) {
    const std::lock_guard lock(mutex);
    if (level == LogLevel::kWarning) warned.emplace_back(message);
  });
  train_on(2, of, store.path(), OnExisting::kResume, 1);
  set_log_sink([](LogLevel, std::string_view) {});
  EXPECT_THAT(warned, ::testing::Contains(::testing::AllOf(
                          ::testing::StartsWith(left.string() + ": is left of an earlier run and could not be removed"),
                          HasSubstr("remove it by hand"))));
}

}  // namespace
}  // namespace spillway::testing
