// Optimizers against memory. Every measured pass alternates with a stream that reads, changes and writes as many bytes
// and does nothing else, as fast as this machine can; `of_stream` is the median of the stream's time over the pass's: 1
// means that a pass costs no more than its memory traffic. 192 Mi parameters in tiles, as the engine lays them out.
//
//   adam/TYPE/ISA          the kernel alone, by instruction set
//   adagrad, lion, sgd     the same for the best instruction set
//   update/TYPE/plain      the engine's pass over a tile
//   update/TYPE/hashed     … with the checksums of what came and of what goes
//   update_bf16, …_int8    the same with Adam's moments in fewer bytes
//   step/TYPE              … and the gradients' norm and NaN check before it: all that a step computes on the CPU
//   norm/TYPE              the norm and NaN check alone, beside a stream that only reads
#include <benchmark/benchmark.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "kernels/host_memory.h"
#include "kernels/norm.h"
#include "kernels/optimizer.h"
#include "kernels/tile_update.h"
#include "kernels/workers.h"
#include "spillway/bf16.h"
#include "spillway/fp16.h"
#include "spillway/units.h"

namespace spillway {
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::size_t kPiece = 16 * kKiB;  // elements a worker takes at a time
constexpr std::uint64_t kPadding = 64 * kKiB;

// Read and written per element; the gradient is read only, the weight of fp16 is only written (its line is read all the
// same, which counts).
double bytes_per_element(DType type, OptimizerKind kind, MomentFormat format) {
  const std::size_t weights = type == DType::kFloat32 ? 8 : type == DType::kBFloat16 ? 8 : 12;
  const double moment = static_cast<double>(size_of(format)) + (has_scales(format) ? 2.0 / kMomentGroup : 0);
  return static_cast<double>(size_of(type) + weights) + 2 * moment * moments_of(kind);
}

double median(std::vector<double> values) {
  std::ranges::sort(values);
  return values[values.size() / 2];
}

double seconds_of(auto&& work) {
  const auto start = Clock::now();
  work();
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// Memory with the pages that the tiers have, kept from case to case: first touches of gigabytes take longer than what
// is measured. What it held before is still there.
class Kept {
 public:
  std::span<std::byte> of(std::uint64_t bytes) {
    if (!arena_ || arena_->memory().size() < bytes) {
      arena_.reset();
      arena_ = std::make_unique<HostArena>(align_up(bytes, std::uint64_t{4096}), kPinnedArena);
      std::ranges::fill(arena_->memory(), std::byte{1});  // pages of its own: reading untouched ones costs nothing
    }
    return arena_->memory().first(bytes);
  }

 private:
  std::unique_ptr<HostArena> arena_;
};
Kept kept_tiles, kept_stream;

// Tiles as they lie in memory: | weights | states | padding |, and the gradients after all of them.
class Tiles {
 public:
  Tiles(DType type, OptimizerKind kind, MomentFormat format, std::size_t params, std::size_t tile)
      : type_(type),
        kind_(kind),
        format_(format),
        count_(tile),
        tiles_(std::max<std::size_t>(1, params / tile)),
        memory_(kept_tiles.of(tiles_ * (tile_bytes() + gradient_bytes()))),
        range_{count_, 0} {
    const OptimizerTile first = tile_at(0);
    auto* const gradient = static_cast<std::byte*>(const_cast<void*>(first.gradient));
    std::fill_n(weights(0), tile_bytes(), std::byte{0});
    std::fill_n(gradient, gradient_bytes(), std::byte{0});
    for (std::size_t i = 0; i < count_; ++i) {
      put(first.weight, i, 0.5f);
      put(gradient, i, 1e-3f * static_cast<float>(i % 13) - 5e-3f);
      if (first.master) first.master[i] = 0.5f;
      if (first.exp_avg) first.exp_avg[i] = 1e-3f;
      if (first.exp_avg_sq) first.exp_avg_sq[i] = 1e-4f;
    }
    // 1e-3 and 1e-4 in bf16; in int8 a group of the largest code.
    const std::size_t moment = format_ == MomentFormat::kBFloat16 ? 2 : 1;
    const auto set = [&](void* values, std::uint16_t* scales, float value, float scale, int code) {
      for (std::size_t i = 0; values != nullptr && moment == 2 && i < count_; ++i)
        static_cast<std::uint16_t*>(values)[i] = float_to_bf16(value);
      if (scales != nullptr)
        std::memset(values, code, count_), std::fill_n(scales, count_ / kMomentGroup, float_to_bf16(scale));
    };
    set(first.reduced.exp_avg, first.reduced.exp_avg_scales, 1e-3f, 1e-3f, 127);
    set(first.reduced.exp_avg_sq, first.reduced.exp_avg_sq_scales, 1e-4f, 1e-2f, 255);
    for (std::size_t t = 1; t < tiles_; ++t) {
      std::copy_n(weights(0), tile_bytes(), weights(t));
      std::copy_n(gradient, gradient_bytes(), gradient + t * gradient_bytes());
    }
  }

  OptimizerTile tile_at(std::size_t t) const {
    OptimizerTile tile{.type = type_, .weight = weights(t), .count = count_};
    std::byte* at = states(t);
    const auto next = [&](auto*& array, bool there) {
      if (!there) return;
      array = reinterpret_cast<std::remove_reference_t<decltype(array)>>(at);
      at += count_ * sizeof(*array);
    };
    const bool average = has_exp_avg(kind_), square = has_exp_avg_sq(kind_), exact = format_ == MomentFormat::kFloat32;
    const auto moment = [&](void*& array, bool there) {
      if (!exact && there) array = at, at += count_ * size_of(format_);
    };
    next(tile.exp_avg, exact && average), next(tile.exp_avg_sq, exact && square);
    tile.reduced.format = format_, tile.reduced.index = t * count_;
    moment(tile.reduced.exp_avg, average), moment(tile.reduced.exp_avg_sq, square);
    next(tile.residual, type_ == DType::kBFloat16), next(tile.master, type_ == DType::kFloat16);
    for (const auto& [scales, there] :
         {std::pair(&tile.reduced.exp_avg_scales, average), std::pair(&tile.reduced.exp_avg_sq_scales, square)}) {
      if (!has_scales(format_) || !there) continue;
      *scales = reinterpret_cast<std::uint16_t*>(at);
      at += 2 * (count_ / kMomentGroup);
    }
    tile.gradient = memory_.data() + tiles_ * tile_bytes() + t * gradient_bytes();
    return tile;
  }
  TileUpdate update_at(std::size_t t, std::span<const OptimizerScalars> scalars,
                       std::span<std::uint64_t> granules) const {
    TileUpdate update{.tile = tile_at(t), .groups = {&range_, 1}, .scalars = scalars, .weights = {}, .states = {}};
    update.weights.bytes = {weights(t), weights_bytes()};
    update.states.bytes = {states(t), states_bytes()};
    update.weights.arrays = {size_of(type_)};
    std::size_t array = 0;
    for (; array < moments_of(kind_); ++array) update.states.arrays[array] = size_of(format_);
    if (master_bytes() > 0) update.states.arrays[array] = master_bytes();
    const std::size_t quarter = granules.size() / 4;
    if (quarter == 0) return update;
    update.weights.before = granules.first(quarter);
    update.weights.after = granules.subspan(quarter, quarter);
    update.states.before = granules.subspan(2 * quarter, quarter);
    update.states.after = granules.subspan(3 * quarter);
    return update;
  }

  std::size_t tiles() const { return tiles_; }
  std::size_t granules() const { return 4 * (states_bytes() / kGranuleBytes + 1); }
  double elements() const { return static_cast<double>(count_ * tiles_); }
  double bytes() const { return elements() * bytes_per_element(type_, kind_, format_); }
  const void* gradients() const { return tile_at(0).gradient; }
  double gradients_bytes() const { return elements() * static_cast<double>(size_of(type_)); }

 private:
  std::uint64_t weights_bytes() const { return align_up(count_ * size_of(type_), kPadding); }
  std::uint64_t states_bytes() const {
    const std::uint64_t scales = has_scales(format_) ? 2 * (count_ / kMomentGroup) : 0;
    return align_up(count_ * master_bytes() + moments_of(kind_) * (count_ * size_of(format_) + scales), kPadding);
  }
  std::uint64_t master_bytes() const { return type_ == DType::kFloat32 ? 0 : type_ == DType::kBFloat16 ? 2 : 4; }
  std::uint64_t tile_bytes() const { return weights_bytes() + states_bytes(); }
  std::uint64_t gradient_bytes() const { return weights_bytes(); }
  std::byte* weights(std::size_t t) const { return memory_.data() + t * tile_bytes(); }
  std::byte* states(std::size_t t) const { return weights(t) + weights_bytes(); }
  void put(void* array, std::size_t i, float value) const {
    const std::uint16_t half = type_ == DType::kFloat16 ? float_to_fp16(value) : float_to_bf16(value);
    const void* from = type_ == DType::kFloat32 ? static_cast<const void*>(&value) : &half;
    std::memcpy(static_cast<std::byte*>(array) + i * size_of(type_), from, size_of(type_));
  }

  DType type_;
  OptimizerKind kind_;
  MomentFormat format_;
  std::size_t count_, tiles_;
  std::span<std::byte> memory_;
  GroupRange range_;
};

using Words = std::uint32_t;

#if defined(__x86_64__)
#define SPILLWAY_BEST_VECTORS __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define SPILLWAY_BEST_VECTORS
#endif

// Four arrays at once, without prefetch: the fastest of 16 ways that were tried here (one array: 0.95 of it, one with
// prefetch 0.80 to 0.93, non-temporal stores 0.55).
SPILLWAY_BEST_VECTORS void change(Words* from, std::size_t count) {
  const std::size_t quarter = count / 4;
  for (std::size_t i = 0; i + 32 <= quarter; i += 32) {
    for (Words* array = from; array < from + 4 * quarter; array += quarter)
      for (std::size_t k = 0; k < 32; ++k) array[i + k] ^= 0x5au;
  }
}

SPILLWAY_BEST_VECTORS void read(Words* from, std::size_t count) {
  Words sums[64] = {};
  const std::size_t quarter = count / 4;
  for (std::size_t i = 0; i + 16 <= quarter; i += 16) {
    for (std::size_t a = 0; a < 4; ++a)
      for (std::size_t k = 0; k < 16; ++k) sums[16 * a + k] += from[a * quarter + i + k];
  }
  benchmark::DoNotOptimize(sums);
}

// What a pass is compared with: `bytes` moved in all, each worker in one part.
class Stream {
 public:
  Stream(double bytes, bool writes, HostWorkers& workers)
      : workers_(workers),
        writes_(writes),
        memory_(kept_stream.of(static_cast<std::uint64_t>(bytes) / (writes ? 2 : 1))) {}
  double seconds() {
    const std::size_t parts = workers_.threads(), words = memory_.size() / sizeof(Words);
    return seconds_of([&] {
      workers_.parallel_for(parts, [&](std::size_t part) {
        Words* const from = reinterpret_cast<Words*>(memory_.data()) + part * (words / parts);
        writes_ ? change(from, words / parts) : read(from, words / parts);
        benchmark::ClobberMemory();
      });
    });
  }

 private:
  HostWorkers& workers_;
  bool writes_;
  std::span<std::byte> memory_;
};

// Pass and stream in turn, so that both see the machine in the same state; medians of all turns.
void measure(benchmark::State& state, double elements, double bytes, Stream stream, auto&& pass) {
  std::vector<double> passes, streams, shares;
  pass();  // the first one meets cold code
  for ([[maybe_unused]] auto _ : state) {
    passes.push_back(seconds_of(pass));
    streams.push_back(stream.seconds());
    shares.push_back(streams.back() / passes.back());
    state.SetIterationTime(passes.back());
  }
  state.counters["ns_per_param"] = median(passes) / elements * 1e9;
  state.counters["GB_per_s"] = bytes / median(passes) * 1e-9;
  state.counters["stream_GB_per_s"] = bytes / median(streams) * 1e-9;
  state.counters["of_stream"] = median(shares);
  state.counters["bytes_per_param"] = bytes / elements;
}

struct Case {
  Case(benchmark::State& state, DType type, OptimizerKind kind, MomentFormat format = MomentFormat::kFloat32)
      : workers(create_workers(static_cast<unsigned>(state.range(2)))),
        tiles(type, kind, format, static_cast<std::size_t>(state.range(0)), static_cast<std::size_t>(state.range(1))),
        scalars(optimizer_scalars({.kind = kind, .weight_decay = 0.01}, 10, 1.0)) {}
  std::unique_ptr<HostWorkers> workers;
  Tiles tiles;
  OptimizerScalars scalars;
};

void kernel(benchmark::State& state, DType type, OptimizerKind kind, OptimizerFunction update) {
  const Case c(state, type, kind);
  measure(state, c.tiles.elements(), c.tiles.bytes(), Stream(c.tiles.bytes(), true, *c.workers), [&] {
    for (std::size_t t = 0; t < c.tiles.tiles(); ++t) {
      const OptimizerTile tile = c.tiles.tile_at(t);
      c.workers->parallel_for(div_up(tile.count, kPiece), [&](std::size_t i) {
        benchmark::DoNotOptimize(update(tile, c.scalars, i * kPiece, std::min(tile.count, (i + 1) * kPiece)));
      });
    }
  });
}

enum class What { kPlain, kHashed, kStep };

void engine_pass(benchmark::State& state, DType type, What what, MomentFormat format) {
  const Case c(state, type, OptimizerKind::kAdam, format);
  std::vector<std::uint64_t> granules(what == What::kHashed ? c.tiles.granules() : 0);
  const auto elements = static_cast<std::size_t>(c.tiles.elements());
  std::vector<double> leaves(div_up(elements, kNormLeaf));
  const double bytes = c.tiles.bytes() + (what == What::kStep ? c.tiles.gradients_bytes() : 0);
  measure(state, c.tiles.elements(), bytes, Stream(bytes, true, *c.workers), [&] {
    if (what == What::kStep)
      benchmark::DoNotOptimize(squared_norm(c.tiles.gradients(), type, elements, leaves, *c.workers));
    for (std::size_t t = 0; t < c.tiles.tiles(); ++t) {
      benchmark::DoNotOptimize(update_tile(c.tiles.update_at(t, {&c.scalars, 1}, granules), *c.workers));
    }
  });
}

void norm(benchmark::State& state, DType type) {
  const Case c(state, type, OptimizerKind::kLion);
  const auto elements = static_cast<std::size_t>(c.tiles.elements());
  std::vector<double> leaves(div_up(elements, kNormLeaf));
  measure(state, c.tiles.elements(), c.tiles.gradients_bytes(), Stream(c.tiles.gradients_bytes(), false, *c.workers),
          [&] { benchmark::DoNotOptimize(squared_norm(c.tiles.gradients(), type, elements, leaves, *c.workers)); });
}

// 4096: one iteration that the test suite runs, so that no bench can rot.
constexpr std::int64_t kAll = 192 << 20;
const std::vector<std::int64_t> kTileSizes = {64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20};

void add(const std::string& name, const std::vector<std::int64_t>& tile_sizes, auto&&... arguments) {
  auto* added = benchmark::RegisterBenchmark(name.c_str(), arguments...)
                    ->ArgNames({"params", "tile", "threads"})
                    ->UseManualTime()
                    ->Unit(benchmark::kMillisecond);
  for (const int threads : {1, 2}) {
    added->Args({4096, 4096, threads});
    for (const std::int64_t tile : tile_sizes) added->Args({kAll, tile, threads});
  }
}

void register_all() {
  for (const DType type : {DType::kBFloat16, DType::kFloat32, DType::kFloat16}) {
    const std::string of_type = fmt::format("/{}", name_of(type));
    for (const OptimizerTarget& target : optimizer_targets()) {
      add(fmt::format("adam{}/{}", of_type, target.name), kTileSizes, kernel, type, OptimizerKind::kAdam,
          target.update);
    }
    const OptimizerFunction best = optimizer_targets().front().update;
    add("adagrad" + of_type, {4 << 20}, kernel, type, OptimizerKind::kAdagrad, best);
    add("lion" + of_type, {4 << 20}, kernel, type, OptimizerKind::kLion, best);
    add("sgd" + of_type, {4 << 20}, kernel, type, OptimizerKind::kSgd, best);
    for (const MomentFormat format : kMomentFormats) {
      const std::string update =
          (format == MomentFormat::kFloat32 ? "update" : fmt::format("update_{}", name_of(format))) + of_type;
      add(update + "/plain", {256 << 10, 4 << 20}, engine_pass, type, What::kPlain, format);
      add(update + "/hashed", {256 << 10, 4 << 20}, engine_pass, type, What::kHashed, format);
    }
    add("step" + of_type, {4 << 20}, engine_pass, type, What::kStep, MomentFormat::kFloat32);
    add("norm" + of_type, {4 << 20}, norm, type);
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
