// The behaviour suite on one rank, and on ranks that are threads of this process; and what a silent rank does there.
#include "spillway/communicator.h"
#include "kernels/cuda/loader.h"
#include "kernels/host_device.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstdlib>
#include <latch>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "spillway/gpu_ranks.h"
#include "spillway/log.h"
#include "src/comm/nccl_plugin.h"
#include "tests/error_of.h"
#include "tests/src/comm/communicator_suite.h"
#include "tests/src/comm/message_hub.h"
#include "tests/src/comm/thread_ranks.h"

namespace spillway {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

void run_self(std::uint32_t, const RanksOptions&, const std::function<void(Communicator&)>& body) {
  const auto communicator = make_communicator("self");
  body(*communicator);
}

void run_on(ThreadHub& hub, std::uint32_t ranks, const RanksOptions& options,
            const std::function<void(Communicator&)>& body) {
  testing::run_ranks_on(hub, ranks, options.limits, options.patience_seconds, body);
}

void run_threads(std::uint32_t ranks, const RanksOptions& options, const std::function<void(Communicator&)>& body) {
  ThreadHub hub(ranks);
  run_on(hub, ranks, options, body);
}

// Over messages alone, which carry themselves.
void run_messages(std::uint32_t ranks, const RanksOptions& options, const std::function<void(Communicator&)>& body) {
  testing::MessageHub hub(ranks);
  std::vector<std::thread> threads;
  for (std::uint32_t rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      TransportCommunicator communicator(std::make_unique<MessageTransport>(hub.join(rank)), options.limits,
                                         options.patience_seconds);
      body(communicator);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

const auto kCases = ::testing::Values(
    RanksCase{"self", 1, run_self}, RanksCase{"threads_1", 1, run_threads}, RanksCase{"threads_2", 2, run_threads},
    RanksCase{"threads_3", 3, run_threads}, RanksCase{"threads_4", 4, run_threads},
    RanksCase{"threads_5", 5, run_threads}, RanksCase{"messages_2", 2, run_messages},
    RanksCase{"messages_3", 3, run_messages}, RanksCase{"messages_4", 4, run_messages});
const auto kSeveral =
    ::testing::Values(RanksCase{"threads_2", 2, run_threads}, RanksCase{"threads_3", 3, run_threads},
                      RanksCase{"threads_5", 5, run_threads}, RanksCase{"messages_2", 2, run_messages},
                      RanksCase{"messages_3", 3, run_messages});
const auto kCaseName = [](const auto& info) { return info.param.name; };
INSTANTIATE_TEST_SUITE_P(InProcess, CommunicatorSuite, kCases, kCaseName);
INSTANTIATE_TEST_SUITE_P(InProcess, CommunicatorFailures, kSeveral, kCaseName);

TEST(ThreadRanks, ASilentRankIsNamedWithItsHost) {
  ThreadHub hub(3);
  run_on(hub, 3, {.patience_seconds = 1.5}, [&](Communicator& communicator) {
    Member member(communicator);
    member.comm.barrier(7, *member.a);
    member.a->synchronize();  // what comes after it may have failed already
    if (member.rank == 1) {
      hub.silence(1);
      EXPECT_THAT(end_of(member), HasSubstr("no progress in 1.5 s: ranks 0 and 2 (host0, host2) do not answer"))
          << "as it looks there";
      return;
    }
    EXPECT_THAT(end_of(member), AllOf(StartsWith("barrier of block 0 (collective 2): "),
                                      HasSubstr("no progress in 1.5 s: rank 1 (host1) does not answer; ")));
  });
}

TEST(ThreadRanks, ARankThatFallsSilentWhileDataMovesIsNamed) {
  ThreadHub hub(3);
  run_on(hub, 3, {.patience_seconds = 1.5, .limits = {.scratch_bytes = 1}}, [&](Communicator& communicator) {
    Member member(communicator);
    const std::vector<std::uint64_t> slices(3, 4 * 1024 * 100);
    std::thread silences;
    if (member.rank == 2) {
      silences = std::thread([&hub] {
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
        hub.silence(2);
      });
    }
    std::string end;
    try {
      for (;;) {
        member.comm.reduce_scatter(member.hbm<float>(0, 3 * 1024 * 100), slices, Sums::kTree, 8, *member.a);
        member.wait_idle();
      }
    } catch (const Error& error) {
      end = error.what();
    }
    if (silences.joinable()) return silences.join();
    EXPECT_THAT(end, AllOf(StartsWith("reduce_scatter of block 8 "), HasSubstr("rank 2 (host2) does not answer")));
  });
}

TEST(ThreadRanks, AWordThatIsLostIsSeenByItsNumber) {
  ThreadHub hub(3);
  run_on(hub, 3, {.patience_seconds = 30}, [&](Communicator& communicator) {
    Member member(communicator);
    member.comm.barrier(7, *member.a);
    member.a->synchronize();
    if (member.rank == 1) hub.lose_a_word(1);
    // All the same but for their numbers; the first two are on streams of their own, so that both are announced.
    try {
      for (int i = 0; i < 4; ++i) member.comm.barrier(7, i % 2 ? *member.a : *member.b);
      member.a->synchronize(), member.b->synchronize();
      member.comm.throw_if_failed();
      ADD_FAILURE() << "nothing was missed";
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), HasSubstr("the ranks do not agree: ")) << member.rank;
    }
  });
}

TEST(ThreadRanks, ALibraryThatFailsIsQuotedOnEveryRank) {
  ThreadHub hub(3);
  run_on(hub, 3, {.patience_seconds = 30}, [&](Communicator& communicator) {
    Member member(communicator);
    member.comm.barrier(7, *member.a);
    member.a->synchronize();
    if (member.rank == 2) hub.break_down(2, "MPI_ERR_OTHER");
    std::string end;
    while (end.empty()) {  // nobody calls anything
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      try {
        member.comm.throw_if_failed();
      } catch (const Error& error) {
        end = error.what();
      }
    }
    EXPECT_THAT(end, StartsWith("collective 2: rank 2: threads: MPI_ERR_OTHER; look at that rank"));
  });
}

TEST(ThreadRanks, ACallThatNeverComesBackStopsNobody) {
  static ThreadHub& hub = *new ThreadHub(3);  // one thread waits in it when this test is over
  run_on(hub, 3, {.patience_seconds = 1}, [&](Communicator& communicator) {
    Member member(communicator);
    member.comm.barrier(7, *member.a);
    member.a->synchronize();
    if (member.rank == 1) hub.hang(1);
    EXPECT_THAT(end_of(member), HasSubstr(member.rank == 1 ? ": a call of threads has not come back in 3 s, as when "
                                                           : ": no progress in 1 s: rank 1 (host1) does not answer; "));
  });
}

// A stream of a GPU, as far as a communicator looks at it.
class GpuStream final : public Stream {
 public:
  DeviceKind kind() const noexcept override { return DeviceKind::kCuda; }
  void* native() const noexcept override { return nullptr; }
  void launch(const HostTask&) override {}
  void synchronize() override {}
};

// A library whose streams come to every gate and wait there.
class Gates final : public StreamMover {
 public:
  explicit Gates(std::latch& opened) : opened_(opened) {}
  std::string library() const override { return "gates"; }
  void enqueue(std::uint64_t, const Collective&, Stream&) noexcept override {}
  bool has_come(std::uint64_t) const override { return true; }
  bool is_over(std::uint64_t) const override { return false; }
  std::uint64_t marks() const override { return 0; }
  void open_gates(std::uint64_t) override {}
  std::string failure() override { return {}; }
  void abandon() noexcept override {
    if (!std::exchange(abandoned_, true)) opened_.count_down();
  }
  bool close() noexcept override { return true; }

