// The end of a step: the rest of its update, and its commit, which makes it durable.
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
void StepEngine::settle() {
  if (!updating_ && !saving_) return;
  agreement_.all([&] { finish_update(); });
  const auto start = Clock::now();
  const bool due = updating_ && machinery_.store && committed_step_ < step_ && commits_.due(step_);
  if (due) {
    agreement_.all([&] { commit(); });
    machinery_.store->note_all_committed();
    double seconds[] = {seconds_since(start), step_seconds_};  // all ranks choose the next interval by the slowest
    agreement_.fold(std::span(seconds), Fold::kMax);
    if (step_ >= 2 && !loss_scaler_.skipped_last()) commits_.committed(seconds[0], seconds[1]);
  }
  updating_ = checking_ = false;
  if (saving_) end_save(std::exchange(of_look_, nullptr));
}

void StepEngine::finish_update() {
  machinery_.updater->finish();
  of_look_ = machinery_.tiles->end_show();
  machinery_.throw_if_failed();
  if (machinery_.store) machinery_.store->note_verified();
}

void StepEngine::commit() {
  const TimedSpan span(machinery_.timeline(), SpanKind::kCommit, step_);
  const StallMeter::Wait wait(machinery_.stalls.get(), StallCause::kCommit);
  if (written_back_ && changed_) write_resident_tiles(*machinery_.mover, plan_.tile_places);
  machinery_.device->throw_if_failed();
  changed_ = false;
  machinery_.store->commit(step_, loss_scaler_.record(blob_, record_), *machinery_.thread,
                           machinery_.host_region(plan_.host.record), parameters_.counts(updates_made()));
  committed_step_ = step_;
  look_after_store();
}

// What is in memory may still be exported or saved.
void StepEngine::look_after_store() { store_missing_ = look_after(*machinery_.store, store_missing_); }

bool StepEngine::keeps_steps() const { return machinery_.store && !commits_.never() && imported_; }

void StepEngine::keep_last_step() {
  const bool as_found = checking_ && !saving_;  // no step was made: the rest need not be read
  if (!as_found) settle();
  if (!keeps_steps()) return;
  if (committed_step_ == step_) return look_after_store();
  machinery_.tiles->cancel_read_ahead();
  agreement_.all([&] { commit(); });
  machinery_.store->note_all_committed();
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
