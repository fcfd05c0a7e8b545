// Single parameters of a run on several ranks: each rank is shown what one alone would have, what one of them gives is
// trained on to the same bits, and what ranks do not agree on is refused on all of them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fmt/format.h>

#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "spillway/error.h"
#include "tests/error_of.h"
#include "tests/src/ranks_run.h"

namespace spillway::testing {
namespace {

using enum ParameterValues;
using ::testing::Each;
using ::testing::HasSubstr;

constexpr std::uint64_t kWritten = 2, kSteps = 4;

// A step's sums are the same on any number of ranks: all but the first micro-batch bring zeros.
RanksCase any_number(const LayoutCase& layout) { return {.layout = layout, .micro_batches = 12, .sum_groups = 1}; }

void bring_one(RankRun& run) {
  run.trainer->brings = [](const ToyPush& push) { return push.part / 2 == 0 ? Brings::kGradient : Brings::kZeros; };
}

std::vector<float> read(RankRun& run, ParameterValues of, std::uint32_t block, std::uint32_t parameter) {
  std::vector<float> found;
  run.engine->read_values(of, block, parameter,
                          [&](auto b, auto p, std::uint64_t first, std::span<const float> values) {
                            EXPECT_EQ((std::pair{b, p}), (std::pair{block, parameter}));
                            EXPECT_EQ(first, found.size());
                            found.insert(found.end(), values.begin(), values.end());
                          });
  EXPECT_EQ(found.size(), count_of(run.model.blocks[block].parameters[parameter]));
  return found;
}

std::vector<float> values_for(const RankRun& run, std::uint32_t block, std::uint32_t parameter, float factor) {
  std::vector<float> values(count_of(run.model.blocks[block].parameters[parameter]));
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = factor * std::fabs(mixed(block, parameter, i));
  return values;
}

// The last rank's; the others have nothing to give.
void write(RankRun& run, ParameterValues of, std::uint32_t block, std::uint32_t parameter, float factor) {
  const bool gives = run.rank + 1 == run.ranks;
  run.engine->write_values(of, block, parameter,
                           gives ? values_for(run, block, parameter, factor) : std::vector<float>(), run.ranks - 1);
}

void write_some(RankRun& run) {
  write(run, kMaster, 1, 0, 0.5f);
  write(run, kMaster, 0, 1, 0.25f);
  write(run, kExpAvg, 0, 0, 0.125f);
  write(run, kExpAvgSq, 2, 1, 0.75f);
}

struct Outcome {
  std::vector<std::vector<float>> shown;
  std::vector<std::uint32_t> bits;
  std::optional<Code> refused;
  bool operator==(const Outcome&) const = default;
};

void show_some(RankRun& run, Outcome& outcome) {
  const std::pair<std::uint32_t, std::uint32_t> places[] = {{0, 0}, {0, 1}, {1, 0}, {2, 1}};
  for (const ParameterValues of : {kMaster, kExpAvg, kExpAvgSq}) {
    for (const auto& [block, parameter] : places) {
      if (of != kMaster && !run.model.blocks[block].parameters[parameter].trainable) continue;
      outcome.shown.push_back(read(run, of, block, parameter));
    }
  }
}

using Ranks = std::vector<std::uint32_t>;

// What `act` does is compared on one and on each of these numbers. Where everything takes ten times as long
// (SPILLWAY_STEPS, as tools/test.sh has it for sanitizers), on one and the last.
Outcome expect_what_one_has(const RanksCase& of, Ranks several, const std::function<void(RankRun&, Outcome&)>& act) {
  if (std::getenv("SPILLWAY_STEPS") != nullptr) several = {several.back()};
  several.insert(several.begin(), 1);
  std::optional<Outcome> one;
  for (const std::uint32_t ranks : several) {
    SCOPED_TRACE(fmt::format("{} ranks", ranks));
    TempStore store;
    std::vector<Outcome> outcomes(ranks);
    const auto body = [&](Communicator* communicator) {
      RankRun run(of, communicator, store.path());
      bring_one(run);
      act(run, outcomes[run.rank]);
      outcomes[run.rank].bits = exported(*run.engine);
    };
    if (ranks == 1) {
      body(nullptr);
    } else {
      run_ranks(ranks, [&](Communicator& communicator) { body(&communicator); });
    }
    if (!one) one = outcomes[0];
    EXPECT_FALSE(one->bits.empty());
    for (const Outcome& outcome : outcomes) {
      EXPECT_EQ(outcome.refused, one->refused);
      EXPECT_TRUE(outcome.shown == one->shown);
      EXPECT_TRUE(outcome.bits == one->bits);
    }
  }
  return *one;
}

void write_between_steps(RankRun& run, Outcome& outcome) {
  run.until(kWritten);
  show_some(run, outcome);
  write_some(run);
  show_some(run, outcome);
  run.until(kSteps);
}

TEST(RanksValues, AreThoseOfOneInEveryLayout) {
  for (const char* name :
       {"hbm", "host", "weights in hbm, states on nvme", "nvme", "nvme, guessing", "nvme, visits recorded"}) {
    SCOPED_TRACE(name);
    const Outcome outcome = expect_what_one_has(any_number(layout_case(name)), {2, 4, 3}, write_between_steps);
    ASSERT_EQ(outcome.shown.size(), 24u);
    EXPECT_NE(outcome.shown[2], outcome.shown[14]);
    EXPECT_EQ(outcome.shown[14].back(), 0.5f * std::fabs(mixed(1, 0, outcome.shown[14].size() - 1)));
    EXPECT_EQ(outcome.shown[18], outcome.shown[6]) << "states beside a master that is written";
  }
}

// Of more values than travel at once, on each rank, which are no multiple of anything.
LayoutCase wide(const char* name) {
  LayoutCase layout = layout_case(name);
  layout.width = 20'001;
  layout.tile_elements = 1 << 14;
  return layout;
}

TEST(RanksValues, AreThoseOfOneInManyPieces) {
  for (const char* name : {"host", "nvme"}) {
    SCOPED_TRACE(name);
    const Outcome outcome = expect_what_one_has(any_number(wide(name)), {2}, write_between_steps);
    EXPECT_GT(outcome.shown[0].size(), 2u * 64 * 1024);
  }
}

TEST(RanksValues, AreThoseOfOneInEveryStage) {
  for (const char* name : {"hbm", "weights in hbm, states in host"}) {
    for (const std::uint32_t stage : {0u, 1u, 2u}) {
      SCOPED_TRACE(fmt::format("{}, stage {}", name, stage));
      RanksCase of = any_number(layout_case(name));
      of.change = [stage](Config& config) { config.stage = stage; };
      expect_what_one_has(of, {3}, write_between_steps);
    }
  }
}

TEST(RanksValues, AreThoseOfOneInEveryFormOfNumbers) {
  const struct {
    DType type;
    MomentFormat moments;
  } forms[] = {{DType::kFloat16, MomentFormat::kInt8}, {DType::kFloat32, MomentFormat::kBFloat16}};
  for (const auto& form : forms) {
    SCOPED_TRACE(name_of(form.type));
    RanksCase of = any_number(layout_case("nvme"));
    of.type = form.type;
    of.change = [&](Config& config) { config.moments = form.moments; };
    expect_what_one_has(of, {3}, write_between_steps);
  }
}

// Blocks of one or two units, of which some ranks own nothing; and weights that are not trained.
TEST(RanksValues, AreThoseOfOneWhereSomeOwnNothing) {
  for (const char* name : {"host", "nvme"}) {
    SCOPED_TRACE(name);
    LayoutCase layout = layout_case(name);
    layout.width = 300;
    expect_what_one_has(any_number(layout), {4}, write_between_steps);
  }
}

TEST(RanksValues, AreThoseOfOneBesideFrozenWeights) {
  for (const char* name : {"hbm", "nvme"}) {
    SCOPED_TRACE(name);
    RanksCase of = any_number(layout_case(name));
    of.describe = [](ModelDescription& model) {
      for (Parameter& parameter : model.blocks[1].parameters) parameter.trainable = false;
      model.blocks[3].parameters[1].trainable = false;
    };
    expect_what_one_has(of, {3}, write_between_steps);
  }
}

// After the backward pass of a step: refused where one alone refuses it, and of the same effect where it does not.
void act_in_a_step(RankRun& run, const std::function<void()>& act, Outcome& outcome) {
  run.until(kWritten + 1);
  std::size_t seen = 0;
  const std::size_t all = run.model.blocks.size() * 2 + 1;
  run.trainer->between = [&] {
    if (seen++ != all) return;
    try {
      act();
    } catch (const Error& error) {
      outcome.refused = error.code();
    }
  };
  run.trainer->run_step();
  run.trainer->between = [] {};
  run.until(kSteps + 1);
}

TEST(RanksValues, InsideOfAStepTheyCountAsOnOne) {
  const struct {
    LayoutCase layout;
    double clipping;
  } cases[] = {{layout_case("hbm"), 0.5},  {layout_case("weights in hbm, states on nvme"), 0.5},
               {layout_case("nvme"), 0.0}, {layout_case("nvme"), 100.0},
               {wide("host"), 0.0},        {layout_case("nvme, guessing"), 100.0}};
  for (const auto& [layout, clipping] : cases) {
    SCOPED_TRACE(fmt::format("{}, clipping {}", layout.name, clipping));
    RanksCase of = any_number(layout);
    of.change = [limit = clipping](Config& config) { config.gradient_clipping = limit; };
    expect_what_one_has(of, {3}, [](RankRun& run, Outcome& outcome) {
      act_in_a_step(
          run, [&] { write_some(run); }, outcome);
    });
    expect_what_one_has(of, {3}, [](RankRun& run, Outcome& outcome) {
      const auto change = [&] {
        outcome.shown.push_back(read(run, kGradient, 2, 0));
        write(run, kGradient, 1, 0, 0.5f);
        write(run, kGradient, 0, 1, 0.25f);
        outcome.shown.push_back(read(run, kGradient, 1, 0));
      };
      act_in_a_step(run, change, outcome);
      if (outcome.refused) return;
      EXPECT_EQ(outcome.shown[1][5], bf16_to_float(float_to_bf16(0.5f * std::fabs(mixed(1, 0, 5)))));
    });
  }
}

class RanksStoredValues : public ::testing::TestWithParam<std::uint32_t> {
 protected:
  void on_ranks(OnExisting on_existing, const std::function<void(RankRun&)>& body) {
    run_ranks(GetParam(), [&](Communicator& communicator) {
      RankRun run(case_, &communicator, store_.path(), on_existing);
      bring_one(run);
      body(run);
    });
  }
  std::filesystem::path of_rank(std::uint32_t rank) const { return store_.path() / ("rank" + std::to_string(rank)); }

