// Fused Adam against memory: nanoseconds and bytes per parameter of every instruction set, beside a loop that reads,
// changes and writes as many bytes of one array and does nothing else. `of_stream` is the loop's time over Adam's: 1
// means that Adam costs no more than its memory traffic.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <span>
#include <string>

#include "kernels/adam.h"
#include "kernels/host_memory.h"
#include "kernels/workers.h"
#include "spillway/bf16.h"
#include "spillway/units.h"

namespace spillway {
namespace {

constexpr std::size_t kPiece = 64 * kKiB;  // elements a worker takes at a time, as on the host device

// Read and written per element; the gradient is read only.
std::size_t bytes_per_element(DType type) { return type == DType::kFloat32 ? 4 + 3 * 8 : 2 + 2 * 4 + 2 * 8; }

// Arrays of one arena, with the pages that the tiers have: huge from 64 MiB on.
class Memory {
 public:
  Memory(DType type, std::size_t count)
      : arena_((count * bytes_per_element(type) + 16 * kPageBytes) & ~(kPageBytes - 1), kPinnedArena),
        type_(type),
        count_(count) {
    weight_ = take(count * size_of(type));
    gradient_ = take(count * size_of(type));
    if (type == DType::kBFloat16) residual_ = reinterpret_cast<std::int16_t*>(take(count * 2));
    exp_avg_ = reinterpret_cast<float*>(take(count * 4));
    exp_avg_sq_ = reinterpret_cast<float*>(take(count * 4));
    for (std::size_t i = 0; i < count; ++i) {
      exp_avg_[i] = 1e-3f, exp_avg_sq_[i] = 1e-4f;
      const float w = 0.5f, g = 1e-3f * static_cast<float>(i % 13) - 5e-3f;
      const std::uint16_t w16 = float_to_bf16(w), g16 = float_to_bf16(g);
      const bool is32 = type == DType::kFloat32;
      std::memcpy(weight_ + i * size_of(type), is32 ? static_cast<const void*>(&w) : &w16, size_of(type));
      std::memcpy(gradient_ + i * size_of(type), is32 ? static_cast<const void*>(&g) : &g16, size_of(type));
      if (residual_ != nullptr) residual_[i] = 0;
    }
  }
  AdamTile tile() const { return {type_, weight_, residual_, exp_avg_, exp_avg_sq_, gradient_, count_}; }

 private:
  static constexpr std::size_t kPageBytes = 4096;

  std::byte* take(std::size_t bytes) {
    std::byte* const taken = arena_.memory().data() + used_;
    used_ += align_up(bytes, kPageBytes);
    return taken;
  }

  HostArena arena_;
  DType type_;
  std::size_t count_, used_ = 0;
  std::byte *weight_ = nullptr, *gradient_ = nullptr;
  std::int16_t* residual_ = nullptr;
  float *exp_avg_ = nullptr, *exp_avg_sq_ = nullptr;
};

// Seconds that body(begin, end) takes for all pieces of [0, count), on the workers.
template <typename Body>
double seconds_of_pass(std::size_t count, HostWorkers& workers, Body body) {
  const auto start = std::chrono::steady_clock::now();
  workers.parallel_for(div_up(count, kPiece),
                       [&](std::size_t i) { body(i * kPiece, std::min(count, (i + 1) * kPiece)); });
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

void adam(benchmark::State& state, DType type, AdamFunction update) {
  const auto count = static_cast<std::size_t>(state.range(0));
  const auto workers = create_workers(static_cast<unsigned>(state.range(1)));
  Memory memory(type, count);
  // One array, read and written once: the same number of bytes in a single stream.
  const HostArena stream_arena(count * bytes_per_element(type) / 2, kPinnedArena);
  const std::span<std::uint32_t> stream(reinterpret_cast<std::uint32_t*>(stream_arena.memory().data()),
                                        stream_arena.memory().size() / sizeof(std::uint32_t));
  std::ranges::fill(stream, 1u);
  const AdamScalars scalars = adam_scalars({.weight_decay = 0.01}, 10, 1.0);
  const double elements = static_cast<double>(count), bytes = elements * static_cast<double>(bytes_per_element(type));
  double seconds = 0, stream_seconds = 0;
  // In turn, so that both see the machine in the same state.
  for ([[maybe_unused]] auto _ : state) {
    const double pass = seconds_of_pass(count, *workers, [&](std::size_t begin, std::size_t end) {
      benchmark::DoNotOptimize(update(memory.tile(), scalars, begin, end));
    });
    stream_seconds += seconds_of_pass(stream.size(), *workers, [&](std::size_t begin, std::size_t end) {
      for (std::size_t i = begin; i < end; ++i) stream[i] ^= 0x5au;
      benchmark::ClobberMemory();
    });
    seconds += pass;
    state.SetIterationTime(pass);
  }
  const double passes = static_cast<double>(state.iterations());
  state.counters["ns_per_param"] = seconds / passes / elements * 1e9;
  state.counters["GB_per_s"] = bytes * passes / seconds * 1e-9;
  state.counters["stream_GB_per_s"] = bytes * passes / stream_seconds * 1e-9;
  state.counters["of_stream"] = stream_seconds / seconds;
}

void register_all() {
  for (DType type : {DType::kBFloat16, DType::kFloat32}) {
    for (const AdamTarget& target : adam_targets()) {
      const std::string name = "adam/" + std::string(name_of(type)) + "/" + std::string(target.name);
      // 4 Mi is a tile, 32 Mi is far beyond any cache. Threads: 1, and every core this process may use.
      benchmark::RegisterBenchmark(name.c_str(), adam, type, target.update)
          ->ArgNames({"params", "threads"})
          ->ArgsProduct({{4096, 4 << 20, 32 << 20}, {1, 0}})
          ->UseManualTime()
          ->Unit(benchmark::kMillisecond);
    }
  }
}

}  // namespace
}  // namespace spillway

int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  spillway::register_all();
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
}
