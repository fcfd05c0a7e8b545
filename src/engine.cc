// A step of the engine, in four paragraphs: forward and backward (acquire, release), gradients (push_gradient), update
// and commit (step).
#include "spillway/engine.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <exception>

#include "spillway/bf16.h"
#include "spillway/error.h"
#include "spillway/log.h"
#include "src/machinery.h"
#include "src/plan.h"
#include "src/tile_values.h"
#include "src/visit_cursor.h"

namespace spillway {
namespace {

using Clock = std::chrono::steady_clock;
double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

constexpr double kCommitShare = 0.02;  // of a step: what commits of resident tiles may cost on average

struct Traffic {
  std::uint64_t nvme_read = 0, nvme_write = 0, h2d = 0, d2h = 0;
};

class StepEngine final : public Engine {
 public:
  StepEngine(const Config& config, const ModelDescription& model, EngineOptions options)
      : config_(config),
        model_(model),
        thread_shares_(share_threads(config.threads)),
        plan_(make_plan(config, model, static_cast<unsigned>(thread_shares_.size()))),
        machinery_(config, model_, plan_, options, thread_shares_),
        cursor_(plan_.visits, !plan_.visits_given) {
    for (const TilePlace& tile : plan_.tile_places) {
      for (Part part : {Part::kWeights, Part::kStates}) {
        written_back_ |= tile.shape.trainable && !written_by_update(tile, part);
      }
    }
    commit_every_ = config.commit_every.value_or(1);
    choose_commit_interval_ = machinery_.store && written_back_ && !config.commit_every;
    blob_.reserve(kBlobCapacity);
    updated_ = machinery_.device->create_event();
    scalars_.reserve(plan_.groups.values.size());
    if (machinery_.resumed) resume();
  }

  ~StepEngine() override;

  std::uint64_t current_step() const override { return step_; }
  std::vector<std::byte> blob() const override { return blob_; }
  const Ledger& ledger() const override { return plan_.ledger; }
  std::vector<std::string> describe() const override;

  void import_weights(const WeightSource& source) override;
  void export_weights(bool exact, const WeightSink& sink) override;

  DeviceKind device_kind() const override { return machinery_.device->kind(); }
  Stream& stream() override { return *machinery_.compute; }
  std::span<std::byte> workspace() override { return machinery_.hbm_region(plan_.hbm.workspace); }
  bool in_hbm(const void* data, std::size_t bytes) const override {
    const auto hbm = machinery_.device->hbm();
    const auto* at = static_cast<const std::byte*>(data);
    return at >= hbm.data() && bytes <= hbm.size() && at <= hbm.data() + (hbm.size() - bytes);
  }

  Lease acquire(std::uint32_t block, Pass pass, Stream& stream) override;
  void push_gradient(const Gradient& gradient, Stream& stream) override;
  StepReport step(std::span<const std::byte> blob) override;
  void flush() override;

 protected:
  const void* weight_address(std::uint32_t lease, std::uint32_t parameter) const override;
  void release(std::uint32_t lease) override;

 private:
  void refuse_if_failed() const;
  template <typename Work>
  auto guarded(Work&& work);
  void begin_step();
  void settle();
  void resume();
  void commit();
  void choose_commit_interval(double commit_seconds, double step_seconds);
  Traffic traffic() const;
  void report_links(StepReport& report, const Traffic& before, double compute_seconds) const;

  const Config config_;
  const ModelDescription model_;
  const std::vector<ThreadShare> thread_shares_;
  const Plan plan_;
  Machinery machinery_;
  VisitCursor cursor_;  // without given visits the first step of this process teaches it; a store keeps no order
  std::vector<std::uint32_t> visit_blocks_;
  std::vector<OptimizerScalars> scalars_;  // of this step, by parameter group
  std::uint32_t leases_ = 0;               // while weights stay in HBM; places count their own

  std::uint64_t step_ = 0, durable_step_ = 0;
  std::vector<std::byte> blob_;
  bool imported_ = false, stepping_ = false;
  bool updating_ = false;      // the update of step_ is not settled: it is not taken back, what it overwrote is gone
  bool written_back_ = false;  // some tiles reach their slot only at a commit
  std::uint32_t commit_every_ = 1;
  bool choose_commit_interval_ = false;
  std::unique_ptr<Event> updated_;  // behind the copies of weights that stay in HBM
  std::string failure_;             // after it, nothing but destruction

