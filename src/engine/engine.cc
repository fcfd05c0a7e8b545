// A step of the engine, in four paragraphs: forward and backward (acquire, release), gradients (push_gradient), update
// and commit (step). This file decides when each part of a step begins. It moves no byte and chooses no place: that is
// done by what run_resources.h holds. How a step ends, and what is kept of it: engine_commit.cc.
// Read next: weights.h for acquire(), gradients.h for push_gradient(), updater.h for step().
#include "src/engine/step_engine.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "spillway/log.h"
#include "src/config/ranges.h"
#include "src/config/table.h"
#include "src/engine/loaded_versions.h"
#include "src/engine/rank_check.h"
#include "src/engine/run_summary.h"
#include "src/engine/store_place.h"
#include "src/plan/passes.h"

namespace spillway {
namespace {

// Files for the Hugging Face trainer often have none, as it has an optimizer of its own.
void tell_optimizer(const Config& config, const Plan& plan) {
  const bool trains = std::ranges::any_of(plan.tile_places, [](const TilePlace& tile) { return tile.shape.trainable; });
  if (!config.optimizer_left_out || !trains) return;
  log(LogLevel::kInfo, fmt::format("optimizer: there is no such section: AdamW with lr {}; the Hugging Face trainer "
                                   "would take its own, {}",
                                   config.optimizer.learning_rate, kTrainerRate));
}

std::unique_ptr<SnapshotReader> open_same_snapshot(Agreement& agreement, const Plan& plan, const Config& config,
                                                   const ModelDescription& model, const EngineOptions& options) {
  auto snapshot = agreement.all([&] { return open_snapshot(plan, config, model, options); });
  if (snapshot) refuse_different_snapshots(agreement, *snapshot);
  return snapshot;
}

}  // namespace

StepEngine::StepEngine(const Config& config, const ModelDescription& model, EngineOptions options)
    : agreement_(options.communicator),
      config_(agreement_.all([&] { return check_ranges(config); })),
      model_(model),
      thread_shares_(share_threads(config.threads)),
      plan_(agreement_.all([&] { return make_plan(config, model, nodes(), agreement_.rank()); })),
      agreed_((refuse_different_ranks(agreement_, config_, model_, plan_, options), true)),
      loss_scaler_(config_),
      snapshot_(open_same_snapshot(agreement_, plan_, config_, model_, options)),
      resources_(config, model_, plan_, options, thread_shares_, agreement_,
                 [this] {
                   if (snapshot_) snapshot_->verify();
                 }),
      cursor_(plan_.visits, !plan_.visits_given),
      predictor_(*resources_.device, plan_.visits.size(), std::max(plan_.blocks.size(), plan_.hbm.places.size())),
      clip_guess_(plan_, config.speculative_blocks) {
  for (const TilePlace& tile : plan_.tile_places) {
    for (Part part : {Part::kWeights, Part::kStates}) {
      written_back_ |= tile.shape.trainable && !written_by_update(tile, part);
    }
  }
  tell_optimizer(config, plan_);
  // One interval for all ranks: measured where some have tiles to write back, and none updates inside backward.
  std::uint64_t some[] = {written_back_, plan_.early_blocks};
  agreement_.fold(std::span(some), Fold::kMax);
  commits_ = {config.commit_every, resources_.store && some[0] != 0 && some[1] == 0};
  blob_.reserve(kBlobCapacity);
  record_.reserve(kBlobCapacity);
  complete_.reserve(plan_.blocks.size());
  left_ = resources_.device->create_event();
  // At most one of the three brings values in: stores of another number of ranks, a resumed store, a snapshot. Without
  // any of them the caller imports weights.
  if (resources_.former) take_over();
  if (resources_.resumed) resume();
  if (snapshot_) restore();
}

StepEngine::~StepEngine() {
  const auto turn = caller_.wait();
  const bool failed = !failure_.empty();
  agreement_.note_ending(true);
  try {
    if (!failed && keeps_steps() && committed_step_ < step_) {
      log(LogLevel::kInfo, fmt::format("step {} is made durable before the engine ends", step_));
    }
    if (!failed) keep_last_step();  // visits and gradients of one that was not finished are forgotten
  } catch (const Error& error) {    // a log's words for what to do would be the library's
    log(LogLevel::kWarning, error.message_in("") + what_is_lost());
  } catch (const std::exception& error) {
    log(LogLevel::kWarning, error.what() + what_is_lost());
  }
  if (failed && untold_) {
    log(LogLevel::kWarning, failure_ + what_is_lost());
  } else if (failed && !what_is_lost().empty()) {
    log(LogLevel::kWarning, "engine: stopped after an earlier error" + what_is_lost());
  }
  if (save_failure_) log(LogLevel::kWarning, "the last snapshot was not written, and nobody asked why");
  resources_.compute->synchronize();
  agreement_.note_ending(false);
}

void StepEngine::refuse_if_failed() {
  if (failure_.empty()) return;
  untold_ = false;
  throw Error(Code::kIo, "engine", "stopped after an earlier error (" + failure_ + ")", 0,
              keeps_steps() ? Hint(Remedy::kReopen) : Hint("no step is kept: begin again, or with a snapshot"));
}

void StepEngine::begin_step() {
  if (!imported_) {
    throw Error(Code::kInvalidArgument, {"engine", "has no weights yet", 0, "call import_weights first, or resume"});
  }
  stepping_ = true;
  clip_guess_.begin_step();
  cursor_.begin_step();
  resources_.gradients->begin_step();
  complete_.clear();
  visit_blocks_.clear();
  for (const Visit& visit : cursor_.visits()) visit_blocks_.push_back(visit.block);
  resources_.weights->begin_step(visit_blocks_, first_pass(cursor_.visits()));
  resources_.activations->begin_step();
  unplanned_before_ = cursor_.unplanned();
}

std::unique_ptr<Stream> StepEngine::adopt_stream(void* native) {
  const auto turn = caller_.enter("adopt_stream");
  auto stream = resources_.device->adopt_stream(native);
  resources_.device->idle_clock(*stream);  // made now, and not inside of a step
  return stream;
}

// Streams that the caller uses run one after the other, as the calls that name them come. So the last one's end is the
// end of all work on what the engine lent, and of all pushes.
void StepEngine::turn_to(Stream& stream) {
  if (&stream == stream_) return;
  resources_.device->record(*left_, *stream_);
  resources_.device->wait(stream, *left_);
  stream_ = &stream;
}

bool StepEngine::leased() const { return resources_.weights->leased() || resources_.activations->leased(); }

void StepEngine::refuse_leases(const char* call) const {
  if (!leased()) return;
  throw Error(Code::kInvalidArgument,
              {call, "a lease is still held", 0, fmt::format("release every block and activation before {}()", call)});
}

// An evaluation runs the forward part alone, as each token of a text does, and whoever gives up in it.
void StepEngine::begin_again_for(Visit visit) {
  if (!cursor_.begins_again(visit) || leased()) return;
  cursor_.begin_step();
  resources_.weights->begin_again();
}

// 1. Forward and backward: the block's weights are there, or on their way already; the caller's stream waits for the
// last copy.
Lease StepEngine::acquire(std::uint32_t block, Pass pass, Stream& stream) {
  const auto turn = caller_.enter("acquire");
  if (block >= plan_.blocks.size()) {
    throw Error(Code::kInvalidArgument,
                {"acquire", fmt::format("there is no block {}", block), 0, "use the indices of the description"});
  }
  return guarded([&] {
    const TimedSpan span(resources_.timeline(), SpanKind::kAcquire, block);
    if (!stepping_) begin_step();
    turn_to(stream);
    resources_.stalls->follow(stream);
    begin_again_for({block, pass});
    // A gradient of this backward pass would overwrite what the update of the step before still reads, so that update
    // and its commit end here at the latest. Updates inside backward may begin from here on.
    if (pass == Pass::kBackward) {
      finish_step();
      add_early(false);
      resources_.tiles->expect(clip_guess_.expected(committed()));
      resources_.tiles->advance(false);
    } else if (saving_) {
      resources_.tiles->tour_until(block);
    }
    // The policy knows visits by their index in the plan, so the cursor moves before it is asked for a place.
    const VisitCursor::Position before = cursor_.position();
    const auto visit = cursor_.advance(block, pass);
    if (pass == Pass::kBackward) resources_.gradients->expect(block);
    std::uint32_t place = 0;
    try {
      // Whatever it takes (a fetch, an update, a wait for either) is done in there: weights.cc.
      place = resources_.weights->acquire(block, visit, stream);
    } catch (...) {
      cursor_.take_back(before);  // refused for want of a place: the caller may release one and come again
      throw;
    }
    // Nothing more to fetch: the first tiles of this step's update come next.
    if (resources_.weights->all_acquired() && !updating_) resources_.updater->read_ahead();
    resources_.gradients->join();
    return open(place, {block, pass}, visit, stream);
  });
}

Lease StepEngine::open(std::uint32_t lease, Visit visit, std::optional<std::size_t> planned, Stream& stream) {
  predictor_.begin_visit(lease, planned, stream);
  if (model_.blocks[visit.block].held) predictor_.end_visit(lease);  // what comes inside is counted there
  if (Timeline* timeline = resources_.timeline()) timeline->begin_visit(lease, visit, stream);
  return make_lease(lease, stream);
}

const void* StepEngine::weight_address(std::uint32_t lease, std::uint32_t parameter) const {
  const BlockPlan& plan = plan_.blocks[resources_.weights->block(lease)];
  SPILLWAY_CHECK(parameter < plan.partition.parameters.size(), "the parameter belongs to the leased block");
  return resources_.weights->address(lease) + plan.partition.parameters[parameter].first * size_of(config_.weights);
}

void StepEngine::release(std::uint32_t lease, Stream& stream) {
  const auto turn = caller_.wait();
  releasing([&] {
    turn_to(stream);
    resources_.weights->release(lease, stream);
    if (Timeline* timeline = resources_.timeline()) timeline->end_visit(lease);
    predictor_.end_visit(lease);
  });
}

ActivationLease StepEngine::acquire_activation(std::uint32_t activation, Access access, Stream& stream) {
  const auto turn = caller_.enter("acquire_activation");
  return guarded([&] {
    if (!stepping_) begin_step();
    turn_to(stream);
    const std::uint32_t place = resources_.activations->acquire(activation, access, stream);
    return make_activation_lease(place, resources_.activations->address(place), stream);
  });
}

void StepEngine::release_activation(std::uint32_t place, Stream& stream) {
  const auto turn = caller_.wait();
  releasing([&] {
    turn_to(stream);
    resources_.activations->release(place, stream);
  });
}

// What a program may compute in; all of `memory` in one piece of it.
bool StepEngine::lends(std::span<const std::byte> memory) const {
  const auto in = [&](const Region& region) { return lies_in(memory, resources_.hbm_region(region)); };
  if (in(plan_.hbm.workspace) || resources_.activations->lends(memory)) return true;
  if (resources_.weights->lends(memory)) return true;
  return std::ranges::any_of(plan_.blocks, [&](const BlockPlan& block) { return in(block.insides); });
}

// In the middle of the workspace a gradient may reach into memory of the engine's own, which is of other numbers.
void StepEngine::check(const Gradient& gradient) const {
  resources_.pushes->check(gradient);
  const std::uint64_t elements = plan_.blocks[gradient.block].partition.parameters[gradient.parameter].count;
  const std::uint64_t bytes = elements * size_of(gradient.dtype);
  if (gradient.data == nullptr || lends({static_cast<const std::byte*>(gradient.data), bytes})) return;
  throw Error(Code::kInvalidArgument,
              {model_.blocks[gradient.block].parameters[gradient.parameter].name,
               fmt::format("its gradient's {} bytes do not lie in memory that the engine has lent", bytes), 0,
               "push from the workspace, from Engine::insides(), or from what is acquired"});
}

// Before anything of the step is updated by it, and before the push counts: it may come again, with zeros.
void StepEngine::refuse_uncounted(const Gradient& gradient) const {
  if (!resources_.store || resources_.store->keeps_update_counts() || !resources_.pushes->leaves_out(gradient)) return;
  throw Error(Code::kUnsupported, {model_.blocks[gradient.block].parameters[gradient.parameter].name,
                                   "got no gradient in this step, and the store, which an older version has made, "
                                   "cannot keep how many updates each parameter has had",
                                   0, "save a snapshot and begin a new store with it, or push zeros"});
}

// 2. Gradients: added in call order, rounded once, normed, and on their way down while backward goes on.
void StepEngine::push_gradient(const Gradient& gradient, Stream& stream) {
  const auto turn = caller_.enter("push_gradient");
  guarded([&] {
    if (!stepping_) begin_step();
    finish_step();  // the gradients of the step before are read until then
    resources_.gradients->join();
    check(gradient);
    refuse_uncounted(gradient);
    // Blocks that are updated inside backward share a little host memory for their gradients. The oldest is updated to
    // make room; where none can be, the caller keeps too many blocks open.
    while (!resources_.gradients->has_room(gradient.block)) {
      add_early(true);
      if (resources_.tiles->make_room()) continue;
      throw Error(Code::kInvalidArgument,
                  {model_.blocks[gradient.block].parameters[gradient.parameter].name,
                   "its gradient came while those of too many other blocks were incomplete", 0,
                   "push all gradients of a block before the next, or leave ModelDescription::visits empty"});
    }
    turn_to(stream);
    // False: the block still expects gradients. A complete block waits for step(), unless it is updated inside
    // backward.
    if (!resources_.gradients->push(gradient, stream)) return;
    if (!plan_.blocks[gradient.block].early && !(committed() && clip_guess_.take(gradient.block))) return;
    complete_.push_back(gradient.block);
    add_early(agreement_.alone());
  });
}

// Which parameters an update leaves out is known when all ranks' gradients have landed.
void StepEngine::add_early(bool wait) {
  for (; !complete_.empty(); complete_.erase(complete_.begin())) {
    const std::uint32_t block = complete_.front();
    if (!agreement_.alone()) {
      if (wait) resources_.gradients->wait_landed(block);
      if (!resources_.gradients->landed(block)) return;
      resources_.throw_if_failed();
    }
    parameters_.begin_update(next_update(), 1 / loss_scaler_.scale());
    parameters_.take(block, resources_.gradients->brought(block));
    resources_.early->add(block, parameters_);
  }
}

void StepEngine::set_learning_rate(double rate) {
  const auto turn = caller_.enter("set_learning_rate");
  refuse_if_failed();
  if (!std::isfinite(rate) || rate < 0) {
    throw Error(Code::kInvalidArgument, {"set_learning_rate", fmt::format("{} is no learning rate", rate), 0,
                                         "give a finite number, at least 0"});
  }
  refuse_behind_gradients("set_learning_rate");
  config_.schedule.given_lr = rate;
}

void StepEngine::set_betas(double beta1, double beta2) {
  const auto turn = caller_.enter("set_betas");
  refuse_if_failed();
  for (const double beta : {beta1, beta2}) {
    if (beta >= 0 && beta < 1) continue;
    throw Error(Code::kInvalidArgument,
                {"set_betas", fmt::format("{} decays no moment", beta), 0, "give two numbers from 0 to below 1"});
  }
  refuse_behind_gradients("set_betas");
  config_.optimizer.beta1 = beta1;
  config_.optimizer.beta2 = beta2;
}

void StepEngine::set_micro_batches(std::uint32_t micro_batches) {
  const auto turn = caller_.enter("set_micro_batches");
  refuse_if_failed();
  const std::uint32_t ranks = agreement_.rank().count, groups = plan_.sum_parts * ranks;
  if (micro_batches == 0 || micro_batches % groups != 0 || micro_batches / ranks > plan_.micro_batches) {
    throw Error(Code::kInvalidArgument,
                {"set_micro_batches", fmt::format("{} are no micro-batches of a step", micro_batches), 0,
                 fmt::format("give a multiple of {}, at most {}", groups, plan_.micro_batches * ranks)});
  }
  refuse_behind_gradients("set_micro_batches");
  if (!stepping_) begin_step();
  resources_.pushes->set_micro_batches(micro_batches / ranks);
}

// Some of them may have been updated by what was set before.
void StepEngine::refuse_behind_gradients(const char* call) const {
  if (!stepping_ || !resources_.pushes->begun()) return;
  throw Error(Code::kInvalidArgument, {call, "gradients of the step have been pushed already", 0,
                                       "set what a step updates by before its first gradient"});
}

// 3. and 4. The update begins once every gradient is known to be finite. A block's is made when the next forward pass
// asks for the block, and all of it is committed before the next backward pass.
StepReport StepEngine::step(std::span<const std::byte> blob) {
  const auto turn = caller_.enter("step");
  return guarded([&] {
    const TimedSpan span(resources_.timeline(), SpanKind::kFinishStep, step_ + 1);
    if (!stepping_) begin_step();
    if (const std::size_t most = kBlobCapacity - loss_scaler_.record_bytes(); blob.size() > most) {
      throw Error(Code::kInvalidArgument, {"step", fmt::format("the blob has {} bytes, {} fit", blob.size(), most), 0,
                                           "keep the rest in a file of your own and its name in the blob"});
    }
    refuse_leases("step");
    finish_step();
    GradientCollector& gradients = *resources_.gradients;
    gradients.join();
    add_early(true);
    resources_.pushes->check_complete();
    if (plan_.early_blocks) {
      const StallMeter::Wait wait(resources_.stalls.get(), StallCause::kGradient);
      resources_.tiles->advance(true);
    }
    // Other ranks' sums come on the net stream, and a gradient has landed only after them.
    if (resources_.net) {
      const StallMeter::Wait wait(resources_.stalls.get(), StallCause::kNetwork);
      resources_.net->synchronize();
    }
    {
      const StallMeter::Wait wait(resources_.stalls.get(), StallCause::kGradient);
      gradients.wait_landed();
    }
    turn_to(*resources_.compute);  // what still reads weights comes before their update
    resources_.compute->synchronize();
    resources_.throw_if_failed();  // before anything is made of its results
    predictor_.end_step();
    meter_.computed();
    if (plan_.gradients_in_hbm) resources_.stalls->follow(*resources_.compute);  // it makes the update
    StepReport report;
    report.step = step_ + 1;
    report.learning_rate = next_learning_rate();
    report.loss_scale = loss_scaler_.reported();
    report.speculative_blocks = clip_guess_.taken();
    const bool calm = begin_update(report);
    step_ = report.step;
    blob_.assign(blob.begin(), blob.end());
    if (plan_.gradients_in_hbm) finish_step();  // the device has updated everything

    meter_.report(report);
    step_seconds_ = report.seconds;
    report.unplanned_visits = cursor_.unplanned() - unplanned_before_;
    report.durable_step = durable_step();
    report.visits = resources_.weights->hits().visits;
    report.visit_hits = resources_.weights->hits().hits;
    if (cursor_.recording()) {
      cursor_.adopt_recorded();
      predictor_.forget(cursor_.visits().size());
    }
    clip_guess_.end_step(
        !calm, [this] { return predictor_.best_speculation(plan_, cursor_.visits(), resources_.rates, usual_step()); });
    begin_step();
    return report;
  });
}

void StepEngine::discard_step() {
  const auto turn = caller_.enter("discard_step");
  guarded([&] {
    refuse_leases("discard_step");
    if (!stepping_) return;
    forget_step();
    meter_.start();
    begin_step();
  });
}

// With the update of the step before under way there is neither a gradient of this one nor an update on a guess.
void StepEngine::forget_step() {
  if (!updating_ && !saving_) {
    resources_.gradients->wait_idle();
    resources_.early->take_back();
  }
  turn_to(*resources_.compute);
  resources_.compute->synchronize();
}

// Of the step's gradients; with an overflow in fp16 there is none, and only the commit is left. False: it was clipped
// or skipped.
bool StepEngine::begin_update(StepReport& report) {
  const double loss_scale = loss_scaler_.scale();
  if (const auto tensor = resources_.gradients->first_nonfinite()) {
    resources_.early->take_back();
    if (!loss_scaler_.may_skip()) {
      stepping_ = false;
      meter_.start();
      const std::string at = report.loss_scale ? fmt::format(" at the smallest loss scale, {}", loss_scale) : "";
      throw Error(Code::kNonFinite,
                  {*tensor, fmt::format("NaN or Inf in its gradient in step {}{}", report.step, at), 0,
                   "nothing was changed; lower the learning rate or look at the data of this step"});
    }
    loss_scaler_.update(true);
    log(LogLevel::kInfo,
        fmt::format("step {} is skipped: NaN or Inf in the gradient of {} at loss scale {}; {} from now on",
                    report.step, *tensor, loss_scale, loss_scaler_.scale()));
    report.gradient_norm = HUGE_VAL;
    report.skipped = true;
    report.taken_back = report.speculative_blocks > 0;
    updating_ = true;
    return false;
  }
  report.gradient_norm = std::sqrt(resources_.gradients->squared_norm_sum()) / loss_scale;
  double clip = 1;
  if (config_.gradient_clipping > 0) clip = std::min(1.0, config_.gradient_clipping / (report.gradient_norm + 1e-6));
  report.taken_back = !resources_.early->keep(clip == 1);
  parameters_.begin_update(next_update(), clip / loss_scale);
  for (std::uint32_t b = 0; b < plan_.blocks.size(); ++b) parameters_.take(b, resources_.gradients->brought(b));
  updating_ = changed_ = true;
  resources_.updater->begin(parameters_);
  parameters_.advance();
  loss_scaler_.update(false);
  return clip == 1;
}

std::vector<std::string> StepEngine::describe() const {
  const auto turn = caller_.ask();
  return run_summary(config_, plan_, model_, resources_, commits_.chosen(), nodes());
}

std::unique_ptr<Engine> Engine::create(const Config& config, const ModelDescription& model, EngineOptions options) {
  refuse_other_versions();
  return std::make_unique<StepEngine>(config, model, options);
}

}  // namespace spillway
