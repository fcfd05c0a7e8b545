// The engine: trains a model whose weights, gradients and optimizer states do not fit the device.
//
//   auto engine = Engine::create(config, description, {.on_existing = OnExisting::kRefuse});
//   engine->import_weights(source);
//   for each step:
//     for each visit of the plan:
//       Lease lease = engine->acquire(block, pass, stream);   // weights on the device, `stream` waits for them
//       ActivationLease input = engine->acquire_activation(index, Access::kRead, stream);   // what visits keep
//       … enqueue work on `stream` that reads lease.weight(parameter) and input.data() …
//       engine->push_gradient({.block, .parameter, .data, .dtype}, stream);   // backward visits
//       lease.release();                                      // in stream order
//     StepReport report = engine->step(blob);
//
// Ownership: the engine owns every arena, stream and file; leases refer to it and must be released before it goes.
// Streams: calls may name different streams. A call that names another stream than the call before, or that releases a
// lease acquired on another stream, makes its stream wait for what was enqueued on the other one. Threads: calls may
// come from different threads, one at a time. A call that comes while another thread's call is under way is refused
// (kBusy), with nothing changed; calls that cannot be refused (the release of a lease, the engine's destructor) wait
// for its end. Functions that the engine calls (weight sources and sinks, the log) must not call it. Errors:
// spillway::Error in the caller's thread; after an I/O error the engine refuses further work and the store is at its
// last commit.
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

#include "spillway/communicator.h"
#include "spillway/config.h"
#include "spillway/device.h"
#include "spillway/model.h"
#include "spillway/snapshot.h"
#include "spillway/stall.h"

namespace spillway {

// kResume: go on from the store's last commit. The stores of several ranks lie in `<path>/rank<r>`, that of one process
// alone in `<path>`. Stores that another number of ranks has left there are resumed too: each rank reads what overlaps
// its own part, verified, into a new store, and the old stores are removed once all new ones are committed.
// docs/ranks_resume.md.
enum class OnExisting : std::uint8_t { kRefuse, kResume, kReplace };

struct EngineOptions {
  // What to do with a store that exists in nvme_paths. A store that is replaced stays until the new one has its weights
  // and is committed; where a disk has no room for both, it stays until the new one has its space and the snapshot
  // below is verified.
  OnExisting on_existing = OnExisting::kRefuse;
  // A snapshot (spillway/snapshot.h) to begin with, in place of import_weights(): weights, states, step and blob. The
  // next steps have the bits of the run that saved it, however that one was laid out. A new store is at that step, once
  // every byte was verified: kCorrupt names file and tensor. A snapshot of another model, weight type or optimizer is
  // refused (kInvalidArgument, naming what differs) before anything is written; so is one together with kResume.
  std::filesystem::path snapshot = {};
  bool poison_released = false;  // tests: fill a released lease with NaN
  // Where a timeline of the run is written when the engine ends, also after an error, in Chrome's trace format; empty:
  // nowhere. It holds the last `trace_spans` spans (40 bytes of memory each) and says how many older ones it lost. A
  // file that is there and is no trace is refused (kExists).
  std::filesystem::path trace = {};
  std::size_t trace_spans = 1 << 18;
  // The ranks that train the model together; null: this process alone. Not owned; it must outlive the engine. Every
  // rank makes an engine of the same configuration, model and options (but for its own paths), and the same calls in
  // the same order. docs/ranks.md.
  Communicator* communicator = nullptr;
};

// One line of the memory ledger: a reservation made at create.
struct Reservation {
  Placement tier;
  std::string purpose;
  std::uint64_t bytes = 0;
  bool outside = false;  // the program's own memory: part of the budget, and not in total()
};

struct Ledger {
  std::vector<Reservation> reservations;
  std::uint64_t hbm_budget = 0, host_budget = 0, nvme_budget = 0;
  std::uint64_t total(Placement tier) const {
    std::uint64_t sum = 0;
    for (const Reservation& line : reservations) sum += line.tier == tier && !line.outside ? line.bytes : 0;
    return sum;
  }
};

struct StepReport {
  std::uint64_t step = 0;
  double gradient_norm = 0;  // before clipping, of the unscaled loss; infinite for a skipped step
  double learning_rate = 0;
  std::optional<double> loss_scale;  // fp16: the factor for this step's loss
  bool skipped = false;              // fp16: a gradient overflowed, and nothing was updated
  double seconds = 0;                // since the last step() or discard_step() returned
  std::uint64_t nvme_read_bytes = 0, nvme_write_bytes = 0, h2d_bytes = 0, d2h_bytes = 0;
  std::string link;          // the slowest link: nvme, h2d, d2h, network, compute
  double link_percent = 0;   // that link's own time as a share of the step
  double stall_seconds = 0;  // the stream of acquire() had nothing to run
  StallSeconds stalls;       // the same by cause
  double adam_seconds = 0;   // the optimizer's passes over tiles
  std::uint64_t unplanned_visits = 0;
  // Where weights move: how many visits there were, and how many found their block in HBM from an earlier visit.
  std::uint64_t visits = 0, visit_hits = 0;
  // Of the tiles updated during this step (most of them in the update of the one before): their bytes, and how many
  // of them did not come from NVMe. Engine::describe() has what the plan says of both.
  std::uint64_t tile_bytes = 0, tile_hit_bytes = 0;
  std::uint64_t durable_step = 0;  // the last step that survives any crash; with commits, the one before this
  // Blocks updated inside backward on the guess that clipping has no effect; they were updated once more when it had.
  std::uint32_t speculative_blocks = 0;
  bool taken_back = false;
};

class Engine;

// An acquired block: device addresses of its weights, valid until release(). Move-only; the destructor releases.
class Lease {
 public:
  Lease(Lease&& other) noexcept;
  Lease& operator=(Lease&& other) noexcept;
  ~Lease();

