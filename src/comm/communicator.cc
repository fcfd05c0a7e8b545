#include "spillway/communicator.h"

#include <cstdlib>
#include <string>
#include <utility>

#include <fmt/format.h>

#include "spillway/error.h"
#include "spillway/gpu_ranks.h"
#include "src/comm/mpi_plugin.h"
#include "src/comm/transport_communicator.h"

namespace spillway {
namespace {

// One rank: everything that a collective would bring is there.
class SelfCommunicator final : public Communicator {
 public:
  std::uint32_t rank() const noexcept override { return 0; }
  std::uint32_t ranks() const noexcept override { return 1; }
  std::string describe() const override { return "one rank"; }
  void throw_if_failed() const override {}

 protected:
  void start(const Collective&, Stream&) override {}
};

// Work runs in the call that launches it.
class CallersThread final : public HostWorkers {
 public:
  unsigned threads() const noexcept override { return 1; }
  unsigned current_slot() const noexcept override { return 0; }
  void parallel_for(std::size_t count, IndexBody body) override {
    for (std::size_t i = 0; i < count; ++i) body(i);
  }
};

class CallersStream final : public Stream {
 public:
  DeviceKind kind() const noexcept override { return DeviceKind::kHost; }
  void* native() const noexcept override { return nullptr; }
  void launch(const HostTask& task) override { task(thread_); }
  void synchronize() override {}

 private:
  CallersThread thread_;
};

// How many processes the launcher says it has started: Open MPI's mpirun, or one that speaks PMI (MPICH's, Slurm's).
// PMIx says that there is a launcher, and not of how many. 0: none.
unsigned long launched() {
  for (const char* name : {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE"}) {
    if (const char* size = std::getenv(name)) return std::strtoul(size, nullptr, 10);
  }
  return 0;
}
bool is_launched() { return launched() > 1 || (launched() == 0 && std::getenv("PMIX_RANK") != nullptr); }

std::unique_ptr<TransportCommunicator> make_mpi_communicator(const CommunicatorOptions& options) {
  auto transport = open_mpi_transport({.comm = options.mpi_comm, .patience_seconds = options.patience_seconds});
  if (!options.mpi_comm && launched() > 1 && transport->ranks() == 1) {
    throw Error(Code::kUnsupported,
                {"communicator mpi",
                 fmt::format("the launcher has started {} processes, and {} knows of one: it is another MPI's launcher",
                             launched(), transport->library()),
                 0, "start them with Open MPI's own mpirun"});
  }
  return std::make_unique<TransportCommunicator>(
      std::move(transport), TransferLimits{.scratch_bytes = options.scratch_bytes}, options.patience_seconds);
}

}  // namespace

void Communicator::all_reduce_now(std::span<std::uint64_t> values, Fold fold, std::int32_t block) {
  CallersStream stream;
  all_reduce(values, fold, block, stream);
  throw_if_failed();
}

std::unique_ptr<Communicator> make_communicator(std::string_view kind, const CommunicatorOptions& options) {
  refuse_patience(options.patience_seconds);
  if (kind == "mpi" || (kind == "auto" && (options.mpi_comm || is_launched()))) return make_mpi_communicator(options);
  if (kind == "nccl") {
    auto communicator = make_mpi_communicator(options);
    join_gpus(*communicator);
    return communicator;
  }
  if (kind == "self" || kind == "auto") return std::make_unique<SelfCommunicator>();
  throw Error(Code::kInvalidArgument, {"communicator '" + std::string(kind) + "'", "there is none of that name", 0,
                                       "name auto, self, mpi or nccl"});
}

}  // namespace spillway
