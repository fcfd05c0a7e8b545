#include "tests/src/comm/communicator_suite.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <chrono>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <thread>

#include "kernels/host_device.h"
#include "spillway/bf16.h"
#include "spillway/error.h"
#include "spillway/fp16.h"
#include "spillway/units.h"
#include "src/comm/sum_tree.h"
#include "tests/kernels/gate.h"
#include "tests/seed.h"

namespace spillway {

std::shared_ptr<Device> make_host_device(std::uint64_t hbm_bytes, HostWorkers& workers) {
  return create_host_device({.hbm_bytes = hbm_bytes}, workers);
}

Member::Member(Communicator& communicator, const MakeDevice& make_device)
    : comm(communicator),
      rank(communicator.rank()),
      ranks(communicator.ranks()),
      workers(create_workers(1)),
      device(make_device(16 * kMiB, *workers)),
      a(device->create_stream("a")),
      b(device->create_stream("b")),
      pinned_(8 * kMiB) {
  device->register_host(pinned_);
}

Member::~Member() {
  a->synchronize();
  b->synchronize();
  device->unregister_host(pinned_);
}

void Member::wait_idle() {
  a->synchronize();
  b->synchronize();
  comm.throw_if_failed();
}

void CommunicatorSuite::run(const std::function<void(Member&)>& body, const RanksOptions& options) {
  GetParam().run(ranks(), options, [&](Communicator& communicator) {
    try {
      Member member(communicator, GetParam().make_device);
      std::uint64_t made = 1;  // so that no rank waits in the body for another that is at this
      communicator.all_reduce_now(std::span(&made, 1), Fold::kMin, 0);
      body(member);
    } catch (const std::exception& error) {
      ADD_FAILURE() << "rank " << communicator.rank() << ": " << error.what();
    }
  });
}

namespace {

GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(CommunicatorSuite);

using Slices = std::vector<std::uint64_t>;

std::uint64_t total_of(const Slices& slices) { return std::accumulate(slices.begin(), slices.end(), std::uint64_t{0}); }
std::uint64_t begin_of(const Slices& slices, std::uint32_t rank) {
  return std::accumulate(slices.begin(), slices.begin() + rank, std::uint64_t{0});
}

// The same on every rank: uneven, some empty, now and then all of them.
Slices random_slices(std::mt19937_64& random, std::uint32_t ranks, std::uint64_t most, std::uint64_t unit) {
  Slices slices(ranks);
  for (std::uint64_t& slice : slices) slice = random() % 3 == 0 ? 0 : random() % most * unit;
  return slices;
}

// What each rank brings, known to all.
std::byte byte_of(std::uint64_t number, std::uint64_t at) {
  return static_cast<std::byte>((number * 0x9e3779b97f4a7c15 + at * 0xff51afd7ed558ccd) >> 40);
}
std::vector<float> floats_of(std::uint64_t number, std::size_t count) {
  std::mt19937_64 random(number);
  std::vector<float> values(count);
  // Of very different sizes, so that the order of additions shows in the bits.
  for (float& value : values) {
    value = std::ldexp(static_cast<float>(random() % 20'001) / 10'000 - 1, static_cast<int>(random() % 12));
  }
  return values;
}

// The definition, in plain words: the first part is the largest power of two below the number of parts.
float tree_of(std::span<const std::vector<float>> parts, std::size_t at) {
  if (parts.size() == 1) return parts[0][at];
  const std::size_t first = std::bit_ceil(parts.size()) / 2;
  return tree_of(parts.first(first), at) + tree_of(parts.subspan(first), at);
}

void gather_and_check(Member& member, const Slices& slices, std::uint64_t number) {
  std::vector<std::byte> data(total_of(slices), std::byte{0xee}), expected;
  for (std::uint32_t rank = 0; rank < member.ranks; ++rank) {
    for (std::uint64_t i = 0; i < slices[rank]; ++i) expected.push_back(byte_of(number * 64 + rank, i));
  }
  const std::uint64_t begin = begin_of(slices, member.rank);
  std::copy_n(expected.begin() + static_cast<std::ptrdiff_t>(begin), slices[member.rank],
              data.begin() + static_cast<std::ptrdiff_t>(begin));
  member.upload(0, data);
  member.comm.all_gather(member.hbm<std::byte>(0, data.size()), slices, static_cast<std::int32_t>(number), *member.a);
  EXPECT_TRUE(member.download<std::byte>(0, data.size()) == expected) << "rank " << member.rank << ", case " << number;
}

TEST_P(CommunicatorSuite, SaysWhoItIs) {
  std::atomic<std::uint64_t> seen = 0;
  run([&](Member& member) {
    EXPECT_EQ(member.ranks, ranks());
    EXPECT_LT(member.rank, ranks());
    EXPECT_NE(member.comm.describe(), "");
    std::uint64_t mine = std::uint64_t{1} << member.rank;
    member.comm.all_reduce(std::span(&mine, 1), Fold::kSum, 0, *member.a);
    member.wait_idle();
    seen = mine;
  });
  EXPECT_EQ(seen, (std::uint64_t{1} << ranks()) - 1) << "each rank is there once";
}

TEST_P(CommunicatorSuite, AllGatherBringsEverySlice) {
  run([&](Member& member) {
    std::mt19937_64 random(test_seed());
    for (std::uint64_t number = 0; number < 12; ++number) {
      gather_and_check(member, random_slices(random, ranks(), number % 2 ? 7 : 40'000, 1), number);
    }
    gather_and_check(member, Slices(ranks(), 0), 12);
    gather_and_check(member, Slices(ranks(), 1024), 13);
    member.wait_idle();
  });
}

TEST_P(CommunicatorSuite, AllGatherGoesInPiecesWhenItIsLarge) {
  run(
      [&](Member& member) {
        std::mt19937_64 random(test_seed());
        for (std::uint64_t number = 0; number < 8; ++number) {
          gather_and_check(member, random_slices(random, ranks(), 9'000, 1), number);
        }
        member.wait_idle();
      },
      {.limits = {.direct_bytes = 2'000, .piece_bytes = 500}});
}

struct ScatterCase {
  Slices slices;
  Sums sums = Sums::kTree;
  std::uint64_t number = 0;
  DType wire = DType::kFloat32;
};

// What is left of a value after it travelled.
float travelled(float value, DType wire) {
  switch (wire) {
    case DType::kBFloat16: return bf16_to_float(float_to_bf16(value));
    case DType::kFloat16: return fp16_to_float(float_to_fp16(value));
    case DType::kFloat32: break;
  }
  return value;
}

void scatter_and_check(Member& member, const ScatterCase& with) {
  const std::size_t count = total_of(with.slices) / sizeof(float);
  std::vector<std::vector<float>> brought;
  for (std::uint32_t rank = 0; rank < member.ranks; ++rank)
    brought.push_back(floats_of(with.number * 64 + rank, count));
  member.upload(0, brought[member.rank]);
  member.comm.reduce_scatter(member.hbm<float>(0, count), with.slices, with.sums, 3, *member.a, with.wire);
  if (member.ranks > 1) {
    for (auto& values : brought) {
      for (float& value : values) value = travelled(value, with.wire);
    }
  }
  const auto sums = member.download<float>(0, count);
  const std::size_t begin = begin_of(with.slices, member.rank) / sizeof(float);
  for (std::size_t i = begin; i < begin + with.slices[member.rank] / sizeof(float); ++i) {
    const float expected = tree_of(brought, i);
    if (with.sums == Sums::kTree || with.wire != DType::kFloat32) {
      ASSERT_EQ(std::bit_cast<std::uint32_t>(sums[i]), std::bit_cast<std::uint32_t>(expected))
          << "rank " << member.rank << ", element " << i;
    } else {
      // Any order of five additions of values below 2^12.
      ASSERT_NEAR(sums[i], expected, std::ldexp(8.0, 12 - 23)) << "rank " << member.rank << ", element " << i;
    }
  }
}

TEST_P(CommunicatorSuite, ReduceScatterHasTheTreesBits) {
  run([&](Member& member) {
    std::mt19937_64 random(test_seed());
    for (std::uint64_t number = 0; number < 12; ++number) {
      scatter_and_check(member, {.slices = random_slices(random, ranks(), 9'000, 4), .number = number});
    }
    scatter_and_check(member, {.slices = Slices(ranks(), 4096), .number = 12});
    member.wait_idle();
  });
}

TEST_P(CommunicatorSuite, TheTreesBitsDoNotDependOnScratchMemory) {
  run(
      [&](Member& member) {
        std::mt19937_64 random(test_seed());
        for (std::uint64_t number = 0; number < 4; ++number) {
          scatter_and_check(member, {.slices = random_slices(random, ranks(), 30'000, 4), .number = number});
        }
        member.wait_idle();
      },
      {.limits = {.scratch_bytes = 1}});
}

TEST_P(CommunicatorSuite, SixteenBitsTravelAndAreAddedInTheTree) {
  for (const std::uint64_t scratch : {std::uint64_t{1}, 16 * kMiB}) {
    run(
        [&](Member& member) {
          std::mt19937_64 random(test_seed());
          for (std::uint64_t number = 0; number < 8; ++number) {
            scatter_and_check(member, {.slices = random_slices(random, ranks(), 9'000, 4),
                                       .sums = number % 4 < 2 ? Sums::kTree : Sums::kFastest,
                                       .number = number,
                                       .wire = number % 2 == 0 ? DType::kBFloat16 : DType::kFloat16});
          }
          member.wait_idle();
        },
        {.limits = {.scratch_bytes = scratch}});
  }
}

TEST_P(CommunicatorSuite, WhatIsTooLargeForFp16BecomesInfinite) {
  if (ranks() == 1) GTEST_SKIP() << "nothing travels";
  run([&](Member& member) {
    const Slices slices(ranks(), 8);
    std::vector<float> values(2 * ranks(), 1);
    if (member.rank == 1) values[0] = 65520, values[1] = 65519;
    member.upload(0, values);
    member.comm.reduce_scatter(member.hbm<float>(0, values.size()), slices, Sums::kTree, 3, *member.a, DType::kFloat16);
    const auto sums = member.download<float>(0, 2);
    member.wait_idle();
    const std::vector<float> expected = {HUGE_VALF, 65504.0f + static_cast<float>(ranks() - 1)};
    EXPECT_TRUE(member.rank != 0 || sums == expected) << sums[0] << ' ' << sums[1];
  });
}

TEST_P(CommunicatorSuite, TheFastestSumIsASum) {
  for (const TransferLimits limits : {TransferLimits{}, TransferLimits{.direct_bytes = 4'000, .piece_bytes = 1'000}}) {
    run(
        [&](Member& member) {
          std::mt19937_64 random(test_seed());
          for (std::uint64_t number = 0; number < 8; ++number) {
            const Slices slices = random_slices(random, ranks(), 5'000, 4);
            scatter_and_check(member, {.slices = slices, .sums = Sums::kFastest, .number = number});
          }
          member.wait_idle();
        },
        {.limits = limits});
  }
}

// Four parts of a sum on one, two and four ranks: each folds its own, the reduce_scatter folds those.
TEST_P(CommunicatorSuite, SumsOfFourPartsHaveOneSetOfBits) {
  if (4 % ranks() != 0) GTEST_SKIP() << "four parts are not shared by " << ranks() << " ranks";
  constexpr std::size_t kCount = 30'000;
  std::vector<std::vector<float>> parts;
  for (std::uint64_t part = 0; part < 4; ++part) parts.push_back(floats_of(1'000 + part, kCount));
  run([&](Member& member) {
    std::vector<const float*> own;
    for (std::uint32_t i = 0; i < 4 / ranks(); ++i) own.push_back(parts[member.rank * 4 / ranks() + i].data());
    std::vector<float> folded(kCount);
    sum_in_tree(own, folded.data(), kCount);
    member.upload(0, folded);
    Slices slices(ranks(), kCount / 8 * 4);
    slices.back() += kCount * 4 - total_of(slices);
    member.comm.reduce_scatter(member.hbm<float>(0, kCount), slices, Sums::kTree, 1, *member.a);
    member.comm.all_gather(member.hbm<std::byte>(0, kCount * 4), slices, 1, *member.a);
    const auto sums = member.download<float>(0, kCount);
    member.wait_idle();
    for (std::size_t i = 0; i < kCount; ++i)
      ASSERT_EQ(sums[i], (parts[0][i] + parts[1][i]) + (parts[2][i] + parts[3][i]));
  });
}

TEST_P(CommunicatorSuite, AllReduceFoldsDoubles) {
  run([&](Member& member) {
    const auto value = [](std::uint32_t rank, double scale) { return (rank + 1) * scale + 1.0 / (rank + 3); };
    for (const Fold fold : {Fold::kSum, Fold::kMax, Fold::kMin}) {
      std::vector<double> values(kMostScalars);
      for (std::size_t i = 0; i < values.size(); ++i) values[i] = value(member.rank, 7.0 - static_cast<double>(i));
      values[5] = member.rank == 0 ? std::numeric_limits<double>::quiet_NaN() : 1;
      member.comm.all_reduce(std::span(values), fold, 0, *member.a);
      member.wait_idle();
      EXPECT_TRUE(std::isnan(values[5]));
      for (std::size_t i = 0; i < values.size(); ++i) {
        if (i == 5) continue;
        const double expected = fold_in_tree(
            ranks(),
            [&](std::size_t rank) { return value(static_cast<std::uint32_t>(rank), 7.0 - static_cast<double>(i)); },
            [&](double x, double y) {
              return fold == Fold::kSum ? x + y : fold == Fold::kMax ? std::max(x, y) : std::min(x, y);
            });
        EXPECT_EQ(values[i], expected) << i;
      }
    }
    member.comm.all_reduce(std::span<double>(), Fold::kSum, 0, *member.a);
    member.wait_idle();
  });
}

TEST_P(CommunicatorSuite, AllReduceFoldsIntegers) {
  run([&](Member& member) {
    const std::uint64_t high = std::uint64_t{1} << 63;
    std::vector<std::uint64_t> sum{member.rank, high + member.rank}, most = sum, least = sum,
                                                                     bits{std::uint64_t{1} << (60 - member.rank), 2};
    member.comm.all_reduce(std::span(sum), Fold::kSum, 0, *member.a);
    member.comm.all_reduce(std::span(most), Fold::kMax, 0, *member.a);
    member.comm.all_reduce(std::span(least), Fold::kMin, 0, *member.a);
    member.comm.all_reduce(std::span(bits), Fold::kOr, 0, *member.a);
    member.wait_idle();
    const std::uint64_t n = ranks(), triangle = n * (n - 1) / 2;
    EXPECT_EQ(sum, (std::vector{triangle, high * n + triangle}));
    EXPECT_EQ(most, (std::vector{n - 1, high + n - 1}));
    EXPECT_EQ(least, (std::vector<std::uint64_t>{0, high}));
    EXPECT_EQ(bits, (std::vector<std::uint64_t>{((std::uint64_t{1} << n) - 1) << (61 - n), 2}));
  });
}

TEST_P(CommunicatorSuite, BroadcastBringsTheRootsData) {
  for (const std::size_t piece : {std::size_t{64} << 20, std::size_t{999}}) {
    run(
        [&](Member& member) {
          for (std::uint32_t root = 0; root < ranks(); ++root) {
            for (const std::size_t bytes : {std::size_t{0}, std::size_t{1}, std::size_t{70'001}}) {
              std::vector<std::byte> expected(bytes);
              for (std::size_t i = 0; i < bytes; ++i) expected[i] = byte_of(root + 7, i);
              member.upload(64, member.rank == root ? expected : std::vector<std::byte>(bytes, std::byte{0xee}));
              member.comm.broadcast(member.hbm<std::byte>(64, bytes), root, 5, *member.a);
              EXPECT_TRUE(member.download<std::byte>(64, bytes) == expected) << root << " " << bytes;
            }
          }
          member.wait_idle();
        },
        {.limits = {.piece_bytes = piece}});
  }
}

// Every rank's clock is this machine's.
double seconds_now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

TEST_P(CommunicatorSuite, NoRankComesByABarrierBeforeAllHaveCome) {
  run([&](Member& member) {
    for (int round = 0; round < 3; ++round) {
      if (member.rank == static_cast<std::uint32_t>(round) % ranks()) give_a_wrong_stream_time();
      double came = seconds_now(), passed = 0;
      member.comm.barrier(9, *member.a);
      member.device->call_async([](void* at) { *static_cast<double*>(at) = seconds_now(); }, &passed, *member.a);
      member.a->synchronize();
      member.comm.all_reduce(std::span(&came, 1), Fold::kMax, 9, *member.a);
      member.comm.all_reduce(std::span(&passed, 1), Fold::kMin, 9, *member.a);
      member.wait_idle();
      EXPECT_GE(passed, came) << "the first came by before the last had come";
    }
  });
}

TEST_P(CommunicatorSuite, TakesPartWhenItsStreamComesToIt) {
  run([&](Member& member) {
    const Slices slices(ranks(), 4'000);
    Gate gate;
    const auto event = member.device->create_event();
    const auto own = member.hbm<std::byte>(member.rank * 4'000, 4'000);
    member.upload(0, std::vector<std::byte>(4'000 * ranks()));
    gate.enqueue(*member.device, *member.a);
    member.device->fill_async(own.data(), static_cast<std::byte>(member.rank + 1), own.size(), *member.a);
    member.comm.all_gather(member.hbm<std::byte>(0, 4'000 * ranks()), slices, 1, *member.a);
    member.device->record(*event, *member.a);
    member.device->wait(*member.b, *event);
    member.device->copy_async(CopyKind::kDeviceToDevice, member.hbm<std::byte>(kMiB, 0).data(),
                              member.hbm<std::byte>(0, 0).data(), 4'000 * ranks(), *member.b);
    gate.wait_reached();
    give_a_wrong_stream_time();
    EXPECT_FALSE(member.device->done(*event));
    gate.open();
    member.b->synchronize();
    const auto copied = member.download<std::byte>(kMiB, 4'000 * ranks());
    for (std::size_t i = 0; i < copied.size(); ++i) ASSERT_EQ(copied[i], static_cast<std::byte>(i / 4'000 + 1)) << i;
    member.wait_idle();
  });
}

TEST_P(CommunicatorSuite, CallsKeepTheirOrderOverStreams) {
  run([&](Member& member) {
    std::uint64_t first = member.rank, second = member.rank;
    Gate gate;
    gate.enqueue(*member.device, *member.a);
    member.comm.all_reduce(std::span(&first, 1), Fold::kSum, 1, *member.a);
    member.comm.all_reduce(std::span(&second, 1), Fold::kMax, 2, *member.b);  // comes to it long before
    gate.wait_reached();
    give_a_wrong_stream_time();
    gate.open();
    member.wait_idle();
    EXPECT_EQ(first, std::uint64_t{ranks()} * (ranks() - 1) / 2);
    EXPECT_EQ(second, ranks() - 1);
  });
}

TEST_P(CommunicatorSuite, ManyAreInFlightOnTwoStreams) {
  run(
      [&](Member& member) {
        std::mt19937_64 random(test_seed());
        constexpr std::size_t kCalls = 40, kPlace = 96 * kKiB;
        std::vector<Slices> slices(kCalls);
        std::vector<std::uint64_t> folded(kCalls, member.rank);
        std::vector<std::vector<float>> mine(kCalls);
        for (std::size_t i = 0; i < kCalls; ++i) {
          slices[i] = random_slices(random, ranks(), 4'000, 4);
          mine[i] = floats_of(i * 64 + member.rank, total_of(slices[i]) / 4);
          member.upload(i * kPlace, mine[i]);
        }
        std::vector<int> kinds(kCalls);
        for (std::size_t i = 0; i < kCalls; ++i) {
          Stream& stream = random() % 2 ? *member.a : *member.b;
          const auto block = static_cast<std::int32_t>(i);
          kinds[i] = static_cast<int>(random() % 4);
          const auto data = member.hbm<float>(i * kPlace, mine[i].size());
          if (kinds[i] == 0) member.comm.all_gather(std::as_writable_bytes(data), slices[i], block, stream);
          if (kinds[i] == 1) member.comm.reduce_scatter(data, slices[i], Sums::kTree, block, stream);
          if (kinds[i] == 2) member.comm.all_reduce(std::span(&folded[i], 1), Fold::kSum, block, stream);
          if (kinds[i] == 3) member.comm.broadcast(std::as_writable_bytes(data), ranks() - 1, block, stream);
        }
        member.wait_idle();
        for (std::size_t i = 0; i < kCalls; ++i) {
          const auto have = member.download<float>(i * kPlace, mine[i].size());
          std::vector<std::vector<float>> brought;
          for (std::uint32_t rank = 0; rank < ranks(); ++rank) brought.push_back(floats_of(i * 64 + rank, have.size()));
          for (std::uint32_t rank = 0; rank < ranks(); ++rank) {
            const std::size_t begin = begin_of(slices[i], rank) / 4;
            for (std::size_t at = begin; at < begin + slices[i][rank] / 4; ++at) {
              if (kinds[i] == 1 && rank != member.rank) continue;  // undefined
              const float expected = kinds[i] == 0   ? brought[rank][at]
                                     : kinds[i] == 1 ? tree_of(brought, at)
                                     : kinds[i] == 2 ? mine[i][at]
                                                     : brought.back()[at];
              ASSERT_EQ(have[at], expected) << "call " << i << " of kind " << kinds[i];
            }
          }
          if (kinds[i] == 2) {
            EXPECT_EQ(folded[i], std::uint64_t{ranks()} * (ranks() - 1) / 2);
          }
        }
      },
      {.limits = {.scratch_bytes = 64 * kKiB, .direct_bytes = 20'000, .piece_bytes = 6'000}});
}

TEST_P(CommunicatorSuite, MoreAreCalledThanItKeeps) {
  run([&](Member& member) {
    std::vector<std::uint64_t> values(300);
    for (std::size_t i = 0; i < values.size(); ++i) {
      values[i] = i;
      member.comm.all_reduce(std::span(&values[i], 1), Fold::kSum, 0, i % 3 ? *member.a : *member.b);
    }
    member.wait_idle();
    for (std::size_t i = 0; i < values.size(); ++i) ASSERT_EQ(values[i], i * ranks());
  });
}

TEST_P(CommunicatorSuite, ItsEndWaitsForWhatWasStarted) {
  std::vector<std::uint64_t> values(ranks(), 1);
  std::vector<std::unique_ptr<HostWorkers>> workers(ranks());
  std::vector<std::shared_ptr<Device>> devices(ranks());
  std::vector<std::unique_ptr<Stream>> streams(ranks());
  GetParam().run(ranks(), {}, [&](Communicator& communicator) {
    const std::uint32_t rank = communicator.rank();
    workers[rank] = create_workers(1);
    devices[rank] = GetParam().make_device(4096, *workers[rank]);
    streams[rank] = devices[rank]->create_stream("stream");
    devices[rank]->call_async([](void*) { give_a_wrong_stream_time(); }, nullptr, *streams[rank]);
    communicator.all_reduce(std::span(&values[rank], 1), Fold::kSum, 0, *streams[rank]);
  });
  for (std::uint32_t rank = 0; rank < ranks(); ++rank) {
    if (!streams[rank]) continue;  // another process's
    streams[rank]->synchronize();
    EXPECT_EQ(values[rank], ranks());
  }
}

}  // namespace
}  // namespace spillway
