// Attention on the GPU against plain double-precision loops. Inputs are values of the tensor type, so the reference
// sees the same numbers. Every output lies between guards and is poisoned before it is written.
#include "tools/models/ops/cuda/attention.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "spillway/bf16.h"
#include "spillway/fp16.h"

namespace spillway::models {
namespace {

using Doubles = std::vector<double>;
using Bytes = std::vector<unsigned char>;

float rounded(float value, DType type) {
  return type == DType::kFloat32   ? value
         : type == DType::kFloat16 ? fp16_to_float(float_to_fp16(value))
                                   : bf16_to_float(float_to_bf16(value));
}

Bytes encoded(const Doubles& values, DType type) {
  Bytes bytes(values.size() * size_of(type));
  for (std::size_t i = 0; i < values.size(); ++i) {
    const float value = static_cast<float>(values[i]);
    const std::uint16_t half = type == DType::kFloat16 ? float_to_fp16(value) : float_to_bf16(value);
    std::memcpy(&bytes[i * size_of(type)], type == DType::kFloat32 ? static_cast<const void*>(&value) : &half,
                size_of(type));
  }
  return bytes;
}

Doubles decoded(const Bytes& bytes, DType type) {
  Doubles values(bytes.size() / size_of(type));
  for (std::size_t i = 0; i < values.size(); ++i) {
    float value = 0;
    std::uint16_t half = 0;
    if (type == DType::kFloat32) {
      std::memcpy(&value, &bytes[4 * i], 4);
    } else {
      std::memcpy(&half, &bytes[2 * i], 2);
      value = type == DType::kFloat16 ? fp16_to_float(half) : bf16_to_float(half);
    }
    values[i] = value;
  }
  return values;
}

// Device memory between two guards. What was not written is NaN in every type.
class Buffer {
 public:
  explicit Buffer(std::size_t bytes) : bytes_(bytes) {
    const Bytes poison(bytes + 2 * kGuardBytes, kPoison);
    EXPECT_EQ(cudaMalloc(&memory_, poison.size()), cudaSuccess);
    EXPECT_EQ(cudaMemcpy(memory_, poison.data(), poison.size(), cudaMemcpyHostToDevice), cudaSuccess);
  }
  explicit Buffer(const Bytes& content) : Buffer(content.size()) {
    EXPECT_EQ(cudaMemcpy(data(), content.data(), bytes_, cudaMemcpyHostToDevice), cudaSuccess);
  }
  ~Buffer() { EXPECT_EQ(cudaFree(memory_), cudaSuccess); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  void* data() const { return static_cast<unsigned char*>(memory_) + kGuardBytes; }
  Bytes read() const {
    Bytes all(bytes_ + 2 * kGuardBytes);
    EXPECT_EQ(cudaMemcpy(all.data(), memory_, all.size(), cudaMemcpyDeviceToHost), cudaSuccess);
    for (std::size_t i = 0; i < kGuardBytes; ++i) {
      EXPECT_EQ(all[i], kPoison) << "written before the start";
      EXPECT_EQ(all[kGuardBytes + bytes_ + i], kPoison) << "written past the end";
    }
    return Bytes(all.begin() + kGuardBytes, all.end() - kGuardBytes);
  }

 private:
  static constexpr std::size_t kGuardBytes = 1024;
  static constexpr unsigned char kPoison = 0xff;
  void* memory_ = nullptr;
  std::size_t bytes_;
};

struct Case {
  DType type;
  std::uint32_t head_width, sequence;
  double spread = 1.5;  // standard deviation of queries, keys and values
  std::uint32_t heads = 2, key_heads = 2;
  std::uint32_t window = 0;
  float scale = 0, soft_cap = 0;
  bool documents = false;  // starts
  std::uint32_t part = 0;  // tokens of a part; 0: rows are whole