  // Device address of a parameter's weights in the configured dtype, row-major, aligned to 2048 bytes.
  const void* weight(std::uint32_t parameter) const;
  // Gives the block back once the work enqueued so far on the stream of acquire() has run. Throws nothing: if the fetch
  // that it starts fails, the engine's next call throws.
  void release();

 private:
  friend class Engine;
  Lease(Engine* engine, std::uint32_t number, Stream& stream) : engine_(engine), number_(number), stream_(&stream) {}
  Engine* engine_ = nullptr;
  std::uint32_t number_ = 0;
  Stream* stream_ = nullptr;
};

// An acquired activation of the description: its device address, valid until release(). Move-only; the destructor
// releases.
class ActivationLease {
 public:
  ActivationLease(ActivationLease&& other) noexcept;
  ActivationLease& operator=(ActivationLease&& other) noexcept;
  ~ActivationLease();

  // Aligned to 4096.
  std::byte* data() const;
  // Gives the activation back once the work enqueued so far on the stream of acquire_activation() has run.
  void release();

 private:
  friend class Engine;
  ActivationLease(Engine* engine, std::uint32_t place, std::byte* data, Stream& stream)
      : engine_(engine), place_(place), data_(data), stream_(&stream) {}
  Engine* engine_ = nullptr;
  std::uint32_t place_ = 0;
  std::byte* data_ = nullptr;
  Stream* stream_ = nullptr;
};

// Device memory for the tensors that a block's visits compute inside the block.
struct Insides {
  std::span<std::byte> memory;  // Block::inside_bytes for each micro-batch, one after the other; not kept: for one
  bool kept = false;  // what the forward visit leaves is there in the backward visit; else blocks share the memory
};

struct Gradient {
  std::uint32_t block = 0;
  std::uint32_t parameter = 0;  // index in its block
  // Device address, in memory that the engine lends: all of the gradient lies in the workspace, in a block's inner
  // activations (insides()), or in an activation or a block's weights that are acquired; else kInvalidArgument. It may
  // be overwritten by work enqueued on the stream after this call. Null: what was computed does not depend on the
  // parameter, so that it brings no gradient.
  const void* data = nullptr;
  DType dtype = DType::kFloat32;  // fp32, or the configured weight type
  std::uint64_t elements = 0;     // at `data`: kInvalidArgument if the parameter has another number. 0: not said
  // Which micro-batch of the step the gradient is of, from 0 over all ranks: with Config::sum_groups it decides to
  // which partial sum the gradient is added. Rank r of R has micro-batches [r n / R, (r + 1) n / R) of n.
  std::uint32_t micro_batch = 0;
};

// Writes the values [first, first + out.size()) of a parameter into `out`, row-major, as fp32.
using WeightSource =
    std::function<void(std::uint32_t block, std::uint32_t parameter, std::uint64_t first, std::span<float> out)>;
// Receives values in the same way, in increasing order of `first`.
using WeightSink = std::function<void(std::uint32_t block, std::uint32_t parameter, std::uint64_t first,
                                      std::span<const float> values)>;

// The device that an engine of this configuration has on this machine. Throws kUnsupported, with the reason, when the
// configuration asks for cuda and cannot have it.
DeviceKind resolve_device(const Config& config);
// The compute threads that such an engine starts on this machine. Written into Config::threads, the number stays as it
// is when the machine's limits change.
unsigned compute_threads(const Config& config);

// For Engine::read_values().
enum class ParameterValues : std::uint8_t { kMaster, kExpAvg, kExpAvgSq, kGradient };

class Engine {
 public:
  // Plans, reserves every byte and opens the store. Refuses before anything is written when a budget is too small
  // (kDoesNotFit, naming the smallest change that fits), a store exists (kExists), is in use (kBusy) or belongs to
  // another model (kInvalidArgument).
  static std::unique_ptr<Engine> create(const Config& config, const ModelDescription& model,
                                        EngineOptions options = {});
  // Commits the last finished step, as flush() does, unless an error has stopped the engine before; what was done since
  // is discarded. It throws nothing: what goes wrong is said in the log, with the steps that are lost.
  virtual ~Engine() = default;

