// cuBLASLt: products of column-major matrices in fp32, each element's terms added in order.
//
// Strict where cuBLASLt is, and where it answers with whatever lies in memory: a product runs only with the algorithm
// that was chosen for its types, shape, strides and epilogue, at addresses that are as aligned as was promised then.
#include <cublasLt.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "kernels/cuda/emulator/blocks.h"
#include "kernels/cuda/emulator/runtime.h"

namespace spillway::emulated {
namespace {

struct Layout {
  cudaDataType type;
  std::uint64_t rows, columns;
  std::int64_t stride;
  bool operator==(const Layout&) const = default;
};

struct Description {
  cublasComputeType_t compute;
  cudaDataType scale;
  cublasOperation_t transpose_a, transpose_b;
  cublasLtEpilogue_t epilogue;
  std::int32_t bias_type;
  void *bias, *aux;
  std::int64_t aux_stride;
};

struct Preference {
  std::uint64_t workspace_bytes;
  std::uint32_t reduction_schemes;
  std::uint32_t alignment[4];  // of a, b, c, d
};

struct Algorithm {
  std::uint64_t product;  // digest of what it was chosen for
  std::uint32_t alignment[4];
};

template <typename Contents, typename Opaque>
Contents& open(Opaque* opaque) {
  static_assert(sizeof(Contents) <= sizeof(Opaque) && std::is_trivially_copyable_v<Contents>);
  return *reinterpret_cast<Contents*>(opaque->data);
}
template <typename Contents, typename Opaque>
const Contents& open(const Opaque* opaque) {
  return open<Contents>(const_cast<Opaque*>(opaque));
}

struct Problem {
  Description how;
  Layout a, b, c, d;

