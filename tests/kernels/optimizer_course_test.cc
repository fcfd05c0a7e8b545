// Where the optimizers go over 1,000 steps: beside the same rules in double, and beside PyTorch and DeepSpeed.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <sstream>

#include "kernels/optimizer.h"
#include "tests/kernels/optimizer_tile.h"

namespace spillway {
namespace {

constexpr std::uint64_t kSteps = 1000;

// One parameter in double, written from the papers.
struct DoubleParameter {
  double w = 0, m = 0, v = 0;

  void step(const OptimizerConfig& c, std::uint64_t step, double g) {
    const auto n = static_cast<double>(step);
    const bool decoupled = c.kind == OptimizerKind::kLion || (c.kind == OptimizerKind::kAdam && c.decoupled_decay);
    if (decoupled) {
      w -= c.learning_rate * c.weight_decay * w;
    } else {
      g += c.weight_decay * w;
    }
    switch (c.kind) {
      case OptimizerKind::kAdam:
        m = c.beta1 * m + (1 - c.beta1) * g;
        v = c.beta2 * v + (1 - c.beta2) * g * g;
        w -= c.learning_rate * (m / (1 - std::pow(c.beta1, n))) /
             (std::sqrt(v / (1 - std::pow(c.beta2, n))) + c.epsilon);
        return;
      case OptimizerKind::kAdagrad:
        v += g * g;
        w -= c.learning_rate * g / (std::sqrt(v) + c.epsilon);
        return;
      case OptimizerKind::kLion: {
        const double blend = c.beta1 * m + (1 - c.beta1) * g;
        w -= c.learning_rate * (blend > 0 ? 1 : blend < 0 ? -1 : 0);
        m = c.beta2 * m + (1 - c.beta2) * g;
        return;
      }
      case OptimizerKind::kSgd: m = step == 1 ? g : c.momentum * m + (1 - c.dampening) * g;
    }
    w -= c.learning_rate * (c.nesterov ? g + c.momentum * m : m);
  }
};

// How far fp32 may be from double after 1,000 steps: 1,000 roundings of the weight, |w| * 1000 * 2^-24, and what the
// directions are off by.
//   Adam: steps of at most 3 lr, each off by 5e-5 of itself: beta2 in fp32 against its distance from 1, halved by the
//     root (2^-25 / 0.001 / 2 = 1.5e-5), and a few roundings.
//   Adagrad: the sum of squares is off by 1,000 roundings, the root by half as much (3e-5), of all it moved.
//   Lion: a blend next to zero may fall on the other side; two of them at most here.
//   SGD: a few roundings of every term, of all it moved.
double bound(const OptimizerConfig& config, double largest, double moved) {
  const double weights = largest * kSteps * 0x1p-24;
  switch (config.kind) {
    case OptimizerKind::kAdam: return weights + kSteps * 3 * config.learning_rate * 5e-5;
    case OptimizerKind::kAdagrad: return weights + moved * 5e-5;
    case OptimizerKind::kLion: return weights + 4 * config.learning_rate;
    case OptimizerKind::kSgd: break;
  }
  return weights + moved * 1e-5;
}

std::vector<OptimizerConfig> courses() {
  const OptimizerConfig sgd{.kind = OptimizerKind::kSgd, .learning_rate = 2e-3, .weight_decay = 0.05, .momentum = 0.9};
  std::vector<OptimizerConfig> all{
      {.learning_rate = 2e-3, .weight_decay = 0.05},
      {.learning_rate = 2e-3, .weight_decay = 0.05, .decoupled_decay = false},
      {.kind = OptimizerKind::kAdagrad, .learning_rate = 5e-2, .epsilon = 1e-10, .weight_decay = 0.05},
      {.kind = OptimizerKind::kLion, .learning_rate = 2e-3, .beta2 = 0.99, .weight_decay = 0.05},
      sgd,
      sgd,
      sgd};
  all[5].dampening = 0.5;
  all[6].nesterov = true;
  return all;
}

class Course : public ::testing::TestWithParam<std::tuple<std::size_t, DType>> {};

TEST_P(Course, FollowsTheSameRuleInDoubleFor1000Steps) {
  auto generator = seeded_generator();
  std::normal_distribution<double> normal;
  const std::size_t count = 256;
  const auto& [which, type] = GetParam();
  const OptimizerConfig config = courses()[which];
  OwnedTile tile(type, config.kind, count);
  std::vector<DoubleParameter> exact(count);
  std::vector<double> moved(count), largest(count);
  for (std::size_t i = 0; i < count; ++i) {
    tile.set_weight(i, static_cast<float>(normal(generator)));
    exact[i].w = tile.weight_at(i);
  }
  for (std::uint64_t step = 1; step <= kSteps; ++step) {
    for (std::size_t i = 0; i < count; ++i) {
      tile.set_gradient(i, static_cast<float>(normal(generator) + std::sin(static_cast<double>(i))));
      const double before = exact[i].w;
      exact[i].step(config, step, tile.gradient_at(i) * 0.25);
      moved[i] += std::abs(exact[i].w - before);
      largest[i] = std::max(largest[i], std::abs(exact[i].w));
    }
    ASSERT_TRUE(optimizer_update_reference(tile.view(), optimizer_scalars(config, step, 0.25), 0, count));
  }
  for (std::size_t i = 0; i < count; ++i) {
    const double allowed = bound(config, largest[i], moved[i]);
    EXPECT_NEAR(tile.weight_at(i), exact[i].w, allowed);
    EXPECT_GT(moved[i], 100 * allowed) << "the weights must have moved for the comparison to mean anything";
  }
}

INSTANTIATE_TEST_SUITE_P(, Course,
                         ::testing::Combine(::testing::Range<std::size_t>(0, courses().size()),
                                            ::testing::ValuesIn(kDTypes)),
                         [](const auto& info) {
                           return std::string(name_of(courses()[std::get<0>(info.param)].kind)) +
                                  std::to_string(std::get<0>(info.param)) + "_" +
                                  std::string(name_of(std::get<1>(info.param)));
                         });

// The gradient of element i at a step, exact in fp32 on both sides (bench/peers/optimizers.py has the same lines).
float course_gradient(std::uint32_t i, std::uint32_t step) {
  std::uint32_t x = (i + 1) * 2654435761u + step * 2246822519u;
  x ^= x >> 15, x *= 2654435761u, x ^= x >> 13;
  return (static_cast<float>(x >> 16) - 32768.0f + 2048.0f * static_cast<float>(i % 16)) * 0x1p-15f;
}

// optimizers.txt: `optimizer step weight…`, 32 weights that start as i / 16 - 1, written by bench/peers/optimizers.py.
TEST(Peers, FollowsPyTorchAndDeepSpeedFor1000Steps) {
  std::ifstream file(SPILLWAY_REFERENCES "/optimizers.txt");
  ASSERT_TRUE(file.is_open());
  const std::vector<std::pair<std::string, OptimizerConfig>> known = {
      {"torch.AdamW", courses()[0]},        {"torch.AdamW-fused", courses()[0]}, {"torch.Adam", courses()[1]},
      {"torch.Adagrad", courses()[2]},      {"torch.SGD", courses()[4]},         {"torch.SGD-dampening", courses()[5]},
      {"torch.SGD-nesterov", courses()[6]}, {"deepspeed.CPUAdam", courses()[0]}, {"deepspeed.CPUAdagrad", courses()[2]},
      {"deepspeed.CPULion", courses()[3]}};
  std::size_t compared = 0;
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with('#')) continue;
    std::istringstream words(line);
    std::string name;
    std::uint64_t last = 0;
    words >> name >> last;
    const auto found = std::ranges::find(known, name, &std::pair<std::string, OptimizerConfig>::first);
    ASSERT_NE(found, known.end()) << name;
    const std::size_t count = 32;
    OwnedTile tile(DType::kFloat32, found->second.kind, count);
    std::vector<double> moved(count), largest(count);
    for (std::size_t i = 0; i < count; ++i) tile.set_weight(i, static_cast<float>(i) / 16 - 1);
    for (std::uint32_t step = 1; step <= last; ++step) {
      const OwnedTile before = tile;
      for (std::uint32_t i = 0; i < count; ++i) tile.set_gradient(i, course_gradient(i, step));
      ASSERT_TRUE(optimizer_update(tile.view(), optimizer_scalars(found->second, step, 1), 0, count));
      for (std::size_t i = 0; i < count; ++i) {
        moved[i] += std::abs(tile.weight_at(i) - before.weight_at(i));
        largest[i] = std::max<double>(largest[i], std::abs(tile.weight_at(i)));
      }
    }
    for (std::size_t i = 0; i < count; ++i, ++compared) {
      double theirs = 0;
      ASSERT_TRUE(words >> theirs);
      // Both round, each in its own order.
      EXPECT_NEAR(tile.weight_at(i), theirs, 2 * bound(found->second, largest[i], moved[i])) << name << ' ' << last;
    }
  }
  EXPECT_EQ(compared, known.size() * 4 * 32);
}

}  // namespace
}  // namespace spillway
