// The families have as many parameters as published models have, and a description that the planner takes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "spillway/communicator.h"
#include "spillway/error.h"
#include "src/plan/plan.h"
#include "tools/models/config_json.h"
#include "tools/models/shape.h"
#include "tools/models/trainer.h"
#include "tools/plan/description.h"

namespace spillway::planning {
namespace {

using models::describe_parameters;
using models::parse_shape;
using models::shape_of_size;

using ::testing::StartsWith;

struct Published {
  const char* name;
  const char* config;  // of the sizes in the model's own config.json
  std::uint64_t parameters;
};

// Sizes from the models' config.json on the Hugging Face hub; counts as their model cards and PyTorch give them.
constexpr Published kPublished[] = {
    {"gpt2", R"({"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257})", 124439808},
    {"gpt2-medium", R"({"model_type": "gpt2", "n_layer": 24, "n_embd": 1024, "n_head": 16})", 354823168},
    {"gpt2-large", R"({"model_type": "gpt2", "n_layer": 36, "n_embd": 1280, "n_head": 20})", 774030080},
    {"gpt2-xl", R"({"model_type": "gpt2", "n_layer": 48, "n_embd": 1600, "n_head": 25})", 1557611200},
    {"Llama-2-7B", R"({"model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
                       "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 32000,
                       "tie_word_embeddings": false, "max_position_embeddings": 4096})",
     6738415616},
    {"Llama-3-8B", R"({"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
                       "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
                       "tie_word_embeddings": false})",
     8030261248},
    {"Llama-3.2-1B", R"({"model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
                         "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256,
                         "tie_word_embeddings": true})",
     1235814400},
    {"Mistral-7B-v0.1", R"({"model_type": "mistral", "hidden_size": 4096, "intermediate_size": 14336,
                            "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
                            "vocab_size": 32000, "sliding_window": 4096, "tie_word_embeddings": false})",
     7241732096},
    {"Qwen2.5-7B", R"({"model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
                       "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064,
                       "tie_word_embeddings": false})",
     7615616512},
    {"Qwen3-0.6B", R"({"model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
                       "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
                       "tie_word_embeddings": true, "attention_bias": false})",
     596049920},
    {"t5-small", R"({"model_type": "t5", "d_model": 512, "d_ff": 2048, "d_kv": 64, "num_heads": 8, "num_layers": 6,
                     "num_decoder_layers": 6, "vocab_size": 32128, "relative_attention_num_buckets": 32})",
     60506624},
    {"t5-v1_1-small", R"({"model_type": "t5", "d_model": 512, "d_ff": 1024, "d_kv": 64, "num_heads": 6,
                          "num_layers": 8, "num_decoder_layers": 8, "vocab_size": 32128,
                          "feed_forward_proj": "gated-gelu", "tie_word_embeddings": false})",
     76961152},
};

Config small_config() {
  Config config;
  config.weights = DType::kBFloat16;
  config.states = config.parameters = Placement::kHost;
  config.threads = 2;
  return config;
}

// In the loop that `spillway plan` takes for the family.
DescribedModel described_as_usual(const ModelShape& shape, const Config& config, std::uint32_t sequence) {
  return describe(shape, config, {.sequence = sequence, .loop = shape.gpt2 ? Loop::kFinetune : Loop::kPyTorch});
}

TEST(PlanShapes, HaveAsManyParametersAsThePublishedModels) {
  for (const Published& model : kPublished) {
    EXPECT_EQ(count_parameters(describe_parameters(parse_shape(model.config, model.name))), model.parameters)
        << model.name;
  }
}

TEST(PlanShapes, AreDescribedInAWayThatThePlannerTakes) {
  for (const Published& model : kPublished) {
    Config config = small_config();
    for (const std::uint32_t accumulation : {1u, 3u}) {
      config.gradient_accumulation = accumulation;
      const ModelShape shape = parse_shape(model.config, model.name);
      const DescribedModel described = described_as_usual(shape, config, 64);
      EXPECT_EQ(described.parameters, model.parameters) << model.name;
      EXPECT_EQ(described.tokens, 64 * accumulation);
      EXPECT_EQ(described.estimates.empty(), shape.family == "gpt2") << model.name;
      ASSERT_EQ(described.work.size(), described.model.visits.size()) << model.name;
      EXPECT_NO_THROW(make_plan(config, described.model)) << model.name;
    }
  }
}

