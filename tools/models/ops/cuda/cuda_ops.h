// The operations on the `cuda` device; private to the plugin.
//
// Products go to cuBLASLt (gemm.h), everything else to kernels of our own (layer_kernels.h, attention.h). All that an
// operation needs is made in bind(): an operation only enqueues. Scratch is cuBLASLt's workspace, and one region that
// the operations have one after the other.
#pragma once

#include <algorithm>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "spillway/units.h"
#include "tools/models/ops/cuda/attention.h"
#include "tools/models/ops/cuda/gemm.h"
#include "tools/models/ops/cuda/layer_kernels.h"
#include "tools/models/ops/ops.h"

namespace spillway::models {

class CudaOps final : public Ops {
 public:
  // kUnsupported: no GPU, one that is too old, or a width that is too much.
  CudaOps(const Shape& shape, Fusion fusion);
  ~CudaOps() override;

  std::vector<std::string> describe() const override;
  std::uint64_t scratch_bytes() const override { return Gemm::kWorkspaceBytes + shared_bytes_; }
  std::size_t attention_log_sums() const override { return shape_.heads * shape_.tokens(); }
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

 private:
  static constexpr std::size_t kSlice = 1024;     // tokens whose logits are in work at one time
  static constexpr std::size_t kLogitsUnit = 64;  // a row of logits is padded to a multiple

  // The products of a layer's weight [in][out]. Those that may be missing are then done in two steps.
  struct LayerProducts {
    PlannedProduct forward, backward_input, weight_gradient;
    std::optional<PlannedProduct> forward_gelu = {}, backward_input_gelu = {};
    std::optional<PlannedProduct> weight_gradient_bias = {};  // with the bias gradient, in the tensor type
    std::optional<PlannedProduct> weight_gradient_sum = {};   // in fp32, where the tensor type is another
  };
  // Of the words from `first` on. An odd number of words is computed in two parts: cuBLASLt's kernels for all of them
  // at once were a sixth as fast.
  struct HeadPart {
    std::uint64_t first;
    PlannedProduct logits, dx, dweight;
  };
  using HeadProducts = std::vector<HeadPart>;

  LayerProducts plan_layer(std::uint64_t in, std::uint64_t out) const;
  HeadProducts plan_head(std::uint64_t tokens) const;
  HeadPart plan_head_part(std::uint64_t tokens, std::uint64_t first, std::uint64_t words) const;
  const LayerProducts& products(std::uint32_t in, std::uint32_t out) const;
  void head_slice(const HeadLoss& op, std::size_t first, std::size_t tokens, cudaStream_t stream) const;

  AttentionShape attention_shape() const {
    return {shape_.type, shape_.batch, shape_.sequence, shape_.width, shape_.heads};
  }
  std::size_t slice_tokens() const { return std::min(kSlice, shape_.tokens()); }
  std::size_t logits_stride() const { return align_up<std::size_t>(shape_.vocabulary, kLogitsUnit); }
  std::size_t element_bytes() const { return size_of(shape_.type); }
  void require_in_hbm(const void* data, std::size_t bytes) const;
  // A tensor: aligned, too.
  void require_tensor(const void* data, std::size_t elements) const;
  void require_tensor(const void* data, std::size_t elements, DType type) const;
  // `groups` rows of `columns` of each token, tokens `stride` elements apart.
  void require_rows(const void* data, std::size_t stride, std::size_t columns) const;
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
  std::map<std::pair<std::uint64_t, std::uint64_t>, LayerProducts> layer_products_;  // by in and out
  HeadProducts head_whole_, head_rest_;  // of a whole slice, and of a shorter last one
  std::vector<std::span<std::byte>> registered_;
};

}  // namespace spillway::models
