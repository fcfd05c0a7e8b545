// Single-threaded matrix products on panels, by oneDNN:
//
//   C[m][64] = A[m][k] · B[k][64]      (or C += …)
//
//   A  row-major and dense, fp32 or bf16
//   B  a packed panel: fp32 in k rows of 64; bf16 with rows 2i and 2i + 1 interleaved column by column (32-bit words).
//      Both are oneDNN's blocked weight layouts, so it reads them as they are. vector_kernels.h packs them.
//   C  fp32, 64 wide
//
// Every larger product is cut into such panels by shape alone. oneDNN gives other bits with other thread counts, so
// each call runs on the calling thread only; the workers share the panels. Primitives are made once; run() allocates
// nothing of its own (oneDNN 2.6 makes a few small map nodes per call).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "spillway/dtype.h"
#include "tools/models/ops/vector_kernels.h"

namespace spillway::models {

// How products of 16-bit tensors are computed.
enum class GemmPath : std::uint8_t {
  kFloat32,  // operands in fp32: fp32 tensors, or bf16 and fp16 widened panel by panel
  kBFloat16  // bf16 operands, fp32 sums
};

// Chosen by a table of processor features, not by timing, so that equal machines give equal bits.
GemmPath choose_gemm_path(DType tensors);
// `bf16 tensors, bf16 GEMM (AMX)` and the like.
std::string describe_gemm_path(DType tensors, GemmPath path);

class PanelGemm {
 public:
  struct Shape {
    std::size_t m = 0, k = 0;
    DType operands = DType::kFloat32;
    bool accumulate = false;
    bool operator==(const Shape&) const = default;
  };

  explicit PanelGemm(unsigned slots);
  ~PanelGemm();
  PanelGemm(const PanelGemm&) = delete;
  PanelGemm& operator=(const PanelGemm&) = delete;

  // Makes the primitive; the same shape again is free.
  void prepare(const Shape& shape);
  // Scratch that one run() may need, over all prepared shapes.
  std::size_t scratchpad_bytes() const noexcept { return scratchpad_bytes_; }

  // `slot` < slots, unique among concurrent calls. `scratchpad` holds scratchpad_bytes(), aligned to 64.
  void run(const Shape& shape, unsigned slot, const void* a, const void* panel, float* c, void* scratchpad) const;

 private:
  struct Kernel;
  struct Library;
  const Kernel& find(const Shape& shape) const;
  std::unique_ptr<Library> library_;
  std::vector<std::unique_ptr<Kernel>> kernels_;
  std::size_t scratchpad_bytes_ = 0;
};

}  // namespace spillway::models
