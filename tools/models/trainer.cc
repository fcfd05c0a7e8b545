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

Trainer::Exchange::Exchange(std::size_t tokens, std::size_t all_tokens, bool documents,
                            const std::vector<Rotation>& tables) {
  std::size_t table_values = 0;
  for (const Rotation& rotation : tables) table_values += rotation.table.size();
  const std::size_t of_documents = documents ? tokens : 0;
  bytes =
      align_up<std::size_t>((2 * tokens + 2 * of_documents + all_tokens + table_values) * sizeof(std::uint32_t), 4096);
  memory.reset(static_cast<std::byte*>(std::aligned_alloc(4096, bytes)));
  if (memory == nullptr) throw std::bad_alloc();
  auto* words = reinterpret_cast<std::uint32_t*>(memory.get());
  inputs = {words, tokens};
  targets = {words + tokens, tokens};
  starts = {words + 2 * tokens, of_documents};
  positions = {starts.data() + of_documents, of_documents};
  losses = {reinterpret_cast<float*>(positions.data() + of_documents), all_tokens};
  rotations = {losses.data() + all_tokens, table_values};
  auto at = rotations.begin();
  for (const Rotation& rotation : tables) at = std::ranges::copy(rotation.table, at).out;
}

Trainer::Workspace::Workspace(Carver& carver, const Trainer& trainer) {
  const Shape& shape = trainer.shape_;
  const TrainedModel& model = trainer.model_;
  const std::size_t micro_batches = trainer.options_.accumulation, m = shape.tokens(), e = size_of(shape.type);
  const std::size_t width = shape.width, inner = shape.inner;
  const auto tensor = [&](std::size_t columns) { return carver.take<std::byte>(m * columns * e); };
  scratch = carver.take<std::byte>(trainer.ops_->scratch_bytes());  // first: it wants alignment to 4096
  inputs = carver.take<std::uint32_t>(micro_batches * m);
  targets = carver.take<std::uint32_t>(micro_batches * m);
  const std::size_t of_documents = trainer.options_.documents ? micro_batches * m : 0;
  starts = of_documents > 0 ? carver.take<std::uint32_t>(of_documents) : nullptr;
  positions = of_documents > 0 ? carver.take<std::uint32_t>(of_documents) : nullptr;
  losses = carver.take<float>(trainer.ranks() * micro_batches * m);
  normed = tensor(width);
  normed_statistics = carver.take<float>(2 * m);
  dinner = tensor(inner);
  dnorm = tensor(width);
  dqkv = tensor(shape.qkv_width());
  dattention = shape.query_width() == width ? dnorm : tensor(shape.query_width());
  const auto norms_after = [](const TrainedLayer& layer) { return layer.attention_after || layer.mlp_after; };
  residual = std::ranges::any_of(model.layers, norms_after) ? tensor(width) : nullptr;
  for (const Rotation& rotation : model.rotations) rotations.push_back(carver.take<float>(rotation.table.size()));

  // Summed gradients all live until the last micro-batch; others only until they are pushed, so matrices take turns.
  const std::size_t g = size_of(trainer.gradient_type_);
  std::size_t largest = 0;
  for (const auto& parameter : trainer.layer_parameters_) largest = std::max<std::size_t>(largest, elements(parameter));
  std::byte* shared = micro_batches == 1 ? carver.take<std::byte>(largest * g) : nullptr;
  for (const auto& parameter : trainer.layer_parameters_) {
    const bool takes_turns = micro_batches == 1 && parameter.shape.size() == 2;
    layer_gradients.push_back(takes_turns ? shared : carver.take<std::byte>(elements(parameter) * g));
  }
  // An untied head's gradient is handed over before the embedding's begins.
  dhead_weight = dtoken_weight = carver.take<float>(shape.vocabulary * width);
  dposition_weight = model.position_weight ? carver.take<float>(shape.positions * width) : nullptr;
  dfinal_norm_weight = carver.take<float>(width);
  dfinal_norm_bias = model.final_norm.bias ? carver.take<float>(width) : nullptr;
}

