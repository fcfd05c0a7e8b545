// The description that config.json makes, weights in and out, and a new model's weights.
#include "tools/models/gpt2/model.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <functional>
#include <set>

#include "spillway/export.h"
#include "spillway/safetensors.h"
#include "tests/temp_directory.h"
#include "tests/tools/models/fake_engine.h"
#include "tools/models/init_model.h"
#include "tools/models/weights.h"

namespace spillway::models {
namespace {

constexpr const char* kMinimal = R"({"model_type": "gpt2", "n_layer": 2, "n_embd": 12, "n_head": 3})";

std::string refusal(const std::string& text) {
  try {
    parse_model_config(text, "config.json");
  } catch (const Error& error) {
    EXPECT_EQ(error.parts().object, "config.json");
    EXPECT_FALSE(error.parts().hint.empty());
    return error.what();
  }
  return "accepted";
}

std::string with(const std::string& member) {
  std::string text = kMinimal;
  text.insert(text.size() - 1, ", " + member);
  return text;
}

TEST(ModelConfigTest, MissingKeysTakeGpt2sDefaults) {
  const auto config = parse_model_config(kMinimal, "config.json");
  EXPECT_EQ(config.layers, 2u);
  EXPECT_EQ(config.inner, 48u);
  EXPECT_EQ(config.positions, 1024u);
  EXPECT_EQ(config.vocabulary, 50257u);
  EXPECT_FLOAT_EQ(config.epsilon, 1e-5f);
  EXPECT_TRUE(config.has_dropout);
  EXPECT_EQ(config.text, kMinimal);
  const auto other = parse_model_config(
      with(R"("n_inner": 20, "n_ctx": 64, "vocab_size": 300, "layer_norm_epsilon": 1e-6, "resid_pdrop": 0,
              "embd_pdrop": 0.0, "attn_pdrop": 0)"),
      "config.json");
  EXPECT_EQ(other.inner, 20u);
  EXPECT_EQ(other.positions, 64u);
  EXPECT_EQ(other.vocabulary, 300u);
  EXPECT_FALSE(other.has_dropout);
}

TEST(ModelConfigTest, WhatIsNotComputedIsRefusedByName) {
  const std::pair<std::string, const char*> cases[] = {
      {R"({"model_type": "llama"})", "llama"},
      {R"({"n_layer": 2})", "model_type"},
      {R"({"model_type": "gpt2", "n_embd": 12, "n_head": 3})", "n_layer"},
      {R"({"model_type": "gpt2", "n_layer": 1, "n_embd": 12, "n_head": 5})", "not a multiple"},
      {R"({"model_type": "gpt2", "n_layer": 16777216, "n_embd": 12, "n_head": 3})", "n_layer\" is larger than 16384"},
      {R"({"model_type": "gpt2", "n_layer": 1, "n_embd": 4194308, "n_head": 4})", "n_embd\" is larger than 4194304"},
      {R"({"model_type": "gpt2\u0000", "n_layer": 1, "n_embd": 12, "n_head": 3})", "model_type"},
      {with(R"("activation_function": "relu")"), "relu"},
      {with(R"("tie_word_embeddings": false)"), "tie_word_embeddings"},
      {with(R"("scale_attn_by_inverse_layer_idx": true)"), "scale_attn_by_inverse_layer_idx"},
      {with(R"("n_ctx": 64, "summary_type": "mean", "n_experts": 2)"), "\"n_experts\" is not known"},
      {with(R"("layer_norm_epsilon": 0)"), "layer_norm_epsilon"},
      {with(R"("layer_norm_epsilon": 1e300)"), "layer_norm_epsilon"},
      {with(R"("layer_norm_epsilon": 1e-60)"), "layer_norm_epsilon"},
  };
  for (const auto& [text, word] : cases) {
    const auto message = refusal(text);
    EXPECT_NE(message.find(word), std::string::npos) << text.substr(0, 200) << "\n" << message;
  }
}

TEST(ModelDescriptionTest, EveryBlockIsVisitedForwardAndBackwardAndTheTiedOneFirstAndLast) {
  const auto model = describe_model(parse_model_config(kMinimal, "c"), 4096);
  ASSERT_EQ(model.blocks.size(), 3u);
  const std::vector<std::pair<std::uint32_t, Pass>> expected = {
      {0, Pass::kForward},  {1, Pass::kForward},  {2, Pass::kForward}, {0, Pass::kBackward},
      {2, Pass::kBackward}, {1, Pass::kBackward}, {0, Pass::kBackward}};
  ASSERT_EQ(model.visits.size(), expected.size());
  for (std::size_t i = 0; i < expected.size(); ++i) {
    EXPECT_EQ(model.visits[i].block, expected[i].first);
    EXPECT_EQ(model.visits[i].pass, expected[i].second);
  }
  std::set<std::string> names;
  for (const auto& block : model.blocks) {
    for (const auto& parameter : block.parameters) EXPECT_TRUE(names.insert(parameter.name).second) << parameter.name;
  }
  EXPECT_EQ(names.size(), 4u + 2 * 12);
  EXPECT_TRUE(names.contains("transformer.h.1.mlp.c_proj.weight"));
  EXPECT_EQ(model.attachments.at(0).name, "config.json");
}

class ModelFilesTest : public testing::Test {
 protected:
  void SetUp() override {
    config_.layers = 2;
    config_.width = 16;
    config_.heads = 2;
    config_.inner = 64;
    config_.positions = 32;
    config_.vocabulary = 200;
  }

