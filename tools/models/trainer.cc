#include "tools/models/trainer.h"

#include <algorithm>
#include <new>
#include <tuple>

#include "spillway/error.h"

namespace spillway::models {

TrainerOptions trainer_options(const Config& config, DeviceKind device, std::uint32_t sequence, Communicator* ranks) {
  SPILLWAY_CHECK(config.threads > 0, "the engine must start as many threads as the operations are made for");
  return {.device = device,
          .type = config.weights,
          .micro_batch = config.micro_batch,
          .accumulation = config.gradient_accumulation,
          .parts = config.sum_groups,
          .sequence = sequence,
          .threads = config.threads,
          .ranks = ranks};
}

// A layer acquired for backward, with one of its micro-batches.
struct Trainer::LayerVisit {
  const Lease& lease;
  std::uint32_t layer, micro_batch;
  const Inside& inside;
};

Trainer::Exchange::Exchange(std::size_t tokens, std::size_t all_tokens)
    : bytes(align_up<std::size_t>((2 * tokens + all_tokens) * sizeof(std::uint32_t), 4096)),
      memory(static_cast<std::byte*>(std::aligned_alloc(4096, bytes))) {
  if (memory == nullptr) throw std::bad_alloc();
  auto* words = reinterpret_cast<std::uint32_t*>(memory.get());
  inputs = {words, tokens};
  targets = {words + tokens, tokens};
  losses = {reinterpret_cast<float*>(words + 2 * tokens), all_tokens};
}

Trainer::Inside::Inside(Carver& carver, const Shape& shape, std::size_t log_sum_count) {
  const std::size_t m = shape.tokens(), e = size_of(shape.type);
  const auto tensor = [&](std::size_t columns) { return carver.take<std::byte>(m * columns * e); };
  norm1 = tensor(shape.width);
  qkv = tensor(3 * std::size_t{shape.width});
  attention = tensor(shape.width);
  middle = tensor(shape.width);
  norm2 = tensor(shape.width);
  mlp = tensor(shape.inner);
  activation = tensor(shape.inner);
  statistics1 = carver.take<float>(2 * m);
  statistics2 = carver.take<float>(2 * m);
  log_sums = carver.take<float>(log_sum_count);
}

Trainer::Workspace::Workspace(Carver& carver, const Trainer& trainer) {
  const Shape& shape = trainer.shape_;
  const std::size_t micro_batches = trainer.options_.accumulation, m = shape.tokens(), e = size_of(shape.type);
  const std::size_t width = shape.width, inner = shape.inner;
  const auto tensor = [&](std::size_t columns) { return carver.take<std::byte>(m * columns * e); };
  scratch = carver.take<std::byte>(trainer.ops_->scratch_bytes());  // first: it wants alignment to 4096
  inputs = carver.take<std::uint32_t>(micro_batches * m);
  targets = carver.take<std::uint32_t>(micro_batches * m);
  losses = carver.take<float>(trainer.ranks() * micro_batches * m);
  normed = tensor(width);
  normed_statistics = carver.take<float>(2 * m);
  dinner = tensor(inner);
  dnorm = tensor(width);
  dqkv = tensor(3 * width);

  // Summed gradients all live until the last micro-batch; others only until they are pushed, so matrices take turns.
  const std::size_t g = size_of(trainer.gradient_type_);
  std::size_t largest = 0;
  for (const auto& parameter : trainer.layer_parameters_) largest = std::max<std::size_t>(largest, elements(parameter));
  std::byte* shared = micro_batches == 1 ? carver.take<std::byte>(largest * g) : nullptr;
  for (std::uint32_t p = 0; p < kLayerParameters; ++p) {
    const auto& parameter = trainer.layer_parameters_[p];
    const bool takes_turns = micro_batches == 1 && parameter.shape.size() == 2;
    layer_gradients[p] = takes_turns ? shared : carver.take<std::byte>(elements(parameter) * g);
  }
  dtoken_weight = carver.take<float>(shape.vocabulary * width);
  dposition_weight = carver.take<float>(shape.positions * width);
  dfinal_norm_weight = carver.take<float>(width);
  dfinal_norm_bias = carver.take<float>(width);
}

Trainer::Trainer(const ModelConfig& model, const TrainerOptions& options)
    : model_(model),
      options_(options),
      shape_(shape_of(model, options.type, options.micro_batch, options.sequence)),
      gradient_type_(options.accumulation * std::uint64_t{ranks()} == 1 ? options.type : DType::kFloat32),
      exchange_(options.accumulation * shape_.tokens(), ranks() * options.accumulation * shape_.tokens()),
      loss_bytes_(ranks(), exchange_.losses.size_bytes() / ranks()),
      ops_(create_ops(options.device, shape_, options.threads, options.fusion)),
      layer_parameters_(describe_model(model, 0).blocks[layer_block(0)].parameters) {
  SPILLWAY_CHECK(options.sequence > 0 && options.sequence <= model.positions, "a row fits the model's positions");
  Carver measure(nullptr), measure_inside(nullptr);
  Workspace(measure, *this);
  workspace_bytes_ = measure.used();
  Inside(measure_inside, shape_, ops_->attention_log_sums());
  inside_bytes_ = measure_inside.used();
}

ModelDescription Trainer::description() const {
  ModelDescription description = describe_model(model_, workspace_bytes_);
  for (std::uint32_t l = 0; l < model_.layers; ++l) {
    description.blocks[layer_block(l)].inside_bytes = inside_bytes_;
  }
  description.micro_batches = options_.accumulation;
  for (auto& block : description.blocks) {
    for (auto& parameter : block.parameters) parameter.pushes = own_parts();
  }
  Parameter& tied = description.blocks[kEmbeddingBlock].parameters[kTokenWeight];
  tied.in_order = false;
  if (options_.parts > 1) tied.pushes = 2 * own_parts();
  describe_activations(description);
  return description;
}

// In the order of run_step().
void Trainer::describe_activations(ModelDescription& description) const {
  const std::uint32_t layers = model_.layers, micro_batches = options_.accumulation;
  const std::uint64_t bytes = shape_.tokens() * shape_.width * size_of(shape_.type);
  description.activations.assign((layers + std::size_t{1}) * micro_batches, {.bytes = bytes});
  description.activations_held = 2;
  std::uint32_t visit = 0;
  const auto use = [&](std::uint32_t layer, std::uint32_t b, Access access) {
    description.activation_uses.push_back({layer * micro_batches + b, access, visit});
  };
  for (std::uint32_t b = 0; b < micro_batches; ++b) use(0, b, Access::kWrite);
  for (std::uint32_t l = 0; l < layers; ++l) {
    ++visit;
    for (std::uint32_t b = 0; b < micro_batches; ++b) {
      use(l, b, Access::kRead);
      use(l + 1, b, Access::kWrite);
    }
  }
  ++visit;
  for (std::uint32_t b = 0; b < micro_batches; ++b) use(layers, b, Access::kUpdate);
  for (std::uint32_t l = layers; l-- > 0;) {
    ++visit;
    for (std::uint32_t b = 0; b < micro_batches; ++b) {
      use(l, b, Access::kRead);
      use(layers, b, Access::kUpdate);
    }
  }
  ++visit;
  for (std::uint32_t b = 0; b < micro_batches; ++b) use(layers, b, Access::kRead);
}

void Trainer::attach(Engine& engine) {
  SPILLWAY_CHECK(options_.ranks != nullptr || ranks() == 1, "several ranks need a communicator");
  engine_ = &engine;
  stream_ = &engine.stream();
  Carver carver(engine.workspace().data());
  work_ = std::make_unique<Workspace>(carver, *this);
  SPILLWAY_CHECK(engine.workspace().size() >= carver.used(), "the engine hands out what the description asked for");
  ops_->bind(engine, {work_->scratch, ops_->scratch_bytes()});
  ops_->register_host({exchange_.memory.get(), exchange_.bytes});
}

ActivationLease Trainer::input(std::uint32_t layer, std::uint32_t micro_batch, Access access) const {
  return engine_->acquire_activation(layer * options_.accumulation + micro_batch, access, *stream_);
}

Trainer::Inside Trainer::inside(std::uint32_t layer, std::uint32_t micro_batch) const {
  const Insides insides = engine_->insides(layer_block(layer));
  Carver carver(insides.memory.data() + (insides.kept ? micro_batch * inside_bytes_ : 0));
  return {carver, shape_, ops_->attention_log_sums()};
}

void Trainer::push(std::uint32_t block, std::uint32_t parameter, const void* data, DType type,
                   std::uint32_t micro_batch) const {
  engine_->push_gradient({.block = block,
                          .parameter = parameter,
                          .data = data,
                          .dtype = type,
                          .micro_batch = first_micro_batch() + micro_batch},
                         *stream_);
}

double Trainer::run_step(std::span<const std::uint32_t> rows) {
  const std::size_t t = shape_.sequence;
  const auto [inputs, targets, losses] = std::tuple(exchange_.inputs, exchange_.targets, exchange_.losses);
  SPILLWAY_CHECK(rows.size() == inputs.size() / t * (t + 1), "a step takes micro_batch * accumulation rows");
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    const std::size_t token = i / t * (t + 1) + i % t;
    inputs[i] = rows[token];
    targets[i] = rows[token + 1];
  }
  ops_->upload(inputs.data(), work_->inputs, inputs.size_bytes(), *stream_);
  ops_->upload(targets.data(), work_->targets, targets.size_bytes(), *stream_);

