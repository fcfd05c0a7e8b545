// What a program of tests gives the suite of the operations: the variants it runs, and a place for each to run in.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <ostream>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "spillway/engine.h"
#include "tests/tools/models/fake_engine.h"
#include "tools/models/ops/ops.h"

namespace spillway::models {

using Doubles = std::vector<double>;

// Operations that are bound to an engine, and the engine's memory.
class OpsMachine {
 public:
  virtual ~OpsMachine() = default;
  virtual Ops& ops() = 0;
  virtual Stream& stream() = 0;
  // A piece of the arena, aligned to 64.
  virtual std::byte* allocate(std::size_t bytes) = 0;
  // Between host memory and the arena, after everything enqueued; done when they return.
  virtual void put(const void* from, void* to, std::size_t bytes) = 0;
  virtual void get(const void* from, void* to, std::size_t bytes) = 0;
};

// Largest differences that are right, relative to the root mean square of what is expected; besides them a result may
// be rounded to the tensor type.
struct Tolerances {
  double product = 5e-6, gelu = 1e-5, gelu_backward = 1e-5, attention = 1e-5, head = 1e-5;
  DType dlogits = DType::kFloat32;  // what gradients of logits are rounded to inside the head
  // Products whose rows are not aligned to 16 bytes are rounded to the tensor type before a bias is added.
  bool rounds_before_bias = false;
};

struct Variant {
  const char* name;
  DType type;
  Tolerances tolerances;
  std::function<std::unique_ptr<OpsMachine>(const Shape& shape, unsigned threads)> create;
};

inline void PrintTo(const Variant& variant, std::ostream* out) { *out << variant.name; }

// Each program has its own. The variants need not run where `why_not` says why.
std::vector<Variant> ops_variants();
std::string why_not();

// A machine with tensors of doubles, of one shape.
class Bench {
 public:
  Bench(const Shape& shape, const Variant& variant, unsigned threads)
      : shape(shape), machine(variant.create(shape, threads)) {}

  std::byte* tensor(const Doubles& values) { return tensor(values, shape.type); }
  std::byte* tensor(const Doubles& values, DType type) {
    std::vector<std::byte> bytes(values.size() * size_of(type));
    for (std::size_t i = 0; i < values.size(); ++i) {
      FakeEngine::put(bytes.data(), i, type, static_cast<float>(values[i]));
    }
    return uploaded(bytes.data(), bytes.size());
  }
  float* fp32_tensor(const Doubles& values) { return reinterpret_cast<float*>(tensor(values, DType::kFloat32)); }
  std::byte* output(std::size_t count) { return machine->allocate(count * size_of(shape.type)); }
  float* floats(std::size_t count) { return reinterpret_cast<float*>(machine->allocate(count * sizeof(float))); }
  float* log_sums() { return floats(machine->ops().attention_log_sums()); }
  std::uint32_t* tokens(const std::vector<std::uint32_t>& values) {
    return reinterpret_cast<std::uint32_t*>(uploaded(values.data(), values.size() * sizeof(values[0])));
  }
  Doubles read(const void* memory, std::size_t count) const { return read(memory, count, shape.type); }
  Doubles read(const void* memory, std::size_t count, DType type) const {
    const std::vector<std::byte> bytes = read_bytes(memory, count * size_of(type));
    Doubles out(count);
    for (std::size_t i = 0; i < count; ++i) out[i] = FakeEngine::widened(bytes.data(), i, type);
    return out;
  }
  std::vector<std::byte> read_bytes(const void* memory, std::size_t bytes) const {
    std::vector<std::byte> out(bytes);
    machine->get(memory, out.data(), bytes);
    return out;
  }
  template <typename Op>
  void run(const Op& op) {
    machine->ops().run(op, machine->stream());
  }

  Shape shape;
  std::unique_ptr<OpsMachine> machine;

 private:
  std::byte* uploaded(const void* from, std::size_t bytes) {
    std::byte* memory = machine->allocate(bytes);
    machine->put(from, memory, bytes);
    return memory;
  }
};

class Random {
 public:
  explicit Random(DType type) : type_(type) {}
  // Values that the tensor type holds exactly.
  Doubles values(std::size_t count, double spread = 1) {
    Doubles out(count);
    std::normal_distribution<float> normal(0, static_cast<float>(spread));
    for (auto& v : out) {
      const float drawn = normal(generator_);
      v = FakeEngine::rounded(drawn, type_);
    }
    return out;
  }
  std::vector<std::uint32_t> tokens(std::size_t count, std::uint32_t below) {
    std::vector<std::uint32_t> out(count);
    for (auto& t : out) t = static_cast<std::uint32_t>(generator_() % below);
    return out;
  }

