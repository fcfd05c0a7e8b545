// How the processes that train one model together exchange data. A Communicator joins them as ranks 0 … ranks() - 1.
//
// A call starts one collective operation and returns. The operation runs when `stream` reaches it, and what follows on
// the stream runs after it: an event that is recorded next says when it is over. All ranks make the same calls in the
// same order, whatever streams they name, and each call names the `block` of the model that it is for, or another
// number that all of them know. Work that one collective waits for must not wait for a later one. Memory that is named
// belongs to the stream's device and stays valid until the operation is over.
// Threads: calls come from one thread at a time. Enqueueing allocates nothing.
// Errors: ranks that do not make the same calls, a rank that has left, and `patience_seconds` without progress end the
// communicator on every rank with an error that names ranks and block. As with a device, throw_if_failed() reports that
// and must be asked before results are used; every later call throws the same error, and streams go on without it.
// docs/ranks_communicator.md has all of that in plain words.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "spillway/device.h"
#include "spillway/dtype.h"
#include "spillway/units.h"

namespace spillway {

// How a reduce_scatter adds.
enum class Sums : std::uint8_t {
  // In a balanced binary tree over ranks: (0 + 1) + (2 + 3) of four; of any other number the first part of the tree is
  // the largest power of two below it. The bits are those of this definition, whatever moves them.
  kTree,
  // However the library that moves them likes best. Bits may depend on it, on sizes and on the number of ranks.
  kFastest,
};

// How an all_reduce combines the values of all ranks, in the order of that tree; kOr is for integers alone. NaN of one
// rank is NaN for all.
enum class Fold : std::uint8_t { kSum, kMax, kMin, kOr };

enum class CollectiveKind : std::uint8_t { kOpen, kAllGather, kReduceScatter, kAllReduce, kBroadcast, kBarrier };
enum class ScalarType : std::uint8_t { kDouble, kUint64 };

// The most that one all_reduce takes: a decision, not a tensor.
inline constexpr std::size_t kMostScalars = 16;

// One call, as an implementation gets it.
struct Collective {
  CollectiveKind kind = CollectiveKind::kBarrier;
  std::int32_t block = 0;
  std::span<std::byte> data = {};                // kAllReduce: the values, 8 bytes each
  std::span<const std::uint64_t> slices = {};    // bytes of each rank's, one after the other; valid during the call
  Sums sums = Sums::kTree;                       // kReduceScatter
  DType wire = DType::kFloat32;                  // kReduceScatter
  Fold fold = Fold::kSum;                        // kAllReduce
  ScalarType scalar_type = ScalarType::kDouble;  // kAllReduce
  std::uint32_t root = 0;                        // kBroadcast
  bool ending = false;                           // note_ending()
};

class Communicator {
 public:
  // Only once streams have run all that was started. Waits for the other ranks, up to their patience.
  virtual ~Communicator() = default;

  virtual std::uint32_t rank() const noexcept = 0;
  virtual std::uint32_t ranks() const noexcept = 0;
  virtual std::string describe() const = 0;  // one line
  virtual void throw_if_failed() const = 0;
  // For long work before a collective in which others wait: now and then, as it goes on. Their patience begins anew
  // with each, and ends `patience_seconds` after the last. Any thread; costs nothing.
  virtual void note_work() noexcept {}
  // From here on what this rank calls is of its end, which an error of its own may have brought; or it is not any more.
  // Others that call something else are told that this one ends, and not that ranks differ.
  virtual void note_ending(bool) noexcept {}

  // `data` is cut into a slice for each rank, in their order, of bytes_of[rank] bytes, zero of some. Each rank brings
  // its own; the others' are there afterwards.
  void all_gather(std::span<std::byte> data, std::span<const std::uint64_t> bytes_of, std::int32_t block,
                  Stream& stream) {
    check_slices(data.size(), bytes_of);
    start({.kind = CollectiveKind::kAllGather, .block = block, .data = data, .slices = bytes_of}, stream);
  }

  // The same cut, bytes_of[rank] a multiple of 4. Each rank brings all of `data`; afterwards its own slice is the sum
  // of all ranks' there, in fp32, and the rest of `data` is undefined. With a `wire` of 16 bits every rank's values are
  // rounded to it first (nearest, ties to even; what is too large for fp16 becomes infinite), and half as many bytes
  // travel; they are added as kTree says, whatever `sums` is. One rank's stay as they are.
  void reduce_scatter(std::span<float> data, std::span<const std::uint64_t> bytes_of, Sums sums, std::int32_t block,
                      Stream& stream, DType wire = DType::kFloat32) {
    check_slices(data.size_bytes(), bytes_of);
    for (const std::uint64_t bytes : bytes_of)
      SPILLWAY_CHECK(bytes % sizeof(float) == 0, "a slice ends inside a value");
    start({.kind = CollectiveKind::kReduceScatter,
           .block = block,
           .data = std::as_writable_bytes(data),
           .slices = bytes_of,
           .sums = wire == DType::kFloat32 ? sums : Sums::kTree,
           .wire = wire},
          stream);
  }

