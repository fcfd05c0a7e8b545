// The behaviour suite on processes: mpi_test.py runs this program under mpirun, and each process is one rank in every
// test, on a communicator of the program's own MPI. SPILLWAY_RANK_REPORTS is a directory for a report of each rank.
#include <gtest/gtest.h>
#include <mpi.h>

#include <cstdlib>
#include <string>

#include "src/comm/mpi_plugin.h"
#include "src/comm/transport_communicator.h"
#include "tests/src/comm/communicator_suite.h"

namespace spillway {
namespace {

std::uint32_t number_in(const char* variable) {
  const char* text = std::getenv(variable);
  return text != nullptr ? static_cast<std::uint32_t>(std::strtoul(text, nullptr, 10)) : 1;
}

void run_mpi(std::uint32_t, const RanksOptions& options, const std::function<void(Communicator&)>& body) {
  auto transport =
      open_mpi_transport({.comm = MPI_Comm_c2f(MPI_COMM_WORLD), .patience_seconds = options.patience_seconds});
  TransportCommunicator communicator(std::move(transport), options.limits, options.patience_seconds);
  body(communicator);
}

const auto kMpi = ::testing::Values(RanksCase{"mpi", number_in("OMPI_COMM_WORLD_SIZE"), run_mpi});
const auto kMpiName = [](const auto& info) { return info.param.name; };
INSTANTIATE_TEST_SUITE_P(Processes, CommunicatorSuite, kMpi, kMpiName);
INSTANTIATE_TEST_SUITE_P(Processes, CommunicatorFailures, kMpi, kMpiName);

// By hand, where there are 7 GB for each of two ranks: --gtest_also_run_disabled_tests --gtest_filter=*Large*
TEST(MpiTransport, DISABLED_LargeDataGoesBeyondInt) {
  run_mpi(0, {.patience_seconds = 120}, [](Communicator& communicator) {
    Member member(communicator);
    const std::uint64_t slice = (std::uint64_t{1} << 31) / 4 * 4 + 8;
    std::vector<std::uint64_t> slices(member.ranks, 0);
    slices[member.ranks - 1] = slice;
    slices[0] = member.ranks > 1 ? 1 << 20 : slice;
    std::uint64_t bytes = 0;
    for (const std::uint64_t one : slices) bytes += one;
    std::vector<float> data(bytes / 4, 1.0f);
    data.back() = static_cast<float>(member.rank);
    communicator.reduce_scatter(data, slices, Sums::kTree, 1, *member.a);
    communicator.all_gather(std::as_writable_bytes(std::span(data)), slices, 1, *member.a);
    member.wait_idle();
    const auto n = static_cast<float>(member.ranks);
    EXPECT_EQ(data.back(), n * (n - 1) / 2);
    for (std::size_t i = 0; i + 1 < data.size(); ++i) ASSERT_EQ(data[i], n) << i;
  });
}

}  // namespace
}  // namespace spillway

int main(int argc, char** argv) {
  if (const char* reports = std::getenv("SPILLWAY_RANK_REPORTS")) {
    const std::string rank = std::to_string(spillway::number_in("OMPI_COMM_WORLD_RANK"));
    ::testing::FLAGS_gtest_output = std::string("xml:") + reports + "/rank" + rank + ".xml";
  }
  ::testing::InitGoogleTest(&argc, argv);
  int provided = 0;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_SERIALIZED, &provided);
  const int failed = RUN_ALL_TESTS();
  MPI_Finalize();
  return failed;
}