Trainer::Trainer(const ModelConfig& model, const TrainerOptions& options) : Trainer(trained_gpt2(model), options) {}

Trainer::Trainer(TrainedModel model, const TrainerOptions& options)
    : model_(std::move(model)),
      options_(options),
      shape_(model_.shape(options.type, options.micro_batch, options.sequence)),
      gradient_type_(options.accumulation * std::uint64_t{ranks()} == 1 ? options.type : DType::kFloat32),
      exchange_(options.accumulation * shape_.tokens(), ranks() * options.accumulation * shape_.tokens(),
                options.documents, model_.rotations),
      loss_bytes_(ranks(), exchange_.losses.size_bytes() / ranks()),
      ops_(create_ops(options.device, shape_, options.threads, options.fusion)),
      layer_parameters_(model_.description.blocks[layer_block(0)].parameters) {
  SPILLWAY_CHECK(options.sequence > 0 && (model_.positions == 0 || options.sequence <= model_.positions),
                 "a row fits the model's positions");
  SPILLWAY_CHECK(!options.documents || !model_.position_weight, "learned positions do not begin anew in a row");
  Carver measure(nullptr), measure_inside(nullptr);
  Workspace(measure, *this);
  workspace_bytes_ = measure.used();
  Inside(measure_inside, *this);
  inside_bytes_ = measure_inside.used();
}

ModelDescription Trainer::description() const {
  ModelDescription description = model_.description;
  description.workspace_bytes = workspace_bytes_;
  for (std::uint32_t l = 0; l < model_.layers.size(); ++l) {
    description.blocks[layer_block(l)].inside_bytes = inside_bytes_;
  }
  description.micro_batches = options_.accumulation;
  for (auto& block : description.blocks) {
    for (auto& parameter : block.parameters) parameter.pushes = own_parts();
  }
  if (tied()) {
    Parameter& token = description.blocks[kEmbeddingBlock].parameters[model_.token_weight];
    token.in_order = false;
    if (options_.parts > 1) token.pushes = 2 * own_parts();
  }
  describe_activations(description);
  return description;
}

// In the order of run_step().
void Trainer::describe_activations(ModelDescription& description) const {
  const auto layers = static_cast<std::uint32_t>(model_.layers.size());
  const std::uint32_t micro_batches = options_.accumulation;
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
  const float* from = exchange_.rotations.data();
  for (std::size_t r = 0; r < model_.rotations.size(); ++r) {
    const std::size_t values = model_.rotations[r].table.size();
    ops_->upload(from, work_->rotations[r], values * sizeof(float), *stream_);
    from += values;
  }
}

ActivationLease Trainer::input(std::uint32_t layer, std::uint32_t micro_batch, Access access) const {
  return engine_->acquire_activation(layer * options_.accumulation + micro_batch, access, *stream_);
}

Trainer::Inside Trainer::inside(std::uint32_t layer, std::uint32_t micro_batch) const {
  const Insides insides = engine_->insides(layer_block(layer));
  Carver carver(insides.memory.data() + (insides.kept ? micro_batch * inside_bytes_ : 0));
  return {carver, *this};
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
  const std::size_t t = shape_.sequence, tokens = exchange_.inputs.size();
  SPILLWAY_CHECK(rows.size() == tokens / t * (t + 1), "a step takes micro_batch * accumulation rows");
  for (std::size_t i = 0; i < tokens; ++i) {
    const std::size_t token = i / t * (t + 1) + i % t;
    exchange_.inputs[i] = rows[token];
    exchange_.targets[i] = rows[token + 1];
  }
  return run_step(
      {.inputs = exchange_.inputs, .targets = exchange_.targets, .target_count = tokens * std::uint64_t{ranks()}});
}

