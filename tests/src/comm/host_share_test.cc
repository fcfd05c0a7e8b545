// Ranks that run on one machine, found by nothing but an all_reduce.
#include "src/comm/host_share.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "kernels/process_limits.h"
#include "kernels/topology.h"
#include "tests/src/comm/thread_ranks.h"

namespace spillway {
namespace {

using testing::run_ranks;

TEST(HostShare, RanksWithOneKeyAreCountedInTheirOrder) {
  const std::vector<std::uint64_t> keys{70, 20, 70, UINT64_MAX, 20, 70};
  const std::vector<RankGroup> wanted{{3, 0}, {2, 0}, {3, 1}, {1, 0}, {2, 1}, {3, 2}};
  run_ranks(6, [&](Communicator& ranks) {
    const RankGroup group = ranks_with(ranks, keys[ranks.rank()]);
    EXPECT_EQ(group.count, wanted[ranks.rank()].count) << ranks.rank();
    EXPECT_EQ(group.index, wanted[ranks.rank()].index) << ranks.rank();
  });
}

// The only one of its ranks that calls: an all_reduce changes nothing.
class OneOfMany final : public Communicator {
 public:
  OneOfMany(std::uint32_t rank, std::uint32_t ranks) : rank_(rank), ranks_(ranks) {}
  std::uint32_t rank() const noexcept override { return rank_; }
  std::uint32_t ranks() const noexcept override { return ranks_; }
  std::string describe() const override { return "one of many"; }
  void throw_if_failed() const override {}

 protected:
  void start(const Collective& call, Stream&) override {
    if (call.fold != Fold::kOr) return;
    for (auto& word : std::span(reinterpret_cast<std::uint64_t*>(call.data.data()), call.data.size() / 8)) {
      if (word != 0) word = ~std::uint64_t{0};  // as if its 63 neighbours had the same key
    }
  }

 private:
  const std::uint32_t rank_, ranks_;
};

TEST(HostShare, ThousandsOfRanksAreCountedToo) {
  for (const std::uint32_t rank : {0u, 63u, 64u, 1023u, 1024u, 2999u}) {
    OneOfMany ranks(rank, 3000);
    const RankGroup group = ranks_with(ranks, 5);
    EXPECT_EQ(group.count, 64u) << rank;
    EXPECT_EQ(group.index, rank % 64) << rank;
  }
}

TEST(HostShare, ARankTakesTheGpuOfItsPlaceUnlessTheLauncherHasDividedThem) {
  const RankGroup third{.count = 4, .index = 2};
  EXPECT_EQ(gpu_of(third, nullptr), "2");
  EXPECT_EQ(gpu_of(third, "0,1,2,3"), "2");
  EXPECT_EQ(gpu_of(third, "7,5,GPU-8932f937,1,0"), "GPU-8932f937");
  EXPECT_EQ(gpu_of(third, "3"), "3") << "one for each rank, or the one that this rank took before";
  EXPECT_EQ(gpu_of(third, "0,1"), "0,1");
  EXPECT_EQ(gpu_of(third, ""), "") << "none are to be seen";
}

TEST(HostShare, ThreadsOfOneProcessShareItsCores) {
  const std::vector<unsigned> before = affinity_cpus();
  unsigned cores = 0;
  for (const CpuNode& node : usable_nodes()) cores += node.cores;
  run_ranks(2, [&](Communicator& ranks) {
    EXPECT_EQ(ranks_on_this_host(ranks).count, 2u);
    const HostShare share = share_host(ranks);
    EXPECT_EQ(share.ranks, 2u);
    EXPECT_EQ(share.index, ranks.rank());
    EXPECT_LE(share.cores, std::max(1u, (cores + 1) / 2));
    EXPECT_LT(affinity_cpus().size(), before.size() + (before.size() == 1));
  });
  EXPECT_EQ(affinity_cpus(), before) << "of the ranks' threads alone";
}

}  // namespace
}  // namespace spillway
