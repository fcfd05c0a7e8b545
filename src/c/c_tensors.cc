// Named tensors of the API for C.
#include "spillway/c_tensors.h"

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "spillway/tensor_store.h"
#include "src/c/c_handles.h"

using namespace spillway;
using namespace spillway::c;

namespace {

// Never taken apart, as the other tables.
Handles<spillway_tensor_store, TensorStore>& stores() {
  static auto* const table = new Handles<spillway_tensor_store, TensorStore>(11, "spillway_tensor_store");
  return *table;
}

template <typename Item>
std::span<const Item> given_list(const Item* items, size_t count, const char* what) {
  if (count > 0) given(items, what);
  return {items, count};
}

// A device's number, after that of `auto`.
constexpr spillway_device_choice choice_of(DeviceKind kind) { return static_cast<spillway_device_choice>(kind) + 1; }
static_assert(SPILLWAY_DEVICE_CHOICE_AUTO == 0 && SPILLWAY_DEVICE_CHOICE_HOST == choice_of(DeviceKind::kHost) &&
              SPILLWAY_DEVICE_CHOICE_CUDA == choice_of(DeviceKind::kCuda));

Placement tier_of(spillway_tier tier) { return checked(tier, Placement::kNvme, "spillway_tier"); }
Placement memory_of(int32_t on_device) { return on_device == 0 ? Placement::kHost : Placement::kHbm; }

std::vector<std::string> names_of(const char* const* names, size_t count) {
  std::vector<std::string> read;
  for (const char* name : given_list(names, count, "names")) read.emplace_back(given(name, "name"));
  return read;
}

TensorStoreOptions options_of(const spillway_tensor_store_options& read) {
  TensorStoreOptions options;
  for (const char* path : given_list(read.paths, read.path_count, "paths"))
    options.paths.emplace_back(given(path, "path"));
  options.nvme_bytes = read.nvme_bytes;
  options.host_bytes = read.host_bytes;
  options.on_existing = checked(read.on_existing, OnExisting::kReplace, "spillway_on_existing");
  options.io_engine = checked(read.io_engine, kLastIoEngine, "io_engine");
  if (read.io_block_bytes > 0) options.io_block_bytes = read.io_block_bytes;
  if (read.io_depth > kLargestDepth) refuse("io_depth", "is " + std::to_string(read.io_depth), "at most 4096");
  if (read.io_depth > 0) options.io_depth = static_cast<uint32_t>(read.io_depth);
  options.hbm_bytes = read.hbm_bytes;
  const int32_t device = checked(read.device, int32_t{SPILLWAY_DEVICE_CHOICE_CUDA}, "spillway_device_choice");
  if (device != SPILLWAY_DEVICE_CHOICE_AUTO) options.device = static_cast<DeviceKind>(device - 1);
  return options;
}

}  // namespace

spillway_status spillway_tensor_store_open(const spillway_tensor_store_options* options,
                                           spillway_tensor_store** store) {
  return guarded([&] {
    given(store, "store");
    *store = stores().add(TensorStore::open(options_of(read_struct(options, "spillway_tensor_store_options"))));
  });
}

spillway_status spillway_tensor_store_close(spillway_tensor_store* store) {
  return guarded([&] {
    if (store != nullptr) stores().take(store);
  });
}

spillway_status spillway_tensor_store_put(spillway_tensor_store* store, const spillway_tensor_to_put* tensors,
                                          size_t count) {
  return guarded([&] {
    std::vector<TensorToPut> put;
    for (const auto& tensor : given_list(tensors, count, "tensors")) {
      const auto dims = given_list(tensor.dims, tensor.dim_count, "dims");
      const auto* const data = static_cast<const std::byte*>(tensor.data);
      put.push_back({given(tensor.name, "name"),
                     {given(tensor.type, "type"), {dims.begin(), dims.end()}},
                     given_list(data, tensor.bytes, "data"),
                     tensor.block_bytes,
                     memory_of(tensor.on_device),
                     tensor.stream});
    }
    stores().find(store)->put(put);
  });
}

spillway_status spillway_tensor_store_get(spillway_tensor_store* store, const spillway_tensor_to_get* tensors,
                                          size_t count) {
  return guarded([&] {
    std::vector<TensorToGet> get;
    for (const auto& tensor : given_list(tensors, count, "tensors")) {
      auto* const out = static_cast<std::byte*>(tensor.bytes > 0 ? given(tensor.out, "out") : tensor.out);
      get.push_back({given(tensor.name, "name"), {out, tensor.bytes}, memory_of(tensor.on_device), tensor.stream});
    }
    stores().find(store)->get(get);
  });
}

