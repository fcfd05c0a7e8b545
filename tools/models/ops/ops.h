// The operations that decoders are made of: forward and backward, one implementation per device.
//
// Every pointer is a device address inside the engine's HBM arena (anything else is refused) but where `host` is
// written. Work is enqueued on the stream and runs later, in order; one stream at a time. Tensors are row-major,
// aligned to 16 bytes, in the model's weight type unless a comment says fp32. An operation computes in fp32 and rounds
// its result once. M = batch * sequence tokens of one micro-batch, or the `count` of an operation where that is not 0:
// a slice of them, of at most Shape::slice_tokens(). C = width. Errors while work is enqueued: kDevice; kUnsupported:
// the device's library has no such product.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "spillway/device.h"
#include "spillway/dtype.h"
#include "spillway/engine.h"
#include "spillway/error.h"

namespace spillway::models {

struct Shape {
  DType type = DType::kFloat32;
  std::uint32_t batch = 1;     // rows of a micro-batch
  std::uint32_t sequence = 0;  // tokens of a row
  std::uint32_t width = 0, heads = 0, inner = 0;
  std::uint32_t vocabulary = 0, positions = 0;
  float epsilon = 1e-5f;  // of norms
  // Of attention: as many key/value heads as heads where 0, each head width / heads wide where 0.
  std::uint32_t key_heads = 0, head_size = 0;
  // Tokens of a slice, where operations are given no more of them at a time: whole rows, or of a row a part that is a
  // multiple of 128, and what is left of it. 0: all.
  std::uint32_t slice = 0;
  bool forward_alone = false;  // slices may have any number of tokens, and nothing goes backward
  // Columns between the two products of an adapter, which are kOutIn whatever the others are; 0: there are none. Where
  // there are some, nothing else is trained.
  std::uint32_t adapter_rank = 0;

