// One training step of a model, driven through the engine.
//
// All micro-batches go through a block before the next block is acquired, so weights cross each link once per pass and
// every gradient is pushed once (or once for each of Config::sum_groups), whatever the accumulation. The input of each
// block is kept, as an activation that the engine finds a place for; a block's inside too, where the engine has room
// for it, else it is computed again in backward. All other memory is the engine's workspace. Both are laid out here
// from shapes alone.
//
// Several ranks do a step's micro-batches together, each as many, in the order of ranks. What a micro-batch computes
// does not depend on who does it.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <span>
#include <vector>

#include "spillway/communicator.h"
#include "spillway/config.h"
#include "spillway/engine.h"
#include "tools/models/gpt2/model.h"
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
  bool documents = false;         // rows hold several, which do not see each other
};
// Those of a run with this configuration, whose threads are set: to compute_threads(), where it leaves them open.
TrainerOptions trainer_options(const Config& config, DeviceKind device, std::uint32_t sequence,
                               Communicator* ranks = nullptr);

// Of a step on this rank: micro_batch * accumulation rows of `sequence` tokens.
struct StepRows {
  std::span<const std::uint32_t> inputs;   // every one below the vocabulary
  std::span<const std::uint32_t> targets;  // so, or kNoTarget, of which no loss is taken
  // With TrainerOptions::documents: of each token, the first one of its document in its row.
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

 private:
  // What a layer computes from its input for one micro-batch, and backward needs. Tensors are [M][…]; null: the model
  // has no such thing.
  struct Inside {
    std::byte *norm1, *projected, *qkv, *attention, *attended, *middle, *norm2, *mlp, *activation, *fed;
    float *statistics1, *statistics2, *query_statistics, *key_statistics, *attended_statistics, *fed_statistics;
    float* log_sums;
    Inside(Carver& carver, const Trainer& trainer);
  };
  // Places in the workspace. What follows a pass is [accumulation][M].
  struct Workspace {
    std::uint32_t *inputs, *targets;
    std::uint32_t *starts, *positions;  // of documents
    float* losses;                      // of all ranks' micro-batches
    std::byte* normed;                  // of the head
    float* normed_statistics;
    std::byte *dinner, *dnorm, *dqkv, *dattention;
    std::byte* residual;            // what is added behind its norm
    std::vector<float*> rotations;  // of TrainedModel
    // Gradients: of the layer in work; of the head, and of the embedding to the end of the step: one, where it is tied.
    std::vector<std::byte*> layer_gradients;
    float *dhead_weight, *dtoken_weight, *dposition_weight, *dfinal_norm_weight, *dfinal_norm_bias;
    std::byte* scratch;
    Workspace(Carver& carver, const Trainer& trainer);
  };
  // A layer acquired for backward, with one of its micro-batches.
  struct LayerVisit {
    const Lease& lease;
    const TrainedLayer& layer;
    std::uint32_t index, micro_batch;
    const Inside& inside;
  };
  // What goes up and down in a step: host memory in pages of its own, for the device registers them.
  struct Exchange {
    struct Free {
      void operator()(std::byte* memory) const { std::free(memory); }
    };
    std::size_t bytes;
    std::unique_ptr<std::byte, Free> memory;
    std::span<std::uint32_t> inputs, targets, starts, positions;  // the last two: of documents
    std::span<float> losses;
    std::span<float> rotations;  // of TrainedModel, one behind the other
    // Tokens of a step on this rank, and on all of them.
    Exchange(std::size_t tokens, std::size_t all_tokens, bool documents, const std::vector<Rotation>& rotations);
  };

