// An optimizer with offloaded states: the caller keeps weights and gradients, the library keeps the states (and what
// makes a 16-bit weight exact) in host memory or on NVMe.
//
//   auto optimizer = OffloadOptimizer::create(config, description, {.on_existing = OnExisting::kRefuse});
//   optimizer->import_weights(tensors);               // a new run begins with what the caller's tensors hold
//   for each step:
//     … gradients of all tensors …
//     optimizer->step({.tensors = tensors, .groups = groups, .group_of = group_of});   // weights are new when it
//     returns
//
// `config` says the weights' type, where states live (offload_optimizer; offload_param is not asked), budgets, and the
// store's paths; the description names the tensors, block after block, and has neither visits nor activations. With
// paths every step is a commit, weights included, durable when step() returns. Where states live, how large tiles are
// and how many threads work never changes a bit.
//
// Ownership: the optimizer owns its memory and files, the caller the tensors, which hold still during a call. They lie
// in host memory, or elsewhere, on a GPU say: then a TensorCarrier copies them, piece by piece. Threads: calls may come
// from different threads, one at a time; others are refused (kBusy). Errors: spillway::Error in the caller's thread;
// after kIo or kCorrupt it refuses further work, and the store is at its last commit.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "spillway/config.h"
#include "spillway/engine.h"
#include "spillway/model.h"
#include "spillway/optimizer.h"
#include "spillway/snapshot.h"

namespace spillway {

// Stands for the address of a tensor that does not lie in host memory row by row.
inline void* elsewhere() noexcept { return reinterpret_cast<void*>(~std::uintptr_t{0}); }

// Elements [first, first + count) of a tensor, row-major, and where they are in host memory.
struct CarriedPiece {
  std::uint32_t slot = 0, tensor = 0;
  std::uint64_t first = 0, count = 0;
  void *weight = nullptr, *gradient = nullptr;  // null: not asked for
};

// The caller's copies between host memory and elsewhere. It is called inside of the optimizer's calls, in their thread.
// What it throws ends the call, and the optimizer with it where states may have changed.
class TensorCarrier {
 public:
  virtual ~TensorCarrier() = default;
  // Begin to copy: weight and gradient into host memory, or the weight out of it.
  virtual void bring(const CarriedPiece& piece) = 0;
  virtual void give(const CarriedPiece& piece) = 0;
  // Returns when all that was begun for the slot is done.
  virtual void wait(std::uint32_t slot) = 0;
  // The sums of squares of a gradient's leaves, as kernels/norm.h has them, bit for bit: 1,024 consecutive elements
  // each, element i to accumulator i mod 16, in double, which are then added half to half. Not finite where an element
  // of the leaf is not.
  virtual void leaf_sums(std::uint32_t tensor, std::span<double> sums) = 0;
};

struct OffloadOptimizerOptions {
  OnExisting on_existing = OnExisting::kRefuse;
  // A snapshot to begin with, as in EngineOptions; load_weights() hands its weights out.
  std::filesystem::path snapshot = {};
  // Memory for each tensor's gradient, in the weights' type: gradient_memory(). Else the caller has its own.
  bool keep_gradients = false;
  // For tensors that are elsewhere(); it must outlive the optimizer. Null: all lie in host memory.
  TensorCarrier* carrier = nullptr;
  // Most tensors are elsewhere(): staging() gets enough room to keep their link busy. Else it gets little.
  bool mostly_elsewhere = false;
};

// One of the caller's tensors, contiguous, in the weights' type; any alignment. Each address may be elsewhere().
struct OptimizerTensor {
  void* weight = nullptr;
  const void* gradient = nullptr;  // null: it has none in this step, and stays as it is, without decay
};

// The fp32 values that the optimizer keeps of a tensor.
enum class OptimizerState : std::uint8_t {
  kMaster,    // the exact weight
  kExpAvg,    // of optimizers that have it; SGD's momentum buffer
  kExpAvgSq,  // ditto; Adagrad's sum of squares
};

struct OptimizerStep {
  std::span<const OptimizerTensor> tensors;  // all of the description's, block after block
  std::span<const OptimizerConfig> groups;   // of the configuration's kind
  std::span<const std::uint32_t> group_of;   // by tensor: index into groups
  double gradient_scale = 1;                 // gradients are multiplied with it: clipping, and a loss scale taken out
  bool finite = false;                       // gradient_norm() found these gradients finite: they are not checked again
  std::span<const std::byte> blob = {};      // kept by the commit
};

struct OptimizerStepReport {
  std::uint64_t step = 0;
  double seconds = 0, adam_seconds = 0, stall_seconds = 0;  // stalls: for reads and writes of tiles
  std::uint64_t nvme_read_bytes = 0, nvme_write_bytes = 0;
  std::uint64_t tile_bytes = 0, tile_hit_bytes = 0;  // as StepReport
  std::uint64_t durable_step = 0;
};

struct GradientNorm {
  double norm = 0;                                              // of all gradients, as they come
  std::optional<std::uint32_t> first_nonfinite = std::nullopt;  // a tensor; the norm is infinite then
};

// Values [first, first + values.size()) of a tensor, row-major.
using StateSink = std::function<void(std::uint32_t tensor, std::uint64_t first, std::span<const float> values)>;
using StateSource =
    std::function<void(OptimizerState state, std::uint32_t tensor, std::uint64_t first, std::span<float> out)>;

class OffloadOptimizer {
 public:
  // Plans, reserves every byte and opens the store; refuses like Engine::create.
  static std::unique_ptr<OffloadOptimizer> create(const Config& config, const ModelDescription& model,
                                                  OffloadOptimizerOptions options = {});
  virtual ~OffloadOptimizer() = default;