  embed();
  for (std::uint32_t l = 0; l < model_.layers; ++l) forward(l);
  head();
  for (std::uint32_t l = model_.layers; l-- > 0;) backward(l);
  finish_embedding();

  gather_losses();
  ops_->download(work_->losses, losses.data(), losses.size_bytes(), *stream_);
  stream_->synchronize();
  if (options_.ranks != nullptr) options_.ranks->throw_if_failed();
  double sum = 0;
  for (const float loss : losses) sum += loss;
  return sum / static_cast<double>(losses.size());
}

// All of them go to every rank, so that each adds them up in the order of micro-batches, as one rank does.
void Trainer::gather_losses() const {
  if (ranks() == 1) return;
  options_.ranks->all_gather(std::as_writable_bytes(std::span(work_->losses, exchange_.losses.size())), loss_bytes_,
                             kEmbeddingBlock, *stream_);
}

void Trainer::embed() {
  Lease lease = engine_->acquire(kEmbeddingBlock, Pass::kForward, *stream_);
  for (std::uint32_t b = 0; b < options_.accumulation; ++b) {
    const ActivationLease out = input(0, b, Access::kWrite);
    ops_->run(Embedding{work_->inputs + b * shape_.tokens(), lease.weight(kTokenWeight), lease.weight(kPositionWeight),
                        out.data()},
              *stream_);
  }
  lease.release();
}

