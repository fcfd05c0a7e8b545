// Named tensors in tiers: in HBM and host memory under hard budgets, and beyond them in the files of one or several
// drives. Without a model, an optimizer or a loop: activations, caches, tables of embeddings, states of a loop of one's
// own.
//
//   put() ──► host memory ──► NVMe, when room is needed or at commit()      get() ──► from where it is, verified
//               ▲    │
//      prefetch │    ▼ when room is needed
//   put() ────► HBM, with hbm_bytes: what comes from device memory or goes there, is prefetched or pinned there
//
// What is in the store is what was put: a tensor that comes from NVMe is checked against the checksums of its blocks
// before a byte of it is used. When room is needed the least recently used tensors leave first; those whose next use is
// known leave last, the latest use first. commit() makes everything that is in the store durable, together: a store
// that is opened after a crash, a kill -9 too, has exactly what the last commit() had.
//
// Memory: hbm_bytes and host_bytes are reserved when the store is made and never exceeded; names, shapes and checksums
// (8 bytes a block) come on top, and for a moment of a commit twice what they take. Disk: nvme_bytes and a little more
// are taken when the store is made, so that no later write finds the disk full. Of that, room is kept for the names,
// shapes and checksums that the next commit writes: beside very many small tensors less fits. A tensor that was
// committed and is put anew takes both places until the next commit.
//
// Threads: any number may call at a time; calls of one tensor wait for each other. Memory that is given belongs to the
// caller, and is not looked at once the call has returned. A process that was forked off must not use its parent's
// store (kInvalidArgument), and two processes never have one at a time (kBusy). With hbm_bytes a thread of the store's
// moves what is prefetched there.
// Errors: spillway::Error with the tensor's name as object, or the path. A call that throws has changed nothing of the
// tensor that it names; of several those before it are done. Once a GPU has failed (kDevice), tensors that host memory
// or NVMe has are as before, and those that HBM alone had are lost: they say so until they are removed or put anew.
#pragma once

#include "spillway/cplusplus.h"

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "spillway/device.h"
#include "spillway/engine.h"
#include "spillway/io_queue.h"
#include "spillway/placement.h"

namespace spillway {

struct TensorStoreOptions {
  // A directory for each drive, which is made where only it is missing; tensors are striped over all of them. Empty:
  // host memory alone, without commit().
  std::vector<std::filesystem::path> paths = {};
  std::uint64_t nvme_bytes = 0;  // for tensors, of all paths together; of a store that exists its own count
  std::uint64_t host_bytes = 0;  // at least 1 MiB
  // kResume: the tensors of the last commit; a new store where there is none. kReplace: what is there is removed.
  OnExisting on_existing = OnExisting::kRefuse;
  IoEngineKind io_engine = IoEngineKind::kAuto;
  std::uint64_t io_block_bytes = 1 << 20;
  std::uint32_t io_depth = 32;
  // Memory of a device for tensors, at least 1 MiB. 0: none, and no device is made.
  std::uint64_t hbm_bytes = 0;
  // The GPU that this thread has now; `host`, where RAM stands for HBM; or nothing: a GPU where there is one, else
  // `host`, which a line of the log says. kUnsupported: kCuda without a GPU.
  std::optional<DeviceKind> device = {};
};

struct TensorShape {
  std::string type;  // the caller's word, `float32`; compared and given back
  std::vector<std::uint64_t> dims;
  bool operator==(const TensorShape&) const = default;
};

// `float32 [3, 5]`
inline std::string to_string(const TensorShape& shape) {
  std::string dims;
  for (const std::uint64_t dim : shape.dims) dims += (dims.empty() ? "" : ", ") + std::to_string(dim);
  return shape.type + " [" + dims + "]";
}

struct TensorInfo {
  std::string name;
  TensorShape shape;
  std::uint64_t bytes = 0;
  bool in_host = false, on_nvme = false;  // in both where a copy in host memory was not changed
  bool committed = false;                 // as it is now
  bool pinned = false;
  bool in_hbm = false, pinned_in_hbm = false;
};

struct TensorStoreStats {
  std::uint64_t host_bytes = 0, host_capacity = 0;  // taken by tensors, and what they can take
  std::uint64_t nvme_bytes = 0, nvme_capacity = 0;
  std::uint64_t hits = 0, misses = 0;  // get() from host memory, and of what was in no memory
  std::uint64_t evictions = 0;         // from host memory
  std::uint64_t commits = 0;
  IoStats io;
  std::uint64_t hbm_bytes = 0, hbm_capacity = 0;
  std::uint64_t hbm_hits = 0, hbm_evictions = 0;  // get() from HBM
};

// Memory of the caller's is host memory, or with Placement::kHbm the device's own: an allocation on the GPU of the
// store; on `host` any memory. `stream`, a cudaStream_t, is then the stream in whose order it is read or written; null:
// CUDA's default stream. The call returns when that is done.
struct TensorToPut {
  std::string name;
  TensorShape shape;
  std::span<const std::byte> data;
  // What is read and checked at a time by read(): for rows of a table their size, rounded up to 4 KiB. 0: 64 KiB.
  std::uint64_t block_bytes = 0;
  Placement memory = Placement::kHost;
  void* stream = nullptr;
};

struct TensorToGet {
  std::string name;
  std::span<std::byte> out;  // of its size
  Placement memory = Placement::kHost;
  void* stream = nullptr;
};

class TensorStore {
 public:
  static std::unique_ptr<TensorStore> open(const TensorStoreOptions& options);
  // Waits for what is under way. What was put since the last commit() is dropped, which a line of the log says.
  virtual ~TensorStore() = default;

