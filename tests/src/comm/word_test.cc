#include "src/comm/word.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>

namespace spillway {
namespace {

using Ranks = std::vector<std::uint32_t>;

TEST(RanksText, NamesRunsByTheirEnds) {
  EXPECT_EQ(ranks_text(Ranks{3}), "rank 3");
  EXPECT_EQ(ranks_text(Ranks{0, 1}), "ranks 0 and 1");
  EXPECT_EQ(ranks_text(Ranks{0, 1, 2, 3, 5}), "ranks 0 to 3 and 5");
  EXPECT_EQ(ranks_text(Ranks{0, 2, 4, 5, 6, 9, 10}), "ranks 0, 2, 4 to 6, 9 and 10");
}

TEST(Word, ATextIsCutToItsPlace) {
  Word word;
  word.set_text("short");
  EXPECT_EQ(word.text(), "short");
  word.set_text(std::string(1'000, 'x'));
  EXPECT_EQ(word.text(), std::string(kMostScalars * 8 - 1, 'x'));
}

TEST(Word, SlicesBeyondThoseThatItCarriesAreCompared) {
  std::vector<std::uint64_t> slices(40);
  std::iota(slices.begin(), slices.end(), 1);
  const std::vector<std::byte> data(820);
  const Collective call{.kind = CollectiveKind::kAllGather,
                        .block = 2,
                        .data = std::span(const_cast<std::byte*>(data.data()), data.size()),
                        .slices = slices};
  const Word a = word_of(call, 3);
  std::swap(slices[30], slices[31]);
  const Word b = word_of(call, 3);
  EXPECT_FALSE(same_collective(a, b));
  const Word* both[] = {&a, &b, &b, nullptr};
  const std::string text = differences(both);
  EXPECT_THAT(text,
              ::testing::AllOf(::testing::HasSubstr("rank 0: all_gather of block 2 (collective 3), 820 bytes cut"),
                               ::testing::HasSubstr("; ranks 1 and 2: all_gather of block 2 (collective 3)"),
                               ::testing::Not(::testing::HasSubstr("rank 3"))));
  const std::size_t second = text.find("; ranks 1");
  EXPECT_NE(text.substr(text.find(": "), second - text.find(": ")), text.substr(text.find(": ", second)));
}

TEST(Word, ValuesOfAnAllReduceMayDiffer) {
  std::uint64_t one = 1, two = 2;
  Collective call{.kind = CollectiveKind::kAllReduce, .data = std::as_writable_bytes(std::span(&one, 1))};
  const Word a = word_of(call, 3);
  call.data = std::as_writable_bytes(std::span(&two, 1));
  EXPECT_TRUE(same_collective(a, word_of(call, 3)));
  EXPECT_FALSE(same_collective(a, word_of(call, 4)));
}

TEST(Word, OfAnotherVersionIsSaidToBe) {
  Word a, b;
  b.magic ^= 1;
  const Word* both[] = {&a, &b};
  EXPECT_FALSE(same_collective(a, b));
  EXPECT_THAT(differences(both), ::testing::HasSubstr("rank 1: another version of Spillway"));
}

}  // namespace
}  // namespace spillway