  // The last step done: 0 for a new run, the committed step after kResume, that of a snapshot.
  virtual std::uint64_t current_step() const = 0;
  // The factor by which the caller multiplies the next step's loss, or the gradient that backward begins with: in fp16
  // the loss scale, else 1. Gradients are pushed with the factor in them; the engine divides it out again, which is
  // exact for a power of two.
  virtual double loss_scale() const = 0;
  // The learning rate of the next step, if that is not skipped: skipped steps do not count for the schedule.
  virtual double next_learning_rate() const = 0;
  // Sets the learning rate of the next steps, in place of the configuration's schedule; a parameter group with a rate
  // of its own keeps its ratio to the optimizer's rate. This holds for the engine alone: neither store nor snapshot
  // keep it. Throws kInvalidArgument for a number that is no rate, and once gradients of the step have been pushed:
  // blocks may have been updated with the old rate.
  virtual void set_learning_rate(double rate) = 0;
  // Sets the two moment decays (betas) of Adam or Lion in the same way.
  virtual void set_betas(double beta1, double beta2) = 0;
  // The caller's blob of that step; empty for a new run.
  virtual std::vector<std::byte> blob() const = 0;
  virtual const Ledger& ledger() const = 0;
  // Human-readable: device, I/O engine, tiers, commit interval; one fact a line.
  virtual std::vector<std::string> describe() const = 0;
  // The seconds that a step should take: the plan's schedule with the rates of this machine's links, as measured at the
  // start, and with the shortest time that each visit took to compute. To be compared with StepReport::seconds. Empty
  // before the first step in the planned order. Not while a step is under way.
  virtual std::optional<double> predicted_step_seconds() const = 0;

  // Gives every weight its initial value (needed once, before step 1 of a new run without a snapshot) and commits step
  // 0.
  virtual void import_weights(const WeightSource& source) = 0;

  virtual DeviceKind device_kind() const = 0;
  virtual Stream& stream() = 0;  // a compute stream for callers without one of their own
  // Wraps a stream of the caller's for acquire() and the other calls that take one: a cudaStream_t (null is CUDA's
  // default stream). It must outlive the Stream that is returned, and that one must live until the step in which it was
  // used has ended, by step() or discard_step(). Throws kInvalidArgument on the host device.
  virtual std::unique_ptr<Stream> adopt_stream(void* native) = 0;
  virtual std::span<std::byte> workspace() = 0;
  virtual bool in_hbm(const void* data, std::size_t bytes) const = 0;

  // Acquiring the plan's first visit out of turn, while no lease is held, begins the plan again: an evaluation runs the
  // forward part alone, as often as it likes, and its blocks are still fetched in time. Where the description has no
  // visits, call discard_step() after an evaluation that comes before the first step.
  virtual Lease acquire(std::uint32_t block, Pass pass, Stream& stream) = 0;
  // Makes `stream` wait for the activation. Where activations leave HBM, uses come in the order of the description; a
  // step may be begun again from its first use (an evaluation that runs the forward part alone), everything else is
  // refused (kInvalidArgument) with nothing changed.
  virtual ActivationLease acquire_activation(std::uint32_t activation, Access access, Stream& stream) = 0;
  // Memory for the block's inner activations, always the same.
  virtual Insides insides(std::uint32_t block) = 0;
  // If no push of a step brings a gradient for a parameter, the update leaves the parameter out: weight and states stay
  // as they are, without decay, and the step does not count for its bias correction, which goes by the parameter's own
  // number of updates. Commits and snapshots keep these counts. Zeros are a gradient: they move a parameter. Throws
  // kUnsupported, with nothing changed, where the store is of a version that cannot keep them.
  virtual void push_gradient(const Gradient& gradient, Stream& stream) = 0;
  // Ends the step once what was enqueued for it has run: norm, clipping, and the update begins. A block's update is
  // made when the next forward pass acquires it, the commit, when due, before the next backward pass; flush(),
  // export_weights() and the engine's end make both at once. So a step is durable while the next one runs. `blob` is
  // kept by the commit. When a gradient holds NaN or Inf: throws kNonFinite, with nothing changed; but in fp16, unless
  // the loss scale is at its minimum, the step is skipped: weights, states and the counts of optimizer and schedule
  // stay as they are, the loss scale drops, and the caller goes on with the next step. Throws kInvalidArgument when a
  // push is missing.
  virtual StepReport step(std::span<const std::byte> blob = {}) = 0;
  // Says how many micro-batches the next step has, over all ranks, when it has fewer than others, as an epoch's last
  // step may. With Config::sum_groups they are divided anew into as many parts, and among the ranks. A parameter still
  // expects all pushes that are described: push null for the missing micro-batches. Throws kInvalidArgument for a
  // number that the groups do not divide, or that is more than the configuration's, and once gradients of the step have
  // been pushed.
  virtual void set_micro_batches(std::uint32_t micro_batches) = 0;
  // Forgets what was done since step(): visits, and the gradients of all micro-batches. The next call begins the step
  // anew, with the bits of a run that was never interrupted: for callers that cannot finish a step, because of an
  // exception of their own, for example. Waits for the work that they enqueued before. Throws kInvalidArgument while a
  // lease is held, with nothing changed.
  virtual void discard_step() = 0;
  // Makes the current step durable, if it is not already.
  virtual void flush() = 0;