  std::uint64_t rows() const { return how.transpose_a == CUBLAS_OP_N ? a.rows : a.columns; }
  std::uint64_t depth() const { return how.transpose_a == CUBLAS_OP_N ? a.columns : a.rows; }
  std::uint64_t columns() const { return how.transpose_b == CUBLAS_OP_N ? b.columns : b.rows; }
  bool has_bias() const {
    return how.epilogue == CUBLASLT_EPILOGUE_BIAS || how.epilogue == CUBLASLT_EPILOGUE_GELU_AUX_BIAS ||
           how.epilogue == CUBLASLT_EPILOGUE_BGRADA;
  }
  bool has_aux() const {
    return how.epilogue == CUBLASLT_EPILOGUE_GELU_AUX_BIAS || how.epilogue == CUBLASLT_EPILOGUE_DGELU;
  }
  std::uint64_t digest() const {
    std::uint64_t all = 14695981039346656037u;
    const auto add = [&](auto value) { all = (all ^ static_cast<std::uint64_t>(value)) * 1099511628211u; };
    for (const Layout& matrix : {a, b, c, d})
      add(matrix.type), add(matrix.rows), add(matrix.columns), add(matrix.stride);
    add(how.transpose_a), add(how.transpose_b), add(how.epilogue), add(how.bias_type), add(how.aux_stride);
    return all;
  }
};

Problem problem_of(const cublasLtMatmulDescOpaque_t* how, const cublasLtMatrixLayoutOpaque_t* a,
                   const cublasLtMatrixLayoutOpaque_t* b, const cublasLtMatrixLayoutOpaque_t* c,
                   const cublasLtMatrixLayoutOpaque_t* d) {
  return {open<Description>(how), open<Layout>(a), open<Layout>(b), open<Layout>(c), open<Layout>(d)};
}

std::size_t size_of(cudaDataType type) { return type == CUDA_R_32F ? 4 : 2; }
std::size_t bytes_of(const Layout& matrix) {
  return ((matrix.columns - 1) * static_cast<std::uint64_t>(matrix.stride) + matrix.rows) * size_of(matrix.type);
}
bool is_aligned(const void* data, std::size_t to) { return reinterpret_cast<std::uintptr_t>(data) % to == 0; }

cublasStatus_t status_of(const Problem& p) {
  for (const Layout& matrix : {p.a, p.b, p.c, p.d}) {
    if (matrix.rows == 0 || matrix.columns == 0) return CUBLAS_STATUS_INVALID_VALUE;
    if (matrix.stride < static_cast<std::int64_t>(matrix.rows)) return CUBLAS_STATUS_INVALID_VALUE;
  }
  const std::uint64_t depth_of_b = p.how.transpose_b == CUBLAS_OP_N ? p.b.rows : p.b.columns;
  if (p.depth() != depth_of_b || p.d.rows != p.rows() || p.d.columns != p.columns()) return CUBLAS_STATUS_INVALID_VALUE;
  if (!(p.c == p.d)) return CUBLAS_STATUS_INVALID_VALUE;
  const bool fp32 = p.a.type == CUDA_R_32F;
  if (p.a.type != p.b.type || (p.d.type != p.a.type && p.d.type != CUDA_R_32F)) return CUBLAS_STATUS_NOT_SUPPORTED;
  if (p.how.compute != CUBLAS_COMPUTE_32F || p.how.scale != CUDA_R_32F) return CUBLAS_STATUS_NOT_SUPPORTED;
  if (p.has_bias() && p.how.bias == nullptr) return CUBLAS_STATUS_INVALID_VALUE;
  if (p.has_bias() && p.how.bias_type != p.d.type) return CUBLAS_STATUS_NOT_SUPPORTED;
  if (p.has_aux() && (p.how.aux == nullptr || p.how.aux_stride < p.d.stride)) return CUBLAS_STATUS_INVALID_VALUE;
  if (p.has_aux() && (fp32 || p.how.aux_stride % 8 != 0)) return CUBLAS_STATUS_NOT_SUPPORTED;
  if (p.how.epilogue == CUBLASLT_EPILOGUE_BGRADA && (fp32 || p.d.type != p.a.type)) return CUBLAS_STATUS_NOT_SUPPORTED;
  return CUBLAS_STATUS_SUCCESS;
}

float get(const void* data, cudaDataType type, std::size_t i) {
  switch (type) {
    case CUDA_R_16BF: return __bfloat162float(static_cast<const __nv_bfloat16*>(data)[i]);
    case CUDA_R_16F: return __half2float(static_cast<const __half*>(data)[i]);
    default: return static_cast<const float*>(data)[i];
  }
}
void put(float value, void* data, cudaDataType type, std::size_t i) {
  switch (type) {
    case CUDA_R_16BF: static_cast<__nv_bfloat16*>(data)[i] = __float2bfloat16_rn(value); return;
    case CUDA_R_16F: static_cast<__half*>(data)[i] = __float2half_rn(value); return;
    default: static_cast<float*>(data)[i] = value; return;
  }
}

// As [columns][rows] of fp32, without gaps.
std::vector<float> widened(const void* data, const Layout& matrix, bool transposed) {
  std::vector<float> all(matrix.rows * matrix.columns);
  for (std::size_t c = 0; c < matrix.columns; ++c) {
    for (std::size_t r = 0; r < matrix.rows; ++r) {
      const float value = get(data, matrix.type, c * static_cast<std::uint64_t>(matrix.stride) + r);
      all[transposed ? r * matrix.columns + c : c * matrix.rows + r] = value;
    }
  }
  return all;
}

constexpr float kSlope = 0.7978845608028654f, kCubic = 0.044715f;  // sqrt(2 / pi)
float gelu(float x) { return 0.5f * x * (1 + std::tanh(kSlope * (x + kCubic * x * x * x))); }
float gelu_derivative(float x) {
  const float t = std::tanh(kSlope * (x + kCubic * x * x * x));
  return 0.5f * (1 + t) + 0.5f * x * (1 - t * t) * kSlope * (1 + 3 * kCubic * x * x);
}

void multiply(const Problem& p, const void* a, const void* b, float beta, const void* c, void* d) {
  const std::size_t rows = p.rows(), depth = p.depth(), columns = p.columns();
  const std::vector<float> left = widened(a, p.a, p.how.transpose_a != CUBLAS_OP_N);   // [depth][rows]
  const std::vector<float> right = widened(b, p.b, p.how.transpose_b != CUBLAS_OP_N);  // [columns][depth]
  std::vector<float> sums(rows);
  for (std::size_t j = 0; j < columns; ++j) {
    std::fill(sums.begin(), sums.end(), 0.0f);
    for (std::size_t k = 0; k < depth; ++k) {
      const float factor = right[j * depth + k];
      const float* column = &left[k * rows];
      for (std::size_t i = 0; i < rows; ++i) sums[i] += factor * column[i];
    }
    for (std::size_t i = 0; i < rows; ++i) {
      const std::size_t at = j * static_cast<std::uint64_t>(p.d.stride) + i;
      const std::size_t aux_at = j * static_cast<std::uint64_t>(p.how.aux_stride) + i;
      float x = sums[i] + (beta != 0 ? beta * get(c, p.c.type, at) : 0);
      switch (p.how.epilogue) {
        case CUBLASLT_EPILOGUE_BIAS: x += get(p.how.bias, p.d.type, i); break;
        case CUBLASLT_EPILOGUE_GELU_AUX_BIAS:
          x += get(p.how.bias, p.d.type, i);
          put(x, p.how.aux, p.d.type, aux_at);
          x = gelu(x);
          break;
        case CUBLASLT_EPILOGUE_DGELU: x *= gelu_derivative(get(p.how.aux, p.d.type, aux_at)); break;
        default: break;
      }
      put(x, d, p.d.type, at);
    }
  }
  if (p.how.epilogue != CUBLASLT_EPILOGUE_BGRADA) return;
  std::fill(sums.begin(), sums.end(), 0.0f);
  for (std::size_t k = 0; k < depth; ++k) {
    for (std::size_t i = 0; i < rows; ++i) sums[i] += left[k * rows + i];
  }
  for (std::size_t i = 0; i < rows; ++i) put(sums[i], p.how.bias, p.d.type, i);
}

template <typename Value>
cublasStatus_t assign(Value& to, const void* from, std::size_t bytes) {
  if (bytes != sizeof to) return CUBLAS_STATUS_INVALID_VALUE;
  std::memcpy(&to, from, bytes);
  return CUBLAS_STATUS_SUCCESS;
}

}  // namespace
}  // namespace spillway::emulated

