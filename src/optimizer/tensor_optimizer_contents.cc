// Weights and states into the optimizer and out of it, beside the steps.
#include <fmt/format.h>

#include <algorithm>
#include <exception>
#include <utility>

#include "kernels/moments.h"
#include "kernels/optimizer.h"
#include "spillway/error.h"
#include "src/checkpoint/tile_values.h"
#include "src/optimizer/tensor_optimizer.h"
#include "src/plan/state_sections.h"

namespace spillway {

// All tiles get what `fill` leaves in their memory, and it is committed as that step. What `fill` throws is the
// caller's own failure; where there were states before, they are lost, and only a store has them.
void TensorOptimizer::begin_at(std::uint64_t step, const TileWork& fill) {
  const std::exception_ptr failure = guarded([&] {
    cancel_loads();
    std::exception_ptr of_fill = write_tiles(*mover_, tiles(), fill);
    if (of_fill) {
      if (store_) mover_->forget_written();
      if (weights_ == Weights::kReady) failure_ = "other states could not be had";
      return of_fill;
    }
    step_ = step;
    if (store_) commit();
    weights_ = Weights::kReady;
    return of_fill;
  });
  if (failure) std::rethrow_exception(failure);
}

// Every tile as it is, with the tensors' weights where these are of concern; nothing is written.
void TensorOptimizer::read_tiles(std::span<const OptimizerTensor> tensors, bool weights, const TileWork& work) {
  std::exception_ptr failure;
  const StagedPass pass(tensors_.staging(), tensors, TensorStaging::Brings::kWeights);
  guarded([&] {
    cancel_loads();
    mover_->finish_saves();
    for (std::uint32_t t = 0; t < tiles() && !failure; ++t) {
      mover_->start_load(t, 0);
      const TileMemory memory = mover_->finish_load(0);
      try {
        if (weights && tensors_.gather(t, memory, nullptr, tensors, *workers_))
          tensors_.renew_all(t, memory, *workers_);
        work(t, memory);
      } catch (...) {
        failure = std::current_exception();
      }
      mover_->drop(0);
    }
  });
  if (failure) std::rethrow_exception(failure);
}

void TensorOptimizer::import_weights(std::span<const OptimizerTensor> tensors) {
  const auto turn = caller_.enter("import_weights");
  refuse_if_failed();
  check(tensors, "import_weights", false);
  refuse_unless(Weights::kToImport, "import_weights");
  const StagedPass pass(tensors_.staging(), tensors, TensorStaging::Brings::kWeights);
  begin_at(0, [&](std::uint32_t tile, const TileMemory& memory) { take_weights(tile, memory, tensors); });
}

// Those that a run begins with are finite.
void TensorOptimizer::take_weights(std::uint32_t tile, const TileMemory& memory,
                                   std::span<const OptimizerTensor> tensors) {
  tensors_.take(tile, memory, tensors, *workers_);
  if (weights_ != Weights::kToImport) return;
  read_tile(plan_, tile, memory, false,
            [&](std::uint32_t block, std::uint32_t p, std::uint64_t first, std::span<const float> values) {
              check_weights(model_.blocks[block].parameters[p], config_.weights, first, values);
            });
}

void TensorOptimizer::load_weights(std::span<const OptimizerTensor> tensors) {
  const auto turn = caller_.enter("load_weights");
  refuse_if_failed();
  check(tensors, "load_weights", false);
  refuse_unless(Weights::kToLoad, "load_weights");
  StagedPass pass(tensors_.staging(), tensors, TensorStaging::Brings::kNothing);
  if (snapshot_) {
    begin_at(step_, [&](std::uint32_t tile, const TileMemory& memory) {
      snapshot_->fill(tile, memory);
      tensors_.scatter(tile, memory, tensors, *workers_);
    });
    pass.finish();
    snapshot_.reset();
    return;
  }
  guarded([&] {
    for (std::uint32_t t = 0; t < tiles(); ++t) {
      const std::uint32_t buffer = t % mover_->buffers();
      mover_->finish_save(buffer);
      mover_->start_load(t, buffer, Load::kStore);
      const TileMemory memory = mover_->finish_load(buffer);
      tensors_.scatter(t, memory, tensors, *workers_);
      mover_->start_save(buffer, Save::kRestored);
    }
    mover_->finish_saves();
    pass.finish();
    store_->note_verified();  // all of every tile
  });
  weights_ = Weights::kReady;
}

void TensorOptimizer::export_state(OptimizerState state, std::span<const OptimizerTensor> tensors,
                                   const StateSink& sink) {
  const auto turn = caller_.enter("export_state");
  refuse_if_failed();
  check(tensors, "export_state", false);
  refuse_unless(Weights::kReady, "export_state");
  check(state, "export_state");
  const WeightSink values = [&](std::uint32_t block, std::uint32_t p, std::uint64_t first,
                                std::span<const float> piece) { sink(tensors_.index(block, p), first, piece); };
  read_tiles(tensors, state == OptimizerState::kMaster, [&](std::uint32_t tile, const TileMemory& memory) {
    switch (state) {
      case OptimizerState::kMaster: return read_tile(plan_, tile, memory, true, values);
      case OptimizerState::kExpAvg: return read_moment(plan_, tile, memory, Moment::kExpAvg, values);
      case OptimizerState::kExpAvgSq: return read_moment(plan_, tile, memory, Moment::kExpAvgSq, values);
    }
  });
}

void TensorOptimizer::check(OptimizerState state, const char* call) const {
  const OptimizerKind kind = config_.optimizer.kind;
  if (state == OptimizerState::kMaster) return;
  if (state == OptimizerState::kExpAvg ? has_exp_avg(kind) : has_exp_avg_sq(kind)) return;
  throw Error(Code::kInvalidArgument,
              {call, fmt::format("{} keeps no such state", name_of(kind)), 0, "ask for what it keeps"});
}

void TensorOptimizer::import_state(std::uint64_t step, std::span<const std::uint64_t> update_counts, bool masters,
                                   std::span<const OptimizerTensor> tensors, const StateSource& source) {
  const auto turn = caller_.enter("import_state");
  refuse_if_failed();
  check(tensors, "import_state", false);
  if (weights_ == Weights::kToLoad) refuse_unless(Weights::kReady, "import_state");
  const bool counted = update_counts.size() == tensors_.count() &&
                       std::ranges::all_of(update_counts, [step](std::uint64_t count) { return count <= step; });
  if (!counted) {
    throw Error(Code::kInvalidArgument, {"import_state", "counts other updates of tensors than steps were made", 0,
                                         "give a number for each tensor, none above the step"});
  }
  const auto from = [&](OptimizerState state) -> WeightSource {
    return [&, state](std::uint32_t block, std::uint32_t p, std::uint64_t first, std::span<float> out) {
      source(state, tensors_.index(block, p), first, out);
      if (state == OptimizerState::kMaster) return;
      const Parameter& parameter = model_.blocks[block].parameters[p];
      check_moments(parameter, state == OptimizerState::kExpAvg ? Moment::kExpAvg : Moment::kExpAvgSq,
                    format_of(config_, parameter), first, out);
    };
  };
  const std::uint64_t key = rounding_key(config_.optimizer.seed, step);
  const WeightSource exact = from(OptimizerState::kMaster), exp_avg = from(OptimizerState::kExpAvg),
                     exp_avg_sq = from(OptimizerState::kExpAvgSq);
  updates_.resume(step, update_counts, "import_state");
  StagedPass pass(tensors_.staging(), tensors,
                  masters ? TensorStaging::Brings::kNothing : TensorStaging::Brings::kWeights);
  begin_at(step, [&](std::uint32_t tile, const TileMemory& memory) {
    if (masters) {
      fill_tile(plan_, tile, memory, finite_weights(model_, config_.weights, exact));
      tensors_.scatter(tile, memory, tensors, *workers_);
    } else {
      take_weights(tile, memory, tensors);
    }
    if (has_exp_avg(config_.optimizer.kind)) fill_moment(plan_, tile, memory, Moment::kExpAvg, exp_avg, key);
    if (has_exp_avg_sq(config_.optimizer.kind)) fill_moment(plan_, tile, memory, Moment::kExpAvgSq, exp_avg_sq, key);
  });
  pass.finish();
}

void TensorOptimizer::save(const std::filesystem::path& directory, const SaveOptions& options,
                           std::span<const OptimizerTensor> tensors) {
  const auto turn = caller_.enter("save");
  refuse_if_failed();
  check(tensors, "save", false);
  refuse_unless(Weights::kReady, "save");
  SnapshotWriter writer(config_, model_, directory, options, *workers_);
  read_tiles(tensors, true, [&](std::uint32_t tile, const TileMemory& memory) { writer.add(plan_, tile, memory); });
  writer.finish(step_, loss_scaler_.record(blob_, record_), updates_.counts(step_));
}

std::vector<std::uint64_t> TensorOptimizer::update_counts() const {
  const auto turn = caller_.ask();
  const std::span<const std::uint64_t> counts = updates_.counts(step_);
  if (counts.empty()) return std::vector<std::uint64_t>(tensors_.count(), step_);
  return {counts.begin(), counts.end()};
}

std::vector<std::string> TensorOptimizer::describe() const {
  const auto turn = caller_.ask();
  std::uint64_t in_host = 0, on_nvme = 0;
  for (const TilePlace& tile : plan_.tile_places) {
    const bool host = tile.home[index_of(Part::kStates)] == Placement::kHost;
    (host ? in_host : on_nvme) += payload_bytes(tile.shape, Part::kStates);
  }
  std::vector<std::string> facts{
      fmt::format("states at home: {} MiB in host memory, {} MiB on nvme; {} tiles; weights are the program's",
                  in_host / kMiB, on_nvme / kMiB, plan_.tiles.size()),
      fmt::format("host memory: {} MiB, {} compute threads", div_up(plan_.ledger.total(Placement::kHost), kMiB),
                  workers_->threads())};
  if (std::string slow = slow_optimizers(); !slow.empty()) facts.push_back(std::move(slow));
  if (!store_) {
    facts.push_back("no store, so no step is kept: an nvme_path names a directory for one");
    return facts;
  }
  facts.push_back(fmt::format("io: {}, {} requests of {} KiB", thread_->description(), config_.io_depth,
                              config_.io_block_bytes / kKiB));
  for (const File& file : store_->files().files()) {
    facts.push_back(fmt::format(
        "store: {}, {}", (file.path().parent_path() / kStoreFileName).string(),
        config_.commit_every == 0u ? "one slot a tile, no step is kept (commit_every 0)" : "every step is committed"));
  }
  return facts;
}

}  // namespace spillway
