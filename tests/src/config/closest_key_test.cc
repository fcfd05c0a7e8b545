#include "src/config/closest_key.h"

#include <gtest/gtest.h>

#include <array>
#include <string>

namespace spillway {
namespace {

TEST(EditDistance, CountsInsertionsDeletionsSubstitutionsAndSwaps) {
  EXPECT_EQ(edit_distance("", ""), 0u);
  EXPECT_EQ(edit_distance("abc", ""), 3u);
  EXPECT_EQ(edit_distance("", "ab"), 2u);
  EXPECT_EQ(edit_distance("kitten", "sitting"), 3u);
  EXPECT_EQ(edit_distance("stgae", "stage"), 1u);  // neighbours swapped
  EXPECT_EQ(edit_distance("flaw", "lawn"), 2u);
}

TEST(Closest, FindsAMisspellingAndNothingElse) {
  constexpr std::array<std::string_view, 4> kWords = {"lr", "betas", "weight_decay", "block_size"};
  EXPECT_EQ(closest("wieght_decay", kWords), "weight_decay");
  EXPECT_EQ(closest("Block_Size", kWords), "block_size");
  EXPECT_EQ(closest("beta", kWords), "betas");
  EXPECT_EQ(closest("momentum", kWords), "");
  EXPECT_EQ(closest("f16", std::array<std::string_view, 3>{"bf16", "fp16", "rf16"}), "fp16");
  EXPECT_EQ(closest("xy", kWords), "");  // as far from "lr" as it is long
  EXPECT_EQ(closest(std::string(1'000'000, 'x'), kWords), "");
}

}  // namespace
}  // namespace spillway
