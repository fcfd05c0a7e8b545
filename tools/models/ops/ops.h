// The operations a GPT-2 model is made of: forward and backward, one implementation per device.
//
// Every pointer is a device address inside the engine's HBM arena (anything else is refused) but where `host` is
// written. Work is enqueued on the stream and runs later, in order; one stream at a time. Tensors are row-major,
// aligned to 16 bytes, in the model's weight type unless a comment says fp32. An operation computes in fp32 and rounds
// its result once. M = batch * sequence tokens of one micro-batch, C = width. Errors while work is enqueued: kDevice.
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

namespace spillway::models {

struct Shape {
  DType type = DType::kFloat32;
  std::uint32_t batch = 1;     // rows of a micro-batch
  std::uint32_t sequence = 0;  // tokens of a row
  std::uint32_t width = 0, heads = 0, inner = 0;
  std::uint32_t vocabulary = 0, positions = 0;
  float epsilon = 1e-5f;  // of layer norm

  std::size_t tokens() const { return static_cast<std::size_t>(batch) * sequence; }
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
  const std::uint32_t* tokens;  // [M]
  const void *token_weight, *position_weight;
  void* out;  // [M][C]
};
struct EmbeddingBackward {
  const std::uint32_t* tokens;
  const void* dout;
  float *dtoken_weight, *dposition_weight;  // fp32, added to
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

// y = x · weight + bias + residual; weight is [in][out], as GPT-2's Conv1D stores it.
struct Linear {
  std::uint32_t in, out;
  const void *x, *weight, *bias;
  const void* residual;  // [M][out]; may be null
  void* y;
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
};
struct LinearBackwardWeight {
  std::uint32_t in, out;
  const void *x, *dy;
  void *dweight, *dbias;
  DType gradient;
  bool accumulate;
};

// Causal self-attention over rows of [query | key | value], each C wide.
struct Attention {
  const void* qkv;  // [M][3C]
  void* out;        // [M][C]
  float* log_sums;  // fp32 [Ops::attention_log_sums()], for the way back; aligned to 16
};
struct AttentionBackward {
  const void *qkv, *out;
  const float* log_sums;
  const void* dout;
  void* dqkv;
};

// Logits against the tied embedding, cross entropy and its gradient, slice by slice: logits never exist whole.
struct HeadLoss {
  const void* x;                 // [M][C]
  const std::uint32_t* targets;  // [M]
  const void* token_weight;      // [vocabulary][C]
  float scale;                   // of the gradient: loss scale / tokens in the step
  float* losses;                 // fp32 [M], natural logarithm, not scaled
  void* dx;                      // may be x
  float* dtoken_weight;          // fp32
  bool accumulate;               // add to dtoken_weight
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
};

// `threads`: at least as many as the engine's compute threads (Config::threads, resolved).
std::unique_ptr<Ops> create_host_ops(const Shape& shape, unsigned threads);
// The operations of a device. Those of `cuda` are a plugin (ops_plugin.h), for the first GPU that CUDA shows;
// kUnsupported says why it cannot be opened, or what the shape asks too much. The host device has no `fusion` but
// kAuto.
std::unique_ptr<Ops> create_ops(DeviceKind device, const Shape& shape, unsigned threads, Fusion fusion = Fusion::kAuto);

}  // namespace spillway::models
