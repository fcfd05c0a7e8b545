// Named tensors in tiers for C, and for languages that call C: tensor_store.h, call by call. What is said there holds:
// memory, threads, what a commit is; handles, structs and errors are those of c_api.h. Any number of threads may call
// with one store at a time.
#pragma once

#include "spillway/c_api.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct spillway_tensor_store spillway_tensor_store;

typedef int32_t spillway_device_choice;
enum { SPILLWAY_DEVICE_CHOICE_AUTO, SPILLWAY_DEVICE_CHOICE_HOST, SPILLWAY_DEVICE_CHOICE_CUDA };

// TensorStoreOptions in tensor_store.h; 0: the default.
typedef struct {
  size_t struct_size;
  const char* const* paths;  // a directory for each drive; none: host memory alone
  size_t path_count;
  uint64_t nvme_bytes, host_bytes;
  spillway_on_existing on_existing;
  int32_t io_engine;  // 0: the best that works here; io_uring, libaio, threads
  uint64_t io_block_bytes, io_depth;
  uint64_t hbm_bytes;
  spillway_device_choice device;  // where hbm_bytes are
  int32_t reserved;
} spillway_tensor_store_options;

spillway_status spillway_tensor_store_open(const spillway_tensor_store_options* options, spillway_tensor_store** store);
// Waits for what is under way. What was put since the last commit is dropped, which a line of the log says. The
// store ends once calls that other threads have under way have ended.
spillway_status spillway_tensor_store_close(spillway_tensor_store* store);

typedef struct {
  const char* name;
  const char* type;  // the caller's word, compared and given back
  const uint64_t* dims;
  size_t dim_count;
  const void* data;
  uint64_t bytes;
  uint64_t block_bytes;  // what is read and checked at a time by _read_rows; 0: 64 KiB
  int32_t on_device;     // other than 0: `data` is memory of the store's device, in the order of `stream`
  void* stream;          // a cudaStream_t; null: CUDA's default stream
} spillway_tensor_to_put;
spillway_status spillway_tensor_store_put(spillway_tensor_store* store, const spillway_tensor_to_put* tensors,
                                          size_t count);

typedef struct {
  const char* name;
  void* out;
  uint64_t bytes;     // the tensor's
  int32_t on_device;  // the same
  void* stream;
} spillway_tensor_to_get;
spillway_status spillway_tensor_store_get(spillway_tensor_store* store, const spillway_tensor_to_get* tensors,
                                          size_t count);
// Rows of `row_bytes` each, one after the other in `out`.
spillway_status spillway_tensor_store_read_rows(spillway_tensor_store* store, const char* name, uint64_t row_bytes,
                                                const uint64_t* rows, size_t count, void* out);
// `to`: SPILLWAY_HOST or SPILLWAY_HBM. `there`: how many of them are there, or on their way; may be null.
spillway_status spillway_tensor_store_prefetch(spillway_tensor_store* store, const char* const* names, size_t count,
                                               spillway_tier to, size_t* there);
// `memory`, may be null: the tensor's there, until it is unpinned. Nobody may write to it.
spillway_status spillway_tensor_store_pin(spillway_tensor_store* store, const char* name, spillway_tier in,
                                          const void** memory);
spillway_status spillway_tensor_store_unpin(spillway_tensor_store* store, const char* name, spillway_tier in);
#define SPILLWAY_NO_NEXT_USE UINT64_MAX
spillway_status spillway_tensor_store_set_next_use(spillway_tensor_store* store, const char* name, uint64_t when);
spillway_status spillway_tensor_store_remove(spillway_tensor_store* store, const char* const* names, size_t count);
// `commits`: how many commits the store has had; may be null.
spillway_status spillway_tensor_store_commit(spillway_tensor_store* store, uint64_t* commits);

// Valid inside the call that brings it.
typedef struct {
  size_t struct_size;
  const char* name;
  const char* type;
  const uint64_t* dims;
  size_t dim_count;
  uint64_t bytes;
  int32_t in_host, on_nvme, committed, pinned;
  int32_t in_hbm, pinned_in_hbm;
} spillway_tensor_info;
// Calls `each` with the tensor of that name, or with all of them, by name, where `name` is null.
spillway_status spillway_tensor_store_describe(spillway_tensor_store* store, const char* name,
                                               void (*each)(void* user, const spillway_tensor_info* info), void* user);

typedef struct {
  size_t struct_size;
  uint64_t host_bytes, host_capacity, nvme_bytes, nvme_capacity;
  uint64_t hits, misses, evictions, commits;
  uint64_t read_bytes, write_bytes;
  double busy_seconds;  // time with at least one transfer in flight
  uint64_t hbm_bytes, hbm_capacity, hbm_hits, hbm_evictions;
} spillway_tensor_store_stats;
spillway_status spillway_tensor_store_stats_now(spillway_tensor_store* store, spillway_tensor_store_stats* stats);
// The device that the store has made, SPILLWAY_DEVICE_CHOICE_AUTO: none.
spillway_status spillway_tensor_store_device(spillway_tensor_store* store, spillway_device_choice* device);

#ifdef __cplusplus
}
#endif