  std::size_t tokens() const { return static_cast<std::size_t>(batch) * sequence; }
  std::size_t slice_tokens() const { return slice != 0 ? slice : tokens(); }
  // The last slice of a row, or of the rows; 0: as the others.
  std::size_t last_slice() const { return (sequence > slice_tokens() ? sequence : tokens()) % slice_tokens(); }
  std::uint32_t kv_heads() const { return key_heads != 0 ? key_heads : heads; }
  std::uint32_t head_width() const { return head_size != 0 ? head_size : width / heads; }
  // Of [query | key | value], and of the queries alone.
  std::size_t qkv_width() const { return (heads + std::size_t{2} * kv_heads()) * head_width(); }
  std::size_t query_width() const { return std::size_t{heads} * head_width(); }
};

// What a GPU computes inside a matrix product of 16 bits, where cuBLASLt has that: gelu and its derivative, and the
// gradients of biases. Else kernels of their own do, after it. Which is faster depends on the GPU and on cuBLASLt; the
// bits differ (inside, gelu sees its argument before that is rounded). Never chosen by trying: a choice that hung on
// time would let two runs differ.
enum class Fusion : std::uint8_t {
  kAuto,  // by the kind of GPU
  kNone,
  kGelu,
  kAll,
};

struct Embedding {
  const std::uint32_t* tokens;                 // [M]
  const void *token_weight, *position_weight;  // position_weight: may be null
  void* out;                                   // [M][C]
  float scale = 1;                             // of the token's row; without position_weight
  std::uint32_t count = 0;
  std::uint32_t first = 0;  // of a slice inside a row: its first token's position
};
struct EmbeddingBackward {
  const std::uint32_t* tokens;
  const void* dout;
  float *dtoken_weight, *dposition_weight;  // fp32, added to; dposition_weight: may be null
  float scale = 1;
  std::uint32_t count = 0, first = 0;  // as in Embedding
};

struct LayerNorm {
  const void *x, *weight, *bias;  // [M][C]
  void* out;
  float* statistics;  // fp32 [M][2]: mean, 1 / standard deviation
  std::uint32_t count = 0;
};
struct LayerNormBackward {
  const void *x, *weight, *dout;
  const float* statistics;
  const void* residual;  // added to dx; may be null, may be dx
  void* dx;
  // Of type `gradient`. accumulate: added to (fp32 only). Null, both: not computed.
  void *dweight, *dbias;
  DType gradient;
  bool accumulate;
  std::uint32_t count = 0;
};

// `groups` neighbouring rows of `columns` of each token, every one of which is normalized by itself: heads, say.
// y = x / rms(x) * (weight + offset)
struct RmsNorm {
  const void* x;  // tokens are x_stride elements apart
  std::size_t x_stride;
  const void* weight;  // [columns]
  void* out;           // may be x, in the same places
  std::size_t out_stride;
  float* statistics;  // fp32 [M][groups]: 1 / rms
  std::uint32_t groups, columns;
  float offset = 0;  // Gemma: 1
  std::uint32_t count = 0;
};
struct RmsNormBackward {
  const void* x;
  std::size_t x_stride;
  const void *weight, *dout;
  std::size_t dout_stride;
  const float* statistics;
  const void* residual;  // [M][columns], of one group; added to dx; may be null, may be dx
  void* dx;              // may be dout, in the same places
  std::size_t dx_stride;
  void* dweight;  // of type `gradient`, as in LayerNormBackward
  DType gradient;
  bool accumulate;
  std::uint32_t groups, columns;
  float offset = 0;
  std::uint32_t count = 0;
};

// Rotary positions, in place, of the first `rotated` (an even number) of `head_width` columns of each of `heads` heads
// (NeoX's halves, as Hugging Face has them): column i, below rotated / 2, and column i + rotated / 2 are turned by the
// angle whose cosine and sine are table[position][i][0, 1].
struct Rotary {
  void* x;  // tokens are `stride` elements apart
  std::size_t stride;
  std::uint32_t heads, head_width, rotated;
  const float* table;              // fp32 [sequence][rotated / 2][2]
  const std::uint32_t* positions;  // [M], below `sequence`; null: each row counts from 0
  bool backward = false;           // turned back, which is its gradient
  std::uint32_t count = 0;         // of a slice inside a row: with positions
};

enum class Activation : std::uint8_t { kSilu, kGeluTanh, kGelu };
// out = activation(gate) * up
struct GatedActivation {
  const void* gate_up;  // [M][2 * inner], gate first
  void* out;            // [M][inner]
  Activation activation;
  std::uint32_t count = 0;
};
struct GatedActivationBackward {
  const void *gate_up, *dout;
  void* dgate_up;  // may be gate_up
  Activation activation;
  std::uint32_t count = 0;
};

// sum = a + b; for what is normalized before it is added.
struct Add {
  const void *a, *b;  // [M][C]
  void* sum;          // may be either
  std::uint32_t count = 0;
};

// out = factor * x
struct Scale {
  const void* x;  // [M][columns]
  void* out;      // may be x
  float factor;
  std::uint32_t columns;
  std::uint32_t count = 0;
};

// after = gelu(before), of LinearGelu's kind, and dx = dx * gelu'(before), where more was added to a product first.
struct Gelu {
  const void* before;  // [M][columns]
  void* after;
  std::uint32_t columns;
  std::uint32_t count = 0;
};
struct GeluBackward {
  const void* before;
  void* dx;
  std::uint32_t columns;
  std::uint32_t count = 0;
};

// Rows of `columns` elements from one place to another, which do not overlap.
struct CopyRows {
  const void* from;  // from_stride elements apart
  std::size_t from_stride;
  void* to;
  std::size_t to_stride;
  std::uint32_t columns;
  std::uint32_t count = 0;
};

// How a matrix lies: [in][out], as GPT-2's Conv1D stores it, or [out][in], as torch.nn.Linear.
enum class Layout : std::uint8_t { kInOut, kOutIn };

// y = x · weight + bias + residual
struct Linear {
  std::uint32_t in, out;
  const void *x, *weight, *bias;  // bias: null with kOutIn where there is none
  const void* residual;           // as y; may be null, may be y
  void* y;
  Layout layout = Layout::kInOut;
  std::size_t y_stride = 0;  // between the rows of y and residual; 0: out
  std::uint32_t count = 0;
};
// after = gelu(before), before = x · weight + bias. Whether gelu sees `before` rounded is the device's choice, the same
// every time. gelu is GPT-2's: the form with tanh.
struct LinearGelu {
  std::uint32_t in, out;
  const void *x, *weight, *bias;
  void *before, *after;  // [M][out]
  std::uint32_t count = 0;
};
// dx = (dy · weightᵀ) * gelu'(gelu_before)
struct LinearBackwardInput {
  std::uint32_t in, out;
  const void *dy, *weight;
  void* dx;
  const void* gelu_before = nullptr;  // [M][in], what gelu was computed of; null: x did not come of gelu
  Layout layout = Layout::kInOut;
  std::size_t dy_stride = 0;       // 0: out
  const void* residual = nullptr;  // [M][in], added to dx, whose gelu is not asked for; may be dx
  std::uint32_t count = 0;
};
struct LinearBackwardWeight {
  std::uint32_t in, out;
  const void *x, *dy;
  void *dweight, *dbias;  // dbias: null where there is none
  DType gradient;
  bool accumulate;
  Layout layout = Layout::kInOut;
  std::size_t dy_stride = 0;  // 0: out
  std::uint32_t count = 0;
};

// What a query sees of its row: nothing after it.
struct AttentionRules {
  std::uint32_t window = 0;               // as many tokens, itself the last; 0: all
  float scale = 0;                        // of the scores; 0: 1 / sqrt(head_width)
  float soft_cap = 0;                     // scores become soft_cap * tanh(score / soft_cap); 0: as they are
  const std::uint32_t* starts = nullptr;  // [M]: the first token of its row that it sees; null: the row's first
};

// Self-attention over rows of [query | key | value], of `heads`, kv_heads and kv_heads heads. Heads h of
// [g * heads / kv_heads, (g + 1) * heads / kv_heads) attend to key/value head g.
//
// With a `part` the M = part.count tokens of qkv, out, dout and dqkv are queries of one row alone, after whose first
// one the others follow; what their keys and values are is read from the part. rules.starts is theirs too: [M].
struct AttentionPart {
  // Keys and values of the row's tokens before the part and of its own, [first + count][kv_heads * head_width] each.
  const void *keys = nullptr, *values = nullptr;
  std::size_t stride = 0;              // elements from one token to the next
  std::uint32_t first = 0, count = 0;  // the first query's position in its row; 0: no part, but whole rows
};
struct Attention {
  const void* qkv;  // [M][qkv_width]
  void* out;        // [M][query_width]
  float* log_sums;  // fp32 [Ops::attention_log_sums()], for the way back; aligned to 16
  AttentionRules rules = {};
  AttentionPart part = {};
  std::uint32_t count = 0;  // without a part: whole rows of `sequence` tokens
};
struct AttentionBackward {
  const void *qkv, *out;
  const float* log_sums;
  const void* dout;
  void* dqkv;
  AttentionRules rules = {};
  // The parts of a row come from its last to its first. Each adds to dkv what it gives to keys and values of all tokens
  // up to its last; what stands there for its own tokens is complete then, and is rounded into its dqkv.
  AttentionPart part = {};
  float* dkv = nullptr;  // fp32 [sequence][2][kv_heads * head_width]: of keys and values; zero before the last part
  std::uint32_t count = 0;
};

// A target that no loss is taken of.
inline constexpr std::uint32_t kNoTarget = 0xffff'ffffu;

// Logits against a table of words (the embedding, where it is tied), cross entropy and its gradient, slice by slice:
// logits never exist whole.
struct HeadLoss {
  const void* x;                 // [M][C]
  const std::uint32_t* targets;  // [M]; of kNoTarget loss and gradient are 0
  const void* token_weight;      // [vocabulary][C]
  float scale;                   // of the gradient: loss scale / targets in the step
  float* losses;                 // fp32 [M], natural logarithm, not scaled
  void* dx;                      // may be x; null: the losses alone
  float* dtoken_weight;          // fp32; null: not computed
  bool accumulate;               // add to dtoken_weight
  float soft_cap = 0;            // logits become soft_cap * tanh(logit / soft_cap); 0: as they are
  std::uint32_t count = 0;
};

// The logits themselves, of a few tokens; of shapes whose forward stands alone.
struct Logits {
  const void* x;             // [count][C]
  const void* token_weight;  // [vocabulary][C]
  float* logits;             // fp32 [count][vocabulary]
  float soft_cap = 0;
  std::uint32_t count = 1;
};

class Ops {
 public:
  virtual ~Ops() = default;
  virtual std::vector<std::string> describe() const = 0;
  // Device memory that the operations work in; known before the engine exists.
  virtual std::uint64_t scratch_bytes() const = 0;
  // Floats that one Attention leaves for its AttentionBackward.
  virtual std::size_t attention_log_sums() const = 0;
  // Must be called once, before any operation. `scratch` is aligned to 4096; the engine must outlive this object.
  virtual void bind(const Engine& engine, std::span<std::byte> scratch) = 0;

