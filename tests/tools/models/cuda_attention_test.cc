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

  AttentionShape shape() const {
    return {.type = type, .batch = 2, .sequence = sequence, .width = 2 * head_width, .heads = 2};
  }
};

std::string name_of(const Case& c) {
  return std::string(name_of(c.type)) + "_head_" + std::to_string(c.head_width) + "_tokens_" +
         std::to_string(c.sequence) + (c.spread == 1.5 ? "" : "_peaked");
}

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const DType type : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    for (const std::uint32_t head_width : {64, 128, 96, 80, 88, 20, 8}) {
      for (const std::uint32_t sequence : {1, 17, 64, 150, 257}) all.push_back({type, head_width, sequence});
      // Scores far apart: sums are rescaled again and again.
      all.push_back({type, head_width, 150, 5});
    }
    for (const std::uint32_t head_width : {130, 256}) all.push_back({type, head_width, 50});
  }
  return all;
}

struct Reference {
  Doubles out, log_sums, dqkv;
};

// Backward takes the `out` that it is given, like the implementation: a rounded one.
Reference reference(const AttentionShape& s, const Doubles& qkv, const Doubles& given_out, const Doubles& dout) {
  const std::size_t t = s.sequence, m = s.batch * t, width = s.width, head = width / s.heads, stride = 3 * width;
  const double scale = 1 / std::sqrt(static_cast<double>(head));
  Reference r{Doubles(m * width, 0.0), Doubles(s.heads * m), Doubles(qkv.size(), 0.0)};
  for (std::size_t h = 0; h < s.heads; ++h) {
    for (std::size_t token = 0; token < m; ++token) {
      const std::size_t first = token / t * t, q = token * stride + h * head, o = token * width + h * head;
      Doubles p(token - first + 1, 0.0), dp(p.size(), 0.0);
      const auto key = [&](std::size_t j) { return (first + j) * stride + width + h * head; };
      const auto value = [&](std::size_t j) { return key(j) + width; };
      double highest = -1e300, sum = 0, delta = 0;
      for (std::size_t j = 0; j < p.size(); ++j) {
        for (std::size_t d = 0; d < head; ++d) p[j] += scale * qkv[q + d] * qkv[key(j) + d];
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
        const double ds = p[j] * (dp[j] - delta) * scale;
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
  Outputs run(const AttentionShape& shape, const Bytes& qkv_bytes, const Bytes& dout_bytes) {
    const Buffer qkv(qkv_bytes), dout(dout_bytes), out(dout_bytes.size()), dqkv(qkv_bytes.size());
    const Buffer log_sums(std::size_t{4} * shape.heads * shape.batch * shape.sequence);
    const Buffer scratch(attention_backward_scratch_bytes(shape));
    auto* sums = static_cast<float*>(log_sums.data());
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    EXPECT_EQ(attention_forward(shape, qkv.data(), out.data(), sums, stream_), cudaSuccess);
    EXPECT_EQ(
        attention_backward(shape, qkv.data(), out.data(), sums, dout.data(), dqkv.data(), scratch.data(), stream_),
        cudaSuccess);
    EXPECT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
    EXPECT_EQ(qkv.read(), qkv_bytes) << "an input was changed";
    EXPECT_EQ(dout.read(), dout_bytes) << "an input was changed";
    scratch.read();
    return {out.read(), log_sums.read(), dqkv.read()};
  }

  std::mt19937 generator_{20240501};
  cudaStream_t stream_ = nullptr;
};

TEST_P(CudaAttentionTest, IsCausalAndGivesTheSameBitsTwice) {
  const AttentionShape shape = GetParam().shape();
  const DType type = shape.type;
  const std::size_t count = std::size_t{shape.batch} * shape.sequence * shape.width;
  const auto qkv = values(3 * count, GetParam().spread, type), dout = values(count, 1, type);
  const Bytes qkv_bytes = encoded(qkv, type), dout_bytes = encoded(dout, type);
  const Outputs outputs = run(shape, qkv_bytes, dout_bytes);
  const auto out = decoded(outputs.out, type);
  const auto expected = reference(shape, qkv, out, dout);

  // Products in tensor cores take probabilities and their gradients rounded to the type: each term of a sum is off by
  // up to 2^-9 (bf16) or 2^-12 (fp16) of itself. Gradients are sums of differences of such terms.
  const bool tensor_cores = type != DType::kFloat32 && GetParam().head_width % 8 == 0 && GetParam().head_width <= 128;
  const double of_term = type == DType::kBFloat16 ? 0x1p-9 : 0x1p-12;
  // In plain fp32, scores up to 100 are off by 1e-5, and so is what is made of their exponentials.
  const double in_fp32 = GetParam().spread > 2 ? 1e-3 : 5e-5;
  expect_close(out, expected.out, type, tensor_cores ? 10 * of_term : in_fp32, "out");
  expect_close(decoded(outputs.log_sums, DType::kFloat32), expected.log_sums, DType::kFloat32, 1e-5, "log_sums");
  expect_close(decoded(outputs.dqkv, type), expected.dqkv, type, tensor_cores ? 40 * of_term : in_fp32, "dqkv");
  EXPECT_EQ(run(shape, qkv_bytes, dout_bytes), outputs);
}

INSTANTIATE_TEST_SUITE_P(, CudaAttentionTest, testing::ValuesIn(cases()),
                         [](const auto& info) { return name_of(info.param); });

TEST(CudaAttentionArgumentsTest, AHeadThatIsTooWideIsRefused) {
  for (const DType type : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    const AttentionShape shape{.type = type, .batch = 1, .sequence = 16, .width = 264, .heads = 1};
    EXPECT_EQ(attention_forward(shape, nullptr, nullptr, nullptr, nullptr), cudaErrorInvalidValue);
    EXPECT_EQ(attention_backward(shape, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr),
              cudaErrorInvalidValue);
  }
}

TEST(CudaAttentionArgumentsTest, HeadsThatDoNotDivideTheWidthAreRefused) {
  for (const std::uint32_t heads : {0u, 3u}) {
    const AttentionShape shape{.type = DType::kBFloat16, .batch = 1, .sequence = 16, .width = 64, .heads = heads};
    EXPECT_EQ(attention_forward(shape, nullptr, nullptr, nullptr, nullptr), cudaErrorInvalidValue);
  }
}

}  // namespace
}  // namespace spillway::models
