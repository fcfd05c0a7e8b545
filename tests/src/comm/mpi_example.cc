// Trains one model on several processes, each with its part of the batch: an engine in each, whose gradients are summed
// over all before they are handed over. The sums have the same bits on every rank, and so have the weights.
#include <mpi.h>

#include <algorithm>
#include <cstdio>
#include <vector>

#include "spillway/communicator.h"
#include "spillway/engine.h"

using namespace spillway;

namespace {

constexpr std::size_t kWeights = 512 * 300;

void train(const Config& config, Communicator& ranks) {
  ModelDescription model;
  for (const char* name : {"a", "b", "c", "d"}) model.blocks.push_back({name, {{.name = name, .shape = {512, 300}}}});
  model.workspace_bytes = kWeights * sizeof(float);
  model.weight_types = {DType::kFloat32};
  auto engine = Engine::create(config, model, {.on_existing = OnExisting::kReplace});
  engine->import_weights([](auto, auto, auto, std::span<float> out) { std::ranges::fill(out, 1.0f); });
  Stream& stream = engine->stream();
  const std::span gradient(reinterpret_cast<float*>(engine->workspace().data()), kWeights);

  // Each rank adds up one slice of a gradient; the last one has what is left.
  std::vector<std::uint64_t> slices(ranks.ranks(), kWeights / ranks.ranks() * sizeof(float));
  slices.back() += kWeights % ranks.ranks() * sizeof(float);

  for (int step = 1; step <= 10; ++step) {
    for (std::uint32_t block = 0; block < 4; ++block) {
      Lease lease = engine->acquire(block, Pass::kForward, stream);  // enqueue your forward on `stream` here
    }
    for (std::uint32_t block = 4; block-- > 0;) {
      Lease lease = engine->acquire(block, Pass::kBackward, stream);
      const auto* weight = static_cast<const float*>(lease.weight(0));
      const float part = 0.1f * static_cast<float>(ranks.rank() + 1);  // stands for this rank's part of the batch
      stream.launch([=](HostWorkers&) {
        std::ranges::transform(weight, weight + kWeights, gradient.begin(), [=](float w) { return part * w; });
      });
      ranks.reduce_scatter(gradient, slices, Sums::kTree, static_cast<int>(block), stream);
      ranks.all_gather(std::as_writable_bytes(gradient), slices, static_cast<int>(block), stream);
      engine->push_gradient({.block = block, .parameter = 0, .data = gradient.data()}, stream);
    }
    const StepReport report = engine->step();
    ranks.throw_if_failed();  // what came of a collective that failed is not a gradient
    std::printf("rank %u step %d: gradient norm %.9g\n", ranks.rank(), step, report.gradient_norm);
  }
}

}  // namespace

int main(int argc, char** argv) {  // ds_config.json
  int provided = 0;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_SERIALIZED, &provided);
  int failed = 0;
  try {
    const auto ranks = make_communicator("mpi", {.mpi_comm = MPI_Comm_c2f(MPI_COMM_WORLD)});
    train(load_config(argv[1]), *ranks);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    failed = 1;
  }
  if (failed) MPI_Abort(MPI_COMM_WORLD, 1);  // MPI_Finalize would wait for a rank that is lost
  MPI_Finalize();
}