  // The input of a layer, for `access`; that of the layer behind the last one becomes the gradient that flows backward.
  ActivationLease input(std::uint32_t layer, std::uint32_t micro_batch, Access access) const;
  void describe_activations(ModelDescription& description) const;
  Inside inside(std::uint32_t layer, std::uint32_t micro_batch) const;
  void embed();
  void forward(std::uint32_t layer);
  void head();
  void backward(std::uint32_t layer);
  void finish_embedding();
  // In trainer_layer.cc.
  void layer_attention(const TrainedLayer& layer, const Lease& lease, const std::byte* x, const Inside& inside,
                       std::uint32_t micro_batch) const;
  void layer_mlp_inner(const TrainedLayer& layer, const Lease& lease, const Inside& inside) const;
  void mlp_product(const TrainedLayer& layer, const Lease& lease, const Inside& inside, const std::byte* residual,
                   std::byte* y) const;
  void layer_mlp_fed(const TrainedLayer& layer, const Lease& lease, const Inside& inside) const;
  void layer_mlp_out(const TrainedLayer& layer, const Lease& lease, const Inside& inside, std::byte* out) const;
  void layer_backward(const LayerVisit& visit, const std::byte* x, std::byte* d) const;
  void norm(const NormTensors& norm, const Lease& lease, const void* x, void* out, float* statistics) const;
  void products(std::span<const ProductTensors> products, const Lease& lease, const void* x, std::byte* y,
                std::size_t y_stride) const;
  void product_gradient(const LayerVisit& visit, const ProductTensors& product, std::uint32_t in, const void* x,
                        const std::byte* dy, std::size_t dy_stride) const;
  // And dx, the sum over all of them.
  void products_gradient(const LayerVisit& visit, std::span<const ProductTensors> products, std::uint32_t in,
                         const void* x, const std::byte* dy, std::size_t dy_stride, std::byte* dx) const;
  // Through a norm of whole rows, whichever the model has: dx is that + residual.
  struct NormBackward {
    const void *weight, *x, *dout;
    const float* statistics;
    const void* residual;  // may be null
    void *dx, *dweight, *dbias;
    DType gradient;
    bool accumulate;
  };
  void norm_backward(const NormBackward& op) const;
  // The same of a layer's.
  void norm_gradient(const LayerVisit& visit, const NormTensors& norm, const void* x, const float* statistics,
                     const std::byte* dout, const std::byte* residual, std::byte* dx) const;
  void head_norm(ParameterIndex weight, const Lease& lease, const Inside& inside, std::size_t column,
                 bool is_key) const;
  void head_norm_gradient(const LayerVisit& visit, ParameterIndex weight, std::size_t column, bool is_key) const;
  void rotate(const TrainedLayer& layer, std::byte* qkv, std::uint32_t micro_batch, bool backward) const;
  AttentionRules rules(const TrainedLayer& layer, std::uint32_t micro_batch) const;
  std::byte* gradient_of(ParameterIndex parameter) const { return work_->layer_gradients[parameter]; }
  void push_layer(const LayerVisit& visit, ParameterIndex parameter) const;

  void push(std::uint32_t block, std::uint32_t parameter, const void* data, DType type,
            std::uint32_t micro_batch) const;
  void push_final_norm(std::uint32_t micro_batch) const;
  bool tied() const { return model_.head_block == kEmbeddingBlock; }
  void gather_losses() const;
  // Of the micro-batches that are summed here before they are pushed; parts are summed by the engine.
  bool begins_part(std::uint32_t micro_batch) const { return micro_batch % part() == 0; }
  bool ends_part(std::uint32_t micro_batch) const { return begins_part(micro_batch + 1); }
  std::uint32_t part() const { return options_.accumulation / own_parts(); }
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
  DType gradient_type_;  // of layer gradients: fp32 where they are summed, else rounded as they are computed
  Exchange exchange_;    // outlives the operations
  std::vector<std::uint64_t> loss_bytes_;  // of each rank
  std::unique_ptr<Ops> ops_;
  std::vector<Parameter> layer_parameters_;               // those of every layer
  std::uint64_t workspace_bytes_ = 0, inside_bytes_ = 0;  // of one micro-batch's inside

  std::uint64_t target_count_ = 0;  // of the step
  Engine* engine_ = nullptr;
  Stream* stream_ = nullptr;
  std::unique_ptr<Workspace> work_;
};

}  // namespace spillway::models
