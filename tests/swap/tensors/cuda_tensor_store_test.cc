// Named tensors on a GPU: memory and streams that the caller has from CUDA, and a GPU that fails. Skips, saying why,
// where there is none.
#include <cuda_runtime_api.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <map>
#include <string>

#include "kernels/cuda/loader.h"
#include "spillway/error.h"
#include "tests/error_of.h"
#include "tests/swap/tensors/tensor_store_fixture.h"

namespace spillway {
namespace {

using namespace testing;
using ::testing::HasSubstr;

constexpr std::size_t kBytes = 400'000;

// An allocation beside the store's.
class GpuBytes {
 public:
  explicit GpuBytes(std::size_t bytes) : bytes_(bytes) {
    if (cudaMalloc(&data_, bytes) != cudaSuccess) data_ = nullptr;
  }
  explicit GpuBytes(const Bytes& bytes) : GpuBytes(bytes.size()) {
    static_cast<void>(cudaMemcpy(data_, bytes.data(), bytes.size(), cudaMemcpyHostToDevice));
  }
  ~GpuBytes() { static_cast<void>(cudaFree(data_)); }
  GpuBytes(const GpuBytes&) = delete;
  GpuBytes& operator=(const GpuBytes&) = delete;

  std::byte* data() const { return static_cast<std::byte*>(data_); }
  std::span<std::byte> span() const { return {data(), bytes_}; }
  static Bytes read(std::span<const std::byte> memory) {
    Bytes bytes(memory.size());
    static_cast<void>(cudaMemcpy(bytes.data(), memory.data(), memory.size(), cudaMemcpyDeviceToHost));
    return bytes;
  }

