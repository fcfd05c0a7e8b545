// The operations that decoders are made of: forward and backward, one implementation per device.
//
// Every pointer is a device address inside the engine's HBM arena (anything else is refused) but where `host` is
// written. Work is enqueued on the stream and runs later, in order; one stream at a time. Tensors are row-major,
// aligned to 16 bytes, in the model's weight type unless a comment says fp32. An operation computes in fp32 and rounds
// its result once. M = batch * sequence tokens of one micro-batch, C = width. Errors while work is enqueued: kDevice;
// kUnsupported: the device does not compute this.
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

  std::size_t tokens() const { return static_cast<std::size_t>(batch) * sequence; }
  std::uint32_t kv_heads() const { return key_heads != 0 ? key_heads : heads; }
  std::uint32_t head_width() const { return head_size != 0 ? head_size : width / heads; }
  // Of [query | key | value], and of the queries alone.
  std::size_t qkv_width() const { return (heads + std::size_t{2} * kv_heads()) * head_width(); }
  std::size_t query_width() const { return std::size_t{heads} * head_width(); }
};

// What a GPU computes inside a matrix product of 16 bits, where cuBLASLt has that: gelu and its derivative, and the
// gradients of biases. Else kernels of their own do, behind it. Which is faster depends on the GPU and on cuBLASLt; the
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
};
struct EmbeddingBackward {
  const std::uint32_t* tokens;
  const void* dout;
  float *dtoken_weight, *dposition_weight;  // fp32, added to; dposition_weight: may be null
  float scale = 1;
};

struct LayerNorm {
  const void *x, *weight, *bias;  // [M][C]
  void* out;
  float* statistics;  // fp32 [M][2]: mean, 1 / standard deviation
};
struct LayerNormBackward {
  const void *x, *weight, *dout;
  const float* statistics;
  const void* residual;  // added to dx; may be null, may be dx
  void* dx;
  // Of type `gradient`. accumulate: added to (fp32 only).
  void *dweight, *dbias;
  DType gradient;
  bool accumulate;
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
};

enum class Activation : std::uint8_t { kSilu, kGeluTanh, kGelu };
// out = activation(gate) * up
struct GatedActivation {
  const void* gate_up;  // [M][2 * inner], gate first
  void* out;            // [M][inner]
  Activation activation;
};
struct GatedActivationBackward {
  const void *gate_up, *dout;
  void* dgate_up;  // may be gate_up
  Activation activation;
};

// sum = a + b; for what is normalized before it is added.
struct Add {
  const void *a, *b;  // [M][C]
  void* sum;          // may be either
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
};
// after = gelu(before), before = x · weight + bias. Whether gelu sees `before` rounded is the device's choice, the same
// every time. gelu is GPT-2's: the form with tanh.
struct LinearGelu {
  std::uint32_t in, out;
  const void *x, *weight, *bias;
  void *before, *after;  // [M][out]
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
};
struct LinearBackwardWeight {
  std::uint32_t in, out;
  const void *x, *dy;
  void *dweight, *dbias;  // dbias: null where there is none
  DType gradient;
  bool accumulate;
  Layout layout = Layout::kInOut;
  std::size_t dy_stride = 0;  // 0: out
};

// What a query sees of its row: nothing behind it.
struct AttentionRules {
  std::uint32_t window = 0;               // as many tokens, itself the last; 0: all
  float scale = 0;                        // of the scores; 0: 1 / sqrt(head_width)
  float soft_cap = 0;                     // scores become soft_cap * tanh(score / soft_cap); 0: as they are
  const std::uint32_t* starts = nullptr;  // [M]: the first token of its row that it sees; null: the row's first
};

// Self-attention over rows of [query | key | value], of `heads`, kv_heads and kv_heads heads. Heads h of
// [g * heads / kv_heads, (g + 1) * heads / kv_heads) attend to key/value head g.
struct Attention {
  const void* qkv;  // [M][qkv_width]
  void* out;        // [M][query_width]
  float* log_sums;  // fp32 [Ops::attention_log_sums()], for the way back; aligned to 16
  AttentionRules rules = {};
};
struct AttentionBackward {
  const void *qkv, *out;
  const float* log_sums;
  const void* dout;
  void* dqkv;
  AttentionRules rules = {};
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
  void* dx;                      // may be x
  float* dtoken_weight;          // fp32
  bool accumulate;               // add to dtoken_weight
  float soft_cap = 0;            // logits become soft_cap * tanh(logit / soft_cap); 0: as they are
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
  // A device that computes one of these says so.
  virtual void run(const RmsNorm&, Stream&) { refuse("RMS norms"); }
  virtual void run(const RmsNormBackward&, Stream&) { refuse("RMS norms"); }
  virtual void run(const Rotary&, Stream&) { refuse("rotary positions"); }
  virtual void run(const GatedActivation&, Stream&) { refuse("gated activations"); }
  virtual void run(const GatedActivationBackward&, Stream&) { refuse("gated activations"); }
  virtual void run(const Add&, Stream&) { refuse("sums of two tensors"); }

 protected:
  [[noreturn]] static void refuse(const char* what) {
    throw Error(Code::kUnsupported, {"device", std::string("computes no ") + what, 0, "train on the host device"});
  }
};

// `threads`: at least as many as the engine's compute threads (Config::threads, resolved).
std::unique_ptr<Ops> create_host_ops(const Shape& shape, unsigned threads);
// The operations of a device. Those of `cuda` are a plugin (ops_plugin.h), for the first GPU that CUDA shows;
// kUnsupported says why it cannot be opened, or what the shape asks too much. The host device has no `fusion` but
// kAuto.
std::unique_ptr<Ops> create_ops(DeviceKind device, const Shape& shape, unsigned threads, Fusion fusion = Fusion::kAuto);

}  // namespace spillway::models