 private:
  DType type_;
  std::mt19937 generator_{20240501};
};

// Sizes that are no multiples of any block: 300 tokens over 256-row blocks, heads of 20, vocabulary 301.
inline Shape odd_shape(DType type) {
  return {.type = type,
          .batch = 2,
          .sequence = 150,
          .width = 60,
          .heads = 3,
          .inner = 200,
          .vocabulary = 301,
          .positions = 160,
          .epsilon = 1e-5f};
}
inline Shape even_shape(DType type) {
  return {.type = type,
          .batch = 1,
          .sequence = 128,
          .width = 128,
          .heads = 1,
          .inner = 320,
          .vocabulary = 256,
          .positions = 128,
          .epsilon = 1e-5f};
}

// Rows that no vector divides, and heads, words and tokens likewise.
inline Shape uneven_shape(DType type) {
  return {.type = type,
          .batch = 3,
          .sequence = 33,
          .width = 63,
          .heads = 3,
          .inner = 201,
          .vocabulary = 97,
          .positions = 40,
          .epsilon = 1e-5f};
}

// Of a few tokens, in rows that one block of threads has much to do with.
inline std::vector<Shape> wide_shapes(DType type) {
  std::vector<Shape> shapes;
  for (const auto& [width, heads] : {std::pair{1035u, 9u}, {2080u, 65u}, {4224u, 66u}, {8208u, 114u}}) {
    shapes.push_back({.type = type,
                      .batch = 1,
                      .sequence = 11,
                      .width = width,
                      .heads = heads,
                      .inner = 8,
                      .vocabulary = 8,
                      .positions = 11,
                      .epsilon = 1e-5f});
  }
  return shapes;
}

struct NamedShape {
  const char* name;
  Shape (*of)(DType type);
};

inline void PrintTo(const NamedShape& shape, std::ostream* out) { *out << shape.name; }

// Largest difference relative to the reference's root mean square, and one rounding to the tensor type besides; another
// one of `before`, where something was rounded on the way.
inline void expect_close(const Doubles& result, const Doubles& expected, DType type, double tolerance, const char* what,
                         const Doubles& before = {}) {
  ASSERT_EQ(result.size(), expected.size());
  double square = 0;
  for (const double v : expected) square += v * v;
  const double scale = std::sqrt(square / static_cast<double>(expected.size()));
  for (std::size_t i = 0; i < result.size(); ++i) {
    const double rounded = std::abs(expected[i]) + (before.empty() ? 0 : std::abs(before[i]));
    const double rounding = type == DType::kBFloat16  ? rounded / 256
                            : type == DType::kFloat16 ? rounded / 2048 + 0x1p-25  // half of a subnormal
                                                      : 0;
    ASSERT_NEAR(result[i], expected[i], tolerance * scale + rounding) << what << " at " << i;
  }
}

// y[m][n] = sum over k of a(m, k) * b(k, n)
inline Doubles product(std::size_t m, std::size_t n, std::size_t k,
                       const std::function<double(std::size_t, std::size_t)>& a,
                       const std::function<double(std::size_t, std::size_t)>& b) {
  Doubles out(m * n, 0.0);
  for (std::size_t i = 0; i < m; ++i) {
    for (std::size_t l = 0; l < k; ++l) {
      for (std::size_t j = 0; j < n; ++j) out[i * n + j] += a(i, l) * b(l, j);
    }
  }
  return out;
}

// AttentionRules on the host.
struct Rules {
  std::uint32_t window = 0;
  float scale = 0, soft_cap = 0;
  std::vector<std::uint32_t> starts = {};
};

// Plain loops in double (ops_suite_whole.cc).
struct AttentionReference {
  Doubles out, dqkv;
};
AttentionReference attention_reference(const Shape& shape, const Doubles& qkv, const Doubles& dout,
                                       const Rules& rules = {});
struct HeadReference {
  Doubles losses, dx, dtoken_weight;
};
HeadReference head_reference(const Shape& shape, const Doubles& x, const Doubles& token_weight,
                             const std::vector<std::uint32_t>& targets, float scale, float soft_cap = 0);

class OpsTest : public testing::TestWithParam<std::tuple<Variant, NamedShape>> {
 protected:
  OpsTest() : random_(variant().type) {}
  void SetUp() override {
    if (const std::string why = why_not(); !why.empty()) GTEST_SKIP() << why;
    bench_.emplace(std::get<1>(GetParam()).of(variant().type), variant(), 2);
  }
  static Variant variant() { return std::get<0>(GetParam()); }
  static Tolerances tolerances() { return variant().tolerances; }
  const Shape& shape() const { return bench_->shape; }
  std::size_t tokens() const { return bench_->shape.tokens(); }
  void close(const void* memory, const Doubles& expected, double tolerance, const char* what,
             const Doubles& before = {}) const {
    expect_close(bench_->read(memory, expected.size()), expected, shape().type, tolerance, what, before);
  }
  // What is rounded on the way of `product`, with rows, strides and columns of these sizes, to a result with a bias;
  // empty: nothing.
  Doubles rounded_before_bias(const Doubles& product, std::initializer_list<std::size_t> sizes) const {
    const bool aligned = std::all_of(sizes.begin(), sizes.end(), [](std::size_t size) { return size % 8 == 0; });
    return tolerances().rounds_before_bias && !aligned ? product : Doubles{};
  }
  void close_fp32(const void* memory, const Doubles& expected, double tolerance, const char* what) const {
    expect_close(bench_->read(memory, expected.size(), DType::kFloat32), expected, DType::kFloat32, tolerance, what);
  }

  std::optional<Bench> bench_;
  Random random_;
};

// Shapes that take other ways through single operations.
class OpsOfSizeTest : public testing::TestWithParam<Variant> {
 protected:
  void SetUp() override {
    if (const std::string why = why_not(); !why.empty()) GTEST_SKIP() << why;
  }
};

}  // namespace spillway::models