double Trainer::run_step(const StepRows& rows) {
  SPILLWAY_CHECK(rows.target_count > 0, "a step has something to learn");
  target_count_ = rows.target_count;
  const std::span<float> losses = exchange_.losses;
  const auto bring = [this](std::span<const std::uint32_t> from, std::span<std::uint32_t> through, std::uint32_t* to) {
    SPILLWAY_CHECK(from.size() == through.size(), "a step takes micro_batch * accumulation rows");
    if (from.data() != through.data()) std::ranges::copy(from, through.begin());
    if (!from.empty()) ops_->upload(through.data(), to, through.size_bytes(), *stream_);
  };
  bring(rows.inputs, exchange_.inputs, work_->inputs);
  bring(rows.targets, exchange_.targets, work_->targets);
  bring(rows.starts, exchange_.starts, work_->starts);
  for (std::size_t i = 0; i < rows.starts.size(); ++i) {
    exchange_.positions[i] = static_cast<std::uint32_t>(i % shape_.sequence) - rows.starts[i];
  }
  bring(exchange_.positions, exchange_.positions, work_->positions);

  embed();
  const auto layers = static_cast<std::uint32_t>(model_.layers.size());
  for (std::uint32_t l = 0; l < layers; ++l) forward(l);
  head();
  for (std::uint32_t l = layers; l-- > 0;) backward(l);
  finish_embedding();

  gather_losses();
  ops_->download(work_->losses, losses.data(), losses.size_bytes(), *stream_);
  stream_->synchronize();
  if (options_.ranks != nullptr) options_.ranks->throw_if_failed();
  double sum = 0;
  for (const float loss : losses) sum += loss;
  return sum / static_cast<double>(target_count_);
}

// All of them go to every rank, so that each adds them up in the order of micro-batches, as one rank does.
void Trainer::gather_losses() const {
  if (ranks() == 1) return;
  options_.ranks->all_gather(std::as_writable_bytes(std::span(work_->losses, exchange_.losses.size())), loss_bytes_,
                             kEmbeddingBlock, *stream_);
}

void Trainer::embed() {
  Lease lease = engine_->acquire(kEmbeddingBlock, Pass::kForward, *stream_);
  const void* positions = model_.position_weight ? lease.weight(*model_.position_weight) : nullptr;
  for (std::uint32_t b = 0; b < options_.accumulation; ++b) {
    const ActivationLease out = input(0, b, Access::kWrite);
    ops_->run(Embedding{work_->inputs + b * shape_.tokens(), lease.weight(model_.token_weight), positions, out.data(),
                        model_.embedding_scale_in(options_.type)},
              *stream_);
  }
  lease.release();
}

void Trainer::forward(std::uint32_t index) {
  const TrainedLayer& layer = model_.layers[index];
  Lease lease = engine_->acquire(layer_block(index), Pass::kForward, *stream_);
  for (std::uint32_t b = 0; b < options_.accumulation; ++b) {
    const ActivationLease x = input(index, b, Access::kRead), out = input(index + 1, b, Access::kWrite);
    const Inside w = inside(index, b);
    layer_attention(layer, lease, x.data(), w, b);
    layer_mlp_inner(layer, lease, w);
    layer_mlp_out(layer, lease, w, out.data());
  }
  lease.release();
}

