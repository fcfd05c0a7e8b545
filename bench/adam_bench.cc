// Fused Adam against memory: nanoseconds and bytes per parameter of every instruction set, beside a loop that reads,
// changes and writes as many bytes of one array and does nothing else, as fast as this machine can. `of_stream` is the
// loop's time over Adam's: 1 means that Adam costs no more than its memory traffic. `tile` is the engine's whole pass
// over a tile, with and without the checksums of what came and of what goes.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "kernels/adam.h"
#include "kernels/host_memory.h"
#include "kernels/tile_update.h"
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

// Vectors and prefetch as Adam has them.
__attribute__((target_clones("avx512f", "avx2", "default"))) void touch(std::uint32_t* from, std::size_t count) {
  for (std::size_t i = 0; i + 16 <= count; i += 16) {
    __builtin_prefetch(from + i + 1024, 1);
    for (std::size_t k = 0; k < 16; ++k) from[i + k] ^= 0x5au;
  }
}

// A tile as it lies in a buffer: | weights | states | gradient |, padded to 64 KiB each.
class TileMemory {
 public:
  TileMemory(DType type, std::size_t count) : type_(type), count_(count) {}

  std::uint64_t bytes() const { return weights_bytes() + states_bytes() + weights_bytes(); }

  TileUpdate in(std::span<std::byte> memory, bool hashed, std::span<std::uint64_t> granules) const {
    std::ranges::fill(memory, std::byte{0});
    std::byte* const states = memory.data() + weights_bytes();
    TileUpdate update{.tile = {.type = type_, .weight = memory.data(), .count = count_}, .weights = {}, .states = {}};
    update.tile.exp_avg = reinterpret_cast<float*>(states);
    update.tile.exp_avg_sq = update.tile.exp_avg + count_;
    if (type_ == DType::kBFloat16) update.tile.residual = reinterpret_cast<std::int16_t*>(states + 8 * count_);
    update.tile.gradient = states + states_bytes();
    const std::size_t quarter = granules.size() / 4;
    update.weights.bytes = memory.first(weights_bytes());
    update.states.bytes = {states, states_bytes()};
    if (!hashed) return update;
    update.weights.before = granules.first(quarter);
    update.weights.after = granules.subspan(quarter, quarter);
    update.states.before = granules.subspan(2 * quarter, quarter);
    update.states.after = granules.subspan(3 * quarter);
    return update;
  }

 private:
  std::uint64_t weights_bytes() const { return align_up<std::uint64_t>(count_ * size_of(type_), 64 * kKiB); }
  std::uint64_t states_bytes() const {
    return align_up<std::uint64_t>(count_ * (type_ == DType::kBFloat16 ? 10 : 8), 64 * kKiB);
  }
  DType type_;
  std::size_t count_;
};

// What a measured pass is compared with.
class StreamOf {
 public:
  StreamOf(std::size_t bytes, HostWorkers& workers) : workers_(workers), arena_(bytes / 2, kPinnedArena) {
    std::ranges::fill(words(), 1u);
  }
  // Reads and writes `bytes` in all.
  double seconds() {
    return seconds_of_pass(words().size(), workers_, [this](std::size_t begin, std::size_t end) {
      touch(words().data() + begin, end - begin);
      benchmark::ClobberMemory();
    });
  }

 private:
  std::span<std::uint32_t> words() const {
    return {reinterpret_cast<std::uint32_t*>(arena_.memory().data()), arena_.memory().size() / sizeof(std::uint32_t)};
  }
  HostWorkers& workers_;
  const HostArena arena_;
};

void report(benchmark::State& state, double elements, double bytes, double seconds, double stream_seconds) {
  const double passes = static_cast<double>(state.iterations());
  state.counters["ns_per_param"] = seconds / passes / elements * 1e9;
  state.counters["GB_per_s"] = bytes * passes / seconds * 1e-9;
  state.counters["stream_GB_per_s"] = bytes * passes / stream_seconds * 1e-9;
  state.counters["of_stream"] = stream_seconds / seconds;
}

void adam(benchmark::State& state, DType type, AdamFunction update) {
  const auto count = static_cast<std::size_t>(state.range(0));
  const auto workers = create_workers(static_cast<unsigned>(state.range(1)));
  Memory memory(type, count);
  const double elements = static_cast<double>(count), bytes = elements * static_cast<double>(bytes_per_element(type));
  StreamOf stream(static_cast<std::size_t>(bytes), *workers);
  const AdamScalars scalars = adam_scalars({.weight_decay = 0.01}, 10, 1.0);
  double seconds = 0, stream_seconds = 0;
  // In turn, so that both see the machine in the same state.
  for ([[maybe_unused]] auto _ : state) {
    const double pass = seconds_of_pass(count, *workers, [&](std::size_t begin, std::size_t end) {
      benchmark::DoNotOptimize(update(memory.tile(), scalars, begin, end));
    });
    stream_seconds += stream.seconds();
    seconds += pass;
    state.SetIterationTime(pass);
  }
  report(state, elements, bytes, seconds, stream_seconds);
}

// Tiles of `state.range(0)` elements, 32 Mi in all or one tile, each updated as the engine does it.
void tile(benchmark::State& state, DType type, bool hashed) {
  const auto count = static_cast<std::size_t>(state.range(0));
  const std::size_t tiles = std::max<std::size_t>(1, (std::size_t{32} << 20) / count);
  const auto workers = create_workers(static_cast<unsigned>(state.range(1)));
  const TileMemory one(type, count);
  const HostArena arena(align_up(tiles * one.bytes(), std::uint64_t{4096}), kPinnedArena);
  std::vector<TileUpdate> updates;
  std::vector<std::uint64_t> granules(4 * (one.bytes() / kGranuleBytes + 2));
  for (std::size_t t = 0; t < tiles; ++t) {
    updates.push_back(one.in(arena.memory().subspan(t * one.bytes(), one.bytes()), hashed, granules));
  }
  const double elements = static_cast<double>(count * tiles);
  const double bytes = elements * static_cast<double>(bytes_per_element(type));
  StreamOf stream(static_cast<std::size_t>(bytes), *workers);
  const AdamScalars scalars = adam_scalars({.weight_decay = 0.01}, 10, 1.0);
  double seconds = 0, stream_seconds = 0;
  for ([[maybe_unused]] auto _ : state) {
    const auto start = std::chrono::steady_clock::now();
    for (const TileUpdate& update : updates) benchmark::DoNotOptimize(update_tile(update, scalars, *workers));
    const double pass = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    stream_seconds += stream.seconds();
    seconds += pass;
    state.SetIterationTime(pass);
  }
  report(state, elements, bytes, seconds, stream_seconds);
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
    for (const bool hashed : {false, true}) {
      const std::string name = "tile/" + std::string(name_of(type)) + (hashed ? "/hashed" : "/plain");
      benchmark::RegisterBenchmark(name.c_str(), tile, type, hashed)
          ->ArgNames({"params", "threads"})
          ->ArgsProduct({{64 << 10, 1 << 20, 4 << 20, 64 << 20}, {1, 0}})
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