  // Memory that upload and download name, in whole pages of 4096 bytes; it must outlive this object.
  virtual void register_host(std::span<std::byte> memory) = 0;
  // `host` lies in registered memory and must stay as it is until the stream got there.
  virtual void upload(const void* host, void* device, std::size_t bytes, Stream& stream) = 0;
  virtual void download(const void* device, void* host, std::size_t bytes, Stream& stream) = 0;
  virtual void zero(void* device, std::size_t bytes, Stream& stream) = 0;

  virtual void run(const Embedding& op, Stream& stream) = 0;
  virtual void run(const EmbeddingBackward& op, Stream& stream) = 0;
  virtual void run(const LayerNorm& op, Stream& stream) = 0;
  virtual void run(const LayerNormBackward& op, Stream& stream) = 0;
  virtual void run(const Linear& op, Stream& stream) = 0;
  virtual void run(const LinearGelu& op, Stream& stream) = 0;
  virtual void run(const LinearBackwardInput& op, Stream& stream) = 0;
  virtual void run(const LinearBackwardWeight& op, Stream& stream) = 0;
  virtual void run(const Attention& op, Stream& stream) = 0;
  virtual void run(const AttentionBackward& op, Stream& stream) = 0;
  virtual void run(const HeadLoss& op, Stream& stream) = 0;
  virtual void run(const RmsNorm& op, Stream& stream) = 0;
  virtual void run(const RmsNormBackward& op, Stream& stream) = 0;
  virtual void run(const Rotary& op, Stream& stream) = 0;
  virtual void run(const GatedActivation& op, Stream& stream) = 0;
  virtual void run(const GatedActivationBackward& op, Stream& stream) = 0;
  virtual void run(const Add& op, Stream& stream) = 0;
  virtual void run(const Scale& op, Stream& stream) = 0;
  virtual void run(const Gelu& op, Stream& stream) = 0;
  virtual void run(const GeluBackward& op, Stream& stream) = 0;
  virtual void run(const CopyRows& op, Stream& stream) = 0;
  virtual void run(const Logits& op, Stream& stream) = 0;
};

// `threads`: at least as many as the engine's compute threads (Config::threads, resolved).
std::unique_ptr<Ops> create_host_ops(const Shape& shape, unsigned threads);
// The operations of a device. Those of `cuda` are a plugin (ops_plugin.h), for the first GPU that CUDA shows;
// kUnsupported says why it cannot be opened, or what the shape asks too much. The host device has no `fusion` but
// kAuto.
std::unique_ptr<Ops> create_ops(DeviceKind device, const Shape& shape, unsigned threads, Fusion fusion = Fusion::kAuto);

}  // namespace spillway::models
