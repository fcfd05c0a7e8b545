// What a schedule costs, at the shapes of large models and in tiles of 4 Mi: seconds per tile of make_schedule, which
// must neither grow with the model nor reach 5 us, and of make_plan. With several ranks: of the first's.
#include <benchmark/benchmark.h>

#include <string>

#include "src/plan/plan.h"
#include "src/plan/schedule.h"

namespace spillway {
namespace {

// Transformer layers of 12 width^2 parameters, and an embedding that is tied to the head.
ModelDescription transformer(std::uint32_t layers, std::uint64_t width) {
  ModelDescription model;
  model.blocks.push_back({"embedding", {{.name = "wte", .shape = {50'257, width}, .pushes = 2}}});
  for (std::uint32_t l = 0; l < layers; ++l) {
    const std::string name = "h." + std::to_string(l);
    model.blocks.push_back({name,
                            {{.name = name + ".attn.qkv", .shape = {width, 3 * width}},
                             {.name = name + ".attn.proj", .shape = {width, width}},
                             {.name = name + ".mlp.fc", .shape = {width, 4 * width}},
                             {.name = name + ".mlp.proj", .shape = {4 * width, width}}}});
  }
  auto visit = [&](std::uint32_t block, Pass pass) { model.visits.push_back({block, pass}); };
  for (std::uint32_t b = 0; b <= layers; ++b) visit(b, Pass::kForward);
  visit(0, Pass::kBackward);
  for (std::uint32_t b = layers; b > 0; --b) visit(b, Pass::kBackward);
  visit(0, Pass::kBackward);
  return model;
}

Config config() {
  Config config;
  config.weights = DType::kBFloat16;
  config.parameters = config.states = Placement::kNvme;
  config.nvme_paths = {"/drive"};
  return config;
}

void report(benchmark::State& state, std::size_t tiles) {
  state.counters["tiles"] = static_cast<double>(tiles);
  state.counters["s_per_tile"] = benchmark::Counter(
      static_cast<double>(tiles), benchmark::Counter::kIsIterationInvariantRate | benchmark::Counter::kInvert);
}

void BM_schedule(benchmark::State& state, std::uint32_t layers, std::uint64_t width, std::uint32_t ranks) {
  const Plan plan = make_plan(config(), transformer(layers, width), 1, {0, ranks});
  const MachineRates rates{.cores = 16,
                           .device_on_cores = false,
                           .nvme_read = 7e9,
                           .nvme_write = 5e9,
                           .nvme_mixed = 8e9,
                           .h2d = 25e9,
                           .d2h = 25e9,
                           .update_seconds = 2e-10,
                           .checksum = 2e10,
                           .sync_seconds = 1e-2,
                           .network = 12.5e9,
                           .network_seconds = 2e-5};
  const std::vector<double> seconds(plan.visits.size(), 0.1);
  for (auto _ : state) benchmark::DoNotOptimize(make_schedule(schedule_input(plan, rates, seconds)).seconds());
  report(state, plan.tiles.size());
}

void BM_plan(benchmark::State& state, std::uint32_t layers, std::uint64_t width, std::uint32_t ranks) {
  const ModelDescription model = transformer(layers, width);
  std::size_t tiles = 0;
  for (auto _ : state) tiles = make_plan(config(), model, 1, {0, ranks}).tiles.size();
  report(state, tiles);
}

BENCHMARK_CAPTURE(BM_schedule, tiny, 2, 512, 1)->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(BM_schedule, 7B, 32, 4096, 1)->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(BM_schedule, 7B_8_ranks, 32, 4096, 8)->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(BM_schedule, 7B_64_ranks, 32, 4096, 64)->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(BM_schedule, 7B_512_ranks, 32, 4096, 512)->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(BM_schedule, 70B, 80, 8192, 1)->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(BM_schedule, 70B_8_ranks, 80, 8192, 8)->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(BM_schedule, 70B_64_ranks, 80, 8192, 64)->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(BM_schedule, 70B_512_ranks, 80, 8192, 512)->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(BM_schedule, 1T, 128, 25600, 1)->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(BM_schedule, 1T_8_ranks, 128, 25600, 8)->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(BM_schedule, 1T_64_ranks, 128, 25600, 64)->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(BM_schedule, 1T_512_ranks, 128, 25600, 512)->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(BM_schedule, tiny_2_ranks, 2, 512, 2)->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(BM_plan, tiny, 2, 512, 1)->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(BM_plan, 7B, 32, 4096, 1)->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(BM_plan, 7B_8_ranks, 32, 4096, 8)->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(BM_plan, 7B_64_ranks, 32, 4096, 64)->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(BM_plan, 7B_512_ranks, 32, 4096, 512)->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(BM_plan, 70B, 80, 8192, 1)->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(BM_plan, 70B_8_ranks, 80, 8192, 8)->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(BM_plan, 70B_64_ranks, 80, 8192, 64)->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(BM_plan, 70B_512_ranks, 80, 8192, 512)->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(BM_plan, 1T, 128, 25600, 1)->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(BM_plan, 1T_8_ranks, 128, 25600, 8)->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(BM_plan, 1T_64_ranks, 128, 25600, 64)->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(BM_plan, 1T_512_ranks, 128, 25600, 512)->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(BM_plan, tiny_2_ranks, 2, 512, 2)->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace spillway

BENCHMARK_MAIN();