// middle = x + projection of the attention over norm(x)
void Trainer::layer_attention(const Lease& lease, const std::byte* x, const Inside& w) const {
  const std::uint32_t width = shape_.width;
  ops_->run(LayerNorm{x, lease.weight(kNorm1Weight), lease.weight(kNorm1Bias), w.norm1, w.statistics1}, *stream_);
  ops_->run(
      Linear{width, 3 * width, w.norm1, lease.weight(kAttentionWeight), lease.weight(kAttentionBias), nullptr, w.qkv},
      *stream_);
  ops_->run(Attention{w.qkv, w.attention, w.log_sums}, *stream_);
  ops_->run(Linear{width, width, w.attention, lease.weight(kAttentionOutWeight), lease.weight(kAttentionOutBias), x,
                   w.middle},
            *stream_);
}

// activation = gelu(mlp), mlp = first product over norm(middle)
void Trainer::layer_mlp_inner(const Lease& lease, const Inside& w) const {
  ops_->run(LayerNorm{w.middle, lease.weight(kNorm2Weight), lease.weight(kNorm2Bias), w.norm2, w.statistics2},
            *stream_);
  ops_->run(LinearGelu{shape_.width, shape_.inner, w.norm2, lease.weight(kMlpWeight), lease.weight(kMlpBias), w.mlp,
                       w.activation},
            *stream_);
}

