// What a configuration says to each of several ranks: DeepSpeed's arithmetic with its world size.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstdint>
#include <functional>
#include <string>

#include "src/config/reader.h"
#include "src/config/table.h"
#include "tests/src/config/config_text.h"

namespace spillway {
namespace {

using ::testing::HasSubstr;

std::string batch_text(const std::array<std::uint64_t, 3>& batch, const std::string& more = "") {
  constexpr const char* kKeys[] = {"train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"};
  std::string text;
  for (std::size_t i = 0; i < batch.size(); ++i) {
    if (batch[i] > 0) text += (text.empty() ? "" : ", ") + fmt::format("\"{}\": {}", kKeys[i], batch[i]);
  }
  return "{" + text + more + "}";
}

// The only error's line, of that many ranks.
std::string refused_on(std::uint32_t ranks, const std::string& text) {
  try {
    config_from_json(text, "c.json", {}, ranks);
  } catch (const Error& error) {
    return errors_of(error.what());
  }
  return "accepted";
}

TEST(ConfigRanks, AnyOneOrTwoOfTheThreeSizesGiveTheRest) {
  for (const std::uint32_t ranks : {1u, 2u, 3u, 4u, 5u, 64u}) {
    for (const std::uint64_t micro : {1u, 3u, 8u}) {
      for (const std::uint64_t steps : {1u, 2u, 6u}) {
        const std::uint64_t all = micro * steps * ranks;
        using Sizes = std::array<std::uint64_t, 3>;
        for (const Sizes& given : {Sizes{all, micro, steps}, {all, micro, 0}, {all, 0, steps}, {0, micro, steps}}) {
          const std::string text = batch_text(given);
          SCOPED_TRACE(fmt::format("{} on {} ranks", text, ranks));
          const Config config = config_from_json(text, "c.json", {}, ranks);
          EXPECT_EQ(config.micro_batch, micro);
          EXPECT_EQ(config.gradient_accumulation, steps);
        }
      }
      const Config whole = config_from_json(batch_text({micro * ranks, 0, 0}), "c.json", {}, ranks);
      const Config own = config_from_json(batch_text({0, micro, 0}), "c.json", {}, ranks);
      for (const Config& config : {whole, own}) {
        EXPECT_EQ(config.micro_batch, micro);
        EXPECT_EQ(config.gradient_accumulation, 1u);
      }
    }
  }
}

TEST(ConfigRanks, ContradictionsNameTheNumberOfRanks) {
  EXPECT_EQ(refused_on(3, batch_text({8, 0, 0})),
            "c.json:1:22: train_batch_size: 8 is not 2 (micro batch) × 1 (accumulation) × 3 (ranks); it must be a "
            "multiple of 3");
  EXPECT_THAT(refused_on(2, batch_text({10, 2, 0})), HasSubstr("× 2 (ranks); it must be a multiple of 4"));
  EXPECT_THAT(refused_on(4, batch_text({8, 0, 4})),
              HasSubstr("8 is not 0 (micro batch) × 4 (accumulation) × 4 (ranks)"));
  EXPECT_THAT(refused_on(2, batch_text({16, 2, 8})),
              HasSubstr("16 is not 2 (micro batch) × 8 (accumulation) × 2 (ranks); gradient_accumulation_steps 4 keeps "
                        "the batch, on however many GPUs it was trained before"));
  EXPECT_THAT(refused_on(2, batch_text({9, 2, 2})), HasSubstr("8 would be; or leave one of the three out"));
  EXPECT_THAT(refused_on(3, batch_text({0, 65536, 65536})), HasSubstr("4294967296 rows a step of each of 3 ranks"));
  EXPECT_THAT(refused_on(UINT32_MAX, batch_text({0, 2, 1})), HasSubstr("2 rows a step of each of 4294967295 ranks"));
}

TEST(ConfigRanks, AutoIsTheTrainersMicroBatchAsFarAsItDividesARanksRows) {
  const auto batch = [](std::uint32_t ranks, const std::string& text) {
    const Config config = config_from_json(text, "c.json", {}, ranks);
    return std::pair(config.micro_batch, config.gradient_accumulation);
  };
  const CapturedLog log;
  const std::string automatic = R"("train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"})";
  EXPECT_EQ(batch(2, R"({"train_batch_size": 32, )" + automatic), std::pair(8u, 2u));
  EXPECT_EQ(batch(4, R"({"train_batch_size": 48, )" + automatic), std::pair(4u, 3u));
  EXPECT_EQ(batch(2, R"({"train_batch_size": "auto", )" + automatic), std::pair(8u, 1u));
  EXPECT_THAT(refused_on(5, R"({"train_batch_size": 4, )" + automatic),
              HasSubstr("× 5 (ranks); it must be a multiple"));
}

TEST(ConfigRanks, WhereNobodyTrainsRowsAndStepsAreNotAskedFor) {
  const CapturedLog log;
  const std::string decay =
      R"("scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto", "warmup_num_steps": 10}})";
  for (const std::string& text :
       {batch_text({8, 3, 1}), batch_text({0, 1, 1}, R"(, "spillway": {"sum_groups": 4})"), batch_text({0, 0, 2}),
        batch_text({0, 1, 1}, ", " + decay), std::string(R"({"train_batch_size": "auto"})")}) {
    const Config config = config_from_json(text, "c.json", {}, 0);
    EXPECT_EQ(std::pair(config.micro_batch, config.gradient_accumulation), std::pair(1u, 1u)) << text;
    EXPECT_EQ(config.schedule.kind, ScheduleKind::kConstant) << text;
  }
  EXPECT_THAT(log.lines, ::testing::IsEmpty());
  EXPECT_THAT(refused_on(0, batch_text({0, 1, 1}, R"(, "gradient_clipping": -1)")), HasSubstr("gradient_clipping"));
}

TEST(ConfigRanks, PartsOfAStepAreAMultipleOfTheRanks) {
  const auto with_groups = [](std::uint64_t steps, std::uint32_t groups) {
    return batch_text({0, 1, steps}, fmt::format(", \"spillway\": {{\"sum_groups\": {}}}", groups));
  };
  for (const auto& [ranks, steps] : {std::pair(1u, 8u), {2u, 4u}, {4u, 2u}, {8u, 1u}}) {
    for (const std::uint32_t groups : {1u, 2u, 4u, 8u}) {
      SCOPED_TRACE(fmt::format("{} groups on {} ranks", groups, ranks));
      const std::string text = with_groups(steps, groups);
      if (groups >= ranks) {
        EXPECT_EQ(config_from_json(text, "c.json", {}, ranks).sum_groups, groups);
      } else {
        EXPECT_THAT(refused_on(ranks, text),
                    HasSubstr(fmt::format("{} parts of 8 micro-batches a step (gradient_accumulation_steps {} × {} "
                                          "ranks), on {} ranks; take a power of two that divides 8 and is {} or a",
                                          groups, steps, ranks, ranks, ranks)));
      }
    }
  }
  EXPECT_THAT(refused_on(2, with_groups(4, 16)), HasSubstr("16 parts of 8 micro-batches"));
  EXPECT_THAT(refused_on(3, with_groups(4, 4)), HasSubstr("no power of two is a multiple of the ranks"));
  EXPECT_EQ(refused_on(3, batch_text({0, 1, 4})), "accepted") << "left out, any number of ranks has a part each";
  EXPECT_THAT(refused_on(1, with_groups(6, 4)), HasSubstr("4 parts of 6 micro-batches a step (gradient_accumulation_s"
                                                          "teps); take a power of two that divides them"));
}

TEST(ConfigRanks, SixteenBitsTravelWhereNoBitsArePromised) {
  const auto text = [](const std::string& type, const std::string& more = "") {
    return batch_text({0, 1, 4}, fmt::format(", \"communication_data_type\": {}{}", type, more));
  };
  const auto on_two = [&](const std::string& type) { return config_from_json(text(type), "c.json", {}, 2); };
  EXPECT_EQ(on_two("\"fp32\"").communication, DType::kFloat32);
  EXPECT_EQ(on_two("\"bf16\"").communication, DType::kBFloat16);
  EXPECT_EQ(on_two("\"fp16\"").communication, DType::kFloat16);
  EXPECT_EQ(on_two("null").communication, DType::kFloat32);
  EXPECT_THAT(refused_on(2, text("\"fp64\"")), HasSubstr("communication_data_type: the string \"fp64\""));
  const std::string groups = ", \"spillway\": {\"sum_groups\": 4}";
  EXPECT_THAT(refused_on(2, text("\"bf16\"", groups)),
              HasSubstr("communication_data_type: bf16 beside spillway.sum_groups, whose bits are the same on any "
                        "number of ranks; leave one of the two out"));
  EXPECT_EQ(refused_on(2, text("\"fp32\"", groups)), "accepted");
}

TEST(ConfigRanks, HaveValuesInCommonButForTheirOwnDrivesAndMemory) {
  const std::string common = values_of_all_ranks({});
  Config config;
  config.nvme_paths = {"/here"}, config.nvme_rates = {2}, config.io_engine = IoEngineKind::kThreads,
  config.io_depth = 1;
  config.host_bytes = config.hbm_bytes = config.nvme_bytes = 1, config.threads = 3, config.device = DeviceKind::kHost;
  config.knobs.max_live_parameters = config.knobs.max_in_cpu = 1, config.knobs.pipeline_read = false;
  EXPECT_EQ(values_of_all_ranks(config), common);
  const std::function<void(Config&)> changes[] = {
      [](Config& c) { c.micro_batch = 2; },
      [](Config& c) { c.gradient_accumulation = 2; },
      [](Config& c) { c.sum_groups = 2; },
      [](Config& c) { c.communication = DType::kBFloat16; },
      [](Config& c) { c.gradient_clipping = 0.5; },
      [](Config& c) { c.weights = DType::kBFloat16; },
      [](Config& c) { c.weights = DType::kFloat16; },
      [](Config& c) { c.optimizer.kind = OptimizerKind::kLion; },
      [](Config& c) { c.optimizer.learning_rate = std::nextafter(1e-3, 1); },
      [](Config& c) { c.optimizer.beta1 = 0.8; },
      [](Config& c) { c.optimizer.beta2 = 0.8; },
      [](Config& c) { c.optimizer.epsilon = 1; },
      [](Config& c) { c.optimizer.weight_decay = 1; },
      [](Config& c) { c.optimizer.decoupled_decay = false; },
      [](Config& c) { c.optimizer.bias_correction = false; },
      [](Config& c) { c.optimizer.momentum = 0.9; },
      [](Config& c) { c.optimizer.dampening = 0.9; },
      [](Config& c) { c.optimizer.nesterov = true; },
      [](Config& c) { c.optimizer.seed = 1; },
      [](Config& c) { c.no_decay = true; },
      [](Config& c) { c.parameter_groups = {{.parameters = {"*"}, .learning_rate = 1, .weight_decay = {}}}; },
      [](Config& c) { c.moments = MomentFormat::kInt8; },
      [](Config& c) { c.exact_states = {}; },
      [](Config& c) { c.tile_elements = 1024; },
      [](Config& c) { c.commit_every = 1; },
      [](Config& c) { c.states = Placement::kNvme; },
      [](Config& c) { c.parameters = Placement::kHost; },
      [](Config& c) { c.schedule.kind = ScheduleKind::kWarmup; },
      [](Config& c) { c.schedule.warmup_min_lr = 1; },
      [](Config& c) { c.schedule.warmup_max_lr = 1; },
      [](Config& c) { c.schedule.warmup_steps = 1; },
      [](Config& c) { c.schedule.total_steps = 1; },
      [](Config& c) { c.schedule.logarithmic_warmup = false; },
      [](Config& c) { c.schedule.warmup_min_ratio = 1; },
      [](Config& c) { c.schedule.cosine_min_ratio = 1; },
      [](Config& c) { c.loss_scale.fixed = 1; },
      [](Config& c) { c.loss_scale.initial_power = 1; },
      [](Config& c) { c.loss_scale.window = 1; },
      [](Config& c) { c.loss_scale.hysteresis = 1; },
      [](Config& c) { c.loss_scale.consecutive_hysteresis = true; },
      [](Config& c) { c.loss_scale.least = 2; },
      [](Config& c) { c.lora.alpha = 2; },
  };
  for (const auto& change : changes) {
    Config changed;
    change(changed);
    EXPECT_NE(values_of_all_ranks(changed), common) << "change " << &change - changes;
  }
}

TEST(ConfigRanks, TheWholeBatchIsShown) {
  const std::string text = batch_text({0, 3, 2});
  const ConfigText texts[] = {{text, "c.json"}};
  const EffectiveConfig effective = read_config(texts, {}, 4);
  EXPECT_EQ(effective.keys.at(0).key->path, "train_batch_size");
  EXPECT_EQ(effective.keys.at(0).value, "24");
}

}  // namespace
}  // namespace spillway
