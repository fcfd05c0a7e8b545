// The `cuda` device: one allocation of HBM, pinned host memory, streams of CUDA.
#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "kernels/cuda/check.h"
#include "kernels/cuda/context.h"
#include "kernels/cuda/kernels.h"
#include "kernels/cuda/plugin.h"
#include "kernels/cuda/stream.h"
#include "kernels/host_memory.h"
#include "kernels/optimizer.h"
#include "spillway/error.h"
#include "spillway/log.h"
#include "spillway/units.h"
#include "spillway/version.h"

namespace spillway::cuda {
namespace {

CudaStream& as_cuda(Stream& stream) {
  SPILLWAY_CHECK(stream.kind() == DeviceKind::kCuda, "a stream of another device");
  return static_cast<CudaStream&>(stream);
}
const CudaEvent& as_cuda(const Event& event) { return static_cast<const CudaEvent&>(event); }

// What CUDA may take for itself when kernels first run: their code, their stacks, cuBLASLt.
constexpr std::uint64_t kOfCuda = 512 * kMiB;

// Exactly the budget, in one piece.
class HbmArena {
 public:
  explicit HbmArena(std::uint64_t bytes) : bytes_(bytes) {
    if (bytes == 0) return;
    const cudaError_t result = cudaMalloc(&memory_, bytes);
    std::size_t left = 0, all = 0;
    if (result == cudaErrorMemoryAllocation) {
      static_cast<void>(cudaGetLastError());
      check(cudaMemGetInfo(&left, &all), "asking for free memory");
      throw Error(
          Code::kDoesNotFit,
          {"GPU memory",
           fmt::format("{} MiB are asked for, {} of {} MiB are free", div_up(bytes, kMiB), left / kMiB, all / kMiB), 0,
           "set spillway.hbm_bytes to less than is free: the plan moves out what does not fit"});
    }
    check(result, "reserving memory");
    if (cudaMemGetInfo(&left, &all) == cudaSuccess && left < kOfCuda) {
      log(LogLevel::kWarning,
          fmt::format("GPU memory: {} MiB are left beside hbm_bytes, and CUDA and cuBLASLt may take "
                      "{} for themselves in the first step; if that runs out of memory, lower it",
                      left / kMiB, kOfCuda / kMiB));
    }
  }
  ~HbmArena() {
    const Context::Use use(context_);
    static_cast<void>(cudaFree(memory_));
  }
  HbmArena(const HbmArena&) = delete;
  HbmArena& operator=(const HbmArena&) = delete;

  std::span<std::byte> memory() const noexcept { return {static_cast<std::byte*>(memory_), bytes_}; }
  bool contains(const void* data, std::size_t bytes) const noexcept {
    const auto* at = static_cast<const std::byte*>(data);
    const auto* begin = static_cast<const std::byte*>(memory_);
    return at >= begin && bytes <= bytes_ && at <= begin + (bytes_ - bytes);
  }

 private:
  const Context context_ = Context::of_this_thread();
  void* memory_ = nullptr;
  std::uint64_t bytes_;
};

class CudaStopwatch final : public Stopwatch {
 public:
  explicit CudaStopwatch(Health& health) : health_(health) {}

  void start(Stream& stream) override {
    stopped_ = false;
    as_cuda(stream).mark_begin(before_);
  }
  void stop(Stream& stream) override {
    as_cuda(stream).mark_end(after_);
    stopped_ = true;
  }
  std::optional<double> seconds() const override {
    std::optional<double> taken;
    health_.guard([&] {
      if (stopped_ && after_.done()) taken = seconds_between(before_, after_);
    });
    return taken;
  }
  std::optional<Times> times() const override {
    std::optional<Times> taken;
    health_.guard([&] {
      if (!stopped_ || !after_.done()) return;
      const std::chrono::duration<double> between(seconds_between(before_, after_));
      const auto end = health_.time_of(after_);
      taken = {end - std::chrono::duration_cast<std::chrono::steady_clock::duration>(between), end};
    });
    return taken;
  }

 private:
  Health& health_;
  RawEvent before_{RawEvent::Use::kTime}, after_{RawEvent::Use::kTime};
  bool stopped_ = false;
};

class CudaDevice final : public Device {
 public:
  explicit CudaDevice(const CudaDeviceOptions& options) : arena_(options.hbm_bytes) {}

  DeviceKind kind() const noexcept override { return DeviceKind::kCuda; }
  std::span<std::byte> hbm() const noexcept override { return arena_.memory(); }
  std::string describe() const override {
    int driver = 0;
    cudaDeviceProp properties{};
    check(cudaGetDeviceProperties(&properties, number_), "asking for the device");
    check(cudaDriverGetVersion(&driver), "asking for the driver");
    return fmt::format("cuda: {} (sm_{}{}), {} of {} MiB of HBM reserved, driver for CUDA {}.{}", properties.name,
                       properties.major, properties.minor, div_up(arena_.memory().size(), kMiB),
                       properties.totalGlobalMem / kMiB, driver / 1000, driver % 1000 / 10);
  }

