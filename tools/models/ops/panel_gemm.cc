#include "tools/models/ops/panel_gemm.h"

#include <omp.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <oneapi/dnnl/dnnl.hpp>

#include "spillway/error.h"

namespace spillway::models {
namespace {

using dnnl::memory;

bool has(const char* feature) {
  // __builtin_cpu_supports wants literals.
  if (std::strcmp(feature, "avx512bf16") == 0) return __builtin_cpu_supports("avx512bf16") != 0;
  return false;
}

// CPUID leaf 7: EDX bit 22 AMX-BF16, 24 AMX-TILE (Intel SDM vol. 2A); g++ 12 has no name for it. oneDNN asks the kernel
// for the tile state itself and says through its effective ISA whether it was granted.
bool has_amx() { return dnnl::get_effective_cpu_isa() >= dnnl::cpu_isa::avx512_core_amx; }

// Holds the calling thread's OpenMP team at one while oneDNN plans: its blocking depends on the number of threads.
class SingleThreaded {
 public:
  SingleThreaded() : before_(omp_get_max_threads()) { omp_set_num_threads(1); }
  ~SingleThreaded() { omp_set_num_threads(before_); }

 private:
  int before_;
};

// oneDNN 2.7 writes its code to where its allocation failed, and dies of SIGSEGV. What one product takes is well below
// this: all of a GPT-2's together ended within 10 MiB.
void check_address_space() {
  constexpr std::size_t kBytes = 32 << 20;
  void* const space =
      ::mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (space == MAP_FAILED) throw std::bad_alloc();
  ::munmap(space, kBytes);
}

}  // namespace

GemmPath choose_gemm_path(DType tensors) {
  if (tensors != DType::kBFloat16) return GemmPath::kFloat32;
  if (has_amx()) return GemmPath::kBFloat16;
  // AVX512-BF16 without AMX: AMD's cores (Zen 4 on) run vdpbf16ps at twice the fp32 rate, Intel's at half of it.
  if (has("avx512bf16") && __builtin_cpu_is("amd") != 0) return GemmPath::kBFloat16;
  return GemmPath::kFloat32;
}

std::string describe_gemm_path(DType tensors, GemmPath path) {
  if (tensors == DType::kFloat32) return "fp32 tensors, fp32 GEMM";
  if (tensors == DType::kFloat16) return "fp16 tensors, GEMM widened to fp32";
  if (path == GemmPath::kBFloat16) {
    return has_amx() ? "bf16 tensors, bf16 GEMM (AMX)" : "bf16 tensors, bf16 GEMM (AVX512-BF16)";
  }
  return has("avx512bf16") ? "bf16 tensors, GEMM widened to fp32 (AVX512-BF16 is slower than fp32 on this processor)"
                           : "bf16 tensors, GEMM widened to fp32 (this processor has no bf16 arithmetic)";
}

struct PanelGemm::Library {
  dnnl::engine engine{dnnl::engine::kind::cpu, 0};
  std::vector<dnnl::stream> streams;  // one per slot
};

struct PanelGemm::Kernel {
  Shape shape;
  dnnl::matmul primitive;
  struct Operands {
    memory a, b, c, scratchpad;
  };
  // Memory objects carry the addresses of a call, so every slot has its own.
  std::vector<Operands> operands;
};

PanelGemm::PanelGemm(unsigned slots) : library_(std::make_unique<Library>()) {
  const SingleThreaded single;
  for (unsigned slot = 0; slot < slots; ++slot) library_->streams.emplace_back(library_->engine);
}

PanelGemm::~PanelGemm() = default;

void PanelGemm::prepare(const Shape& shape) {
  const auto same = [&](const auto& kernel) { return kernel->shape == shape; };
  if (std::any_of(kernels_.begin(), kernels_.end(), same)) return;
  check_address_space();
  const SingleThreaded single;
  const auto m = static_cast<memory::dim>(shape.m), k = static_cast<memory::dim>(shape.k);
  const auto n = static_cast<memory::dim>(kPanel);
  const bool half = shape.operands == DType::kBFloat16;
  const auto type = half ? memory::data_type::bf16 : memory::data_type::f32;
  const memory::desc a({m, k}, type, memory::dims{k, 1});
  const memory::desc c({m, n}, memory::data_type::f32, memory::dims{n, 1});
  dnnl::primitive_attr attributes;
  attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);
  if (shape.accumulate) {
    dnnl::post_ops sum;
    sum.append_sum(1.0f);
    attributes.set_post_ops(sum);
  }
  const auto describe = [&](const memory::desc& b) {
#if DNNL_VERSION_MAJOR >= 3
    return dnnl::matmul::primitive_desc(library_->engine, a, b, c, attributes);
#else
    return dnnl::matmul::primitive_desc(dnnl::matmul::desc(a, b, c), attributes, library_->engine);
#endif
  };
  const auto blocked = half ? memory::format_tag::BA16a64b2a : memory::format_tag::BA16a64b;
  auto plan = describe(memory::desc({k, n}, type, blocked));
  if (std::string_view(plan.impl_info_str()).starts_with("ref")) {
    // Without AVX-512 only plain operands are fast. In fp32 a plain panel is the same bytes.
    SPILLWAY_CHECK(!half, "bf16 GEMM is chosen only where oneDNN reads packed panels");
    plan = describe(memory::desc({k, n}, type, memory::format_tag::ab));
  }
  auto kernel = std::make_unique<Kernel>();
  kernel->shape = shape;
  kernel->primitive = dnnl::matmul(plan);
  for (std::size_t slot = 0; slot < library_->streams.size(); ++slot) {
    const auto view = [&](const memory::desc& desc) { return memory(desc, library_->engine, DNNL_MEMORY_NONE); };
    kernel->operands.push_back(
        {view(plan.src_desc()), view(plan.weights_desc()), view(plan.dst_desc()), view(plan.scratchpad_desc())});
  }
  scratchpad_bytes_ = std::max(scratchpad_bytes_, plan.scratchpad_desc().get_size());
  kernels_.push_back(std::move(kernel));
}

