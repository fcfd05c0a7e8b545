#include "tools/models/ops/cuda/gemm.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>
#include <string>

#include "spillway/error.h"

namespace spillway::models {
namespace {

void check(cublasStatus_t status, std::string_view what) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  throw Error(Code::kDevice, {.object = "cuBLASLt",
                              .happened = std::string(what) + " failed: " + cublasLtGetStatusString(status),
                              .errno_value = 0,
                              .hint = "nvidia-smi and the kernel log say more; a store is at its last commit"});
}

cudaDataType_t data_type(DType type) {
  switch (type) {
    case DType::kFloat32: return CUDA_R_32F;
    case DType::kBFloat16: return CUDA_R_16BF;
    case DType::kFloat16: return CUDA_R_16F;
  }
  return CUDA_R_32F;
}

cublasLtEpilogue_t epilogue_of(Epilogue epilogue) {
  switch (epilogue) {
    case Epilogue::kNone: return CUBLASLT_EPILOGUE_DEFAULT;
    case Epilogue::kBias: return CUBLASLT_EPILOGUE_BIAS;
    case Epilogue::kGelu: return CUBLASLT_EPILOGUE_GELU_AUX_BIAS;
    case Epilogue::kGeluBackward: return CUBLASLT_EPILOGUE_DGELU;
    case Epilogue::kBiasGradient: return CUBLASLT_EPILOGUE_BGRADA;
  }
  return CUBLASLT_EPILOGUE_DEFAULT;
}

bool has_bias(Epilogue epilogue) {
  return epilogue == Epilogue::kBias || epilogue == Epilogue::kGelu || epilogue == Epilogue::kBiasGradient;
}
bool has_aux(Epilogue epilogue) { return epilogue == Epilogue::kGelu || epilogue == Epilogue::kGeluBackward; }

// Of every column's address.
std::uint32_t alignment_of(std::uint64_t stride, std::uint32_t first, DType type) {
  const std::uint64_t bytes = stride * size_of(type);
  return static_cast<std::uint32_t>(std::min<std::uint64_t>(bytes & -bytes, first));
}

template <typename Value>
void set(cublasLtMatmulDescOpaque_t& description, cublasLtMatmulDescAttributes_t attribute, Value value) {
  check(cublasLtMatmulDescSetAttribute(&description, attribute, &value, sizeof(value)), "describing a product");
}

// The minimum of the preference is 256 bytes where nothing is set, more than any tensor is sure to have.
cublasLtMatmulPreferenceOpaque_t preference_for(const Product& product) {
  cublasLtMatmulPreferenceOpaque_t preference{};
  check(cublasLtMatmulPreferenceInit(&preference), "describing a product");
  const auto put = [&](cublasLtMatmulPreferenceAttributes_t attribute, auto value) {
    check(cublasLtMatmulPreferenceSetAttribute(&preference, attribute, &value, sizeof(value)), "describing a product");
  };
  put(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, std::uint64_t{Gemm::kWorkspaceBytes});
  // Not in place (the order of additions would depend on time), nor rounded to 16 bits in between.
  put(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, static_cast<std::uint32_t>(CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE));
  put(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES,
      alignment_of(product.a.stride, product.a.alignment, product.operands));
  put(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
      alignment_of(product.b.stride, product.b.alignment, product.operands));
  const std::uint32_t result = alignment_of(product.stride, product.alignment, product.result);
  put(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, result);
  put(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, result);
  return preference;
}

cublasLtMatmulDescOpaque_t description_of(const Product& product) {
  cublasLtMatmulDescOpaque_t description{};
  check(cublasLtMatmulDescInit(&description, CUBLAS_COMPUTE_32F, CUDA_R_32F), "describing a product");
  set(description, CUBLASLT_MATMUL_DESC_TRANSA, product.a.transposed ? CUBLAS_OP_T : CUBLAS_OP_N);
  set(description, CUBLASLT_MATMUL_DESC_TRANSB, product.b.transposed ? CUBLAS_OP_T : CUBLAS_OP_N);
  set(description, CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue_of(product.epilogue));
  // The heuristic takes the alignment of bias and aux from their addresses; these stand for all that are aligned to 16.
  const void* aligned = reinterpret_cast<const void*>(std::uintptr_t{16});
  if (has_bias(product.epilogue)) {
    set(description, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, static_cast<std::int32_t>(data_type(product.result)));
    set(description, CUBLASLT_MATMUL_DESC_BIAS_POINTER, aligned);
  }
  if (has_aux(product.epilogue)) {
    set(description, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, static_cast<std::int64_t>(product.stride));
    set(description, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, aligned);
  }
  return description;
}

cublasLtMatrixLayoutOpaque_t layout(DType type, std::uint64_t rows, std::uint64_t columns, std::uint64_t stride) {
  cublasLtMatrixLayoutOpaque_t layout{};
  check(cublasLtMatrixLayoutInit(&layout, data_type(type), rows, columns, static_cast<std::int64_t>(stride)),
        "describing a matrix");
  return layout;
}

cublasLtMatrixLayoutOpaque_t layout(const Product::Operand& operand, DType type, std::uint64_t rows,
                                    std::uint64_t columns) {
  return operand.transposed ? layout(type, columns, rows, operand.stride) : layout(type, rows, columns, operand.stride);
}

}  // namespace

