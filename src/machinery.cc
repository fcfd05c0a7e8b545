#include "src/machinery.h"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <fstream>

#include "kernels/process_limits.h"
#include "spillway/error.h"
#include "spillway/log.h"

namespace spillway {
namespace {

std::uint64_t mem_available() {
  std::ifstream file("/proc/meminfo");
  std::string key;
  std::uint64_t kib = 0;
  while (file >> key) {
    if (key == "MemAvailable:" && file >> kib) return kib * kKiB;
    file.ignore(1 << 10, '\n');
  }
  return UINT64_MAX;
}

// Being killed for memory has no message; refusing has.
void check_memory(const Plan& plan) {
  const std::uint64_t need = plan.ledger.total(Placement::kHbm) + plan.ledger.total(Placement::kHost);
  const std::uint64_t limit = memory_limit().value_or(UINT64_MAX);
  const std::uint64_t have = std::min(mem_available(), limit);
  if (need <= have) return;
  throw Error(Code::kDoesNotFit,
              {"memory",
               fmt::format("the plan needs {} MiB, {} {} MiB", div_up(need, kMiB),
                           limit == have ? "this process's cgroup allows" : "free on this machine are", have / kMiB),
               ENOMEM, "lower spillway.host_bytes and spillway.hbm_bytes, or offload to nvme"});
}

// `reclaimed`: bytes of an old store that goes when the new one is made.
void check_disk(const std::filesystem::path& directory, std::uint64_t need, std::uint64_t reclaimed) {
  const std::uint64_t have = free_disk_bytes(directory) + reclaimed;
  if (need <= have) return;
  throw Error(
      Code::kDoesNotFit,
      {directory.string(), fmt::format("the store takes {} MiB, {} MiB are free", div_up(need, kMiB), have / kMiB),
       ENOSPC,
       "free some space, name another nvme_path, or set spillway.commit_every to 0 (half the disk, no resume)"});
}

IoEngineKind engine_kind(IoEngineChoice choice) {
  switch (choice) {
    case IoEngineChoice::kIoUring: return IoEngineKind::kIoUring;
    case IoEngineChoice::kThreads: return IoEngineKind::kThreads;
    case IoEngineChoice::kAuto: break;
  }
  return IoEngineKind::kAuto;
}

std::uint64_t largest_fetch_granules(const Plan& plan) {
  std::uint64_t most = 0;
  for (const BlockPlan& block : plan.blocks) {
    std::uint64_t granules = 0;
    for (std::uint32_t t = block.first_tile; t < block.first_tile + block.tiles; ++t) {
      granules += div_up(extent_bytes(plan.tile_places[t].shape, Part::kWeights), std::uint64_t{256 * kKiB});
    }
    most = std::max(most, granules);
  }
  return most;
}

}  // namespace

Machinery::Machinery(const Config& config, const ModelDescription& model, const Plan& plan, EngineOptions options)
    : host(plan.ledger.total(Placement::kHost), kPinnedArena) {
  check_memory(plan);
  open_store(config, plan, options);
  workers = create_workers(config.threads);
  device = create_host_device({.hbm_bytes = plan.ledger.hbm_budget}, *workers);
  device->register_host(host.memory());
  compute = device->create_stream("compute");
  h2d = device->create_stream("h2d");
  d2h = device->create_stream("d2h");
  if (store) start_thread(config);
  build_movers(config, model, plan, options);
  const Region probe = plan.hbm.places.empty() ? Region{0, 0} : plan.hbm.places[0];
  rates = probe_links(*device, *h2d, *d2h, {host_region(plan.host.buffers), hbm_region(probe)}, thread.get(),
                      store.get(), plan.scratch_bytes);
}

Machinery::~Machinery() {
  // Whatever is enqueued still names the arenas.
  for (Stream* stream : {compute.get(), h2d.get(), d2h.get()}) {
    if (stream) stream->synchronize();
  }
  if (places) places->settle();
  updater.reset();
  gradients.reset();
  places.reset();
  fetcher.reset();
  mover.reset();
  thread.reset();
  compute.reset();
  h2d.reset();
  d2h.reset();
  if (device) device->unregister_host(host.memory());
}

void Machinery::open_store(const Config& config, const Plan& plan, EngineOptions options) {
  if (!plan.has_store && options.on_existing == OnExisting::kResume) {
    throw Error(Code::kNotFound, {"nvme_path", "is not configured, so there is no store to resume", 0,
                                  "name the path of the run that is to go on"});
  }
  if (!plan.has_store) return;
  const std::filesystem::path& directory = config.nvme_paths.front();
  if (options.on_existing == OnExisting::kResume) {
    store = TileStore::open(directory, store_shape(plan));
    resumed = true;
    return;
  }
  std::error_code failure;
  if (std::filesystem::create_directories(directory, failure) && !failure) {
    std::filesystem::permissions(directory, std::filesystem::perms::owner_all, failure);
  }
  if (failure) {
    throw Error(Code::kIo,
                {directory.string(), "cannot be created", failure.value(), "check nvme_path and its permissions"});
  }
  const bool replace = options.on_existing == OnExisting::kReplace;
  if (replace || !TileStore::exists(directory)) {
    check_disk(directory, plan.store_bytes, TileStore::file_bytes(directory));
    log(LogLevel::kInfo, fmt::format("the store in {} takes {} MiB of disk: {} slots of {} tiles", directory.string(),
                                     div_up(plan.store_bytes, kMiB), plan.slots, plan.tiles.size()));
  }
  store = TileStore::create(directory, store_shape(plan), replace);
}

void Machinery::start_thread(const Config& config) {
  const IoQueueOptions options{.engine = engine_kind(config.io_engine),
                               .block_bytes = align_up(config.io_block_bytes, std::uint64_t{4 * kKiB}),
                               .depth = config.io_depth};
  thread = std::make_unique<StoreThread>(options, std::vector<File*>{&store->file()},
                                         std::vector<std::span<std::byte>>{host.memory()});
}

void Machinery::build_movers(const Config& config, const ModelDescription& model, const Plan& plan,
                             EngineOptions options) {
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
                                                     .name_of = name_of});
  gradients = std::make_unique<GradientCollector>(plan, model, config.weights, *device, *workers, host.memory(), *d2h);
  updater = std::make_unique<Updater>(plan, model, *device, *workers, *mover, *gradients, *compute);
  if (plan.hbm.places.empty()) return;
  if (thread == nullptr) {  // everything fetched lies in host memory; the fetcher still wants a thread to run on
    thread = std::make_unique<StoreThread>(IoQueueOptions{.engine = IoEngineKind::kThreads, .depth = 1},
                                           std::vector<File*>{}, std::vector<std::span<std::byte>>{});
  }
  fetcher = std::make_unique<BlockFetcher>(*thread, *device, *h2d, host_region(plan.host.chunks), plan.host.chunk_bytes,
                                           name_of);
  std::size_t most_tiles = 0;
  for (const BlockPlan& block : plan.blocks) most_tiles = std::max<std::size_t>(most_tiles, block.tiles);
  WeightPlacesOptions places_options{.places = {},
                                     .block_bytes = {},
                                     .max_pieces = most_tiles,
                                     .max_granules = largest_fetch_granules(plan),
                                     .poison_released = options.poison_released};
  for (const Region& place : plan.hbm.places) places_options.places.push_back(hbm_region(place));
  for (const BlockPlan& block : plan.blocks) {
    places_options.block_bytes.push_back(block.partition.elements * size_of(config.weights));
  }
  auto route = [&plan, this](std::uint32_t b, std::byte* to, std::vector<FetchPiece>& pieces) {
    const BlockPlan& block = plan.blocks[b];
    for (std::uint32_t t = block.first_tile; t < block.first_tile + block.tiles; ++t) {
      const TilePlace& place = plan.tile_places[t];
      constexpr std::size_t kWeights = index_of(Part::kWeights);
      FetchPiece piece{.tile = t,
                       .to = to + plan.tiles[t].range.first * size_of(place.shape.type),
                       .payload_bytes = payload_bytes(place.shape, Part::kWeights)};
      if (place.home[kWeights] == Home::kHost) {
        piece.resident = host.memory().data() + place.offset[kWeights];
      } else {
        const TileStore::Slot slot = store->readable(t);
        piece.extent = slot.extent[kWeights];
        piece.checksum = slot.checksum[kWeights];
      }
      pieces.push_back(piece);
    }
  };
  places = std::make_unique<WeightPlaces>(*device, *fetcher, places_options, route);
}

}  // namespace spillway
