// What a layer computes forward, of some tokens at a time: for a trainer, whose memory keeps what backward needs, and
// for whoever computes forward alone, in place.
//
//   x ─ norm ─ products ─ head norms ─ rotary ─ attention ─ product ─(+ x)─ middle ─ norm ─ mlp ─(+ middle)─ out
//
// Memory is the caller's: laid out by take_…(), device addresses inside the engine's HBM arena. Work is enqueued on the
// stream. Errors: those of the operations.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "spillway/engine.h"
#include "tools/models/ops/carver.h"
#include "tools/models/ops/ops.h"
#include "tools/models/trained_model.h"

namespace spillway::models {

class LayerForward {
 public:
  // Those that go through a layer together: some rows, or a part of one.
  struct Tokens {
    std::uint32_t count = 0;
    const std::uint32_t* positions = nullptr;  // Rotary's
    const std::uint32_t* starts = nullptr;     // AttentionRules'
    // Of a row in parts: keys and values of its tokens, [tokens][2][kv_heads * head_width]. Those before `first` are
    // there; those of the part are added. Null: whole rows.
    std::byte* keys = nullptr;
    std::uint32_t first = 0;  // the part's first token's position in its row
  };
  // What is computed from a layer's input, and backward needs. Tensors are [tokens][…]; null: the model has no such
  // thing.
  struct Inside {
    std::byte *norm1, *projected, *qkv, *attention, *attended, *middle, *norm2, *mlp, *activation, *fed;
    float *statistics1, *statistics2, *query_statistics, *key_statistics, *attended_statistics, *fed_statistics;
    float* log_sums;
  };
  // What all layers use in turn.
  struct Memory {
    std::vector<float*> rotations;  // of TrainedModel
    std::byte* residual = nullptr;  // what is added after its norm, [tokens][width]
    std::byte* adapted = nullptr;   // between the two products of an adapter, [tokens][rank]
  };
  // A layer that is leased, and the adapters where the model has some, with some of its tokens.
  struct Visit {
    const Lease& lease;
    const Lease* adapters;
    const TrainedLayer& layer;
    Inside inside;
    Tokens tokens;
  };

  // All three must outlive it.
  LayerForward(const TrainedModel& model, const Shape& shape, Ops& ops) : model_(model), shape_(shape), ops_(ops) {}
  LayerForward(const LayerForward&) = delete;
  LayerForward& operator=(const LayerForward&) = delete;

  // For as many tokens as a slice has.
  Memory take_memory(Carver& carver) const;
  Inside take_inside(Carver& carver) const;  // each tensor has a place of its own
  // For forward alone: what is not needed any more is written over, and `middle` is the caller's to set: x, out.
  Inside take_passing(Carver& carver, const Memory& memory) const;
  // Before the first visit. Tables go up through TrainedModel::rotation_values() floats of registered host memory.
  void attach(Memory memory, std::span<float> rotations, Stream& stream);
  const Memory& memory() const { return memory_; }

  // A layer, from its input to its output; x, visit.inside.middle and out may be one.
  void run(const Visit& visit, const std::byte* x, std::byte* out) const;
  // The same without its output: all that backward needs, and Memory::residual.
  void inside(const Visit& visit, const std::byte* x) const;
  // The beginning of it: the queries, keys and values.
  void queries_and_keys(const Visit& visit, const std::byte* x) const;

  // Of whole rows, whichever norm the model has.
  void norm(const NormTensors& norm, const Lease& lease, const void* x, void* out, float* statistics,
            std::uint32_t count) const;
  void rotate(const Visit& visit, std::byte* qkv, bool backward) const;
  AttentionRules rules(const Visit& visit) const;
  AttentionPart part(const Tokens& tokens) const;
  // Memory::adapted = s · x · downᵀ of an adapter, and s · rows, in place.
  void adapt(const Visit& visit, const AdapterTensors& adapter, std::uint32_t in, const void* x) const;
  void scale(std::byte* rows, std::uint32_t count) const;

 private:
  // Members as of Linear.
  struct Product {
    std::uint32_t in;
    const void* x;
    const void* residual = nullptr;
    std::byte* y;
    std::size_t y_stride = 0;
  };
  void product(const Visit& visit, const ProductTensors& product, const Product& op) const;
  // Of `width` columns, results side by side.
  void products(const Visit& visit, std::span<const ProductTensors> products, const void* x, std::byte* y,
                std::size_t y_stride) const;
  void head_norm(const Visit& visit, ParameterIndex weight, std::size_t column, bool is_key) const;
  void attention(const Visit& visit, const std::byte* x) const;
  void activation(const Visit& visit) const;
  void gelu(const Visit& visit) const;

  std::size_t key_width() const { return std::size_t{shape_.kv_heads()} * shape_.head_width(); }
  std::size_t bytes_of(std::size_t elements) const { return elements * size_of(shape_.type); }

  const TrainedModel& model_;
  const Shape& shape_;
  Ops& ops_;
  Stream* stream_ = nullptr;
  Memory memory_;
};

}  // namespace spillway::models
