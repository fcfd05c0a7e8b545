// The plugin for NCCL that is not the library's: what each rank is told. One process opens it once, so meson.build runs
// this program several times, with SPILLWAY_OTHER_PLUGIN.
#include "src/comm/nccl_plugin.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <string>
#include <string_view>
#include <vector>

#include "spillway/error.h"
#include "spillway/gpu_ranks.h"
#include "spillway/log.h"
#include "spillway/version.h"
#include "tests/error_of.h"
#include "tests/src/comm/thread_ranks.h"

namespace spillway {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::StartsWith;

// What is wrong with the plugin, in words.
std::string what_is_wrong() {
  const char* kind = std::getenv("SPILLWAY_OTHER_PLUGIN");
  EXPECT_NE(kind, nullptr);
  return kind != nullptr && std::string(kind) == "version"
             ? "libspillway_nccl.so is of Spillway 0.0.9, and this is " SPILLWAY_VERSION
             : "libspillway_nccl.so belongs to another version of Spillway than ";
}

TEST(NcclPlugin, OfAnotherVersionOrInterfaceIsRefusedOnAllRanks) {
  const std::string why = what_is_wrong();
  testing::run_ranks(2, [&](Communicator& communicator) {
    for (int i = 0; i < 2; ++i) {
      const Error error = testing::error_of([&] { join_gpus(dynamic_cast<TransportCommunicator&>(communicator), {}); });
      EXPECT_EQ(error.code(), Code::kUnsupported);
      EXPECT_THAT(error.what(), AllOf(StartsWith("communicator nccl: "), HasSubstr(why),
                                      EndsWith("; install the library and its plugin of Spillway " SPILLWAY_VERSION
                                               " from one build")));
    }
  });
}

TEST(NcclPlugin, WithoutItRanksThatLeaveTheDeviceOpenUseTheCpuAndOneSaysWhy) {
  const std::string why = what_is_wrong();
  std::vector<std::string> lines;
  set_log_sink([&](LogLevel, std::string_view line) { lines.emplace_back(line); });
  testing::run_ranks(2, [](Communicator& communicator) {
    Config config;
    agree_on_device(config, communicator);
    EXPECT_EQ(config.device, DeviceKind::kHost);
  });
  set_log_sink({});
  EXPECT_THAT(lines,
              ElementsAre(AllOf(StartsWith("spillway.device is auto, and all ranks use the CPU: communicator nccl: "),
                                HasSubstr(why))));
}

TEST(NcclPlugin, WithoutItRanksThatAskForCudaAreRefused) {
  const std::string why = what_is_wrong();
  testing::run_ranks(2, [&](Communicator& communicator) {
    Config config;
    if (communicator.rank() == 1) config.device = DeviceKind::kCuda;  // the other one leaves it open
    const Error error = testing::error_of([&] { agree_on_device(config, communicator); });
    EXPECT_EQ(error.code(), Code::kUnsupported);
    EXPECT_THAT(error.what(), AllOf(StartsWith("communicator nccl: "), HasSubstr(why)));
  });
}

}  // namespace
}  // namespace spillway
