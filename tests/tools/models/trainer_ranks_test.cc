// Several ranks share a step's micro-batches.
#include <gtest/gtest.h>

#include <cstdint>
#include <mutex>
#include <span>
#include <string>

#include "tests/src/comm/thread_ranks.h"
#include "tests/tools/models/resident_model.h"

namespace spillway::models {
namespace {

// Ranks push what one rank pushes, each its own micro-batches of it: what is added where does not depend on how many
// they are. One micro-batch a rank is the case in which nothing is summed before it is pushed.
TEST(TrainerRanks, RanksPushAndLoseWhatOneDoes) {
  constexpr std::uint32_t kMicroBatches = 4, kParts = 4, kSequence = 20;
  const auto model = tiny_model();
  const auto rows = random_rows(model, 2 * kMicroBatches, kSequence);
  const auto options_of = [&](DType type, std::uint32_t ranks, Communicator* communicator) {
    return TrainerOptions{.type = type,
                          .micro_batch = 2,
                          .accumulation = kMicroBatches / ranks,
                          .parts = kParts,
                          .sequence = kSequence,
                          .threads = 1,
                          .ranks = communicator};
  };
  for (const DType type : {DType::kFloat32, DType::kBFloat16}) {
    Resident alone(model, options_of(type, 1, nullptr));
    const double loss = alone.trainer.run_step(rows);
    for (const std::uint32_t ranks : {2u, 4u}) {
      SCOPED_TRACE(std::to_string(ranks) + " ranks, " + std::string(name_of(type)));
      std::mutex mutex;
      FakeEngine::Pushed together;
      spillway::testing::run_ranks(ranks, [&](Communicator& communicator) {
        Resident run(model, options_of(type, ranks, &communicator));
        const std::size_t own = rows.size() / ranks;
        EXPECT_EQ(run.trainer.run_step(std::span(rows).subspan(communicator.rank() * own, own)), loss);
        const std::lock_guard lock(mutex);
        for (std::uint32_t b = 0; b < run.description.blocks.size(); ++b) {
          for (std::uint32_t p = 0; p < run.description.blocks[b].parameters.size(); ++p) {
            EXPECT_EQ(run.engine.pushes(b, p), run.description.blocks[b].parameters[p].pushes);
          }
        }
        for (const auto& [what, values] : run.engine.pushed()) EXPECT_TRUE(together.emplace(what, values).second);
      });
      EXPECT_TRUE(together == alone.engine.pushed());
    }
  }
}

}  // namespace
}  // namespace spillway::models
