// What several ranks agree on, as threads of this process.
#include "tools/finetune/ranks.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <new>
#include <set>
#include <string>
#include <vector>

#include "spillway/error.h"
#include "tests/error_of.h"
#include "tests/src/comm/thread_ranks.h"

namespace spillway::models::finetune {
namespace {

using spillway::testing::error_of;
using spillway::testing::run_ranks;
using ::testing::HasSubstr;

TEST(Ranks, RowsOfAStepAreTheSameHoweverManyShareThem) {
  constexpr std::uint64_t kRows = 48;
  for (const std::uint32_t ranks : {1u, 2u, 3u, 4u, 8u}) {
    std::uint64_t next = 0;
    for (std::uint32_t rank = 0; rank < ranks; ++rank) {
      EXPECT_EQ(first_row_of_rank(kRows / ranks, rank), next);
      next += kRows / ranks;
    }
    EXPECT_EQ(next, kRows);
  }
}

TEST(Ranks, EachHasADirectoryOfItsOwn) {
  EXPECT_EQ(path_of_rank("/mnt/nvme", 0, 1), "/mnt/nvme");
  EXPECT_EQ(path_of_rank("/mnt/nvme", 0, 2), "/mnt/nvme/rank0");
  EXPECT_EQ(path_of_rank("/mnt/nvme/", 11, 12), "/mnt/nvme/rank11");
}

TEST(Ranks, OneAloneAgreesWithItself) {
  const auto communicator = make_communicator("self");
  Ranks ranks(*communicator);
  EXPECT_TRUE(ranks.alone() && ranks.first());
  EXPECT_EQ(ranks.together([] {}, 7), 7u);
  EXPECT_THROW(ranks.together([] { throw std::bad_alloc(); }), std::bad_alloc);
  const Subject subjects[] = {{"--data", "something"}};
  ranks.agree(subjects);
}

TEST(Ranks, WhatFailsOnOneFailsOnAllWithTheLowestOnesWords) {
  run_ranks(4, [](Communicator& communicator) {
    Ranks ranks(communicator);
    EXPECT_EQ(ranks.together([] {}, ranks.rank() * 3), 9u);
    const Error error = error_of([&] {
      ranks.together([&] {
        if (ranks.rank() < 2) return;
        throw Error(Code::kNotFound,
                    {"/data/" + std::to_string(ranks.rank()), std::string(300, 'x'), 2, "look for it"});
      });
    });
    EXPECT_EQ(error.code(), Code::kNotFound);
    EXPECT_EQ(error.what(), "rank 2: /data/2: " + std::string(300, 'x') + " (No such file or directory); look for it");
    EXPECT_EQ(ranks.together([] {}, 1), 1u) << "they go on";
  });
}

TEST(Ranks, TheFirstOnesErrorIsAsItIsAlone) {
  run_ranks(2, [](Communicator& communicator) {
    Ranks ranks(communicator);
    const auto fail = [&] {
      ranks.together([&] {
        if (ranks.first()) throw Error(Code::kIo, {"disk", "is full", 0, "", Remedy::kNone, {}, "\nmore"});
        throw std::bad_alloc();
      });
    };
    const std::string said = error_of(fail).what();
    EXPECT_EQ(said, ranks.first() ? "disk: is full\nmore" : "rank 0: disk: is full\nmore");
    EXPECT_TRUE(ranks.all_have_failed());
  });
}

TEST(Ranks, WhatTheyAreGivenDifferentlyIsNamedWithBothSides) {
  run_ranks(3, [](Communicator& communicator) {
    Ranks ranks(communicator);
    const std::string rows(200, 'r');
    const Subject alike[] = {{"--steps", "10"}, {"--data", rows}, {"--out", ""}};
    ranks.agree(alike);
    EXPECT_TRUE(ranks.all_say(rows));
    const Subject others[] = {{"--steps", "10"}, {"--data", ranks.rank() == 0 ? rows : rows + "s"}};
    const Error error = error_of([&] { ranks.agree(others); });
    EXPECT_EQ(error.code(), Code::kInvalidArgument);
    EXPECT_EQ(error.what(), "--data: " + rows + " on rank 0, " + rows +
                                "s on rank 1; start all ranks with the same command, on the same files");
    const Subject last[] = {{"--resume", ranks.rank() == 2 ? "given" : "not given"}};
    EXPECT_THAT(error_of([&] { ranks.agree(last); }).what(), HasSubstr("not given on rank 0, given on rank 2"));
    EXPECT_EQ(ranks.text_of(1, "I am " + std::to_string(ranks.rank())), "I am 1");
    EXPECT_EQ(ranks.text_of(2, ""), "");
  });
}

TEST(Ranks, OneThatEndsByItselfIsNotWaitedFor) {
  std::atomic<int> alone = 0;
  ThreadHub hub(2);
  spillway::testing::run_ranks_on(hub, 2, {}, 60, [&](Communicator& communicator) {
    Ranks ranks(communicator);
    if (ranks.rank() == 1) {
      alone += !ranks.all_have_failed();
      return;
    }
    EXPECT_THAT(error_of([&] { ranks.together([] {}); }).what(), HasSubstr("rank 1 (host1) ends before it; "));
    alone += !ranks.all_have_failed();
  });
  EXPECT_EQ(alone, 2);
}

}  // namespace
}  // namespace spillway::models::finetune
