// The behaviour of a Communicator. Each implementation instantiates the suite with its own world.
#include "src/comm.h"

#include <gtest/gtest.h>

#include <array>
#include <vector>

namespace spillway {
namespace {

// In-place collectives of one rank enqueue nothing; a stream that refuses work shows it.
class NoStream final : public Stream {
 public:
  DeviceKind kind() const noexcept override { return DeviceKind::kHost; }
  void* native() const noexcept override { return nullptr; }
  void launch(const HostTask&) override { ADD_FAILURE() << "work was enqueued"; }
  void synchronize() override {}
};

TEST(SelfCommunicator, IsRankZeroOfOne) {
  const auto comm = create_self_communicator();
  EXPECT_EQ(comm->rank(), 0u);
  EXPECT_EQ(comm->ranks(), 1u);
  comm->barrier();  // must return
}

TEST(SelfCommunicator, CollectivesLeaveTheOnlyRanksDataAsItIs) {
  const auto comm = create_self_communicator();
  NoStream stream;
  std::vector<float> data = {1, 2, 3, 4};
  const std::array<std::uint64_t, 2> starts = {0, 4};
  const SlicedVector vector{data.data(), DType::kFloat32, starts};
  comm->all_gather(vector, stream);
  comm->reduce_scatter(vector, stream);
  EXPECT_EQ(data, (std::vector<float>{1, 2, 3, 4}));

  std::array<double, 2> sums = {0.5, -3};
  comm->all_reduce(sums, ReduceOp::kSum);
  comm->all_reduce(sums, ReduceOp::kMax);
  EXPECT_EQ(sums, (std::array<double, 2>{0.5, -3}));
}

TEST(SelfCommunicatorDeathTest, SlicesForAnotherNumberOfRanksAreRefused) {
  const auto comm = create_self_communicator();
  NoStream stream;
  std::vector<float> data(4);
  const std::array<std::uint64_t, 3> two_ranks = {0, 2, 4};
  EXPECT_DEATH(comm->all_gather({data.data(), DType::kFloat32, two_ranks}, stream), "one start per rank");
}

}  // namespace
}  // namespace spillway
