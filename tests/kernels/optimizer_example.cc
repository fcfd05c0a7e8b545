// Fine-tunes three numbers: AdamW on plain arrays, with bf16 weights and their exact fp32 master.
#include <cstdint>
#include <cstdio>
#include <vector>

#include "spillway/bf16.h"
#include "spillway/optimizer.h"

using namespace spillway;

int main() {
  const float wanted[] = {1.0f, -0.5f, 0.25f};
  const std::size_t count = 3;
  std::vector<std::uint16_t> weight(count), gradient(count);  // bf16
  std::vector<std::int16_t> residual(count);                  // weight + residual = fp32 master
  std::vector<float> exp_avg(count), exp_avg_sq(count);
  const OptimizerTile tile{.type = DType::kBFloat16,
                           .weight = weight.data(),
                           .residual = residual.data(),
                           .exp_avg = exp_avg.data(),
                           .exp_avg_sq = exp_avg_sq.data(),
                           .gradient = gradient.data(),
                           .count = count};
  const OptimizerConfig hyper{.learning_rate = 0.01, .weight_decay = 0};
  for (std::uint64_t step = 1; step <= 1000; ++step) {
    for (std::size_t i = 0; i < count; ++i) gradient[i] = float_to_bf16(bf16_to_float(weight[i]) - wanted[i]);
    if (!optimizer_update(tile, optimizer_scalars(hyper, step, 1.0), 0, count)) return 1;
  }
  for (std::size_t i = 0; i < count; ++i) {
    const float master = join_master({weight[i], residual[i]});
    std::printf("%g: weight %g, master %.9g\n", wanted[i], bf16_to_float(weight[i]), master);
    if (master - wanted[i] > 0.01f || wanted[i] - master > 0.01f) return 1;
  }
}
