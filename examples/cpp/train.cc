// Trains a classifier of table rows, through all three tiers.
//
//   train ds_config.json DATA.csv OUT STEPS [LAYERS WIDTH] [--resume]
//
// OUT gets the weights, as model.safetensors. Which rows a step takes follows from its number, so --resume needs
// nothing but the store to go on, with the same bits, after whatever ended the run before.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "layers.h"
#include "spillway/engine.h"
#include "spillway/export.h"

using namespace spillway;

namespace {

std::vector<Layer> stack(std::size_t rows, const Table& table, std::uint32_t layers, std::size_t width) {
  std::vector<Layer> found;
  for (std::uint32_t l = 0; l < layers; ++l) {
    const bool last = l + 1 == layers;
    found.push_back({rows, l == 0 ? table.columns : width, last ? table.classes : width, last});
  }
  return found;
}

std::size_t widest(const std::vector<Layer>& layers) {
  std::size_t found = 0;
  for (const Layer& layer : layers) found = std::max({found, layer.in, layer.out});
  return found;
}

// What the engine must know: names, shapes and the order of a step. One block a layer; activation l is its input, and
// what has no room in hbm_bytes goes down to host memory or NVMe between its uses.
ModelDescription describe(const std::vector<Layer>& layers) {
  ModelDescription model;
  std::size_t rows = layers[0].rows, largest = 0;
  const auto size = static_cast<std::uint32_t>(layers.size());
  for (std::uint32_t l = 0; l < size; ++l) {
    const std::string name = "layers." + std::to_string(l);
    const std::size_t in = layers[l].in, out = layers[l].out;
    model.blocks.push_back(
        {name, {{.name = name + ".weight", .shape = {out, in}}, {.name = name + ".bias", .shape = {out}}}});
    model.activations.push_back({rows * in * sizeof(float)});
    largest = std::max(largest, in * out);
  }
  model.activations.push_back({rows * layers.back().out * sizeof(float)});
  model.activation_uses.push_back({0, Access::kWrite, 0});
  const auto visit = [&](std::uint32_t l, Pass pass) {
    const auto number = static_cast<std::uint32_t>(model.visits.size());
    model.visits.push_back({l, pass});
    model.activation_uses.push_back({l, Access::kRead, number});
    model.activation_uses.push_back({l + 1, pass == Pass::kForward ? Access::kWrite : Access::kRead, number});
  };
  for (std::uint32_t l = 0; l < size; ++l) visit(l, Pass::kForward);
  for (std::uint32_t l = size; l-- > 0;) visit(l, Pass::kBackward);
  model.activations_held = 2;
  model.workspace_bytes = ((2 * rows + 1) * widest(layers) + largest) * sizeof(float);  // as train_step() cuts it up
  model.weight_types = {DType::kFloat32};  // what the arithmetic is written for
  return model;
}

// He's initial weights, by a generator of their own for each layer: pieces of it are asked for in order.
void import_weights(Engine& engine, const std::vector<Layer>& layers) {
  std::vector<std::mt19937> generators;
  for (std::uint32_t l = 0; l < layers.size(); ++l) generators.emplace_back(l + 1);
  engine.import_weights([&](std::uint32_t block, std::uint32_t parameter, std::uint64_t, std::span<float> out) {
    std::normal_distribution<float> normal(0, std::sqrt(2.0f / static_cast<float>(layers[block].in)));
    std::ranges::generate(out, [&] { return parameter == 0 ? normal(generators[block]) : 0.0f; });
  });
}

StepReport train_step(Engine& engine, const std::vector<Layer>& layers, const float* batch, const std::size_t* class_of,
                      double* loss) {
  Stream& stream = engine.stream();
  const std::size_t rows = layers[0].rows;
  const auto size = static_cast<std::uint32_t>(layers.size());
  auto* dy = reinterpret_cast<float*>(engine.workspace().data());
  auto *dx = dy + rows * widest(layers), *dbias = dx + rows * widest(layers), *dweight = dbias + widest(layers);
  const auto floats = [](const ActivationLease& lease) { return reinterpret_cast<float*>(lease.data()); };
  const auto weight = [](const Lease& lease, int index) { return static_cast<const float*>(lease.weight(index)); };
  {
    ActivationLease input = engine.acquire_activation(0, Access::kWrite, stream);
    stream.launch([=, x = floats(input), count = rows * layers[0].in](HostWorkers&) { std::copy_n(batch, count, x); });
  }
  for (std::uint32_t l = 0; l < size; ++l) {
    const Lease lease = engine.acquire(l, Pass::kForward, stream);
    const ActivationLease x = engine.acquire_activation(l, Access::kRead, stream);
    const ActivationLease y = engine.acquire_activation(l + 1, Access::kWrite, stream);
    layers[l].forward(stream, floats(x), weight(lease, 0), weight(lease, 1), floats(y));
  }
  for (std::uint32_t l = size; l-- > 0;) {
    const Lease lease = engine.acquire(l, Pass::kBackward, stream);
    const ActivationLease x = engine.acquire_activation(l, Access::kRead, stream);
    const ActivationLease y = engine.acquire_activation(l + 1, Access::kRead, stream);
    if (layers[l].last) loss_and_gradient(stream, rows, layers[l].out, floats(y), class_of, dy, loss);
    layers[l].backward(stream, floats(x), weight(lease, 0), floats(y), dy, dweight, dbias, dx);
    engine.push_gradient({.block = l, .parameter = 0, .data = dweight}, stream);
    engine.push_gradient({.block = l, .parameter = 1, .data = dbias}, stream);
    std::swap(dy, dx);
  }
  return engine.step();  // waits for what was enqueued
}

int run(int argc, char** argv) {
  const bool resume = std::string(argv[argc - 1]) == "--resume";
  argc -= resume;
  if (argc != 5 && argc != 7) {
    std::fprintf(stderr, "usage: train ds_config.json DATA.csv OUT STEPS [LAYERS WIDTH] [--resume]\n");
    return 2;
  }
  const Config config = load_config(argv[1]);
  const Table table(argv[2]);
  const std::size_t rows = std::size_t{config.micro_batch} * config.gradient_accumulation;  // inside a visit, at once
  const std::size_t batches = table.class_of.size() / rows;
  if (batches == 0)
    throw std::runtime_error(std::string(argv[2]) + ": has fewer rows than a step of the configuration");
  const auto layers = stack(rows, table, argc == 7 ? std::stoul(argv[5]) : 4, argc == 7 ? std::stoul(argv[6]) : 64);
  const ModelDescription model = describe(layers);
  auto engine = Engine::create(config, model, {.on_existing = resume ? OnExisting::kResume : OnExisting::kReplace});
  for (const std::string& fact : engine->describe()) std::printf("%s\n", fact.c_str());
  if (!resume) import_weights(*engine, layers);
  for (std::uint64_t step = engine->current_step(), end = std::stoul(argv[4]); step < end; ++step) {
    const std::size_t first = step % batches * rows;
    double loss = 0;
    const StepReport report =
        train_step(*engine, layers, &table.values[first * table.columns], &table.class_of[first], &loss);
    std::printf("step %llu  loss %.4f  norm %.3f  %s at %.0f %%\n", static_cast<unsigned long long>(report.step), loss,
                report.gradient_norm, report.link.c_str(), report.link_percent);
  }
  export_model(*engine, model, argv[3], {.replace = true});
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const std::exception& error) {  // spillway::Error: what happened, and what to do about it
    std::fprintf(stderr, "train: %s\n", error.what());
    return 1;
  }
}
