// Where a tensor lives, and on how many ranks, never changes the result.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "spillway/error.h"
#include "tests/error_of.h"
#include "tests/src/ranks_run.h"

namespace spillway {
namespace {

using testing::LayoutCase;
using testing::RanksCase;
using testing::RanksOutcome;
using testing::train_on_ranks;

constexpr std::uint64_t kSteps = 3;

TEST(Ranks, TrainTheBitsOfOneInEveryLayout) {
  for (const LayoutCase& layout : testing::layout_cases()) {
    SCOPED_TRACE(layout.name);
    const RanksCase of{.layout = layout};
    const RanksOutcome one = train_on_ranks(1, of, kSteps);
    EXPECT_FALSE(one.bits.empty());
    EXPECT_TRUE(train_on_ranks(2, of, kSteps) == one);
    EXPECT_TRUE(train_on_ranks(4, of, kSteps) == one);
  }
}

}  // namespace
}  // namespace spillway
