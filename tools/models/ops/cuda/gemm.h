// Matrix products by cuBLASLt; private to tools/models/ops/cuda.
//
// Matrices are column-major here, as cuBLASLt has them: a row-major tensor [r][c] is the column-major matrix c × r with
// stride c. So y = x · weight of row-major tensors is the product yᵀ = weightᵀ · xᵀ of what lies in memory, and nothing
// is transposed for it.
//
// How a product is computed is chosen once, when it is planned, by cuBLASLt's heuristic from its shape, types and
// alignment, never by trying; parts of a sum are added in fp32 and in a fixed order. So the bits are the same every
// time on GPUs of one kind with one version of cuBLASLt. fp32 is computed in fp32: no TF32.
//
// A product is planned for the alignment of its matrices' addresses, and of their strides, at most 16 bytes. Not
// thread-safe but for different objects.
#pragma once

#include <cublasLt.h>

#include <compare>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "spillway/dtype.h"

namespace spillway::models {

// What is done to a product before it is rounded.
enum class Epilogue : std::uint8_t {
  kNone,
  kBias,          // + bias[row]
  kGelu,          // aux = product + bias[row]; result = gelu(aux before rounding)
  kGeluBackward,  // product * gelu'(aux)
  kBiasGradient,  // bias[row] = sum of A over the product's depth, besides
};

// d [rows × columns] = epilogue(a [rows × depth] · b [depth × columns]) + beta * c
struct Product {
  struct Operand {
    bool transposed;  // as it lies in memory
    std::uint64_t stride;
    std::uint32_t alignment = 16;  // of the address, in bytes: a power of 2
    auto operator<=>(const Operand&) const = default;
  };
  std::string_view name;  // in errors
  std::uint64_t rows, columns, depth;
  DType operands, result;
  Operand a, b;
  std::uint64_t stride;  // of c, d and aux
  Epilogue epilogue = Epilogue::kNone;
  std::uint32_t alignment = 16;  // of the addresses of c and d
  auto operator<=>(const Product&) const = default;
};

struct ProductMemory {
  const void *a, *b;
  void* d;
  const void* c = nullptr;  // null: d
  float beta = 0;
  const void* bias = nullptr;  // kBias, kGelu; kBiasGradient writes it
  const void* aux = nullptr;   // kGelu writes it
};

class Gemm;

class PlannedProduct {
 private:
  friend class Gemm;
  std::string_view name_;
  Epilogue epilogue_ = Epilogue::kNone;
  cublasLtMatmulDescOpaque_t description_{};
  cublasLtMatrixLayoutOpaque_t a_{}, b_{}, d_{};
  cublasLtMatmulAlgo_t algorithm_{};
};

class Gemm {
 public:
  static constexpr std::size_t kWorkspaceBytes = 32 << 20;

  // `workspace`: device memory, aligned to 256.
  explicit Gemm(std::span<std::byte> workspace);
  ~Gemm();
  Gemm(const Gemm&) = delete;
  Gemm& operator=(const Gemm&) = delete;

  // Nothing: cuBLASLt has none like it; `why` is then what it answered.
  std::optional<PlannedProduct> find(const Product& product, std::string* why = nullptr) const;
  // The same; throws kUnsupported, with the answer, in place of nothing.
  PlannedProduct plan(const Product& product) const;
  // Enqueues; allocates nothing. Throws kDevice.
  void run(const PlannedProduct& product, const ProductMemory& memory, cudaStream_t stream) const;

 private:
  cublasLtHandle_t handle_ = nullptr;
  std::span<std::byte> workspace_;
};

}  // namespace spillway::models