  // Parts are of one row.
  AttentionShape shape() const { return {type, part != 0 ? 1u : 2u, sequence, heads, key_heads, head_width}; }
  // Documents of uneven lengths, others in each row.
  std::vector<std::uint32_t> starts() const {
    const std::uint32_t begins[] = {0, 1, 30, 31, 64, 100, 101, 128, 190, 250};
    std::vector<std::uint32_t> all;
    if (!documents) return all;
    for (std::uint32_t row = 0; row < shape().batch; ++row) {
      for (std::uint32_t i = 0; i < sequence; ++i) {
        std::uint32_t start = 0;
        for (const std::uint32_t begin : begins) start = begin == 0 || begin + 5 * row > i ? start : begin + 5 * row;
        all.push_back(start);
      }
    }
    return all;
  }
};

std::string name_of(const Case& c) {
  std::string name = std::string(name_of(c.type)) + "_head_" + std::to_string(c.head_width) + "_tokens_" +
                     std::to_string(c.sequence) + (c.spread == 1.5 ? "" : "_peaked");
  if (c.heads != 2 || c.key_heads != 2) name += "_heads_" + std::to_string(c.heads) + "_" + std::to_string(c.key_heads);
  if (c.window != 0) name += "_window_" + std::to_string(c.window);
  if (c.scale != 0) name += "_scaled";
  if (c.soft_cap != 0) name += "_capped_" + std::to_string(static_cast<int>(c.soft_cap));
  if (c.documents) name += "_documents";
  if (c.part != 0) name += "_parts_" + std::to_string(c.part);
  return name;
}

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const DType type : kDTypes) {
    for (const std::uint32_t head_width : {64, 128, 96, 80, 88, 20, 8}) {
      for (const std::uint32_t sequence : {1, 17, 64, 150, 257}) all.push_back({type, head_width, sequence});
      // Scores far apart: sums are rescaled again and again.
      all.push_back({type, head_width, 150, 5});
    }
    for (const std::uint32_t head_width : {130, 256}) all.push_back({type, head_width, 50});
    // As the families have them: Llama, Phi-3, Qwen3 and Mistral, Gemma 2 and 3.
    const auto of = [&](std::uint32_t head_width, std::uint32_t sequence, std::uint32_t heads,
                        std::uint32_t key_heads) {
      return Case{.type = type, .head_width = head_width, .sequence = sequence, .heads = heads, .key_heads = key_heads};
    };
    std::vector<Case> families = {of(64, 150, 8, 1),  of(64, 200, 4, 2),  of(80, 130, 3, 1), of(96, 140, 4, 2),
                                  of(128, 150, 4, 1), of(128, 257, 2, 1), of(256, 140, 4, 1)};
    for (std::size_t i = 0; i < 3; ++i) {
      const Case base = std::vector{of(64, 280, 4, 2), of(128, 200, 2, 1), of(256, 150, 2, 1)}[i];
      for (const std::uint32_t window : {1u, 33u, 128u}) {
        families.push_back(base);
        families.back().window = window;
      }
      for (const float soft_cap : {2.0f, 50.0f}) {
        families.push_back(base);
        families.back().soft_cap = soft_cap;
      }
      families.push_back(base);
      families.back().documents = true;
      families.push_back(base);
      families.back().window = 40, families.back().scale = 0.08f, families.back().soft_cap = 3;
      families.back().documents = true;
      for (const std::uint32_t part : {128u, 256u}) {
        Case whole = base;
        whole.part = part;
        families.push_back(whole);
        whole.window = 70, whole.documents = true, whole.soft_cap = 4;
        families.push_back(whole);
      }
    }
    all.insert(all.end(), families.begin(), families.end());
  }
  return all;
}

struct Reference {
  Doubles out, log_sums, dqkv;
};

// Backward takes the `out` that it is given, like the implementation: a rounded one.
Reference reference(const Case& c, const Doubles& qkv, const Doubles& given_out, const Doubles& dout) {
  const AttentionShape s = c.shape();
  const std::size_t t = s.sequence, m = s.batch * t, head = s.head_width, width = s.heads * head;
  const std::size_t key_width = s.key_heads * head, stride = width + 2 * key_width;
  const double scale = c.scale != 0 ? c.scale : 1 / std::sqrt(static_cast<double>(head));
  const auto starts = c.starts();
  Reference r{Doubles(m * width, 0.0), Doubles(s.heads * m), Doubles(qkv.size(), 0.0)};
  for (std::size_t h = 0; h < s.heads; ++h) {
    const std::size_t group = h / (s.heads / s.key_heads);
    for (std::size_t token = 0; token < m; ++token) {
      const std::size_t q = token * stride + h * head, o = token * width + h * head, row = token / t * t;
      const std::size_t own = token - row, start = starts.empty() ? 0 : starts[token];
      const std::size_t first = row + std::max(start, c.window == 0 || own < c.window ? 0 : own + 1 - c.window);
      Doubles p(token - first + 1, 0.0), dp(p.size(), 0.0), slope(p.size(), 1.0);
      const auto key = [&](std::size_t j) { return (first + j) * stride + width + group * head; };
      const auto value = [&](std::size_t j) { return key(j) + key_width; };
      double highest = -1e300, sum = 0, delta = 0;
      for (std::size_t j = 0; j < p.size(); ++j) {
        for (std::size_t d = 0; d < head; ++d) p[j] += scale * qkv[q + d] * qkv[key(j) + d];
        if (c.soft_cap != 0) {
          const double tanh = std::tanh(p[j] / c.soft_cap);
          p[j] = c.soft_cap * tanh, slope[j] = 1 - tanh * tanh;
        }
        highest = std::max(highest, p[j]);
      }
      for (auto& v : p) sum += v = std::exp(v - highest);
      r.log_sums[h * m + token] = highest + std::log(sum);
      for (std::size_t d = 0; d < head; ++d) delta += given_out[o + d] * dout[o + d];
      for (std::size_t j = 0; j < p.size(); ++j) {
        p[j] /= sum;
        for (std::size_t d = 0; d < head; ++d) {
          r.out[o + d] += p[j] * qkv[value(j) + d];
          dp[j] += dout[o + d] * qkv[value(j) + d];
          r.dqkv[value(j) + d] += p[j] * dout[o + d];
        }
        const double ds = p[j] * (dp[j] - delta) * slope[j] * scale;
        for (std::size_t d = 0; d < head; ++d) {
          r.dqkv[q + d] += ds * qkv[key(j) + d];
          r.dqkv[key(j) + d] += ds * qkv[q + d];
        }
      }
    }
  }
  return r;
}

// Largest difference relative to the reference's root mean square, with one rounding to the tensor type besides.
void expect_close(const Doubles& result, const Doubles& expected, DType type, double tolerance, const char* what) {
  ASSERT_EQ(result.size(), expected.size());
  double square = 0;
  for (const double v : expected) square += v * v;
  const double scale = std::sqrt(square / static_cast<double>(expected.size()));
  for (std::size_t i = 0; i < result.size(); ++i) {
    const double rounding = type == DType::kBFloat16  ? std::abs(expected[i]) / 256
                            : type == DType::kFloat16 ? std::abs(expected[i]) / 2048 + 0x1p-25  // half of a subnormal
                                                      : 0;
    ASSERT_NEAR(result[i], expected[i], tolerance * scale + rounding) << what << " at " << i;
  }
}

class CudaAttentionTest : public testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    int devices = 0;
    const cudaError_t error = cudaGetDeviceCount(&devices);
    if (error != cudaSuccess) GTEST_SKIP() << "no GPU can be used: " << cudaGetErrorString(error);
    if (devices == 0) GTEST_SKIP() << "there is no GPU";
    ASSERT_EQ(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), cudaSuccess);
  }
  void TearDown() override {
    if (stream_ == nullptr) return;
    EXPECT_EQ(cudaStreamDestroy(stream_), cudaSuccess);
  }

  // Values that the tensor type holds exactly.
  Doubles values(std::size_t count, double spread, DType type) {
    Doubles all(count);
    std::normal_distribution<float> normal(0, static_cast<float>(spread));
    for (auto& v : all) v = rounded(normal(generator_), type);
    return all;
  }

  struct Outputs {
    Bytes out, log_sums, dqkv;
    bool operator==(const Outputs&) const = default;
  };
  Outputs run(const Case& c, const Bytes& qkv_bytes, const Bytes& dout_bytes) {
    const AttentionShape shape = c.shape();
    const std::size_t element = size_of(shape.type), m = static_cast<std::size_t>(shape.tokens());
    const Buffer qkv(qkv_bytes), dout(dout_bytes), out(dout_bytes.size()), dqkv(qkv_bytes.size());
    const Buffer log_sums(4 * shape.heads * m), scratch(attention_backward_scratch_bytes(shape));
    const std::vector<std::uint32_t> starts = c.starts();
    Bytes starts_bytes(4 * starts.size());
    std::memcpy(starts_bytes.data(), starts.data(), starts_bytes.size());
    const Buffer starts_buffer(starts_bytes);
    const std::size_t key_width = static_cast<std::size_t>(shape.key_width());
    const Buffer dkv(Bytes(c.part != 0 ? 4 * m * 2 * key_width : 0, 0));
    const auto at = [](const Buffer& buffer, std::size_t bytes) {
      return static_cast<unsigned char*>(buffer.data()) + bytes;
    };
    const std::size_t step = c.part != 0 ? c.part : m, qkv_row = element * static_cast<std::size_t>(shape.qkv_width());
    const std::size_t out_row = element * static_cast<std::size_t>(shape.query_width());
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    // Keys and values of a part are those of whole rows, where they lie.
    const auto each = [&](std::size_t first, bool forward) {
      AttentionShape own = shape;
      AttentionPart part;
      if (c.part != 0) {
        own.sequence = static_cast<std::uint32_t>(std::min<std::size_t>(step, m - first));
        part.keys = at(qkv, out_row);
        part.values = at(qkv, out_row + element * key_width);
        part.stride = static_cast<std::size_t>(shape.qkv_width());
        part.first = static_cast<std::uint32_t>(first);
        part.count = own.sequence;
      }
      const AttentionRules rules{
          .window = c.window,
          .scale = c.scale,
          .soft_cap = c.soft_cap,
          .starts = c.documents ? reinterpret_cast<std::uint32_t*>(at(starts_buffer, 4 * first)) : nullptr};
      auto* sums = reinterpret_cast<float*>(at(log_sums, 4 * shape.heads * first));
      const Attention there{at(qkv, qkv_row * first), at(out, out_row * first), sums, rules, part};
      const AttentionBackward back{.qkv = there.qkv,
                                   .out = there.out,
                                   .log_sums = sums,
                                   .dout = at(dout, out_row * first),
                                   .dqkv = at(dqkv, qkv_row * first),
                                   .rules = rules,
                                   .part = part,
                                   .dkv = c.part != 0 ? static_cast<float*>(dkv.data()) : nullptr};
      EXPECT_EQ(
          forward ? attention_forward(own, there, stream_) : attention_backward(own, back, scratch.data(), stream_),
          cudaSuccess);
    };
    for (std::size_t first = 0; first < m; first += step) each(first, true);
    for (std::size_t parts = (m + step - 1) / step; parts-- > 0;) each(parts * step, false);
    EXPECT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
    EXPECT_EQ(qkv.read(), qkv_bytes) << "an input was changed";
    EXPECT_EQ(dout.read(), dout_bytes) << "an input was changed";
    scratch.read();
    dkv.read();
    return {out.read(), log_sums.read(), dqkv.read()};
  }
  // [heads][M] of parts, one after the other, as [heads][M] of all.
  static Doubles joined(const Doubles& parts, const Case& c) {
    if (c.part == 0) return parts;
    Doubles all(parts.size());
    const std::size_t m = c.sequence;
    for (std::size_t first = 0; first < m; first += c.part) {
      const std::size_t count = std::min<std::size_t>(c.part, m - first);
      for (std::size_t i = 0; i < c.heads * count; ++i)
        all[i / count * m + first + i % count] = parts[c.heads * first + i];
    }
    return all;
  }

  std::mt19937 generator_{20240501};
  cudaStream_t stream_ = nullptr;
};