  virtual std::uint64_t current_step() const = 0;
  virtual std::vector<std::byte> blob() const = 0;
  // What import_weights(), import_state(), and load_weights() of a snapshot keep with what they commit, in place of the
  // last step's.
  virtual void set_blob(std::span<const std::byte> blob) = 0;
  virtual const Ledger& ledger() const = 0;
  virtual std::vector<std::string> describe() const = 0;
  // By tensor: its updates so far, which bias correction goes by.
  virtual std::vector<std::uint64_t> update_counts() const = 0;

  // A new run: weights are what the tensors hold, states zero; commits step 0. Throws kInvalidArgument where a weight
  // is not finite. Once, and not of an optimizer that was resumed or begun with a snapshot.
  virtual void import_weights(std::span<const OptimizerTensor> tensors) = 0;
  // Resumed, or begun with a snapshot: the tensors get the weights of that step.
  virtual void load_weights(std::span<const OptimizerTensor> tensors) = 0;

  // The norm that Engine::step() would compute from the same gradients, bit for bit, where blocks are the same.
  virtual GradientNorm gradient_norm(std::span<const OptimizerTensor> tensors) = 0;
  // Updates every tensor that has a gradient, and commits. The update begins with the weights as they are now. Where
  // the caller has changed them since the last step, what the library knew of a 16-bit weight beyond its 16 bits is
  // dropped, 1,024 elements at a time. Throws kNonFinite, naming the tensor, with nothing changed where a gradient is
  // not finite; where a result is not (a gradient whose square overflows), the tensors in memory are unusable, and the
  // store is at its last commit.
  virtual OptimizerStepReport step(const OptimizerStep& step) = 0;
  // Address in host memory for the tensor's gradient, always the same; empty without keep_gradients.
  virtual std::span<std::byte> gradient_memory(std::uint32_t tensor) = 0;
  // Host memory that the carrier copies from and to; to be pinned for a GPU. Empty without one.
  virtual std::span<std::byte> staging() = 0;

  // Shows a state of every tensor, tensor after tensor and piece by piece.
  virtual void export_state(OptimizerState state, std::span<const OptimizerTensor> tensors, const StateSink& sink) = 0;
  // Gives all states other values, and commits them as step `step`: moments by `source` (kMaster where `masters`, else
  // what the tensors hold), and by tensor the updates that it has had. It may stand in the place of import_weights(),
  // and then throws as that does. What `source` throws ends the optimizer, where it had states before: those in memory
  // are lost, and a store is at its last commit.
  virtual void import_state(std::uint64_t step, std::span<const std::uint64_t> update_counts, bool masters,
                            std::span<const OptimizerTensor> tensors, const StateSource& source) = 0;
  // A snapshot (snapshot.h) of the last step, in the exact form; the tensors' weights are in it.
  virtual void save(const std::filesystem::path& directory, const SaveOptions& options,
                    std::span<const OptimizerTensor> tensors) = 0;
};

}  // namespace spillway
