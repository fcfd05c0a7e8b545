// A resident step of a GPT-2 model (forward, recompute, backward) against oneDNN's best rate on its GEMM shapes in the
// same run.
//
//   gpt2_block_bench [--tiny]
//
// One JSON line per weight type: seconds of the step, its GEMM arithmetic (four forwards' worth per layer: forward,
// recompute, and two products backward), the rate reached, oneDNN's rate on the whole products with packed weights and
// the same number of threads, and the ratio. Attention, norms, packing and the loss count as time, not as arithmetic.
#include <fmt/format.h>
#include <omp.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <oneapi/dnnl/dnnl.hpp>
#include <random>
#include <span>
#include <thread>
#include <vector>

#include "spillway/engine.h"
#include "tools/models/trainer.h"

namespace spillway::models {
namespace {

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

struct Product {
  std::int64_t m, n, k;
};

// Seconds of one pass over the products on one thread, weights packed beforehand as oneDNN likes them best.
double onednn_seconds(const std::vector<Product>& products, DType type, int repeats) {
  using dnnl::memory;
  omp_set_num_threads(1);
  dnnl::engine engine(dnnl::engine::kind::cpu, 0);
  dnnl::stream stream(engine);
  const auto element = type == DType::kBFloat16 ? memory::data_type::bf16 : memory::data_type::f32;
  double total = 0;
  for (const auto& p : products) {
    const memory::desc a({p.m, p.k}, element, memory::format_tag::ab);
    const memory::desc b({p.k, p.n}, element, memory::format_tag::any);
    const memory::desc c({p.m, p.n}, memory::data_type::f32, memory::format_tag::ab);
    const dnnl::matmul::primitive_desc plan(dnnl::matmul::desc(a, b, c), engine);
    memory left(plan.src_desc(), engine), right(plan.weights_desc(), engine), result(plan.dst_desc(), engine);
    std::memset(left.get_data_handle(), 0, plan.src_desc().get_size());
    std::memset(right.get_data_handle(), 0, plan.weights_desc().get_size());
    const dnnl::matmul product(plan);
    double best = 1e9;
    for (int r = 0; r <= repeats; ++r) {
      const double start = now();
      product.execute(stream, {{DNNL_ARG_SRC, left}, {DNNL_ARG_WEIGHTS, right}, {DNNL_ARG_DST, result}});
      best = std::min(best, now() - start);
    }
    total += best;
  }
  return total;
}

void measure(const ModelConfig& model, const TrainerOptions& options, int repeats) {
  const std::int64_t m = static_cast<std::int64_t>(options.micro_batch) * options.sequence;
  const std::int64_t width = model.width, inner = model.inner;
  std::vector<Product> products;
  for (const auto& [in, out] : {std::pair(width, 3 * width), {width, width}, {width, inner}, {inner, width}}) {
    products.insert(products.end(), {{m, out, in}, {m, out, in}, {m, in, out}, {in, out, m}});
  }
  double flops = 0;
  for (const auto& p : products) flops += 2.0 * static_cast<double>(p.m) * static_cast<double>(p.n * p.k);

  // Everything in HBM, no files: what is left is arithmetic, and the rounding of pushed gradients.
  Trainer trainer(model, options);
  Config config;
  config.weights = options.type;
  config.threads = options.threads;
  const auto engine = Engine::create(config, trainer.description());
  std::mt19937 generator(1);
  engine->import_weights([&](std::uint32_t, std::uint32_t, std::uint64_t, std::span<float> out) {
    for (auto& v : out) v = static_cast<float>(generator() % 1000) * 4e-5f - 0.02f;
  });
  trainer.attach(*engine);
  std::vector<std::uint32_t> rows(options.micro_batch * (options.sequence + 1));
  for (auto& token : rows) token = static_cast<std::uint32_t>(generator() % model.vocabulary);

  // Step and oneDNN take turns, so that a slow phase of the machine hits both.
  double step = 1e9, peer = 1e9;
  for (int r = 0; r < repeats + 1; ++r) {
    const double start = now();
    trainer.run_step(rows);
    step = std::min(step, now() - start);
    engine->step();  // the update is not what is measured
    std::vector<double> seconds(options.threads);
    std::vector<std::thread> threads;
    for (unsigned t = 0; t < options.threads; ++t) {
      threads.emplace_back([&, t] { seconds[t] = onednn_seconds(products, options.type, 2); });
    }
    for (auto& thread : threads) thread.join();
    // Every thread did all products: together `threads` times the work in the slowest one's time.
    peer = std::min(peer, *std::max_element(seconds.begin(), seconds.end()) / options.threads);
  }
  const double rate = flops * model.layers / step, best = flops / peer;
  fmt::print(
      "{{\"bench\":\"gpt2_block\",\"type\":\"{}\",\"layers\":{},\"width\":{},\"tokens\":{},\"threads\":{},"
      "\"step_seconds\":{:.4f},\"gemm_gflops\":{:.1f},\"onednn_gflops\":{:.1f},\"ratio\":{:.3f}}}\n",
      name_of(options.type), model.layers, model.width, m, options.threads, step, rate / 1e9, best / 1e9, rate / best);
}

}  // namespace
}  // namespace spillway::models

int main(int argc, char** argv) {
  using namespace spillway;
  using namespace spillway::models;
  const bool tiny = argc > 1 && std::strcmp(argv[1], "--tiny") == 0;
  ModelConfig model;
  model.layers = tiny ? 1 : 4;
  model.width = tiny ? 64 : 1024;
  model.heads = tiny ? 1 : 16;
  model.inner = 4 * model.width;
  model.positions = 256;
  model.vocabulary = 256;  // the head is not what is measured
  const unsigned threads = std::max(1u, std::thread::hardware_concurrency());
  for (const auto type : {DType::kFloat32, DType::kBFloat16}) {
    measure(model, {.type = type, .micro_batch = 1, .accumulation = 1, .sequence = 256, .threads = threads},
            tiny ? 0 : 8);
  }
}
