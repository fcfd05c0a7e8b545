// The engine's state, and the declarations of its parts. engine.cc has the step itself, engine_commit.cc its end,
// engine_contents.cc what comes in and goes out between steps (import, resume, snapshots, exports), engine_values.cc
// what is asked of single parameters. Memory, streams, threads and the store belong to RunResources (run_resources.h).
// The way of a tile from acquire() to the drive and back, file by file: swap/README.md. Read next: engine.cc.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "spillway/engine.h"
#include "spillway/error.h"
#include "src/checkpoint/snapshot.h"
#include "src/config/loss_scaler.h"
#include "src/engine/clip_guess.h"
#include "src/engine/commit_interval.h"
#include "src/engine/one_caller.h"
#include "src/engine/parameter_updates.h"
#include "src/engine/rank_tiles.h"
#include "src/engine/rank_values.h"
#include "src/engine/run_resources.h"
#include "src/engine/step_meter.h"
#include "src/engine/step_predictor.h"
#include "src/engine/visit_cursor.h"
#include "src/plan/plan.h"
#include "swap/tile_walk.h"

namespace spillway {

class StepEngine final : public Engine {
 public:
  StepEngine(const Config& config, const ModelDescription& model, EngineOptions options);
  ~StepEngine() override;

  std::uint64_t current_step() const override {
    const auto turn = caller_.ask();
    return step_;
  }
  std::vector<std::byte> blob() const override {
    const auto turn = caller_.ask();
    return blob_;
  }
  void set_learning_rate(double rate) override;
  void set_betas(double beta1, double beta2) override;
  double loss_scale() const override {
    const auto turn = caller_.ask();
    return loss_scaler_.scale();
  }
  double next_learning_rate() const override {
    const auto turn = caller_.ask();
    return learning_rate(config_, next_update());
  }
  const Ledger& ledger() const override { return plan_.ledger; }
  std::vector<std::string> describe() const override;
  std::optional<double> predicted_step_seconds() const override {
    const auto turn = caller_.ask();
    MachineRates rates = resources_.rates;
    const DeviceUpdate* update = resources_.device_update.get();  // the probe has seen the cores alone
    if (update && update->element_seconds() > 0) rates.update_seconds = update->element_seconds();
    return predictor_.step_seconds(plan_, cursor_.visits(), rates, usual_step(), clip_guess_.blocks());
  }

  void import_weights(const WeightSource& source) override;
  void export_weights(bool exact, const WeightSink& sink) override;
  void begin_save(const std::filesystem::path& directory, const SaveOptions& options) override;
  void finish_save() override;
  void load_snapshot(const std::filesystem::path& directory) override;
  void read_values(ParameterValues of, std::uint32_t block, std::uint32_t parameter, const WeightSink& sink) override;
  void write_values(ParameterValues of, std::uint32_t block, std::uint32_t parameter, std::span<const float> values,
                    std::uint32_t from) override;

  DeviceKind device_kind() const override { return resources_.device->kind(); }
  Stream& stream() override { return *resources_.compute; }
  std::unique_ptr<Stream> adopt_stream(void* native) override;
  std::span<std::byte> workspace() override { return resources_.hbm_region(plan_.hbm.workspace); }
  bool in_hbm(const void* data, std::size_t bytes) const override {
    return lies_in({static_cast<const std::byte*>(data), bytes}, resources_.device->hbm());
  }

  Lease acquire(std::uint32_t block, Pass pass, Stream& stream) override;
  ActivationLease acquire_activation(std::uint32_t activation, Access access, Stream& stream) override;
  Insides insides(std::uint32_t block) override {
    SPILLWAY_CHECK(block < plan_.blocks.size(), "the block belongs to the description");
    return {resources_.hbm_region(plan_.blocks[block].insides), plan_.blocks[block].insides_kept};
  }
  void push_gradient(const Gradient& gradient, Stream& stream) override;
  StepReport step(std::span<const std::byte> blob) override;
  void set_micro_batches(std::uint32_t micro_batches) override;
  void discard_step() override;
  void flush() override;

 protected:
  const void* weight_address(std::uint32_t lease, std::uint32_t parameter) const override;
  void release(std::uint32_t lease, Stream& stream) override;
  void release_activation(std::uint32_t place, Stream& stream) override;