const PanelGemm::Kernel& PanelGemm::find(const Shape& shape) const {
  for (const auto& kernel : kernels_) {
    if (kernel->shape == shape) return *kernel;
  }
  check_failed(__builtin_FILE(), __LINE__, "prepared", "a GEMM shape must be prepared before it is run");
}

void PanelGemm::run(const Shape& shape, unsigned slot, const void* a, const void* panel, float* c,
                    void* scratchpad) const {
  const Kernel& kernel = find(shape);
  omp_set_num_threads(1);  // a per-thread setting of libgomp; cheap, and workers may be new threads
  const auto& operands = kernel.operands[slot];
  const auto set = [](const memory& object, const void* address) {
    SPILLWAY_CHECK(dnnl_memory_set_data_handle(object.get(), const_cast<void*>(address)) == dnnl_success,
                   "oneDNN takes any address");
  };
  set(operands.a, a);
  set(operands.b, panel);
  set(operands.c, c);
  if (scratchpad_bytes_ > 0) set(operands.scratchpad, scratchpad);
  const dnnl_exec_arg_t arguments[] = {{DNNL_ARG_SRC, operands.a.get()},
                                       {DNNL_ARG_WEIGHTS, operands.b.get()},
                                       {DNNL_ARG_DST, operands.c.get()},
                                       {DNNL_ARG_SCRATCHPAD, operands.scratchpad.get()}};
  const int count = scratchpad_bytes_ > 0 ? 4 : 3;
  SPILLWAY_CHECK(
      dnnl_primitive_execute(kernel.primitive.get(), library_->streams[slot].get(), count, arguments) == dnnl_success,
      "oneDNN refused a product it had planned");
}

}  // namespace spillway::models
