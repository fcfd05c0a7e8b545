// The whole model on a resident engine: gradients against differences of the loss, accumulation, order of visits, bits.
#include "tools/models/trainer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <utility>

#include "tests/tools/models/resident_model.h"
#include "tools/models/config_json.h"
#include "tools/models/lora.h"

namespace spillway::models {
namespace {

// An engine may find more threads than whoever asks a moment earlier: limits change.
TEST(TrainerTest, OptionsAreOfAConfigurationWhoseThreadsAreSet) {
  Config config;
  config.threads = 3;
  EXPECT_EQ(trainer_options(config, DeviceKind::kHost, 8).threads, 3u);
  testing::GTEST_FLAG(death_test_style) = "threadsafe";
  config.threads = 0;
  EXPECT_DEATH(trainer_options(config, DeviceKind::kHost, 8), "as many threads as the operations are made for");
}

void expect_derivatives(Resident& run, const std::vector<std::uint32_t>& rows) {
  run.trainer.run_step(rows);
  std::vector<std::vector<std::vector<float>>> gradients(run.weights.size());
  for (std::uint32_t b = 0; b < run.weights.size(); ++b) {
    for (std::uint32_t p = 0; p < run.weights[b].size(); ++p) {
      const bool trained = run.description.blocks[b].parameters[p].trainable;
      gradients[b].push_back(trained ? run.engine.gradient(b, p) : std::vector<float>());
    }
  }
  // One step along the gradient itself and one along random signs: both slopes must be the inner product.
  std::mt19937 generator(5);
  for (std::uint32_t b = 0; b < run.weights.size(); ++b) {
    for (std::uint32_t p = 0; p < run.weights[b].size(); ++p) {
      const auto& g = gradients[b][p];
      if (!run.description.blocks[b].parameters[p].trainable) continue;
      double norm = 0;
      for (const float v : g) norm += static_cast<double>(v) * v;
      norm = std::sqrt(norm);
      ASSERT_GT(norm, 0) << run.description.blocks[b].parameters[p].name;
      for (const bool along : {true, false}) {
        std::vector<double> direction(g.size());
        for (std::size_t i = 0; i < g.size(); ++i) {
          direction[i] = along ? g[i] / norm : (generator() % 2 ? 1 : -1) / std::sqrt(static_cast<double>(g.size()));
        }
        const double step = 0.01;
        const auto loss_at = [&](double distance) {
          auto moved = run.weights[b][p];
          for (std::size_t i = 0; i < g.size(); ++i) moved[i] += static_cast<float>(distance * direction[i]);
          run.engine.set_weight(b, p, moved);
          return run.trainer.run_step(rows);
        };
        // Richardson's extrapolation of two central differences: error of order step^4.
        const double coarse = (loss_at(2 * step) - loss_at(-2 * step)) / (4 * step);
        const double fine = (loss_at(step) - loss_at(-step)) / (2 * step);
        const double slope = (4 * fine - coarse) / 3;
        double expected = 0;
        for (std::size_t i = 0; i < g.size(); ++i) expected += g[i] * direction[i];
        // The loss carries about 1e-7 relative noise, divided by the step.
        EXPECT_NEAR(slope, expected, 1e-4 + 3e-3 * std::abs(expected))
            << run.description.blocks[b].parameters[p].name << (along ? " along its gradient" : " along random signs");
      }
      run.engine.set_weight(b, p, run.weights[b][p]);
    }
  }
}

TEST(TrainerTest, GradientsAreDerivativesOfTheLoss) {
  const auto model = tiny_model();
  Resident run(model, {.type = DType::kFloat32, .micro_batch = 1, .accumulation = 2, .sequence = 70, .threads = 1});
  expect_derivatives(run, random_rows(model, 2, 70));
}

TEST(TrainerTest, GradientsOfDecodersAreDerivativesOfTheLoss) {
  for (const TrainedModel& model : tiny_decoders()) {
    SCOPED_TRACE(model.family);
    Resident run(model, {.type = DType::kFloat32, .micro_batch = 1, .accumulation = 2, .sequence = 20, .threads = 1});
    expect_derivatives(run, random_rows(model, 2, 20));
  }
}

// Of products before and after gelu, in columns of wider rows, in some layers alone, and not in the lowest ones.
std::vector<TrainedModel> tiny_models_with_adapters() {
  std::vector<TrainedModel> models = tiny_decoders();
  for (TrainedModel& model : models) add_adapters(model, {.rank = 5, .alpha = 2, .targets = {"all-linear"}});
  models.push_back(trained_gpt2(tiny_model()));
  add_adapters(models.back(), {.rank = 3, .alpha = 2, .targets = {"c_attn", "c_fc", "1.mlp.c_proj"}});
  models.push_back(tiny_decoder("qwen3", R"(, "tie_word_embeddings": true)"));
  add_adapters(models.back(), {.rank = 3, .alpha = 2, .targets = {"1.self_attn.v_proj"}});
  ModelConfig deep = tiny_model();
  deep.layers = 5;
  models.push_back(trained_gpt2(deep));
  add_adapters(models.back(), {.rank = 3, .alpha = 2, .targets = {"4.mlp.c_proj", "3.attn.c_attn"}});
  return models;
}

TEST(TrainerTest, GradientsOfAdaptersAreDerivativesOfTheLoss) {
  for (const TrainedModel& model : tiny_models_with_adapters()) {
    SCOPED_TRACE(model.family);
    Resident run(model, {.type = DType::kFloat32, .micro_batch = 1, .accumulation = 2, .sequence = 20, .threads = 1});
    const auto rows = random_rows(model, 2, 20);
    expect_derivatives(run, rows);
    run.engine.step({});
    run.trainer.run_step(rows);
    for (const auto& [of, values] : run.engine.pushed())
      EXPECT_EQ(std::get<0>(of), model.adapters->block) << "a gradient of what is frozen";
    EXPECT_EQ(run.engine.open_leases(), 0);
  }
}

TEST(TrainerTest, AdaptersAreVisitedAsDescribed) {
  for (const TrainedModel& model : tiny_models_with_adapters()) {
    Resident run(model, {.type = DType::kFloat32, .micro_batch = 1, .accumulation = 2, .sequence = 20, .threads = 1});
    run.trainer.run_step(random_rows(model, 2, 20));
    ASSERT_EQ(run.engine.visits().size(), run.description.visits.size());
    for (std::size_t v = 0; v < run.description.visits.size(); ++v) {
      EXPECT_EQ(run.engine.visits()[v].first, run.description.visits[v].block) << v;
      EXPECT_EQ(run.engine.visits()[v].second, run.description.visits[v].pass) << v;
    }
    EXPECT_LT(run.description.activation_uses.back().visit, run.description.visits.size());
  }
}

// B is zero in a new adapter: the model is its base, bit by bit.
TEST(TrainerTest, AnAdapterOfZerosChangesNoLoss) {
  for (const TrainedModel& model : tiny_decoders()) {
    SCOPED_TRACE(model.family);
    const TrainerOptions how{.type = DType::kBFloat16, .micro_batch = 2, .sequence = 20, .threads = 1};
    const auto rows = random_rows(model, 2, 20);
    Resident base(model, how);
    TrainedModel adapted = model;
    add_adapters(adapted, {.rank = 4, .targets = {"all-linear"}});
    Resident run(adapted, how);
    const std::uint32_t block = adapted.adapters->block;
    for (std::uint32_t p = 1; p < run.weights[block].size(); p += 2)
      run.engine.set_weight(block, p, std::vector<float>(run.weights[block][p].size()));
    EXPECT_EQ(base.trainer.run_step(rows), run.trainer.run_step(rows));
  }
}

TEST(TrainerTest, DecodersHaveTheSameBitsWithAnyThreadsAndInsides) {
  std::vector<TrainedModel> models = tiny_decoders();
  for (TrainedModel& model : tiny_models_with_adapters()) models.push_back(std::move(model));
  for (const TrainedModel& model : models) {
    SCOPED_TRACE(model.family);
    const auto rows = random_rows(model, 4, 20);
    const auto trained = [&](unsigned threads, bool keeps) {
      Resident run(model,
                   {.type = DType::kBFloat16, .micro_batch = 2, .accumulation = 2, .sequence = 20, .threads = threads},
                   keeps);
      const double loss = run.trainer.run_step(rows);
      std::vector<float> all = {static_cast<float>(loss)};
      for (std::uint32_t b = 0; b < run.weights.size(); ++b) {
        for (std::uint32_t p = 0; p < run.weights[b].size(); ++p) {
          if (!run.description.blocks[b].parameters[p].trainable) continue;
          const auto gradient = run.engine.gradient(b, p);
          all.insert(all.end(), gradient.begin(), gradient.end());
        }
      }
      return all;
    };
    const auto one = trained(1, false);
    EXPECT_EQ(one, trained(3, false));
    EXPECT_EQ(one, trained(2, true));
  }
}

TEST(TrainerTest, PartsOfAStepSumToItsGradients) {
  const auto model = tiny_model();
  const auto rows = random_rows(model, 4, 20);
  const auto run_of = [&](std::uint32_t parts) {
    auto run = std::make_unique<Resident>(model, TrainerOptions{.type = DType::kFloat32,
                                                                .micro_batch = 1,
                                                                .accumulation = 4,
                                                                .parts = parts,
                                                                .sequence = 20,
                                                                .threads = 1});
    run->trainer.run_step(rows);
    return run;
  };
  const auto whole = run_of(1);
  for (const std::uint32_t parts : {2u, 4u}) {
    const auto run = run_of(parts);
    for (std::uint32_t b = 0; b < run->weights.size(); ++b) {
      for (std::uint32_t p = 0; p < run->weights[b].size(); ++p) {
        const auto got = run->engine.gradient(b, p), wanted = whole->engine.gradient(b, p);
        ASSERT_EQ(got.size(), wanted.size());
        float largest = 0;
        for (const float v : wanted) largest = std::max(largest, std::abs(v));
        for (std::size_t i = 0; i < got.size(); ++i)
          ASSERT_NEAR(got[i], wanted[i], 1e-5f * largest) << run->description.blocks[b].parameters[p].name << ' ' << i;
      }
    }
  }
}

TEST(TrainerTest, VisitsFollowTheDescriptionAndPushesHappenAsDeclared) {
  const auto model = tiny_model();
  for (const auto& [accumulation, parts] : {std::pair(1u, 1u), {3u, 1u}, {4u, 2u}}) {
    Resident run(model, {.type = DType::kBFloat16,
                         .micro_batch = 1,
                         .accumulation = accumulation,
                         .parts = parts,
                         .sequence = 20,
                         .threads = 1});
    run.trainer.run_step(random_rows(model, accumulation, 20));
    ASSERT_EQ(run.engine.visits().size(), run.description.visits.size());
    for (std::size_t i = 0; i < run.description.visits.size(); ++i) {
      EXPECT_EQ(run.engine.visits()[i].first, run.description.visits[i].block) << i;
      EXPECT_EQ(run.engine.visits()[i].second, run.description.visits[i].pass) << i;
    }
    for (std::uint32_t b = 0; b < run.description.blocks.size(); ++b) {
      for (std::uint32_t p = 0; p < run.description.blocks[b].parameters.size(); ++p) {
        EXPECT_EQ(run.engine.pushes(b, p), run.description.blocks[b].parameters[p].pushes);
      }
    }
    EXPECT_EQ(run.engine.open_leases(), 0);
  }
}

TEST(TrainerTest, AccumulatedMicroBatchesGiveTheGradientOfOneLargeBatch) {
  const auto model = tiny_model();
  const auto rows = random_rows(model, 4, 33);
  Resident large(model, {.type = DType::kFloat32, .micro_batch = 4, .accumulation = 1, .sequence = 33, .threads = 1});
  Resident small(model, {.type = DType::kFloat32, .micro_batch = 1, .accumulation = 4, .sequence = 33, .threads = 1});
  EXPECT_NEAR(large.trainer.run_step(rows), small.trainer.run_step(rows), 1e-6);
  for (std::uint32_t b = 0; b < large.weights.size(); ++b) {
    for (std::uint32_t p = 0; p < large.weights[b].size(); ++p) {
      const auto one = large.engine.gradient(b, p), sum = small.engine.gradient(b, p);
      double norm = 0, difference = 0;
      for (std::size_t i = 0; i < one.size(); ++i) {
        norm += std::pow(one[i], 2);
        difference += std::pow(one[i] - sum[i], 2);
      }
      EXPECT_LT(std::sqrt(difference), 1e-5 * std::sqrt(norm)) << large.description.blocks[b].parameters[p].name;
    }
  }
}

class TrainerBitsTest : public testing::TestWithParam<DType> {};

TEST_P(TrainerBitsTest, ThreadsDoNotChangeABit) {
  const auto model = tiny_model();
  const auto rows = random_rows(model, 4, 70);
  std::vector<std::vector<float>> expected;
  double expected_loss = 0;
  for (const unsigned threads : {1u, 2u, 5u}) {
    Resident run(model, {.type = GetParam(), .micro_batch = 2, .accumulation = 2, .sequence = 70, .threads = threads});
    const double loss = run.trainer.run_step(rows);
    std::vector<std::vector<float>> gradients;
    for (std::uint32_t b = 0; b < run.weights.size(); ++b) {
      for (std::uint32_t p = 0; p < run.weights[b].size(); ++p) gradients.push_back(run.engine.gradient(b, p));
    }
    if (threads == 1) {
      expected = gradients;
      expected_loss = loss;
    }
    EXPECT_EQ(loss, expected_loss) << threads << " threads";
    for (std::size_t i = 0; i < gradients.size(); ++i) {
      EXPECT_EQ(std::memcmp(gradients[i].data(), expected[i].data(), gradients[i].size() * sizeof(float)), 0)
          << threads << " threads, parameter " << i;
    }
  }
}

TEST_P(TrainerBitsTest, InsidesThatAreKeptDoNotChangeABit) {
  const auto model = tiny_model();
  const auto rows = random_rows(model, 6, 70);
  const TrainerOptions options{.type = GetParam(), .micro_batch = 2, .accumulation = 3, .sequence = 70, .threads = 2};
  Resident computed(model, options), kept(model, options, true);
  for (int step = 0; step < 2; ++step) {
    const auto inside = kept.engine.insides(layer_block(0)).memory;
    std::memset(inside.data(), 0xff, inside.size());
    EXPECT_EQ(computed.trainer.run_step(rows), kept.trainer.run_step(rows));
    for (std::uint32_t b = 0; b < kept.weights.size(); ++b) {
      for (std::uint32_t p = 0; p < kept.weights[b].size(); ++p) {
        const auto one = computed.engine.gradient(b, p), other = kept.engine.gradient(b, p);
        EXPECT_EQ(std::memcmp(one.data(), other.data(), one.size() * sizeof(float)), 0) << "block " << b << ", " << p;
      }
    }
    const auto unwritten = static_cast<std::size_t>(std::ranges::count(inside, std::byte{0xff}));
    EXPECT_LT(unwritten, inside.size() / 10) << "what is to be kept is elsewhere";
    computed.engine.step({});
    kept.engine.step({});
  }
}

INSTANTIATE_TEST_SUITE_P(Types, TrainerBitsTest, testing::ValuesIn(kDTypes),
                         [](const auto& info) { return std::string(name_of(info.param)); });

TEST(TrainerTest, LossIn16BitsIsCloseToFp32) {
  const auto model = tiny_model();
  const auto rows = random_rows(model, 2, 70);
  const auto loss_in = [&](DType type) {
    Resident run(model, {.type = type, .micro_batch = 2, .accumulation = 1, .sequence = 70, .threads = 2});
    return run.trainer.run_step(rows);
  };
  const double loss = loss_in(DType::kFloat32);
  // 8 and 11 bits of significand through two layers.
  EXPECT_NEAR(loss_in(DType::kBFloat16), loss, 0.01 * loss);
  EXPECT_NEAR(loss_in(DType::kFloat16), loss, 0.002 * loss);
}

// A power of two in the loss is one in every gradient, and in nothing else.
TEST(TrainerTest, TheLossScaleMultipliesEveryGradientExactly) {
  const auto model = tiny_model();
  for (const std::uint32_t accumulation : {1u, 3u}) {
    const auto rows = random_rows(model, accumulation, 70);
    const TrainerOptions options{
        .type = DType::kFloat32, .micro_batch = 1, .accumulation = accumulation, .sequence = 70, .threads = 2};
    Resident plain(model, options), scaled(model, options);
    scaled.engine.scale = 4096;
    EXPECT_EQ(plain.trainer.run_step(rows), scaled.trainer.run_step(rows));
    for (std::uint32_t b = 0; b < plain.weights.size(); ++b) {
      for (std::uint32_t p = 0; p < plain.weights[b].size(); ++p) {
        auto expected = plain.engine.gradient(b, p);
        for (float& value : expected) value *= 4096;
        EXPECT_TRUE(expected == scaled.engine.gradient(b, p)) << plain.description.blocks[b].parameters[p].name;
      }
    }
  }
}

// Gradients that fp16 rounds to 0 are there with the scale, and close to those of fp32.
TEST(TrainerTest, TheLossScaleKeepsSmallGradientsInFp16) {
  const auto model = tiny_model();
  const auto rows = random_rows(model, 8, 70);
  const auto gradient_in = [&](DType type, double scale) {
    Resident run(model, {.type = type, .micro_batch = 8, .accumulation = 1, .sequence = 70, .threads = 2});
    run.engine.scale = scale;
    run.trainer.run_step(rows);
    auto values = run.engine.gradient(layer_block(0), kMlpWeight);
    for (float& value : values) value = static_cast<float>(value / scale);
    return values;
  };
  const auto error_of = [](const std::vector<float>& got, const std::vector<float>& wanted) {
    double difference = 0, norm = 0;
    for (std::size_t i = 0; i < got.size(); ++i) {
      difference += std::pow(got[i] - wanted[i], 2);
      norm += std::pow(wanted[i], 2);
    }
    return std::sqrt(difference / norm);
  };
  // Rounded at 2^-24, a loss scaled by 2^-12 is what a model with much smaller gradients has.
  const auto wanted = gradient_in(DType::kFloat32, 1);
  EXPECT_GT(error_of(gradient_in(DType::kFloat16, 0x1p-12), wanted), 0.2);
  EXPECT_LT(error_of(gradient_in(DType::kFloat16, 0x1p8), wanted), 0.01);
}

}  // namespace
}  // namespace spillway::models
