// One training step of a model, driven through the engine.
//
// All micro-batches go through a block before the next block is acquired, so weights cross each link once per pass and
// every gradient is pushed once (or once for each of Config::sum_groups), whatever the accumulation. The input of each
// block is kept, as an activation that the engine finds a place for; a block's inside too, where the engine has room
// for it, else it is computed again in backward. All other memory is the engine's workspace. Both are laid out here
// from shapes alone.
//
// A micro-batch of many tokens goes through a block slice by slice, of whole rows, or of parts of one. Of a row that is
// in parts memory holds keys and values, and in backward their gradients; all else is of one slice. Backward begins
// with a row's last part, and finds all keys and values of the row before.
//
// Several ranks do a step's micro-batches together, each as many, in the order of ranks. What a micro-batch computes
// does not depend on who does it.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "spillway/communicator.h"
#include "spillway/config.h"
#include "spillway/engine.h"
#include "tools/models/gpt2/model.h"
#include "tools/models/layer_forward.h"
#include "tools/models/ops/carver.h"
#include "tools/models/ops/ops.h"
#include "tools/models/trained_model.h"

namespace spillway::models {

struct TrainerOptions {
  DeviceKind device = DeviceKind::kHost;
  DType type = DType::kFloat32;
  // Rows of a micro-batch; micro-batches of a step on this rank; Config::sum_groups; tokens of a row.
  std::uint32_t micro_batch = 1, accumulation = 1, parts = 1, sequence = 0;
  unsigned threads = 1;  // at least those of the engine
  Fusion fusion = Fusion::kAuto;
  Communicator* ranks = nullptr;  // as EngineOptions::communicator
  std::uint32_t rank_count = 1;   // without `ranks`: of the run that is planned, which nothing is attached to
  std::uint32_t slice = 0;        // tokens of a slice at the most, 128 or more; 0: no slices
};
// Those of a run with this configuration, whose threads are set: to compute_threads(), where it leaves them open.
TrainerOptions trainer_options(const Config& config, DeviceKind device, std::uint32_t sequence,
                               Communicator* ranks = nullptr);

// Of a step on this rank: micro_batch * accumulation rows of `sequence` tokens.
struct StepRows {
  std::span<const std::uint32_t> inputs;   // every one below the vocabulary
  std::span<const std::uint32_t> targets;  // so, or kNoTarget, of which no loss is taken
  // Where rows hold several documents, which do not see each other: of each token, the first one of its document in its
  // row. Not of a model with learned positions.
  std::span<const std::uint32_t> starts = {};
  std::uint64_t target_count = 0;  // of all ranks' rows
};

class Trainer {
 public:
  Trainer(TrainedModel model, const TrainerOptions& options);
  Trainer(const ModelConfig& model, const TrainerOptions& options);  // a GPT-2

  // What the engine must be created with.
  ModelDescription description() const;
  std::vector<std::string> describe() const { return ops_->describe(); }
  // Once, before the first step; the engine must outlive this object.
  void attach(Engine& engine);

  // Forward and backward over this rank's micro-batches of a step. Returns the mean loss of all ranks' targets, which
  // has the same bits however many ranks they are shared by; Engine::step() is the caller's.
  double run_step(const StepRows& rows);
  // The same, of rows of sequence + 1 tokens each: all but the last are inputs, all but the first targets.
  double run_step(std::span<const std::uint32_t> rows);

  // Forward passes between two steps, of which nothing is learned. `next`: the rows of one, called until it gives none;
  // those of a pass that has too few are filled up with rows without targets. Returns the mean loss of all targets,
  // which has the same bits however the rows are cut into passes and shared by ranks. The steps have the bits that they
  // have without.
  using NextRows = std::function<std::optional<StepRows>()>;
  double evaluate(const NextRows& next);

