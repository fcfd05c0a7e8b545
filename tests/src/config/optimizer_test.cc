// The optimizer's part of a configuration.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/src/config/config_text.h"

namespace spillway {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

TEST(ConfigOptimizer, AdamIsDecoupledUnlessAdamWModeIsFalse) {
  const auto decoupled = [](const std::string& optimizer) {
    return parse(with("\"optimizer\": " + optimizer)).optimizer.decoupled_decay;
  };
  EXPECT_TRUE(decoupled(R"({"type": "Adam"})"));
  EXPECT_TRUE(decoupled(R"({"type": "adamw"})"));
  EXPECT_TRUE(decoupled(R"({"type": "Adam", "params": {"adam_w_mode": true}})"));
  EXPECT_FALSE(decoupled(R"({"params": {"adam_w_mode": false}, "type": "Adam"})"));
  EXPECT_THAT(refusal(with(R"("optimizer": {"type": "AdamW", "params": {"adam_w_mode": false}})")),
              HasSubstr("contradicts the optimizer's type"));
  EXPECT_THAT(refusal(with(R"("optimizer": {"type": "Lamb"})")), HasSubstr("allowed: AdamW, Adam, Adagrad, Lion, SGD"));
}

// What compresses gradients between ranks to a bit needs whole gradients and states on each.
TEST(ConfigOptimizer, OptimizersOfOneBitAreRefusedAsByDeepSpeedsZero) {
  const auto refused = [](const std::string& type) {
    return refusal(with(R"("optimizer": {"type": ")" + type + R"(", "params": {"lr": 1e-4}})"));
  };
  for (const std::string type : {"OneBitAdam", "ZeroOneAdam", "OneBitLamb", "onebitadam"})
    EXPECT_THAT(refused(type), HasSubstr('"' + type +
                                         "\" is DeepSpeed's, and not computed here, nor by DeepSpeed itself "
                                         "with ZeRO-1, 2 and 3, which refuse it; allowed: AdamW"));
  EXPECT_THAT(refused("Lamb"), HasSubstr("not computed here; allowed"));
}

TEST(ConfigOptimizer, RanksGradientsAreAveragedAndNotAdded) {
  EXPECT_NO_THROW(parse(with(R"("gradient_allreduce_op": "mean")")));
  EXPECT_THAT(
      refusal(with(R"("gradient_allreduce_op": "sum")")),
      HasSubstr("gradient_allreduce_op: the string \"sum\" is DeepSpeed's, and not computed here; allowed: mean"));
}

TEST(ConfigOptimizer, StatesAreExactUnlessTheFileSaysOtherwise) {
  const auto section = [](const std::string& keys, const std::string& type = "AdamW") {
    return with(R"("optimizer": {"type": ")" + type + R"("}, "spillway": {)" + keys + "}");
  };
  EXPECT_EQ(parse(section("")).moments, MomentFormat::kFloat32);
  EXPECT_EQ(parse(section(R"("states": "fp32")")).moments, MomentFormat::kFloat32);
  EXPECT_EQ(parse(section(R"("states": "bf16")")).moments, MomentFormat::kBFloat16);
  const Config lion = parse(section(R"("states": "int8", "exact_states": ["*.head"])", "Lion"));
  EXPECT_EQ(lion.moments, MomentFormat::kInt8);
  EXPECT_THAT(lion.exact_states, ElementsAre("*.head"));
  EXPECT_THAT(parse(section("")).exact_states, ElementsAre("*embed*", "*wte*", "*wpe*"));
  EXPECT_THAT(refusal(section(R"("states": "int4")")), HasSubstr("allowed: fp32, bf16, int8"));
  for (const std::string type : {"SGD", "Adagrad"}) {
    EXPECT_THAT(refusal(section(R"("states": "int8")", type)),
                HasSubstr("spillway.states: int8, and " + type + " has exact states alone; leave it out"));
    EXPECT_EQ(parse(section(R"("states": "fp32")", type)).moments, MomentFormat::kFloat32);
  }
}

// As in files for the Hugging Face trainer, which has an optimizer of its own.
TEST(ConfigOptimizer, AFileWithoutOneIsKnown) {
  const Config config = parse(with("\"gradient_clipping\": 1"));
  EXPECT_EQ(config.optimizer.learning_rate, 1e-3);
  EXPECT_TRUE(config.optimizer_left_out);
  EXPECT_FALSE(parse(with(R"("optimizer": {"type": "AdamW"})")).optimizer_left_out);
}

TEST(ConfigOptimizer, EveryOptimizerHasDeepSpeedsDefaultsAndItsOwnParametersOnly) {
  const auto optimizer = [](const std::string& text) { return parse(with("\"optimizer\": " + text)).optimizer; };
  const OptimizerConfig adagrad = optimizer(R"({"type": "Adagrad"})"), lion = optimizer(R"({"type": "Lion"})");
  EXPECT_EQ(adagrad.kind, OptimizerKind::kAdagrad);
  EXPECT_EQ(adagrad.learning_rate, 1e-2);
  EXPECT_EQ(adagrad.epsilon, 1e-10);
  EXPECT_EQ(lion.kind, OptimizerKind::kLion);
  EXPECT_EQ(lion.learning_rate, 1e-3);
  EXPECT_EQ(lion.beta2, 0.999);
  EXPECT_EQ(optimizer(R"({"type": "Lion", "params": {"betas": [0.8, 0.9], "lr": 5}})").beta2, 0.9);
  const OptimizerConfig sgd =
      optimizer(R"({"type": "SGD", "params": {"momentum": 0.9, "nesterov": true, "weight_decay": 0.1}})");
  EXPECT_EQ(sgd.kind, OptimizerKind::kSgd);
  EXPECT_EQ(sgd.momentum, 0.9);
  EXPECT_TRUE(sgd.nesterov);
  EXPECT_THAT(refusal(with(R"("optimizer": {"type": "SGD", "params": {"betas": [0.9, 0.99]}})")),
              HasSubstr("optimizer.params.betas: not a parameter of SGD; only of AdamW, Adam, Lion"));
  EXPECT_THAT(refusal(with(R"("optimizer": {"params": {"momentum": 0.9}})")), HasSubstr("not a parameter of AdamW"));
  EXPECT_THAT(refusal(with(R"("optimizer": {"type": "SGD", "params": {"nesterov": true}})")),
              HasSubstr("optimizer.params.nesterov: needs a momentum and no dampening"));
}

// torch.optim.AdamW decays unless it is told otherwise, and torch.optim.Adam does not.
TEST(ConfigOptimizer, TorchAdamDecaysAsPyTorchsOwn) {
  const auto decay = [](const std::string& type, const std::string& params) {
    return parse(with(R"("optimizer": {"type": ")" + type + R"(", "params": {)" + params + "}}"))
        .optimizer.weight_decay;
  };
  for (const char* type : {"AdamW", "Adam"}) {
    EXPECT_EQ(decay(type, R"("torch_adam": true)"), 0.01) << type;
    EXPECT_EQ(decay(type, R"("torch_adam": false)"), 0) << type;
    EXPECT_EQ(decay(type, R"("torch_adam": true, "weight_decay": 0)"), 0) << type;
    EXPECT_EQ(decay(type, R"("torch_adam": true, "weight_decay": "auto")"), 0) << type;  // the trainer's
  }
  EXPECT_EQ(decay("Adam", R"("torch_adam": true, "adam_w_mode": false)"), 0);
  EXPECT_THAT(refusal(with(R"("optimizer": {"type": "Lion", "params": {"torch_adam": true}})")),
              HasSubstr("not a parameter of Lion"));
}

TEST(ConfigOptimizer, ParameterGroupsAreReadStrictly) {
  const auto groups = [](const std::string& text) {
    return with("\"spillway\": {\"parameter_groups\": " + text + "}");
  };
  EXPECT_TRUE(parse(groups("[]")).parameter_groups.empty());
  EXPECT_THAT(refusal(groups("{}")), HasSubstr("expected an array of objects"));
  EXPECT_THAT(refusal(groups("[3]")), HasSubstr("expected an array of objects"));
  EXPECT_THAT(refusal(groups("[{\"lr\": 1}]")), HasSubstr("group 0 names no parameters"));
  EXPECT_THAT(refusal(groups("[{\"parameters\": [\"*\"]}]")), HasSubstr("group 0 sets neither lr nor weight_decay"));
  EXPECT_THAT(refusal(groups("[{\"parameters\": [\"*\"], \"weightdecay\": 1}]")),
              HasSubstr("unknown key \"spillway.parameter_groups.weightdecay\"; closest key: weight_decay"));
  EXPECT_THAT(refusal(groups("[{\"parameters\": \"*\"}]")), HasSubstr("expected an array of strings"));
  EXPECT_THAT(refusal(groups("[{\"parameters\": [\"*\"], \"lr\": -1}]")), HasSubstr("out of range"));
}

}  // namespace
}  // namespace spillway
