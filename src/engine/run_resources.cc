#include "src/engine/run_resources.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <utility>

#include "kernels/process_limits.h"
#include "kernels/topology.h"
#include "spillway/error.h"
#include "spillway/log.h"
#include "src/comm/host_share.h"
#include "src/engine/device_choice.h"
#include "src/engine/memory_check.h"
#include "src/engine/resumed_store.h"
#include "src/engine/store_place.h"
#include "src/plan/node_tiles.h"

namespace spillway {
namespace {

// What most elements of an update are described as: the largest tile of those.
TileShape shape_of_most(const Plan& plan) {
  std::map<const StateArray*, std::uint64_t> elements;  // by description
  for (const TilePlace& tile : plan.tile_places) {
    if (tile.shape.trainable) elements[tile.shape.states.data()] += tile.shape.count;
  }
  const auto rank = [&](const TilePlace& tile) {
    return std::pair(tile.shape.trainable ? elements[tile.shape.states.data()] : 0, tile.shape.count);
  };
  return std::ranges::max_element(plan.tile_places, {}, rank)->shape;
}

// Before any rank has taken its own.
std::uint64_t idle_memory(const Config& config, const Plan& plan, Communicator* ranks, Agreement& agreement) {
  const std::uint32_t here = ranks ? ranks_on_this_host(*ranks).count : 1;
  return agreement.all([&] { return check_memory(plan, resolve_device(config), here); });
}

}  // namespace

RunResources::RunResources(const Config& config, const ModelDescription& model, const Plan& plan, EngineOptions options,
                           std::span<const ThreadShare> shares, Agreement& agreement,
                           const std::function<void()>& before_loss)
    : idle_bytes(idle_memory(config, plan, options.communicator, agreement)),
      host(plan.ledger.total(Placement::kHost), kPinnedArena) {
  agreement.all([&] {
    if (!options.trace.empty()) trace = std::make_unique<TraceFile>(options.trace, plan, model, options.trace_spans);
    workers = create_workers(shares);
    device = create_device(config, plan.ledger.hbm_budget, *workers);  // one that is too small leaves a store as it was
  });
  if (options.on_existing == OnExisting::kResume) {
    ResumedStore found = resume_store(config, model, plan, host_region(plan.host.others), agreement);
    store = std::move(found.store);
    former = std::move(found.former);
    resumed = former == nullptr;
  } else {
    NewStore begun = begin_store(config, plan, options.on_existing == OnExisting::kReplace, agreement, before_loss);
    store = std::move(begun.store);
    replaced = std::move(begun.replaced);
  }
  // Before any page of the arena is touched: the first touch decides on which NUMA node it lies.
  if (shares.size() > 1) place_tiles(plan, shares);
  device->register_host(host.memory());
  // A stream for each direction and one for compute, so that copies both ways and the caller's work overlap.
  compute = device->create_stream("compute");
  h2d = device->create_stream("h2d");
  d2h = device->create_stream("d2h");
  if (options.communicator && options.communicator->ranks() > 1) {
    communicator = options.communicator;
    net = device->create_stream("net");
  }
  const StallMeter::Streams streams{.compute = compute.get(), .h2d = h2d.get(), .d2h = d2h.get(), .net = net.get()};
  stalls = std::make_unique<StallMeter>(*device, streams, timeline());
  // Needs the arena, which is registered with the ring.
  if (store) thread = start_store_thread(config, *store, host.memory(), timeline());
  StepPolicies policies = step_policies(plan, workers->nodes());
  policies.weights.poison_released = options.poison_released;
  build_movers(model, plan, policies);
  build_weights(model, plan, std::move(policies.weights));
  probe_memory_ = host_region(plan.host.buffers);
  const auto roomiest = std::ranges::max_element(plan.hbm.places, {}, &Region::bytes);
  const Region probe = plan.hbm.places.empty() ? Region{0, 0} : *roomiest;
  // In memory that the plan has and nothing uses yet: a probe allocates nothing.
  rates = probe_machine(*device, *workers, *h2d, *d2h, {probe_memory_, hbm_region(probe)}, shape_of_most(plan));
  if (net) measure_network(plan, agreement);
  if (trace) trace->timeline().attach(*device);  // from here on nothing fails
}

// The slowest rank's, as they wait for each other. Into memory of weights, where none are yet.
void RunResources::measure_network(const Plan& plan, Agreement& agreement) {
  Region memory;
  const auto take = [&](const Region& other) { memory = other.bytes > memory.bytes ? other : memory; };
  for (const Region& place : plan.hbm.places) take(place);
  for (const BlockPlan& block : plan.blocks) take(block.weights);
  const NetworkSeconds probed = probe_network(*communicator, *net, hbm_region(memory));
  double slowest[] = {probed.of_a_byte, probed.of_a_call};
  agreement.fold(std::span(slowest), Fold::kMax);
  rates.network = slowest[0] > 0 ? 1 / slowest[0] : 0;
  rates.network_seconds = slowest[1];
  const std::string rate =
      rates.network > 0 ? fmt::format("{:.2f} GB/s", rates.network / 1e9) : "too fast to be measured";
  log(LogLevel::kInfo, fmt::format("network: {} into each of {} ranks, {:.0f} µs a call", rate, communicator->ranks(),
                                   1e6 * rates.network_seconds));
}

void RunResources::measure_drive() {
  if (!store) return;
  const ProbedBytes probed = probe_drive(*thread, *store, probe_memory_, rates);
  if (rates.nvme_mixed == 0) return;
  log(LogLevel::kInfo,
      fmt::format("nvme link: {:.2f} GB/s read, {:.2f} written, {:.2f} both at once; {} MiB read and {} written to see",
                  rates.nvme_read / 1e9, rates.nvme_write / 1e9, rates.nvme_mixed / 1e9, div_up(probed.read, kMiB),
                  div_up(probed.written, kMiB)));
}

RunResources::~RunResources() {
  // Whatever is enqueued still names the arenas.
  for (Stream* stream : {compute.get(), h2d.get(), d2h.get(), net.get()}) {
    if (stream) stream->synchronize();
  }
  // In the order of use: whatever names another part goes before it.
  weights.reset();
  fetcher.reset();
  activations.reset();
  activation_fetcher.reset();
  activation_spiller.reset();
  updater.reset();
  spills.reset();  // what is under way waits for events of the collector
  early.reset();
  device_update.reset();
  tiles.reset();
  gradients.reset();
  pushes.reset();
  accumulators.reset();
  spiller.reset();
  mover.reset();
  thread.reset();
  compute.reset();
  h2d.reset();
  d2h.reset();
  net.reset();
  if (trace) trace->timeline().detach();
  if (device) device->unregister_host(host.memory());
  if (trace) trace->write(store ? &store->layout() : nullptr);
}

// Before anything is written to the arena: a page lies where its first byte was asked for.
void RunResources::place_tiles(const Plan& plan, std::span<const ThreadShare> shares) {
  const auto nodes = static_cast<unsigned>(shares.size());
  if (plan.gradients_in_hbm || plan.tiles.size() < nodes) return;
  if (updating_nodes(plan, nodes) != nodes) {
    log(LogLevel::kWarning,
        fmt::format("too few tile buffers ({}) for {} NUMA nodes: tiles are updated one at a time by all threads, some "
                    "of them far from its memory; raise spillway.host_bytes",
                    plan.host.buffers_count, nodes));
    return;
  }
  std::vector<NodeMemory> ranges;
  for (const NodeRegion& placed : node_regions(plan, nodes, host.page_bytes())) {
    ranges.push_back({host_region(placed.region), shares[placed.node].os_index});
  }
  if (!place_on_nodes(ranges)) return;
  log(LogLevel::kInfo, fmt::format("{} NUMA nodes: each updates the tiles in its own memory", nodes));
}

// All that moves may lie in host memory; it still needs a thread that moves it.
void RunResources::ensure_thread() {
  if (thread) return;
  thread = std::make_unique<StoreThread>(IoQueueOptions{.engine = IoEngineKind::kThreads, .depth = 1},
                                         std::vector<File*>{}, std::vector<std::span<std::byte>>{});
}

void RunResources::build_activations(const ModelDescription& model, const Plan& plan) {
  const ActivationPlan& planned = plan.activations;
  ActivationPlacesOptions options;
  for (const Region& place : planned.places) options.places.push_back(hbm_region(place));
  for (const Activation& activation : model.activations) options.bytes.push_back(activation.bytes);
  if (!planned.uses.empty()) {
    ensure_thread();
    activation_spiller = std::make_unique<BlockSpiller>(*thread, *device, *d2h, host_region(planned.down),
                                                        plan.host.chunk_bytes, planned.places.size(), stalls.get());
    activation_fetcher = std::make_unique<BlockFetcher>(
        *thread, *device, *h2d, host_region(planned.up), plan.host.chunk_bytes,
        [](std::uint32_t activation) { return fmt::format("activation {}", activation); },
        Watch{.stalls = stalls.get(), .timeline = nullptr}, planned.places.size(), store.get());
    options.uses = model.activation_uses;
    options.plan = planned.uses;
    for (std::size_t a = 0; a < planned.homes.size(); ++a) {
      ActivationHome home;
      const auto& [placement, offset] = planned.homes[a];
      if (placement == Placement::kHost) home.host = host.memory().data() + offset;
      if (placement == Placement::kNvme) {
        home.extent = {.offset = store->layout().scratch_offset + plan.nvme.activations.offset + offset,
                       .bytes = align_up(options.bytes[a], kExtentAlignment)};
      }
      options.homes.push_back(home);
    }
  }
  activations =
      std::make_unique<ActivationPlaces>(*device, activation_fetcher.get(), activation_spiller.get(), options);
}

void RunResources::build_movers(const ModelDescription& model, const Plan& plan, StepPolicies& policies) {
  const Watch watch{.stalls = stalls.get(), .timeline = timeline()};
  const auto name_of = [&plan, &model](std::uint32_t tile) { return tile_name(plan, model, tile); };
  mover = std::make_unique<TileMover>(TileMoverParts{.device = device.get(),
                                                     .workers = workers.get(),
                                                     .h2d = h2d.get(),
                                                     .d2h = d2h.get(),
                                                     .thread = thread.get(),
                                                     .store = store.get(),
                                                     .tiles = plan.tile_places,
                                                     .host = host.memory(),
                                                     .buffers = host_region(plan.host.buffers),
                                                     .buffer_bytes = plan.host.buffer_bytes,
                                                     .count = plan.host.buffers_count,
                                                     .numbers = policies.updates.numbers(),
                                                     .name_of = name_of,
                                                     .watch = watch});
  if (plan.spill_bytes > 0) {
    spiller = std::make_unique<BlockSpiller>(*thread, *device, *d2h, host_region(plan.host.spill_chunks),
                                             plan.host.chunk_bytes, plan.hbm.staging.size(), stalls.get());
    spills = std::make_unique<GradientSpills>(plan, *device, *spiller, store->layout().scratch_offset);
  }
  if (!plan.hbm.accumulators.empty()) {
    std::vector<std::span<std::byte>> accumulator_places, homes;
    for (const Region& place : plan.hbm.accumulators) accumulator_places.push_back(hbm_region(place));
    for (const BlockPlan& block : plan.blocks) homes.push_back(host_region(block.accumulator_home.value_or(Region{})));
    accumulators = std::make_unique<AccumulatorPlaces>(*device, *h2d, *d2h, std::move(accumulator_places),
                                                       std::move(homes), watch.timeline);
  }
  pushes = std::make_unique<GradientPushes>(plan, model, device->hbm());
  const GradientMovers movers{.device = *device,
                              .workers = *workers,
                              .host = host.memory(),
                              .d2h = *d2h,
                              .accumulators = accumulators.get(),
                              .timeline = watch.timeline,
                              .communicator = communicator,
                              .net = net.get()};
  gradients = std::make_unique<GradientCollector>(plan, std::move(policies.gradients), *pushes, movers, spills.get());
  tiles = std::make_unique<TileExecutor>(plan, model, policies.updates, *workers, *mover, *gradients, watch);
  if (plan.gradients_in_hbm) {
    device_update = std::make_unique<DeviceUpdate>(plan, model, *device, *gradients, host.memory(), *compute, watch);
  }
  early = std::make_unique<EarlyUpdate>(*tiles, *mover, plan.early_blocks);
  updater = std::make_unique<Updater>(*tiles, device_update.get());
  build_activations(model, plan);
}

// Weights that stay in HBM are never fetched.
void RunResources::build_weights(const ModelDescription& model, const Plan& plan, WeightResidencyOptions policy) {
  if (!plan.hbm.places.empty()) {
    ensure_thread();
    fetcher = std::make_unique<BlockFetcher>(
        *thread, *device, *h2d, host_region(plan.host.chunks), plan.host.chunk_bytes,
        [&plan, &model](std::uint32_t tile) { return "weights of " + tile_name(plan, model, tile); },
        Watch{.stalls = stalls.get(), .timeline = timeline()}, plan.hbm.places.size(), store.get());
  }
  weights = std::make_unique<Weights>(plan, std::move(policy),
                                      WeightsParts{.device = *device,
                                                   .h2d = *h2d,
                                                   .fetcher = fetcher.get(),
                                                   .tiles = *tiles,
                                                   .mover = *mover,
                                                   .store = store.get(),
                                                   .host = host.memory(),
                                                   .communicator = plan.rank.count > 1 ? communicator : nullptr,
                                                   .net = net.get()});
}

}  // namespace spillway
