// The optimizer whose weights are the caller's: offload_optimizer.h for whoever calls it. tensor_optimizer.cc has the
// step, tensor_optimizer_norm.cc what gradients say before it, tensor_optimizer_contents.cc what comes in and goes out
// beside it (weights, states, snapshots).
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "kernels/device.h"
#include "kernels/host_memory.h"
#include "kernels/workers.h"
#include "spillway/error.h"
#include "spillway/offload_optimizer.h"
#include "src/checkpoint/snapshot.h"
#include "src/config/loss_scaler.h"
#include "src/engine/one_caller.h"
#include "src/engine/parameter_updates.h"
#include "src/optimizer/caller_tensors.h"
#include "src/plan/plan.h"
#include "swap/store_thread.h"
#include "swap/tile_mover.h"
#include "swap/tile_store.h"
#include "swap/tile_walk.h"

namespace spillway {

class TensorOptimizer final : public OffloadOptimizer {
 public:
  TensorOptimizer(const Config& config, const ModelDescription& model, OffloadOptimizerOptions options);
  ~TensorOptimizer() override;

  std::uint64_t current_step() const override;
  std::vector<std::byte> blob() const override;
  void set_blob(std::span<const std::byte> blob) override;
  const Ledger& ledger() const override { return plan_.ledger; }
  std::vector<std::string> describe() const override;
  std::vector<std::uint64_t> update_counts() const override;

  void import_weights(std::span<const OptimizerTensor> tensors) override;
  void load_weights(std::span<const OptimizerTensor> tensors) override;
  GradientNorm gradient_norm(std::span<const OptimizerTensor> tensors) override;
  OptimizerStepReport step(const OptimizerStep& step) override;
  std::span<std::byte> gradient_memory(std::uint32_t tensor) override;
  std::span<std::byte> staging() override { return host_region(plan_.host.staging); }
  void export_state(OptimizerState state, std::span<const OptimizerTensor> tensors, const StateSink& sink) override;
  void import_state(std::uint64_t step, std::span<const std::uint64_t> update_counts, bool masters,
                    std::span<const OptimizerTensor> tensors, const StateSource& source) override;
  void save(const std::filesystem::path& directory, const SaveOptions& options,
            std::span<const OptimizerTensor> tensors) override;

 private:
  // Whose values the tensors have to take first, or give.
  enum class Weights : std::uint8_t { kToImport, kToLoad, kReady };

  std::span<std::byte> host_region(const Region& region) const {
    return host_.memory().subspan(region.offset, region.bytes);
  }
  std::uint32_t tiles() const { return static_cast<std::uint32_t>(plan_.tiles.size()); }
  template <typename Work>
  auto guarded(Work&& work);
  void refuse_if_failed() const;
  void refuse_unless(Weights state, const char* call) const;
  void check(std::span<const OptimizerTensor> tensors, const char* call, bool gradients) const;
  void check(const OptimizerStep& step) const;
  void check_blob(std::span<const std::byte> blob) const;
  void check(OptimizerState state, const char* call) const;
  void resume_updates(std::vector<std::uint64_t> counts, const char* object);
  void set_groups(std::span<const std::uint32_t> group_of);
  GradientNorm norm_of(std::span<const OptimizerTensor> tensors);
  std::optional<std::uint32_t> first_nonfinite(std::span<const OptimizerTensor> tensors);
  void take_blocks(std::span<const OptimizerTensor> tensors);
  bool update_in_memory(std::span<const OptimizerTensor> tensors);
  bool update_piece(std::size_t piece, std::span<const OptimizerTensor> tensors, const TensorStaging::Slot& slot,
                    std::uint64_t slot_begins);
  void update_through_buffers(std::span<const OptimizerTensor> tensors);
  void start_loads(std::uint32_t due);
  void cancel_loads();
  void wait_read(std::uint32_t due);
  [[noreturn]] void refuse_overflow(const std::string& where);
  void commit();
  void begin_at(std::uint64_t step, const TileWork& fill);
  void take_weights(std::uint32_t tile, const TileMemory& memory, std::span<const OptimizerTensor> tensors);
  void read_tiles(std::span<const OptimizerTensor> tensors, bool weights, const TileWork& work);

  mutable OneCaller caller_;
  const Config config_;
  const ModelDescription model_;
  Plan plan_;  // its groups are those of the step
  LossScaler loss_scaler_;
  std::unique_ptr<SnapshotReader> snapshot_;
  const bool keeps_gradients_;
  HostArena host_;
  std::unique_ptr<HostWorkers> workers_;
  std::unique_ptr<Device> device_;
  std::unique_ptr<Stream> h2d_, d2h_;
  std::unique_ptr<TileStore> store_;     // null: nothing is kept
  std::unique_ptr<StoreThread> thread_;  // ditto
  std::unique_ptr<TileMover> mover_;
  CallerTensors tensors_;
  ParameterUpdates updates_;
  Weights weights_;

  std::uint64_t step_ = 0, committed_step_ = 0;
  std::vector<std::byte> blob_, record_;
  std::vector<std::uint32_t> group_of_;
  std::vector<std::uint8_t> brought_;            // by parameter of a block
  std::vector<GroupRange> ranges_;               // of a tile, where they are not the plan's
  std::uint32_t loading_ = 0;                    // tiles before it have been started to load
  double adam_seconds_ = 0, stall_seconds_ = 0;  // of the step
  const File* store_missing_ = nullptr;
  bool changing_ = false;  // weights and states are those of two steps
  std::string failure_;    // after it, nothing but destruction
};

// Runs what may touch the drive or the states; a failure there is final for this optimizer.
template <typename Work>
auto TensorOptimizer::guarded(Work&& work) {
  refuse_if_failed();
  try {
    return work();
  } catch (const Error& error) {
    const bool refused = error.code() == Code::kInvalidArgument || error.code() == Code::kDoesNotFit ||
                         error.code() == Code::kUnsupported || error.code() == Code::kNonFinite;
    if (!refused || changing_) failure_ = error.message_in("");
    throw;
  } catch (const std::exception& error) {
    failure_ = error.what();
    throw;
  }
}

}  // namespace spillway
