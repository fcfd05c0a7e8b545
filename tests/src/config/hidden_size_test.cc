#include "src/config/hidden_size.h"

#include <gtest/gtest.h>

#include "tests/src/model_directory.h"

namespace spillway {
namespace {

TEST(HiddenSize, IsFoundUnderTheNamesThatFamiliesGiveIt) {
  EXPECT_EQ(hidden_size_of(R"({"model_type": "llama", "hidden_size": 4096})"), 4096u);
  EXPECT_EQ(hidden_size_of(R"({"model_type": "gpt2", "n_embd": 768})"), 768u);
  EXPECT_EQ(hidden_size_of(R"({"model_type": "t5", "d_model": 512})"), 512u);
  EXPECT_EQ(hidden_size_of(R"({"hidden_sizes": [64, 256, 128]})"), 256u);
  EXPECT_EQ(hidden_size_of(R"({"model_type": "gemma3", "text_config": {"hidden_size": 2560}})"), 2560u);
}

TEST(HiddenSize, IsNothingWhereThereIsNone) {
  for (const char* text : {"", "[]", "{}", "{", R"({"hidden_size": "768"})", R"({"hidden_size": 0})",
                           R"({"hidden_size": 1e9})", R"({"hidden_size": 7.5})", R"({"hidden_sizes": 7})",
                           R"({"text_config": 7})", R"({"hidden_sizes": [18446744073709551615]})"}) {
    EXPECT_EQ(hidden_size_of(text), std::nullopt) << text;
  }
}

using HiddenSizeIn = ModelDirectory;

TEST_F(HiddenSizeIn, ADirectoryThatIsNoModelHasNone) {
  EXPECT_EQ(hidden_size_in(directory_), std::nullopt);
  write_file("config.json", R"({"n_embd": 72})");
  EXPECT_EQ(hidden_size_in(directory_), 72u);
  EXPECT_EQ(hidden_size_in(directory_ / "none"), std::nullopt);
}

}  // namespace
}  // namespace spillway
