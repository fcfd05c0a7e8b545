// The ends of communicators: what each rank is told.
#include <gmock/gmock.h>

#include <chrono>
#include <thread>

#include "spillway/error.h"
#include "src/comm/word.h"
#include "tests/src/comm/communicator_suite.h"

namespace spillway {

std::string end_of(Member& member) {
  try {
    for (int i = 0;; ++i) {
      member.comm.barrier(i, *member.a);
      member.wait_idle();
    }
  } catch (const Error& error) {
    return error.what();
  }
}

std::string CommunicatorFailures::ending(Member& member) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (std::chrono::steady_clock::now() < end) {
    try {
      member.comm.throw_if_failed();
    } catch (const Error& error) {
      for (int i = 0; i < 2; ++i) {
        try {
          member.comm.barrier(0, *member.a);
          ADD_FAILURE() << "a call after the end is refused";
        } catch (const Error& again) {
          EXPECT_STREQ(again.what(), error.what());
          EXPECT_EQ(again.code(), error.code());
        }
      }
      member.a->synchronize();  // streams go on
      member.b->synchronize();
      return error.what();
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  ADD_FAILURE() << "rank " << member.rank << " was told nothing";
  return {};
}

void CommunicatorFailures::expect_ending(const std::function<void(Member&)>& call,
                                         const std::function<void(Member&, std::string)>& expect,
                                         const RanksOptions& options) {
  run(
      [&](Member& member) {
        try {
          call(member);
        } catch (const Error&) {  // it had ended before
        }
        expect(member, ending(member));
      },
      options);
}

namespace {

GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(CommunicatorFailures);

using ::testing::AllOf;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;
using Slices = std::vector<std::uint64_t>;

// Of all ranks but the last.
std::string others(std::uint32_t ranks) {
  std::vector<std::uint32_t> them;
  for (std::uint32_t rank = 0; rank + 1 < ranks; ++rank) them.push_back(rank);
  return ranks_text(them);
}

struct Difference {
  std::function<void(Member&)> all, last;  // what all but the last rank call, and what that calls
  std::string all_say, last_says;
};

TEST_P(CommunicatorFailures, EveryRankIsToldWhoseCallDiffers) {
  const auto gather = [](std::int32_t block, std::uint64_t first, std::uint64_t last) {
    return [=](Member& member) {
      Slices slices(member.ranks, 8);
      slices.front() = first;
      slices.back() = last;
      std::uint64_t total = 0;
      for (const std::uint64_t slice : slices) total += slice;
      member.comm.all_gather(member.hbm<std::byte>(0, total), slices, block, *member.a);
    };
  };
  const auto scatter = [](Sums sums, DType wire = DType::kFloat32) {
    return [=](Member& member) {
      member.comm.reduce_scatter(member.hbm<float>(0, member.ranks), Slices(member.ranks, 4), sums, 4, *member.a, wire);
    };
  };
  const auto reduce = [](auto value, std::size_t count, Fold fold) {
    return [=](Member& member) {
      std::vector<decltype(value)> values(count, value);
      member.comm.all_reduce(std::span(values), fold, 4, *member.a);
      member.a->synchronize();
    };
  };
  const auto broadcast = [](std::uint32_t root, std::size_t bytes) {
    return [=](Member& member) { member.comm.broadcast(member.hbm<std::byte>(0, bytes), root, 4, *member.a); };
  };
  const auto barrier = [](std::int32_t block) {
    return [=](Member& member) { member.comm.barrier(block, *member.a); };
  };
  const Difference differences[] = {
      {gather(5, 8, 8), barrier(5), "all_gather of block 5 " + collective(2) + ", ",
       "barrier of block 5 " + collective(2)},
      {gather(5, 8, 8), gather(6, 8, 8), "all_gather of block 5 ", "all_gather of block 6 "},
      {gather(5, 8, 8), gather(5, 8, 9), " bytes cut into 8 ", " + 9"},
      {gather(5, 8, 8), gather(5, 9, 7), " bytes cut into 8 + ", " bytes cut into 9 + "},
      {scatter(Sums::kTree), scatter(Sums::kFastest), "in a tree", "fastest"},
      {scatter(Sums::kTree, DType::kBFloat16), scatter(Sums::kTree, DType::kFloat16), "tree, in bf16", "tree, in fp16"},
      {reduce(1.0, 2, Fold::kMax), reduce(1.0, 2, Fold::kMin), "max of 2 doubles", "min of 2 doubles"},
      {reduce(1.0, 2, Fold::kMax), reduce(1.0, 3, Fold::kMax), "max of 2 doubles", "max of 3 doubles"},
      {reduce(1.0, 1, Fold::kMax), reduce(std::uint64_t{1}, 1, Fold::kMax), "max of 1 doubles", "max of 1 integers"},
      {broadcast(0, 9), broadcast(1, 9), "9 bytes of rank 0", "9 bytes of rank 1"},
      {broadcast(0, 9), broadcast(0, 10), "9 bytes of rank 0", "10 bytes of rank 0"},
  };
  for (const Difference& difference : differences) {
    expect_ending(
        [&](Member& member) {
          member.comm.barrier(0, *member.a);
          (member.rank == last() ? difference.last : difference.all)(member);
        },
        [&](Member&, const std::string& text) {
          EXPECT_THAT(text,
                      AllOf(HasSubstr(" of block "), HasSubstr(" " + collective(2) + ": the ranks do not agree: "),
                            HasSubstr(others(ranks()) + ": "), HasSubstr(difference.all_say),
                            HasSubstr("; rank " + std::to_string(last()) + ": "), HasSubstr(difference.last_says),
                            EndsWith("; run the same program with the same configuration, model and data on "
                                     "every rank")));
        });
  }
}

TEST_P(CommunicatorFailures, TwoCallsInAnotherOrderAreNamed) {
  expect_ending(
      [&](Member& member) {
        const bool turned = member.rank == last();
        member.comm.barrier(turned ? 2 : 1, *member.a);
        member.comm.barrier(turned ? 1 : 2, *member.a);
      },
      [&](Member&, const std::string& text) {
        EXPECT_THAT(text, AllOf(HasSubstr(others(ranks()) + ": barrier of block 1 " + collective(1)),
                                HasSubstr("rank " + std::to_string(last()) + ": barrier of block 2 " + collective(1))));
      });
}

TEST_P(CommunicatorFailures, ARankThatLeavesIsNamed) {
  run([&](Member& member) {
    member.comm.barrier(1, *member.a);
    member.comm.barrier(2, *member.a);
    member.a->synchronize();  // what comes after it may have failed already
    if (member.rank == last()) return;
    try {
      member.comm.barrier(3, *member.a);
    } catch (const Error&) {  // another was first to see it
    }
    EXPECT_THAT(ending(member),
                AllOf(StartsWith("barrier of block 3 " + collective(3) + ": rank " + std::to_string(last())),
                      HasSubstr(" has left after " + number(2) + " collectives; ")));
  });
}

TEST_P(CommunicatorFailures, ARankThatDoesNotComeIsNamedOnEveryRank) {
  expect_ending(
      [&](Member& member) {
        member.comm.barrier(1, *member.a);
        member.a->synchronize();
        if (member.rank != last()) member.comm.broadcast(member.hbm<std::byte>(0, 4), 0, 2, *member.a);
      },
      [&](Member& member, const std::string& text) {
        const std::string self = member.rank == last() ? ", this one," : "";
        EXPECT_THAT(text, StartsWith("broadcast of block 2 " + collective(2) + ": no progress in 1.5 s: rank " +
                                     std::to_string(last()) + self + " has not come to it (its last one is " +
                                     number(1) + "); "));
      },
      {.patience_seconds = 1.5});
}

TEST_P(CommunicatorFailures, WhatWasInFlightElsewhereStillEnds) {
  expect_ending(
      [&](Member& member) {
        member.comm.barrier(1, *member.a);
        const auto event = member.device->create_event();
        for (int i = 0; i < 20; ++i) {
          member.comm.all_gather(member.hbm<std::byte>(0, 8 * ranks()), Slices(ranks(), 8),
                                 member.rank == last() && i == 11 ? 99 : i, i % 2 ? *member.a : *member.b);
        }
        member.device->record(*event, *member.a);
        member.device->synchronize(*event);
      },
      [&](Member&, const std::string& text) {
        EXPECT_THAT(text, AllOf(HasSubstr("all_gather of block 11 " + collective(13)), HasSubstr("of block 99 "),
                                Not(HasSubstr("of block 12 "))));
      });
}

TEST_P(CommunicatorFailures, PatienceIsWhatARankWaitsForOthers) {
  run(
      [&](Member& member) {
        member.comm.barrier(1, *member.a);
        member.wait_idle();
        std::this_thread::sleep_for(std::chrono::milliseconds(1700));  // computes
        member.comm.barrier(2, *member.a);
        member.wait_idle();
      },
      {.patience_seconds = 1.5});
}

TEST_P(CommunicatorFailures, ARankThatEndsIsNamedAndNoDifference) {
  expect_ending(
      [&](Member& member) {
        member.comm.note_ending(true);
        member.comm.barrier(1, *member.a);  // all come to it, and whoever goes on after an end may
        member.comm.note_ending(member.rank == last());
        member.comm.barrier(2, *member.a);
        member.a->synchronize();
        if (member.rank != last()) return member.comm.broadcast(member.hbm<std::byte>(0, 4), 0, 5, *member.a);
        std::uint64_t value[] = {1};
        member.comm.all_reduce(std::span(value), Fold::kMin, -1, *member.a);
        member.a->synchronize();
      },
      [&](Member& member, const std::string& text) {
        const std::string who = member.rank == last() ? "this rank" : "rank " + std::to_string(last());
        EXPECT_THAT(text, AllOf(StartsWith("broadcast of block 5 " + collective(3) + ": " + who),
                                HasSubstr(" ends before it; "), HasSubstr("start all ranks again")));
      });
}

// Does what others wait for, and says so as it goes on.
void work(Member& member, double seconds) {
  using Clock = std::chrono::steady_clock;
  const auto end = Clock::now() + std::chrono::duration<double>(seconds);
  while (Clock::now() < end) {
    member.comm.note_work();
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
}

TEST_P(CommunicatorFailures, ARankAtWorkIsWaitedFor) {
  run(
      [&](Member& member) {
        member.comm.barrier(1, *member.a);
        member.wait_idle();
        if (member.rank == last()) work(member, 2.2);
        std::uint64_t sum[] = {1};
        member.comm.all_reduce(std::span(sum), Fold::kSum, 2, *member.a);
        member.wait_idle();
        EXPECT_EQ(sum[0], ranks());
        if (member.rank == 0) work(member, 2.2);
        member.comm.broadcast(member.hbm<std::byte>(0, 4), 0, 3, *member.a);
        member.wait_idle();
      },
      {.patience_seconds = 1.5});
}

TEST_P(CommunicatorFailures, ARankWhoseWorkStandsStillIsNamed) {
  expect_ending(
      [&](Member& member) {
        member.comm.barrier(1, *member.a);
        member.a->synchronize();
        if (member.rank == last()) return work(member, 0.5);
        member.comm.broadcast(member.hbm<std::byte>(0, 4), 0, 2, *member.a);
      },
      [&](Member& member, const std::string& text) {
        const std::string self = member.rank == last() ? ", this one," : "";
        EXPECT_THAT(text, StartsWith("broadcast of block 2 " + collective(2) + ": no progress in 1.5 s: rank " +
                                     std::to_string(last()) + self + " has not come to it (its last one is " +
                                     number(1) + "); "));
      },
      {.patience_seconds = 1.5});
}

TEST_P(CommunicatorFailures, ARankAtWorkHidesNoneThatDoesNotCome) {
  if (ranks() < 3) GTEST_SKIP() << "one works, one waits, and one does not come";
  expect_ending(
      [&](Member& member) {
        member.comm.barrier(1, *member.a);
        member.a->synchronize();
        if (member.rank == last()) return;
        if (member.rank > 0) {
          for (;;) {
            work(member, 0.1);
            member.comm.throw_if_failed();
          }
        }
        member.comm.broadcast(member.hbm<std::byte>(0, 4), 0, 2, *member.a);
      },
      [&](Member& member, const std::string& text) {
        const std::string self = member.rank == last() ? ", this one," : "";
        const std::string them = ranks() == 3 ? "; rank 1 is at work; " : " are at work; ";
        EXPECT_THAT(text, AllOf(HasSubstr("no progress in 1.5 s: rank " + std::to_string(last()) + self +
                                          " has not come to it (its last one is " + number(1) + "); "),
                                HasSubstr(them)));
      },
      {.patience_seconds = 1.5});
}

// A rank that waits is not at work, whatever it says.
TEST_P(CommunicatorFailures, WorkThatIsNotedWhileOneWaitsChangesNothing) {
  expect_ending(
      [&](Member& member) {
        member.comm.barrier(1, *member.a);
        member.a->synchronize();
        if (member.rank == last()) return;
        member.comm.broadcast(member.hbm<std::byte>(0, 4), 0, 2, *member.a);
        for (;;) {
          work(member, 0.1);
          member.comm.throw_if_failed();
        }
      },
      [&](Member& member, const std::string& text) {
        const std::string self = member.rank == last() ? ", this one," : "";
        EXPECT_THAT(text, HasSubstr("no progress in 1.5 s: rank " + std::to_string(last()) + self +
                                    " has not come to it (its last one is " + number(1) + "); "));
      },
      {.patience_seconds = 1.5});
}

}  // namespace
}  // namespace spillway
