// A step of the optimizer whose weights are the caller's: gradients are looked at, every tile is updated, and all of it
// is committed. States in memory are updated beside the tensors themselves; what a store keeps goes through a buffer,
// in the pass that computes its checksums.
#include "src/optimizer/tensor_optimizer.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <utility>

#include "kernels/host_device.h"
#include "spillway/log.h"
#include "src/config/ranges.h"
#include "src/engine/loaded_versions.h"
#include "src/engine/memory_check.h"
#include "src/engine/store_place.h"
#include "swap/tile_arrays.h"

namespace spillway {
namespace {

using Clock = std::chrono::steady_clock;
double seconds_after(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

const Config& checked_config(const Config& config) {
  if (config.commit_every.value_or(1) > 1) {
    throw Error(
        Code::kInvalidArgument,
        {"spillway.commit_every", fmt::format("is {}, and this optimizer commits every step", *config.commit_every), 0,
         "leave it out, or set it to 0 to keep no step"});
  }
  return check_ranges(config);
}

const ModelDescription& checked_model(const ModelDescription& model) {
  for (const Block& block : model.blocks) {
    for (const Parameter& parameter : block.parameters) {
      if (parameter.trainable) continue;
      throw Error(Code::kInvalidArgument, {parameter.name, "is described as frozen", 0, "leave it out"});
    }
  }
  return model;
}

// A group for each tensor at most.
Plan plan_of(const Config& config, const ModelDescription& model, const OffloadOptimizerOptions& options) {
  using Staging = CallerMemory::Staging;
  const Staging staging = !options.carrier           ? Staging::kNone
                          : options.mostly_elsewhere ? Staging::kMuch
                                                     : Staging::kLittle;
  Plan plan = make_optimizer_plan(config, model, {.gradients = options.keep_gradients, .staging = staging});
  std::size_t tensors = 0;
  for (const Block& block : model.blocks) tensors += block.parameters.size();
  plan.groups.values.assign(tensors, {});
  return plan;
}

// Of host memory.
std::uint64_t checked_bytes(const Plan& plan) {
  check_memory(plan, DeviceKind::kHost);
  return plan.ledger.total(Placement::kHost);
}

EngineOptions engine_options(const OffloadOptimizerOptions& options) {
  EngineOptions engine;
  engine.on_existing = options.on_existing;
  engine.snapshot = options.snapshot;
  return engine;
}

}  // namespace

TensorOptimizer::TensorOptimizer(const Config& config, const ModelDescription& model, OffloadOptimizerOptions options)
    : config_(checked_config(config)),
      model_(checked_model(model)),
      plan_(plan_of(config_, model_, options)),
      loss_scaler_(config_),
      snapshot_(open_snapshot(plan_, config_, model_, engine_options(options))),
      keeps_gradients_(options.keep_gradients),
      host_(checked_bytes(plan_), kPinnedArena),
      workers_(create_workers(config_.threads)),
      device_(create_host_device({.hbm_bytes = kExtentAlignment}, *workers_)),
      h2d_(device_->create_stream("h2d")),
      d2h_(device_->create_stream("d2h")),
      store_(open_store(config_, model_, plan_, options.on_existing,
                        [this] {
                          if (snapshot_) snapshot_->verify();
                        })),
      tensors_(plan_, model_,
               {.checksums = host_region(plan_.host.weight_checksums), .staging = host_region(plan_.host.staging)},
               options.carrier),
      updates_(config_, plan_, model_),
      weights_(Weights::kToImport) {
  if (store_) thread_ = start_store_thread(config_, *store_, host_.memory());
  device_->register_host(host_.memory());
  mover_ = std::make_unique<TileMover>(
      TileMoverParts{.device = device_.get(),
                     .workers = workers_.get(),
                     .h2d = h2d_.get(),
                     .d2h = d2h_.get(),
                     .thread = thread_.get(),
                     .store = store_.get(),
                     .tiles = plan_.tile_places,
                     .host = host_.memory(),
                     .buffers = host_region(plan_.host.buffers),
                     .buffer_bytes = plan_.host.buffer_bytes,
                     .count = plan_.host.buffers_count,
                     .name_of = [this](std::uint32_t tile) { return tile_name(plan_, model_, tile); }});
  for (const Block& block : model_.blocks) brought_.resize(std::max(brought_.size(), block.parameters.size()));
  ranges_.reserve(brought_.size());
  group_of_.assign(tensors_.count(), kNotUpdated);
  if (store_ && options.on_existing == OnExisting::kResume) {
    const Manifest& manifest = store_->committed();
    step_ = committed_step_ = manifest.step;
    loss_scaler_.resume(manifest.blob, manifest.step, blob_);
    resume_updates(manifest.update_counts, "the store's last commit");
    weights_ = Weights::kToLoad;
  } else if (snapshot_) {
    step_ = snapshot_->step();
    loss_scaler_.resume(snapshot_->kept(), step_, blob_);
    resume_updates(snapshot_->update_counts(), "the snapshot");
    weights_ = Weights::kToLoad;
  }
}

// An engine's fp16 run may have skipped some of its steps, of all parameters alike.
void TensorOptimizer::resume_updates(std::vector<std::uint64_t> counts, const char* object) {
  if (counts.empty()) counts.assign(tensors_.count(), step_ - loss_scaler_.skipped());
  updates_.resume(step_, counts, object);
}

TensorOptimizer::~TensorOptimizer() {
  const auto turn = caller_.wait();
  mover_.reset();
  thread_.reset();
  device_->unregister_host(host_.memory());
}

std::uint64_t TensorOptimizer::current_step() const {
  const auto turn = caller_.ask();
  return step_;
}

std::vector<std::byte> TensorOptimizer::blob() const {
  const auto turn = caller_.ask();
  return blob_;
}

void TensorOptimizer::set_blob(std::span<const std::byte> blob) {
  const auto turn = caller_.enter("set_blob");
  refuse_if_failed();
  check_blob(blob);
  blob_.assign(blob.begin(), blob.end());
}

void TensorOptimizer::check_blob(std::span<const std::byte> blob) const {
  const std::size_t most = kBlobCapacity - loss_scaler_.record_bytes();
  if (blob.size() <= most) return;
  throw Error(Code::kInvalidArgument,
              {"blob", fmt::format("has {} bytes", blob.size()), 0, fmt::format("a commit has room for {}", most)});
}

void TensorOptimizer::refuse_if_failed() const {
  if (failure_.empty()) return;
  throw Error(Code::kIo, "optimizer", "stopped after an earlier error (" + failure_ + ")", 0,
              store_ && config_.commit_every != 0u ? Hint(Remedy::kReopen)
                                                   : Hint("no step is kept: begin again, or with a snapshot"));
}

void TensorOptimizer::refuse_unless(Weights state, const char* call) const {
  if (weights_ == state) return;
  const char* const happened = weights_ == Weights::kToImport ? "the optimizer has no weights yet"
                               : weights_ == Weights::kToLoad ? "the tensors do not have the optimizer's weights yet"
                                                              : "the optimizer has its weights already";
  const char* const hint = weights_ == Weights::kToImport ? "call import_weights first"
                           : weights_ == Weights::kToLoad ? "call load_weights first"
                                                          : "call it once, before the first step";
  throw Error(Code::kInvalidArgument, {call, happened, 0, hint});
}

void TensorOptimizer::check(std::span<const OptimizerTensor> tensors, const char* call, bool gradients) const {
  if (tensors.size() != tensors_.count()) {
    throw Error(Code::kInvalidArgument, {call, fmt::format("is given {} tensors", tensors.size()), 0,
                                         fmt::format("give all {} of the description", tensors_.count())});
  }
  const std::uint64_t element = size_of(config_.weights);
  for (std::uint32_t t = 0; t < tensors.size(); ++t) {
    if (!gradients && tensors[t].weight == nullptr)
      throw Error(Code::kInvalidArgument, {tensors_.name(t), "has no memory for its weights", 0, "give its address"});
    for (const void* address : {static_cast<const void*>(tensors[t].weight), tensors[t].gradient}) {
      if (is_elsewhere(address)) {
        if (tensors_.staging().carrier()) continue;
        throw Error(Code::kInvalidArgument, {tensors_.name(t), "is elsewhere, and there is no carrier", 0,
                                             "give one when the optimizer is made"});
      }
      if (reinterpret_cast<std::uintptr_t>(address) % element == 0) continue;
      throw Error(Code::kInvalidArgument,
                  {tensors_.name(t), "does not lie at a multiple of an element's size", 0, "copy it to where it does"});
    }
  }
}

void TensorOptimizer::check(const OptimizerStep& step) const {
  check(step.tensors, "step", false);
  const auto refuse = [](std::string happened, const char* hint) {
    throw Error(Code::kInvalidArgument, {"step", std::move(happened), 0, hint});
  };
  if (step.group_of.size() != step.tensors.size())
    refuse(fmt::format("says the group of {} tensors of {}", step.group_of.size(), step.tensors.size()),
           "give an index for each");
  if (step.groups.empty() || step.groups.size() > step.tensors.size())
    refuse(fmt::format("is given {} groups for {} tensors", step.groups.size(), step.tensors.size()),
           "give one or more, and no more than tensors");
  for (const std::uint32_t group : step.group_of) {
    if (group >= step.groups.size()) refuse(fmt::format("there is no group {}", group), "give indices into groups");
  }
  for (const OptimizerConfig& group : step.groups) {
    if (group.kind != config_.optimizer.kind)
      refuse(fmt::format("a group is of {}, the optimizer of {}", name_of(group.kind), name_of(config_.optimizer.kind)),
             "give groups of its kind");
    // Padding has no gradient and no moments: without epsilon its update would be 0 / 0.
    if (has_exp_avg_sq(group.kind) && !(static_cast<float>(group.epsilon) > 0))
      refuse("eps is 0 in fp32, so that 0 would be divided by 0", "take 1e-8, the default");
  }
  if (!std::isfinite(step.gradient_scale)) refuse("gradient_scale is not finite", "leave such a step out");
}

// The plan's groups are those of tensors, as far as they are others than in the step before.
void TensorOptimizer::set_groups(std::span<const std::uint32_t> group_of) {
  if (std::ranges::equal(group_of, group_of_)) return;
  std::ranges::copy(group_of, group_of_.begin());
  for (std::uint32_t t = 0; t < tensors_.count(); ++t) {
    plan_.groups.parameter[tensors_.block(t)][tensors_.parameter(t)] = group_of[t];
  }
  for (TilePlan& tile : plan_.tiles) {
    ranges_of(plan_.blocks[tile.block].partition, plan_.groups.parameter[tile.block], tile.range, tile.groups);
  }
}

void TensorOptimizer::take_blocks(std::span<const OptimizerTensor> tensors) {
  for (std::uint32_t b = 0; b < plan_.blocks.size(); ++b) {
    const std::size_t parameters = model_.blocks[b].parameters.size();
    for (std::uint32_t p = 0; p < parameters; ++p) brought_[p] = tensors[tensors_.index(b, p)].gradient != nullptr;
    updates_.take(b, std::span(brought_).first(parameters));
  }
}

// No store, and all states in memory: every piece of every tensor beside its states, as they lie; what is elsewhere,
// chunk after chunk.
bool TensorOptimizer::update_in_memory(std::span<const OptimizerTensor> tensors) {
  const std::size_t pieces = tensors_.pieces().size();
  std::atomic<bool> finite = true;
  const auto update = [&](std::size_t first, std::size_t end, const TensorStaging::Slot& slot, std::uint64_t begins) {
    workers_->parallel_for(end - first, [&](std::size_t i) {
      if (!update_piece(first + i, tensors, slot, begins)) finite.store(false, std::memory_order_relaxed);
    });
  };
  const bool staged = std::ranges::any_of(tensors, [](const OptimizerTensor& tensor) {
    return is_elsewhere(tensor.weight) || is_elsewhere(tensor.gradient);
  });
  if (!staged) {
    update(0, pieces, {}, 0);
    return finite;
  }
  TensorStaging& staging = tensors_.staging();
  for (const TensorStaging::Chunk& chunk : staging.chunks()) {
    const bool brought = staging.brought(chunk);
    const TensorStaging::Slot slot = brought ? staging.arrive(chunk) : TensorStaging::Slot{};
    update(chunk.first, chunk.end, slot, chunk.at);
    if (brought) staging.give(chunk, slot);
  }
  return finite;
}

// False: a result is not finite.
bool TensorOptimizer::update_piece(std::size_t index, std::span<const OptimizerTensor> tensors,
                                   const TensorStaging::Slot& slot, std::uint64_t slot_begins) {
  const TensorPiece& piece = tensors_.pieces()[index];
  const std::uint32_t t = piece.tensor, tile = tensors_.tile_of(index);
  const OptimizerScalars* scalars = updates_.scalars(tensors_.block(t), tensors_.parameter(t));
  if (scalars == nullptr) return true;
  const TilePlace& place = plan_.tile_places[tile];
  TileMemory memory;
  memory.part[index_of(Part::kStates)] = host_.memory().data() + place.offset[index_of(Part::kStates)];
  const OptimizerTile states = tile_arrays(place.shape, memory, nullptr);
  const OptimizerTile arrays = tensors_.arrays_of(piece, states, tensors[t], slot, slot_begins);
  tensors_.renew(tile, piece, arrays.weight, states);
  const bool finite = optimizer_update(arrays, *scalars, 0, piece.count);
  tensors_.note(tile, piece, arrays.weight);
  return finite;
}

void TensorOptimizer::start_loads(std::uint32_t due) {
  const std::uint32_t buffers = mover_->buffers();
  const std::uint32_t end = std::min(tiles(), due + (plan_.host.reads_ahead ? buffers : 1));
  for (; loading_ < end; ++loading_) {
    if (loading_ > due && !mover_->idle(loading_ % buffers)) return;
    mover_->start_load(loading_, loading_ % buffers);
  }
}

void TensorOptimizer::cancel_loads() {
  for (std::uint32_t t = 0; t < loading_; ++t) {
    mover_->arrive(t % mover_->buffers());
    mover_->drop(t % mover_->buffers());
  }
  loading_ = 0;
}

// The drive has more to do as soon as a buffer is free again.
void TensorOptimizer::wait_read(std::uint32_t due) {
  const Clock::time_point start = Clock::now();
  for (;;) {
    const std::uint64_t completed = mover_->completed();
    start_loads(due);
    if (mover_->read(due % mover_->buffers())) break;
    mover_->wait_completed_beyond(completed);
  }
  stall_seconds_ += seconds_after(start);
}

void TensorOptimizer::update_through_buffers(std::span<const OptimizerTensor> tensors) {
  std::byte* const gradient = host_region(plan_.host.tile_gradient).data();
  for (std::uint32_t t = 0; t < tiles(); ++t) {
    const std::uint32_t buffer = t % mover_->buffers();
    wait_read(t);
    const TileMemory memory = mover_->arrive(buffer);
    const Clock::time_point start = Clock::now();
    ExtentHashes states = mover_->expected_hashes(buffer, Part::kStates, Save::kUpdated);
    if (tensors_.gather(t, memory, gradient, tensors, *workers_)) {
      if (!states.before.empty()) granule_checksums(states.bytes, states.before, *workers_);  // as they came
      states.before = {};
      tensors_.renew_all(t, memory, *workers_);
    }
    const bool finite = update_tile({.tile = tile_arrays(plan_.tile_places[t].shape, memory, gradient),
                                     .groups = updates_.ranges(t, ranges_),
                                     .scalars = updates_.scalars(),
                                     .weights = mover_->expected_hashes(buffer, Part::kWeights, Save::kUpdated),
                                     .states = states},
                                    *workers_);
    adam_seconds_ += seconds_after(start);
    mover_->verify(buffer);
    if (!finite) refuse_overflow(tile_name(plan_, model_, t));
    tensors_.scatter(t, memory, tensors, *workers_);
    mover_->start_save(buffer, Save::kUpdated);
    if (!plan_.host.writes_behind) mover_->finish_save(buffer);
  }
  const Clock::time_point start = Clock::now();
  mover_->finish_saves();
  stall_seconds_ += seconds_after(start);
  loading_ = 0;
}

void TensorOptimizer::refuse_overflow(const std::string& where) {
  throw Error(Code::kNonFinite,
              {where, "a weight or optimizer state overflowed in the update", 0,
               store_ ? "lower the learning rate or clip gradients; the last committed step is intact"
                      : "lower the learning rate or clip gradients, and begin again: the tensors are of no more use"});
}

OptimizerStepReport TensorOptimizer::step(const OptimizerStep& step) {
  const auto turn = caller_.enter("step");
  refuse_if_failed();
  check(step);
  refuse_unless(Weights::kReady, "step");
  check_blob(step.blob);
  if (!step.finite) {
    if (const auto tensor = first_nonfinite(step.tensors)) {
      throw Error(Code::kNonFinite,
                  {tensors_.name(*tensor), fmt::format("NaN or Inf in its gradient in step {}", step_ + 1), 0,
                   "nothing was changed; lower the learning rate, or leave the step out"});
    }
  }
  const Clock::time_point start = Clock::now();
  adam_seconds_ = stall_seconds_ = 0;
  const IoStats before = thread_ ? thread_->stats() : IoStats{};
  const TileMover::Hits hits = mover_->hits();
  guarded([&] {
    set_groups(step.group_of);
    updates_.begin_update(step_ + 1, step.gradient_scale, step.groups);
    take_blocks(step.tensors);
    StagedPass pass(tensors_.staging(), step.tensors,
                    store_ ? TensorStaging::Brings::kWeightsAndGradients : TensorStaging::Brings::kUpdated);
    changing_ = true;
    if (store_) {
      update_through_buffers(step.tensors);
    } else {
      if (!update_in_memory(step.tensors)) refuse_overflow("the update");
      adam_seconds_ = seconds_after(start);
    }
    pass.finish();
    changing_ = false;
    updates_.advance();
    ++step_;
    blob_.assign(step.blob.begin(), step.blob.end());
    if (store_) commit();
    if (store_ && plan_.host.reads_ahead) start_loads(0);
  });
  const IoStats after = thread_ ? thread_->stats() : IoStats{};
  return {.step = step_,
          .seconds = seconds_after(start),
          .adam_seconds = adam_seconds_,
          .stall_seconds = stall_seconds_,
          .nvme_read_bytes = after.read_bytes - before.read_bytes,
          .nvme_write_bytes = after.write_bytes - before.write_bytes,
          .tile_bytes = mover_->hits().bytes - hits.bytes,
          .tile_hit_bytes = mover_->hits().hit_bytes - hits.hit_bytes,
          .durable_step = store_missing_ ? 0 : committed_step_};
}

void TensorOptimizer::commit() {
  if (config_.commit_every == 0u) return;
  const Clock::time_point start = Clock::now();
  store_->commit(step_, loss_scaler_.record(blob_, record_), *thread_, host_region(plan_.host.record),
                 updates_.counts(step_));
  committed_step_ = step_;
  store_missing_ = warn_if_missing(*store_, store_missing_);
  stall_seconds_ += seconds_after(start);
}

std::span<std::byte> TensorOptimizer::gradient_memory(std::uint32_t tensor) {
  if (tensor >= tensors_.count()) {
    throw Error(Code::kInvalidArgument,
                {"gradient_memory", fmt::format("there is no tensor {}", tensor), 0, "use the description's order"});
  }
  if (!keeps_gradients_) return {};
  const BlockPlan& block = plan_.blocks[tensors_.block(tensor)];
  const ParameterPlace& place = block.partition.parameters[tensors_.parameter(tensor)];
  const std::uint64_t element = size_of(config_.weights);
  return host_region(block.gradient).subspan(place.first * element, place.count * element);
}

std::unique_ptr<OffloadOptimizer> OffloadOptimizer::create(const Config& config, const ModelDescription& model,
                                                           OffloadOptimizerOptions options) {
  refuse_other_versions();
  return std::make_unique<TensorOptimizer>(config, model, std::move(options));
}

}  // namespace spillway