  void register_host(std::span<std::byte> memory) override {
    registered_.add(memory);
    const Context::Use use(health_.context());
    const cudaError_t result = cudaHostRegister(memory.data(), memory.size(), cudaHostRegisterDefault);
    if (result == cudaSuccess) return;
    registered_.remove(memory);
    static_cast<void>(cudaGetLastError());
    throw Error(Code::kDoesNotFit, {"pinned host memory",
                                    fmt::format("{} MiB cannot be pinned for the GPU: {}", div_up(memory.size(), kMiB),
                                                cudaGetErrorString(result)),
                                    0, "lower spillway.host_bytes, or raise the memory limit of this process"});
  }
  void unregister_host(std::span<std::byte> memory) noexcept override {
    const Context::Use use(health_.context());
    static_cast<void>(cudaHostUnregister(memory.data()));
    registered_.remove(memory);
  }

  std::unique_ptr<Stream> create_stream(std::string name) override {
    const Context::Use use(health_.context());
    return std::make_unique<CudaStream>(name, ++streams_, std::nullopt, health_);
  }
  std::unique_ptr<Stream> adopt_stream(void* native) override {
    const Context::Use use(health_.context());
    return std::make_unique<CudaStream>("", ++streams_, static_cast<cudaStream_t>(native), health_);
  }
  std::unique_ptr<Event> create_event() override { return create<CudaEvent>(RawEvent::Use::kOrder); }
  std::unique_ptr<Event> create_polled_event() override { return create<CudaEvent>(RawEvent::Use::kPoll); }
  std::unique_ptr<Stopwatch> create_stopwatch() override { return create<CudaStopwatch>(health_); }

  bool done(const Event& event) const override {
    bool is = true;
    health_.guard([&] { is = as_cuda(event).raw.done(); });
    return is;
  }
  void synchronize(const Event& event) const override {
    health_.guard([&] { check(cudaEventSynchronize(as_cuda(event).raw.get()), "work on the GPU"); });
    health_.wait_for_calls();
  }
  void throw_if_failed() const override { health_.throw_if_failed(); }

  void copy_async(CopyKind kind, void* to, const void* from, std::size_t bytes, Stream& stream) override {
    if (bytes == 0) return;
    const bool to_host = kind == CopyKind::kDeviceToHost, from_host = kind == CopyKind::kHostToDevice;
    SPILLWAY_CHECK(to_host ? registered_.contains(to, bytes) : arena_.contains(to, bytes),
                   "a copy goes to registered host memory or to the HBM arena");
    SPILLWAY_CHECK(from_host ? registered_.contains(from, bytes) : arena_.contains(from, bytes),
                   "a copy comes from registered host memory or from the HBM arena");
    add_copy(kind, to, from, bytes, stream);
  }

  void copy_lent_async(CopyKind kind, void* to, const void* from, std::size_t bytes, Stream& stream) override {
    if (bytes == 0) return;
    SPILLWAY_CHECK(kind != CopyKind::kDeviceToHost || registered_.contains(to, bytes), "registered host memory");
    SPILLWAY_CHECK(kind != CopyKind::kHostToDevice || registered_.contains(from, bytes), "registered host memory");
    add_copy(kind, to, from, bytes, stream);
  }

  void fill_async(void* to, std::byte value, std::size_t bytes, Stream& stream) override {
    check_device(to, bytes);
    if (bytes == 0) return;
    as_cuda(stream).add(
        [&](cudaStream_t s) { check(cudaMemsetAsync(to, std::to_integer<int>(value), bytes, s), "a fill"); });
  }

  void call_async(void (*function)(void*), void* argument, Stream& stream) override {
    CudaStream& in = as_cuda(stream);
    Health::Call* call = health_.prepare(function, argument);
    in.add([&](cudaStream_t s) { check(cudaLaunchHostFunc(s, &Health::run, call), "a call"); });
  }

  void accumulate_async(float* accumulator, const void* from, DType from_type, std::size_t count, bool first,
                        Stream& stream) override {
    check_device(accumulator, count * sizeof(float));
    check_device(from, count * size_of(from_type));
    as_cuda(stream).add([&](cudaStream_t s) { cuda::accumulate(accumulator, from, from_type, count, first, s); });
  }

  void cast_async(void* to, DType to_type, const void* from, DType from_type, std::size_t count,
                  Stream& stream) override {
    check_device(to, count * size_of(to_type));
    check_device(from, count * size_of(from_type));
    as_cuda(stream).add([&](cudaStream_t s) { cuda::cast(to, to_type, from, from_type, count, s); });
  }

  void leaf_sums_async(const void* data, DType type, std::size_t count, double* leaves, Stream& stream) override {
    check_device(data, count * size_of(type));
    check_device(leaves, div_up(count, kNormLeaf) * sizeof(double));
    as_cuda(stream).add([&](cudaStream_t s) { cuda::leaf_sums(data, type, count, leaves, s); });
  }

  void add_leaves_async(const double* leaves, std::size_t count, NormResult* result, Stream& stream) override {
    check_device(leaves, count * sizeof(double));
    check_device(result, sizeof(NormResult));
    as_cuda(stream).add([&](cudaStream_t s) { cuda::add_leaves(leaves, count, result, s); });
  }