  // A model directory whose tensors are named and shaped by `change`. The last one has the values of `last`, if there
  // are any; the others their place.
  std::filesystem::path write_model(const std::function<void(std::vector<TensorSpec>&)>& change,
                                    const std::vector<float>& last = {}) {
    std::vector<TensorSpec> tensors;
    for (const auto& block : describe_model(config_, 0).blocks) {
      for (const auto& parameter : block.parameters) tensors.push_back({parameter.name, parameter.shape});
    }
    change(tensors);
    const auto directory = folder_ / "written";
    auto writer = SafetensorsWriter::create(directory, tensors, {.replace = true});
    for (std::size_t t = 0; t < tensors.size(); ++t) {
      std::uint64_t count = 1;
      for (const auto extent : tensors[t].shape) count *= extent;
      const bool given = !last.empty() && t + 1 == tensors.size();
      writer.write(t, 0, given ? last : std::vector<float>(count, static_cast<float>(t)));
    }
    writer.finish();
    return directory;
  }
  std::string refusal(const std::filesystem::path& directory) {
    try {
      ModelWeights weights(directory, describe_model(config_, 0));
    } catch (const Error& error) {
      EXPECT_NE(error.parts().object.find("model.safetensors"), std::string::npos);
      EXPECT_FALSE(error.parts().hint.empty());
      return error.what();
    }
    return "accepted";
  }

