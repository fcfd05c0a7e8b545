// Opens libspillway_nccl.so, and joins the ranks' GPUs with it.
//
// Rank, number of ranks and NCCL's id come over the transport that the ranks have already: what mpirun started needs no
// address to meet at, and the words that ranks tell each other ahead of data go over it, too.
#include "src/comm/nccl_plugin.h"

#include <algorithm>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "kernels/checksum.h"
#include "kernels/cuda/loader.h"
#include "kernels/plugin_file.h"
#include "spillway/error.h"
#include "spillway/gpu_ranks.h"
#include "spillway/version.h"
#include "src/comm/agreement.h"
#include "src/comm/host_share.h"

namespace spillway {
namespace {

constexpr const char* kBuildWithNccl =
    "a build of Spillway with NVIDIA's nvcc and nccl.h brings it (-Dcuda=enabled -Dnccl=enabled)";
constexpr const char* kMatchingNccl =
    "install the library and its plugin of Spillway " SPILLWAY_VERSION " from one build";

const NcclPlugin& opened_nccl_plugin() {
  const auto opened = open_plugin<NcclPlugin>({.name = kNcclPlugin,
                                               .entry = kNcclPluginEntry,
                                               .interface = kNcclInterface,
                                               .part = reinterpret_cast<const void*>(&opened_nccl_plugin),
                                               .get_one = kBuildWithNccl,
                                               .matching_one = kMatchingNccl});
  if (opened.table != nullptr) {
    opened.table->set_log(internal::log_state());
    return *opened.table;
  }
  const bool no_library = !opened.loaded && opened.why.find("libnccl") != std::string::npos;
  throw Error(Code::kUnsupported,
              {"communicator nccl", (opened.loaded ? "" : "its plugin was not opened: ") + opened.why, 0,
               no_library ? "install NCCL (libnccl.so.2; `pip install nvidia-nccl-cu13`), or name its folder in "
                            "LD_LIBRARY_PATH"
                          : opened.remedy});
}

const NcclPlugin& nccl_plugin() {
  static const NcclPlugin& plugin = opened_nccl_plugin();  // after an error the next call tries again
  return plugin;
}

// NCCL would wait, or say so in words of its own.
void refuse_shared(Agreement& agreement, const CurrentGpu& own) {
  const std::vector<std::uint64_t> gpus = agreement.gather(granule_checksum(std::as_bytes(std::span(own.id))));
  for (std::size_t second = 1; second < gpus.size(); ++second) {
    const auto first = static_cast<std::size_t>(std::ranges::find(gpus, gpus[second]) - gpus.begin());
    if (first == second) continue;
    throw Error(Code::kInvalidArgument,
                {"communicator nccl", fmt::format("ranks {} and {} have the same GPU", first, second), 0,
                 "give each rank one of its own, by cudaSetDevice (torch.cuda.set_device) or CUDA_VISIBLE_DEVICES"});
  }
}

void refuse_another(Agreement& agreement, const TransportCommunicator& ranks) {
  agreement.all([&] {
    const CurrentGpu now = current_gpu();
    if (now.id == ranks.gpu()) return;
    throw Error(Code::kInvalidArgument,
                {"communicator nccl", fmt::format("GPU {} is current, and another one was joined", now.number), 0,
                 "make all engines of a communicator on one GPU, or another communicator"});
  });
}

}  // namespace

void join_gpus(TransportCommunicator& ranks, const TransferLimits& limits) {
  Agreement agreement(&ranks);
  if (ranks.moves_streams()) return refuse_another(agreement, ranks);
  std::unique_ptr<StreamMover> streams;
  CurrentGpu gpu;
  agreement.all([&] {
    if (const std::string why = cuda_unavailable(); !why.empty())
      throw Error(Code::kUnsupported, {"communicator nccl", why, 0, "`spillway doctor` looks closer"});
    gpu = current_gpu();
    streams = nccl_plugin().prepare(
        {.rank = ranks.rank(), .ranks = ranks.ranks(), .limits = limits, .patience_seconds = ranks.patience_seconds()});
  });
  if (!agreement.alone()) refuse_shared(agreement, gpu);
  NcclId id{};
  agreement.all([&] {
    if (ranks.rank() == 0) id = nccl_plugin().make_id();
  });
  agreement.broadcast(id, 0);
  agreement.all([&] { nccl_plugin().connect(*streams, id); });
  ranks.move_streams_by(std::move(streams), gpu.id);
}

namespace {

// Null: one rank by itself.
TransportCommunicator* joinable(Communicator& ranks) {
  auto* const of_hosts = dynamic_cast<TransportCommunicator*>(&ranks);
  if (of_hosts == nullptr && ranks.ranks() > 1) {
    throw Error(Code::kUnsupported, {"communicator nccl", "it joins GPUs of ranks over MPI, not over this communicator",
                                     0, "make the communicator with make_communicator"});
  }
  return of_hosts;
}

}  // namespace

void join_current_gpus(Communicator& ranks) {
  auto* const of_hosts = joinable(ranks);
  if (of_hosts == nullptr) return;
  join_gpus(*of_hosts, {.scratch_bytes = of_hosts->limits().scratch_bytes,
                        .direct_bytes = kGpuDirectBytes,
                        .piece_bytes = kGpuPieceBytes});
}

void join_gpus(Communicator& ranks) {
  if (const auto* const of_hosts = joinable(ranks); of_hosts != nullptr && !of_hosts->moves_streams()) take_gpu(ranks);
  join_current_gpus(ranks);
}

}  // namespace spillway
