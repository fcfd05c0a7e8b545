// What a commit keeps of the best evaluation.
#include "tools/finetune/evaluation.h"

#include <gtest/gtest.h>

namespace spillway::models::finetune {
namespace {

TEST(BestEvaluationTest, ItsTextBringsItBackToTheBit) {
  for (const double loss : {0.0, 2.0, 0.1, 1.0 / 3, 5.7133147319157915, 1e-300, -0.25}) {
    const BestEvaluation best{.loss = loss, .step = 12345678901, .data = "43 rows of 2048 tokens, 0123; of at step 7"};
    const auto read = BestEvaluation::parse(best.text());
    ASSERT_TRUE(read) << best.text();
    EXPECT_EQ(read->loss, loss);
    EXPECT_EQ(read->step, best.step);
    EXPECT_EQ(read->data, best.data);
  }
}

TEST(BestEvaluationTest, OtherTextsAreNone) {
  for (const char* text : {"", "x", "1.5", "1.5 at step", "1.5 at step x of y", "1.5 at step 3", "at step 3 of y"}) {
    EXPECT_FALSE(BestEvaluation::parse(text)) << text;
  }
}

}  // namespace
}  // namespace spillway::models::finetune
