// The cuda device against the GPU's own limits, in one run: copies in the store's chunks against one large
// cudaMemcpyAsync, both ways and both at once; the engine's kernels against the rate of a copy within the GPU's memory.
//
//   cuda_bench [--tiny]
//
// One JSON line each, the median of several rounds; `of_limit` is the share of what CUDA itself reached beside it.
// Without a GPU it says so and does nothing.
#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "kernels/device.h"
#include "kernels/host_memory.h"
#include "kernels/norm.h"
#include "spillway/error.h"
#include "spillway/units.h"

namespace spillway {
namespace {

constexpr std::uint64_t kTile = 4 << 20;  // elements

double median(std::vector<double> values) {
  std::ranges::sort(values);
  return values[values.size() / 2];
}

class Bench {
 public:
  explicit Bench(bool tiny)
      : rounds_(tiny ? 1 : 7),
        bytes_(tiny ? 8 * kMiB : kGiB),
        host_(2 * bytes_, kPinnedArena),
        device_(create_cuda_device({.hbm_bytes = 8 * bytes_})) {
    device_->register_host(host_.memory());
    up_ = device_->create_stream("up");
    down_ = device_->create_stream("down");
    fmt::print("{{\"bench\": \"cuda\", \"device\": \"{}\"}}\n", device_->describe());
  }
  ~Bench() { device_->unregister_host(host_.memory()); }

  void copies() {
    const double up = rate([&] { whole(CopyKind::kHostToDevice, *up_); });
    const double down = rate([&] { whole(CopyKind::kDeviceToHost, *down_); });
    const double both = rate([&] { whole(CopyKind::kHostToDevice, *up_), whole(CopyKind::kDeviceToHost, *down_); }, 2);
    fmt::print("{{\"bench\": \"cuda_memcpy\", \"h2d_gb_s\": {:.2f}, \"d2h_gb_s\": {:.2f}, \"both_gb_s\": {:.2f}}}\n",
               up / 1e9, down / 1e9, both / 1e9);
    for (const std::uint64_t chunk : {kMiB, 4 * kMiB}) {
      report_copies("h2d", chunk, up, rate([&] { chunks(CopyKind::kHostToDevice, *up_, chunk); }));
      report_copies("d2h", chunk, down, rate([&] { chunks(CopyKind::kDeviceToHost, *down_, chunk); }));
      report_copies("both", chunk, both,
                    rate(
                        [&] {
                          for (std::uint64_t at = 0; at < bytes_; at += chunk) {
                            one_chunk(CopyKind::kHostToDevice, *up_, chunk, at);
                            one_chunk(CopyKind::kDeviceToHost, *down_, chunk, at);
                          }
                        },
                        2));
    }
  }

  void kernels() {
    const double limit =
        2 * rate(
                [&] {
                  device_->copy_async(CopyKind::kDeviceToDevice, hbm(4 * bytes_), hbm(0), bytes_, *up_);
                  device_->copy_async(CopyKind::kDeviceToDevice, hbm(5 * bytes_), hbm(bytes_), bytes_, *up_);
                  device_->copy_async(CopyKind::kDeviceToDevice, hbm(6 * bytes_), hbm(2 * bytes_), bytes_, *up_);
                },
                3);
    fmt::print("{{\"bench\": \"cuda_copy\", \"gb_s\": {:.1f}}}\n", limit / 1e9);
    for (const DType type : {DType::kBFloat16, DType::kFloat16, DType::kFloat32}) update(type, limit);
    for (const std::uint64_t count : {kTile, 30 * (std::uint64_t{1} << 20)}) {
      const std::uint64_t n = std::min(count, bytes_ / 4);
      const double seconds = time([&] {
        device_->squared_norm_async(hbm(0), DType::kBFloat16, n, reinterpret_cast<double*>(hbm(bytes_)),
                                    reinterpret_cast<NormResult*>(hbm(2 * bytes_)), *up_);
      });
      fmt::print("{{\"bench\": \"cuda_norm\", \"elements\": {}, \"microseconds\": {:.1f}, \"of_limit\": {:.3f}}}\n", n,
                 seconds * 1e6, 2.0 * static_cast<double>(n) / seconds / limit);
    }
    const std::uint64_t n = bytes_ / 4;
    const double seconds =
        time([&] { device_->cast_async(hbm(4 * bytes_), DType::kBFloat16, hbm(0), DType::kFloat32, n, *up_); });
    fmt::print("{{\"bench\": \"cuda_cast\", \"of_limit\": {:.3f}}}\n", 6.0 * static_cast<double>(n) / seconds / limit);
  }

 private:
  std::byte* hbm(std::uint64_t offset) { return device_->hbm().data() + offset; }

  double time(const std::function<void()>& work) {
    std::vector<double> seconds;
    for (unsigned round = 0; round <= rounds_; ++round) {
      const auto start = std::chrono::steady_clock::now();
      work();
      up_->synchronize();
      down_->synchronize();
      const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
      if (round > 0 || rounds_ == 1) seconds.push_back(taken.count());
    }
    return median(std::move(seconds));
  }
  double rate(const std::function<void()>& work, unsigned times = 1) {
    return times * static_cast<double>(bytes_) / time(work);
  }

