#include "src/engine/gradients.h"
#include "kernels/host_device.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>

#include "kernels/host_memory.h"
#include "kernels/workers.h"
#include "spillway/bf16.h"
#include "spillway/error.h"
#include "spillway/fp16.h"
#include "spillway/units.h"
#include "src/plan/step_policies.h"
#include "tests/kernels/random.h"

namespace spillway {
namespace {

// A collector and all it works on. Gradients are written into the workspace by the stream, as a caller's would be.
struct Collector {
  Collector(const ModelDescription& description, Placement placement, DType weights)
      : model(with_workspace(description)),
        type(weights),
        plan(make_plan(config_for(placement, weights), model)),
        workers(create_workers(2)),
        host(plan.ledger.total(Placement::kHost), kPinnedArena),
        device(create_host_device({.hbm_bytes = plan.ledger.hbm_budget}, *workers)) {
    device->register_host(host.memory());
    compute = device->create_stream("compute");
    d2h = device->create_stream("d2h");
    pushes = std::make_unique<GradientPushes>(plan, model, device->hbm());
    const GradientMovers movers{*device, *workers, host.memory(), *d2h};
    collector = std::make_unique<GradientCollector>(plan, step_policies(plan).gradients, *pushes, movers);
    collector->begin_step();
  }
  ~Collector() {
    compute->synchronize();
    d2h->synchronize();
    collector.reset();
    compute.reset();
    d2h.reset();
    device->unregister_host(host.memory());
  }

  static constexpr std::uint64_t kMost = 8192;  // elements of a parameter
  static ModelDescription with_workspace(ModelDescription model) {
    model.workspace_bytes = kMost * 4;
    return model;
  }
  static Config config_for(Placement placement, DType weights) {
    Config config;
    config.weights = weights;
    config.parameters = config.states = placement;
    config.tile_elements = 2048;
    if (placement == Placement::kNvme) config.nvme_paths = {"/drive"};
    return config;
  }

  std::uint64_t count(std::uint32_t b, std::uint32_t p) const { return plan.blocks[b].partition.parameters[p].count; }

  void push(std::uint32_t b, std::uint32_t p, std::span<const float> values, DType dtype = DType::kFloat32) {
    std::byte* data = device->hbm().data() + plan.hbm.workspace.offset;
    const float* from = values.data();
    const std::size_t n = values.size();
    compute->launch([=](HostWorkers&) {
      for (std::size_t i = 0; i < n; ++i) {
        if (dtype == DType::kFloat32) std::memcpy(data + i * 4, from + i, 4);
        const std::uint16_t bits = dtype == DType::kFloat16 ? float_to_fp16(from[i]) : float_to_bf16(from[i]);
        if (dtype != DType::kFloat32) std::memcpy(data + i * 2, &bits, 2);
      }
    });
    compute->synchronize();  // `values` may go with the exception of a refused push
    collector->push({.block = b, .parameter = p, .data = data, .dtype = dtype}, *compute);
    compute->launch([=](HostWorkers&) { std::memset(data, 0x5a, kMost * 4); });  // the caller may overwrite it now
    compute->synchronize();
  }

  void push_nothing(std::uint32_t b, std::uint32_t p) {
    collector->push({.block = b, .parameter = p, .data = nullptr}, *compute);
  }

  std::vector<std::byte> landed(std::uint32_t b) const {
    const std::byte* from = collector->gradient(b);
    return {from, from + plan.blocks[b].partition.trainable_elements * size_of(type)};
  }