using namespace spillway::emulated;

extern "C" {

std::size_t cublasLtGetVersion() { return CUBLAS_VERSION; }
cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle) {
  static int the;
  return *handle = reinterpret_cast<cublasLtHandle_t>(&the), CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtDestroy(cublasLtHandle_t) { return CUBLAS_STATUS_SUCCESS; }
const char* cublasLtGetStatusString(cublasStatus_t status) {
  switch (status) {
    case CUBLAS_STATUS_SUCCESS: return "CUBLAS_STATUS_SUCCESS";
    case CUBLAS_STATUS_INVALID_VALUE: return "CUBLAS_STATUS_INVALID_VALUE";
    case CUBLAS_STATUS_NOT_SUPPORTED: return "CUBLAS_STATUS_NOT_SUPPORTED";
    case CUBLAS_STATUS_EXECUTION_FAILED: return "CUBLAS_STATUS_EXECUTION_FAILED";
    default: return "a status that the emulated GPU does not have";
  }
}

cublasStatus_t cublasLtMatrixLayoutInit_internal(cublasLtMatrixLayout_t layout, std::size_t, cudaDataType type,
                                                 std::uint64_t rows, std::uint64_t columns, std::int64_t stride) {
  open<Layout>(layout) = {type, rows, columns, stride};
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescInit_internal(cublasLtMatmulDesc_t description, std::size_t,
                                               cublasComputeType_t compute, cudaDataType scale) {
  open<Description>(description) = {.compute = compute,
                                    .scale = scale,
                                    .transpose_a = CUBLAS_OP_N,
                                    .transpose_b = CUBLAS_OP_N,
                                    .epilogue = CUBLASLT_EPILOGUE_DEFAULT,
                                    .bias_type = -1,
                                    .bias = nullptr,
                                    .aux = nullptr,
                                    .aux_stride = 0};
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t description,
                                              cublasLtMatmulDescAttributes_t attribute, const void* value,
                                              std::size_t bytes) {
  Description& to = open<Description>(description);
  switch (attribute) {
    case CUBLASLT_MATMUL_DESC_TRANSA: return assign(to.transpose_a, value, bytes);
    case CUBLASLT_MATMUL_DESC_TRANSB: return assign(to.transpose_b, value, bytes);
    case CUBLASLT_MATMUL_DESC_EPILOGUE: return assign(to.epilogue, value, bytes);
    case CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE: return assign(to.bias_type, value, bytes);
    case CUBLASLT_MATMUL_DESC_BIAS_POINTER: return assign(to.bias, value, bytes);
    case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD: return assign(to.aux_stride, value, bytes);
    case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER: return assign(to.aux, value, bytes);
    default: return CUBLAS_STATUS_NOT_SUPPORTED;
  }
}

cublasStatus_t cublasLtMatmulPreferenceInit_internal(cublasLtMatmulPreference_t preference, std::size_t) {
  open<Preference>(preference) = {0, CUBLASLT_REDUCTION_SCHEME_MASK, {256, 256, 256, 256}};
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t preference,
                                                    cublasLtMatmulPreferenceAttributes_t attribute, const void* value,
                                                    std::size_t bytes) {
  Preference& to = open<Preference>(preference);
  switch (attribute) {
    case CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES: return assign(to.workspace_bytes, value, bytes);
    case CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK: return assign(to.reduction_schemes, value, bytes);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES: return assign(to.alignment[0], value, bytes);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES: return assign(to.alignment[1], value, bytes);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES: return assign(to.alignment[2], value, bytes);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES: return assign(to.alignment[3], value, bytes);
    default: return CUBLAS_STATUS_NOT_SUPPORTED;
  }
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t how, cublasLtMatrixLayout_t a,
                                              cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c,
                                              cublasLtMatrixLayout_t d, cublasLtMatmulPreference_t preference,
                                              int requested, cublasLtMatmulHeuristicResult_t* results, int* found) {
  const Problem problem = problem_of(how, a, b, c, d);
  *found = 0;
  if (const cublasStatus_t status = status_of(problem); status != CUBLAS_STATUS_SUCCESS) return status;
  if (requested < 1) return CUBLAS_STATUS_INVALID_VALUE;
  results[0] = {};
  Algorithm& algorithm = open<Algorithm>(&results[0].algo);
  algorithm.product = problem.digest();
  std::copy_n(open<Preference>(preference).alignment, 4, algorithm.alignment);
  results[0].workspaceSize = open<Preference>(preference).workspace_bytes;
  results[0].state = CUBLAS_STATUS_SUCCESS;
  *found = 1;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t, cublasLtMatmulDesc_t how, const void* alpha, const void* a,
                              cublasLtMatrixLayout_t layout_a, const void* b, cublasLtMatrixLayout_t layout_b,
                              const void* beta, const void* c, cublasLtMatrixLayout_t layout_c, void* d,
                              cublasLtMatrixLayout_t layout_d, const cublasLtMatmulAlgo_t* algo, void* workspace,
                              std::size_t workspace_bytes, cudaStream_t stream) {
  const Problem problem = problem_of(how, layout_a, layout_b, layout_c, layout_d);
  const Algorithm& algorithm = open<Algorithm>(algo);
  if (const cublasStatus_t status = status_of(problem); status != CUBLAS_STATUS_SUCCESS) return status;
  if (algorithm.product != problem.digest()) stop("a product runs with an algorithm that was chosen for another");
  if (*static_cast<const float*>(alpha) != 1) stop("products are not scaled");
  const float old = *static_cast<const float*>(beta);
  const struct {
    const void* data;
    const Layout& layout;
  } operands[] = {{a, problem.a}, {b, problem.b}, {c, problem.c}, {d, problem.d}};
  for (std::size_t i = 0; i < std::size(operands); ++i) {
    if (!in_device_memory(operands[i].data, bytes_of(operands[i].layout))) stop("a matrix outside of device memory");
    if (!is_aligned(operands[i].data, algorithm.alignment[i])) stop("a matrix is less aligned than was promised");
  }
  if (!in_device_memory(workspace, workspace_bytes)) stop("a workspace outside of device memory");
  if (problem.has_bias() && (!in_device_memory(problem.how.bias, problem.rows() * size_of(problem.d.type)) ||
                             !is_aligned(problem.how.bias, 16))) {
    stop("a bias outside of device memory, or less aligned than was promised");
  }
  const Layout aux{problem.d.type, problem.d.rows, problem.d.columns, problem.how.aux_stride};
  if (problem.has_aux() && (!in_device_memory(problem.how.aux, bytes_of(aux)) || !is_aligned(problem.how.aux, 16))) {
    stop("an epilogue's matrix outside of device memory, or less aligned than was promised");
  }
  if (enter(stream == nullptr ? "product on the default stream" : "product") != cudaSuccess) {
    return CUBLAS_STATUS_EXECUTION_FAILED;
  }
  enqueue_on_device(stream, [=] { multiply(problem, a, b, old, c, d); });
  return CUBLAS_STATUS_SUCCESS;
}

}  // extern "C"
