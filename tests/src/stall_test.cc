// Where a step's time went: one part of the machine is made slow, and what grows is the cause that names it, or the
// link.
//
// The program is linked with `--wrap` (meson.build), so that the engine gets a device with slow copies, a queue whose
// completions come late, and an optimizer that takes its time.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <thread>

#include "kernels/device.h"
#include "kernels/host_device.h"
#include "kernels/optimizer.h"
#include "tests/aio/forwarding_queue.h"
#include "tests/src/comm/forwarding.h"
#include "tests/src/comm/thread_ranks.h"
#include "tests/src/small_case.h"
#include "tests/src/toy_trainer.h"

#define SPILLWAY_CREATE_DEVICE "_ZN8spillway18create_host_deviceERKNS_17HostDeviceOptionsERNS_11HostWorkersE"
#define SPILLWAY_UPDATE "_ZN8spillway16optimizer_updateERKNS_13OptimizerTileERKNS_16OptimizerScalarsEmm"

namespace spillway {
namespace {

using Clock = std::chrono::steady_clock;
using Seconds = std::chrono::duration<double>;

// Seconds that everything of its kind takes longer.
struct Slow {
  double copy = 0, read = 0, write = 0, sync = 0, update = 0;
  double gather = 0, scatter = 0;  // a call between ranks
  double drive_rate = 0;           // bytes per second, all transfers together; 0: the drive's own
};
Slow slow;

double delay_of(IoOp op) { return op == IoOp::kRead ? slow.read : slow.write; }
Clock::duration in(double seconds) { return std::chrono::duration_cast<Clock::duration>(Seconds(seconds)); }

// Completions come late by the delay of their kind, without holding up each other; at a drive's rate, one after the
// other. A sync takes its delay and nothing else: what the machine's own drive would need for one is not known.
class LateQueue final : public testing::ForwardingQueue {
 public:
  explicit LateQueue(std::unique_ptr<IoQueue> to) : ForwardingQueue(std::move(to)), kinds_(4096), bytes_(4096) {
    late_.reserve(4096);
  }

  void submit(const IoRequest& request) override {
    if (request.op == IoOp::kSync) {
      late_.push_back({{.tag = request.tag}, Clock::now() + in(slow.sync)});
      return;
    }
    kinds_[request.tag] = request.op;
    bytes_[request.tag] = request.bytes;
    real_->submit(request);
  }
  std::span<IoCompletion> wait(std::span<IoCompletion> out, double) override {
    for (const IoCompletion& done : real_->wait(out, late_.empty() ? -1 : 1e-4)) {
      Clock::time_point due = Clock::now() + in(delay_of(kinds_[done.tag]));
      if (slow.drive_rate > 0) {
        const double seconds = static_cast<double>(bytes_[done.tag]) / slow.drive_rate;
        due = free_ = std::max(free_, Clock::now()) + in(seconds);
      }
      late_.push_back({done, due});
    }
    std::size_t count = 0;
    for (auto late = late_.begin(); late != late_.end() && count < out.size();) {
      if (late->due > Clock::now()) {
        ++late;
        continue;
      }
      out[count++] = late->completion;
      late = late_.erase(late);
    }
    return out.first(count);
  }
  std::uint32_t pending() const noexcept override {
    return real_->pending() + static_cast<std::uint32_t>(late_.size());
  }

