// What every Device must do. A device joins with
//   INSTANTIATE_TEST_SUITE_P(Host, DeviceSuite, testing::Values(DeviceCase{"host", make_host}), …)
// and the same for DeviceSuiteDeathTest, in a program that links device_suite.cc.
#pragma once

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "kernels/device.h"
#include "kernels/workers.h"
#include "tests/kernels/gate.h"

namespace spillway {

struct DeviceCase {
  std::string name;
  // A device with at least 64 MiB of HBM, or null where the machine has none.
  std::unique_ptr<Device> (*create)(HostWorkers& workers);
};

class DeviceSuite : public testing::TestWithParam<DeviceCase> {
 protected:
  void SetUp() override {
    device_ = GetParam().create(*workers_);
    if (device_ == nullptr) GTEST_SKIP() << "this machine has no " << GetParam().name << " device";
    pinned_.resize(8 << 20);
    device_->register_host(pinned_);
    a_ = device_->create_stream("a");
    b_ = device_->create_stream("b");
  }
  void TearDown() override {
    if (device_ == nullptr) return;
    a_->synchronize();
    b_->synchronize();
    device_->unregister_host(pinned_);
  }

  // Device memory at a fixed offset; the tests lay it out by hand.
  template <typename T>
  T* hbm(std::size_t offset_bytes) {
    return reinterpret_cast<T*>(device_->hbm().data() + offset_bytes);
  }
  template <typename T>
  void upload(std::size_t offset_bytes, const std::vector<T>& values) {
    if (!values.empty()) std::memcpy(pinned_.data(), values.data(), values.size() * sizeof(T));
    device_->copy_async(CopyKind::kHostToDevice, hbm<T>(offset_bytes), pinned_.data(), values.size() * sizeof(T), *a_);
    a_->synchronize();
  }
  template <typename T>
  std::vector<T> download(std::size_t offset_bytes, std::size_t count) {
    device_->copy_async(CopyKind::kDeviceToHost, pinned_.data(), hbm<T>(offset_bytes), count * sizeof(T), *a_);
    a_->synchronize();
    std::vector<T> values(count);
    if (!values.empty()) std::memcpy(values.data(), pinned_.data(), count * sizeof(T));
    return values;
  }
  static void set_flag(void* flag) { *static_cast<std::atomic<bool>*>(flag) = true; }

  std::unique_ptr<HostWorkers> workers_ = create_workers(2);
  std::unique_ptr<Device> device_;  // before what must go first
  std::vector<std::byte> pinned_;
  std::unique_ptr<Stream> a_, b_;
};

// The device has threads by then, so the child that dies starts anew instead of being forked.
class DeviceSuiteDeathTest : public DeviceSuite {
 protected:
  DeviceSuiteDeathTest() { testing::FLAGS_gtest_death_test_style = "threadsafe"; }
};

}  // namespace spillway