Gemm::Gemm(std::span<std::byte> workspace) : workspace_(workspace) {
  SPILLWAY_CHECK(workspace.size() >= kWorkspaceBytes, "the workspace has its fixed size");
  SPILLWAY_CHECK(reinterpret_cast<std::uintptr_t>(workspace.data()) % 256 == 0, "cuBLASLt's workspace is aligned");
  check(cublasLtCreate(&handle_), "starting");
}

Gemm::~Gemm() { cublasLtDestroy(handle_); }

std::optional<PlannedProduct> Gemm::find(const Product& product, std::string* why) const {
  PlannedProduct planned;
  planned.name_ = product.name;
  planned.epilogue_ = product.epilogue;
  planned.description_ = description_of(product);
  planned.a_ = layout(product.a, product.operands, product.rows, product.depth);
  planned.b_ = layout(product.b, product.operands, product.depth, product.columns);
  planned.d_ = layout(product.result, product.rows, product.columns, product.stride);
  cublasLtMatmulPreferenceOpaque_t preference = preference_for(product);
  std::array<cublasLtMatmulHeuristicResult_t, 4> found{};
  int count = 0;
  const cublasStatus_t status =
      cublasLtMatmulAlgoGetHeuristic(handle_, &planned.description_, &planned.a_, &planned.b_, &planned.d_, &planned.d_,
                                     &preference, static_cast<int>(found.size()), found.data(), &count);
  // It answers either one where it has no kernel; to a wrong description, too.
  if (status == CUBLAS_STATUS_NOT_SUPPORTED || status == CUBLAS_STATUS_INVALID_VALUE) {
    if (why != nullptr) *why = cublasLtGetStatusString(status);
    return std::nullopt;
  }
  check(status, "choosing how to compute a product");
  for (int i = 0; i < count; ++i) {
    if (found[i].state != CUBLAS_STATUS_SUCCESS || found[i].workspaceSize > kWorkspaceBytes) continue;
    planned.algorithm_ = found[i].algo;
    return planned;
  }
  if (why != nullptr) *why = fmt::format("{} algorithms, none that fits {} MiB", count, kWorkspaceBytes >> 20);
  return std::nullopt;
}

PlannedProduct Gemm::plan(const Product& product) const {
  std::string why;
  if (auto planned = find(product, &why)) return *planned;
  throw Error(Code::kUnsupported, {.object = "cuBLASLt",
                                   .happened = fmt::format("has no {} of {} x {} x {} in {} with results in {}: {}",
                                                           product.name, product.rows, product.columns, product.depth,
                                                           name_of(product.operands), name_of(product.result), why),
                                   .errno_value = 0,
                                   .hint = "take a model whose sizes are multiples of 8, or weights in fp32"});
}

void Gemm::run(const PlannedProduct& product, const ProductMemory& memory, cudaStream_t stream) const {
  PlannedProduct own = product;
  if (has_bias(own.epilogue_)) set(own.description_, CUBLASLT_MATMUL_DESC_BIAS_POINTER, memory.bias);
  if (has_aux(own.epilogue_)) set(own.description_, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, memory.aux);
  const float one = 1;
  check(cublasLtMatmul(handle_, &own.description_, &one, memory.a, &own.a_, memory.b, &own.b_, &memory.beta,
                       memory.c != nullptr ? memory.c : memory.d, &own.d_, memory.d, &own.d_, &own.algorithm_,
                       workspace_.data(), kWorkspaceBytes, stream),
        own.name_);
}

}  // namespace spillway::models