// Forward of every matrix is two operations a weight and token; backward twice that (Kaplan et al. 2020, 2.1). A
// PyTorch loop's backward computes the head once more.
TEST(PlanShapes, CountTheWorkOfAStep) {
  const ModelShape shape = parse_shape(kPublished[4].config, "Llama-2-7B");
  Config config = small_config();
  const DescribedModel described = described_as_usual(shape, config, 2);
  double flops = 0;
  for (const VisitWork& work : described.work) flops += work.flops;
  const double head = 32000.0 * 4096;
  // The embedding is looked up, not multiplied with.
  const double weights = static_cast<double>(described.parameters) - head;
  EXPECT_NEAR(flops, (6 * weights + 2 * head) * 2, 0.001 * flops);
  config.gradient_accumulation = 5;
  double five = 0;
  for (const VisitWork& work : described_as_usual(shape, config, 2).work) five += work.flops;
  EXPECT_DOUBLE_EQ(five, 5 * flops);
}

TEST(PlanShapes, OfAPyTorchLoopEstimateWhatItKeepsByTheTypeOfItsWeights) {
  const ModelShape shape = parse_shape(R"({"model_type": "llama", "num_hidden_layers": 100, "hidden_size": 1024,
    "num_attention_heads": 8, "intermediate_size": 64, "vocab_size": 10})",
                                       "deep");
  const auto mib_beside = [&](DType type) {
    Config config = small_config();
    config.weights = type;
    const std::string estimate = described_as_usual(shape, config, 1024).estimates.at(0);
    return std::stoi(estimate.substr(estimate.rfind("about ") + 6));
  };
  EXPECT_NEAR(mib_beside(DType::kFloat32), 2 * mib_beside(DType::kBFloat16), 2);
  EXPECT_GT(mib_beside(DType::kBFloat16), 200) << "101 inputs of 2 MiB";
}

TEST(PlanShapes, OfWhatIsNotTrainedAreNotPlannedForFinetune) {
  const ModelShape shape = parse_shape(R"({"model_type": "t5"})", "t5");
  try {
    describe(shape, small_config(), {.sequence = 64, .loop = Loop::kFinetune});
    FAIL() << "planned";
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "--loop finetune: spillway finetune does not train t5; plan for --loop pytorch");
  }
}

void expect_same(const ModelDescription& planned, const ModelDescription& run) {
  EXPECT_EQ(planned.workspace_bytes, run.workspace_bytes);
  ASSERT_EQ(planned.blocks.size(), run.blocks.size());
  for (std::size_t b = 0; b < run.blocks.size(); ++b) {
    EXPECT_EQ(planned.blocks[b].inside_bytes, run.blocks[b].inside_bytes);
    ASSERT_EQ(planned.blocks[b].parameters.size(), run.blocks[b].parameters.size());
  }
  ASSERT_EQ(planned.visits.size(), run.visits.size());
  for (std::size_t v = 0; v < run.visits.size(); ++v) EXPECT_EQ(planned.visits[v].block, run.visits[v].block);
  ASSERT_EQ(planned.activation_uses.size(), run.activation_uses.size());
}

TEST(PlanShapes, OfEveryFamilyAreWhatTheTrainerAsksFor) {
  for (const char* tied : {"true", "false"}) {
    const std::string text = std::string(R"({"model_type": "qwen3", "num_hidden_layers": 3, "hidden_size": 64,
        "intermediate_size": 160, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 24, "vocab_size": 500,
        "max_position_embeddings": 128, "tie_word_embeddings": )") +
                             tied + "}";
    Config config = small_config();
    config.gradient_accumulation = 2;
    const DescribedModel planned =
        describe(parse_shape(text, "qwen3"), config, {.sequence = 48, .loop = Loop::kFinetune});
    const models::Trainer trainer(models::trained_model(models::ConfigJson(text, "qwen3"), 48),
                                  models::trainer_options(config, DeviceKind::kHost, 48));
    expect_same(planned.model, trainer.description());
    ASSERT_EQ(planned.work.size(), planned.model.visits.size());
  }
}

TEST(PlanShapes, OfGpt2AreWhatTheTrainerAsksFor) {
  const ModelShape shape = parse_shape(kPublished[0].config, "gpt2");
  Config config = small_config();
  config.micro_batch = 3;
  config.gradient_accumulation = 2;
  const ModelDescription planned = describe(shape, config, {.sequence = 48}).model;
  const models::Trainer trainer(*shape.gpt2, models::trainer_options(config, DeviceKind::kHost, 48));
  expect_same(planned, trainer.description());
}

class FirstOfFour final : public Communicator {
 public:
  std::uint32_t rank() const noexcept override { return 0; }
  std::uint32_t ranks() const noexcept override { return 4; }
  std::string describe() const override { return ""; }
  void throw_if_failed() const override {}

 protected:
  void start(const Collective&, Stream&) override { FAIL() << "nothing is trained here"; }
};

