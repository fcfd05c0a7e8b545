// What every Communicator must do. An implementation joins with
//   INSTANTIATE_TEST_SUITE_P(Threads, CommunicatorSuite, ::testing::Values(RanksCase{"threads_2", 2, run}), …)
// and, where ranks can fail, the same for CommunicatorFailures, in a program that links communicator_suite.cc.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "kernels/device.h"
#include "kernels/workers.h"
#include "spillway/communicator.h"
#include "src/comm/transfers.h"

namespace spillway {

struct RanksOptions {
  double patience_seconds = 30;  // not what makes a test pass
  TransferLimits limits = {};
};

using MakeDevice = std::function<std::shared_ptr<Device>(std::uint64_t hbm_bytes, HostWorkers& workers)>;
std::shared_ptr<Device> make_host_device(std::uint64_t hbm_bytes, HostWorkers& workers);

struct RanksCase {
  std::string name;
  std::uint32_t ranks = 1;
  // Runs the body once for each rank, on a new communicator of theirs that goes when the body returns: all of them in
  // this process, or this process's own.
  std::function<void(std::uint32_t ranks, const RanksOptions&, const std::function<void(Communicator&)>& body)> run;
  MakeDevice make_device = make_host_device;
  std::uint32_t settled = 0;  // collectives between its opening and the body
};

// A rank with a device of its own.
class Member {
 public:
  explicit Member(Communicator& communicator, const MakeDevice& make_device = make_host_device);
  ~Member();

  template <typename T>
  std::span<T> hbm(std::size_t offset_bytes, std::size_t count) {
    return {reinterpret_cast<T*>(device->hbm().data() + offset_bytes), count};
  }
  template <typename T>
  void upload(std::size_t offset_bytes, const std::vector<T>& values) {
    if (!values.empty()) std::memcpy(pinned_.data(), values.data(), values.size() * sizeof(T));
    device->copy_async(CopyKind::kHostToDevice, hbm<T>(offset_bytes, 0).data(), pinned_.data(),
                       values.size() * sizeof(T), *a);
    a->synchronize();
  }
  template <typename T>
  std::vector<T> download(std::size_t offset_bytes, std::size_t count) {
    device->copy_async(CopyKind::kDeviceToHost, pinned_.data(), hbm<T>(offset_bytes, 0).data(), count * sizeof(T), *a);
    a->synchronize();
    std::vector<T> values(count);
    if (count > 0) std::memcpy(values.data(), pinned_.data(), count * sizeof(T));
    return values;
  }
  // Everything that was started on `a` is over, and well.
  void wait_idle();

  Communicator& comm;
  const std::uint32_t rank, ranks;
  std::unique_ptr<HostWorkers> workers;
  std::shared_ptr<Device> device;
  std::unique_ptr<Stream> a, b;

 private:
  std::vector<std::byte> pinned_;
};

// What ends the communicator, of a rank that does nothing but meet the others.
std::string end_of(Member& member);

class CommunicatorSuite : public ::testing::TestWithParam<RanksCase> {
 protected:
  void run(const std::function<void(Member&)>& body, const RanksOptions& options = {});
  std::uint32_t ranks() const { return GetParam().ranks; }
};

class CommunicatorFailures : public CommunicatorSuite {
 protected:
  void SetUp() override {
    if (ranks() == 1) GTEST_SKIP() << "one rank agrees with itself";
  }
  std::uint32_t last() const { return ranks() - 1; }
  // The number of what the body calls as its `place`, from 1; one collective comes before.
  std::string number(std::uint32_t place) const { return std::to_string(GetParam().settled + 1 + place); }
  std::string collective(std::uint32_t place) const { return "(collective " + number(place) + ")"; }
  // The text with which the communicator has ended when it has, as every call after that says it.
  static std::string ending(Member& member);
  // Each rank calls what `call` does with this rank's number; returns after all ranks' communicators have ended, and
  // expects of each what `expect` does with its message.
  void expect_ending(const std::function<void(Member&)>& call, const std::function<void(Member&, std::string)>& expect,
                     const RanksOptions& options = {});
};

}  // namespace spillway
