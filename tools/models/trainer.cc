#include "tools/models/trainer.h"

#include <algorithm>
#include <new>
#include <tuple>

#include "spillway/error.h"
#include "tools/models/lora.h"
#include "tools/models/stream_end.h"

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
          .ranks = ranks,
          .slice = config.slice_tokens};
}

Trainer::Exchange::Exchange(std::size_t tokens, std::size_t all_tokens, bool documents, std::size_t rotation_values) {
  const std::size_t of_documents = documents ? tokens : 0;
  const std::size_t values = 2 * tokens + 2 * of_documents + all_tokens + rotation_values;
  bytes = align_up<std::size_t>(values * sizeof(std::uint32_t), 4096);
  memory.reset(static_cast<std::byte*>(std::aligned_alloc(4096, bytes)));
  if (memory == nullptr) throw std::bad_alloc();
  auto* words = reinterpret_cast<std::uint32_t*>(memory.get());
  inputs = {words, tokens};
  targets = {words + tokens, tokens};
  starts = {words + 2 * tokens, of_documents};
  positions = {starts.data() + of_documents, of_documents};
  losses = {reinterpret_cast<float*>(positions.data() + of_documents), all_tokens};
  rotations = {losses.data() + all_tokens, rotation_values};
}

Trainer::Workspace::Workspace(Carver& carver, const Trainer& trainer) {
  const Shape& shape = trainer.shape_;
  const std::size_t tokens = trainer.options_.accumulation * shape.tokens(), m = shape.slice_tokens();
  const std::size_t width = shape.width, inner = shape.inner, e = size_of(shape.type);
  const auto tensor = [&](std::size_t columns) { return carver.take<std::byte>(m * columns * e); };
  scratch = carver.take<std::byte>(trainer.ops_->scratch_bytes());  // first: it wants alignment to 4096
  inputs = carver.take<std::uint32_t>(tokens);
  targets = carver.take<std::uint32_t>(tokens);
  starts = trainer.may_have_documents() ? carver.take<std::uint32_t>(tokens) : nullptr;
  positions = trainer.may_have_documents() ? carver.take<std::uint32_t>(tokens) : nullptr;
  losses = carver.take<float>(trainer.ranks() * tokens);
  const std::size_t of_keys = trainer.rows_in_parts() ? shape.sequence * (shape.qkv_width() - shape.query_width()) : 0;
  keys = of_keys > 0 ? carver.take<std::byte>(of_keys * e) : nullptr;
  dkeys = of_keys > 0 ? carver.take<float>(of_keys) : nullptr;
  Carver measure(nullptr);
  trainer.layer_forward_.take_inside(measure);
  inside = trainer.in_slices() ? carver.take<std::byte>(measure.used()) : nullptr;
  normed = tensor(width);
  normed_statistics = carver.take<float>(2 * m);
  dinner = tensor(inner);
  dnorm = tensor(width);
  dqkv = tensor(shape.qkv_width());
  dattention = shape.query_width() == width ? dnorm : tensor(shape.query_width());
  layer = trainer.layer_forward_.take_memory(carver);

  if (trainer.trains_base())
    take_gradients(carver, trainer);
  else
    take_adapters(carver, trainer);
}

void Trainer::Workspace::take_gradients(Carver& carver, const Trainer& trainer) {
  const Shape& shape = trainer.shape_;
  const TrainedModel& model = trainer.model_;
  const std::size_t width = shape.width;
  // Summed gradients all live until the last micro-batch; others only until they are pushed, so matrices take turns.
  const std::size_t g = size_of(trainer.gradient_type_);
  std::size_t largest = 0;
  for (const auto& parameter : trainer.layer_parameters_) largest = std::max<std::size_t>(largest, elements(parameter));
  const bool summed = trainer.slices_.size() > 1;
  const auto take_of_layer = [&](Carver& from) {
    layer_gradients.clear();
    std::byte* shared = summed ? nullptr : from.take<std::byte>(largest * g);
    for (const auto& parameter : trainer.layer_parameters_) {
      const bool takes_turns = !summed && parameter.shape.size() == 2;
      layer_gradients.push_back(takes_turns ? shared : from.take<std::byte>(elements(parameter) * g));
    }
  };
  const std::size_t table = shape.vocabulary * width;
  if (trainer.head_ends_before_layers()) {
    Carver of_layer(nullptr);
    take_of_layer(of_layer);
    std::byte* const both = carver.take<std::byte>(std::max(of_layer.used(), table * sizeof(float)));
    Carver from(both);
    take_of_layer(from);
    dhead_weight = dtoken_weight = reinterpret_cast<float*>(both);
  } else {
    take_of_layer(carver);
    dhead_weight = dtoken_weight = carver.take<float>(table);
  }
  dposition_weight = model.position_weight ? carver.take<float>(shape.positions * width) : nullptr;
  dfinal_norm_weight = carver.take<float>(width);
  dfinal_norm_bias = model.final_norm.bias ? carver.take<float>(width) : nullptr;
}