 private:
  unsigned nodes() const { return static_cast<unsigned>(thread_shares_.size()); }
  StepPredictor::Step usual_step() const { return {.nodes = nodes(), .commits = commits_.every_step()}; }
  // What a guess is taken back to must be durable.
  bool committed() const { return commits_.every_step() && committed_step_ == step_; }
  std::uint64_t durable_step() const { return store_missing_ ? 0 : committed_step_; }
  void refuse_if_failed();
  void make_ready(const char* call);
  template <typename Work>
  auto guarded(Work&& work);
  // What comes next starts to be fetched, but leases release in destructors: the next call reports what went wrong.
  template <typename Work>
  void releasing(Work&& work) {
    try {
      work();
    } catch (const Error& error) {
      if (failure_.empty()) failure_ = error.message_in(""), untold_ = true;
    } catch (const std::exception& error) {
      if (failure_.empty()) failure_ = error.what(), untold_ = true;
    }
  }
  void turn_to(Stream& stream);
  void begin_step();
  void begin_again_for(Visit visit);
  bool leased() const;
  bool lends(std::span<const std::byte> memory) const;
  void refuse_leases(const char* call) const;
  void check(const Gradient& gradient) const;
  void refuse_behind_gradients(const char* call) const;
  void refuse_uncounted(const Gradient& gradient) const;
  Lease open(std::uint32_t lease, Visit visit, std::optional<std::size_t> planned, Stream& stream);
  void finish_step();
  void finish_update();
  void add_early(bool wait);
  void keep_last_step();
  bool keeps_steps() const;
  std::string what_is_lost() const;
  void check_store_exists();
  void end_save(std::exception_ptr failure);
  void finish_saving();
  // Of the optimizer: skipped steps have none.
  std::uint64_t updates_made() const { return step_ - loss_scaler_.skipped(); }
  std::uint64_t next_update() const { return updates_made() + 1; }
  bool begin_update(StepReport& report);
  void resume();
  void restore();
  void take_over();
  void forget_step();
  void take(const SnapshotReader& snapshot);
  enum class Failure : std::uint8_t { kOwn, kOfAll };  // of `fill`: each rank's own, or the first one's on all
  std::exception_ptr write_step(std::uint64_t step, bool frozen, const TileWork& fill, Failure told = Failure::kOwn);
  void check(const AskedValues& asked) const;
  void check_given(const AskedValues& asked, std::span<const float> values) const;
  void wait_gradient(std::uint32_t block);
  void read_tiles(const AskedValues& asked, const TileWork& work, bool saves);
  void read_gradient(const AskedValues& asked, const Shard& own, const ValueSink& put);
  void write_gradient(const AskedValues& asked, const Shard& own, GivenValues& given);
  void write_tiles_of(const AskedValues& asked, GivenValues& given);
  void begin_with(const char* call, std::uint64_t step, const TileWork& fill);
  std::exception_ptr tour_all(RankTiles::Work work);
  void save_all(const std::filesystem::path& directory, const SaveOptions& options);
  void commit();

  mutable OneCaller caller_;
  Agreement agreement_;
  Config config_;  // the rate that set_learning_rate() gives may change
  const ModelDescription model_;
  const std::vector<ThreadShare> thread_shares_;
  const Plan plan_;
  const bool agreed_;  // the ranks are of one run; before anything is made
  LossScaler loss_scaler_;
  std::unique_ptr<SnapshotReader> snapshot_;  // refused before the resources make a store
  RunResources resources_;
  VisitCursor cursor_;  // without given visits the first step of this process teaches it; a store keeps no order
  StepPredictor predictor_;
  ClipGuess clip_guess_;
  std::vector<std::uint32_t> visit_blocks_;
  ParameterUpdates parameters_{config_, plan_, model_};

  std::uint64_t step_ = 0, committed_step_ = 0;
  const File* store_missing_ = nullptr;  // when last looked: TileStore::missing()
  std::vector<std::byte> blob_, record_;
  bool imported_ = false, stepping_ = false;
  // The update of step_ is not settled: it is not taken back, for what it overwrote is gone. At a resume it is only
  // checked, before the next one overwrites what a rollback would need.
  bool updating_ = false;
  bool checking_ = false;                // such a check is what is not settled
  std::vector<std::uint32_t> complete_;  // to be updated inside backward once all ranks' gradients have landed
  bool written_back_ = false;            // some tiles reach their slot only at a commit
  bool changed_ = false;                 // some step since the last commit was not skipped
  CommitInterval commits_{1u, false};
  Stream* stream_ = resources_.compute.get();  // of the last call that took one
  std::unique_ptr<Event> left_;                // after what was on it when a call took another
  std::string failure_;                        // after it, nothing but destruction
  bool untold_ = false;                        // the caller has not seen it
  StepMeter meter_{resources_};
  double step_seconds_ = 0;                 // of the last step
  std::unique_ptr<SnapshotWriter> saving_;  // of step_: every tile passes it before the update is settled
  std::exception_ptr of_tour_;              // what the snapshot failed of, until it is ended
  std::exception_ptr save_failure_;         // until the caller has seen it
  std::uint64_t unplanned_before_ = 0;
};

// Runs what may touch drive or device; a failure there is final for this engine.
template <typename Work>
auto StepEngine::guarded(Work&& work) {
  refuse_if_failed();
  try {
    if constexpr (std::is_void_v<decltype(work())>) {
      work();
      resources_.throw_if_failed();
    } else {
      auto result = work();
      resources_.throw_if_failed();
      return result;
    }
  } catch (const Error& error) {
    const bool refused = error.code() == Code::kInvalidArgument || error.code() == Code::kDoesNotFit ||
                         error.code() == Code::kUnsupported ||
                         (error.code() == Code::kNonFinite && !resources_.updater->overflowed());
    if (!refused) failure_ = error.message_in("");  // what to do about it is said once, and then another thing
    throw;
  } catch (const std::exception& error) {  // std::bad_alloc: half of something was done
    failure_ = error.what();
    throw;
  }
}

}  // namespace spillway