// Final norm, loss, and the way back through both.
void Trainer::head() {
  const Workspace& w = *work_;
  Lease lease = engine_->acquire(model_.head_block, Pass::kBackward, *stream_);
  const float scale = static_cast<float>(engine_->loss_scale() / static_cast<double>(target_count_));
  float* const losses = w.losses + first_micro_batch() * shape_.tokens();
  const auto last = static_cast<std::uint32_t>(model_.layers.size());
  const void* const norm_weight = lease.weight(model_.final_norm.weight);
  for (std::uint32_t b = 0; b < options_.accumulation; ++b) {
    const std::size_t first = b * shape_.tokens();
    const ActivationLease x = input(last, b, Access::kUpdate);
    norm(model_.final_norm, lease, x.data(), w.normed, w.normed_statistics);
    ops_->run(HeadLoss{w.normed, w.targets + first, lease.weight(model_.head_weight), scale, losses + first, w.normed,
                       w.dhead_weight, !begins_part(b), model_.head_soft_cap},
              *stream_);
    norm_backward({.weight = norm_weight,
                   .x = x.data(),
                   .dout = w.normed,
                   .statistics = w.normed_statistics,
                   .residual = nullptr,
                   .dx = x.data(),
                   .dweight = w.dfinal_norm_weight,
                   .dbias = w.dfinal_norm_bias,
                   .gradient = DType::kFloat32,
                   .accumulate = !begins_part(b)});
    // Where it is tied, one part's goes on to the embedding.
    if ((tied() && options_.parts == 1) || !ends_part(b)) continue;
    push(model_.head_block, model_.head_weight, w.dhead_weight, DType::kFloat32, b);
    push_final_norm(b);
  }
  lease.release();
}

void Trainer::backward(std::uint32_t index) {
  const TrainedLayer& layer = model_.layers[index];
  const auto last = static_cast<std::uint32_t>(model_.layers.size());
  Lease lease = engine_->acquire(layer_block(index), Pass::kBackward, *stream_);
  const bool kept = engine_->insides(layer_block(index)).kept;
  for (std::uint32_t b = 0; b < options_.accumulation; ++b) {
    const ActivationLease x = input(index, b, Access::kRead), d = input(last, b, Access::kUpdate);
    const Inside w = inside(index, b);
    if (!kept) {
      layer_attention(layer, lease, x.data(), w, b);
      layer_mlp_inner(layer, lease, w);
      if (layer.mlp_after) layer_mlp_fed(layer, lease, w);
    }
    layer_backward({lease, layer, index, b, w}, x.data(), d.data());
  }
  lease.release();
}

void Trainer::finish_embedding() {
  const Workspace& w = *work_;
  Lease lease = engine_->acquire(kEmbeddingBlock, Pass::kBackward, *stream_);
  const auto zero = [this](float* sums, std::uint32_t rows) {
    ops_->zero(sums, static_cast<std::size_t>(rows) * shape_.width * sizeof(float), *stream_);
  };
  const auto last = static_cast<std::uint32_t>(model_.layers.size());
  for (std::uint32_t b = 0; b < options_.accumulation; ++b) {
    if (begins_part(b) && w.dposition_weight != nullptr) zero(w.dposition_weight, shape_.positions);
    // A head's gradient that is handed over by itself leaves nothing to add to.
    if (begins_part(b) && (options_.parts > 1 || !tied())) zero(w.dtoken_weight, shape_.vocabulary);
    const ActivationLease d = input(last, b, Access::kRead);
    ops_->run(EmbeddingBackward{w.inputs + b * shape_.tokens(), d.data(), w.dtoken_weight, w.dposition_weight,
                                model_.embedding_scale_in(options_.type)},
              *stream_);
    if (!ends_part(b)) continue;
    push(kEmbeddingBlock, model_.token_weight, w.dtoken_weight, DType::kFloat32, b);
    if (model_.position_weight) {
      push(kEmbeddingBlock, *model_.position_weight, w.dposition_weight, DType::kFloat32, b);
    }
  }
  if (tied() && options_.parts == 1) push_final_norm(options_.accumulation - 1);
  lease.release();
}

void Trainer::push_final_norm(std::uint32_t micro_batch) const {
  const NormTensors& norm = model_.final_norm;
  push(model_.head_block, norm.weight, work_->dfinal_norm_weight, DType::kFloat32, micro_batch);
  if (norm.bias) push(model_.head_block, *norm.bias, work_->dfinal_norm_bias, DType::kFloat32, micro_batch);
}

}  // namespace spillway::models
