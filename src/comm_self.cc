#include "spillway/error.h"
#include "src/comm.h"

namespace spillway {
namespace {

class SelfCommunicator final : public Communicator {
 public:
  std::uint32_t rank() const noexcept override { return 0; }
  std::uint32_t ranks() const noexcept override { return 1; }
  // The own slice is the whole vector, and a sum of one summand is that summand. What the callers of a larger world
  // would get wrong is checked here too, so that runs on one rank find it.
  void all_gather(const SlicedVector& vector, Stream&) override { check(vector); }
  void reduce_scatter(const SlicedVector& vector, Stream&) override { check(vector); }
  void all_reduce(std::span<double>, ReduceOp) override {}
  void barrier() override {}

 private:
  static void check(const SlicedVector& vector) {
    SPILLWAY_CHECK(vector.starts.size() == 2, "a sliced vector has one start per rank, and an end");
    SPILLWAY_CHECK(vector.starts[0] <= vector.starts[1], "slices are in increasing order");
    SPILLWAY_CHECK(vector.data != nullptr || vector.starts[0] == vector.starts[1], "a sliced vector has memory");
  }
};

}  // namespace

std::unique_ptr<Communicator> create_self_communicator() { return std::make_unique<SelfCommunicator>(); }

}  // namespace spillway