  ModelDescription model;
  DType type;
  Plan plan;
  std::unique_ptr<HostWorkers> workers;
  HostArena host;
  std::unique_ptr<Device> device;
  std::unique_ptr<Stream> compute, d2h;
  std::unique_ptr<GradientPushes> pushes;
  std::unique_ptr<GradientCollector> collector;
};

// What the collector must hold: fp32 sums in call order, rounded once, zeros in the padding.
class Expected {
 public:
  explicit Expected(const Collector& collector) : collector_(collector) {
    for (const BlockPlan& block : collector.plan.blocks) {
      sums_.emplace_back(block.partition.trainable_elements, 0.0f);
      pushed_.emplace_back(block.partition.parameters.size(), false);
    }
  }
  void push(std::uint32_t b, std::uint32_t p, std::span<const float> values, DType dtype = DType::kFloat32) {
    const std::uint64_t first = collector_.plan.blocks[b].partition.parameters[p].first;
    for (std::size_t i = 0; i < values.size(); ++i) {
      const float value = dtype == DType::kBFloat16  ? bf16_to_float(float_to_bf16(values[i]))
                          : dtype == DType::kFloat16 ? fp16_to_float(float_to_fp16(values[i]))
                                                     : values[i];
      sums_[b][first + i] = pushed_[b][p] ? sums_[b][first + i] + value : value;
    }
    pushed_[b][p] = true;
  }
  std::vector<std::byte> bytes(std::uint32_t b) const {
    std::vector<std::byte> out(sums_[b].size() * size_of(collector_.type));
    for (std::size_t i = 0; i < sums_[b].size(); ++i) {
      const float sum = sums_[b][i];
      const std::uint16_t bits = collector_.type == DType::kFloat16 ? float_to_fp16(sum) : float_to_bf16(sum);
      if (collector_.type == DType::kFloat32) std::memcpy(out.data() + i * 4, &sum, 4);
      if (collector_.type != DType::kFloat32) std::memcpy(out.data() + i * 2, &bits, 2);
    }
    return out;
  }
  double squared_norm_sum() const {
    double sum = 0;
    for (std::uint32_t b = 0; b < sums_.size(); ++b) {
      std::vector<double> leaves(div_up<std::size_t>(sums_[b].size(), kNormLeaf));
      const auto rounded = bytes(b);
      sum += squared_norm(rounded.data(), collector_.type, sums_[b].size(), leaves, *collector_.workers).sum_of_squares;
    }
    return sum;
  }
  void compare() const {
    collector_.pushes->check_complete();
    collector_.collector->wait_landed();
    EXPECT_EQ(collector_.collector->first_nonfinite(), std::nullopt);
    for (std::uint32_t b = 0; b < sums_.size(); ++b) EXPECT_EQ(collector_.landed(b), bytes(b)) << "block " << b;
    EXPECT_EQ(collector_.collector->squared_norm_sum(), squared_norm_sum());
  }

