#include "kernels/topology.h"

#include <gtest/gtest.h>
#include <sched.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <functional>
#include <ostream>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "kernels/process_limits.h"
#include "spillway/error.h"
#include "spillway/log.h"
#include "spillway/units.h"

namespace spillway {

bool operator==(const CpuNode& a, const CpuNode& b) {
  return a.os_index == b.os_index && a.cores == b.cores && a.cpus == b.cpus;
}
void PrintTo(const CpuNode& node, std::ostream* out) {
  *out << "node " << node.os_index << ", " << node.cores << " cores, " << testing::PrintToString(node.cpus);
}

namespace {

using Nodes = std::vector<CpuNode>;
using Numbers = std::vector<unsigned>;

std::vector<std::string> logged(const std::function<void()>& work) {
  std::vector<std::string> lines;
  set_log_sink([&](LogLevel, std::string_view line) { lines.emplace_back(line); });
  work();
  set_log_sink({});
  return lines;
}

TEST(DescribedNodes, SiblingsMakeOneCore) {
  EXPECT_EQ(described_nodes("node:2 core:2 pu:2"), (Nodes{{0, 2, {0, 1, 2, 3}}, {1, 2, {4, 5, 6, 7}}}));
  EXPECT_EQ(described_nodes("node:1 core:2 pu:1"), (Nodes{{0, 2, {0, 1}}}));
}

TEST(DescribedNodes, AMaskLeavesNodesAndCoresOut) {
  const std::string machine = "node:2 core:4 pu:2";
  EXPECT_EQ(described_nodes(machine, Numbers{2, 3}), (Nodes{{0, 1, {2, 3}}})) << "both siblings of a core";
  EXPECT_EQ(described_nodes(machine, Numbers{0, 2, 9}), (Nodes{{0, 2, {0, 2}}, {1, 1, {9}}}));
  EXPECT_EQ(described_nodes(machine, Numbers{8, 10, 12, 14}), (Nodes{{1, 4, {8, 10, 12, 14}}}));
  EXPECT_EQ(described_nodes(machine, Numbers{99}), Nodes{}) << "none that the machine has";
}

TEST(DescribedNodes, ASystemMayNumberCpusAcrossNodes) {
  EXPECT_EQ(described_nodes("node:2 core:2 pu:1(indexes=0,2,1,3)"), (Nodes{{0, 2, {0, 2}}, {1, 2, {1, 3}}}));
}

// HBM beside DRAM in each package, and CXL memory near both.
TEST(DescribedNodes, MemoryWithoutCpusOfItsOwnIsNoNode) {
  EXPECT_EQ(described_nodes("[numa(memory=4GB)] pack:2 [numa(memory=2GB)] [numa(memory=1GB)] core:2 pu:1"),
            (Nodes{{0, 2, {0, 1}}, {2, 2, {2, 3}}}));
}

TEST(DescribedNodes, CpusWithoutMemoryJoinTheNearestNode) {
  const std::string machine = "pack:2 node:2 core:2 pu:1";
  EXPECT_EQ(described_nodes(machine, {}, Numbers{0, 2, 3}),
            (Nodes{{0, 4, {0, 1, 2, 3}}, {2, 2, {4, 5}}, {3, 2, {6, 7}}}));
  EXPECT_EQ(described_nodes(machine, Numbers{6, 7}, Numbers{0}), (Nodes{{0, 2, {6, 7}}}));
}

TEST(DescribedNodes, WithoutCoresEachCpuIsOne) {
  EXPECT_EQ(described_nodes("numa:2 pu:2"), (Nodes{{0, 2, {0, 1}}, {1, 2, {2, 3}}}));
}

TEST(DescribedNodes, RefusesWhatDescribesNoMachine) { EXPECT_THROW(described_nodes("nonsense"), Error); }

TEST(UsableNodes, HoldExactlyTheCpusOfTheAffinityMask) {
  Numbers cpus;
  unsigned cores = 0;
  const auto lines = logged([&] {
    for (const CpuNode& node : usable_nodes()) {
      EXPECT_GE(node.cores, 1u);
      EXPECT_LE(node.cores, node.cpus.size());
      cores += node.cores;
      cpus.insert(cpus.end(), node.cpus.begin(), node.cpus.end());
    }
  });
  std::ranges::sort(cpus);
  EXPECT_EQ(cpus, affinity_cpus());
  EXPECT_EQ(lines, std::vector<std::string>{});
}

TEST(UsableNodes, FollowTheAffinityMask) {
  Nodes nodes;
  const unsigned cpu = affinity_cpus().back();
  std::jthread([&] {
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(cpu, &one);
    ASSERT_EQ(sched_setaffinity(0, sizeof one, &one), 0);
    nodes = usable_nodes();
  }).join();
  ASSERT_EQ(nodes.size(), 1u);
  EXPECT_EQ(nodes[0].cores, 1u);
  EXPECT_EQ(nodes[0].cpus, Numbers{cpu});
}

// hwloc then speaks of a machine that is not this one.
TEST(UsableNodes, WithoutAnAnswerFromHwlocAreOne) {
  setenv("HWLOC_SYNTHETIC", "node:2 core:2 pu:1", 1);
  Nodes nodes;
  const auto lines = logged([&] { nodes = usable_nodes(); });
  unsetenv("HWLOC_SYNTHETIC");
  EXPECT_EQ(nodes, (Nodes{{0, static_cast<unsigned>(affinity_cpus().size()), affinity_cpus()}}));
  EXPECT_EQ(lines, std::vector<std::string>{
                       "hwloc does not know this machine: taking it for one NUMA node, and each CPU for a core"});
}

class PlaceOnNodes : public testing::Test {
 protected:
  static constexpr std::size_t kBytes = 64 * kKiB;
  PlaceOnNodes() {
    void* memory = mmap(nullptr, 2 * kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    memory_ = {static_cast<std::byte*>(memory), 2 * kBytes};
  }
  ~PlaceOnNodes() override { munmap(memory_.data(), memory_.size()); }

  // get_mempolicy(2), which only libnuma wraps; 2: MPOL_F_ADDR.
  int policy(std::size_t offset) const {
    int mode = -1;
    return syscall(SYS_get_mempolicy, &mode, nullptr, 0, memory_.data() + offset, 2) == 0 ? mode : -errno;
  }

  std::span<std::byte> memory_;
};

TEST_F(PlaceOnNodes, TheRangeAloneGetsAPolicyThatIsNotStrict) {
  const int before = policy(0);
  if (before < 0) GTEST_SKIP() << "get_mempolicy: " << std::generic_category().message(-before);
  const auto lines = logged([&] {
    const NodeMemory ranges[] = {{memory_.subspan(kBytes), usable_nodes().back().os_index}};
    if (place_on_nodes(ranges)) {
      constexpr int kPreferred = 1, kPreferredMany = 5;  // linux/mempolicy.h
      EXPECT_TRUE(policy(kBytes) == kPreferred || policy(kBytes) == kPreferredMany) << policy(kBytes);
    } else {
      EXPECT_EQ(policy(kBytes), before);
    }
    EXPECT_EQ(policy(0), before);
  });
  for (const std::string& line : lines) GTEST_SKIP() << line;
}

TEST_F(PlaceOnNodes, ARefusalIsSaidOnce) {
  const NodeMemory range{memory_.first(kBytes), 1'000};  // no machine has so many
  const NodeMemory ranges[] = {range, range};
  const auto lines = logged([&] { EXPECT_FALSE(place_on_nodes(ranges)); });
  ASSERT_EQ(lines.size(), 1u);
  EXPECT_EQ(lines[0],
            "cannot place memory on NUMA nodes (Invalid argument): updates reach into memory of other nodes, at the "
            "rate of the link between them");
}

}  // namespace
}  // namespace spillway