 private:
  struct Late {
    IoCompletion completion;
    Clock::time_point due;
  };
  std::vector<IoOp> kinds_;           // by tag
  std::vector<std::uint64_t> bytes_;  // ditto
  Clock::time_point free_{};          // when a drive of that rate has done everything so far
  std::vector<Late> late_;
};

}  // namespace

std::unique_ptr<IoQueue> real_queue(const IoQueueOptions&, Files, Regions) __asm__("__real_" SPILLWAY_CREATE_QUEUE);
std::unique_ptr<IoQueue> late_queue(const IoQueueOptions&, Files, Regions) __asm__("__wrap_" SPILLWAY_CREATE_QUEUE);
std::unique_ptr<IoQueue> late_queue(const IoQueueOptions& options, Files files, Regions regions) {
  return std::make_unique<LateQueue>(real_queue(options, files, regions));
}

std::unique_ptr<Device> real_device(const HostDeviceOptions&, HostWorkers&) __asm__("__real_" SPILLWAY_CREATE_DEVICE);
std::unique_ptr<Device> slow_device(const HostDeviceOptions&, HostWorkers&) __asm__("__wrap_" SPILLWAY_CREATE_DEVICE);
std::unique_ptr<Device> slow_device(const HostDeviceOptions& options, HostWorkers& workers) {
  return real_device({.hbm_bytes = options.hbm_bytes, .copy_delay_seconds = slow.copy}, workers);
}

using Range = std::size_t;
bool real_update(const OptimizerTile&, const OptimizerScalars&, Range, Range) __asm__("__real_" SPILLWAY_UPDATE);
bool slow_update(const OptimizerTile&, const OptimizerScalars&, Range, Range) __asm__("__wrap_" SPILLWAY_UPDATE);
bool slow_update(const OptimizerTile& tile, const OptimizerScalars& scalars, Range begin, Range end) {
  if (slow.update > 0) std::this_thread::sleep_for(Seconds(slow.update));
  return real_update(tile, scalars, begin, end);
}

namespace {

constexpr int kSteps = 4;
constexpr double kDelay = 20e-3;  // a step of this model takes a few milliseconds

struct Stalls {
  StallSeconds by_cause;
  double stalled = 0, seconds = 0;
};

// All steps but the first, which has no update.
Stalls stalls_of(const Slow& how, double caller_sleeps = 0) {
  slow = how;
  const TempDirectory directory = testing::quick_directory();  // where nothing but the test is slow
  const ModelDescription model = testing::toy_model(5, 3000, 1);
  const Config config = testing::toy_config(Placement::kNvme, Placement::kNvme, DType::kBFloat16, directory / "store");
  auto engine = Engine::create(config, model);
  engine->import_weights(testing::toy_weights());
  testing::ToyTrainer trainer{*engine, model, config.weights, 1};
  trainer.between = [&] {
    if (caller_sleeps > 0) std::this_thread::sleep_for(Seconds(caller_sleeps));
  };
  Stalls sum;
  for (int step = 0; step < kSteps; ++step) {
    const StepReport report = trainer.run_step();
    EXPECT_NEAR(report.stalls.total(), report.stall_seconds, 1e-9);
    EXPECT_LE(report.stall_seconds, report.seconds * (1 + 1e-6));
    if (step == 0) continue;
    sum.stalled += report.stall_seconds;
    sum.seconds += report.seconds;
    for (std::size_t cause = 0; cause < kStallNames.size(); ++cause) {
      EXPECT_GT(report.stalls.of[cause], -1e-4) << kStallNames[cause];
      sum.by_cause.of[cause] += report.stalls.of[cause];
    }
  }
  engine.reset();
  slow = {};
  return sum;
}

std::string largest(const Stalls& stalls) {
  const auto& of = stalls.by_cause.of;
  return kStallNames[static_cast<std::size_t>(std::ranges::max_element(of) - of.begin())];
}

TEST(Stall, SlowReadsAreReads) { EXPECT_EQ(largest(stalls_of({.read = kDelay})), "read"); }

TEST(Stall, SlowWritesAreWrites) { EXPECT_EQ(largest(stalls_of({.write = kDelay})), "write"); }

TEST(Stall, SlowSyncsAreTheCommit) { EXPECT_EQ(largest(stalls_of({.sync = 3 * kDelay})), "commit"); }

TEST(Stall, ASlowOptimizerIsTheUpdate) { EXPECT_EQ(largest(stalls_of({.update = kDelay})), "update"); }

TEST(Stall, ASlowCallerIsNoneOfOurs) { EXPECT_EQ(largest(stalls_of({}, kDelay)), "other"); }

// Weights go up and gradients down.
TEST(Stall, SlowCopiesAreCopiesAndGradients) {
  const Stalls stalls = stalls_of({.copy = kDelay / 4});
  const double copy = stalls.by_cause[StallCause::kCopy], gradient = stalls.by_cause[StallCause::kGradient];
  EXPECT_EQ(largest(stalls), "copy");
  EXPECT_GT(copy + gradient, 0.5 * stalls.stalled);
  EXPECT_GT(gradient, kDelay / 4);
}

class SlowNetwork final : public testing::Forwarding {
 public:
  using Forwarding::Forwarding;

