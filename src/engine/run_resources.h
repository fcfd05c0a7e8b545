// Everything a run holds, in the order in which it is made (and, backwards, taken apart): arenas, threads, device,
// store, and what moves bytes between them. The plan says how large and where, the engine says when: nothing here
// decides. A machine without the memory for the plan is refused first. Read next: run_resources.cc, which connects the
// pieces; the comment at the head of each piece's file says what it does.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <span>

#include "kernels/device.h"
#include "kernels/host_memory.h"
#include "kernels/workers.h"
#include "spillway/engine.h"
#include "src/comm/agreement.h"
#include "src/engine/early_update.h"
#include "src/engine/gradients.h"
#include "src/engine/link_probe.h"
#include "src/engine/resumed_store.h"
#include "src/engine/trace_file.h"
#include "src/engine/updater.h"
#include "src/engine/weights.h"
#include "src/plan/plan.h"
#include "src/plan/step_policies.h"
#include "swap/accumulator_places.h"
#include "swap/activation_places.h"
#include "swap/block_fetcher.h"
#include "swap/block_spiller.h"
#include "swap/stall_meter.h"
#include "swap/store_thread.h"
#include "swap/tile_mover.h"
#include "swap/tile_store.h"

namespace spillway {

struct RunResources {
  // `shares` of the compute threads: one for each NUMA node, and the nodes that the plan was made for. `agreement`: of
  // the ranks that make theirs. `before_loss`: called before an existing store goes to make room, and may throw.
  RunResources(const Config& config, const ModelDescription& model, const Plan& plan, EngineOptions options,
               std::span<const ThreadShare> shares, Agreement& agreement,
               const std::function<void()>& before_loss = {});
  ~RunResources();

  // Fills the drive's rates; nothing may be under way or uncommitted.
  void measure_drive();

  std::span<std::byte> host_region(const Region& region) const {
    return host.memory().subspan(region.offset, region.bytes);
  }
  std::span<std::byte> hbm_region(const Region& region) const {
    return device->hbm().subspan(region.offset, region.bytes);
  }
  // What streams were given may not have been done: throws what failed, on the device or between ranks.
  void throw_if_failed() const {
    device->throw_if_failed();
    if (communicator) communicator->throw_if_failed();
  }
  Timeline* timeline() const { return trace ? &trace->timeline() : nullptr; }

  const std::uint64_t idle_bytes;    // of RAM that this process could have had besides, when it began
  HostArena host;                    // addresses alone, until its pages are written
  std::unique_ptr<TraceFile> trace;  // null: nothing is traced
  std::unique_ptr<HostWorkers> workers;
  std::unique_ptr<Device> device;
  std::unique_ptr<TileStore> store;  // null without NVMe
  bool resumed = false;              // the store has the step that the run goes on with
  // What is brought into the store, a new one, before the first step: see resumed_store.h. Null: nothing.
  std::unique_ptr<FormerRun> former;
  std::optional<ReplacedRun> replaced;
  std::unique_ptr<Stream> compute, h2d, d2h;
  Communicator* communicator = nullptr;  // null: one rank
  std::unique_ptr<Stream> net;           // collectives of a step; null with one rank
  std::unique_ptr<StallMeter> stalls;
  std::unique_ptr<StoreThread> thread;  // null while nothing moves
  std::unique_ptr<TileMover> mover;
  std::unique_ptr<BlockSpiller> spiller;            // null when no gradient is spilled
  std::unique_ptr<AccumulatorPlaces> accumulators;  // null when none has its home in host memory
  std::unique_ptr<GradientPushes> pushes;
  std::unique_ptr<GradientSpills> spills;  // as spiller
  std::unique_ptr<GradientCollector> gradients;
  std::unique_ptr<TileExecutor> tiles;
  std::unique_ptr<DeviceUpdate> device_update;  // null while anything but the device updates
  std::unique_ptr<EarlyUpdate> early;
  std::unique_ptr<Updater> updater;
  std::unique_ptr<BlockSpiller> activation_spiller;  // null while all activations stay in HBM
  std::unique_ptr<BlockFetcher> activation_fetcher;  // ditto
  std::unique_ptr<ActivationPlaces> activations;
  std::unique_ptr<BlockFetcher> fetcher;  // null while weights stay in HBM
  std::unique_ptr<Weights> weights;
  MachineRates rates;  // of the drive once there is something on it to read: see probe_drive

 private:
  std::span<std::byte> probe_memory_;
  void measure_network(const Plan& plan, Agreement& agreement);
  void place_tiles(const Plan& plan, std::span<const ThreadShare> shares);
  void ensure_thread();
  void build_activations(const ModelDescription& model, const Plan& plan);
  void build_movers(const ModelDescription& model, const Plan& plan, StepPolicies& policies);
  void build_weights(const ModelDescription& model, const Plan& plan, WeightResidencyOptions policy);
};

}  // namespace spillway
