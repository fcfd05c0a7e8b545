#include "src/comm/last_words.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace spillway {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

// Four ranks; collective 8, a barrier of block 5, fails.
class LastWords : public ::testing::Test {
 protected:
  LastWords() : own_(4), announced_(4) {
    for (Word& word : own_) {
      word.what = Word::What::kGaveUp;
      word.block = 5;
      word.number = 9;
      word.failed = 8;
    }
    for (Word& word : announced_) {
      word.block = 5;
      word.number = 8;
    }
  }
  std::string told(std::uint32_t by) const {
    std::vector<const Word*> last, announced;
    for (std::uint32_t rank = 0; rank < 4; ++rank) {
      last.push_back(silent_ >> rank & 1 ? nullptr : &own_[rank]);
      announced.push_back(absent_ >> rank & 1 ? nullptr : &announced_[rank]);
    }
    return error_of({.rank = by, .last_words = last, .announced = announced, .hosts = hosts_, .patience_seconds = 60})
        .what();
  }

  std::vector<std::string> hosts_{"n0", "n1", "n2", "n3"};
  std::vector<Word> own_, announced_;
  unsigned silent_ = 0, absent_ = 0;  // bits by rank
};

TEST_F(LastWords, ThoseThatDoNotAnswerAreNamed) {
  own_[0].reason = Word::Reason::kNoProgress;
  silent_ = 0b0100;
  EXPECT_EQ(
      told(0),
      "barrier of block 5 (collective 8): no progress in 60 s: rank 2 (n2) does not answer; look at what ended or "
      "stopped them, and at the network, and start all ranks again");
  EXPECT_EQ(told(1), told(0)) << "who was told tells the same";
  silent_ = 0b1100;
  EXPECT_THAT(told(0), HasSubstr("60 s: ranks 2 and 3 (n2, n3) do not answer; "));
  hosts_ = {"n0", "n0", "n1", "n1"};
  EXPECT_THAT(told(0), HasSubstr("60 s: ranks 2 and 3 (n1) do not answer; "));
  hosts_ = {"", "", "", ""};
  EXPECT_THAT(told(0), HasSubstr("60 s: ranks 2 and 3 do not answer; ")) << "at the opening";
}

TEST_F(LastWords, ThoseThatHaveNotComeAreNamedWithTheirLast) {
  own_[1].reason = Word::Reason::kNoProgress;
  own_[3].number = 8;
  EXPECT_THAT(told(1), HasSubstr("60 s: rank 3 has not come to it (its last one is 7); "));
  EXPECT_THAT(told(3), HasSubstr("60 s: rank 3, this one, has not come to it (its last one is 7); "));
  silent_ = 0b0001;
  EXPECT_THAT(told(1), HasSubstr("60 s: rank 0 (n0) does not answer; ")) << "for which rank 3 waits, too";
}

TEST_F(LastWords, WhoIsAtWorkIsNoneOfThoseThatAreMissed) {
  own_[1].reason = Word::Reason::kNoProgress;
  own_[0].number = own_[2].number = own_[3].number = 8;
  own_[0].at_work = own_[2].at_work = true;
  EXPECT_THAT(told(1), HasSubstr("60 s: rank 3 has not come to it (its last one is 7); ranks 0 and 2 are at work; "));
  own_[3].number = 9;
  own_[2].number = 9;
  EXPECT_THAT(told(2), HasSubstr("60 s: rank 0 is at work; ")) << "as it looks where a word comes late";
}

TEST_F(LastWords, WhenAllAnswerItIsTheData) {
  own_[1].reason = Word::Reason::kNoProgress;
  EXPECT_THAT(told(0), HasSubstr(": all ranks have entered it and answer, but its data does not arrive; "));
}

TEST_F(LastWords, WhoEndsIsNoDifference) {
  own_[2].reason = Word::Reason::kDiffer;
  announced_[2].kind = CollectiveKind::kAllReduce;
  announced_[2].block = -3;
  announced_[2].ending = true;
  EXPECT_EQ(
      told(0),
      "barrier of block 5 (collective 8): rank 2 (n2) ends before it; that rank's own messages say why; start all "
      "ranks again");
  EXPECT_EQ(told(2),
            "barrier of block 5 (collective 8): this rank ends before it; look at what ended it, and start all ranks "
            "again");
  announced_[0] = announced_[2];
  EXPECT_THAT(told(1), HasSubstr("barrier of block 5 (collective 8): ranks 0 and 2 (n0, n2) end before it; "));
  absent_ = 0b1010;
  announced_[0].fold = Fold::kMax;
  EXPECT_THAT(told(0), HasSubstr(": the ranks do not agree: ")) << "of the way in which they end";
}

TEST_F(LastWords, ADifferenceTellsMoreThanAMissingRank) {
  own_[0].reason = Word::Reason::kNoProgress;
  own_[2].reason = Word::Reason::kDiffer;
  announced_[1].kind = CollectiveKind::kAllGather;
  absent_ = 0b1000;
  EXPECT_THAT(told(3), HasSubstr("barrier of block 5 (collective 8): the ranks do not agree: ranks 0 and 2: barrier of "
                                 "block 5 (collective 8); rank 1: all_gather of block 5 (collective 8), "));
  EXPECT_THAT(told(3), HasSubstr("; rank 3 has not come to it; "));
}

TEST_F(LastWords, WhatALibrarySaidIsQuotedByAll) {
  own_[0].reason = Word::Reason::kNoProgress;
  own_[2].reason = Word::Reason::kLibrary;
  own_[2].set_text("rank 2: Open MPI v4.1.4: MPI_ERR_OTHER");
  EXPECT_THAT(told(0), HasSubstr("(collective 8): rank 2: Open MPI v4.1.4: MPI_ERR_OTHER; look at that rank"));
  EXPECT_THAT(told(0), Not(HasSubstr("progress")));
}

TEST(LostAtTheEnd, ThoseThatDoNotAnswerAreNamed) {
  const std::vector<std::string> hosts{"n0", "n0", "n1", "n1"};
  const std::vector<std::uint32_t> silent{2, 3};
  EXPECT_EQ(
      lost_at_the_end(silent, hosts, 60),
      "communicator: as this rank leaves, ranks 2 and 3 (n1) do not answer in 60 s; look at what ended or stopped "
      "them, and at the network");
}

}  // namespace
}  // namespace spillway
