// What a configuration says to each of several ranks: DeepSpeed's arithmetic with its world size.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <string>

#include "src/config/reader.h"
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

TEST(ConfigRanks, TheWholeBatchIsShown) {
  const std::string text = batch_text({0, 3, 2});
  const ConfigText texts[] = {{text, "c.json"}};
  const EffectiveConfig effective = read_config(texts, {}, 4);
  EXPECT_EQ(effective.keys.at(0).key->path, "train_batch_size");
  EXPECT_EQ(effective.keys.at(0).value, "24");
}

}  // namespace
}  // namespace spillway