 private:
  // Tokens that go through a block together: a micro-batch, or some of it.
  struct Slice {
    std::uint32_t micro_batch, index;  // index: in its micro-batch
    std::uint32_t first, count;        // of the micro-batch's tokens
    std::uint32_t position;            // of its first token in its row
    bool begins, ends;                 // the first and the last one of a part of the step that is pushed by itself
    bool ends_row;                     // the last of a row's parts, with which backward begins
  };
  using Inside = LayerForward::Inside;
  // Places in the workspace. What follows a pass is [accumulation][M].
  struct Workspace {
    std::uint32_t *inputs, *targets;
    std::uint32_t *starts, *positions;  // of documents; positions: of rows in parts, too. Null with learned ones
    float* losses;                      // of all ranks' micro-batches
    // Of a row in parts: keys and values, [sequence][2][kv_heads * head_width], and their gradients.
    std::byte* keys;
    float* dkeys;
    std::byte* inside;  // where a micro-batch has several slices, which are computed again in backward
    std::byte* normed;  // of the head
    float* normed_statistics;
    std::byte *dinner, *dnorm, *dqkv, *dattention;
    LayerForward::Memory layer;  // residual: backward's, too
    // Gradients: of the layer in work; of the head, and of the embedding. They take turns in the same memory where the
    // head's ends before layers; else it is the embedding's as well, to the end of the step.
    // Null, and none, where adapters alone are trained.
    std::vector<std::byte*> layer_gradients;
    float *dhead_weight = nullptr, *dtoken_weight = nullptr, *dposition_weight = nullptr;
    float *dfinal_norm_weight = nullptr, *dfinal_norm_bias = nullptr;
    // Of adapters: between their two products backward; and gradients by parameter, of the layer in work.
    std::byte* dadapted = nullptr;
    std::vector<std::byte*> adapter_gradients;
    std::byte* scratch;
    Workspace(Carver& carver, const Trainer& trainer);
    void take_gradients(Carver& carver, const Trainer& trainer);
    void take_adapters(Carver& carver, const Trainer& trainer);
  };
  // A layer acquired for backward, with a slice of one of its micro-batches.
  struct LayerVisit : LayerForward::Visit {
    std::uint32_t index;
    const Slice& slice;
  };
  // What goes up and down in a step: host memory in pages of its own, for the device registers them.
  struct Exchange {
    struct Free {
      void operator()(std::byte* memory) const { std::free(memory); }
    };
    std::size_t bytes;
    std::unique_ptr<std::byte, Free> memory;
    std::span<std::uint32_t> inputs, targets, starts, positions;  // of Workspace
    std::span<float> losses;
    std::span<float> rotations;  // of TrainedModel, one after the other
    // Tokens of a step on this rank, and on all of them.
    Exchange(std::size_t tokens, std::size_t all_tokens, bool documents, std::size_t rotation_values);
  };

  // In trainer_slices.cc.
  static Shape sliced_shape(const TrainedModel& model, const TrainerOptions& options);
  void make_slices();
  std::span<const Slice> slices_before(const Slice& slice) const;
  std::uint32_t kept_input(std::uint32_t layer) const;
  std::uint32_t activation(std::uint32_t layer, const Slice& slice) const;
  void describe_activations(ModelDescription& description) const;

  // The input of a layer, for `access`; that of the layer after the last one becomes the gradient that flows backward.
  ActivationLease input(std::uint32_t layer, const Slice& slice, Access access) const;
  Inside inside(std::uint32_t layer, const Slice& slice) const;
  LayerForward::Visit visit(const Lease& lease, std::uint32_t layer, const Slice& slice) const;
  void embed();
  void forward(std::uint32_t layer);
  void head();
  void backward(std::uint32_t layer);
  void keys_of_row(const LayerVisit& last) const;
  void finish_embedding();
  // What a step and an evaluation have in common.
  void bring(const StepRows& rows);
  double add_losses(double sum) const;
  // In trainer_evaluate.cc.
  void evaluate_head(const Lease& lease) const;
  // In trainer_layer.cc.
  void layer_backward(const LayerVisit& visit, const std::byte* x, std::byte* d) const;
  // In trainer_products.cc. Members as of LinearBackwardInput.
  struct ProductBackward {
    std::uint32_t in;
    const void* x;
    const std::byte* dy;
    std::size_t dy_stride = 0;
    std::byte* dx;
    const void* gelu_before = nullptr;
    const void* residual = nullptr;
  };
  // Of weight and bias, or of the adapter: pushed when all slices of a part of the step were seen. And dx.
  void product_gradient(const LayerVisit& visit, const ProductTensors& product, const ProductBackward& op) const;
  // dx is the sum over all of them.
  void products_gradient(const LayerVisit& visit, std::span<const ProductTensors> products, std::uint32_t in,
                         const void* x, const std::byte* dy, std::size_t dy_stride, std::byte* dx) const;
  void weight_gradient(const LayerVisit& visit, const ProductTensors& product, const ProductBackward& op) const;
  void adapter_gradient(const LayerVisit& visit, const ProductTensors& product, const ProductBackward& op) const;
  void push_adapter(const LayerVisit& visit, ParameterIndex parameter) const;
  // From the first layer of a pass to its last.
  void hold_adapters(Pass pass);
  struct AdaptersEnd {  // whatever happens
    std::optional<Lease>& lease;
    ~AdaptersEnd() { lease.reset(); }
  };
  // Through a norm of whole rows, whichever the model has: dx is that + residual.
  struct NormBackward {
    const void *weight, *x, *dout;
    const float* statistics;
    const void* residual;  // may be null
    void *dx, *dweight, *dbias;
    DType gradient;
    bool accumulate;
    std::uint32_t count;
  };
  void norm_backward(const NormBackward& op) const;
  // The same of a layer's.
  void norm_gradient(const LayerVisit& visit, const NormTensors& norm, const void* x, const float* statistics,
                     const std::byte* dout, const std::byte* residual, std::byte* dx) const;
  void head_norm_gradient(const LayerVisit& visit, ParameterIndex weight, std::size_t column, bool is_key) const;
  // Null where it is frozen.
  std::byte* gradient_of(ParameterIndex parameter) const {
    return trains_base() ? work_->layer_gradients[parameter] : nullptr;
  }
  bool trains_base() const { return !model_.adapters; }
  // The last layer that goes backward.
  std::uint32_t lowest() const { return model_.adapters ? model_.adapters->lowest : 0; }
  void push_layer(const LayerVisit& visit, ParameterIndex parameter) const;

