// Micro-batches in slices beside whole ones: losses, gradients, memory, bits.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tests/error_of.h"
#include "tests/tools/models/resident_model.h"
#include "tools/models/config_json.h"
#include "tools/models/trainer.h"

namespace spillway::models {
namespace {

constexpr std::uint32_t kSequence = 300;

TrainedModel decoder(const char* family, const std::string& more, std::uint32_t sequence) {
  const std::string text = std::string(R"({"num_hidden_layers": 2, "hidden_size": 48, "intermediate_size": 80,
      "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 90,
      "max_position_embeddings": 512, "model_type": ")") +
                           family + "\"" + more + "}";
  return trained_model(ConfigJson(text, family), sequence);
}

// One tensor for queries, keys and values; norms of heads; windows, soft caps and norms after; learned positions.
std::vector<TrainedModel> models_of(std::uint32_t sequence) {
  ModelConfig gpt2 = tiny_model();
  gpt2.positions = 512;
  return {decoder("phi3", R"(, "tie_word_embeddings": false)", sequence),
          decoder("qwen3", R"(, "tie_word_embeddings": true)", sequence),
          decoder("gemma2", R"(, "sliding_window": 150, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 16,
              "final_logit_softcapping": 4.0, "hidden_activation": "gelu_pytorch_tanh")",
                  sequence),
          trained_gpt2(gpt2)};
}

struct Result {
  double loss = 0;
  std::vector<std::vector<float>> gradients;
};

Result step(const TrainedModel& model, const TrainerOptions& options, const StepRows& rows) {
  Resident run(model, options);
  std::optional<StepRows> held_out = rows;
  const double evaluated = run.trainer.evaluate([&] { return std::exchange(held_out, std::nullopt); });
  Result result{.loss = run.trainer.run_step(rows), .gradients = {}};
  EXPECT_EQ(evaluated, result.loss) << "rows that nothing is learned of";
  for (std::uint32_t b = 0; b < run.weights.size(); ++b) {
    for (std::uint32_t p = 0; p < run.weights[b].size(); ++p) {
      result.gradients.push_back(run.engine.gradient(b, p));
      EXPECT_EQ(run.engine.pushes(b, p), run.description.blocks[b].parameters[p].pushes);
    }
  }
  EXPECT_EQ(run.engine.open_leases(), 0);
  return result;
}

void expect_same(const Result& result, const Result& expected) {
  EXPECT_NEAR(result.loss, expected.loss, 1e-6 * expected.loss);
  ASSERT_EQ(result.gradients.size(), expected.gradients.size());
  for (std::size_t i = 0; i < result.gradients.size(); ++i) {
    double norm = 0, difference = 0;
    for (std::size_t j = 0; j < expected.gradients[i].size(); ++j) {
      norm += std::pow(expected.gradients[i][j], 2);
      difference += std::pow(result.gradients[i][j] - expected.gradients[i][j], 2);
    }
    EXPECT_LT(std::sqrt(difference), 2e-5 * std::sqrt(norm)) << "parameter " << i;
  }
}

struct Batch {
  std::vector<std::uint32_t> inputs, targets, starts;
  StepRows rows;
  // Documents of 70 tokens, whose last ones have no target.
  Batch(const TrainedModel& model, std::uint32_t count, std::uint32_t sequence, bool documents) {
    const auto tokens = random_rows(model, count, sequence);
    for (std::uint32_t r = 0; r < count; ++r) {
      for (std::uint32_t i = 0; i < sequence; ++i) {
        const std::size_t at = r * (sequence + 1) + i;
        const bool last = documents && (i % 70 == 69 || i + 1 == sequence);
        inputs.push_back(tokens[at]);
        targets.push_back(last ? kNoTarget : tokens[at + 1]);
        starts.push_back(i / 70 * 70);
        rows.target_count += !last;
      }
    }
    rows.inputs = inputs;
    rows.targets = targets;
    if (documents) rows.starts = starts;
  }
};

TEST(TrainerSlicesTest, RowsInPartsTrainAsWholeRows) {
  for (const TrainedModel& model : models_of(kSequence)) {
    for (const bool documents : {false, true}) {
      if (documents && model.position_weight) continue;
      SCOPED_TRACE(model.family + (documents ? ", documents" : ""));
      const Batch batch(model, 4, kSequence, documents);
      TrainerOptions options{
          .type = DType::kFloat32,
          .micro_batch = 2,
          .accumulation = 2,
          .sequence = kSequence,
          .threads = 2,
      };
      const Result whole = step(model, options, batch.rows);
      for (const std::uint32_t slice : {128u, 256u}) {
        SCOPED_TRACE(slice);
        options.slice = slice;
        expect_same(step(model, options, batch.rows), whole);
      }
    }
  }
}

TEST(TrainerSlicesTest, SlicesOfWholeRowsTrainAsMicroBatches) {
  for (const TrainedModel& model : models_of(50)) {
    SCOPED_TRACE(model.family);
    const Batch batch(model, 5, 50, false);
    TrainerOptions options{.type = DType::kFloat32, .micro_batch = 5, .accumulation = 1, .sequence = 50, .threads = 2};
    const Result whole = step(model, options, batch.rows);
    options.slice = 128;  // of two rows, two, and one
    expect_same(step(model, options, batch.rows), whole);
  }
}

TEST(TrainerSlicesTest, PartsOfAStepAreSummedApart) {
  const TrainedModel model = models_of(kSequence)[1];
  const Batch batch(model, 4, kSequence, false);
  TrainerOptions options{
      .type = DType::kFloat32, .micro_batch = 1, .accumulation = 4, .sequence = kSequence, .threads = 2};
  const Result whole = step(model, options, batch.rows);
  options.slice = 128;
  options.parts = 2;
  expect_same(step(model, options, batch.rows), whole);
}

TEST(TrainerSlicesTest, ThreadsDoNotChangeABit) {
  for (const TrainedModel& model : models_of(kSequence)) {
    SCOPED_TRACE(model.family);
    const Batch batch(model, 1, kSequence, false);
    const auto with = [&](unsigned threads) {
      return step(model,
                  {.type = DType::kBFloat16,
                   .micro_batch = 1,
                   .accumulation = 1,
                   .sequence = kSequence,
                   .threads = threads,
                   .slice = 128},
                  batch.rows);
    };
    const Result one = with(1), three = with(3);
    EXPECT_EQ(one.loss, three.loss);
    EXPECT_EQ(one.gradients, three.gradients);
  }
}

// Of a row that is twice as long only what belongs to the whole row grows: its tokens, their losses, keys and values.
TEST(TrainerSlicesTest, MemoryIsOfASlice) {
  const auto described = [](std::uint32_t sequence, std::uint32_t slice) {
    return Trainer(decoder("qwen3", "", sequence),
                   {.type = DType::kBFloat16, .micro_batch = 1, .sequence = sequence, .threads = 1, .slice = slice})
        .description();
  };
  const auto longest = [](const ModelDescription& model) {
    std::uint64_t bytes = 0;
    for (const auto& activation : model.activations) bytes = std::max(bytes, activation.bytes);
    return bytes;
  };
  const ModelDescription small = described(256, 128), large = described(512, 128), whole = described(512, 0);
  EXPECT_EQ(longest(small), longest(large));
  EXPECT_EQ(longest(large), 128u * 48 * 2);
  EXPECT_EQ(small.activations.size() * 2, large.activations.size());
  constexpr std::uint64_t kOfAToken = 3 * 4 /* input, position, loss */ + 4 /* target */ + 64 * 2 + 64 * 4 + 16 * 4;
  constexpr std::uint64_t kOfAttention = 1u << 20;  // the host's copies of a head
  EXPECT_LT(large.workspace_bytes - small.workspace_bytes, 256 * kOfAToken + kOfAttention);
  EXPECT_EQ(large.blocks[1].inside_bytes, 0u);
  EXPECT_GT(whole.blocks[1].inside_bytes, 0u);
}

TEST(TrainerSlicesTest, SmallSlicesAreRefused) {
  const TrainedModel model = decoder("qwen3", "", 20);
  const Error error = spillway::testing::error_of([&] { Trainer(model, {.sequence = 20, .slice = 127}); });
  EXPECT_EQ(error.code(), Code::kInvalidArgument);
  EXPECT_NE(std::string(error.what()).find("spillway.slice_tokens: is 127"), std::string::npos) << error.what();
}

}  // namespace
}  // namespace spillway::models
