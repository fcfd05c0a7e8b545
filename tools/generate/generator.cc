#include "tools/generate/generator.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <numeric>
#include <optional>
#include <utility>

#include "spillway/bf16.h"
#include "spillway/error.h"
#include "spillway/fp16.h"
#include "spillway/units.h"
#include "tools/models/stream_end.h"

namespace spillway::models::generate {
namespace {

Shape shape_of(const TrainedModel& model, const GeneratorOptions& options) {
  Shape shape = model.shape(options.type, 1, options.positions);
  shape.slice = std::min({options.slice, options.prompt, options.positions});
  shape.forward_alone = true;
  return shape;
}

// As the engine keeps it, and then as Embedding scales it.
void put(float value, float scale, DType type, std::byte* to) {
  if (type == DType::kFloat32) {
    value *= scale;
    std::memcpy(to, &value, sizeof(value));
    return;
  }
  const bool half = type == DType::kFloat16;
  const auto rounded = [half](float v) { return half ? float_to_fp16(v) : float_to_bf16(v); };
  const std::uint16_t kept = rounded(value);
  const std::uint16_t scaled = rounded((half ? fp16_to_float(kept) : bf16_to_float(kept)) * scale);
  std::memcpy(to, &scaled, sizeof(scaled));
}

// The first `blocks` of a trained model's are left out.
ModelDescription frozen(const TrainedModel& model, std::uint32_t left_out) {
  ModelDescription description;
  description.blocks.assign(model.description.blocks.begin() + left_out, model.description.blocks.end());
  for (Block& block : description.blocks) {
    for (Parameter& parameter : block.parameters) parameter.trainable = false;
  }
  const auto visit = [&](std::uint32_t block) { description.visits.push_back({block - left_out, Pass::kForward}); };
  if (left_out == 0) visit(kEmbeddingBlock);
  if (model.adapters) visit(model.adapters->block);
  for (std::uint32_t layer = 0; layer < model.layers.size(); ++layer) visit(layer_block(layer));
  visit(model.head_block);
  description.attachments = model.description.attachments;
  return description;
}

}  // namespace

Generator::Exchange::Exchange(const Generator& generator) {
  const std::size_t prompt = generator.options_.prompt, all = generator.options_.positions;
  const Shape& shape = generator.shape_;
  const std::size_t table_values = generator.model_.rotation_values();
  const std::size_t row_bytes = generator.row_ ? generator.bytes_of(shape.slice_tokens() * shape.width) : 0;
  const auto lay_out = [&](Carver& carver) {
    tokens = {carver.take<std::uint32_t>(prompt), prompt};
    positions = {carver.take<std::uint32_t>(all), all};
    logits = {carver.take<float>(shape.vocabulary), shape.vocabulary};
    rotations = {carver.take<float>(table_values), table_values};
    rows = {carver.take<std::byte>(row_bytes), row_bytes};
  };
  Carver measure(nullptr);
  lay_out(measure);
  bytes = align_up<std::size_t>(measure.used(), 4096);
  memory.reset(static_cast<std::byte*>(std::aligned_alloc(4096, bytes)));
  if (memory == nullptr) throw std::bad_alloc();
  Carver carver(memory.get());
  lay_out(carver);
  std::iota(positions.begin(), positions.end(), 0u);
}

Generator::Workspace::Workspace(Carver& carver, const Generator& generator) {
  const Shape& shape = generator.shape_;
  scratch = carver.take<std::byte>(generator.ops_->scratch_bytes());  // first: it wants alignment to 4096
  tokens = carver.take<std::uint32_t>(generator.options_.prompt);
  positions = carver.take<std::uint32_t>(shape.sequence);
  x = carver.take<std::byte>(generator.bytes_of(std::size_t{generator.options_.prompt} * shape.width));
  layer = generator.layer_forward_.take_memory(carver);
  inside = generator.layer_forward_.take_passing(carver, layer);
  logits = carver.take<float>(shape.vocabulary);
  cache = carver.take<std::byte>(generator.cache_.device_bytes());
}

Generator::Generator(TrainedModel model, const GeneratorOptions& options, EmbeddingRow row)
    : model_(std::move(model)),
      options_(options),
      row_(model_.head_block == kEmbeddingBlock ? EmbeddingRow() : std::move(row)),
      left_out_(row_ ? 1 : 0),
      shape_(shape_of(model_, options)),
      description_(frozen(model_, left_out_)),
      cache_(options.cache, shape_, static_cast<std::uint32_t>(model_.layers.size())),
      exchange_(*this),
      ops_(create_ops(options.device, shape_, options.threads)),
      layer_forward_(model_, shape_, *ops_) {
  SPILLWAY_CHECK(options.prompt > 0 && options.prompt <= options.positions, "a prompt has a place for each token");
  SPILLWAY_CHECK(options.positions <= model_.longest_row(), "tokens fit the model's positions");
  SPILLWAY_CHECK(!row_ || !model_.position_weight, "learned positions are part of the embedding's block");
  Carver measure(nullptr);
  Workspace(measure, *this);
  description_.workspace_bytes = measure.used();
  description_.kept_host_bytes = cache_.host_bytes();
  description_.kept_nvme_bytes = cache_.nvme_bytes();
}

std::vector<std::string> Generator::describe() const {
  std::vector<std::string> lines = ops_->describe();
  lines.push_back(cache_.describe());
  if (row_) lines.emplace_back("embedding: its rows are read from the model's files, one for each token");
  return lines;
}

void Generator::attach(Engine& engine) {
  engine_ = &engine;
  stream_ = &engine.stream();
  Carver carver(engine.workspace().data());
  work_ = std::make_unique<Workspace>(carver, *this);
  SPILLWAY_CHECK(engine.workspace().size() >= carver.used(), "the engine hands out what the description asked for");
  ops_->bind(engine, {work_->scratch, ops_->scratch_bytes()});
  ops_->register_host({exchange_.memory.get(), exchange_.bytes});
  cache_.attach(*ops_, work_->cache);
  ops_->upload(exchange_.positions.data(), work_->positions, exchange_.positions.size_bytes(), *stream_);
  layer_forward_.attach(work_->layer, exchange_.rotations, *stream_);
  stream_->synchronize();
}

template <typename Body>
void Generator::for_slices(std::uint32_t count, const Body& body) const {
  const auto most = static_cast<std::uint32_t>(shape_.slice_tokens());
  for (std::uint32_t at = 0; at < count; at += most) {
    body(Slice{.first = fed_ + at,
               .count = std::min(most, count - at),
               .x = work_->x + bytes_of(std::size_t{at} * shape_.width)});
  }
}

std::span<const float> Generator::feed(std::span<const std::uint32_t> tokens) {
  const auto count = static_cast<std::uint32_t>(tokens.size());
  SPILLWAY_CHECK(count > 0 && count <= options_.prompt && fed_ + count <= options_.positions,
                 "there is room for what is fed");
  const StreamEnd settled(*stream_);
  if (row_)
    embed_rows(tokens);
  else
    embed(tokens);
  std::optional<Lease> adapters;
  if (model_.adapters) adapters = engine_->acquire(block(model_.adapters->block), Pass::kForward, *stream_);
  for (std::uint32_t layer = 0; layer < model_.layers.size(); ++layer) {
    forward(layer, adapters ? &*adapters : nullptr, count);
  }
  adapters.reset();
  head(work_->x + bytes_of((count - 1) * std::size_t{shape_.width}));
  fed_ += count;
  return exchange_.logits;
}

void Generator::embed(std::span<const std::uint32_t> tokens) {
  std::ranges::copy(tokens, exchange_.tokens.begin());
  ops_->upload(exchange_.tokens.data(), work_->tokens, tokens.size_bytes(), *stream_);
  Lease lease = engine_->acquire(block(kEmbeddingBlock), Pass::kForward, *stream_);
  for_slices(static_cast<std::uint32_t>(tokens.size()), [&](const Slice& slice) {
    ops_->run(Embedding{.tokens = work_->tokens + (slice.first - fed_),
                        .token_weight = lease.weight(model_.token_weight),
                        .position_weight = model_.position_weight ? lease.weight(*model_.position_weight) : nullptr,
                        .out = slice.x,
                        .scale = model_.embedding_scale_in(shape_.type),
                        .count = slice.count,
                        .first = slice.first},
              *stream_);
  });
  lease.release();
}

void Generator::embed_rows(std::span<const std::uint32_t> tokens) {
  const float scale = model_.embedding_scale_in(shape_.type);
  std::vector<float> values(shape_.width);
  for_slices(static_cast<std::uint32_t>(tokens.size()), [&](const Slice& slice) {
    std::byte* to = exchange_.rows.data();
    for (std::uint32_t t = 0; t < slice.count; ++t) {
      row_(tokens[slice.first - fed_ + t], values);
      for (const float value : values) {
        put(value, scale, shape_.type, to);
        to += size_of(shape_.type);
      }
    }
    ops_->upload(exchange_.rows.data(), slice.x, bytes_of(slice.count * std::size_t{shape_.width}), *stream_);
    stream_->synchronize();  // the rows are the next slice's, too
  });
}

void Generator::forward(std::uint32_t index, const Lease* adapters, std::uint32_t count) {
  Lease lease = engine_->acquire(block(layer_block(index)), Pass::kForward, *stream_);
  std::byte* const keys = cache_.begin(index, fed_, *stream_);
  LayerForward::Visit visit{lease, adapters, model_.layers[index], work_->inside, {}};
  for_slices(count, [&](const Slice& slice) {
    visit.inside.middle = slice.x;
    visit.tokens = {
        .count = slice.count, .positions = work_->positions + slice.first, .keys = keys, .first = slice.first};
    layer_forward_.run(visit, slice.x, slice.x);
  });
  lease.release();
  cache_.end(index, fed_, count, *stream_);
}

// Of one token.
void Generator::head(const std::byte* x) {
  Lease lease = engine_->acquire(block(model_.head_block), Pass::kForward, *stream_);
  const LayerForward::Inside& inside = work_->inside;
  layer_forward_.norm(model_.final_norm, lease, x, inside.norm1, inside.statistics1, 1);
  ops_->run(Logits{.x = inside.norm1,
                   .token_weight = lease.weight(model_.head_weight),
                   .logits = work_->logits,
                   .soft_cap = model_.head_soft_cap},
            *stream_);
  lease.release();
  ops_->download(work_->logits, exchange_.logits.data(), exchange_.logits.size_bytes(), *stream_);
  stream_->synchronize();
}

}  // namespace spillway::models::generate