 private:
  void before(const Collective& call, Stream& stream) override {
    const bool gathers = call.kind == CollectiveKind::kAllGather,
               scatters = call.kind == CollectiveKind::kReduceScatter;
    const double seconds = gathers ? slow.gather : scatters ? slow.scatter : 0;
    if (seconds > 0) stream.launch([seconds](HostWorkers&) { std::this_thread::sleep_for(Seconds(seconds)); });
  }
};

// Of one of two ranks, in its last step.
StepReport step_of_ranks(const Slow& how) {
  StepReport last;
  const TempDirectory directory = testing::quick_directory();
  slow = how;
  testing::run_ranks(2, [&](Communicator& communicator) {
    SlowNetwork network(communicator);
    const ModelDescription model = testing::toy_model(5, 3000, 1);
    Config config = testing::toy_config(Placement::kNvme, Placement::kNvme, DType::kBFloat16,
                                        directory / ("rank" + std::to_string(communicator.rank())));
    config.threads = 1;
    auto engine = Engine::create(config, model, {.communicator = &network});
    engine->import_weights(testing::toy_weights());
    testing::ToyTrainer trainer{*engine, model, config.weights, 1};
    for (int step = 0; step < kSteps; ++step) {
      const StepReport report = trainer.run_step();
      if (communicator.rank() == 0) last = report;
    }
  });
  slow = {};
  return last;
}

// Waiting for what others bring, and at a step's end for what goes to them.
TEST(Stall, ASlowNetworkIsTheNetwork) {
  for (const Slow& how : {Slow{.gather = kDelay}, Slow{.scatter = kDelay}}) {
    const StepReport report = step_of_ranks(how);
    EXPECT_EQ(largest({.by_cause = report.stalls}), "network");
    EXPECT_GT(report.stalls[StallCause::kNetwork], 0.5 * report.stall_seconds);
  }
}

// Measured at its beginning, as a rate: calls that each take long are what limits.
TEST(Link, IsTheNetworkWhereThatIsSlow) { EXPECT_EQ(step_of_ranks({.gather = kDelay}).link, "network"); }

// The link that the last of three steps names, of a model whose every visit computes so long.
StepReport limited(const Slow& how, double visit_seconds) {
  slow = how;
  const TempDirectory directory = testing::quick_directory();
  const ModelDescription model = testing::toy_model(5, 60'000, 1);
  Config config = testing::toy_config(Placement::kNvme, Placement::kNvme, DType::kBFloat16, directory / "store");
  config.tile_elements = 128 * 1024;  // the drive is measured with requests of 1 MiB
  auto engine = Engine::create(config, model);
  engine->import_weights(testing::toy_weights());
  testing::ToyTrainer trainer{*engine, model, config.weights, 1};
  trainer.between = [&] {
    engine->stream().launch([visit_seconds](HostWorkers&) { std::this_thread::sleep_for(Seconds(visit_seconds)); });
  };
  for (int step = 0; step < 2; ++step) trainer.run_step();
  StepReport report = trainer.run_step();
  engine.reset();
  slow = {};
  return report;
}

// The drive takes 60 ms for what the fast one reads and writes in a step of 0.8 s, and 1 s when it is slow.
TEST(Link, IsComputeWhereTheDeviceIsSlowAndTheDriveWhereThatIs) {
  constexpr double kSlowVisit = 60e-3, kFastRate = 1e9, kSlowRate = 60e6;
  const StepReport computing = limited({.drive_rate = kFastRate}, kSlowVisit);
  EXPECT_EQ(computing.link, "compute");
  EXPECT_GT(computing.link_percent, 50);
  EXPECT_LT(computing.stall_seconds, 0.25 * computing.seconds) << "what the drive does is hidden behind compute";
  const StepReport moving = limited({.drive_rate = kSlowRate}, 0);
  EXPECT_EQ(moving.link, "nvme");
  EXPECT_GT(moving.link_percent, 50);
  EXPECT_GT(moving.stall_seconds, computing.stall_seconds);
}

}  // namespace
}  // namespace spillway