 private:
  const Collector& collector_;
  std::vector<std::vector<float>> sums_;
  std::vector<std::vector<bool>> pushed_;
};

// Blocks of parameters of uneven sizes; one of each is frozen.
ModelDescription uneven_model(std::uint32_t blocks, std::uint32_t pushes = 1) {
  ModelDescription model;
  const std::uint64_t sizes[] = {1, 1000, 1025, 3000, 1024};
  for (std::uint32_t b = 0; b < blocks; ++b) {
    Block block{"h." + std::to_string(b), {}};
    for (std::uint32_t p = 0; p < 4; ++p) {
      block.parameters.push_back({.name = block.name + "." + std::to_string(p), .shape = {sizes[(b + p) % 5]}});
      block.parameters.back().trainable = p != b % 4;
      block.parameters.back().pushes = pushes;
    }
    model.blocks.push_back(block);
  }
  return model;
}

std::vector<float> noise(std::mt19937_64& random, std::uint64_t count) {
  std::vector<float> values(count);
  std::uniform_real_distribution<float> spread(-1, 1);
  for (float& value : values) value = spread(random) * (random() % 7 == 0 ? 1000.0f : 1.0f);
  return values;
}

struct Push {
  std::uint32_t block = 0, parameter = 0;
};

std::vector<Push> all_pushes(const Collector& c) {
  std::vector<Push> pushes;
  for (std::uint32_t b = 0; b < c.model.blocks.size(); ++b) {
    for (std::uint32_t p = 0; p < c.model.blocks[b].parameters.size(); ++p) {
      const Parameter& parameter = c.model.blocks[b].parameters[p];
      const std::uint32_t times = parameter.pushes == kAnyPushes ? 1 : parameter.pushes;
      for (std::uint32_t i = 0; parameter.trainable && i < times; ++i) pushes.push_back({b, p});
    }
  }
  return pushes;
}

class Gradients : public ::testing::TestWithParam<std::pair<Placement, DType>> {
 protected:
  Collector collector(const ModelDescription& model) const { return {model, GetParam().first, GetParam().second}; }
};

// In a random order of all pushes more blocks are open at once than there is staging, so that parts go down on their
// own; in the order of blocks none does. The bits are the same.
TEST_P(Gradients, PushesInAnyOrderGiveTheSameBitsAndNorm) {
  std::mt19937_64 random = seeded_generator();
  Collector c = collector(uneven_model(6));
  std::vector<Push> order = all_pushes(c);
  for (int round = 0; round < 8; ++round) {
    if (round > 0) std::ranges::shuffle(order, random);
    if (round == 1) std::ranges::stable_sort(order, {}, &Push::block);  // any order inside a block
    c.collector->begin_step();
    Expected expected(c);
    for (const Push& push : order) {
      const auto values = noise(random, c.count(push.block, push.parameter));
      c.push(push.block, push.parameter, values);
      expected.push(push.block, push.parameter, values);
    }
    expected.compare();
  }
}

TEST_P(Gradients, MicroBatchesAreAddedInCallOrderAndRoundedOnce) {
  std::mt19937_64 random = seeded_generator();
  Collector c = collector(uneven_model(4, 3));
  std::vector<Push> order = all_pushes(c);
  for (int round = 0; round < 4; ++round) {
    std::ranges::shuffle(order, random);
    c.collector->begin_step();
    Expected expected(c);
    for (std::size_t i = 0; i < order.size(); ++i) {
      const auto values = noise(random, c.count(order[i].block, order[i].parameter));
      const DType dtype = i % 3 == 0 ? c.type : DType::kFloat32;  // either type may come
      c.push(order[i].block, order[i].parameter, values, dtype);
      expected.push(order[i].block, order[i].parameter, values, dtype);
    }
    expected.compare();
  }
}

TEST_P(Gradients, AsManyAsComeAreAddedUntilOneSaysThatNoMoreDo) {
  std::mt19937_64 random = seeded_generator();
  ModelDescription model = uneven_model(3, kAnyPushes);
  model.visits = {{0, Pass::kBackward}, {1, Pass::kBackward}, {2, Pass::kBackward}};  // once each, which says nothing
  Collector c = collector(model);
  std::vector<Push> every = all_pushes(c);
  for (int round = 0; round < 4; ++round) {
    c.collector->begin_step();
    Expected expected(c);
    for (int i = 0; i < 40; ++i) {
      const Push push = every[random() % every.size()];
      const auto values = noise(random, c.count(push.block, push.parameter));
      c.push(push.block, push.parameter, values);
      expected.push(push.block, push.parameter, values);
    }
    EXPECT_THROW(c.pushes->check_complete(), Error);
    for (const Push& push : every) c.push_nothing(push.block, push.parameter);
    expected.compare();
    EXPECT_THROW(c.push_nothing(every[0].block, every[0].parameter), Error);
  }
}

// Where no push brings a gradient there are zeros, whatever lay there in the step before; else what was brought is
// added. The norm is that of the same with zeros.
TEST_P(Gradients, APushThatBringsNothingAddsNothing) {
  std::mt19937_64 random = seeded_generator();
  for (const std::uint32_t pushes : {1u, 3u}) {
    Collector c = collector(uneven_model(6, pushes));
    std::vector<Push> order = all_pushes(c);
    for (int round = 0; round < 8; ++round) {
      std::ranges::shuffle(order, random);
      if (round % 2 == 1) std::ranges::stable_sort(order, {}, &Push::block);
      c.collector->begin_step();
      Expected expected(c);
      std::vector<std::vector<std::uint8_t>> brought(6, std::vector<std::uint8_t>(4));
      for (const Push& push : order) {
        if (random() % 2 == 0) {
          c.push_nothing(push.block, push.parameter);
          continue;
        }
        const auto values = noise(random, c.count(push.block, push.parameter));
        c.push(push.block, push.parameter, values);
        expected.push(push.block, push.parameter, values);
        brought[push.block][push.parameter] = 1;
      }
      expected.compare();
      for (std::uint32_t b = 0; b < 6; ++b) {
        EXPECT_TRUE(std::ranges::equal(c.pushes->brought(b), brought[b])) << "block " << b;
      }
    }
  }
}

// It may come while another block has the shared accumulator, of which it wants nothing.
TEST_P(Gradients, APushThatBringsNothingWaitsForNoAccumulator) {
  std::mt19937_64 random = seeded_generator();
  ModelDescription model = uneven_model(2, 2);
  model.visits = {{1, Pass::kBackward}, {0, Pass::kBackward}};
  Collector c = collector(model);
  ASSERT_TRUE(c.plan.blocks[0].accumulator_shared && c.plan.blocks[1].accumulator_shared);
  Expected expected(c);
  std::vector<Push> order = all_pushes(c);
  for (const Push& push : order) {
    if (push.block == 0 && push.parameter == 1) c.push_nothing(0, 1);
  }
  for (const Push& push : order) {
    if (push.block == 0) continue;
    const auto values = noise(random, c.count(push.block, push.parameter));
    c.push(push.block, push.parameter, values);
    expected.push(push.block, push.parameter, values);
    if (&push == &order[order.size() / 2]) {
      for (const Push& other : order) {
        if (other.block == 0 && other.parameter > 1) c.push_nothing(0, other.parameter);
      }
    }
  }
  expected.compare();
}

TEST_P(Gradients, APushThatIsMissingIsNoneThatBringsNothing) {
  Collector c = collector(uneven_model(1, 2));
  std::uint32_t count = 0;
  for (const Push& push : all_pushes(c)) {
    EXPECT_THROW(c.pushes->check_complete(), Error);
    const Gradient nothing{.block = push.block, .parameter = push.parameter, .data = nullptr};
    EXPECT_EQ(c.pushes->leaves_out(nothing), ++count % 2 == 0) << "with the second of two";
    c.push_nothing(push.block, push.parameter);
  }
  c.pushes->check_complete();
  EXPECT_THROW(c.push_nothing(0, 1), Error) << "more than described";
  EXPECT_THROW(c.push_nothing(0, 0), Error) << "frozen";
}

TEST_P(Gradients, ARefusedPushCountsForNothing) {
  std::mt19937_64 random = seeded_generator();
  Collector c = collector(uneven_model(2, 2));
  Expected expected(c);
  const auto refused = [&](std::uint32_t b, std::uint32_t p, DType dtype) {
    try {
      const Gradient gradient{.block = b, .parameter = p, .data = c.device->hbm().data(), .dtype = dtype};
      c.collector->push(gradient, *c.compute);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), Code::kInvalidArgument);
      return std::string(error.what());
    }
    return std::string("was taken");
  };
  const DType other = c.type == DType::kBFloat16 ? DType::kFloat16 : DType::kBFloat16;
  const auto try_everything = [&] {
    EXPECT_NE(refused(2, 0, DType::kFloat32).find("does not exist"), std::string::npos);
    EXPECT_NE(refused(0, 4, DType::kFloat32).find("does not exist"), std::string::npos);
    EXPECT_NE(refused(0, 0, DType::kFloat32).find("h.0.0: is frozen"), std::string::npos);
    EXPECT_NE(refused(0, 1, other).find("h.0.1: a gradient is fp32 or"), std::string::npos);
  };
  for (const Push& push : all_pushes(c)) {
    try_everything();
    try {
      c.pushes->check_complete();
      ADD_FAILURE() << "a gradient is missing";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), Code::kInvalidArgument);
      EXPECT_NE(std::string(error.what()).find("of 2 gradients"), std::string::npos) << error.what();
    }
    const auto values = noise(random, c.count(push.block, push.parameter));
    c.push(push.block, push.parameter, values);
    expected.push(push.block, push.parameter, values);
  }
  try_everything();
  EXPECT_NE(refused(1, 0, DType::kFloat32).find("h.1.0: got more gradients than described"), std::string::npos);
  expected.compare();
}

