// Values into the engine and out of it, between the steps: import, resume, snapshots, exports. What the values mean is
// known in src/checkpoint; how tiles come and go, in swap/tile_walk.h and tile_executor.h.
#include <exception>
#include <utility>

#include "spillway/error.h"
#include "src/checkpoint/tile_values.h"
#include "src/engine/rank_check.h"
#include "src/engine/resumed_store.h"
#include "src/engine/step_engine.h"

namespace spillway {

void StepEngine::resume() {
  agreement_.all([&] { read_resident_tiles(*resources_.mover, plan_.tile_places); });
  const Manifest& manifest = resources_.store->committed();
  step_ = committed_step_ = manifest.step;
  loss_scaler_.resume(manifest.blob, manifest.step, blob_);
  parameters_.resume(updates_made(), manifest.update_counts, "the store's last commit");
  resources_.measure_drive();
  imported_ = true;
  meter_.start();  // what the first step reads is its own, from the first byte on
  std::uint64_t unverified[] = {resources_.store->unverified()};
  if (unverified[0] != 0) resources_.tiles->begin_check();
  agreement_.fold(std::span(unverified), Fold::kMax);  // they agree on it
  updating_ = checking_ = unverified[0] != 0;
  begin_step();
}

// With several ranks no gradient is left on its way to an update inside backward: all stand where one alone would.
void StepEngine::make_ready(const char* call) {
  if (!agreement_.alone() && stepping_) {
    resources_.gradients->join();
    add_early(true);
  }
  agreement_.all([&] {
    if (!imported_)
      throw Error(Code::kInvalidArgument, {call, "the engine has no weights yet", 0, "call import_weights first"});
    if (clip_guess_.taken() > 0) resources_.early->take_back();
    if (resources_.early->under_way())
      throw Error(Code::kInvalidArgument, {call, "a step is under way, partly updated", 0, "call it after step()"});
  });
}

// Every tile, or those that are trained, and their commit as that step. What the walk returns is a failure of `fill`,
// after which nothing of them is committed.
std::exception_ptr StepEngine::write_step(std::uint64_t step, bool frozen, const TileWork& fill, Failure told) {
  const auto left_out = [&](std::uint32_t tile) { return !frozen && !plan_.tile_places[tile].shape.trainable; };
  const auto tiles = static_cast<std::uint32_t>(plan_.tiles.size());
  // Some have less to write than others, or faster drives.
  const auto noted = [&](std::uint32_t tile, const TileMemory& memory) {
    fill(tile, memory);
    agreement_.note_work();
  };
  std::exception_ptr of_fill = agreement_.all([&] { return write_tiles(*resources_.mover, tiles, noted, left_out); });
  if (told == Failure::kOfAll) {
    agreement_.all([&] {
      if (of_fill) std::rethrow_exception(of_fill);
    });
  }
  if (of_fill = joint_failure(agreement_, of_fill); of_fill) return of_fill;
  step_ = step;
  if (resources_.store) {
    agreement_.all([&] {
      resources_.store->commit(step_, loss_scaler_.record(blob_, record_), *resources_.thread,
                               resources_.host_region(plan_.host.record), parameters_.counts(updates_made()));
    });
    agreement_.all([&] { resources_.store->note_all_committed(); });  // a new store gets its name
    committed_step_ = step_;
    check_store_exists();
  }
  return nullptr;
}

// A failure of `fill` is the caller's own, and none of this engine: it may try again.
void StepEngine::begin_with(const char* call, std::uint64_t step, const TileWork& fill) {
  const std::exception_ptr failure = guarded([&] {
    if (imported_)
      throw Error(Code::kInvalidArgument, {call, "has its weights already", 0, "call it once, before step 1"});
    std::exception_ptr of_fill = write_step(step, true, fill);
    if (of_fill) return of_fill;
    if (const auto replaced = std::exchange(resources_.replaced, std::nullopt))
      clear_in_turn(replaced->directories, replaced->by, true, agreement_);
    resources_.measure_drive();
    imported_ = true;
    meter_.start();
    begin_step();
    return of_fill;
  });
  if (failure) std::rethrow_exception(failure);
}

void StepEngine::import_weights(const WeightSource& source) {
  const auto turn = caller_.enter("import_weights");
  const WeightSource values = finite_weights(model_, config_.weights, source);
  begin_with("import_weights", 0,
             [&](std::uint32_t tile, const TileMemory& memory) { fill_tile(plan_, tile, memory, values); });
}

void StepEngine::take(const SnapshotReader& snapshot) {
  loss_scaler_.resume(snapshot.kept(), snapshot.step(), blob_);
  parameters_.resume(snapshot.step() - loss_scaler_.skipped(), snapshot.update_counts(), "the snapshot");
}

void StepEngine::restore() {
  if (!agreement_.alone()) agreement_.all([&] { snapshot_->verify([&] { agreement_.note_work(); }); });
  take(*snapshot_);
  begin_with("snapshot", snapshot_->step(),
             [&](std::uint32_t tile, const TileMemory& memory) { snapshot_->fill(tile, memory); });
  snapshot_.reset();
}

// The old stores go once all new ones have their names. A crash before leaves what says which run goes on.
void StepEngine::take_over() {
  FormerRun& former = *resources_.former;
  const Manifest& last = former.committed();
  loss_scaler_.resume(last.blob, last.step, blob_);
  parameters_.resume(last.step - loss_scaler_.skipped(), last.update_counts, "the stores' last commit");
  guarded([&] {
    write_step(
        last.step, true, [&](std::uint32_t tile, const TileMemory& memory) { former.fill(plan_, tile, memory); },
        Failure::kOfAll);
    resources_.measure_drive();
    imported_ = true;
    meter_.start();
    begin_step();
  });
  const StoreDirectories directories = former.directories();
  agreement_.all([&] { former.remove(plan_.rank.count); });  // of all ranks, before a directory goes
  resources_.former.reset();
  clear_in_turn(directories, {.run = run_of(resources_.store->files().superblock()), .ranks = plan_.rank.count}, true,
                agreement_);
}

// All of it is read before anything of the run is overwritten: what lives in memory is there once.
void StepEngine::load_snapshot(const std::filesystem::path& directory) {
  const auto turn = caller_.enter("load_snapshot");
  refuse_if_failed();
  refuse_leases("load_snapshot");
  SnapshotReader snapshot = agreement_.all([&] { return SnapshotReader(plan_, config_, model_, directory); });
  refuse_different_snapshots(agreement_, snapshot);
  if (resources_.store && !resources_.store->keeps_update_counts() && !snapshot.update_counts().empty()) {
    throw Error(
        Code::kUnsupported, directory.string(),
        "counts the updates of each parameter, for which the run's store, made by an older version, has no room", 0,
        Remedy::kRenewStore);
  }
  if (!imported_ && !snapshot.has_frozen())
    throw Error(Code::kInvalidArgument,
                {directory.string(), "was saved without the frozen weights", 0, "import them first"});
  agreement_.all([&] { snapshot.verify([&] { agreement_.note_work(); }); });
  if (imported_) {
    finish_saving();
    guarded([&] { finish_step(); });
  }
  guarded([&] {
    forget_step();
    resources_.weights->forget();
    failure_ = "a snapshot was being loaded";  // until all of it is there
    take(snapshot);
    const auto fill = [&](std::uint32_t tile, const TileMemory& memory) { snapshot.fill(tile, memory); };
    if (const std::exception_ptr of_fill = write_step(snapshot.step(), snapshot.has_frozen(), fill))
      std::rethrow_exception(of_fill);
    failure_.clear();
    // A rate that the caller set belonged to the step that is given up.
    config_.schedule.given_lr.reset();
    changed_ = false;
    if (!std::exchange(imported_, true)) resources_.measure_drive();
    meter_.start();
    begin_step();
  });
}

// Every tile of every rank, after the rest of the update.
std::exception_ptr StepEngine::tour_all(RankTiles::Work work) {
  Config unbounded = config_;  // of other ranks only the tiles are of interest
  // Another rank may have other budgets than this one; where its tiles end does not depend on them.
  unbounded.hbm_bytes = unbounded.host_bytes = unbounded.nvme_bytes = std::nullopt;
  const auto plan_of = [&](Rank rank) { return make_plan(unbounded, model_, nodes(), rank); };
  RankTiles all(agreement_, plan_, plan_of, resources_.host_region(plan_.host.others), std::move(work));
  // Every tile passes this rank once, in order: with its update, where it still has one.
  resources_.tiles->begin_tour(all.own());
  resources_.updater->finish();
  if (const std::exception_ptr failure = resources_.tiles->end_tour()) return failure;
  return all.finish();
}

void StepEngine::export_weights(bool exact, const WeightSink& sink) {
  const auto turn = caller_.enter("export_weights");
  const std::exception_ptr failure = guarded([&] {
    make_ready("export_weights");
    if (saving_) finish_step();
    const std::exception_ptr of_sink = tour_all([&](const Plan& plan, std::uint32_t tile, const TileMemory& memory) {
      read_tile(plan, tile, memory, exact, sink);
    });
    finish_step();
    return of_sink;
  });
  if (failure) std::rethrow_exception(failure);
}

void StepEngine::begin_save(const std::filesystem::path& directory, const SaveOptions& options) {
  const auto turn = caller_.enter("begin_save");
  guarded([&] { make_ready("begin_save"); });
  finish_saving();
  if (!agreement_.alone()) return save_all(directory, options);
  saving_ = std::make_unique<SnapshotWriter>(config_, model_, directory, options, *resources_.workers);
  guarded([&] {
    resources_.tiles->begin_tour([this](std::uint32_t tile, const TileMemory& memory) {
      const StallMeter::Wait wait(resources_.stalls.get(), StallCause::kSave);
      saving_->add(plan_, tile, memory);
    });
    if (!resources_.tiles->queue().begun()) finish_step();  // no update that would bring the tiles
  });
}

// Of several ranks the first writes what all have, at once: what is shown in a forward pass comes when each rank likes.
void StepEngine::save_all(const std::filesystem::path& directory, const SaveOptions& options) {
  std::unique_ptr<SnapshotWriter> writer;
  const bool writes = agreement_.rank().index == 0;
  const auto jointly = [&](const std::function<void()>& work) {
    std::exception_ptr failure;
    try {
      if (writes) work();
    } catch (...) {
      failure = std::current_exception();
    }
    return joint_failure(agreement_, failure);
  };
  if (const auto failure = jointly(
          [&] { writer = std::make_unique<SnapshotWriter>(config_, model_, directory, options, *resources_.workers); }))
    std::rethrow_exception(failure);
  guarded([&] {
    const StallMeter::Wait wait(resources_.stalls.get(), StallCause::kSave);
    save_failure_ = tour_all([&](const Plan& plan, std::uint32_t tile, const TileMemory& memory) {
      if (writer) writer->add(plan, tile, memory);
    });
    finish_step();
    if (save_failure_) return;
    save_failure_ = jointly(
        [&] { writer->finish(step_, loss_scaler_.record(blob_, record_), parameters_.counts(updates_made())); });
  });
}

void StepEngine::end_save(std::exception_ptr failure) {
  const StallMeter::Wait wait(resources_.stalls.get(), StallCause::kSave);
  save_failure_ = std::move(failure);
  try {
    if (!save_failure_) saving_->finish(step_, loss_scaler_.record(blob_, record_), parameters_.counts(updates_made()));
  } catch (...) {
    save_failure_ = std::current_exception();
  }
  saving_.reset();
}

// The failure is of the caller's directory: it may try again, or train on.
void StepEngine::finish_save() {
  const auto turn = caller_.enter("finish_save");
  finish_saving();
}

void StepEngine::finish_saving() {
  guarded([&] {
    if (saving_) finish_step();
  });
  if (save_failure_) std::rethrow_exception(std::exchange(save_failure_, nullptr));
}

}  // namespace spillway
