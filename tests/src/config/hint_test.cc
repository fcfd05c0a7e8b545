#include "src/config/hint.h"

#include <gtest/gtest.h>

#include "src/config/table.h"

namespace spillway {
namespace {

TEST(ConfigHint, PrefersWhatIsCertainToWhatIsNear) {
  EXPECT_EQ(hint_for_unknown("", "Optimizer"), "closest key: optimizer");
  EXPECT_EQ(hint_for_unknown("", "learning_rate"), "closest key: optimizer.params.lr");
  EXPECT_EQ(hint_for_unknown("", "max-grad-norm"), "closest key: gradient_clipping, at the top");
  EXPECT_EQ(hint_for_unknown("zero_optimization", "aio"), "closest key: aio, at the top");
  EXPECT_EQ(hint_for_unknown("aio", "Stage"), "closest key: zero_optimization.stage");
  EXPECT_EQ(hint_for_unknown("", "f16"), "closest key: fp16");
  EXPECT_EQ(hint_for_unknown("", "b16"), "closest key: bf16");
  EXPECT_EQ(hint_for_unknown("aio", "stage3_max_live_parameter"),
            "closest key: zero_optimization.stage3_max_live_parameters");
}

TEST(ConfigHint, NamesTheNearestSectionFirstWhereAKeyStandsInSeveral) {
  EXPECT_EQ(hint_for_unknown("zero_optimization", "nvme_path"),
            "closest key: zero_optimization.offload_optimizer.nvme_path, or zero_optimization.offload_param.nvme_path");
}

TEST(ConfigHint, NamesOlderWordsWhereThereAreNoOthers) {
  EXPECT_EQ(hint_for_unknown("aio", "enabled"), "closest key: bf16.enabled, or fp16.enabled");
  EXPECT_EQ(hint_for_unknown("", "cpu_offload"), "closest key: zero_optimization.cpu_offload");
}

TEST(ConfigHint, NamesNothingThatWasNotMeant) {
  EXPECT_EQ(hint_for_unknown("aio", "xyz"), "known keys: block_size, queue_depth");
  EXPECT_EQ(closest_path("qwertyuiop"), "");
  EXPECT_EQ(closest_path("gas2"), "");
}

TEST(ConfigHint, FindsAPathFromItsEndOrItsNeighbourhood) {
  EXPECT_EQ(closest_path("offload_param.device"), "zero_optimization.offload_param.device");
  EXPECT_EQ(closest_path("zero_optimisation.stage"), "zero_optimization.stage");
  EXPECT_EQ(closest_path("quue_depth"), "aio.queue_depth");
}

// Every key of the table, with each of its letters left out in turn.
TEST(ConfigHint, EveryKeyIsFoundWithoutAnyOfItsLetters) {
  int all = 0, found = 0;
  for (const auto& table : {config_keys(), config_keys_without_effect()}) {
    for (const ConfigKey& key : table) {
      const std::string leaf(leaf_of(key.path)), section(parent_of(key.path));
      for (std::size_t i = 0; leaf.size() > 2 && i < leaf.size(); ++i) {
        const std::string typo = std::string(leaf).erase(i, 1);
        if (find_config_key((section.empty() ? "" : section + ".") + typo) != nullptr) continue;
        ++all;
        found += hint_for_unknown(section, typo) == "closest key: " + leaf;
      }
    }
  }
  EXPECT_GT(all, 2'500);
  EXPECT_GE(found, all * 0.99) << found << " of " << all;
}

}  // namespace
}  // namespace spillway
