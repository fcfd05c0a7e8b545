// The cuda device: the behaviour suite, and the kernels' bits against the CPU's for every type, length and alignment.
// Skips, saying why, where there is no GPU.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <future>
#include <limits>
#include <thread>

#include "kernels/convert.h"
#include "kernels/cuda/loader.h"
#include "kernels/optimizer.h"
#include "spillway/error.h"
#include "spillway/log.h"
#include "spillway/units.h"
#include "tests/kernels/device_suite.h"
#include "tests/kernels/gate.h"
#include "tests/kernels/optimizer_tile.h"
#include "tests/kernels/random.h"

namespace spillway {

std::unique_ptr<Device> make_cuda(HostWorkers&) {
  if (const std::string why = cuda_unavailable(); !why.empty()) {
    std::printf("no cuda device: %s\n", why.c_str());
    return nullptr;
  }
  return create_cuda_device({.hbm_bytes = 64 * kMiB});
}

const auto kCaseName = [](const auto& info) { return info.param.name; };
const auto kCudaCase = testing::Values(DeviceCase{"cuda", make_cuda});
INSTANTIATE_TEST_SUITE_P(Cuda, DeviceSuite, kCudaCase, kCaseName);
INSTANTIATE_TEST_SUITE_P(Cuda, DeviceSuiteDeathTest, kCudaCase, kCaseName);

namespace {

class CudaDevice : public testing::Test {
 protected:
  void SetUp() override {
    if (const std::string why = cuda_unavailable(); !why.empty()) GTEST_SKIP() << "no cuda device: " << why;
    device_ = create_cuda_device({.hbm_bytes = 64 * kMiB});
    pinned_.resize(32 * kMiB);
    device_->register_host(pinned_);
    stream_ = device_->create_stream("test");
  }
  void TearDown() override {
    if (device_) device_->unregister_host(pinned_);
  }

