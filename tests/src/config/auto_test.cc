// What "auto" stands for.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "src/config/table.h"
#include "tests/src/config/config_text.h"

namespace spillway {
namespace {

using testing::ContainsRegex;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

Config resolved(const std::string& text, const AutoValues& automatic = {}) {
  return config_from_json(text, "c.json", automatic);
}

TEST(ConfigAuto, StandsForTheTrainersValues) {
  const Config c = resolved(R"({"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto", "gradient_clipping": "auto", "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto"},
    "optimizer": {"params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto",
                                                 "warmup_num_steps": "auto"}}})");
  EXPECT_EQ(c.micro_batch, 8u);
  EXPECT_EQ(c.gradient_accumulation, 1u);
  EXPECT_EQ(c.gradient_clipping, 1);
  EXPECT_EQ(c.weights, DType::kFloat32);
  EXPECT_EQ(c.optimizer.learning_rate, 5e-5);
  EXPECT_EQ(c.optimizer.beta1, 0.9);
  EXPECT_EQ(c.optimizer.beta2, 0.999);
  EXPECT_EQ(c.optimizer.epsilon, 1e-8);
  EXPECT_EQ(c.optimizer.weight_decay, 0);
  EXPECT_EQ(c.schedule.warmup_max_lr, 5e-5);
  EXPECT_EQ(c.schedule.warmup_steps, 1u);
}

TEST(ConfigAuto, IsCheckedAsIfItHadBeenWrittenOut) {
  AutoValues values;
  values.total_steps = 0;
  EXPECT_THAT(refusal(with(R"("scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}})"), values),
              HasSubstr("scheduler.params.total_num_steps: 0 is out of range"));
}

TEST(ConfigAuto, AnOlderWordBesideItsSuccessorIsRefused) {
  EXPECT_EQ(
      refusal(with(R"("bf16": {"enabled": true}, "bfloat16": {"enabled": "auto"})")),
      "c.json:1:76: bfloat16.enabled: an older word or another name, and bf16.enabled is there as well; leave one "
      "of the two out");
  EXPECT_THAT(refusal(with(R"("zero_optimization": {"stage": 3, "cpu_offload": false,
                                                    "offload_optimizer": {"device": "none"}})")),
              HasSubstr("zero_optimization.cpu_offload: an older word"));
  // Without effect, either is as good.
  const CapturedLog log;
  EXPECT_EQ(refusal(with(R"("aio": {"thread_count": 1, "intra_op_parallelism": 1})")), "accepted");
}

TEST(ConfigAuto, BatchSizesFollowThoseThatAreWritten) {
  const auto batch = [](const char* train, const char* micro, const char* accumulation) {
    std::string text;
    const auto add = [&](const char* key, const char* value) {
      if (*value != 0) text += (text.empty() ? "{\"" : ", \"") + std::string(key) + "\": " + value;
    };
    add("train_batch_size", train);
    add("train_micro_batch_size_per_gpu", micro);
    add("gradient_accumulation_steps", accumulation);
    const Config c = resolved(text + "}");
    return std::pair(c.micro_batch, c.gradient_accumulation);
  };
  constexpr const char* kAuto = "\"auto\"";
  EXPECT_EQ(batch(kAuto, "", ""), std::pair(8u, 1u));
  EXPECT_EQ(batch("", kAuto, ""), std::pair(8u, 1u));
  EXPECT_EQ(batch(kAuto, "4", kAuto), std::pair(4u, 1u));
  EXPECT_EQ(batch(kAuto, kAuto, "16"), std::pair(8u, 16u));
  EXPECT_EQ(batch("32", kAuto, kAuto), std::pair(8u, 4u));
  EXPECT_EQ(batch("32", kAuto, "2"), std::pair(16u, 2u));
  EXPECT_EQ(batch("32", "4", kAuto), std::pair(4u, 8u));
  EXPECT_EQ(batch("12", kAuto, kAuto), std::pair(4u, 3u));  // 8 is no part of 12
  EXPECT_EQ(batch("3", kAuto, ""), std::pair(1u, 3u));
  EXPECT_THAT(refusal(R"({"gradient_accumulation_steps": "auto"})"), HasSubstr("neither train_batch_size nor"));
  EXPECT_THAT(refusal(R"({"train_batch_size": 10, "train_micro_batch_size_per_gpu": 4,
                          "gradient_accumulation_steps": "auto"})"),
              HasSubstr("10 is not 4"));
}