  Clock::time_point step_start_ = Clock::now();
  Traffic step_traffic_;
  double step_seconds_ = 0;  // of the last step
  double idle_before_ = 0, adam_before_ = 0;
  std::uint64_t unplanned_before_ = 0;
};

StepEngine::~StepEngine() {
  try {
    if (failure_.empty()) settle();
  } catch (const Error& error) {
    log(LogLevel::kWarning, fmt::format("{}; the last step is lost, the one before is not", error.what()));
  }
  machinery_.compute->synchronize();
}

void StepEngine::refuse_if_failed() const {
  if (failure_.empty()) return;
  throw Error(Code::kIo,
              {"engine", "stopped after an earlier error (" + failure_ + ")", 0, "open the store again and resume"});
}

// Runs what may touch drive or device; a failure there is final for this engine.
template <typename Work>
auto StepEngine::guarded(Work&& work) {
  refuse_if_failed();
  try {
    return work();
  } catch (const Error& error) {
    const bool refused = error.code() == Code::kInvalidArgument || error.code() == Code::kDoesNotFit ||
                         (error.code() == Code::kNonFinite && !updating_);
    if (!refused) failure_ = error.what();
    throw;
  }
}

void StepEngine::begin_step() {
  if (!imported_) {
    throw Error(Code::kInvalidArgument, {"engine", "has no weights yet", 0, "call import_weights first, or resume"});
  }
  stepping_ = true;
  cursor_.begin_step();
  machinery_.gradients->begin_step();
  visit_blocks_.clear();
  for (const Visit& visit : cursor_.visits()) visit_blocks_.push_back(visit.block);
  if (machinery_.places) machinery_.places->begin_step(visit_blocks_);
  step_traffic_ = traffic();
  idle_before_ = machinery_.device->idle_seconds(*machinery_.compute);
  adam_before_ = machinery_.updater->adam_seconds();
  unplanned_before_ = cursor_.unplanned();
}

// 1. Forward and backward: the block's weights are on their way already; the caller's stream waits for the last copy.
Lease StepEngine::acquire(std::uint32_t block, Pass pass, Stream& stream) {
  if (block >= plan_.blocks.size()) {
    throw Error(Code::kInvalidArgument,
                {"acquire", fmt::format("there is no block {}", block), 0, "use the indices of the description"});
  }
  return guarded([&] {
    if (!stepping_) begin_step();
    if (pass == Pass::kBackward) settle();
    const VisitCursor::Position before = cursor_.position();
    const auto visit = cursor_.advance(block, pass);
    if (!machinery_.places) {
      if (updating_) {
        machinery_.updater->run_until(block, nullptr);
        machinery_.device->record(*updated_, *machinery_.h2d);
        machinery_.device->wait(stream, *updated_);
      }
      ++leases_;
      return make_lease(block);
    }
    std::uint32_t place = 0;
    try {
      place = machinery_.places->acquire(block, visit, stream);
    } catch (...) {
      cursor_.take_back(before);  // refused for want of a place: the caller may release one and come again
      throw;
    }
    // Nothing more to fetch: the first tiles of this step's update come next.
    if (cursor_.last() && !updating_) machinery_.updater->read_ahead();
    return make_lease(place);
  });
}

const void* StepEngine::weight_address(std::uint32_t lease, std::uint32_t parameter) const {
  const std::uint32_t block = machinery_.places ? machinery_.places->block(lease) : lease;
  const BlockPlan& plan = plan_.blocks[block];
  SPILLWAY_CHECK(parameter < plan.partition.parameters.size(), "the parameter belongs to the leased block");
  const std::byte* base =
      machinery_.places ? machinery_.places->address(lease) : machinery_.device->hbm().data() + plan.weights.offset;
  return base + plan.partition.parameters[parameter].first * size_of(config_.weights);
}

void StepEngine::release(std::uint32_t lease) {
  if (machinery_.places) {
    machinery_.places->release(lease);
  } else {
    --leases_;
  }
}

// 2. Gradients: added in call order, rounded once, normed, and on their way down while backward goes on.
void StepEngine::push_gradient(const Gradient& gradient, Stream& stream) {
  guarded([&] {
    if (!stepping_) begin_step();
    settle();  // the gradients of the step before are read until then
    if (gradient.block >= plan_.blocks.size() ||
        gradient.parameter >= plan_.blocks[gradient.block].partition.parameters.size()) {
      throw Error(Code::kInvalidArgument, {"push_gradient", "names a block or parameter that does not exist", 0,
                                           "use the indices of the description"});
    }
    const ParameterPlace& place = plan_.blocks[gradient.block].partition.parameters[gradient.parameter];
    if (!in_hbm(gradient.data, place.count * size_of(gradient.dtype))) {
      throw Error(Code::kInvalidArgument,
                  {model_.blocks[gradient.block].parameters[gradient.parameter].name,
                   "its gradient does not lie in the HBM arena", 0, "push from Engine::workspace()"});
    }
    machinery_.gradients->push(gradient, stream);
  });
}

// 3. and 4. The update begins once every gradient is known to be finite. A block's is made when the next forward pass
// asks for the block, and all of it is committed before the next backward pass.
StepReport StepEngine::step(std::span<const std::byte> blob) {
  return guarded([&] {
    if (!stepping_) begin_step();
    if (blob.size() > kBlobCapacity) {
      throw Error(Code::kInvalidArgument,
                  {"step", fmt::format("the blob has {} bytes, {} fit", blob.size(), kBlobCapacity), 0,
                   "keep the rest in a file of your own and its name in the blob"});
    }
    if (leases_ > 0 || (machinery_.places && machinery_.places->leased())) {
      throw Error(Code::kInvalidArgument, {"step", "a lease is still held", 0, "release every block before step()"});
    }
    settle();
    GradientCollector& gradients = *machinery_.gradients;
    gradients.check_complete();
    gradients.wait_landed();
    machinery_.compute->synchronize();
    const double idle = machinery_.device->idle_seconds(*machinery_.compute) - idle_before_;
    const double compute = seconds_since(step_start_) - idle;
    if (const auto tensor = gradients.first_nonfinite()) {
      stepping_ = false;
      throw Error(Code::kNonFinite, {*tensor, fmt::format("NaN or Inf in its gradient in step {}", step_ + 1), 0,
                                     "nothing was changed; lower the learning rate or look at the data of this step"});
    }
    StepReport report;
    report.step = step_ + 1;
    report.gradient_norm = std::sqrt(gradients.squared_norm_sum());
    report.learning_rate = learning_rate(config_, report.step);
    double scale = 1;
    if (config_.gradient_clipping > 0) scale = std::min(1.0, config_.gradient_clipping / (report.gradient_norm + 1e-6));
    scalars_of(config_, plan_.groups, report.step, scale, scalars_);
    updating_ = true;
    machinery_.updater->begin(scalars_);
    step_ = report.step;
    blob_.assign(blob.begin(), blob.end());
    if (!machinery_.updater->under_way()) settle();  // the device has updated everything

    report.seconds = step_seconds_ = seconds_since(step_start_);
    report.adam_seconds = machinery_.updater->adam_seconds() - adam_before_;
    report.stall_seconds = idle;
    report.unplanned_visits = cursor_.unplanned() - unplanned_before_;
    report.durable_step = durable_step_;
    report_links(report, step_traffic_, std::min(report.seconds, compute + report.adam_seconds));
    if (cursor_.recording()) cursor_.adopt_recorded();
    step_start_ = Clock::now();
    begin_step();
    return report;
  });
}

// The rest of the last step's update, and its commit: at the latest before the next gradient comes, because it would
// overwrite one that is still to be read, and before the next step's slots are written.
void StepEngine::settle() {
  if (!updating_) return;
  machinery_.updater->finish();
  updating_ = false;
  const auto start = Clock::now();
  const bool due = machinery_.store && commit_every_ > 0 && step_ % commit_every_ == 0;
  if (!due) return;
  commit();
  if (choose_commit_interval_ && step_ >= 2) choose_commit_interval(seconds_since(start), step_seconds_);
}

Traffic StepEngine::traffic() const {
  Traffic sum;
  if (machinery_.store) {
    const IoStats io = machinery_.thread->stats();
    sum.nvme_read = io.read_bytes;
    sum.nvme_write = io.write_bytes;
  }
  sum.h2d = machinery_.mover->h2d_bytes() + (machinery_.fetcher ? machinery_.fetcher->copied_bytes() : 0);
  sum.d2h = machinery_.mover->d2h_bytes() + machinery_.gradients->d2h_bytes();
  return sum;
}

void StepEngine::report_links(StepReport& report, const Traffic& before, double compute_seconds) const {
  const Traffic now = traffic();
  report.nvme_read_bytes = now.nvme_read - before.nvme_read;
  report.nvme_write_bytes = now.nvme_write - before.nvme_write;
  report.h2d_bytes = now.h2d - before.h2d;
  report.d2h_bytes = now.d2h - before.d2h;
  const LinkRates& rates = machinery_.rates;
  auto own_time = [](std::uint64_t bytes, double rate) { return rate > 0 ? static_cast<double>(bytes) / rate : 0; };
  const std::pair<const char*, double> links[] = {
      {"compute", compute_seconds},
      {"nvme", own_time(report.nvme_read_bytes + report.nvme_write_bytes, rates.nvme)},
      {"h2d", own_time(report.h2d_bytes, rates.h2d)},
      {"d2h", own_time(report.d2h_bytes, rates.d2h)}};
  const auto* slowest = std::ranges::max_element(links, {}, &std::pair<const char*, double>::second);
  report.link = slowest->first;
  report.link_percent = 100 * slowest->second / report.seconds;
}

void StepEngine::commit() {
  if (written_back_) {  // resident tiles reach their slot now
    std::uint32_t used = 0;
    for (std::uint32_t t = 0; t < plan_.tiles.size(); ++t) {
      const TilePlace& tile = plan_.tile_places[t];
      if (!tile.shape.trainable || (written_by_update(tile, Part::kWeights) && written_by_update(tile, Part::kStates)))
        continue;
      const std::uint32_t buffer = used++ % machinery_.mover->buffers();
      machinery_.mover->finish_save(buffer);
      machinery_.mover->start_load(t, buffer);
      machinery_.mover->finish_load(buffer);
      machinery_.mover->start_save(buffer, Save::kCommit);
    }
    for (std::uint32_t b = 0; b < machinery_.mover->buffers(); ++b) machinery_.mover->finish_save(b);
  }
  machinery_.store->commit(step_, blob_, *machinery_.thread, machinery_.host_region(plan_.host.record));
  durable_step_ = step_;
}

void StepEngine::choose_commit_interval(double commit_seconds, double step_seconds) {
  choose_commit_interval_ = false;
  const double without = std::max(step_seconds - commit_seconds, 1e-3);
  commit_every_ =
      static_cast<std::uint32_t>(std::clamp(std::ceil(commit_seconds / (kCommitShare * without)), 1.0, 1000.0));
  log(LogLevel::kInfo, fmt::format("commit_every {}: a commit of the tiles in memory takes {:.2f} s, a step {:.2f} s; "
                                   "a crash loses at most {} steps",
                                   commit_every_, commit_seconds, without, commit_every_));
}

void StepEngine::flush() {
  guarded([&] {
    settle();
    if (!machinery_.store || commit_every_ == 0 || !imported_ || durable_step_ == step_) return;
    machinery_.updater->cancel_read_ahead();
    commit();
  });
}

void StepEngine::resume() {
  TileMover& mover = *machinery_.mover;
  for (std::uint32_t t = 0; t < plan_.tiles.size(); ++t) {
    const TilePlace& tile = plan_.tile_places[t];
    const bool resident = tile.home[0] != Home::kNvme || tile.home[1] != Home::kNvme || tile.hbm_weights;
    if (!resident) continue;
    const std::uint32_t buffer = t % mover.buffers();
    mover.finish_save(buffer);
    mover.start_load(t, buffer, Load::kStore);
    mover.finish_load(buffer);
    mover.start_save(buffer, Save::kRestored);
  }
  for (std::uint32_t b = 0; b < mover.buffers(); ++b) mover.finish_save(b);
  const Manifest& manifest = machinery_.store->committed();
  step_ = durable_step_ = manifest.step;
  blob_.assign(manifest.blob.begin(), manifest.blob.end());
  imported_ = true;
  begin_step();
  step_start_ = Clock::now();
}

void StepEngine::import_weights(const WeightSource& source) {
  std::exception_ptr source_failure;  // the caller's own, and no failure of this engine: it may try again
  guarded([&] {
    if (imported_)
      throw Error(Code::kInvalidArgument,
                  {"import_weights", "the engine has its weights already", 0, "call it once, before step 1"});
    TileMover& mover = *machinery_.mover;
    for (std::uint32_t t = 0; t < plan_.tiles.size(); ++t) {
      const std::uint32_t buffer = t % mover.buffers();
      mover.finish_save(buffer);
      const TileMemory memory = mover.blank(t, buffer);
      try {
        fill_tile(plan_, t, memory, source);
      } catch (...) {
        source_failure = std::current_exception();
        mover.drop(buffer);
        break;
      }
      mover.start_save(buffer, Save::kNew);
    }
    for (std::uint32_t b = 0; b < mover.buffers(); ++b) mover.finish_save(b);
    if (source_failure) return;
    if (machinery_.store)
      machinery_.store->commit(0, {}, *machinery_.thread, machinery_.host_region(plan_.host.record));
    imported_ = true;
    begin_step();
    step_start_ = Clock::now();
  });
  if (source_failure) std::rethrow_exception(source_failure);
}

void StepEngine::export_weights(bool exact, const WeightSink& sink) {
  std::exception_ptr sink_failure;  // a full disk under the exported file, say: training goes on
  guarded([&] {
    if (!imported_)
      throw Error(Code::kInvalidArgument,
                  {"export_weights", "the engine has no weights yet", 0, "call import_weights first"});
    settle();
    TileMover& mover = *machinery_.mover;
    machinery_.updater->cancel_read_ahead();
    for (std::uint32_t t = 0; t < plan_.tiles.size(); ++t) {
      mover.start_load(t, 0);
      const TileMemory memory = mover.finish_load(0);
      try {
        read_tile(plan_, t, memory, exact, sink);
      } catch (...) {
        sink_failure = std::current_exception();
      }
      mover.drop(0);
      if (sink_failure) break;
    }
  });
  if (sink_failure) std::rethrow_exception(sink_failure);
}

std::vector<std::string> StepEngine::describe() const {
  std::vector<std::string> facts;
  facts.push_back("device: " + machinery_.device->describe());
  for (std::string& group : describe_groups(plan_.groups, model_)) facts.push_back(std::move(group));
  std::uint64_t bytes[3] = {};
  for (const TilePlace& tile : plan_.tile_places) {
    for (Part part : {Part::kWeights, Part::kStates}) {
      bytes[static_cast<std::size_t>(tile.home[index_of(part)])] += payload_bytes(tile.shape, part);
    }
  }
  facts.push_back(
      fmt::format("weights and states at home: {} MiB in hbm, {} MiB in host memory, {} MiB on nvme; {} tiles",
                  bytes[0] / kMiB, bytes[1] / kMiB, bytes[2] / kMiB, plan_.tiles.size()));
  if (!plan_.hbm.places.empty()) {
    facts.push_back(fmt::format(
        "blocks in HBM at a time: {} of {}{}", plan_.hbm.places.size(), plan_.blocks.size(),
        plan_.hbm.places.size() == 1 ? " (fetch and compute take turns: more hbm_bytes would overlap them)" : ""));
  }
  if (machinery_.store) {
    const std::span<const File> files = machinery_.store->files().files();
    facts.push_back("io: " + machinery_.thread->description() +
                    (std::ranges::all_of(files, &File::direct)
                         ? ", direct"
                         : ", through the page cache: the file system grants no direct I/O"));
    std::string names;
    for (const File& file : files) names += (names.empty() ? "" : ", ") + file.path().string();
    facts.push_back(fmt::format("store: {}, {} MiB, {}", names, plan_.store_bytes / kMiB,
                                commit_every_ == 0        ? std::string("one slot a tile, no resume (commit_every 0)")
                                : choose_commit_interval_ ? std::string("commit_every chosen after step 2")
                                                          : fmt::format("commit_every {}", commit_every_)));
    facts.push_back(fmt::format("nvme link: {:.2f} GB/s, reads and writes mixed", machinery_.rates.nvme / 1e9));
  } else {
    facts.push_back("no nvme_path: no store, so this run cannot be resumed");
  }
  return facts;
}

}  // namespace

std::unique_ptr<Engine> Engine::create(const Config& config, const ModelDescription& model, EngineOptions options) {
  return std::make_unique<StepEngine>(config, model, options);
}

}  // namespace spillway