// The accumulator that blocks share holds one block at a time. Who comes too early is refused, and may come again.
TEST_P(Gradients, ABlockThatMustWaitForTheSharedAccumulatorComesAgain) {
  std::mt19937_64 random = seeded_generator();
  ModelDescription model = uneven_model(2, 2);
  model.visits = {{1, Pass::kBackward}, {0, Pass::kBackward}};
  Collector c = collector(model);
  ASSERT_TRUE(c.plan.blocks[0].accumulator_shared && c.plan.blocks[1].accumulator_shared);
  Expected expected(c);
  std::vector<Push> order = all_pushes(c);
  std::ranges::stable_sort(order, std::greater(), &Push::block);
  for (const Push& push : order) {
    const auto values = noise(random, c.count(push.block, push.parameter));
    c.push(push.block, push.parameter, values);
    expected.push(push.block, push.parameter, values);
    const bool under_way = push.block == 1 && &push != &order[order.size() / 2 - 1];
    if (!under_way) continue;
    EXPECT_THROW(c.push(0, 1, noise(random, c.count(0, 1))), Error);
  }
  expected.compare();
}

TEST_P(Gradients, AStepBegunAgainForgetsWhatCameOfTheLast) {
  std::mt19937_64 random = seeded_generator();
  Collector c = collector(uneven_model(5));
  const std::vector<Push> order = all_pushes(c);
  for (std::uint32_t b = 0; b < 5; ++b) c.push(b, b % 4 == 0 ? 1 : 0, noise(random, c.count(b, b % 4 == 0 ? 1 : 0)));
  c.collector->begin_step();
  Expected expected(c);
  for (const Push& push : order) {
    const auto values = noise(random, c.count(push.block, push.parameter));
    c.push(push.block, push.parameter, values);
    expected.push(push.block, push.parameter, values);
  }
  expected.compare();
}

