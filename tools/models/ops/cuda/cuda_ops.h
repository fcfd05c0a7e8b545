// The operations on the `cuda` device; private to the plugin.
//
// Products go to cuBLASLt (gemm.h), everything else to kernels of our own (layer_kernels.h, attention.h). All that an
// operation needs is made in bind(), or when it first comes: else an operation only enqueues. Scratch is cuBLASLt's
// workspace, and one region that the operations have one after the other.
#pragma once

#include <algorithm>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "spillway/units.h"
#include "tools/models/ops/cuda/attention.h"
#include "tools/models/ops/cuda/gemm.h"
#include "tools/models/ops/cuda/layer_kernels.h"
#include "tools/models/ops/ops.h"

namespace spillway::models {

class CudaOps final : public Ops {
 public:
  // kUnsupported: no GPU, one that is too old, or rows or heads that are too wide.
  CudaOps(const Shape& shape, Fusion fusion);
  ~CudaOps() override;

  std::vector<std::string> describe() const override;
  std::uint64_t scratch_bytes() const override { return Gemm::kWorkspaceBytes + shared_bytes_; }
  std::size_t attention_log_sums() const override { return shape_.heads * shape_.slice_tokens(); }
  void bind(const Engine& engine, std::span<std::byte> scratch) override;

  void register_host(std::span<std::byte> memory) override;
  using Ops::run;
  void upload(const void* host, void* device, std::size_t bytes, Stream& stream) override;
  void download(const void* device, void* host, std::size_t bytes, Stream& stream) override;
  void zero(void* device, std::size_t bytes, Stream& stream) override;

  void run(const Embedding& op, Stream& stream) override;
  void run(const EmbeddingBackward& op, Stream& stream) override;
  void run(const LayerNorm& op, Stream& stream) override;
  void run(const LayerNormBackward& op, Stream& stream) override;
  void run(const Linear& op, Stream& stream) override;
  void run(const LinearGelu& op, Stream& stream) override;
  void run(const LinearBackwardInput& op, Stream& stream) override;
  void run(const LinearBackwardWeight& op, Stream& stream) override;
  void run(const Attention& op, Stream& stream) override;
  void run(const AttentionBackward& op, Stream& stream) override;
  void run(const HeadLoss& op, Stream& stream) override;
  void run(const RmsNorm& op, Stream& stream) override;
  void run(const RmsNormBackward& op, Stream& stream) override;
  void run(const Rotary& op, Stream& stream) override;
  void run(const GatedActivation& op, Stream& stream) override;
  void run(const GatedActivationBackward& op, Stream& stream) override;
  void run(const Add& op, Stream& stream) override;
  void run(const Scale& op, Stream& stream) override;
  void run(const Gelu& op, Stream& stream) override;
  void run(const GeluBackward& op, Stream& stream) override;
  void run(const CopyRows& op, Stream& stream) override;
  void run(const Logits& op, Stream& stream) override;

 private:
  static constexpr std::size_t kSlice = 1024;     // tokens whose logits are in work at one time
  static constexpr std::size_t kLogitsUnit = 64;  // a row of logits is padded to a multiple

  // A product of a layer with `tokens` rows. `stride`: between those of y or dy, which begin at `row`.
  struct LayerProduct {
    std::uint64_t tokens, in, out;
    Layout layout;
    std::uint64_t stride;
    const void* row;
  };
  Product forward_product(const LayerProduct& layer, Epilogue epilogue) const;
  Product backward_product(const LayerProduct& layer, Epilogue epilogue) const;
  Product weight_product(const LayerProduct& layer, DType gradient, Epilogue epilogue) const;
  // Products with an epilogue that may be missing; those are then done in two steps. gelu of fp32 always is: it is
  // exact to the last places so.
  const PlannedProduct* with_gelu(const LayerProduct& layer);
  const PlannedProduct* with_gelu_backward(const LayerProduct& layer);
  const PlannedProduct* with_bias_gradient(const LayerProduct& layer, DType gradient);

  // Of the words from `first` on. An odd number of words is computed in two parts: cuBLASLt's kernels for all of them
  // at once were a sixth as fast.
  struct HeadPart {
    std::uint64_t first, words;
  };
  std::vector<HeadPart> head_parts() const;
  Product logits_product(const HeadPart& part, std::uint64_t tokens, std::uint64_t stride) const;
  Product head_input_product(const HeadPart& part, std::uint64_t tokens) const;
  Product head_weight_product(const HeadPart& part, std::uint64_t tokens) const;
  void head_slice(const HeadLoss& op, std::size_t first, std::size_t tokens, cudaStream_t stream);

  // Each is planned once: what the shape's layers need in bind(), so that a run which cannot be is refused before it
  // begins, and others when they come. Null: cuBLASLt has none like it.
  const PlannedProduct* found(const Product& product);
  const PlannedProduct& planned(const Product& product);
  void plan_layers(std::size_t tokens);
  void plan_layer(const LayerProduct& layer, Epilogue epilogue, bool trained);
  void plan_head(std::size_t tokens);

  bool decoder() const { return shape_.key_heads != 0 || shape_.head_size != 0; }
  // Of an operation with this `count`.
  std::size_t tokens(std::uint32_t count) const;
  AttentionShape attention_shape(std::size_t tokens, const AttentionPart& part) const;
  // Slices of the head.
  std::size_t head_tokens() const { return std::min(kSlice, shape_.slice_tokens()); }
  std::size_t logits_stride() const { return align_up<std::size_t>(shape_.vocabulary, kLogitsUnit); }
  std::size_t element_bytes() const { return size_of(shape_.type); }
  void require_in_hbm(const void* data, std::size_t bytes) const;
  // A tensor: aligned, too.
  void require_tensor(const void* data, std::size_t elements) const;
  void require_tensor(const void* data, std::size_t elements, DType type) const;
  // `columns` of each of `rows` tokens, which are `stride` elements apart.
  void require_rows(const void* data, std::size_t rows, std::size_t stride, std::size_t columns) const;
  void require_attention(std::size_t tokens, const AttentionRules& rules, const AttentionPart& part) const;
  void require_registered(const void* host, std::size_t bytes) const;
  cudaStream_t native(Stream& stream) const;

  Shape shape_;
  std::string gpu_;
  // Into products, where type and shape allow it.
  bool fuses_gelu_ = false, fuses_bias_gradient_ = false;
  std::size_t shared_bytes_ = 0;

  const Engine* engine_ = nullptr;
  std::byte* shared_ = nullptr;
  std::optional<Gemm> gemm_;
  std::map<Product, std::optional<PlannedProduct>> planned_;
  std::vector<std::span<std::byte>> registered_;
};

}  // namespace spillway::models