  // Streams every parameter out as fp32: the exact master (`exact`), or the 16-bit weight widened.
  virtual void export_weights(bool exact, const WeightSink& sink) = 0;
  // Begins a snapshot of the last finished step (spillway/snapshot.h) in a directory that is complete or not there,
  // whatever happens meanwhile. After step(), not inside a step. Takes the space of all of it (12 bytes per trainable
  // parameter with Adam) and returns: training goes on. Each tile is written to the snapshot when the next forward pass
  // updates it, and tiles without an update are read in between; all of it is synced and gets its name with the commit,
  // before the next backward pass. So that step is longer by the part of writing 12 bytes per parameter that compute
  // does not hide; StepReport::stalls says how much (StallCause::kSave). Where there is no update left to be made
  // (gradients in HBM) the call itself writes all of it.
  virtual void begin_save(const std::filesystem::path& directory, const SaveOptions& options) = 0;
  // Ends a snapshot that is under way, by making the rest of the update. Throws if the snapshot has failed (kIo,
  // kExists, kBusy: errors of the directory alone; nothing is left behind, and training may go on). The next
  // begin_save() does the same first. A failure that nobody asked about is logged when the engine ends.
  virtual void finish_save() = 0;
  // Both: the snapshot is whole when it returns.
  void save(const std::filesystem::path& directory, const SaveOptions& options = {}) {
    begin_save(directory, options);
    finish_save();
  }
  // Goes on from a snapshot of this model: its step takes the place of this one, as the store's next commit, and what
  // was done since step() is forgotten, as is a rate of set_learning_rate(). A snapshot that does not fit or is damaged
  // is refused (kNotFound, kCorrupt, kInvalidArgument, kUnsupported, kIo) with nothing changed: all of it is verified
  // first, so it is read twice. If the store fails later, the engine is stopped, and the store is at its last commit.
  // Throws kInvalidArgument while a lease is held, and on every rank where their snapshots are not the same.
  virtual void load_snapshot(const std::filesystem::path& directory) = 0;

  // Hands out the values of one parameter, in order, as fp32. Master and moments are those of the last finished step. A
  // gradient is what step() would take: complete, rounded to the weights' type and multiplied by loss_scale(). Several
  // ranks ask for the same together, and each gets all of it. Throws kInvalidArgument for values that the parameter
  // does not have, where ranks ask for different values, and where another rank's sink has failed; kUnsupported for a
  // gradient of a block that is updated inside backward, or that lies on NVMe.
  virtual void read_values(ParameterValues of, std::uint32_t block, std::uint32_t parameter,
                           const WeightSink& sink) = 0;
  // Writes other values in their place; everything else stays, of this parameter too: its states, when the master is
  // written. Master and moments become those of the last finished step and are committed with it at once; a gradient
  // counts in norm and update. `values`: all of the parameter's, in order. Several ranks write together: the values of
  // rank `from` are taken, and the others' are ignored. Values that are not finite are refused with nothing changed.
  // Throws as read_values(), and kInvalidArgument while a lease is held and for another number of values.
  virtual void write_values(ParameterValues of, std::uint32_t block, std::uint32_t parameter,
                            std::span<const float> values, std::uint32_t from = 0) = 0;

 protected:
  friend class Lease;
  friend class ActivationLease;
  // How an implementation hands out a lease, by a number of its own.
  Lease make_lease(std::uint32_t number, Stream& stream) { return Lease(this, number, stream); }
  virtual const void* weight_address(std::uint32_t lease, std::uint32_t parameter) const = 0;
  virtual void release(std::uint32_t lease, Stream& stream) = 0;
  ActivationLease make_activation_lease(std::uint32_t place, std::byte* data, Stream& stream) {
    return {this, place, data, stream};
  }
  virtual void release_activation(std::uint32_t place, Stream& stream) = 0;
};

}  // namespace spillway
