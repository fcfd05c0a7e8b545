// Rows that nothing is learned of: the same losses as a step's, however they are cut, and steps as without them.
#include <gtest/gtest.h>

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "tests/src/comm/thread_ranks.h"
#include "tests/tools/models/resident_model.h"

namespace spillway::models {
namespace {

constexpr std::uint32_t kSequence = 20;

// Rows of a rank's passes, one pass after another.
struct HeldOut {
  std::vector<std::uint32_t> inputs, targets, starts;
  std::uint64_t target_count = 0;

  HeldOut(const std::vector<std::uint32_t>& rows, std::uint32_t row_count) {
    for (std::size_t i = 0; i < std::size_t{row_count} * kSequence; ++i) {
      const std::size_t row = i / kSequence, at = i % kSequence, token = row * (kSequence + 1) + at;
      inputs.push_back(rows[token]);
      // A document ends in the middle of a row, and half of the other one is learned.
      const bool ends = at == 8, learns = at < 8 || (row + at) % 2 == 0;
      targets.push_back(ends || !learns ? kNoTarget : rows[token + 1]);
      starts.push_back(at > 8 ? 9 : 0);
      target_count += !ends && learns;
    }
  }
  void pad_to(std::size_t rows) {
    inputs.resize(rows * kSequence, 0);
    targets.resize(rows * kSequence, kNoTarget);
    starts.resize(rows * kSequence, 0);
  }
};

// `of_pass`: rows of all ranks together. The targets of all rows are counted in the first pass.
double evaluated(Trainer& trainer, HeldOut rows, std::uint32_t of_pass, bool documents, std::uint32_t rank = 0,
                 std::uint32_t ranks = 1) {
  rows.pad_to((rows.inputs.size() / kSequence + of_pass - 1) / of_pass * of_pass);
  std::size_t at = rank * std::size_t{of_pass} * kSequence / ranks;
  const std::size_t own = std::size_t{of_pass} * kSequence / ranks;
  return trainer.evaluate([&]() -> std::optional<StepRows> {
    if (at >= rows.inputs.size()) return std::nullopt;
    const auto part = [&](const std::vector<std::uint32_t>& of) { return std::span(of).subspan(at, own); };
    StepRows pass{.inputs = part(rows.inputs), .targets = part(rows.targets)};
    if (documents) pass.starts = part(rows.starts);
    pass.target_count = std::exchange(rows.target_count, 0);
    at += std::size_t{of_pass} * kSequence;
    return pass;
  });
}

std::vector<TrainedModel> models() {
  auto models = tiny_decoders();
  models.push_back(trained_gpt2(tiny_model()));
  return models;
}

TrainerOptions options_of(DType type, std::uint32_t micro_batch, std::uint32_t accumulation, unsigned threads = 2) {
  return {.type = type,
          .micro_batch = micro_batch,
          .accumulation = accumulation,
          .sequence = kSequence,
          .threads = threads};
}

TEST(TrainerEvaluateTest, TheLossIsThatOfAStepWithTheSameRows) {
  for (const TrainedModel& model : models()) {
    const bool documents = !model.position_weight;
    const HeldOut rows(random_rows(model, 4, kSequence), 4);
    for (const DType type : kDTypes) {
      SCOPED_TRACE(model.family + ", " + std::string(name_of(type)));
      Resident run(model, options_of(type, 2, 2));
      run.engine.scale = 1024;
      StepRows step{.inputs = rows.inputs, .targets = rows.targets};
      if (documents) step.starts = rows.starts;
      step.target_count = rows.target_count;
      EXPECT_EQ(evaluated(run.trainer, rows, 4, documents), run.trainer.run_step(step));
    }
  }
}

TEST(TrainerEvaluateTest, HoweverRowsAreCutTheLossHasTheSameBits) {
  for (const TrainedModel& model : models()) {
    const bool documents = !model.position_weight;
    const HeldOut rows(random_rows(model, 7, kSequence), 7);
    for (const DType type : {DType::kFloat32, DType::kBFloat16}) {
      SCOPED_TRACE(model.family + ", " + std::string(name_of(type)));
      std::optional<double> wanted;
      struct Cut {
        std::uint32_t micro_batch, accumulation;
        unsigned threads;
        bool keeps;
      };
      for (const Cut& cut :
           {Cut{1, 1, 1, false}, Cut{2, 1, 3, false}, Cut{1, 4, 1, true}, Cut{2, 2, 2, true}, Cut{8, 1, 2, false}}) {
        SCOPED_TRACE(std::to_string(cut.micro_batch) + " x " + std::to_string(cut.accumulation));
        Resident run(model, options_of(type, cut.micro_batch, cut.accumulation, cut.threads), cut.keeps);
        const double loss = evaluated(run.trainer, rows, cut.micro_batch * cut.accumulation, documents);
        EXPECT_EQ(loss, wanted.value_or(loss));
        wanted = loss;
        EXPECT_EQ(run.engine.open_leases(), 0);
        EXPECT_EQ(run.engine.discarded(), 1);
      }
    }
  }
}

TEST(TrainerEvaluateTest, RanksShareTheRows) {
  const TrainedModel model = models().front();
  const HeldOut rows(random_rows(model, 9, kSequence), 9);
  Resident alone(model, options_of(DType::kBFloat16, 1, 4));
  const double wanted = evaluated(alone.trainer, rows, 4, true);
  for (const std::uint32_t ranks : {2u, 4u}) {
    SCOPED_TRACE(std::to_string(ranks) + " ranks");
    spillway::testing::run_ranks(ranks, [&](Communicator& communicator) {
      TrainerOptions options = options_of(DType::kBFloat16, 1, 4 / ranks);
      options.ranks = &communicator;
      Resident run(model, options);
      EXPECT_EQ(evaluated(run.trainer, rows, 4, true, communicator.rank(), ranks), wanted);
    });
  }
}

TEST(TrainerEvaluateTest, StepsHaveTheBitsThatTheyHaveWithout) {
  for (const TrainedModel& model : models()) {
    SCOPED_TRACE(model.family);
    const auto rows = random_rows(model, 4, kSequence);
    const HeldOut held_out(random_rows(model, 5, kSequence), 5);
    for (const bool keeps : {false, true}) {
      Resident with(model, options_of(DType::kBFloat16, 2, 2), keeps),
          without(model, options_of(DType::kBFloat16, 2, 2), keeps);
      for (int step = 0; step < 2; ++step) {
        // Rows of several documents between steps of rows of one.
        evaluated(with.trainer, held_out, 4, !model.position_weight);
        EXPECT_EQ(with.trainer.run_step(rows), without.trainer.run_step(rows));
        for (std::uint32_t b = 0; b < with.weights.size(); ++b) {
          for (std::uint32_t p = 0; p < with.weights[b].size(); ++p) {
            EXPECT_EQ(with.engine.gradient(b, p), without.engine.gradient(b, p)) << "block " << b << ", " << p;
          }
        }
        with.engine.step({});
        without.engine.step({});
      }
    }
  }
}

// A tied head is visited together with the embedding of the next pass: its weights need not come twice.
TEST(TrainerEvaluateTest, WeightsComeOnceForEachPass) {
  const Pass forward = Pass::kForward;
  for (const TrainedModel& model : models()) {
    SCOPED_TRACE(model.family);
    Resident run(model, options_of(DType::kFloat32, 1, 2));
    evaluated(run.trainer, HeldOut(random_rows(model, 4, kSequence), 4), 2, false);
    std::vector<std::pair<std::uint32_t, Pass>> pass{{1, forward}, {2, forward}, {model.head_block, forward}};
    std::vector<std::pair<std::uint32_t, Pass>> wanted{{0, forward}};
    wanted.insert(wanted.end(), pass.begin(), pass.end());
    wanted.emplace_back(0, forward);  // while a tied head's lease is held
    wanted.insert(wanted.end(), pass.begin(), pass.end());
    EXPECT_EQ(run.engine.visits(), wanted);
  }
}

}  // namespace
}  // namespace spillway::models
