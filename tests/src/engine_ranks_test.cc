// Where a tensor lives, and on how many ranks, never changes the result.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fmt/format.h>

#include <cmath>
#include <cstdlib>
#include <string>

#include "spillway/error.h"
#include "tests/error_of.h"
#include "tests/src/ranks_run.h"

namespace spillway {
namespace {

using testing::error_of;
using ::testing::HasSubstr;
using testing::LayoutCase;
using testing::RankRun;
using testing::RanksCase;
using testing::RanksOutcome;
using testing::run_ranks;
using testing::train_on_ranks;

constexpr std::uint64_t kSteps = 3;

// On 4 ranks alone where few steps are asked for (SPILLWAY_STEPS, which tools/test.sh sets).
void expect_the_bits_of_one(
    const RanksCase& of, const std::function<void(RankRun&)>& with = [](RankRun&) {}) {
  const RanksOutcome one = train_on_ranks(1, of, kSteps, with);
  EXPECT_FALSE(one.bits.empty());
  for (const std::uint32_t ranks : {2u, 4u}) {
    if (ranks == 2 && std::getenv("SPILLWAY_STEPS") != nullptr) continue;
    SCOPED_TRACE(ranks);
    EXPECT_TRUE(train_on_ranks(ranks, of, kSteps, with) == one);
  }
}

TEST(Ranks, TrainTheBitsOfOneInEveryLayout) {
  for (const LayoutCase& layout : testing::layout_cases(0, 2)) {
    SCOPED_TRACE(layout.name);
    expect_the_bits_of_one({.layout = layout});
  }
}

// What a layout is, and how numbers are kept, in pairs: each with each in some case.
TEST(Ranks, TrainTheBitsOfOneWithEveryFormOfNumbers) {
  const struct {
    DType type;
    MomentFormat moments;
    double clipping;
  } forms[] = {
      {DType::kFloat16, MomentFormat::kFloat32, 0.0},
      {DType::kFloat32, MomentFormat::kInt8, 1.0},
      {DType::kBFloat16, MomentFormat::kBFloat16, 1e9},
      {DType::kBFloat16, MomentFormat::kInt8, 0.0},
  };
  const auto layouts = testing::layout_cases();
  for (std::size_t i = 0; i < layouts.size(); ++i) {
    const auto& form = forms[i % std::size(forms)];
    SCOPED_TRACE(layouts[i].name + " with " + std::string(name_of(form.type)) + " " +
                 std::string(name_of(form.moments)));
    expect_the_bits_of_one({.layout = layouts[i], .type = form.type, .change = [&](Config& config) {
                              config.moments = form.moments;
                              config.gradient_clipping = form.clipping;
                            }});
  }
}

// With stages 1 and 2 the weights are whole on each rank, with stage 0 everything is.
TEST(Ranks, TrainTheBitsOfOneInEveryStage) {
  for (const char* name : {"hbm", "weights in hbm, states in host", "weights in hbm, states on nvme"}) {
    for (const std::uint32_t stage : {0u, 1u, 2u}) {
      for (const DType type : {DType::kBFloat16, DType::kFloat16}) {
        if (stage == 0 && std::string(name).ends_with("nvme")) continue;  // which a store would be of
        SCOPED_TRACE(fmt::format("{}, stage {}", name, stage));
        expect_the_bits_of_one({.layout = testing::layout_case(name), .type = type, .change = [stage](Config& config) {
                                  config.stage = stage;
                                  config.moments = MomentFormat::kInt8;
                                }});
      }
    }
  }
}

// Blocks of one or two units: some ranks own nothing of them.
TEST(Ranks, TrainTheBitsOfOneWhereSomeOwnNothing) {
  for (const char* name : {"hbm", "host", "weights in hbm, states in host", "nvme", "nvme, guessing",
                           "nvme, visits recorded", "nvme, sums in host"}) {
    SCOPED_TRACE(name);
    LayoutCase layout = testing::layout_case(name);
    layout.width = 300;
    expect_the_bits_of_one({.layout = layout});
    expect_the_bits_of_one({.layout = layout, .change = [](Config& config) { config.gradient_clipping = 0; }});
  }
}

TEST(Ranks, TrainTheBitsOfOneWithFrozenParameters) {
  for (const char* name : {"hbm", "host", "nvme", "nvme, least host"}) {
    SCOPED_TRACE(name);
    RanksCase of{.layout = testing::layout_case(name)};
    of.describe = [](ModelDescription& model) {
      for (Parameter& parameter : model.blocks[2].parameters) parameter.trainable = false;
      model.blocks[3].parameters[1].trainable = false;
    };
    expect_the_bits_of_one(of);
  }
}

// A parameter is left out of its update where no rank brings it a gradient, and not where one does.
TEST(Ranks, LeaveOutOfAnUpdateWhatNoRankBringsAGradient) {
  for (const char* name : {"hbm", "host", "nvme", "nvme, guessing"}) {
    for (const double clipping : {0.0, 1.0}) {
      SCOPED_TRACE(name);
      const RanksCase of{.layout = testing::layout_case(name),
                         .change = [clipping](Config& config) { config.gradient_clipping = clipping; }};
      expect_the_bits_of_one(of, [](RankRun& run) {
        run.trainer->brings = [](const testing::ToyPush& push) {
          if (push.block == 2 && push.parameter == 1 && push.step == 2) return testing::Brings::kNothing;
          if (push.block == 3 && push.part / 2 != 3) return testing::Brings::kNothing;  // the last micro-batch alone
          return testing::Brings::kGradient;
        };
      });
    }
  }
}

TEST(Ranks, RefuseAStepTogetherWhereOneHasAGradientThatIsNotFinite) {
  for (const char* name : {"hbm", "host", "nvme", "nvme, guessing"}) {
    SCOPED_TRACE(name);
    const RanksCase of{.layout = testing::layout_case(name)};
    testing::TempStore store;
    run_ranks(2, [&](Communicator& communicator) {
      RankRun run(of, &communicator, store.path());
      run.until(1);
      const auto before = testing::exported(*run.engine);
      run.trainer->poison_step = 2;
      run.trainer->poison_block = run.rank == 1 ? 1 : 99;
      const Error error = error_of([&] { run.trainer->run_step(); });
      EXPECT_EQ(error.code(), Code::kNonFinite);
      EXPECT_THAT(error.what(), HasSubstr("h.1.weight of block h.1: NaN or Inf in its gradient in step 2"));
      EXPECT_TRUE(testing::exported(*run.engine) == before);
      run.trainer->poison_step = 0;
      run.until(3);
    });
  }
}

// In fp16 the step is skipped on all ranks, at one loss scale.
TEST(Ranks, SkipAStepTogether) {
  RanksCase of{.layout = testing::layout_case("nvme"), .type = DType::kFloat16};
  const RanksOutcome one = train_on_ranks(1, of, 6);
  EXPECT_THAT(one.norms, ::testing::Contains(HUGE_VAL));
  EXPECT_TRUE(train_on_ranks(2, of, 6) == one);
}

TEST(Ranks, EvaluateBetweenStepsWithoutChangingABit) {
  for (const char* name : {"hbm", "weights in hbm, states on nvme", "host", "nvme"}) {
    SCOPED_TRACE(name);
    expect_the_bits_of_one({.layout = testing::layout_case(name)}, [](RankRun& run) {
      const auto evaluate = [&run] {
        for (std::uint32_t b = 0; b < run.model.blocks.size(); ++b)
          run.engine->acquire(b, Pass::kForward, run.engine->stream());
        run.engine->acquire(2, Pass::kForward, run.engine->stream());  // and again, out of turn
      };
      evaluate();
      run.engine->discard_step();
      run.until(1);
      evaluate();
      evaluate();
      run.engine->discard_step();
    });
  }
}

TEST(Ranks, SumWithoutGroupsOnAnyNumber) {
  RanksCase of{.layout = testing::layout_case("nvme"), .micro_batches = 3, .sum_groups = 1};
  of.change = [](Config& config) { config.gradient_clipping = 0.5; };
  EXPECT_FALSE(train_on_ranks(3, of, kSteps).bits.empty());
}

// What each rank adds up is rounded on its way, and nothing else is.
TEST(Ranks, SendGradientsInSixteenBits) {
  RanksCase of{.layout = testing::layout_case("nvme"), .type = DType::kFloat32, .micro_batches = 3, .sum_groups = 1};
  const auto train = [&](std::uint32_t ranks, DType wire) {
    of.change = [wire](Config& config) { config.communication = wire; };
    return train_on_ranks(ranks, of, kSteps);
  };
  EXPECT_TRUE(train(1, DType::kBFloat16) == train(1, DType::kFloat32)) << "nothing travels";
  const RanksOutcome exact = train(3, DType::kFloat32);
  for (const DType wire : {DType::kBFloat16, DType::kFloat16}) {
    SCOPED_TRACE(name_of(wire));
    const RanksOutcome rounded = train(3, wire);
    EXPECT_NE(rounded.bits, exact.bits);
    ASSERT_EQ(rounded.norms.size(), exact.norms.size());
    // Three values that are each rounded by a 2^-9th at the most; later steps have other weights, too.
    EXPECT_NEAR(rounded.norms[0], exact.norms[0], exact.norms[0] / 256);
  }
  of.sum_groups = of.micro_batches = 4;
  of.change = [](Config& config) { config.communication = DType::kBFloat16; };
  testing::TempStore store;
  run_ranks(2, [&](Communicator& communicator) {
    EXPECT_THAT(error_of([&] { RankRun(of, &communicator, store.path()); }).what(),
                HasSubstr("communication_data_type: bf16 beside spillway.sum_groups"));
  });
}

// The last step of an epoch has fewer: what is not there is pushed as nothing.
TEST(Ranks, SumFewerMicroBatchesInAsManyParts) {
  for (const char* name : {"hbm", "nvme", "nvme, sums in host"}) {
    SCOPED_TRACE(name);
    const RanksCase of{.layout = testing::layout_case(name), .micro_batches = 4, .sum_groups = 2};
    const auto train = [&](std::uint32_t ranks, bool shorter) {
      return train_on_ranks(ranks, of, kSteps, [=](RankRun& run) {
        run.until(1);
        if (!shorter) return;
        run.engine->set_micro_batches(2);
        const std::uint32_t own = 2 / run.ranks, first = run.rank * own;
        run.trainer->first_micro_batch = first;
        run.trainer->brings = [=](const testing::ToyPush& push) {
          return push.part / 2 < first + own ? testing::Brings::kGradient : testing::Brings::kNothing;
        };
        run.until(2);
        run.trainer->first_micro_batch = run.rank * run.trainer->micro_batches;
        run.trainer->brings = [](const testing::ToyPush&) { return testing::Brings::kGradient; };
      });
    };
    const RanksOutcome one = train(1, true);
    EXPECT_FALSE(one == train(1, false));
    EXPECT_TRUE(train(2, true) == one);
  }
}

TEST(Ranks, RefuseMicroBatchesThatAreNotTheirs) {
  testing::TempStore store;
  run_ranks(2, [&](Communicator& communicator) {
    const RanksCase of{.layout = testing::layout_case("host"), .micro_batches = 4, .sum_groups = 2};
    RankRun run(of, &communicator, store.path());
    const auto refusal = [&](std::uint32_t n) {
      return std::string(error_of([&] { run.engine->set_micro_batches(n); }).what());
    };
    EXPECT_THAT(refusal(3),
                HasSubstr("set_micro_batches: 3 are no micro-batches of a step; give a multiple of 2, at most 4"));
    EXPECT_THAT(refusal(6), HasSubstr("6 are no micro-batches"));
    EXPECT_THAT(refusal(0), HasSubstr("0 are no micro-batches"));
    run.trainer->first_micro_batch = 1 - run.rank;
    EXPECT_THAT(
        error_of([&] { run.trainer->run_step(); }).what(),
        HasSubstr(run.rank == 0 ? "micro-batch 2, and rank 0 has 0 to 1; count the micro-batches of a step from 0, over"
                                : "micro-batch 0, and rank 1 has 2 to 3"));
  });
}

class RefusedRanks : public ::testing::Test {
 protected:
  // Of two ranks, the second's changed.
  static std::string refusal(
      const std::function<void(Config&)>& change,
      const std::function<void(ModelDescription&)>& describe = [](ModelDescription&) {}) {
    testing::TempStore store;
    std::string said[2];
    run_ranks(2, [&](Communicator& communicator) {
      RanksCase of{.layout = testing::layout_case("nvme")};
      if (communicator.rank() == 1) of.change = change, of.describe = describe;
      said[communicator.rank()] = error_of([&] { RankRun(of, &communicator, store.path()); }).what();
    });
    EXPECT_EQ(said[0], said[1]);
    EXPECT_TRUE(std::filesystem::is_empty(store.path()));
    return said[0];
  }
};

TEST_F(RefusedRanks, DifferInTheConfiguration) {
  EXPECT_THAT(refusal([](Config& config) { config.optimizer.learning_rate *= 2; }),
              HasSubstr("ranks: rank 1 has another configuration than rank 0; "));
  EXPECT_THAT(refusal([](Config& config) { config.tile_elements *= 2; }), HasSubstr("another configuration"));
  EXPECT_THAT(refusal([](Config& config) { config.hbm_bytes = std::uint64_t{1} << 30; }),
              HasSubstr("another plan of device memory than rank 0; give all ranks the same hbm_bytes"));
}

TEST_F(RefusedRanks, DifferInTheModel) {
  EXPECT_THAT(refusal([](Config&) {}, [](ModelDescription& model) { model.blocks[1].parameters[0].name = "other"; }),
              HasSubstr("rank 1 has another model than rank 0; start all ranks with the same"));
}

TEST_F(RefusedRanks, HaveABudgetThatDoesNotFitOnOne) {
  EXPECT_THAT(refusal([](Config& config) { config.host_bytes = 4096; }),
              HasSubstr("rank 1: spillway.host_bytes: 4KiB is too small"));
}

// As where a host has an older copy, or one of another run.
TEST(Ranks, RefuseSnapshotsOfWhichOneIsAnother) {
  const RanksCase of{.layout = testing::layout_case("nvme")};
  testing::TempStore store, other;
  const auto save = [](RankRun& run, const std::filesystem::path& directory) {
    run.engine->begin_save(directory, {});
    run.engine->finish_save();
  };
  run_ranks(2, [&](Communicator& communicator) {
    RankRun run(of, &communicator, other / "store");
    run.until(1);
    save(run, other / "first");
    run.until(2);
    save(run, other / "second");
    run.engine->load_snapshot(other / "first");
    run.engine->set_learning_rate(3e-2);
    run.until(2);
    save(run, other / "strange");
  });
  std::filesystem::copy(other / "second", other / "copy", std::filesystem::copy_options::recursive);
  const struct {
    const char *of_rank_0, *of_rank_1, *words;
  } pairs[] = {
      {"second", "first", "first: is at step 1 here, and at step 2 where rank 0 reads it; bring one snapshot, as it"},
      {"first", "second", "second: is at step 2 here, and at step 1 where rank 0 reads it; bring one snapshot, as it"},
      {"second", "strange", "strange: is at step 2 here, and at step 2 where rank 0 reads it, and holds something el"},
  };
  std::vector<std::string> said(2);
  for (const auto& pair : pairs) {
    run_ranks(2, [&](Communicator& communicator) {
      const auto own = other / (communicator.rank() == 0 ? pair.of_rank_0 : pair.of_rank_1);
      said[communicator.rank()] =
          error_of([&] { RankRun(of, &communicator, store.path(), OnExisting::kRefuse, own); }).what();
    });
    EXPECT_THAT(said, ::testing::Each(::testing::AllOf(::testing::StartsWith("rank 1: "), HasSubstr(pair.words))));
    EXPECT_TRUE(std::filesystem::is_empty(store.path())) << "something was written";
  }
  run_ranks(2, [&](Communicator& communicator) {
    RankRun run(of, &communicator, store.path(), OnExisting::kRefuse, other / "first");
    for (const auto& [of_rank_0, of_rank_1, words] : pairs) {
      const auto own = other / (run.rank == 0 ? of_rank_0 : of_rank_1);
      EXPECT_THAT(error_of([&] { run.engine->load_snapshot(own); }).what(), HasSubstr(words));
      EXPECT_EQ(run.engine->current_step(), 1u);
    }
    run.until(2);
    const auto bits = testing::exported(*run.engine);
    run.engine->load_snapshot(other / (run.rank == 0 ? "second" : "copy"));
    EXPECT_TRUE(testing::exported(*run.engine) == bits);
  });
}

TEST(Ranks, RefuseGroupsThatDoNotFitThem) {
  testing::TempStore store;
  run_ranks(3, [&](Communicator& communicator) {
    const RanksCase of{.layout = testing::layout_case("host"), .micro_batches = 6, .sum_groups = 2};
    EXPECT_THAT(error_of([&] { RankRun(of, &communicator, store.path()); }).what(),
                HasSubstr("spillway.sum_groups: 2 with 6 micro-batches a step on 3 ranks; take a power of two that"));
  });
}

}  // namespace
}  // namespace spillway