 private:
  std::latch& opened_;
  bool abandoned_ = false;
};

// Nobody calls anything meanwhile: all threads of the program wait for what their GPU does.
TEST(ThreadRanks, ACallThatNeverComesBackHoldsNoStreamOfAGpu) {
  static ThreadHub& hub = *new ThreadHub(2);  // one thread waits in it when this test is over
  static std::latch& opened = *new std::latch(2);
  run_on(hub, 2, {.patience_seconds = 1}, [&](Communicator& communicator) {
    dynamic_cast<TransportCommunicator&>(communicator).move_streams_by(std::make_unique<Gates>(opened));
    Member member(communicator);
    member.comm.barrier(7, *member.a);
    member.a->synchronize();
    if (member.rank == 1) hub.hang(1);
    GpuStream stream;
    communicator.barrier(8, stream);
    opened.wait();
    const Error error = testing::error_of([&] { communicator.throw_if_failed(); });
    EXPECT_THAT(error.what(), HasSubstr(member.rank == 1 ? ": a call of threads has not come back in 3 s"
                                                         : ": no progress in 1 s: rank 1 (host1) does not answer; "));
  });
}

// What the library logs, while it is there.
class Logged {
 public:
  Logged() {
    set_log_sink([this](LogLevel, std::string_view line) { lines.emplace_back(line); });
  }
  ~Logged() { set_log_sink({}); }
  std::vector<std::string> lines;
};

// Its memory is the caller's again then, and the library may still have written to it before.
TEST(MessageRanks, WhoWaitsIsFreedOnceTheTransportHasLetGo) {
  testing::MessageHub hub(2);
  std::latch ended(2);
  std::vector<std::thread> threads;
  for (std::uint32_t rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      std::mutex mutex;
      std::condition_variable changed;
      bool is_free = false, has_let_go = false;
      MessageFunctions functions = hub.join(rank);
      functions.close = [&, close = functions.close](Parting parting) {
        std::unique_lock lock(mutex);
        EXPECT_FALSE(changed.wait_for(lock, std::chrono::milliseconds(200), [&] { return is_free; }));
        close(parting);
        has_let_go = true;
      };
      TransportCommunicator communicator(std::make_unique<MessageTransport>(std::move(functions)), {}, 0.5);
      if (rank == 0) {
        std::uint64_t value[] = {1};
        EXPECT_THROW(communicator.all_reduce_now(std::span(value), Fold::kSum, 0), Error);
        const std::lock_guard lock(mutex);
        is_free = true;
        changed.notify_all();
        EXPECT_TRUE(has_let_go);
      }
      ended.arrive_and_wait();
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST(ThreadRanks, ARankThatLeavesIsAnsweredByThoseThatStay) {
  const Logged logged;
  ThreadHub hub(3);
  run_on(hub, 3, {.patience_seconds = 1.5}, [&](Communicator& communicator) {
    Member member(communicator);
    member.comm.barrier(7, *member.a);
    member.wait_idle();
    if (member.rank == 1) std::this_thread::sleep_for(std::chrono::seconds(5));
  });
  EXPECT_THAT(logged.lines, ::testing::IsEmpty());
}

TEST(ThreadRanks, WhoeverDoesNotAnswerARankThatLeavesIsNamed) {
  const Logged logged;
  ThreadHub hub(3);
  std::latch silent(1);  // before any rank leaves
  run_on(hub, 3, {.patience_seconds = 1.5}, [&](Communicator& communicator) {
    Member member(communicator);
    member.comm.barrier(7, *member.a);
    member.wait_idle();
    if (member.rank == 1) {
      hub.silence(1);
      silent.count_down();
    }
    silent.wait();
    member.comm.throw_if_failed();
  });
  const auto misses = [](const char* whom) {
    return StartsWith(std::string("communicator: as this rank leaves, ") + whom);
  };
  EXPECT_THAT(logged.lines, ::testing::UnorderedElementsAre(misses("rank 1 (host1) does not answer in 1.5 s; "),
                                                            misses("rank 1 (host1) does not answer in 1.5 s; "),
                                                            misses("ranks 0 and 2 (host0, host2) do not answer ")));
}

TEST(ThreadRanks, OtherLimitsAreRefusedAtTheOpening) {
  ThreadHub hub(2);
  std::vector<std::thread> threads;
  for (std::uint32_t rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      const Error error = testing::error_of(
          [&] { TransportCommunicator communicator(hub.join(rank), {.scratch_bytes = 4096 * (1 + rank)}, 30); });
      EXPECT_EQ(error.code(), Code::kInvalidArgument);
      EXPECT_THAT(error.what(), AllOf(StartsWith("opening (collective 0): the ranks do not agree: rank 0: "),
                                      HasSubstr("; rank 1: "), HasSubstr("one version of Spillway")));
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST(Patience, IsANumberOfSecondsThatSomebodyWouldWait) {
  for (const double seconds : {0.0, -1.0, std::nan(""), HUGE_VAL, 1e300, 366.0 * 24 * 60 * 60}) {
    SCOPED_TRACE(seconds);
    for (const char* kind : {"self", "mpi"}) {
      const Error error = testing::error_of([&] { make_communicator(kind, {.patience_seconds = seconds}); });
      EXPECT_EQ(error.code(), Code::kInvalidArgument) << kind;
      EXPECT_THAT(error.what(), AllOf(StartsWith("patience_seconds: is "), HasSubstr("a year at the most")));
    }
  }
  EXPECT_EQ(make_communicator("self", {.patience_seconds = 365.0 * 24 * 60 * 60})->ranks(), 1u);
}

TEST(ThreadRanks, ARankThatNeverOpensIsNamed) {
  ThreadHub hub(3);
  const Error error =
      testing::error_of([&] { TransportCommunicator communicator(hub.join(0), TransferLimits{}, 0.2); });
  EXPECT_EQ(error.code(), Code::kIo);
  EXPECT_THAT(error.what(), StartsWith("opening (collective 0): no progress in 0.2 s: ranks 1 and 2 do not answer; "));
}

TEST(ThreadRanks, AStreamOfAGpuIsRefusedBeforeGpusAreJoined) {
  testing::run_ranks(2, [](Communicator& communicator) {
    GpuStream stream;
    const Error error = testing::error_of([&] { communicator.barrier(1, stream); });
    EXPECT_EQ(error.code(), Code::kUnsupported);
    EXPECT_THAT(error.what(), AllOf(HasSubstr("it moves host memory, and this stream is of the cuda device; "),
                                    HasSubstr("make_communicator(\"nccl\")")));
    Member member(communicator);
    communicator.barrier(1, *member.a);  // nothing was called
    member.wait_idle();
  });
}

TEST(ThreadRanks, WithoutAGpuNoneIsJoinedAndAllSayWhy) {
  const std::string why = cuda_unavailable();
  if (why.empty()) GTEST_SKIP() << "there is one";
  testing::run_ranks(2, [&](Communicator& communicator) {
    const Error error = testing::error_of([&] { join_gpus(dynamic_cast<TransportCommunicator&>(communicator), {}); });
    EXPECT_EQ(error.code(), Code::kUnsupported);
    EXPECT_THAT(error.what(), AllOf(StartsWith("communicator nccl: "), HasSubstr(why)));
  });
}

TEST(MakeCommunicator, JoinsNoGpusOfOneRankAlone) {
  const auto communicator = make_communicator("self");
  join_gpus(*communicator);
  EXPECT_EQ(communicator->describe(), "one rank");
}

TEST(MakeCommunicator, TakesNoOtherName) {
  EXPECT_STREQ(testing::error_of([] { make_communicator("gloo"); }).what(),
               "communicator 'gloo': there is none of that name; name auto, self, mpi or nccl");
}

TEST(MakeCommunicator, WithoutALauncherThereIsOneRank) {
  for (const char* name : {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK"}) ::unsetenv(name);
  EXPECT_EQ(make_communicator()->ranks(), 1u);
  EXPECT_EQ(make_communicator("auto")->describe(), "one rank");
  ::setenv("OMPI_COMM_WORLD_SIZE", "1", 1);
  ::setenv("PMIX_RANK", "0", 1);
  EXPECT_EQ(make_communicator("auto")->describe(), "one rank");
  for (const char* name : {"OMPI_COMM_WORLD_SIZE", "PMIX_RANK"}) ::unsetenv(name);
}

TEST(CommunicatorDeathTest, CallsThatCannotBeMeantAreRefused) {
  const auto communicator = make_communicator("self");
  const auto workers = create_workers(1);
  const auto device = create_host_device({.hbm_bytes = 4096}, *workers);
  const auto stream = device->create_stream("stream");
  std::vector<float> data(8);
  const std::vector<std::uint64_t> two(2, 16), short_one(1, 16), odd(1, 32);
  const auto bytes = std::as_writable_bytes(std::span(data));
  ::testing::FLAGS_gtest_death_test_style = "threadsafe";
  EXPECT_DEATH(communicator->all_gather(bytes, two, 0, *stream), "one slice for each rank");
  EXPECT_DEATH(communicator->all_gather(bytes, short_one, 0, *stream), "as long as the data");
  EXPECT_DEATH(communicator->broadcast(bytes, 1, 0, *stream), "one of the ranks");
  std::vector<double> many(kMostScalars + 1);
  EXPECT_DEATH(communicator->all_reduce(std::span(many), Fold::kSum, 0, *stream), "a few values");
  EXPECT_DEATH(communicator->all_reduce(std::span(many).first(1), Fold::kOr, 0, *stream), "no bitwise or");
}

}  // namespace
}  // namespace spillway