TEST_P(CudaAttentionTest, IsCausalAndGivesTheSameBitsTwice) {
  const AttentionShape shape = GetParam().shape();
  const DType type = shape.type;
  const auto m = static_cast<std::size_t>(shape.tokens());
  const auto qkv = values(m * shape.qkv_width(), GetParam().spread, type);
  const auto dout = values(m * shape.query_width(), 1, type);
  const Bytes qkv_bytes = encoded(qkv, type), dout_bytes = encoded(dout, type);
  const Outputs outputs = run(GetParam(), qkv_bytes, dout_bytes);
  const auto out = decoded(outputs.out, type);
  const auto expected = reference(GetParam(), qkv, out, dout);

  // Products in tensor cores take probabilities and their gradients rounded to the type: each term of a sum is off by
  // up to 2^-9 (bf16) or 2^-12 (fp16) of itself. Gradients are sums of differences of such terms.
  const bool tensor_cores = type != DType::kFloat32 && GetParam().head_width % 8 == 0 && GetParam().head_width <= 128;
  const double of_term = type == DType::kBFloat16 ? 0x1p-9 : 0x1p-12;
  // In plain fp32, scores up to 100 are off by 1e-5, and so is what is made of their exponentials.
  const double in_fp32 = GetParam().spread > 2 ? 1e-3 : 5e-5;
  expect_close(out, expected.out, type, tensor_cores ? 10 * of_term : in_fp32, "out");
  expect_close(joined(decoded(outputs.log_sums, DType::kFloat32), GetParam()), expected.log_sums, DType::kFloat32, 1e-5,
               "log_sums");
  expect_close(decoded(outputs.dqkv, type), expected.dqkv, type, tensor_cores ? 40 * of_term : in_fp32, "dqkv");
  EXPECT_EQ(run(GetParam(), qkv_bytes, dout_bytes), outputs);
}