  void update_async(const OptimizerTile& tile, const OptimizerScalars& scalars, std::size_t begin, std::size_t end,
                    std::uint32_t* finite, Stream& stream) override {
    check_optimizer_arguments(tile, scalars, begin, end);
    for_each_array(tile, [this](const void* array, std::size_t bytes) { check_device(array, bytes); });
    check_device(finite, sizeof(*finite));
    as_cuda(stream).add([&](cudaStream_t s) { cuda::update(tile, scalars, begin, end, finite, s); });
  }

  std::shared_ptr<IdleClock> idle_clock(Stream& stream) override { return as_cuda(stream).idle_clock(); }

 protected:
  void do_record(Event& event, Stream& stream) override { as_cuda(stream).record(static_cast<CudaEvent&>(event)); }
  void do_wait(Stream& stream, Event& event) override { as_cuda(stream).wait(static_cast<CudaEvent&>(event)); }

 private:
  template <typename Type, typename... Arguments>
  std::unique_ptr<Type> create(Arguments&&... arguments) {
    const Context::Use use(health_.context());
    return std::make_unique<Type>(std::forward<Arguments>(arguments)...);
  }
  static void add_copy(CopyKind kind, void* to, const void* from, std::size_t bytes, Stream& stream) {
    const cudaMemcpyKind direction = kind == CopyKind::kDeviceToHost   ? cudaMemcpyDeviceToHost
                                     : kind == CopyKind::kHostToDevice ? cudaMemcpyHostToDevice
                                                                       : cudaMemcpyDeviceToDevice;
    as_cuda(stream).add([&](cudaStream_t s) { check(cudaMemcpyAsync(to, from, bytes, direction, s), "a copy"); });
  }
  void check_device(const void* data, std::size_t bytes) const {
    SPILLWAY_CHECK(bytes == 0 || arena_.contains(data, bytes), "device work reads and writes the HBM arena only");
  }

  const int number_ = Context::gpu_of_this_thread();
  HbmArena arena_;
  RegisteredMemory registered_;
  mutable Health health_;
  std::atomic<std::uint64_t> streams_ = 0;
};

// What there is machine code for (Meson's gpu_arch); of the last one also PTX, which drivers compile for newer GPUs.
const std::vector<int> kCode{SPILLWAY_GPU_CODE};

std::string capability_text(int capability) {
  return std::to_string(capability / 10) + "." + std::to_string(capability % 10);
}

std::string has_no_code_for(int device) {
  int major = 0, minor = 0;
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "asking for the device");
  check(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device), "asking for the device");
  const int capability = 10 * major + minor;
  const bool of_family = std::ranges::any_of(kCode, [&](int code) { return code / 10 == major && code <= capability; });
  if (of_family || capability >= kCode.back()) return {};
  std::string built;
  for (const int code : kCode) built += (built.empty() ? "" : ", ") + capability_text(code);
  return "the GPU is of compute capability " + capability_text(capability) + ", and this was built for " + built;
}

CurrentGpu current() {
  const int number = Context::gpu_of_this_thread();
  cudaDeviceProp properties{};
  check(cudaGetDeviceProperties(&properties, number), "asking for the device");
  std::string id;
  for (const char byte : properties.uuid.bytes) id += fmt::format("{:02x}", static_cast<unsigned char>(byte));
  return {.number = number, .id = id};
}

std::string unavailable() {
  int driver = 0, runtime = 0, count = 0;
  check(cudaRuntimeGetVersion(&runtime), "asking for the version");
  if (cudaDriverGetVersion(&driver) != cudaSuccess || driver == 0) return "no NVIDIA driver (libcuda.so.1) was found";
  const cudaError_t result = cudaGetDeviceCount(&count);
  if (result == cudaSuccess && count > 0) return has_no_code_for(Context::gpu_of_this_thread());
  static_cast<void>(cudaGetLastError());
  if (result == cudaSuccess || result == cudaErrorNoDevice) return "the driver shows no GPU";
  return fmt::format("the driver serves CUDA {}.{} and this was built with {}.{}: {}", driver / 1000,
                     driver % 1000 / 10, runtime / 1000, runtime % 1000 / 10, cudaGetErrorString(result));
}

std::unique_ptr<Device> create(const CudaDeviceOptions& options) { return std::make_unique<CudaDevice>(options); }

void set_log(internal::LogState& to) {
  if (&to != &internal::log_state())
    set_log_sink([&to](LogLevel level, std::string_view text) { to.log(level, text); });
}

const CudaPlugin kPlugin{.interface = kCudaInterface,
                         .version = SPILLWAY_VERSION,
                         .unavailable = unavailable,
                         .current = current,
                         .create = create,
                         .set_log = set_log};

}  // namespace
}  // namespace spillway::cuda

extern "C" [[gnu::visibility("default")]] const spillway::CudaPlugin* spillway_cuda_plugin() {
  return &spillway::cuda::kPlugin;
}