TEST(ConfigAuto, TheRateOfAScheduleIsTheOneThatIsWritten) {
  const auto peak = [](const std::string& lr, const std::string& type) {
    AutoValues values;
    values.total_steps = 100;
    return resolved(with(R"("optimizer": {"params": {)" + lr + R"(}}, "scheduler": {"type": ")" + type +
                         R"(", "params": {"warmup_max_lr": "auto")" +
                         (type == "WarmupDecayLR" ? R"(, "total_num_steps": "auto")" : "") + "}}"),
                    values)
        .schedule.warmup_max_lr;
  };
  EXPECT_EQ(peak(R"("lr": 3e-4)", "WarmupLR"), 3e-4);
  EXPECT_EQ(peak(R"("lr": 3e-4)", "WarmupDecayLR"), 3e-4);
  EXPECT_EQ(peak(R"("lr": "auto")", "WarmupDecayLR"), 5e-5);
  EXPECT_EQ(peak("", "WarmupDecayLR"), 5e-5);
}

// Missing it is 1e-3 in WarmupDecayLR, whatever the optimizer says, but null is the optimizer's rate.
TEST(ConfigAuto, ARateThatIsNullIsNotMissing) {
  const auto peak = [](const std::string& lr, const std::string& type, const std::string& rate) {
    return parse(with(R"("optimizer": {"params": {)" + lr + R"(}}, "scheduler": {"type": ")" + type +
                      R"(", "params": {"warmup_num_steps": 5)" + rate +
                      (type == "WarmupDecayLR" ? R"(, "total_num_steps": 9)" : "") + "}}"))
        .schedule.warmup_max_lr;
  };
  const std::string null = R"(, "warmup_max_lr": null)";
  EXPECT_EQ(peak(R"("lr": 0.5)", "WarmupDecayLR", null), 0.5);
  EXPECT_EQ(peak(R"("lr": 0.5)", "WarmupDecayLR", ""), 1e-3);
  EXPECT_EQ(peak("", "WarmupDecayLR", null), 1e-3);  // the optimizer's own default
  EXPECT_EQ(peak(R"("lr": 0.5)", "WarmupLR", null), 0.5);
}

TEST(ConfigAuto, BucketSizesFollowTheModelsWidthOrThePlan) {
  const std::string text = with(R"("zero_optimization": {"stage": 3, "reduce_bucket_size": "auto",
    "stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto"})");
  CapturedLog log;
  EXPECT_EQ(resolved(text).knobs.prefetch_bucket_size, std::nullopt);
  EXPECT_THAT(log.lines, ElementsAre("c.json: \"auto\" leaves it to the plan: "
                                     "zero_optimization.stage3_prefetch_bucket_size; "
                                     "zero_optimization.stage3_param_persistence_threshold",
                                     "c.json: known, but without effect here: zero_optimization.reduce_bucket_size"));
  log.lines.clear();
  AutoValues values;
  values.hidden_size = 1280;
  const Config c = resolved(text, values);
  EXPECT_EQ(c.knobs.prefetch_bucket_size, 1'474'560u);  // 0.9 × 1280²
  EXPECT_EQ(c.knobs.param_persistence_threshold, 12'800u);
  EXPECT_THAT(log.lines, ElementsAre("c.json: \"auto\" is: zero_optimization.stage3_prefetch_bucket_size 1474560; "
                                     "zero_optimization.stage3_param_persistence_threshold 12800",
                                     "c.json: known, but without effect here: zero_optimization.reduce_bucket_size"));
}