// Layers take turns: a product's adapter has the same place in all of them.
void Trainer::Workspace::take_adapters(Carver& carver, const Trainer& trainer) {
  const TrainedAdapters& adapters = *trainer.model_.adapters;
  const std::vector<Parameter>& parameters = trainer.model_.description.blocks[adapters.block].parameters;
  const std::size_t m = trainer.shape_.slice_tokens(), e = size_of(trainer.shape_.type);
  const std::size_t g = size_of(trainer.gradient_type_);
  dadapted = carver.take<std::byte>(m * adapters.rank * e);
  adapter_gradients.assign(parameters.size(), nullptr);
  std::vector<std::optional<std::pair<std::byte*, std::byte*>>> places;  // of a layer's products
  for (const TrainedLayer& layer : trainer.model_.layers) {
    std::size_t at = 0;
    for_each_product(trainer.model_, layer, [&](const ProductTensors& product, std::uint32_t) {
      if (at == places.size()) places.emplace_back();
      auto& place = places[at++];
      if (!product.adapter) return;
      const auto& [down, up] = *product.adapter;
      if (!place) {
        std::byte* const first = carver.take<std::byte>(elements(parameters[down]) * g);
        place = {first, carver.take<std::byte>(elements(parameters[up]) * g)};
      }
      std::tie(adapter_gradients[down], adapter_gradients[up]) = *place;
    });
  }
}

Trainer::Trainer(const ModelConfig& model, const TrainerOptions& options) : Trainer(trained_gpt2(model), options) {}

Trainer::Trainer(TrainedModel model, const TrainerOptions& options)
    : model_(std::move(model)),
      options_(options),
      shape_(sliced_shape(model_, options)),
      gradient_type_(options.accumulation * std::uint64_t{ranks()} == 1 && !in_slices() ? options.type
                                                                                        : DType::kFloat32),
      exchange_(options.accumulation * shape_.tokens(), ranks() * options.accumulation * shape_.tokens(),
                may_have_documents(), model_.rotation_values()),
      loss_bytes_(ranks(), exchange_.losses.size_bytes() / ranks()),
      ops_(create_ops(options.device, shape_, options.threads, options.fusion)),
      layer_forward_(model_, shape_, *ops_),
      layer_parameters_(model_.description.blocks[layer_block(0)].parameters) {
  SPILLWAY_CHECK(options.sequence > 0 && options.sequence <= model_.longest_row(), "a row fits the model's positions");
  make_slices();
  Carver measure(nullptr), measure_inside(nullptr);
  Workspace(measure, *this);
  workspace_bytes_ = measure.used();
  if (in_slices()) return;
  layer_forward_.take_inside(measure_inside);
  inside_bytes_ = measure_inside.used();
}

ModelDescription Trainer::description() const {
  ModelDescription description = model_.description;
  description.workspace_bytes = workspace_bytes_;
  for (std::uint32_t l = lowest(); l < model_.layers.size(); ++l) {
    description.blocks[layer_block(l)].inside_bytes = inside_bytes_;
  }
  description.micro_batches = options_.accumulation;
  for (auto& block : description.blocks) {
    for (auto& parameter : block.parameters) parameter.pushes = own_parts();
  }
  if (tied() && trains_base()) {
    Parameter& token = description.blocks[kEmbeddingBlock].parameters[model_.token_weight];
    token.in_order = false;
    if (options_.parts > 1) token.pushes = 2 * own_parts();
  }
  describe_activations(description);
  return description;
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
  layer_forward_.attach(work_->layer, exchange_.rotations, *stream_);
  stream_->synchronize();
}

ActivationLease Trainer::input(std::uint32_t layer, const Slice& slice, Access access) const {
  return engine_->acquire_activation(activation(layer, slice), access, *stream_);
}