void Trainer::forward(std::uint32_t layer) {
  Lease lease = engine_->acquire(layer_block(layer), Pass::kForward, *stream_);
  for (std::uint32_t b = 0; b < options_.accumulation; ++b) {
    const ActivationLease x = input(layer, b, Access::kRead), out = input(layer + 1, b, Access::kWrite);
    const Inside w = inside(layer, b);
    layer_attention(lease, x.data(), w);
    layer_mlp_inner(lease, w);
    ops_->run(Linear{shape_.inner, shape_.width, w.activation, lease.weight(kMlpOutWeight), lease.weight(kMlpOutBias),
                     w.middle, out.data()},
              *stream_);
  }
  lease.release();
}

// Final norm, loss, and the way back through both.
void Trainer::head() {
  const Workspace& w = *work_;
  Lease lease = engine_->acquire(kEmbeddingBlock, Pass::kBackward, *stream_);
  const float scale = static_cast<float>(engine_->loss_scale() / static_cast<double>(exchange_.losses.size()));
  float* const losses = w.losses + first_micro_batch() * shape_.tokens();
  for (std::uint32_t b = 0; b < options_.accumulation; ++b) {
    const std::size_t first = b * shape_.tokens();
    const ActivationLease x = input(model_.layers, b, Access::kUpdate);
    ops_->run(LayerNorm{x.data(), lease.weight(kFinalNormWeight), lease.weight(kFinalNormBias), w.normed,
                        w.normed_statistics},
              *stream_);
    ops_->run(HeadLoss{w.normed, w.targets + first, lease.weight(kTokenWeight), scale, losses + first, w.normed,
                       w.dtoken_weight, !begins_part(b)},
              *stream_);
    ops_->run(LayerNormBackward{x.data(), lease.weight(kFinalNormWeight), w.normed, w.normed_statistics, nullptr,
                                x.data(), w.dfinal_norm_weight, w.dfinal_norm_bias, DType::kFloat32, !begins_part(b)},
              *stream_);
    if (options_.parts == 1 || !ends_part(b)) continue;  // one part goes on to the embedding
    push(kEmbeddingBlock, kTokenWeight, w.dtoken_weight, DType::kFloat32, b);
    push_final_norm(b);
  }
  lease.release();
}

void Trainer::backward(std::uint32_t layer) {
  Lease lease = engine_->acquire(layer_block(layer), Pass::kBackward, *stream_);
  const bool kept = engine_->insides(layer_block(layer)).kept;
  for (std::uint32_t b = 0; b < options_.accumulation; ++b) {
    const ActivationLease x = input(layer, b, Access::kRead), d = input(model_.layers, b, Access::kUpdate);
    const Inside w = inside(layer, b);
    if (!kept) {
      layer_attention(lease, x.data(), w);
      layer_mlp_inner(lease, w);
    }
    layer_backward({lease, layer, b, w}, x.data(), d.data());
  }
  lease.release();
}

// Weight and bias gradient of a product; pushed when it has seen all micro-batches of a part.
void Trainer::linear_gradient(const LayerVisit& visit, LayerParameter weight, const void* x, const void* dy) const {
  const auto& shape = layer_parameters_[weight].shape;
  std::byte *dweight = work_->layer_gradients[weight], *dbias = work_->layer_gradients[weight + 1];
  ops_->run(LinearBackwardWeight{static_cast<std::uint32_t>(shape[0]), static_cast<std::uint32_t>(shape[1]), x, dy,
                                 dweight, dbias, gradient_type_, !begins_part(visit.micro_batch)},
            *stream_);
  if (!ends_part(visit.micro_batch)) return;
  push(layer_block(visit.layer), weight, dweight, gradient_type_, visit.micro_batch);
  push(layer_block(visit.layer), weight + 1, dbias, gradient_type_, visit.micro_batch);
}

