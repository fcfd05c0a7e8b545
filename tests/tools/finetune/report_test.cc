// What a run says of itself.
#include "tools/finetune/report.h"

#include <gtest/gtest.h>

#include <cmath>

namespace spillway::models::finetune {
namespace {

TEST(ReportTest, LedgerTotalsEveryTierAndSaysWhatIsLeft) {
  Ledger ledger;
  ledger.reservations = {
      {Placement::kHbm, "weights", 3000}, {Placement::kHbm, "workspace", 500}, {Placement::kHost, "ring", 70}};
  ledger.hbm_budget = 4096;
  ledger.host_budget = 100;
  const auto text = ledger_text(ledger);
  EXPECT_NE(text.find("3500 bytes of 4096, 596 left"), std::string::npos) << text;
  EXPECT_NE(text.find("70 bytes of 100, 30 left"), std::string::npos) << text;
  EXPECT_EQ(text.find("nvme"), std::string::npos) << text;
}

TEST(ReportTest, StepLineNamesTheSlowestLinkAndTheLargestCausesOfTheStall) {
  StepInfo facts;
  facts.report.seconds = 6;
  facts.report.link = "compute";
  facts.report.link_percent = 64.2;
  EXPECT_TRUE(step_text(facts, 3).ends_with("  compute at 64 %")) << step_text(facts, 3);
  facts.report.stalls[StallCause::kRead] = 1.6;
  facts.report.stalls[StallCause::kCommit] = 0.05;
  facts.report.stalls[StallCause::kUpdate] = 0.4;
  facts.report.stall_seconds = facts.report.stalls.total();
  EXPECT_TRUE(step_text(facts, 3).ends_with("  compute at 64 %, stalled 2.05 s: read 1.60, update 0.40"))
      << step_text(facts, 3);
}

TEST(ReportTest, JsonLineHasTheFieldsInOrder) {
  StepInfo facts;
  facts.report.step = 3;
  facts.report.link = "nvme";
  facts.report.durable_step = 2;
  facts.loss = 1.25;
  facts.tokens = 512;
  EXPECT_EQ(
      step_json(facts),
      "{\"step\":3,\"loss\":1.25,\"grad_norm\":0,\"lr\":0,\"seconds\":0.000000,\"tokens\":512,\"nvme_read_bytes\":0,"
      "\"nvme_write_bytes\":0,\"h2d_bytes\":0,\"d2h_bytes\":0,\"link\":\"nvme\",\"link_percent\":0.00,"
      "\"stall_seconds\":0.000000,\"stalls\":{\"read\":0.000000,\"write\":0.000000,\"copy\":0.000000,\"gradient\":0."
      "000000,"
      "\"update\":0.000000,\"commit\":0.000000,\"save\":0.000000,\"other\":0.000000,\"network\":0.000000},\"adam_"
      "seconds\":0.000000,"
      "\"durable_step\":2,"
      "\"visits\":0,\"visit_hits\":0,\"tile_bytes\":0,\"tile_hit_bytes\":0,\"speculative_blocks\":0,\"taken_back\":"
      "false}"
      "\n");
}

TEST(ReportTest, AnEvaluationSaysItsLossToTheLastDigit) {
  const EvaluationInfo facts{.step = 50, .loss = 5.7133147319157915, .tokens = 630, .seconds = 1.5, .best = true};
  EXPECT_EQ(evaluation_text(facts, 300),
            "evaluation at step 50/300  loss 5.7133  perplexity 302.9  1.50 s  630 tokens  best so far");
  EXPECT_EQ(evaluation_json(facts),
            "{\"step\":50,\"eval_loss\":5.7133147319157915,\"perplexity\":302.87335,\"eval_tokens\":630,"
            "\"eval_seconds\":1.500000,\"best\":true}\n");
  EXPECT_TRUE(evaluation_json({.loss = NAN}).starts_with("{\"step\":0,\"eval_loss\":null,\"perplexity\":null,"));
}

}  // namespace
}  // namespace spillway::models::finetune