 private:
  void* data_ = nullptr;
  std::size_t bytes_;
};

class TensorStoreOnGpu : public TensorStoreTest {
 protected:
  void SetUp() override {
    if (const std::string why = cuda_unavailable(); !why.empty()) GTEST_SKIP() << "no cuda device: " << why;
    TensorStoreOptions wanted = options();
    wanted.host_bytes = 4 * kMiB;
    wanted.hbm_bytes = 2 * kMiB;  // any GPU that there is
    open(wanted);
    ASSERT_EQ(store_->device(), DeviceKind::kCuda);
  }
  void put_up(const std::string& name, const GpuBytes& from, void* stream = nullptr) {
    const TensorToPut tensor{.name = name,
                             .shape = {"uint8", {from.span().size()}},
                             .data = from.span(),
                             .memory = Placement::kHbm,
                             .stream = stream};
    store_->put({&tensor, 1});
  }
  void get_up(const std::string& name, const GpuBytes& out, void* stream = nullptr) {
    const TensorToGet tensor{.name = name, .out = out.span(), .memory = Placement::kHbm, .stream = stream};
    store_->get({&tensor, 1});
  }
};

TEST_F(TensorStoreOnGpu, MemoryOfCudasComesBackFromEveryTier) {
  for (int i = 0; i < 30; ++i) put_up(std::to_string(i), GpuBytes(bytes_of(i, kBytes)));
  EXPECT_GT(store_->stats().hbm_evictions, 20u);
  EXPECT_GT(store_->stats().evictions, 10u);
  store_->commit();
  const GpuBytes out(kBytes);
  for (int i = 0; i < 30; ++i) {
    get_up(std::to_string(i), out);
    ASSERT_EQ(GpuBytes::read(out.span()), bytes_of(i, kBytes));
    ASSERT_EQ(get(std::to_string(29 - i)), bytes_of(29 - i, kBytes));
  }
  // Larger than HBM, and than host memory.
  for (const std::size_t size : {std::size_t{2'500'000}, std::size_t{7'000'000}}) {
    const std::string name = std::to_string(size);
    const GpuBytes large(bytes_of(size, size)), back(size);
    put_up(name, large);
    get_up(name, back);
    ASSERT_EQ(GpuBytes::read(back.span()), bytes_of(size, size));
  }
}

TEST_F(TensorStoreOnGpu, WhatIsPinnedIsMemoryOfTheGpu) {
  put("a", bytes_of(1, kBytes));
  const auto there = store_->pin("a", Placement::kHbm);
  for (int i = 0; i < 8; ++i) put_up(std::to_string(i), GpuBytes(bytes_of(i, kBytes)));
  EXPECT_EQ(GpuBytes::read(there), bytes_of(1, kBytes));
  store_->unpin("a", Placement::kHbm);
  const std::string name = "0";
  EXPECT_EQ(1u, store_->prefetch({&name, 1}, Placement::kHbm));
  const GpuBytes out(kBytes);
  get_up("0", out);
  EXPECT_EQ(GpuBytes::read(out.span()), bytes_of(0, kBytes));
}

// A put reads what the stream has written by then, and what the stream does next has what a get has brought.
TEST_F(TensorStoreOnGpu, CallsAreInTheOrderOfTheStream) {
  cudaStream_t stream = nullptr;
  ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
  const GpuBytes memory(kBytes), other(kBytes);
  for (int i = 0; i < 20; ++i) {
    static_cast<void>(cudaMemsetAsync(memory.data(), 100 + i, kBytes, stream));
    put_up("a", memory, stream);
    static_cast<void>(cudaMemsetAsync(memory.data(), 0, kBytes, stream));
    get_up("a", memory, stream);
    static_cast<void>(cudaMemcpyAsync(other.data(), memory.data(), kBytes, cudaMemcpyDeviceToDevice, stream));
    static_cast<void>(cudaStreamSynchronize(stream));
    ASSERT_EQ(GpuBytes::read(other.span()), Bytes(kBytes, static_cast<std::byte>(100 + i)));
  }
  static_cast<void>(cudaStreamDestroy(stream));
}

TEST_F(TensorStoreOnGpu, OneThatIsTooSmallIsNamed) {
  TensorStoreOptions wanted;
  wanted.host_bytes = kMiB;
  wanted.hbm_bytes = std::uint64_t{1} << 40;
  const Error error = error_of([&] { TensorStore::open(wanted); });
  EXPECT_EQ(error.code(), Code::kDoesNotFit);
  EXPECT_THAT(error.what(), HasSubstr("hbm_bytes: 1048576 MiB are asked for"));
  EXPECT_THAT(error.what(), HasSubstr("; give less than is free"));
}

// By AGpuThatFails, in a process whose GPU fails at some call.
TEST_F(TensorStoreOnGpu, DISABLED_Fails) {
  std::map<std::string, Bytes> below;
  for (int i = 0; i < 3; ++i)
    put("host " + std::to_string(i), below["host " + std::to_string(i)] = bytes_of(i, kBytes));
  store_->commit();
  std::optional<Error> failed;
  for (int i = 0; !failed && i < 10'000; ++i) {
    try {
      put_up("up " + std::to_string(i % 4), GpuBytes(kBytes));
      const GpuBytes out(kBytes);
      get_up("host " + std::to_string(i % 3), out);
    } catch (const Error& error) {
      failed = error;
    }
  }
  ASSERT_TRUE(failed);
  EXPECT_EQ(failed->code(), Code::kDevice);
  EXPECT_THAT(failed->what(), HasSubstr("host memory and NVMe still have what they had"));
  for (const auto& [name, bytes] : below) EXPECT_EQ(get(name), bytes) << name;
  put("new", bytes_of(50, kBytes));
  std::vector<std::string> lost;
  for (const TensorInfo& info : store_->list()) {
    if (info.in_host || info.on_nvme) continue;
    const Error error = error_of([&] { get(info.name); });
    EXPECT_EQ(error.code(), Code::kDevice);
    EXPECT_EQ(error.parts().object, info.name);
    lost.push_back(info.name);
  }
  if (!lost.empty()) {
    EXPECT_EQ(error_of([&] { store_->commit(); }).code(), Code::kDevice);
    put(lost.back(), bytes_of(51, kBytes));  // which may be other bytes
    lost.pop_back();
    store_->remove(lost);
  }
  store_->commit();
  open(options());
  for (const auto& [name, bytes] : below) EXPECT_EQ(get(name), bytes) << name;
  EXPECT_EQ(get("new"), bytes_of(50, kBytes));
}

// By AGpuThatFails, in a process whose GPU fails at a call that is far away.
class TensorStoreOnDyingGpu : public TensorStoreOnGpu {
 protected:
  void open_without_files() {
    TensorStoreOptions wanted = options();
    wanted.paths.clear();
    wanted.host_bytes = 4 * kMiB;
    wanted.hbm_bytes = 2 * kMiB;
    open(wanted);
  }
  // Now, and the store has seen it.
  void fail_the_gpu() {
    put("seen", bytes_of(1, 100));
    const GpuBytes memory(100);
    for (int i = 0; i < 10'000 && cudaMemset(memory.data(), 0, 100) == cudaSuccess; ++i) {
    }
    EXPECT_EQ(error_of([&] { get_up("seen", memory); }).code(), Code::kDevice);
    remove("seen");
  }
};

TEST_F(TensorStoreOnDyingGpu, DISABLED_HostMemoryAloneKeepsWhatItHas) {
  open_without_files();
  put("both", bytes_of(1, kBytes));
  get_up("both", GpuBytes(kBytes));
  ASSERT_TRUE(store_->info("both").in_hbm && in_host("both"));
  fail_the_gpu();
  const Error full = error_of([&] {
    for (int i = 0; i < 20; ++i) put(std::to_string(i), bytes_of(i, kBytes));
  });
  EXPECT_EQ(full.code(), Code::kDoesNotFit);
  EXPECT_EQ(get("both"), bytes_of(1, kBytes));
}

TEST_F(TensorStoreOnDyingGpu, DISABLED_NothingIsThereThatTheGpuHad) {
  put_up("on NVMe", GpuBytes(bytes_of(1, kBytes)));
  store_->commit();
  put_up("lost", GpuBytes(bytes_of(2, kBytes)));
  ASSERT_FALSE(in_host("on NVMe") || in_host("lost"));
  fail_the_gpu();
  for (const std::string name : {"on NVMe", "lost"}) {
    const Error error = error_of([&] { store_->pin(name, Placement::kHbm); });
    EXPECT_EQ(error.code(), Code::kDevice);
    EXPECT_EQ(error.parts().object, name);
    EXPECT_FALSE(store_->info(name).pinned_in_hbm);
  }
  const std::string names[] = {"lost", "on NVMe"};
  EXPECT_EQ(store_->prefetch(names, Placement::kHost), 1u);
  EXPECT_EQ(get("on NVMe"), bytes_of(1, kBytes));
  EXPECT_EQ(store_->stats().misses, 0u) << "it was fetched";
  EXPECT_EQ(store_->prefetch(names, Placement::kHbm), 1u);
}

TEST(AGpuThatFails, TakesWhatHbmAloneHadAndNothingElse) {
  cudaDeviceProp properties{};
  if (!cuda_unavailable().empty() || cudaGetDeviceProperties(&properties, 0) != cudaSuccess ||
      std::string(properties.name).find("mulated") == std::string::npos) {
    GTEST_SKIP() << "only an emulated GPU fails when it is told to";
  }
  const auto passes = [](const char* at, const std::string& test) {
    const ::pid_t child = ::fork();
    if (child == 0) {
      ::setenv("SPILLWAY_EMULATED_GPU_DIES_AT", at, 1);
      ::execl("/proc/self/exe", "cuda_tensor_store_test", ("--gtest_filter=*DISABLED_" + test).c_str(),
              "--gtest_also_run_disabled_tests", nullptr);
      ::_exit(127);
    }
    int status = 0;
    ::waitpid(child, &status, 0);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << test << " at call " << at;
  };
  for (const char* at : {"150", "175", "203", "240", "301"}) passes(at, "Fails");
  passes("2000", "HostMemoryAloneKeepsWhatItHas");
  passes("2000", "NothingIsThereThatTheGpuHad");
}

}  // namespace
}  // namespace spillway