// Adds the gradient through a norm (of dnorm) to the residual stream's gradient dx.
void Trainer::norm_gradient(const LayerVisit& visit, LayerParameter weight, const void* x, const float* statistics,
                            std::byte* dx) const {
  std::byte *dweight = work_->layer_gradients[weight], *dbias = work_->layer_gradients[weight + 1];
  ops_->run(LayerNormBackward{x, visit.lease.weight(weight), work_->dnorm, statistics, dx, dx, dweight, dbias,
                              gradient_type_, !begins_part(visit.micro_batch)},
            *stream_);
  if (!ends_part(visit.micro_batch)) return;
  push(layer_block(visit.layer), weight, dweight, gradient_type_, visit.micro_batch);
  push(layer_block(visit.layer), weight + 1, dbias, gradient_type_, visit.micro_batch);
}

// `d` is the gradient with respect to the layer's output, then middle, then its input x.
void Trainer::layer_backward(const LayerVisit& visit, const std::byte* x, std::byte* d) const {
  const Workspace& w = *work_;
  const Inside& inside = visit.inside;
  const Lease& lease = visit.lease;
  const std::uint32_t width = shape_.width, inner = shape_.inner;
  linear_gradient(visit, kMlpOutWeight, inside.activation, d);
  ops_->run(LinearBackwardInput{inner, width, d, lease.weight(kMlpOutWeight), w.dinner, inside.mlp}, *stream_);
  linear_gradient(visit, kMlpWeight, inside.norm2, w.dinner);
  ops_->run(LinearBackwardInput{width, inner, w.dinner, lease.weight(kMlpWeight), w.dnorm}, *stream_);
  norm_gradient(visit, kNorm2Weight, inside.middle, inside.statistics2, d);

  linear_gradient(visit, kAttentionOutWeight, inside.attention, d);
  ops_->run(LinearBackwardInput{width, width, d, lease.weight(kAttentionOutWeight), w.dnorm}, *stream_);
  ops_->run(AttentionBackward{inside.qkv, inside.attention, inside.log_sums, w.dnorm, w.dqkv}, *stream_);
  linear_gradient(visit, kAttentionWeight, inside.norm1, w.dqkv);
  ops_->run(LinearBackwardInput{width, 3 * width, w.dqkv, lease.weight(kAttentionWeight), w.dnorm}, *stream_);
  norm_gradient(visit, kNorm1Weight, x, inside.statistics1, d);
}

void Trainer::finish_embedding() {
  const Workspace& w = *work_;
  Lease lease = engine_->acquire(kEmbeddingBlock, Pass::kBackward, *stream_);
  const auto zero = [this](float* sums, std::uint32_t rows) {
    ops_->zero(sums, static_cast<std::size_t>(rows) * shape_.width * sizeof(float), *stream_);
  };
  for (std::uint32_t b = 0; b < options_.accumulation; ++b) {
    if (begins_part(b)) zero(w.dposition_weight, shape_.positions);
    if (begins_part(b) && options_.parts > 1) zero(w.dtoken_weight, shape_.vocabulary);  // the head's is pushed
    const ActivationLease d = input(model_.layers, b, Access::kRead);
    ops_->run(EmbeddingBackward{w.inputs + b * shape_.tokens(), d.data(), w.dtoken_weight, w.dposition_weight},
              *stream_);
    if (!ends_part(b)) continue;
    push(kEmbeddingBlock, kTokenWeight, w.dtoken_weight, DType::kFloat32, b);
    push(kEmbeddingBlock, kPositionWeight, w.dposition_weight, DType::kFloat32, b);
  }
  if (options_.parts == 1) push_final_norm(options_.accumulation - 1);
  lease.release();
}

void Trainer::push_final_norm(std::uint32_t micro_batch) const {
  push(kEmbeddingBlock, kFinalNormWeight, work_->dfinal_norm_weight, DType::kFloat32, micro_batch);
  push(kEmbeddingBlock, kFinalNormBias, work_->dfinal_norm_bias, DType::kFloat32, micro_batch);
}

}  // namespace spillway::models