  void push(std::uint32_t block, std::uint32_t parameter, const void* data, DType type,
            std::uint32_t micro_batch) const;
  void push_final_norm(std::uint32_t micro_batch) const;
  bool tied() const { return model_.head_block == kEmbeddingBlock; }
  // Its gradient is handed over by itself. That of a tied one goes on to the embedding, but not from part to part.
  bool head_ends_before_layers() const { return !tied() || options_.parts > 1; }
  void gather_losses() const;
  // Micro-batches that are summed here before they are pushed; parts are summed by the engine.
  std::uint32_t part() const { return options_.accumulation / own_parts(); }
  bool in_slices() const { return shape_.slice_tokens() < shape_.tokens(); }
  bool rows_in_parts() const { return shape_.slice_tokens() < shape_.sequence; }
  bool may_have_documents() const { return !model_.position_weight; }
  bool needs_positions() const { return may_have_documents() && (documents_ || rows_in_parts()); }
  // Of a slice's first token, in what has all tokens of a step on this rank.
  std::size_t token(const Slice& slice) const { return slice.micro_batch * shape_.tokens() + slice.first; }
  // A rank has whole parts. Where the step is not cut, each rank's own sum is one.
  std::uint32_t own_parts() const { return options_.parts == 1 ? 1 : options_.parts / ranks(); }
  std::uint32_t ranks() const { return options_.ranks == nullptr ? options_.rank_count : options_.ranks->ranks(); }
  // Of all ranks' micro-batches, the first one of this rank.
  std::uint32_t first_micro_batch() const {
    return options_.ranks == nullptr ? 0 : options_.ranks->rank() * options_.accumulation;
  }

  TrainedModel model_;
  TrainerOptions options_;
  Shape shape_;
  std::vector<Slice> slices_, backward_slices_;  // of a step on this rank; in the order of layers backward
  std::uint32_t slices_per_micro_batch_ = 1;
  DType gradient_type_;  // of layer gradients: fp32 where they are summed, else rounded as they are computed
  Exchange exchange_;    // outlives the operations
  std::vector<std::uint64_t> loss_bytes_;  // of each rank
  std::unique_ptr<Ops> ops_;
  LayerForward layer_forward_;
  std::vector<Parameter> layer_parameters_;               // those of every layer
  std::uint64_t workspace_bytes_ = 0, inside_bytes_ = 0;  // of a micro-batch's inside, without slices

  std::uint64_t target_count_ = 0;  // of the step
  bool documents_ = false;          // the rows in work have several
  Engine* engine_ = nullptr;
  Stream* stream_ = nullptr;
  std::unique_ptr<Workspace> work_;
  std::optional<Lease> adapters_;  // while a pass is under way
};

}  // namespace spillway::models