TEST(ConfigAuto, TheStepsOfARunMustBeKnownWhereAScheduleSpansThem) {
  const std::string decay =
      with(R"("scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto", "warmup_num_steps": 2}})");
  EXPECT_EQ(refusal(decay),
            "c.json:1:94: scheduler.params.total_num_steps: \"auto\", and how many steps the run has is not known "
            "here; say how many steps the run has, or write the number");
  try {  // among others, what to do about it is still the remedy
    resolved(with(R"("x": 1, "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}}, "y": 1)"),
             {});
    ADD_FAILURE() << "nothing was refused";
  } catch (const Error& error) {
    EXPECT_EQ(error.parts().remedy, Remedy::kSayStepsOrNumber);
    const std::string in_other_words = error.message_in("WORDS");
    EXPECT_THAT(in_other_words, ContainsRegex("unknown key \"x\".*\n.*\n.*\n.*not known here; WORDS\n.*\n.*\n.*\"y\""));
    EXPECT_EQ(std::string(error.what()).size() - in_other_words.size(),
              words_of(Remedy::kSayStepsOrNumber).size() - std::string("WORDS").size());
  }
  AutoValues values;
  values.total_steps = 9;
  EXPECT_EQ(resolved(decay, values).schedule.total_steps, 9u);
}

TEST(ConfigAuto, AccelerateLeavesItInStageAndDevices) {
  CapturedLog log;
  const Config c = resolved(with(R"("zero_optimization": {"stage": "auto", "offload_param": {"device": "auto",
    "nvme_path": "auto"}, "offload_optimizer": {"device": "cpu", "nvme_path": "auto"}})"));
  EXPECT_EQ(c.parameters, Placement::kHbm);
  EXPECT_EQ(c.states, Placement::kHost);  // which stage 0 would refuse
  EXPECT_THAT(c.nvme_paths, IsEmpty());
}

TEST(ConfigAuto, IsTakenWhereDeepSpeedTakesItAndNowhereElse) {
  AutoValues values;
  values.hidden_size = 64;
  values.total_steps = 5000;
  const CapturedLog log;
  for (const auto& table : {config_keys(), config_keys_without_effect()}) {
    for (const ConfigKey& key : table) {
      const bool word =
          key.kind == KeyKind::kText || key.kind == KeyKind::kSection ||
          (key.kind == KeyKind::kChoice && ("|" + std::string(key.allowed)).find("|auto") != std::string::npos);
      const bool in_group = key.path.starts_with("spillway.parameter_groups.");
      if ((word && !takes_auto(key)) || in_group) continue;
      std::string text = "\"auto\"", path(key.path);
      for (std::size_t dot; (dot = path.rfind('.')) != std::string::npos; path.resize(dot)) {
        text = "{\"" + path.substr(dot + 1) + "\": " + text + "}";
      }
      const std::string types(key.only_for.empty() ? "" : choices_of(key.only_for).front());
      if (key.path.starts_with("scheduler.params.")) {
        text.replace(0, 1, "{\"type\": \"" + (types.empty() ? "WarmupLR" : types) + "\", ");
      } else if (!types.empty()) {
        text.replace(0, 1, "{\"type\": \"" + types + "\", ");
      }
      text = "\"" + path + "\": " + text;
      const bool batch = key.path.starts_with("train_") || key.path.starts_with("gradient_acc");
      const std::string said =
          refusal(batch ? "{\"train_micro_batch_size_per_gpu\": 1, " + text + "}" : with(text), values);
      if (batch && key.path == "train_micro_batch_size_per_gpu") continue;
      const std::string needed = "needs scheduler.params.total_num_steps";
      if (takes_auto(key)) {
        EXPECT_TRUE(said == "accepted" || said.find(needed) != std::string::npos) << key.path << ": " << said;
      } else {
        EXPECT_TRUE(said.find(": expected ") != std::string::npos ||
                    said.find("is not known here") != std::string::npos)
            << key.path << ": " << said;
      }
    }
  }
}

}  // namespace
}  // namespace spillway
