#include "tests/kernels/device_suite.h"

#include <bit>
#include <chrono>
#include <cmath>
#include <cstring>
#include <limits>

#include "kernels/convert.h"
#include "kernels/optimizer.h"
#include "spillway/bf16.h"
#include "spillway/units.h"
#include "tests/kernels/reduced_tile.h"

namespace spillway {
namespace {

GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(DeviceSuite);

TEST_P(DeviceSuite, WorkOnAStreamRunsInOrder) {
  struct Step {
    std::vector<int>* order;
    int number;
  };
  std::vector<int> order;
  std::vector<Step> steps(1'000);
  for (int i = 0; i < 1'000; ++i) {
    steps[static_cast<std::size_t>(i)] = {&order, i};
    device_->call_async(
        [](void* step) {
          const auto& s = *static_cast<Step*>(step);
          s.order->push_back(s.number);
        },
        &steps[static_cast<std::size_t>(i)], *a_);
  }
  a_->synchronize();
  ASSERT_EQ(order.size(), 1'000u);
  for (int i = 0; i < 1'000; ++i) ASSERT_EQ(order[static_cast<std::size_t>(i)], i);
}

TEST_P(DeviceSuite, CopiesGoAllThreeWaysAtAnySize) {
  auto generator = seeded_generator();
  for (std::size_t bytes : {std::size_t{1}, std::size_t{4095}, std::size_t{512 << 10}, std::size_t{3'000'001}}) {
    std::vector<std::uint8_t> values(bytes);
    for (auto& value : values) value = static_cast<std::uint8_t>(generator());
    upload(64, values);
    device_->copy_async(CopyKind::kDeviceToDevice, hbm<std::byte>(4 * kMiB + 1), hbm<std::byte>(64), bytes, *a_);
    EXPECT_EQ(download<std::uint8_t>(4 * kMiB + 1, bytes), values) << bytes;
    // As if it were lent: a device makes no difference.
    device_->copy_lent_async(CopyKind::kDeviceToDevice, hbm<std::byte>(8 * kMiB), hbm<std::byte>(64), bytes, *a_);
    EXPECT_EQ(download<std::uint8_t>(8 * kMiB, bytes), values) << bytes;
  }
}

TEST_P(DeviceSuite, FillSetsExactlyItsBytes) {
  upload(0, std::vector<std::uint8_t>(2'000'000, 1));
  device_->fill_async(hbm<std::byte>(3), std::byte{0xa5}, 1'999'990, *a_);
  const auto filled = download<std::uint8_t>(0, 2'000'000);
  for (std::size_t i = 0; i < filled.size(); ++i) ASSERT_EQ(filled[i], i >= 3 && i < 3 + 1'999'990 ? 0xa5 : 1) << i;
}

TEST_P(DeviceSuite, EmptyWorkIsAllowed) {
  device_->copy_async(CopyKind::kHostToDevice, nullptr, nullptr, 0, *a_);
  device_->fill_async(nullptr, std::byte{0}, 0, *a_);
  device_->accumulate_async(nullptr, nullptr, DType::kBFloat16, 0, false, *a_);
  device_->cast_async(nullptr, DType::kBFloat16, nullptr, DType::kFloat32, 0, *a_);
  a_->synchronize();
}

TEST_P(DeviceSuite, AnEventThatWasNeverRecordedIsDone) {
  const auto event = device_->create_event();
  EXPECT_FALSE(event->recorded());
  EXPECT_TRUE(device_->done(*event));
  device_->synchronize(*event);
}

TEST_P(DeviceSuite, AnEventIsDoneWhenTheWorkBeforeItHasRun) {
  Gate gate;
  const auto event = device_->create_event();
  gate.enqueue(*device_, *a_);
  device_->record(*event, *a_);
  gate.wait_reached();
  EXPECT_FALSE(device_->done(*event));
  gate.open();
  device_->synchronize(*event);
  EXPECT_TRUE(device_->done(*event));
}

TEST_P(DeviceSuite, WorkAfterARecordDoesNotDelayTheEvent) {
  Gate gate;
  const auto event = device_->create_event();
  std::atomic<bool> before = false;
  device_->call_async(set_flag, &before, *a_);
  device_->record(*event, *a_);
  gate.enqueue(*device_, *a_);
  device_->synchronize(*event);  // would hang if it waited for the gate
  EXPECT_TRUE(before);
  gate.open();
  a_->synchronize();
}

TEST_P(DeviceSuite, AStreamWaitsForAnotherStreamsWork) {
  Gate gate;
  const auto event = device_->create_event();
  upload(0, std::vector<std::uint32_t>(1'000, 7));
  gate.enqueue(*device_, *a_);
  device_->fill_async(hbm<std::byte>(0), std::byte{1}, 4'000, *a_);
  device_->record(*event, *a_);
  device_->wait(*b_, *event);
  device_->copy_async(CopyKind::kDeviceToDevice, hbm<std::byte>(kMiB), hbm<std::byte>(0), 4'000, *b_);
  give_a_wrong_stream_time();
  gate.open();
  b_->synchronize();
  EXPECT_EQ(download<std::uint32_t>(kMiB, 1'000), std::vector<std::uint32_t>(1'000, 0x01010101u));
}

TEST_P(DeviceSuite, AWaitCapturesTheRecordOfItsOwnTime) {
  Gate gate;
  const auto event = device_->create_event();
  device_->record(*event, *a_);
  device_->wait(*b_, *event);
  gate.enqueue(*device_, *a_);
  device_->record(*event, *a_);  // later: must not hold b up
  b_->synchronize();
  EXPECT_FALSE(device_->done(*event)) << "the event itself stands for its latest record";
  gate.open();
  a_->synchronize();
}

TEST_P(DeviceSuite, AWaitAfterARecordMadeAnewWaitsForTheNewOne) {
  Gate gate;
  const auto event = device_->create_event();
  device_->record(*event, *a_);
  a_->synchronize();
  gate.enqueue(*device_, *a_);
  device_->record(*event, *a_);
  std::atomic<bool> passed = false;
  device_->wait(*b_, *event);
  device_->call_async(set_flag, &passed, *b_);
  gate.wait_reached();
  give_a_wrong_stream_time();
  EXPECT_FALSE(passed);
  gate.open();
  b_->synchronize();
  EXPECT_TRUE(passed);
}

TEST_P(DeviceSuite, AWaitKeepsItsRecordWhenTheEventMovesToAnotherStream) {
  Gate gate;
  const auto event = device_->create_event();
  const auto c = device_->create_stream("c");
  gate.enqueue(*device_, *a_);
  device_->record(*event, *a_);
  std::atomic<bool> passed = false;
  device_->wait(*b_, *event);
  device_->call_async(set_flag, &passed, *b_);
  device_->record(*event, *c);  // done at once; b still waits for a
  device_->synchronize(*event);
  gate.wait_reached();
  give_a_wrong_stream_time();
  EXPECT_FALSE(passed);
  gate.open();
  b_->synchronize();
  EXPECT_TRUE(passed);
}

TEST_P(DeviceSuite, AStreamMayWaitForItself) {
  const auto event = device_->create_event();
  std::atomic<bool> ran = false;
  device_->record(*event, *a_);
  device_->wait(*a_, *event);
  device_->call_async(set_flag, &ran, *a_);
  a_->synchronize();
  EXPECT_TRUE(ran);
}

TEST_P(DeviceSuite, AnEventOutlivesTheStreamItWasRecordedOn) {
  const auto event = device_->create_event();
  {
    const auto short_lived = device_->create_stream("short");
    device_->fill_async(hbm<std::byte>(0), std::byte{9}, 100, *short_lived);
    device_->record(*event, *short_lived);
  }
  device_->synchronize(*event);
  EXPECT_TRUE(device_->done(*event));
  device_->wait(*b_, *event);
  b_->synchronize();
}

double idle(IdleClock& clock) {
  const IdleSeconds seconds = clock.seconds();
  return seconds.empty + seconds.waiting;
}

TEST_P(DeviceSuite, IdleTimeGrowsOnlyWhileThereIsNothingToRun) {
  const auto a = device_->idle_clock(*a_), b = device_->idle_clock(*b_);
  EXPECT_EQ(device_->idle_clock(*a_), a);
  a_->synchronize();
  Gate gate;
  gate.enqueue(*device_, *a_);
  gate.wait_reached();
  const double busy = idle(*a);
  give_a_wrong_stream_time();
  EXPECT_EQ(idle(*a), busy) << "running";

  const auto event = device_->create_event();
  device_->record(*event, *a_);
  device_->wait(*b_, *event);
  while (b->seconds().waiting == 0) std::this_thread::yield();  // counted from when it has come to the wait
  const double before = idle(*b), waited = b->waiting_for(*a_);
  EXPECT_GT(waited, 0);
  give_a_wrong_stream_time();
  EXPECT_GT(idle(*b), before) << "waiting for an event";
  EXPECT_GT(b->waiting_for(*a_), waited) << "of that stream, while it waits";
  EXPECT_EQ(a->waiting_for(*b_), 0);
  const double empty = b->seconds().empty;
  gate.open();
  b_->synchronize();
  const double waiting = b->seconds().waiting;
  EXPECT_GE(b->waiting_for(*a_), waited) << "and afterwards";
  EXPECT_EQ(b->waiting_for(*a_), waiting) << "it waited for no other stream";
  EXPECT_GE(b->seconds().empty, empty);
  a_->synchronize();
  give_a_wrong_stream_time();
  const double at_rest = idle(*a);
  EXPECT_GT(at_rest, busy) << "empty";
  a_->synchronize();
  a_->synchronize();
  EXPECT_GE(idle(*a), at_rest) << "what has been counted stays";
}

TEST_P(DeviceSuite, NoIdleTimeIsCountedTwiceHoweverOftenItIsAskedFor) {
  using Clock = std::chrono::steady_clock;
  const auto clock = device_->idle_clock(*b_);
  const auto event = device_->create_event();
  b_->synchronize();
  const Clock::time_point begin = Clock::now();
  const double at_begin = idle(*clock);
  const auto look_often = [&] {
    for (int looks = 0; looks < 20; ++looks) {
      give_a_wrong_stream_time();
      idle(*clock);
    }
  };
  look_often();
  b_->synchronize();
  Gate gate;
  gate.enqueue(*device_, *a_);
  device_->record(*event, *a_);
  device_->wait(*b_, *event);
  look_often();
  gate.open();
  b_->synchronize();
  const double counted = idle(*clock) - at_begin;
  const double passed = std::chrono::duration<double>(Clock::now() - begin).count();
  EXPECT_LE(counted, passed + 0.001) << "two clocks";
  EXPECT_GE(counted, 0.2) << "of 40 looks, 10 ms apart";
}

TEST_P(DeviceSuite, AnIdleClockOutlivesItsStream) {
  std::shared_ptr<IdleClock> clock;
  {
    const auto stream = device_->create_stream("short");
    clock = device_->idle_clock(*stream);
    device_->fill_async(hbm<std::byte>(0), std::byte{9}, 100, *stream);
    stream->synchronize();
    for (int round = 0; round < 20 && idle(*clock) == 0; ++round) {  // on a busy machine a gap may begin late
      give_a_wrong_stream_time();
      device_->fill_async(hbm<std::byte>(0), std::byte{9}, 100, *stream);
      stream->synchronize();
    }
  }
  const double at_its_end = idle(*clock);
  EXPECT_GT(at_its_end, 0);
  give_a_wrong_stream_time();
  EXPECT_EQ(idle(*clock), at_its_end);
}

TEST_P(DeviceSuite, AStopwatchTakesTheTimeOfWhatLiesBetween) {
  const auto watch = device_->create_stopwatch();
  EXPECT_EQ(watch->seconds(), std::nullopt) << "it was never started";
  double first = 0;
  for (int round = 0; round < 2; ++round) {
    Gate gate;
    watch->start(*a_);
    EXPECT_EQ(watch->seconds(), std::nullopt) << "it was not stopped again";
    gate.enqueue(*device_, *a_);
    watch->stop(*a_);
    gate.wait_reached();
    const auto begin = std::chrono::steady_clock::now();
    give_a_wrong_stream_time();
    EXPECT_EQ(watch->seconds(), std::nullopt) << "it runs";
    EXPECT_FALSE(watch->times());
    const std::chrono::duration<double> held = std::chrono::steady_clock::now() - begin;
    gate.open();
    a_->synchronize();
    ASSERT_TRUE(watch->seconds().has_value());
    const auto times = watch->times();
    ASSERT_TRUE(times.has_value());
    EXPECT_NEAR(std::chrono::duration<double>(times->end - times->begin).count(), *watch->seconds(), 1e-6);
    const std::chrono::milliseconds apart(50);  // two clocks, read one after the other
    EXPECT_LE(times->begin, begin + apart);
    EXPECT_GE(times->end - begin, held - apart);
    EXPECT_LE(times->end, std::chrono::steady_clock::now() + apart);
    EXPECT_GE(*watch->seconds(), 0.9 * held.count());
    EXPECT_NE(*watch->seconds(), first) << "of the last time";
    first = *watch->seconds();
  }
}

TEST_P(DeviceSuite, AccumulateAndCastHaveTheBitsOfTheCpuKernels) {
  auto generator = seeded_generator();
  OddFloats odd(generator);
  const std::size_t count = 200'003;  // several pieces and a tail
  std::vector<float> sum(count), more(count);
  for (std::size_t i = 0; i < count; ++i) sum[i] = odd(), more[i] = odd();
  std::vector<std::uint16_t> more16(count);
  cast(more16.data(), DType::kBFloat16, more.data(), DType::kFloat32, count);

  upload(0, sum);
  upload(2 * kMiB, more);
  device_->cast_async(hbm<std::uint16_t>(4 * kMiB), DType::kBFloat16, hbm<float>(2 * kMiB), DType::kFloat32, count,
                      *a_);
  EXPECT_EQ(download<std::uint16_t>(4 * kMiB, count), more16);

  device_->accumulate_async(hbm<float>(6 * kMiB), hbm<float>(0), DType::kFloat32, count, true, *a_);
  device_->accumulate_async(hbm<float>(6 * kMiB), hbm<float>(2 * kMiB), DType::kFloat32, count, false, *a_);
  device_->accumulate_async(hbm<float>(6 * kMiB), hbm<std::uint16_t>(4 * kMiB), DType::kBFloat16, count, false, *a_);
  accumulate(sum.data(), more.data(), DType::kFloat32, count, false);
  accumulate(sum.data(), more16.data(), DType::kBFloat16, count, false);
  const auto got = download<float>(6 * kMiB, count);
  EXPECT_EQ(std::memcmp(got.data(), sum.data(), count * sizeof(float)), 0);
}

TEST_P(DeviceSuite, TheNormHasTheBitsOfTheCpuKernel) {
  auto generator = seeded_generator();
  OddFloats odd(generator);
  const std::size_t count = 300'001;
  std::vector<float> data(count);
  for (float& x : data) x = odd();
  for (const std::uint64_t bad : {kAllFinite, std::uint64_t{123'456}}) {
    if (bad != kAllFinite) data[bad] = std::numeric_limits<float>::infinity();
    std::vector<double> leaves(div_up(count, kNormLeaf));
    const NormResult expected = squared_norm(data.data(), DType::kFloat32, count, leaves, *workers_);
    upload(0, data);
    device_->leaf_sums_async(hbm<float>(0), DType::kFloat32, count, hbm<double>(2 * kMiB), *a_);
    device_->add_leaves_async(hbm<double>(2 * kMiB), leaves.size(), hbm<NormResult>(4 * kMiB), *a_);
    const NormResult got = download<NormResult>(4 * kMiB, 1)[0];
    EXPECT_EQ(got.first_nonfinite, bad == kAllFinite ? bad : bad - bad % kNormLeaf);
    if (bad == kAllFinite) {
      EXPECT_EQ(std::bit_cast<std::uint64_t>(got.sum_of_squares),
                std::bit_cast<std::uint64_t>(expected.sum_of_squares));
    }
  }
}

TEST_P(DeviceSuite, AdamHasTheBitsOfTheReferenceAndReportsWhatIsNotFinite) {
  auto generator = seeded_generator();
  OddFloats odd(generator);
  constexpr std::size_t count = 150'001;
  std::vector<std::uint16_t> weight(count), gradient(count);
  std::vector<std::int16_t> residual(count);
  std::vector<float> exp_avg(count), exp_avg_sq(count);
  for (const bool overflow : {false, true}) {
    for (std::size_t i = 0; i < count; ++i) {
      const SplitMaster master = split_master(odd());
      weight[i] = master.weight, residual[i] = master.residual, gradient[i] = float_to_bf16(odd());
      exp_avg[i] = odd(), exp_avg_sq[i] = std::abs(odd());
    }
    if (overflow) gradient[99'999] = float_to_bf16(1e30f);
    upload(0 * kMiB, weight), upload(1 * kMiB, residual), upload(2 * kMiB, exp_avg), upload(3 * kMiB, exp_avg_sq);
    upload(4 * kMiB, gradient), upload(5 * kMiB, std::vector<std::uint32_t>{1});
    const OptimizerScalars scalars = optimizer_scalars({.weight_decay = 0.1}, 2, 0.5);
    const std::size_t begin = 1'024;  // a parameter group starts there
    const auto tile = [](void* w, std::int16_t* r, float* m, float* v, const void* g) {
      return OptimizerTile{.type = DType::kBFloat16,
                           .weight = w,
                           .residual = r,
                           .exp_avg = m,
                           .exp_avg_sq = v,
                           .gradient = g,
                           .count = count};
    };
    device_->update_async(
        tile(hbm<void*>(0), hbm<std::int16_t>(kMiB), hbm<float>(2 * kMiB), hbm<float>(3 * kMiB), hbm<void*>(4 * kMiB)),
        scalars, begin, count, hbm<std::uint32_t>(5 * kMiB), *a_);
    const bool finite = optimizer_update_reference(
        tile(weight.data(), residual.data(), exp_avg.data(), exp_avg_sq.data(), gradient.data()), scalars, begin,
        count);
    EXPECT_EQ(finite, !overflow);
    EXPECT_EQ(download<std::uint32_t>(5 * kMiB, 1)[0], finite ? 1u : 0u);
    EXPECT_EQ(download<std::uint16_t>(0, count), weight);
    EXPECT_EQ(download<std::int16_t>(kMiB, count), residual);
    EXPECT_EQ(std::memcmp(download<float>(2 * kMiB, count).data(), exp_avg.data(), count * 4), 0);
    EXPECT_EQ(std::memcmp(download<float>(3 * kMiB, count).data(), exp_avg_sq.data(), count * 4), 0);
  }
}

// The tail, a start inside the tile and arrays whose elements do not lie as one access would have them.
TEST_P(DeviceSuite, MomentsInFewerBytesHaveTheBitsOfTheReference) {
  auto generator = seeded_generator();
  constexpr std::size_t count = 20'011, begin = 1'024;
  for (const DType type : kDTypes) {
    for (const OptimizerKind kind : kReducedKinds) {
      for (const MomentFormat format : kReducedFormats) {
        for (const std::size_t shift : {0u, 4u}) {
          ReducedTile tile = random_reduced(type, kind, format, count, generator);
          tile.index = 7ull << 30;
          OptimizerTile there = tile.view();
          std::uint64_t at = 0;
          const auto move = [&](auto& array, auto* to) {
            if (array.empty()) return to;
            upload(at, std::vector<std::byte>(shift));
            upload(at + shift, array);
            to = reinterpret_cast<decltype(to)>(hbm<std::byte>(at + shift));
            at += 512 * kKiB;
            return to;
          };
          const std::uint64_t weight_at = at;
          there.weight = move(tile.weights.weight, there.weight);
          there.gradient = move(tile.weights.gradient, there.weight);
          there.residual = move(tile.weights.residual, there.residual);
          there.master = move(tile.weights.master, there.master);
          const std::uint64_t moments_at = at;
          there.reduced.exp_avg = move(tile.exp_avg, there.reduced.exp_avg);
          there.reduced.exp_avg_sq = move(tile.exp_avg_sq, there.reduced.exp_avg_sq);
          there.reduced.exp_avg_scales = move(tile.exp_avg_scales, there.reduced.exp_avg_scales);
          there.reduced.exp_avg_sq_scales = move(tile.exp_avg_sq_scales, there.reduced.exp_avg_sq_scales);
          upload(at, std::vector<std::uint32_t>{1});
          const OptimizerScalars scalars = optimizer_scalars({.kind = kind, .weight_decay = 0.1, .seed = 3}, 2, 0.5);
          device_->update_async(there, scalars, begin, count, hbm<std::uint32_t>(at), *a_);
          const bool finite = optimizer_update_reference(tile.view(), scalars, begin, count);
          EXPECT_EQ(download<std::uint32_t>(at, 1)[0], finite ? 1u : 0u);
          EXPECT_EQ(download<std::byte>(weight_at + shift, tile.weights.weight.size()), tile.weights.weight);
          at = moments_at;
          const auto same = [&](const auto& array) {
            if (array.empty()) return;
            using Element = typename std::remove_cvref_t<decltype(array)>::value_type;
            EXPECT_EQ(download<Element>(at + shift, array.size()), array) << name_of(type) << name_of(format);
            at += 512 * kKiB;
          };
          same(tile.exp_avg), same(tile.exp_avg_sq), same(tile.exp_avg_scales), same(tile.exp_avg_sq_scales);
        }
      }
    }
  }
}

TEST_P(DeviceSuite, AMomentThatItsFormDoesNotHoldIsReported) {
  const OptimizerScalars scalars = optimizer_scalars({.kind = OptimizerKind::kLion, .beta2 = 0}, 1, 1);
  for (const float gradient : {1e38f, 2e38f}) {
    ReducedTile tile(DType::kFloat32, OptimizerKind::kLion, MomentFormat::kInt8, 100);
    tile.weights.set_gradient(99, gradient);
    OptimizerTile there = tile.view();
    upload(0, tile.weights.weight), upload(kMiB, tile.weights.gradient), upload(2 * kMiB, tile.exp_avg);
    upload(3 * kMiB, tile.exp_avg_scales), upload(4 * kMiB, std::vector<std::uint32_t>{1});
    there.weight = hbm<void*>(0), there.gradient = hbm<void*>(kMiB);
    there.reduced.exp_avg = hbm<void*>(2 * kMiB), there.reduced.exp_avg_scales = hbm<std::uint16_t>(3 * kMiB);
    device_->update_async(there, scalars, 0, 100, hbm<std::uint32_t>(4 * kMiB), *a_);
    EXPECT_EQ(download<std::uint32_t>(4 * kMiB, 1)[0], gradient < 1.5e38f ? 1u : 0u);
  }
}

TEST_P(DeviceSuite, RegistrationsMustNotOverlapOrBeEmpty) {
  EXPECT_THROW(device_->register_host(std::span(pinned_).subspan(100, 10)), Error);
  EXPECT_THROW(device_->register_host({}), Error);
}

GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(DeviceSuiteDeathTest);

TEST_P(DeviceSuiteDeathTest, RefusesAWaitForAnEventThatWasNeverRecorded) {
  const auto event = device_->create_event();
  EXPECT_DEATH(device_->wait(*a_, *event), "may only wait for an event that was recorded");
}

TEST_P(DeviceSuiteDeathTest, RefusesHostMemoryThatIsNotRegistered) {
  std::vector<std::byte> other(4'096);
  EXPECT_DEATH(device_->copy_async(CopyKind::kHostToDevice, hbm<std::byte>(0), other.data(), 10, *a_), "registered");
  EXPECT_DEATH(device_->copy_async(CopyKind::kDeviceToHost, other.data(), hbm<std::byte>(0), 10, *a_), "registered");
  EXPECT_DEATH(device_->copy_lent_async(CopyKind::kHostToDevice, hbm<std::byte>(0), other.data(), 10, *a_),
               "registered");
  // One byte past the end of what is registered.
  EXPECT_DEATH(device_->copy_async(CopyKind::kHostToDevice, hbm<std::byte>(0), pinned_.data() + 1, pinned_.size(), *a_),
               "registered");
}

TEST_P(DeviceSuiteDeathTest, RefusesDeviceMemoryOutsideTheArena) {
  std::byte* const end = device_->hbm().data() + device_->hbm().size();
  EXPECT_DEATH(device_->copy_async(CopyKind::kHostToDevice, end - 9, pinned_.data(), 10, *a_), "HBM arena");
  EXPECT_DEATH(device_->fill_async(end, std::byte{0}, 1, *a_), "HBM arena");
  EXPECT_DEATH(device_->fill_async(pinned_.data(), std::byte{0}, 1, *a_), "HBM arena");
  EXPECT_DEATH(device_->cast_async(pinned_.data(), DType::kFloat32, hbm<float>(0), DType::kBFloat16, 8, *a_),
               "HBM arena");
}

}  // namespace
}  // namespace spillway