// Sums of several ranks come in fp32, and each has its part of those of the configuration.
TEST(PlanShapes, OfGpt2OnRanksAreWhatTheirTrainersAskFor) {
  const ModelShape shape = parse_shape(kPublished[0].config, "gpt2");
  for (const std::uint32_t groups : {1u, 4u}) {
    Config config = small_config();
    config.weights = DType::kBFloat16;
    config.sum_groups = groups;
    const ModelDescription planned = describe(shape, config, {.sequence = 48, .ranks = {4, 4}}).model;
    FirstOfFour communicator;
    const models::Trainer trainer(*shape.gpt2, models::trainer_options(config, DeviceKind::kHost, 48, &communicator));
    const ModelDescription run = trainer.description();
    EXPECT_EQ(planned.workspace_bytes, run.workspace_bytes);
    for (std::size_t b = 0; b < run.blocks.size(); ++b) {
      for (std::size_t p = 0; p < run.blocks[b].parameters.size(); ++p)
        EXPECT_EQ(planned.blocks[b].parameters[p].pushes, run.blocks[b].parameters[p].pushes);
    }
  }
}

// StepWriter's order is that of the trainer: what the visits compute lines up with them.
TEST(PlanShapes, OrderTheWorkAsTheVisitsAre) {
  for (const Published& model : kPublished) {
    const ModelShape shape = parse_shape(model.config, model.name);
    const DescribedModel described = described_as_usual(shape, small_config(), 64);
    for (std::size_t v = 0; v < described.work.size(); ++v) {
      const Work work = described.work[v].work;
      const Visit visit = described.model.visits[v];
      if (work == Work::kHead) {
        EXPECT_TRUE(visit.pass == Pass::kBackward || !shape.gpt2) << model.name << ", visit " << v;
        continue;
      }
      EXPECT_EQ(visit.pass == Pass::kBackward, work == Work::kBackward || work == Work::kEmbedBackward)
          << model.name << ", visit " << v;
      EXPECT_EQ(visit.block != 0, work == Work::kForward || work == Work::kBackward) << model.name << ", visit " << v;
    }
  }
}

TEST(PlanShapes, OfASizeHaveThatSize) {
  for (const double wanted : {1e6, 30e6, 124e6, 1.3e9, 7e9, 70e9, 175e9, 1e12, 1e13}) {
    const ModelShape shape = shape_of_size(wanted, 64);
    const auto count = static_cast<double>(count_parameters(describe_parameters(shape)));
    // The embedding alone of the smallest has 3 M; a layer more or less is a fifth of the next.
    if (wanted >= 100e6) {
      EXPECT_NEAR(count / wanted, 1, 0.02) << wanted;
    }
    EXPECT_EQ(shape.width % shape.heads, 0u);
  }
  EXPECT_EQ(shape_of_size(124e6, 64).layers, 12u);
  EXPECT_EQ(shape_of_size(124e6, 64).width, 768u);
  EXPECT_EQ(shape_of_size(1e6, 5000).positions, 5000u);
}

std::string refusal(const char* config) {
  try {
    parse_shape(config, "config.json");
  } catch (const Error& error) {
    EXPECT_EQ(error.parts().object, "config.json");
    return error.parts().happened + "; " + error.parts().hint;
  }
  return "accepted";
}

TEST(PlanShapes, RefuseWhatTheyDoNotKnow) {
  EXPECT_THAT(refusal(R"({"model_type": "mixtral"})"), StartsWith("\"model_type\" is \"mixtral\"; "));
  EXPECT_THAT(refusal("{}"), StartsWith("\"model_type\" is missing; "));
  EXPECT_THAT(refusal(R"({"model_type": "llama"})"), StartsWith("\"num_hidden_layers\" is missing; "));
  constexpr const char* kHeads = R"({"model_type": "llama", "num_hidden_layers": 1, "hidden_size": 64,
    "intermediate_size": 64, "vocab_size": 10, "num_attention_heads": 6, "num_key_value_heads": 4})";
  EXPECT_NE(refusal(kHeads).find("is not a multiple"), std::string::npos);
  constexpr const char* kWide = R"({"model_type": "t5", "num_heads": 1000000, "d_kv": 1000000})";
  EXPECT_EQ(refusal(kWide), "1000000 heads of width 1000000 are wider than 16777216; Spillway takes no larger model");
  EXPECT_NE(refusal(R"({"model_type": "gpt2", "n_layer": 1, "n_embd": 10, "n_head": 3})").find("multiple"),
            std::string::npos);
  EXPECT_NE(refusal(R"({"model_type": 3})").find("not a string"), std::string::npos);
}

}  // namespace
}  // namespace spillway::planning
