// What fails on one rank fails on all, with the words of the lowest that failed.
#include "src/comm/agreement.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cerrno>
#include <stdexcept>
#include <string>
#include <vector>

#include "tests/error_of.h"
#include "tests/src/comm/thread_ranks.h"

namespace spillway {
namespace {

using testing::error_of;
using testing::run_ranks;

TEST(Agreement, OfOneRankIsWithItself) {
  Agreement agreement(nullptr);
  EXPECT_TRUE(agreement.alone());
  EXPECT_EQ(agreement.gather(7), std::vector<std::uint64_t>{7});
  std::uint64_t value[1] = {3};
  agreement.fold(value, Fold::kMax);
  EXPECT_EQ(value[0], 3u);
  EXPECT_THROW(agreement.all([] { throw std::logic_error("as it is"); }), std::logic_error);
}

TEST(Agreement, IsReachedWhereNothingFails) {
  run_ranks(3, [](Communicator& communicator) {
    Agreement agreement(&communicator);
    int done = 0;
    agreement.all([&] { ++done; });
    EXPECT_EQ(done, 1);
    EXPECT_EQ(agreement.rank().count, 3u);
    EXPECT_EQ(agreement.gather(10 + agreement.rank().index), (std::vector<std::uint64_t>{10, 11, 12}));
    std::vector<std::uint64_t> values(20, agreement.rank().index);  // more than one call takes
    agreement.fold(std::span(values), Fold::kMax);
    EXPECT_EQ(values, std::vector<std::uint64_t>(20, 2));
    std::vector<double> seconds(1, agreement.rank().index == 1 ? 0.5 : 0.25);
    agreement.fold(std::span(seconds), Fold::kMax);
    EXPECT_EQ(seconds[0], 0.5);
  });
}

TEST(Agreement, FailsEverywhereWithAllThatTheErrorSays) {
  run_ranks(3, [](Communicator& communicator) {
    Agreement agreement(&communicator);
    const auto fails_on = [&](std::uint32_t least) {
      return error_of([&] {
        agreement.all([&] {
          if (agreement.rank().index < least) return;
          throw Error(Code::kDoesNotFit, {"path" + std::to_string(agreement.rank().index),
                                          "is full",
                                          ENOSPC,
                                          "free some",
                                          Remedy::kReplace,
                                          {"a", ""},
                                          "\nmore"});
        });
      });
    };
    const Error of_all = fails_on(0), of_some = fails_on(1), of_last = fails_on(2);
    EXPECT_EQ(of_all.parts().object, "path0");
    EXPECT_EQ(of_some.parts().object, "rank 1: path1");
    EXPECT_STREQ(of_last.what(), "rank 2: path2: is full (No space left on device); free some\nmore");
    EXPECT_EQ(of_last.code(), Code::kDoesNotFit);
    EXPECT_EQ(of_last.parts().remedy, Remedy::kReplace);
    EXPECT_EQ(of_last.parts().values, (std::vector<std::string>{"a", ""}));
    agreement.all([] {});  // and goes on
  });
}

TEST(Agreement, TakesAnyExceptionForAFailure) {
  run_ranks(2, [](Communicator& communicator) {
    Agreement agreement(&communicator);
    const Error error = error_of([&] {
      agreement.all([&] {
        if (agreement.rank().index == 1) throw std::bad_alloc();
      });
    });
    EXPECT_STREQ(error.what(), "rank 1: rank: std::bad_alloc");
  });
}

}  // namespace
}  // namespace spillway
