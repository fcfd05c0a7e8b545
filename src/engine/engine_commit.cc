// The end of a step: the rest of its update, and its commit, which makes it durable. It decides when a commit is due
// and what the ranks must have done before; the record itself is written by TileStore::commit() (swap/tile_store.h).
#include <fmt/format.h>

#include <chrono>
#include <utility>

#include "spillway/log.h"
#include "src/engine/step_engine.h"
#include "src/engine/store_place.h"

namespace spillway {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

}  // namespace

// The rest of the last step's update, and its commit: at the latest before the next gradient comes, because it would
// overwrite one that is still to be read, and before the next step's slots are written.
// With several ranks nobody goes on before all have come so far: what is overwritten from here on may be what another
// rank, which has not committed the step, needs to go back to.
void StepEngine::finish_step() {
  if (!updating_ && !saving_) return;
  agreement_.all([&] { finish_update(); });
  const auto start = Clock::now();
  // Not due is not lost: the slots stay written, and the next commit that is due makes this step durable with its own.
  const bool due = updating_ && resources_.store && committed_step_ < step_ && commits_.due(step_);
  if (due) {
    agreement_.all([&] { commit(); });
    resources_.store->note_all_committed();
    double seconds[] = {seconds_since(start), step_seconds_};  // all ranks choose the next interval by the slowest
    agreement_.fold(std::span(seconds), Fold::kMax);
    // The time of the first step tells little (memory is touched for the first time), nor does that of a skipped one,
    // which had no update to write.
    if (step_ >= 2 && !loss_scaler_.skipped_last()) commits_.committed(seconds[0], seconds[1]);
  }
  updating_ = checking_ = false;
  if (saving_) end_save(std::exchange(of_tour_, nullptr));
}

void StepEngine::finish_update() {
  resources_.updater->finish();
  of_tour_ = resources_.tiles->end_tour();
  resources_.throw_if_failed();
  if (resources_.store) resources_.store->note_verified();
}

void StepEngine::commit() {
  const TimedSpan span(resources_.timeline(), SpanKind::kCommit, step_);
  const StallMeter::Wait wait(resources_.stalls.get(), StallCause::kCommit);
  // Tiles at home in memory have no slot written by their updates: for a commit they are written now. When only skipped
  // steps came since the last commit, their slots have the right bytes already.
  if (written_back_ && changed_) write_resident_tiles(*resources_.mover, plan_.tile_places);
  // Copies are asynchronous: a commit must not name bytes that a failed copy has left wrong.
  resources_.device->throw_if_failed();
  changed_ = false;
  resources_.store->commit(step_, loss_scaler_.record(blob_, record_), *resources_.thread,
                           resources_.host_region(plan_.host.record), parameters_.counts(updates_made()));
  committed_step_ = step_;
  check_store_exists();
}

// What is in memory may still be exported or saved.
void StepEngine::check_store_exists() { store_missing_ = warn_if_missing(*resources_.store, store_missing_); }

bool StepEngine::keeps_steps() const { return resources_.store && !commits_.never() && imported_; }

void StepEngine::keep_last_step() {
  const bool as_found = checking_ && !saving_;  // no step was made: the rest need not be read
  if (!as_found) finish_step();
  if (!keeps_steps()) return;
  if (committed_step_ == step_) return check_store_exists();
  resources_.tiles->cancel_read_ahead();
  agreement_.all([&] { commit(); });
  resources_.store->note_all_committed();
}

// For the end of a message; nothing when every step that was to be kept is.
std::string StepEngine::what_is_lost() const {
  const std::uint64_t kept = durable_step();
  if (!keeps_steps() || kept >= step_) return {};
  return kept + 1 == step_ ? fmt::format("; step {} is lost", step_)
                           : fmt::format("; steps {} to {} are lost", kept + 1, step_);
}

void StepEngine::flush() {
  const auto turn = caller_.enter("flush");
  guarded([&] { keep_last_step(); });
  if (store_missing_) throw store_is_missing(*store_missing_);
}

}  // namespace spillway