Trainer::Inside Trainer::inside(std::uint32_t layer, const Slice& slice) const {
  std::byte* memory = work_->inside;
  if (memory == nullptr) {
    // What a layer that does not go backward computes is not needed later. It works in the insides of the lowest one
    // that does, which come after it.
    const Insides insides = engine_->insides(layer_block(std::max(layer, lowest())));
    memory = insides.memory.data() + (insides.kept ? slice.micro_batch * inside_bytes_ : 0);
  }
  Carver carver(memory);
  return layer_forward_.take_inside(carver);
}

LayerForward::Visit Trainer::visit(const Lease& lease, std::uint32_t layer, const Slice& slice) const {
  return {.lease = lease,
          .adapters = adapters_ ? &*adapters_ : nullptr,
          .layer = model_.layers[layer],
          .inside = inside(layer, slice),
          .tokens = {.count = slice.count,
                     .positions = needs_positions() ? work_->positions + token(slice) : nullptr,
                     .starts = documents_ ? work_->starts + token(slice) : nullptr,
                     .keys = work_->keys,
                     .first = slice.position}};
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
  const StreamEnd settled(*stream_);
  bring(rows);

  const AdaptersEnd end{adapters_};
  embed();
  const auto layers = static_cast<std::uint32_t>(model_.layers.size());
  for (std::uint32_t l = 0; l < layers; ++l) forward(l);
  head();
  for (std::uint32_t l = layers; l-- > lowest();) backward(l);
  if (trains_base()) finish_embedding();
  return add_losses(0) / static_cast<double>(target_count_);
}

void Trainer::bring(const StepRows& rows) {
  documents_ = !rows.starts.empty();
  SPILLWAY_CHECK(!documents_ || may_have_documents(), "learned positions do not begin anew in a row");
  const auto upload = [this](std::span<const std::uint32_t> from, std::span<std::uint32_t> through, std::uint32_t* to) {
    SPILLWAY_CHECK(from.size() == through.size(), "a step takes micro_batch * accumulation rows");
    if (from.data() != through.data()) std::ranges::copy(from, through.begin());
    ops_->upload(through.data(), to, through.size_bytes(), *stream_);
  };
  upload(rows.inputs, exchange_.inputs, work_->inputs);
  upload(rows.targets, exchange_.targets, work_->targets);
  if (documents_) upload(rows.starts, exchange_.starts, work_->starts);
  for (std::size_t i = 0; needs_positions() && i < exchange_.positions.size(); ++i) {
    const auto position = static_cast<std::uint32_t>(i % shape_.sequence);
    exchange_.positions[i] = documents_ ? position - rows.starts[i] : position;
  }
  if (needs_positions()) upload(exchange_.positions, exchange_.positions, work_->positions);
}

// Those of the rows in work, to `sum`. Waits for them.
double Trainer::add_losses(double sum) const {
  const std::span<float> losses = exchange_.losses;
  gather_losses();
  ops_->download(work_->losses, losses.data(), losses.size_bytes(), *stream_);
  stream_->synchronize();
  if (options_.ranks != nullptr) options_.ranks->throw_if_failed();
  for (const float loss : losses) sum += loss;
  return sum;
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
  for (const Slice& slice : slices_) {
    const ActivationLease out = input(0, slice, Access::kWrite);
    ops_->run(Embedding{.tokens = work_->inputs + token(slice),
                        .token_weight = lease.weight(model_.token_weight),
                        .position_weight = positions,
                        .out = out.data(),
                        .scale = model_.embedding_scale_in(options_.type),
                        .count = slice.count,
                        .first = slice.position},
              *stream_);
  }
  lease.release();
  hold_adapters(Pass::kForward);
}

void Trainer::forward(std::uint32_t index) {
  Lease lease = engine_->acquire(layer_block(index), Pass::kForward, *stream_);
  for (const Slice& slice : slices_) {
    const ActivationLease x = input(index, slice, Access::kRead), out = input(index + 1, slice, Access::kWrite);
    layer_forward_.run(visit(lease, index, slice), x.data(), out.data());
  }
  lease.release();
  if (index + 1 == model_.layers.size()) adapters_.reset();
}