  // Up to kMostScalars values of each rank become the fold of all ranks', the same bits on every rank. In host memory
  // on every device.
  void all_reduce(std::span<double> values, Fold fold, std::int32_t block, Stream& stream) {
    SPILLWAY_CHECK(fold != Fold::kOr, "doubles have no bitwise or");
    start_all_reduce(std::as_writable_bytes(values), ScalarType::kDouble, fold, block, stream);
  }
  void all_reduce(std::span<std::uint64_t> values, Fold fold, std::int32_t block, Stream& stream) {
    start_all_reduce(std::as_writable_bytes(values), ScalarType::kUint64, fold, block, stream);
  }

  // The same without a stream, for what is settled before there is one: returns when it is over, and throws what ended
  // the communicator.
  void all_reduce_now(std::span<std::uint64_t> values, Fold fold, std::int32_t block);

  // `data` of rank `root`, on every rank.
  void broadcast(std::span<std::byte> data, std::uint32_t root, std::int32_t block, Stream& stream) {
    SPILLWAY_CHECK(root < ranks(), "a broadcast comes from one of the ranks");
    start({.kind = CollectiveKind::kBroadcast, .block = block, .data = data, .root = root}, stream);
  }

  // No rank passes it before all have reached it.
  void barrier(std::int32_t block, Stream& stream) {
    start({.kind = CollectiveKind::kBarrier, .block = block}, stream);
  }

 protected:
  virtual void start(const Collective& call, Stream& stream) = 0;

 private:
  void check_slices(std::uint64_t bytes, std::span<const std::uint64_t> bytes_of) const {
    SPILLWAY_CHECK(bytes_of.size() == ranks(), "there is one slice for each rank");
    for (const std::uint64_t slice : bytes_of) {
      SPILLWAY_CHECK(slice <= bytes, "the slices are as long as the data");
      bytes -= slice;
    }
    SPILLWAY_CHECK(bytes == 0, "the slices are as long as the data");
  }
  void start_all_reduce(std::span<std::byte> values, ScalarType type, Fold fold, std::int32_t block, Stream& stream) {
    SPILLWAY_CHECK(values.size() <= kMostScalars * 8, "an all_reduce takes a few values");
    start({.kind = CollectiveKind::kAllReduce, .block = block, .data = values, .fold = fold, .scalar_type = type},
          stream);
  }
};

// What a rank has of the machine that it runs on.
struct HostShare {
  std::uint32_t ranks = 1, index = 0;  // that run there, and which of them this one is
  unsigned cores = 0;                  // for this one's threads
};

// Divides the cores of every machine among the ranks that run on it: whole cores, and whole NUMA nodes where that comes
// out even. Collective, and called before anything that computes is started: the calling thread is bound to its part,
// and what it starts later is, too. Ranks of one machine that a launcher has bound to different CPUs keep those.
HostShare share_host(Communicator& ranks);

struct CommunicatorOptions {
  // Above 0, a year at most. After so long without progress, while this rank waits for others, the communicator fails.
  double patience_seconds = 60;
  // The most memory that kTree takes for other ranks' slices, here and on a GPU; 2 MiB for each rank are enough. The
  // same on all ranks.
  std::uint64_t scratch_bytes = 16 * kMiB;
  // `mpi`: MPI_Comm_c2f() of a communicator of the program's, whose MPI is initialized with MPI_THREAD_SERIALIZED or
  // more; left out, MPI_COMM_WORLD. The program frees and finalizes what is its own, after the communicator has gone.
  std::optional<std::int32_t> mpi_comm = {};
};

// `self`: this process is the only rank. `mpi`: the ranks are processes that mpirun started; all of them call this.
// `auto`: `mpi` in a process that mpirun started with others, else `self`. `nccl`: `mpi`, and the ranks' GPUs are
// joined (gpu_ranks.h). Throws kUnsupported where there is no MPI or NCCL, and kIo when a rank does not come.
std::unique_ptr<Communicator> make_communicator(std::string_view kind = "auto",
                                                const CommunicatorOptions& options = {});

}  // namespace spillway