// Whether its block goes down whole or in parts (normed by the CPU then).
TEST_P(Gradients, WhatIsNotFiniteIsNamed) {
  std::mt19937_64 random = seeded_generator();
  const float inf = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
  Collector c = collector(uneven_model(5));
  std::vector<Push> order = all_pushes(c);
  for (int round = 0; round < 12; ++round) {
    if (round % 2 == 1) std::ranges::shuffle(order, random);
    const Push bad = order[random() % order.size()];
    c.collector->begin_step();
    for (const Push& push : order) {
      auto values = noise(random, c.count(push.block, push.parameter));
      if (push.block == bad.block && push.parameter == bad.parameter) {
        values[random() % values.size()] = round % 3 == 0 ? nan : round % 3 == 1 ? inf : -inf;
      }
      c.push(push.block, push.parameter, values);
    }
    c.collector->wait_landed();
    const Block& block = c.model.blocks[bad.block];
    EXPECT_EQ(c.collector->first_nonfinite(), block.parameters[bad.parameter].name + " of block " + block.name);
  }
}

TEST_P(Gradients, ASumThatOverflowsIsNotFinite) {
  std::mt19937_64 random = seeded_generator();
  Collector c = collector(uneven_model(1, 2));
  for (const Push& push : all_pushes(c)) {
    auto values = noise(random, c.count(push.block, push.parameter));
    if (push.parameter == 2) values[0] = 3e38f;  // finite, and twice it is not
    c.push(push.block, push.parameter, values);
  }
  c.collector->wait_landed();
  EXPECT_EQ(c.collector->first_nonfinite(), "h.0.2 of block h.0");
}

TEST(GradientsIn16Bits, AFiniteGradientThatRoundsToInfinityIsNotFinite) {
  const auto nonfinite = [](DType type, float value) {
    Collector c({uneven_model(1)}, Placement::kNvme, type);
    for (const Push& push : all_pushes(c)) {
      std::vector<float> values(c.count(push.block, push.parameter), 1.0f);
      if (push.parameter == 3) values.back() = value;
      c.push(push.block, push.parameter, values);
    }
    c.collector->wait_landed();
    return c.collector->first_nonfinite();
  };
  EXPECT_EQ(nonfinite(DType::kBFloat16, std::numeric_limits<float>::max()), "h.0.3 of block h.0");
  EXPECT_EQ(nonfinite(DType::kFloat16, 65520), "h.0.3 of block h.0");
  EXPECT_EQ(nonfinite(DType::kFloat16, -65520), "h.0.3 of block h.0");
  EXPECT_EQ(nonfinite(DType::kFloat16, 65519), std::nullopt);
}

TEST_P(Gradients, AModelThatTrainsNothingIsComplete) {
  ModelDescription model = uneven_model(2);
  for (Block& block : model.blocks) {
    for (Parameter& parameter : block.parameters) parameter.trainable = false;
  }
  Collector c = collector(model);
  Expected(c).compare();
  EXPECT_EQ(c.collector->squared_norm_sum(), 0);
}

INSTANTIATE_TEST_SUITE_P(, Gradients,
                         ::testing::Values(std::pair{Placement::kNvme, DType::kBFloat16},
                                           std::pair{Placement::kNvme, DType::kFloat32},
                                           std::pair{Placement::kNvme, DType::kFloat16},
                                           std::pair{Placement::kHbm, DType::kBFloat16},
                                           std::pair{Placement::kHbm, DType::kFloat32}),
                         [](const auto& info) {
                           return std::string(info.param.first == Placement::kHbm ? "hbm_" : "nvme_") +
                                  std::string(name_of(info.param.second));
                         });

}  // namespace
}  // namespace spillway