  std::byte* hbm(std::size_t offset) { return device_->hbm().data() + offset; }
  void upload(std::size_t offset, const void* from, std::size_t bytes) {
    if (bytes == 0) return;
    std::memcpy(pinned_.data(), from, bytes);
    device_->copy_async(CopyKind::kHostToDevice, hbm(offset), pinned_.data(), bytes, *stream_);
    stream_->synchronize();
  }
  void download(void* to, std::size_t offset, std::size_t bytes) {
    if (bytes == 0) return;
    device_->copy_async(CopyKind::kDeviceToHost, pinned_.data(), hbm(offset), bytes, *stream_);
    stream_->synchronize();
    std::memcpy(to, pinned_.data(), bytes);
  }
  void expect_waited_for(cudaStream_t raw) {
    const auto theirs = device_->adopt_stream(raw);
    EXPECT_EQ(theirs->native(), raw);
    Gate gate;
    const auto event = device_->create_event();
    gate.enqueue(*device_, *theirs);
    device_->fill_async(hbm(0), std::byte{7}, 1'000, *theirs);
    device_->record(*event, *theirs);
    device_->wait(*stream_, *event);
    device_->copy_async(CopyKind::kDeviceToDevice, hbm(kMiB), hbm(0), 1'000, *stream_);
    give_a_wrong_stream_time();
    gate.open();
    std::vector<std::byte> got(1'000);
    download(got.data(), kMiB, got.size());
    EXPECT_EQ(got, std::vector<std::byte>(1'000, std::byte{7}));
    theirs->synchronize();
  }

  std::unique_ptr<HostWorkers> workers_ = create_workers(2);
  std::unique_ptr<Device> device_;
  std::vector<std::byte> pinned_;
  std::unique_ptr<Stream> stream_;
};

// Bits of any kind: numbers of all sizes, infinities and NaNs with payloads.
std::vector<std::byte> any_bits(std::mt19937_64& generator, std::size_t bytes) {
  std::vector<std::byte> bits(bytes);
  for (std::byte& b : bits) b = static_cast<std::byte>(generator());
  return bits;
}

TEST_F(CudaDevice, EveryCastHasTheBitsOfTheCpuKernelThoseOfNaNToo) {
  auto generator = seeded_generator();
  for (const DType to : kDTypes) {
    for (const DType from : kDTypes) {
      for (const std::size_t count : {1u, 7u, 1'024u, 70'003u}) {
        for (const std::size_t shift : {0u, 1u, 8u}) {
          std::vector<std::byte> in = any_bits(generator, count * size_of(from));
          std::vector<std::byte> expected(count * size_of(to)), got(expected.size());
          cast(expected.data(), to, in.data(), from, count);
          const std::size_t at = shift * size_of(from), out = 8 * kMiB + shift * size_of(to);
          upload(at, in.data(), in.size());
          device_->fill_async(hbm(8 * kMiB), std::byte{0x5a}, expected.size() + 128, *stream_);
          device_->cast_async(hbm(out), to, hbm(at), from, count, *stream_);
          download(got.data(), out, got.size());
          ASSERT_EQ(got, expected) << name_of(from) << " to " << name_of(to) << ", " << count << " from " << shift;
          std::byte behind{};
          download(&behind, out + got.size(), 1);
          ASSERT_EQ(behind, std::byte{0x5a});
        }
      }
    }
  }
}

TEST_F(CudaDevice, EveryNormHasTheBitsOfTheCpuKernel) {
  auto generator = seeded_generator();
  OddFloats odd(generator);
  for (const DType type : kDTypes) {
    for (const std::size_t count : {1u, 15u, 1'023u, 1'024u, 1'025u, 300'001u, 1'050'000u}) {
      std::vector<float> values(count);
      for (float& x : values) x = type == DType::kFloat16 ? odd() * 0x1p-100f : odd();
      std::vector<std::byte> data(count * size_of(type));
      cast(data.data(), type, values.data(), DType::kFloat32, count);
      std::vector<double> leaves(div_up(count, kNormLeaf));
      const NormResult expected = squared_norm(data.data(), type, count, leaves, *workers_);
      upload(0, data.data(), data.size());
      device_->fill_async(hbm(16 * kMiB), std::byte{0x11}, sizeof(NormResult), *stream_);
      auto* const sums = reinterpret_cast<double*>(hbm(8 * kMiB));
      device_->leaf_sums_async(hbm(0), type, count, sums, *stream_);
      device_->add_leaves_async(sums, leaves.size(), reinterpret_cast<NormResult*>(hbm(16 * kMiB)), *stream_);
      NormResult got;
      download(&got, 16 * kMiB, sizeof got);
      EXPECT_EQ(got.first_nonfinite, expected.first_nonfinite) << name_of(type) << " " << count;
      EXPECT_EQ(std::bit_cast<std::uint64_t>(got.sum_of_squares), std::bit_cast<std::uint64_t>(expected.sum_of_squares))
          << name_of(type) << " " << count;
    }
  }
}

std::vector<OptimizerConfig> optimizer_configs(OptimizerKind kind) {
  OptimizerConfig plain{.kind = kind};
  OptimizerConfig decayed{.kind = kind, .weight_decay = 0.1};
  OptimizerConfig other{.kind = kind, .weight_decay = 0.1, .decoupled_decay = false};
  if (kind == OptimizerKind::kSgd) decayed.momentum = 0.9, other.momentum = 0.9, other.nesterov = true;
  if (kind == OptimizerKind::kSgd) other.dampening = 0;
  return {plain, decayed, other};
}

// What lies where on the device: arrays of up to 2 MiB, each with its own shift from a round address.
class DeviceTile {
 public:
  DeviceTile(std::byte* memory, OwnedTile& tile, std::size_t shift) {
    const OptimizerTile host = tile.view();
    device = host;
    std::size_t slot = 0;
    const auto place = [&](auto*& array, std::size_t element_bytes) {
      if (array == nullptr) return;
      std::byte* at = memory + slot++ * 3 * kMiB + shift * element_bytes;
      parts.push_back({const_cast<void*>(static_cast<const void*>(array)), at, tile.count * element_bytes});
      array = reinterpret_cast<std::remove_reference_t<decltype(array)>>(at);
    };
    place(device.weight, size_of(tile.type));
    place(device.residual, sizeof(std::int16_t));
    place(device.master, sizeof(float));
    place(device.exp_avg, sizeof(float));
    place(device.exp_avg_sq, sizeof(float));
    place(device.gradient, size_of(tile.type));
  }
  struct Part {
    void* host;
    std::byte* device;
    std::size_t bytes;
  };
  OptimizerTile device;
  std::vector<Part> parts;
};

TEST_F(CudaDevice, EveryOptimizerHasTheBitsOfTheReference) {
  auto generator = seeded_generator();
  OddFloats odd(generator);
  for (const DType type : kDTypes) {
    for (const OptimizerKind kind : kOptimizerKinds) {
      for (const OptimizerConfig& config : optimizer_configs(kind)) {
        for (const std::size_t count : {1u, 9u, 1'024u, 20'011u}) {
          for (const std::size_t shift : {0u, 3u}) {
            OwnedTile tile(type, kind, count);
            for (std::size_t i = 0; i < count; ++i) {
              const float small = type == DType::kFloat16 ? 0x1p-110f : 1;
              tile.set(i, odd() * small, odd(), std::abs(odd()), odd() * small);
            }
            const OptimizerScalars scalars = optimizer_scalars(config, 1 + count % 3, 0.25);
            const DeviceTile placed(hbm(0), tile, shift);
            for (const auto& part : placed.parts) {
              upload(static_cast<std::size_t>(part.device - hbm(0)), part.host, part.bytes);
            }
            auto* flag = reinterpret_cast<std::uint32_t*>(hbm(40 * kMiB));
            device_->fill_async(flag, std::byte{1}, sizeof *flag, *stream_);
            const std::size_t begin = count > 1'024 ? 1'024 : 0;
            device_->update_async(placed.device, scalars, begin, count, flag, *stream_);
            const bool finite = optimizer_update_reference(tile.view(), scalars, begin, count);
            std::uint32_t got_finite = 7;
            download(&got_finite, 40 * kMiB, sizeof got_finite);
            EXPECT_EQ(got_finite != 0, finite);
            for (const auto& part : placed.parts) {
              std::vector<std::byte> got(part.bytes);
              download(got.data(), static_cast<std::size_t>(part.device - hbm(0)), part.bytes);
              // A NaN's bits are no contract: the update is refused, and nobody reads them.
              if (finite) {
                ASSERT_EQ(std::memcmp(got.data(), part.host, part.bytes), 0)
                    << name_of(type) << " " << name_of(kind) << " " << count << " from " << shift;
              }
            }
          }
        }
      }
    }
  }
}

TEST_F(CudaDevice, AStreamOfTheCallersIsWaitedFor) {
  cudaStream_t raw = nullptr;
  ASSERT_EQ(cudaStreamCreateWithFlags(&raw, cudaStreamNonBlocking), cudaSuccess);
  expect_waited_for(raw);
  EXPECT_EQ(cudaStreamQuery(raw), cudaSuccess) << "it is still the caller's";
  EXPECT_EQ(cudaStreamDestroy(raw), cudaSuccess);
}

// It has no other name than null, and PyTorch works on it unless told otherwise.
TEST_F(CudaDevice, TheDefaultStreamOfTheCallersIsWaitedFor) { expect_waited_for(nullptr); }

TEST_F(CudaDevice, AHostTaskIsRefused) {
  try {
    stream_->launch([](HostWorkers&) {});
    FAIL() << "nothing was refused";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Code::kUnsupported);
    EXPECT_NE(std::string(error.what()).find("native()"), std::string::npos) << error.what();
  }
}

TEST_F(CudaDevice, MoreMemoryThanThereIsIsRefusedWithTheNumbers) {
  try {
    create_cuda_device({.hbm_bytes = std::uint64_t{1} << 45});
    FAIL() << "32 TiB of HBM";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Code::kDoesNotFit);
    EXPECT_NE(std::string(error.what()).find("33554432 MiB are asked for"), std::string::npos) << error.what();
    EXPECT_NE(error.parts().hint.find("spillway.hbm_bytes"), std::string::npos);
  }
  upload(0, "still alive", 11);  // the refusal leaves no error behind
}

TEST_F(CudaDevice, AProgramHearsWhatThePluginSays) {
  ::setenv("SPILLWAY_EMULATED_GPU_MIB", "300", 1);  // of an emulated one
  std::size_t left = 0, all = 0;
  ASSERT_EQ(cudaMemGetInfo(&left, &all), cudaSuccess);
  std::string heard;
  set_log_sink([&](LogLevel, std::string_view text) { heard += text; });
  create_cuda_device({.hbm_bytes = left - 200 * kMiB});
  set_log_sink({});
  ::unsetenv("SPILLWAY_EMULATED_GPU_MIB");
  EXPECT_NE(heard.find("MiB are left beside hbm_bytes"), std::string::npos) << heard;
}

TEST_F(CudaDevice, ADefaultStreamIsNeverUsedUnasked) {
  EXPECT_NE(stream_->native(), nullptr);
  unsigned flags = 0;
  ASSERT_EQ(cudaStreamGetFlags(static_cast<cudaStream_t>(stream_->native()), &flags), cudaSuccess);
  EXPECT_EQ(flags, unsigned{cudaStreamNonBlocking}) << "it must not wait for the default stream either";
}

// What a program launches by itself on a stream of Spillway's.
class OwnWork {
 public:
  explicit OwnWork(const Stream& stream) {
    EXPECT_EQ(cudaLaunchHostFunc(
                  static_cast<cudaStream_t>(stream.native()),
                  [](void* own) { static_cast<OwnWork*>(own)->open_.get_future().wait(); }, this),
              cudaSuccess);
  }
  void end() { open_.set_value(); }

 private:
  std::promise<void> open_;
};

void wait_until_empty(const Stream& stream) {
  EXPECT_EQ(cudaStreamSynchronize(static_cast<cudaStream_t>(stream.native())), cudaSuccess);
}

TEST_F(CudaDevice, IdleTimeThatWasCountedStaysWhateverRanUnseen) {
  const auto clock = device_->idle_clock(*stream_);
  stream_->synchronize();
  OwnWork work(*stream_), more(*stream_);
  give_a_wrong_stream_time();
  work.end();
  more.end();
  wait_until_empty(*stream_);
  const double counted = clock->seconds().empty;  // for all that the clock knows
  OwnWork last(*stream_);
  const auto event = device_->create_event();
  device_->record(*event, *stream_);
  EXPECT_GE(clock->seconds().empty, counted) << "the stream is found busy";
  last.end();
  stream_->synchronize();
  EXPECT_GE(clock->seconds().empty, counted);
}

TEST_F(CudaDevice, AWaitThatWasCountedStays) {
  const auto clock = device_->idle_clock(*stream_);
  const auto other = device_->create_stream("other");
  for (int i = 0; i < 200; ++i) {
    OwnWork work(*other);
    const auto event = device_->create_event();
    device_->record(*event, *other);
    device_->wait(*stream_, *event);
    std::thread end([&] { work.end(); });
    double counted = 0;
    for (int looks = 0; looks < 20; ++looks) {
      const double now = clock->seconds().waiting;
      ASSERT_GE(now, counted);
      ASSERT_EQ(clock->waiting_for(*other), now);
      counted = now;
    }
    end.join();
    wait_until_empty(*stream_);
    ASSERT_GE(clock->seconds().waiting, counted);
  }
}

TEST_F(CudaDevice, InAVisitTheStreamIsIdleOnlyWhileTheCallerWaits) {
  const auto clock = device_->idle_clock(*stream_);
  const auto watch = device_->create_stopwatch();
  const auto event = device_->create_event();
  watch->start(*stream_);
  const double at_start = clock->seconds().empty;
  device_->record(*event, *stream_);
  OwnWork work(*stream_);
  give_a_wrong_stream_time();
  work.end();
  wait_until_empty(*stream_);
  EXPECT_EQ(clock->seconds().empty, at_start) << "nobody knows that it ran no longer";
  device_->record(*event, *stream_);
  EXPECT_EQ(clock->seconds().empty, at_start);

  clock->caller_waits(true);
  wait_until_empty(*stream_);
  give_a_wrong_stream_time();
  const double waited = clock->seconds().empty;
  EXPECT_GT(waited, at_start) << "nothing can have been launched";
  clock->caller_waits(false);
  give_a_wrong_stream_time();
  EXPECT_EQ(clock->seconds().empty, waited);

  watch->stop(*stream_);
  wait_until_empty(*stream_);
  give_a_wrong_stream_time();
  EXPECT_GT(clock->seconds().empty, waited) << "the visit is over";
}

TEST_F(CudaDevice, AProgramMayCaptureAGraphMeanwhile) {
  const auto event = device_->create_event();
  device_->record(*event, *stream_);
  stream_->synchronize();
  cudaStream_t own = nullptr;
  ASSERT_EQ(cudaStreamCreateWithFlags(&own, cudaStreamNonBlocking), cudaSuccess);
  ASSERT_EQ(cudaStreamBeginCapture(own, cudaStreamCaptureModeGlobal), cudaSuccess);
  std::this_thread::sleep_for(std::chrono::milliseconds(600));      // who looks after the GPU does so every 250
  std::thread([&] { EXPECT_TRUE(device_->done(*event)); }).join();  // as the store's does
  cudaGraph_t graph = nullptr;
  EXPECT_EQ(cudaStreamEndCapture(own, &graph), cudaSuccess);
  device_->throw_if_failed();
  EXPECT_EQ(cudaGraphDestroy(graph), cudaSuccess);
  EXPECT_EQ(cudaStreamDestroy(own), cudaSuccess);
  upload(0, "still alive", 11);
}

TEST(CudaPlugin, SaysWhyThereIsNoDevice) {
  if (const std::string why = cuda_unavailable(); !why.empty()) {
    try {
      create_cuda_device({.hbm_bytes = kMiB});
      FAIL() << "a device although " << why;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), Code::kUnsupported);
      EXPECT_NE(std::string(error.what()).find(why), std::string::npos) << error.what();
    }
  } else {
    EXPECT_NE(create_cuda_device({.hbm_bytes = kMiB})->describe().find("sm_"), std::string::npos);
  }
}

}  // namespace
}  // namespace spillway