  const TempDirectory own_;
  const std::filesystem::path folder_ = own_.path();
  ModelConfig config_;
};

TEST_F(ModelFilesTest, NewModelReadsBackAndDependsOnItsSeedOnly) {
  const auto count = init_model(folder_ / "one", config_, 1, DType::kFloat32);
  init_model(folder_ / "same", config_, 1, DType::kFloat32);
  init_model(folder_ / "other", config_, 2, DType::kFloat32);
  const auto read = [&](const char* name) {
    std::ifstream file(folder_ / name / "model.safetensors", std::ios::binary);
    return std::string(std::istreambuf_iterator<char>(file), {});
  };
  EXPECT_EQ(read("one"), read("same"));
  EXPECT_NE(read("one"), read("other"));
  const auto loaded = load_model_config(folder_ / "one");
  EXPECT_EQ(loaded.width, config_.width);
  EXPECT_EQ(loaded.inner, config_.inner);
  EXPECT_FALSE(loaded.has_dropout);
  std::uint64_t described = 0;
  for (const auto& block : describe_model(loaded, 0).blocks) {
    for (const auto& parameter : block.parameters) described += elements(parameter);
  }
  EXPECT_EQ(count, described);
  EXPECT_EQ(refusal(folder_ / "one"), "accepted");
  EXPECT_THROW(init_model(folder_ / "one", config_, 1, DType::kFloat32), Error);
}

TEST_F(ModelFilesTest, ANewModelReplacesNoFileOfAnother) {
  std::filesystem::create_directory(folder_ / "theirs");
  std::ofstream(folder_ / "theirs" / "config.json") << "of pytorch_model.bin";
  try {
    init_model(folder_ / "theirs", config_, 1, DType::kFloat32);
    ADD_FAILURE() << "nothing was refused";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Code::kExists);
    EXPECT_THAT(error.what(), testing::HasSubstr("theirs/config.json: is there; name another directory"));
  }
  std::ifstream file(folder_ / "theirs" / "config.json");
  EXPECT_EQ(std::string(std::istreambuf_iterator<char>(file), {}), "of pytorch_model.bin");
  std::filesystem::remove(folder_ / "theirs" / "config.json");
  EXPECT_TRUE(std::filesystem::is_empty(folder_ / "theirs"));
}

// Of more values than are drawn side by side. The digest (FNV-1a) is that of a file whose values were drawn one after
// the other, on x86-64.
TEST_F(ModelFilesTest, NewModelHasTheSameBytesOnAnyNumberOfThreads) {
  config_.layers = 1;
  config_.width = 64;
  config_.inner = 256;
  config_.vocabulary = 70000;
  EXPECT_EQ(init_model(folder_ / "new", config_, 7, DType::kBFloat16), 4'532'160u);
  std::ifstream file(folder_ / "new" / "model.safetensors", std::ios::binary);
  std::uint64_t digest = 0xcbf29ce484222325;
  std::for_each(std::istreambuf_iterator<char>(file), {},
                [&](char byte) { digest = (digest ^ static_cast<unsigned char>(byte)) * 0x100000001b3; });
  EXPECT_EQ(digest, 0xe427b59dc0544fb4);
}

TEST_F(ModelFilesTest, WeightsComeBackFromTheEngineAsTheyWere) {
  init_model(folder_ / "in", config_, 3, DType::kFloat32);
  config_ = load_model_config(folder_ / "in");
  const auto model = describe_model(config_, 4096);
  FakeEngine engine(model, DType::kFloat32, 1);
  ModelWeights weights(folder_ / "in", model);
  engine.import_weights(weights.source());
  export_model(engine, model, folder_ / "out", {.type = DType::kFloat32});
  for (const char* name : {"model.safetensors", "config.json"}) {
    std::ifstream in(folder_ / "in" / name, std::ios::binary), out(folder_ / "out" / name, std::ios::binary);
    EXPECT_EQ(std::string(std::istreambuf_iterator<char>(in), {}),
              std::string(std::istreambuf_iterator<char>(out), {}));
  }
}

TEST_F(ModelFilesTest, NamesWithoutPrefixAndOldBuffersAreRead) {
  const auto directory = write_model([](auto& tensors) {
    for (auto& tensor : tensors) tensor.name = tensor.name.substr(std::string("transformer.").size());
    tensors.push_back({"h.0.attn.bias", {1, 1, 32, 32}});
    tensors.push_back({"h.1.attn.masked_bias", {1}});
    tensors.push_back({"lm_head.weight", {200, 16}});
  });
  EXPECT_EQ(refusal(directory), "accepted");
}

TEST_F(ModelFilesTest, ATiedHeadIsTheTokenEmbedding) {
  const auto checked = [&](const std::vector<std::uint64_t>& shape, float value) -> std::string {
    std::vector<float> head(shape[0] * shape[1]);
    head[17] = value;  // the embedding, as the first tensor, is 0
    const auto add = [&](auto& tensors) { tensors.push_back({"lm_head.weight", shape}); };
    try {
      ModelWeights(write_model(add, head), describe_model(config_, 0)).check(DType::kFloat32);
    } catch (const Error& error) {
      return error.parts().happened;
    }
    return "accepted";
  };
  EXPECT_EQ(checked({200, 16}, 0), "accepted");
  EXPECT_EQ(
      checked({200, 16}, 1),
      "tensor lm_head.weight is not transformer.wte.weight, with which config.json ties it: they differ at index 17");
  EXPECT_EQ(checked({100, 16}, 0), "tensor lm_head.weight is no part of the model that config.json describes");
}

TEST_F(ModelFilesTest, MissingExtraAndMisshapenTensorsAreNamed) {
  auto message = refusal(write_model([](auto& tensors) { tensors.erase(tensors.begin() + 5); }));
  EXPECT_NE(message.find("tensor h.0.ln_1.bias is missing"), std::string::npos) << message;
  message = refusal(write_model([](auto& tensors) { tensors.push_back({"h.0.attn.extra", {3}}); }));
  EXPECT_NE(message.find("h.0.attn.extra is no part"), std::string::npos) << message;
  message = refusal(write_model([](auto& tensors) { std::swap(tensors[6].shape[0], tensors[6].shape[1]); }));
  EXPECT_NE(message.find("h.0.attn.c_attn.weight has shape [48, 16], config.json asks for [16, 48]"), std::string::npos)
      << message;
}

TEST(NormalTest, IsTheInverseOfTheDistributionFunction) {
  // A million draws against the moments and the share within one and two deviations; seeds are fixed, so is the result.
  double sum = 0, square = 0, within1 = 0, within2 = 0, beyond4 = 0;
  constexpr int kDraws = 1 << 20;
  for (std::uint64_t i = 0; i < kDraws; ++i) {
    const double z = normal_of(i);
    sum += z;
    square += z * z;
    within1 += std::abs(z) < 1;
    within2 += std::abs(z) < 2;
    beyond4 += std::abs(z) > 4;
  }
  EXPECT_NEAR(sum / kDraws, 0, 0.004);
  EXPECT_NEAR(square / kDraws, 1, 0.006);
  EXPECT_NEAR(within1 / kDraws, 0.6826895, 0.002);
  EXPECT_NEAR(within2 / kDraws, 0.9544997, 0.001);
  EXPECT_NEAR(beyond4 / kDraws, 6.334e-5, 4e-5);
}

}  // namespace
}  // namespace spillway::models