INSTANTIATE_TEST_SUITE_P(, CudaAttentionTest, testing::ValuesIn(cases()),
                         [](const auto& info) { return name_of(info.param); });

TEST(CudaAttentionArgumentsTest, AHeadThatIsTooWideIsRefused) {
  for (const DType type : kDTypes) {
    const AttentionShape shape{type, 1, 16, 1, 1, 264};
    EXPECT_EQ(attention_forward(shape, {}, nullptr), cudaErrorInvalidValue);
    EXPECT_EQ(attention_backward(shape, {}, nullptr, nullptr), cudaErrorInvalidValue);
  }
}

TEST(CudaAttentionArgumentsTest, HeadsThatAreNoWholeGroupsAreRefused) {
  for (const auto& [heads, key_heads] : {std::pair{0u, 0u}, {4u, 3u}, {4u, 0u}, {2u, 4u}}) {
    EXPECT_EQ(attention_forward({DType::kBFloat16, 1, 16, heads, key_heads, 64}, {}, nullptr), cudaErrorInvalidValue);
  }
}

TEST(CudaAttentionArgumentsTest, APartHasTheShapesTokensAndSumsOfGradients) {
  const AttentionShape shape{DType::kBFloat16, 1, 16, 2, 2, 64};
  AttentionBackward op{};
  op.part = {.keys = &op, .values = &op, .stride = 384, .first = 16, .count = 8};
  EXPECT_EQ(attention_backward(shape, op, nullptr, nullptr), cudaErrorInvalidValue) << "another count";
  op.part.count = 16;
  EXPECT_EQ(attention_backward(shape, op, nullptr, nullptr), cudaErrorInvalidValue) << "no sums";
}

}  // namespace
}  // namespace spillway::models
