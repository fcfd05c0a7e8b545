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
#include <utility>
#include <vector>

#include "kernels/cuda/loader.h"
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
    const Rates large = bare(bytes_);
    fmt::print("{{\"bench\": \"cuda_memcpy\", \"h2d_gb_s\": {:.2f}, \"d2h_gb_s\": {:.2f}, \"both_gb_s\": {:.2f}}}\n",
               large.up / 1e9, large.down / 1e9, large.both / 1e9);
    for (const std::uint64_t chunk : {kMiB, 4 * kMiB}) {
      const Rates same = bare(chunk);
      const Rates own = rates(
          chunk, [&](CopyKind kind, Stream& stream, std::uint64_t at) { chunk_of_store(kind, stream, chunk, at); });
      report_copies("h2d", chunk, own.up, large.up, same.up);
      report_copies("d2h", chunk, own.down, large.down, same.down);
      report_copies("both", chunk, own.both, large.both, same.both);
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
        auto* const leaves = reinterpret_cast<double*>(hbm(bytes_));
        device_->leaf_sums_async(hbm(0), DType::kBFloat16, n, leaves, *up_);
        device_->add_leaves_async(leaves, div_up(n, kNormLeaf), reinterpret_cast<NormResult*>(hbm(2 * bytes_)), *up_);
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

  struct Rates {
    double up, down, both;
  };
  // Of chunks, each of which `copy` enqueues, in both directions.
  template <typename Copy>
  Rates rates(std::uint64_t chunk, const Copy& copy) {
    const auto every = [&](auto&& work) {
      for (std::uint64_t at = 0; at < bytes_; at += chunk) work(at);
    };
    const auto up = [&](std::uint64_t at) { copy(CopyKind::kHostToDevice, *up_, at); };
    const auto down = [&](std::uint64_t at) { copy(CopyKind::kDeviceToHost, *down_, at); };
    return {.up = rate([&] { every(up); }),
            .down = rate([&] { every(down); }),
            .both = rate([&] { every([&](std::uint64_t at) { up(at), down(at); }); }, 2)};
  }
  // Nothing but CUDA's copies.
  Rates bare(std::uint64_t chunk) {
    return rates(chunk, [&](CopyKind kind, Stream& stream, std::uint64_t at) {
      const auto [to, from] = ends(kind, at);
      const cudaError_t result =
          cudaMemcpyAsync(to, from, chunk, cudaMemcpyDefault, static_cast<cudaStream_t>(stream.native()));
      SPILLWAY_CHECK(result == cudaSuccess, "a copy of pinned memory");
    });
  }
  // As the store moves them: an event for each chunk, too.
  void chunk_of_store(CopyKind kind, Stream& stream, std::uint64_t chunk, std::uint64_t at) {
    auto& event = events_[at / chunk % kEvents];
    if (!event) event = device_->create_polled_event();
    const auto [to, from] = ends(kind, at);
    device_->copy_async(kind, to, from, chunk, stream);
    device_->record(*event, stream);
  }
  std::pair<std::byte*, std::byte*> ends(CopyKind kind, std::uint64_t at) {
    const bool up = kind == CopyKind::kHostToDevice;
    std::byte* host = host_.memory().data() + (up ? 0 : bytes_) + at;
    std::byte* device = hbm(up ? 0 : bytes_) + at;
    return up ? std::pair{device, host} : std::pair{host, device};
  }
  static void report_copies(const char* way, std::uint64_t chunk, double reached, double limit, double bare) {
    fmt::print(
        "{{\"bench\": \"cuda_chunks\", \"way\": \"{}\", \"chunk\": \"{}MiB\", \"gb_s\": {:.2f}, "
        "\"of_limit\": {:.3f}, \"bare_gb_s\": {:.2f}, \"of_bare\": {:.3f}}}\n",
        way, chunk / kMiB, reached / 1e9, reached / limit, bare / 1e9, reached / bare);
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
