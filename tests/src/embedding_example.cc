// Pulls four blocks of weights towards zero: the smallest program that trains through all three tiers.
#include <algorithm>
#include <cstdio>

#include "spillway/engine.h"
#include "spillway/export.h"

using namespace spillway;

int main(int, char** argv) {  // ds_config.json, directory for the trained weights
  const Config config = load_config(argv[1]);
  ModelDescription model;
  for (const char* name : {"a", "b", "c", "d"}) model.blocks.push_back({name, {{.name = name, .shape = {512, 300}}}});
  model.workspace_bytes = 512 * 300 * sizeof(float);
  model.weight_types = {DType::kFloat32};  // what the arithmetic below is written for

  auto engine = Engine::create(config, model, {.on_existing = OnExisting::kReplace});
  engine->import_weights([](auto, auto, auto, std::span<float> out) { std::ranges::fill(out, 1.0f); });
  Stream& stream = engine->stream();
  auto* gradient = reinterpret_cast<float*>(engine->workspace().data());

  for (int step = 1; step <= 20; ++step) {
    for (std::uint32_t block = 0; block < 4; ++block) {
      Lease lease = engine->acquire(block, Pass::kForward, stream);  // enqueue your forward on `stream` here
    }
    for (std::uint32_t block = 4; block-- > 0;) {
      Lease lease = engine->acquire(block, Pass::kBackward, stream);
      const auto* weight = static_cast<const float*>(lease.weight(0));
      stream.launch([=](HostWorkers&) { std::copy_n(weight, 512 * 300, gradient); });  // the gradient of |w|² / 2
      engine->push_gradient({.block = block, .parameter = 0, .data = gradient}, stream);
    }
    const StepReport report = engine->step();
    std::printf("step %d: gradient norm %.3f\n", step, report.gradient_norm);
  }
  export_model(*engine, model, argv[2], {.replace = true});
}