// Final norm, loss, and the way back through both.
void Trainer::head() {
  const Workspace& w = *work_;
  Lease lease = engine_->acquire(model_.head_block, Pass::kBackward, *stream_);
  const float scale = static_cast<float>(engine_->loss_scale() / static_cast<double>(target_count_));
  float* const losses = w.losses + first_micro_batch() * shape_.tokens();
  const auto last = static_cast<std::uint32_t>(model_.layers.size());
  const void* const norm_weight = lease.weight(model_.final_norm.weight);
  for (const Slice& slice : slices_) {
    const ActivationLease x = input(last, slice, Access::kUpdate);
    layer_forward_.norm(model_.final_norm, lease, x.data(), w.normed, w.normed_statistics, slice.count);
    ops_->run(HeadLoss{.x = w.normed,
                       .targets = w.targets + token(slice),
                       .token_weight = lease.weight(model_.head_weight),
                       .scale = scale,
                       .losses = losses + token(slice),
                       .dx = w.normed,
                       .dtoken_weight = w.dhead_weight,
                       .accumulate = !slice.begins,
                       .soft_cap = model_.head_soft_cap,
                       .count = slice.count},
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
                   .accumulate = !slice.begins,
                   .count = slice.count});
    if (!trains_base() || !head_ends_before_layers() || !slice.ends) continue;
    push(model_.head_block, model_.head_weight, w.dhead_weight, DType::kFloat32, slice.micro_batch);
    push_final_norm(slice.micro_batch);
  }
  lease.release();
}

void Trainer::backward(std::uint32_t index) {
  const auto last = static_cast<std::uint32_t>(model_.layers.size());
  if (index + 1 == last) hold_adapters(Pass::kBackward);
  Lease lease = engine_->acquire(layer_block(index), Pass::kBackward, *stream_);
  const bool kept = !in_slices() && engine_->insides(layer_block(index)).kept;
  for (const Slice& slice : backward_slices_) {
    const LayerVisit visit{this->visit(lease, index, slice), index, slice};
    if (rows_in_parts() && slice.ends_row) keys_of_row(visit);
    const ActivationLease x = input(index, slice, Access::kRead), d = input(last, slice, Access::kUpdate);
    if (!kept) layer_forward_.inside(visit, x.data());
    layer_backward(visit, x.data(), d.data());
  }
  lease.release();
  if (index == lowest()) adapters_.reset();
}

// Of all parts before a row's last one, which finds its own.
void Trainer::keys_of_row(const LayerVisit& last) const {
  const std::size_t values = std::size_t{shape_.sequence} * (shape_.qkv_width() - shape_.query_width());
  ops_->zero(work_->dkeys, values * sizeof(float), *stream_);
  for (const Slice& slice : slices_before(last.slice)) {
    const ActivationLease x = input(last.index, slice, Access::kRead);
    layer_forward_.queries_and_keys(visit(last.lease, last.index, slice), x.data());
  }
}

void Trainer::finish_embedding() {
  const Workspace& w = *work_;
  Lease lease = engine_->acquire(kEmbeddingBlock, Pass::kBackward, *stream_);
  const auto zero = [this](float* sums, std::uint32_t rows) {
    ops_->zero(sums, static_cast<std::size_t>(rows) * shape_.width * sizeof(float), *stream_);
  };
  const auto last = static_cast<std::uint32_t>(model_.layers.size());
  for (const Slice& slice : slices_) {
    if (slice.begins && w.dposition_weight != nullptr) zero(w.dposition_weight, shape_.positions);
    if (slice.begins && head_ends_before_layers()) zero(w.dtoken_weight, shape_.vocabulary);
    const ActivationLease d = input(last, slice, Access::kRead);
    ops_->run(EmbeddingBackward{.tokens = w.inputs + token(slice),
                                .dout = d.data(),
                                .dtoken_weight = w.dtoken_weight,
                                .dposition_weight = w.dposition_weight,
                                .scale = model_.embedding_scale_in(options_.type),
                                .count = slice.count,
                                .first = slice.position},
              *stream_);
    if (!slice.ends) continue;
    push(kEmbeddingBlock, model_.token_weight, w.dtoken_weight, DType::kFloat32, slice.micro_batch);
    if (model_.position_weight) {
      push(kEmbeddingBlock, *model_.position_weight, w.dposition_weight, DType::kFloat32, slice.micro_batch);
    }
  }
  if (!head_ends_before_layers()) push_final_norm(options_.accumulation - 1);
  lease.release();
}

void Trainer::push_final_norm(std::uint32_t micro_batch) const {
  const NormTensors& norm = model_.final_norm;
  push(model_.head_block, norm.weight, work_->dfinal_norm_weight, DType::kFloat32, micro_batch);
  if (norm.bias) push(model_.head_block, *norm.bias, work_->dfinal_norm_bias, DType::kFloat32, micro_batch);
}

}  // namespace spillway::models