  const RanksCase case_ = any_number(layout_case("nvme"));
  TempStore store_;
};
INSTANTIATE_TEST_SUITE_P(, RanksStoredValues, ::testing::Values(2u, 3u));

TEST_P(RanksStoredValues, AreThereAtOnce) {
  std::vector<float> kept;
  on_ranks(OnExisting::kRefuse, [&](RankRun& run) {
    run.until(kWritten);
    write_some(run);
    const auto found = read(run, kMaster, 1, 0);
    if (run.rank == 0) kept = found;
  });
  on_ranks(OnExisting::kResume, [&](RankRun& run) {
    EXPECT_EQ(run.engine->current_step(), kWritten);
    EXPECT_EQ(read(run, kMaster, 1, 0), kept);
    EXPECT_EQ(read(run, kExpAvg, 0, 0), values_for(run, 0, 0, 0.125f));
    write(run, kMaster, 1, 0, 2.f);  // before anything else of the resumed run
    run.until(kSteps);
  });
}

// One of them was killed on the way to its commit: nobody has them.
TEST_P(RanksStoredValues, AreOnAllRanksOrOnNone) {
  for (std::uint32_t victim = 0; victim < GetParam(); ++victim) {
    SCOPED_TRACE(fmt::format("rank {}", victim));
    std::vector<std::uint32_t> before;
    on_ranks(victim == 0 ? OnExisting::kRefuse : OnExisting::kReplace, [&](RankRun& run) {
      run.until(kWritten);
      const auto bits = exported(*run.engine);
      if (run.rank == 0) before = bits;
    });
    const TempDirectory aside;
    std::filesystem::copy(of_rank(victim), aside / "store");
    on_ranks(OnExisting::kResume, [](RankRun& run) { write(run, kMaster, 1, 0, 0.5f); });
    std::filesystem::remove_all(of_rank(victim));
    std::filesystem::rename(aside / "store", of_rank(victim));
    on_ranks(OnExisting::kResume, [&](RankRun& run) {
      EXPECT_EQ(run.engine->current_step(), kWritten);
      EXPECT_TRUE(exported(*run.engine) == before);
      run.until(kSteps);
    });
  }
}

class RefusedValues : public ::testing::Test {
 protected:
  static constexpr std::uint32_t kRanks = 3;