  void whole(CopyKind kind, Stream& stream) {
    const bool up = kind == CopyKind::kHostToDevice;
    std::byte* host = host_.memory().data() + (up ? 0 : bytes_);
    std::byte* device = hbm(up ? 0 : bytes_);
    const cudaError_t result = cudaMemcpyAsync(up ? device : host, up ? host : device, bytes_,
                                               up ? cudaMemcpyHostToDevice : cudaMemcpyDeviceToHost,
                                               static_cast<cudaStream_t>(stream.native()));
    SPILLWAY_CHECK(result == cudaSuccess, "a copy of pinned memory");
  }
  // As the store moves them: a copy and an event for each chunk.
  void one_chunk(CopyKind kind, Stream& stream, std::uint64_t chunk, std::uint64_t at) {
    const bool up = kind == CopyKind::kHostToDevice;
    std::byte* host = host_.memory().data() + (up ? 0 : bytes_) + at;
    std::byte* device = hbm(up ? 0 : bytes_) + at;
    auto& event = events_[at / chunk % kEvents];
    if (!event) event = device_->create_event();
    device_->copy_async(kind, up ? device : host, up ? host : device, chunk, stream);
    device_->record(*event, stream);
  }
  void chunks(CopyKind kind, Stream& stream, std::uint64_t chunk) {
    for (std::uint64_t at = 0; at < bytes_; at += chunk) one_chunk(kind, stream, chunk, at);
  }
  static void report_copies(const char* way, std::uint64_t chunk, double limit, double reached) {
    fmt::print(
        "{{\"bench\": \"cuda_chunks\", \"way\": \"{}\", \"chunk\": \"{}MiB\", \"gb_s\": {:.2f}, "
        "\"of_limit\": {:.3f}}}\n",
        way, chunk / kMiB, reached / 1e9, reached / limit);
  }

  void update(DType type, double limit) {
    const std::uint64_t tiles = std::max<std::uint64_t>(1, bytes_ / (4 * kTile)), count = tiles * kTile;
    if (4 * count > bytes_) return;  // the tiny run has no memory for a tile
    device_->fill_async(hbm(0), std::byte{0}, 6 * bytes_, *up_);
    const OptimizerScalars scalars = optimizer_scalars({.weight_decay = 0.1}, 3, 0.5);
    const double seconds = time([&] {
      for (std::uint64_t t = 0; t < tiles; ++t) {
        const auto at = [&](unsigned array, std::uint64_t element) {
          return hbm(array * bytes_ + t * kTile * element);
        };
        OptimizerTile tile{.type = type, .weight = at(0, size_of(type)), .count = kTile};
        if (type == DType::kBFloat16) tile.residual = reinterpret_cast<std::int16_t*>(at(1, 2));
        if (type == DType::kFloat16) tile.master = reinterpret_cast<float*>(at(1, 4));
        tile.exp_avg = reinterpret_cast<float*>(at(2, 4));
        tile.exp_avg_sq = reinterpret_cast<float*>(at(3, 4));
        tile.gradient = at(4, size_of(type));
        device_->update_async(tile, scalars, 0, kTile, reinterpret_cast<std::uint32_t*>(hbm(5 * bytes_)), *up_);
      }
    });
    // Read: gradient, weight (not fp16's), master or residual, both moments; written: all but the gradient.
    const double bytes = type == DType::kBFloat16 ? 2 + 12 + 12 : type == DType::kFloat16 ? 2 + 12 + 14 : 4 + 12 + 12;
    fmt::print(
        "{{\"bench\": \"cuda_adam\", \"type\": \"{}\", \"bytes_per_parameter\": {}, \"gb_s\": {:.1f}, "
        "\"of_limit\": {:.3f}}}\n",
        name_of(type), bytes, bytes * static_cast<double>(count) / seconds / 1e9,
        bytes * static_cast<double>(count) / seconds / limit);
  }

  static constexpr std::size_t kEvents = 64;
  const unsigned rounds_;
  const std::uint64_t bytes_;
  HostArena host_;
  std::unique_ptr<Device> device_;
  std::unique_ptr<Stream> up_, down_;
  std::unique_ptr<Event> events_[kEvents];
};

}  // namespace
}  // namespace spillway

int main(int argc, char** argv) {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);  // what has been measured stays when it is ended
  bool tiny = false;
  CLI::App app("The cuda device against the GPU's own limits");
  app.add_flag("--tiny", tiny, "one small round");
  CLI11_PARSE(app, argc, argv);
  if (const std::string why = spillway::cuda_unavailable(); !why.empty()) {
    fmt::print("skipped: {}\n", why);
    return 77;
  }
  spillway::Bench bench(tiny);
  bench.copies();
  bench.kernels();
}
