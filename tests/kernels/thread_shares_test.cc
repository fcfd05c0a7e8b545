#include "kernels/thread_shares.h"

#include <gtest/gtest.h>
#include <sched.h>

#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>

#include "kernels/process_limits.h"
#include "kernels/workers.h"
#include "tests/kernels/random.h"

namespace spillway {
namespace {

namespace fs = std::filesystem;

TEST(ShareThreads, TakesAThreadForEachCoreAndNotForItsSiblings) {
  EXPECT_EQ(threads_of(share_threads(0, described_nodes("node:2 core:8 pu:2"), {})), 16u);
  EXPECT_EQ(threads_of(share_threads(0, described_nodes("node:1 core:3 pu:4"), {})), 3u);
}

TEST(ShareThreads, TheQuotaCutsTheDefaultDownAndNothingElse) {
  const auto nodes = described_nodes("node:2 core:8 pu:2");
  EXPECT_EQ(threads_of(share_threads(0, nodes, 5.5)), 5u);
  EXPECT_EQ(threads_of(share_threads(0, nodes, 0.5)), 1u);
  EXPECT_EQ(threads_of(share_threads(0, nodes, 20.0)), 16u) << "not 20: siblings are not counted twice";
  EXPECT_EQ(threads_of(share_threads(12, nodes, 5.5)), 12u) << "asked for";
}

TEST(ShareThreads, OneNodeIsNotBound) {
  for (unsigned threads : {0u, 1u, 7u}) {
    const auto shares = share_threads(threads, described_nodes("node:1 core:4 pu:2"), {});
    ASSERT_EQ(shares.size(), 1u);
    EXPECT_TRUE(shares[0].cpus.empty());
  }
}

TEST(ShareThreads, EachNodeGetsItsPartWithItsCpus) {
  const std::vector<unsigned> mask{0, 2, 4, 6, 8, 9, 10, 11};  // four cores of node 0, two of node 1
  const auto shares = share_threads(0, described_nodes("node:2 core:4 pu:2", mask), {});
  ASSERT_EQ(shares.size(), 2u);
  EXPECT_EQ(shares[0].threads, 4u);
  EXPECT_EQ(shares[0].cpus, (std::vector<unsigned>{0, 2, 4, 6}));
  EXPECT_EQ(shares[1].threads, 2u);
  EXPECT_EQ(shares[1].os_index, 1u);
  EXPECT_EQ(shares[1].cpus, (std::vector<unsigned>{8, 9, 10, 11}));
}

TEST(ShareThreads, ANodeForAFewThreadsIsNotWorthIt) {
  const auto nodes = described_nodes("node:2 core:4 pu:1");
  EXPECT_EQ(share_threads(3, nodes, {}).size(), 1u);
  EXPECT_EQ(share_threads(4, nodes, {}).size(), 2u);
  EXPECT_EQ(share_threads(0, nodes, 3.0).size(), 1u);
}

using Numbers = std::vector<unsigned>;

TEST(ShareCpus, ProcessesGetWholeCoresAndNodesWhereThatComesOutEven) {
  const auto nodes = described_nodes("node:2 core:4 pu:2(indexes=0,8,1,9,2,10,3,11,4,12,5,13,6,14,7,15)");
  EXPECT_EQ(cpus_of_share(nodes, 0, 1, {}).size(), 16u);
  EXPECT_EQ(cpus_of_share(nodes, 0, 2, {}), nodes[0].cpus);
  EXPECT_EQ(cpus_of_share(nodes, 1, 2, {}), nodes[1].cpus);
  EXPECT_EQ(cpus_of_share(nodes, 1, 4, {}), (Numbers{2, 3, 10, 11}));
  EXPECT_EQ(cpus_of_share(nodes, 7, 8, {}), (Numbers{7, 15})) << "both siblings";
  EXPECT_EQ(cpus_of_share(nodes, 1, 3, {}), (Numbers{2, 3, 4, 10, 11, 12}));
}

TEST(ShareCpus, EveryCoreIsOfOneProcessOrOfNeighboursThatHaveFewerEach) {
  auto random = seeded_generator();
  for (int round = 0; round < 500; ++round) {
    const auto cores = static_cast<unsigned>(1 + random() % 24), shares = static_cast<unsigned>(1 + random() % 40);
    const auto nodes = described_nodes("node:1 core:" + std::to_string(cores) + " pu:1");
    Numbers users(cores);
    for (unsigned share = 0; share < shares; ++share) {
      const Numbers cpus = cpus_of_share(nodes, share, shares, {});
      ASSERT_GE(cpus.size(), std::max(1u, cores / shares));
      ASSERT_LE(cpus.size(), cores / shares + 1);
      for (const unsigned cpu : cpus) ++users.at(cpu);
    }
    for (const unsigned count : users) {
      ASSERT_LE(count, (shares + cores - 1) / cores);
      ASSERT_GE(count, std::min(1u, shares / cores));
    }
    if (shares <= cores) {
      ASSERT_EQ(users, Numbers(cores, 1));
    }
  }
}

TEST(ShareCpus, AQuotaIsDividedToo) {
  const auto nodes = described_nodes("node:1 core:8 pu:1");
  EXPECT_EQ(cpus_of_share(nodes, 1, 2, 4.5), (Numbers{4, 5}));
  EXPECT_EQ(cpus_of_share(nodes, 1, 2, 1.0), (Numbers{4}));
  EXPECT_EQ(cpus_of_share(nodes, 1, 2, 64.0), (Numbers{4, 5, 6, 7}));
}

TEST(ShareCpus, TheLargestShareIsWhatItsProcessSees) {
  const auto nodes = described_nodes("node:2 core:3 pu:2");
  const auto threads = [&](unsigned processes, std::optional<double> quota = {}) {
    const auto seen = nodes_of_largest_share(nodes, processes, quota);
    EXPECT_LE(seen.size(), 2u);
    return threads_of(share_threads(0, seen, quota));
  };
  EXPECT_EQ(threads(1), 6u);
  EXPECT_EQ(threads(2), 3u);
  EXPECT_EQ(threads(4), 2u) << "two have two cores, and two have one";
  EXPECT_EQ(threads(6), 1u);
  EXPECT_EQ(threads(40), 1u);
  EXPECT_EQ(threads(2, 4.5), 2u);
  EXPECT_EQ(nodes_of_largest_share(nodes, 2, {}).size(), 1u);
  EXPECT_EQ(nodes_of_largest_share(nodes, 1, {}).size(), 2u);
  EXPECT_EQ(nodes_of_largest_share(nodes, 2, {})[0].cpus, nodes[0].cpus);
}

TEST(ShareThreads, PartsAddUpAndAreProportionalToWithinOne) {
  auto random = seeded_generator();
  for (int round = 0; round < 2'000; ++round) {
    std::vector<CpuNode> nodes(1 + random() % 8);
    unsigned cores = 0;
    for (CpuNode& node : nodes) cores += node.cores = static_cast<unsigned>(1 + random() % 64);
    const auto threads = static_cast<unsigned>(1 + random() % 300);
    const auto shares = share_threads(threads, nodes, {});
    ASSERT_EQ(threads_of(shares), threads);
    if (shares.size() == 1) continue;
    ASSERT_EQ(shares.size(), nodes.size());
    for (std::size_t n = 0; n < nodes.size(); ++n) {
      ASSERT_GE(shares[n].threads, 2u);
      ASSERT_LE(std::abs(shares[n].threads - 1.0 * threads * nodes[n].cores / cores), 1.0);
    }
  }
}

TEST(ShareThreads, OfThisProcessFollowItsMask) {
  unsigned all = 0, one = 0;
  std::jthread([&] {
    all = create_workers(0)->threads();
    cpu_set_t mask;
    CPU_ZERO(&mask);
    CPU_SET(affinity_cpus().back(), &mask);
    ASSERT_EQ(sched_setaffinity(0, sizeof mask, &mask), 0);
    one = create_workers(0)->threads();
  }).join();
  EXPECT_EQ(one, 1u);
  EXPECT_GE(all, 1u);
  EXPECT_LE(all, affinity_cpus().size());
}

// A real cgroup below the one of this process, where root may make one: this file system is the kernel's.
class OwnCgroup {
 public:
  OwnCgroup() {
    std::ifstream membership("/proc/self/cgroup");
    for (std::string line; std::getline(membership, line);) {
      const bool v1 = line.find(":cpu:") != std::string::npos || line.find(":cpu,cpuacct:") != std::string::npos;
      if (!v1 && line.rfind("0::", 0) != 0) continue;
      const fs::path group = line.substr(line.rfind(':') + 1);
      directory_ = (v1 ? fs::path("/sys/fs/cgroup/cpu") : fs::path("/sys/fs/cgroup")) / group.relative_path() /
                   ("spillway-test-" + std::to_string(getpid()));
      std::error_code refused;
      made_ = fs::create_directory(directory_, refused) &&
              (v1 ? write("cpu.cfs_period_us", "100000") && write("cpu.cfs_quota_us", "100000")
                  : write("cpu.max", "100000 100000"));
      if (v1) return;
    }
  }
  ~OwnCgroup() {
    if (!directory_.empty()) rmdir(directory_.c_str());
  }

  bool made() const { return made_; }
  bool write(const char* file, const std::string& text) const {
    std::ofstream out(directory_ / file);
    out << text << std::flush;
    return out.good();
  }

 private:
  fs::path directory_;
  bool made_ = false;
};

TEST(ShareThreads, OfAProcessInACgroupFollowItsQuota) {
  const OwnCgroup cgroup;  // one CPU's worth
  if (!cgroup.made()) GTEST_SKIP() << "this process may not make a cgroup with a CPU quota";
  const pid_t child = fork();
  if (child == 0) {
    if (!cgroup.write("cgroup.procs", std::to_string(getpid()))) _exit(100);
    _exit(static_cast<int>(threads_of(share_threads(0))));
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 1);
  if (affinity_cpus().size() == 1) GTEST_SKIP() << "one CPU: the quota changes nothing";
}

}  // namespace
}  // namespace spillway