spillway_status spillway_tensor_store_read_rows(spillway_tensor_store* store, const char* name, uint64_t row_bytes,
                                                const uint64_t* rows, size_t count, void* out) {
  return guarded([&] {
    if (row_bytes > 0 && count > UINT64_MAX / row_bytes) refuse(given(name, "name"), "is asked for too many rows");
    stores().find(store)->read_rows(given(name, "name"), row_bytes, given_list(rows, count, "rows"),
                                    {static_cast<std::byte*>(given(out, "out")), row_bytes * count});
  });
}

spillway_status spillway_tensor_store_prefetch(spillway_tensor_store* store, const char* const* names, size_t count,
                                               spillway_tier to, size_t* there) {
  return guarded([&] {
    const size_t found = stores().find(store)->prefetch(names_of(names, count), tier_of(to));
    if (there != nullptr) *there = found;
  });
}

spillway_status spillway_tensor_store_pin(spillway_tensor_store* store, const char* name, spillway_tier in,
                                          const void** memory) {
  return guarded([&] {
    const std::span<const std::byte> pinned = stores().find(store)->pin(given(name, "name"), tier_of(in));
    if (memory != nullptr) *memory = pinned.data();
  });
}

spillway_status spillway_tensor_store_unpin(spillway_tensor_store* store, const char* name, spillway_tier in) {
  return guarded([&] { stores().find(store)->unpin(given(name, "name"), tier_of(in)); });
}

spillway_status spillway_tensor_store_set_next_use(spillway_tensor_store* store, const char* name, uint64_t when) {
  return guarded([&] {
    stores().find(store)->set_next_use(given(name, "name"),
                                       when == SPILLWAY_NO_NEXT_USE ? std::nullopt : std::optional(when));
  });
}

spillway_status spillway_tensor_store_remove(spillway_tensor_store* store, const char* const* names, size_t count) {
  return guarded([&] { stores().find(store)->remove(names_of(names, count)); });
}

spillway_status spillway_tensor_store_commit(spillway_tensor_store* store, uint64_t* commits) {
  return guarded([&] {
    const uint64_t made = stores().find(store)->commit();
    if (commits != nullptr) *commits = made;
  });
}

spillway_status spillway_tensor_store_describe(spillway_tensor_store* store, const char* name,
                                               void (*each)(void*, const spillway_tensor_info*), void* user) {
  return guarded([&] {
    given(each, "each");
    const auto found = stores().find(store);
    for (const TensorInfo& info : name == nullptr ? found->list() : std::vector{found->info(name)}) {
      const spillway_tensor_info told = {.struct_size = sizeof told,
                                         .name = info.name.c_str(),
                                         .type = info.shape.type.c_str(),
                                         .dims = info.shape.dims.data(),
                                         .dim_count = info.shape.dims.size(),
                                         .bytes = info.bytes,
                                         .in_host = info.in_host,
                                         .on_nvme = info.on_nvme,
                                         .committed = info.committed,
                                         .pinned = info.pinned,
                                         .in_hbm = info.in_hbm,
                                         .pinned_in_hbm = info.pinned_in_hbm};
      each(user, &told);
    }
  });
}

spillway_status spillway_tensor_store_stats_now(spillway_tensor_store* store, spillway_tensor_store_stats* stats) {
  return guarded([&] {
    check_struct(given(stats, "stats"), "spillway_tensor_store_stats");
    const TensorStoreStats now = stores().find(store)->stats();
    write_struct(stats, {.struct_size = 0,
                         .host_bytes = now.host_bytes,
                         .host_capacity = now.host_capacity,
                         .nvme_bytes = now.nvme_bytes,
                         .nvme_capacity = now.nvme_capacity,
                         .hits = now.hits,
                         .misses = now.misses,
                         .evictions = now.evictions,
                         .commits = now.commits,
                         .read_bytes = now.io.read_bytes,
                         .write_bytes = now.io.write_bytes,
                         .busy_seconds = now.io.busy_seconds,
                         .hbm_bytes = now.hbm_bytes,
                         .hbm_capacity = now.hbm_capacity,
                         .hbm_hits = now.hbm_hits,
                         .hbm_evictions = now.hbm_evictions});
  });
}

spillway_status spillway_tensor_store_device(spillway_tensor_store* store, spillway_device_choice* device) {
  return guarded([&] {
    given(device, "device");
    const auto kind = stores().find(store)->device();
    *device = kind ? choice_of(*kind) : SPILLWAY_DEVICE_CHOICE_AUTO;
  });
}