  // What each rank is told; nothing has changed, and all go on.
  static std::vector<std::string> refusals(const std::function<void(RankRun&)>& call) {
    std::vector<std::string> said(kRanks);
    TempStore store;
    run_ranks(kRanks, [&](Communicator& communicator) {
      RankRun run(any_number(layout_case("nvme")), &communicator, store.path());
      bring_one(run);
      run.until(kWritten);
      const auto before = exported(*run.engine);
      const Error error = error_of([&] { call(run); });
      EXPECT_EQ(error.code(), Code::kInvalidArgument);
      said[run.rank] = error.what();
      EXPECT_TRUE(exported(*run.engine) == before);
      run.until(kSteps);
    });
    return said;
  }
};

TEST_F(RefusedValues, AreThoseThatRanksDoNotAgreeOn) {
  EXPECT_THAT(refusals([](RankRun& run) { read(run, kMaster, run.rank == 1 ? 2 : 1, 0); }),
              Each(HasSubstr("rank 1: read_values: is called for the master of h.2.weight, and on rank 0 read_values "
                             "for the master of h.1.weight; make the same calls on all ranks")));
  EXPECT_THAT(refusals([](RankRun& run) { read(run, run.rank == 2 ? kExpAvg : kMaster, 1, 0); }),
              Each(HasSubstr("rank 2: read_values: is called for exp_avg of h.1.weight")));
  EXPECT_THAT(
      refusals([](RankRun& run) { run.rank == 0 ? write(run, kMaster, 1, 0, 0.5f) : void(read(run, kMaster, 1, 0)); }),
      Each(HasSubstr("rank 1: read_values: is called for the master of h.1.weight, and on rank 0 write_values "
                     "for the master of h.1.weight, from rank 2")));
  EXPECT_THAT(
      refusals([](RankRun& run) { run.engine->write_values(kMaster, 1, 0, values_for(run, 1, 0, 1.f), run.rank); }),
      Each(HasSubstr("from rank 1, and on rank 0 write_values for the master of h.1.weight, from rank 0")));
}

TEST_F(RefusedValues, AreThoseThatTheGivingRankCannotGive) {
  const auto given = [](float value, std::uint64_t count) {
    return refusals([=](RankRun& run) {
      std::vector<float> values(run.rank == 1 ? count : 3, NAN);  // which nobody looks at
      if (run.rank == 1) values.assign(count, 0.5f), values[7] = value;
      run.engine->write_values(kMaster, 1, 0, values, 1);
    });
  };
  EXPECT_THAT(given(NAN, 9000), Each(HasSubstr("rank 1: h.1.weight: holds NaN at index 7")));
  EXPECT_THAT(given(1, 8999), Each(HasSubstr("rank 1: h.1.weight: has 9000 values, and is given 8999")));
  EXPECT_THAT(refusals([](RankRun& run) { run.engine->write_values(kMaster, 1, 0, {}, kRanks); }),
              Each(HasSubstr("write_values: there is no rank 3")));
}

TEST_F(RefusedValues, AreThoseThatOneRankIsNotReadyFor) {
  EXPECT_THAT(refusals([](RankRun& run) {
                std::optional<Lease> lease = run.engine->acquire(1, Pass::kForward, run.engine->stream());
                if (run.rank != 2) lease.reset();
                write(run, kMaster, 1, 0, 0.5f);
              }),
              Each(HasSubstr("rank 2: write_values: a lease is still held")));
  EXPECT_THAT(refusals([](RankRun& run) { read(run, kGradient, 1, 0); }),
              Each(HasSubstr("h.1.weight: has no gradient yet")));
}

TEST(RanksValues, ASinkThatFailsOnOneRankIsAnErrorOnAllAndTheyGoOn) {
  struct Mine {};
  TempStore store;
  run_ranks(3, [&](Communicator& communicator) {
    RankRun run(any_number(layout_case("nvme")), &communicator, store.path());
    bring_one(run);
    run.until(kWritten);
    const auto fails = [&] {
      run.engine->read_values(kMaster, 0, 0, [&](auto, auto, auto, auto) {
        if (run.rank == 1) throw Mine{};
      });
    };
    if (run.rank == 1) {
      EXPECT_THROW(fails(), Mine);
    } else {
      EXPECT_THAT(error_of(fails).what(), HasSubstr("rank 1: has failed in what it was asked for"));
    }
    EXPECT_EQ(read(run, kMaster, 0, 0).size(), 21000u);
    run.until(kSteps);
  });
}

TEST(RanksValues, ARankThatDoesNotComeIsAnErrorOnTheOthers) {
  TempStore store;
  run_ranks(3, [&](Communicator& communicator) {
    RankRun run(any_number(layout_case("nvme")), &communicator, store.path());
    bring_one(run);
    run.until(kWritten);
    if (run.rank == 1) {
      EXPECT_THAT(error_of([&] { run.trainer->run_step(); }).what(), HasSubstr("ranks"));
    } else {
      EXPECT_THAT(error_of([&] { write(run, kMaster, 1, 0, 0.5f); }).what(), HasSubstr("rank 1"));
    }
  });
}

}  // namespace
}  // namespace spillway::testing
