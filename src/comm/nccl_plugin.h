// What libspillway_nccl.so exports: one function, spillway_nccl_plugin, that returns this table. It is opened when
// ranks join their GPUs, so that library and wheel need neither NCCL nor CUDA.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "spillway/log.h"
#include "src/comm/stream_mover.h"
#include "src/comm/transfers.h"
#include "src/comm/transport_communicator.h"

namespace spillway {

// Changes whenever StreamMover, this table or a type that crosses it does.
inline constexpr std::uint32_t kNcclInterface = 1;
inline constexpr const char* kNcclPlugin = "libspillway_nccl.so";
inline constexpr const char* kNcclPluginEntry = "spillway_nccl_plugin";

struct NcclOptions {
  std::uint32_t rank = 0, ranks = 1;
  TransferLimits limits = {};
  double patience_seconds = 60;
};

// What NCCL knows the ranks of one communicator by.
using NcclId = std::array<std::byte, 128>;

struct NcclPlugin {
  std::uint32_t interface = 0;    // read before anything else
  const char* version = nullptr;  // of Spillway, which is the library's; read before what follows
  NcclId (*make_id)();            // of one rank, for all
  // What a rank does by itself. Throws kUnsupported, kDoesNotFit and kDevice.
  std::unique_ptr<StreamMover> (*prepare)(const NcclOptions& options);
  // All ranks together, on what each has prepared. Throws kIo when one does not come.
  void (*connect)(StreamMover& prepared, const NcclId& id);
  // Where the plugin's messages go from now on: it may have a log of its own.
  void (*set_log)(internal::LogState& to);
};

// How much goes in one call of NCCL's. Links of GPUs move in a millisecond what a network does in a second, and a call
// costs tens of microseconds; so pieces are larger than those of a network.
inline constexpr std::size_t kGpuDirectBytes = std::size_t{1} << 30;
inline constexpr std::size_t kGpuPieceBytes = std::size_t{256} << 20;

// Opens the plugin on all ranks and has it move what `ranks` are called for on streams of the GPU that is current in
// this thread. Collective; an error of one rank is thrown on all.
void join_gpus(TransportCommunicator& ranks, const TransferLimits& limits);
// join_gpus() of gpu_ranks.h, of GPUs that were taken.
void join_current_gpus(Communicator& ranks);

}  // namespace spillway