  // Copies the tensors in: from device memory into HBM, as far as there is room, and else into host memory. A tensor
  // that is there already takes the new bytes, if shape and type are the same (kInvalidArgument). kDoesNotFit: a budget
  // is full, and nothing that may go would make room.
  virtual void put(std::span<const TensorToPut> tensors) = 0;
  // Copies tensors out. They stay in host memory, or in HBM where they go to device memory, if that can make room for
  // them. Those that come from NVMe come at the same time.
  virtual void get(std::span<const TensorToGet> tensors) = 0;
  // Copies rows of equal size out, `rows[i]` to the i-th place of `out`: those blocks alone come from NVMe, many at a
  // time, and are not kept. `row_bytes` divides the tensor's bytes.
  virtual void read_rows(const std::string& name, std::uint64_t row_bytes, std::span<const std::uint64_t> rows,
                         std::span<std::byte> out) = 0;
  // Begins to bring them into host memory or HBM, in this order, and returns; how many of them are there, in host
  // memory or above, or on their way. One for which nothing may go now is left where it is.
  virtual std::size_t prefetch(std::span<const std::string> names, Placement to = Placement::kHost) = 0;
  // Brings it in and keeps it there, until it is unpinned as often. Returns the memory that has it there, which nobody
  // may write to. What is pinned in HBM keeps its place: put() and remove() refuse it (kInvalidArgument), and work on
  // it must be done before it is unpinned. In host memory it may be put anew or removed, which ends that memory, too.
  // kDoesNotFit: nothing may leave for it.
  virtual std::span<const std::byte> pin(const std::string& name, Placement in = Placement::kHost) = 0;
  virtual void unpin(const std::string& name, Placement in = Placement::kHost) = 0;
  // When it will be used next: any number that grows with time. Nothing: unknown, as after every get().
  virtual void set_next_use(const std::string& name, std::optional<std::uint64_t> when) = 0;
  // kNotFound where one is not there; then none is removed.
  virtual void remove(std::span<const std::string> names) = 0;

  // Everything that is in the store now, durable; returns how many commits there were. Other threads may go on: what
  // they put meanwhile is part of the next one.
  virtual std::uint64_t commit() = 0;

  virtual bool contains(const std::string& name) const = 0;
  virtual TensorInfo info(const std::string& name) const = 0;
  virtual std::vector<TensorInfo> list() const = 0;  // by name
  virtual TensorStoreStats stats() const = 0;
  virtual std::optional<DeviceKind> device() const = 0;  // nothing without hbm_bytes
};

// Whether these are the files of such a store, and not those of a training run. False where there are none.
bool holds_tensors(const std::vector<std::filesystem::path>& paths);

// What a store holds on NVMe, of the last commit. Nothing is changed.
struct StoredTensors {
  std::vector<TensorInfo> tensors;  // by name
  std::uint64_t commits = 0;
  std::uint64_t nvme_bytes = 0, nvme_capacity = 0;
  bool in_use = false;   // a process has it open
  bool damaged = false;  // a copy of what its commits say cannot be read, and another one can
};
StoredTensors inspect_tensors(const std::vector<std::filesystem::path>& paths);

// Reads every byte of the last commit and compares the checksums, of which `on_bad` hears where one is wrong, or cannot
// be read. No process can open the store meanwhile. Takes up to 16 MiB of memory. Returns how many bytes that were.
struct BadTensor {
  std::string name;
  std::uint64_t offset = 0, bytes = 0;  // in the tensor
  int error = 0;                        // errno; 0: it was read, and is another one
};
std::uint64_t verify_tensors(const std::vector<std::filesystem::path>& paths,
                             const std::function<void(const BadTensor& bad)>& on_bad,
                             const std::function<void(std::uint64_t done, std::uint64_t bytes)>& progress = {});

}  // namespace spillway
