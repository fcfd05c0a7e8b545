// Adapters: which products have one, by peft's rules and names, and what is refused.
#include "tools/models/lora.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <string>
#include <vector>

#include "spillway/error.h"
#include "tests/temp_directory.h"
#include "tools/models/adapter_weights.h"
#include "tools/models/config_json.h"
#include "tools/models/gpt2/model.h"
#include "tools/models/trainer.h"

namespace spillway::models {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

TrainedModel decoder(const std::string& family, std::uint32_t layers = 2) {
  return trained_model(ConfigJson(R"({"num_hidden_layers": )" + std::to_string(layers) +
                                      R"(, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4,
      "num_key_value_heads": 2, "vocab_size": 30, "max_position_embeddings": 32, "model_type": ")" +
                                      family + "\"}",
                                  family),
                       8);
}

TrainedModel gpt2() {
  ModelConfig config;
  config.layers = 2;
  config.width = 16;
  config.heads = 2;
  config.inner = 40;
  config.positions = 8;
  config.vocabulary = 30;
  return trained_gpt2(config);
}

TrainedModel adapted(TrainedModel model, std::vector<std::string> targets) {
  add_adapters(model, {.rank = 3, .alpha = 6, .targets = std::move(targets)});
  return model;
}

const Block& adapters(const TrainedModel& model) { return model.description.blocks[model.adapters->block]; }

// Without what all of them have.
std::vector<std::string> modules(const TrainedModel& model) {
  std::vector<std::string> names;
  for (const Parameter& parameter : adapters(model).parameters) {
    const std::string end = ".lora_A.weight";
    if (!parameter.name.ends_with(end)) continue;
    names.push_back(parameter.name.substr(17, parameter.name.size() - 17 - end.size()));
  }
  return names;
}

std::string refusal(const auto& body) {
  try {
    body();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Code::kInvalidArgument);
    return error.what();
  }
  return "nothing was refused";
}

TEST(Lora, TargetsAreModulesByTheirNamesOrTheEndsOfThese) {
  EXPECT_THAT(modules(adapted(decoder("llama"), {"q_proj", "layers.1.mlp.down_proj"})),
              ElementsAre("model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj",
                          "model.layers.1.mlp.down_proj"));
  EXPECT_THAT(modules(adapted(decoder("llama"), {"model.layers.0.self_attn.o_proj"})),
              ElementsAre("model.layers.0.self_attn.o_proj"));
  EXPECT_THAT(modules(adapted(gpt2(), {"c_proj"})),
              ElementsAre("transformer.h.0.attn.c_proj", "transformer.h.0.mlp.c_proj", "transformer.h.1.attn.c_proj",
                          "transformer.h.1.mlp.c_proj"));
  EXPECT_THAT(modules(adapted(gpt2(), {"h.1.attn.c_attn"})), ElementsAre("transformer.h.1.attn.c_attn"));
  // A layer's number is not the end of another's.
  EXPECT_THAT(modules(adapted(decoder("llama", 12), {"1.self_attn.v_proj"})),
              ElementsAre("model.layers.1.self_attn.v_proj"));
}

TEST(Lora, AllLinearIsEveryProductOfTheLayers) {
  EXPECT_EQ(modules(adapted(decoder("llama"), {"all-linear"})).size(), 2 * 7u);
  EXPECT_EQ(modules(adapted(decoder("phi3"), {"all-linear"})).size(), 2 * 4u);  // fused, as peft sees them
  EXPECT_EQ(modules(adapted(gpt2(), {"all-linear"})).size(), 2 * 4u);
  EXPECT_EQ(modules(adapted(gpt2(), {"all-linear", "c_fc"})).size(), 2 * 4u);
}

TEST(Lora, ATargetThatMatchesNothingIsNamed) {
  for (const char* none : {"q_projj", "proj", "lm_head", "embed_tokens", "norm", "", ".q_proj", "self_attn",
                           "layers.2.self_attn.q_proj", "layers.*.q_proj"}) {
    EXPECT_THAT(refusal([&] {
                  adapted(decoder("llama"), {"q_proj", none});
                }),
                HasSubstr("spillway.lora.targets: \"" + std::string(none) +
                          "\" matches no product of a layer; this model's are q_proj, k_proj, v_proj, o_proj, "
                          "gate_proj, up_proj, down_proj"))
        << none;
  }
  EXPECT_THAT(refusal([] { adapted(gpt2(), {"q_proj"}); }), HasSubstr("this model's are c_attn, c_proj, c_fc"));
}

TEST(Lora, MatricesAreThoseOfTorchsLinear) {
  const TrainedModel model = adapted(gpt2(), {"c_fc"});
  const auto& parameters = adapters(model).parameters;
  ASSERT_EQ(parameters.size(), 4u);
  EXPECT_EQ(parameters[0].name, "base_model.model.transformer.h.0.mlp.c_fc.lora_A.weight");
  EXPECT_THAT(parameters[0].shape, ElementsAre(3, 16));
  EXPECT_EQ(parameters[1].name, "base_model.model.transformer.h.0.mlp.c_fc.lora_B.weight");
  EXPECT_THAT(parameters[1].shape, ElementsAre(40, 3));
  EXPECT_EQ(model.adapters->scale, 2);
}

TEST(Lora, AdaptersAloneAreTrained) {
  const TrainedModel model = adapted(decoder("llama"), {"q_proj"});
  for (const Block& block : model.description.blocks) {
    for (const Parameter& parameter : block.parameters) EXPECT_EQ(parameter.trainable, block.name == "adapters");
  }
  EXPECT_TRUE(adapters(model).held);
  EXPECT_EQ(base_of(model).blocks.size() + 1, model.description.blocks.size());
  EXPECT_EQ(model.description.visits[1], (Visit{model.adapters->block, Pass::kForward}));
  EXPECT_EQ(model.description.visits.back(), (Visit{layer_block(0), Pass::kBackward}));
}

TEST(Lora, NothingGoesBackBehindTheLowestLayerWithAnAdapter) {
  const TrainedModel model = adapted(decoder("llama", 5), {"layers.4.self_attn.q_proj", "3.mlp.up_proj"});
  EXPECT_EQ(model.adapters->lowest, 3u);
  std::vector<std::uint32_t> forward, backward;
  for (const Visit& visit : model.description.visits)
    (visit.pass == Pass::kForward ? forward : backward).push_back(visit.block);
  const std::uint32_t block = model.adapters->block, head = model.head_block;
  EXPECT_THAT(forward, ElementsAre(kEmbeddingBlock, block, 1, 2, 3, 4, 5));
  EXPECT_THAT(backward, ElementsAre(head, block, layer_block(4), layer_block(3)));
  // Inputs of the layers below take turns; of layers 3 and 4, and the last output, each has its own.
  Trainer trainer(model, {.type = DType::kBFloat16, .micro_batch = 1, .accumulation = 2, .sequence = 8});
  const ModelDescription description = trainer.description();
  EXPECT_EQ(description.activations.size(), 2 * (2u + 3u));
  for (std::uint32_t l = 0; l < 5; ++l) EXPECT_EQ(description.blocks[layer_block(l)].inside_bytes > 0, l >= 3) << l;
}

TEST(Lora, TheConfigurationIsPeftsAndLeavesTheBaseOpen) {
  const TrainedModel model = adapted(gpt2(), {"all-linear"});
  const auto text_of = [](const ModelDescription& of) {
    return std::ranges::find(of.attachments, kAdapterConfig, &Attachment::name)->text;
  };
  const ConfigJson kept(text_of(model.description), "kept");
  EXPECT_FALSE(kept.has("base_model_name_or_path"));
  EXPECT_EQ(kept.size("r"), 3u);
  EXPECT_EQ(kept.number("lora_alpha", 0), 6);
  EXPECT_TRUE(kept.flag("fan_in_fan_out", false));
  EXPECT_THAT(kept.texts("target_modules"), ElementsAre("c_attn", "c_proj", "c_fc"));
  const ModelDescription out = adapters_of(model);
  EXPECT_EQ(out.blocks.size(), 1u);
  EXPECT_EQ(text_of(out), text_of(model.description));
  EXPECT_EQ(out.attachments.size(), 1u);
  EXPECT_FALSE(
      ConfigJson(text_of(adapted(decoder("llama"), {"q_proj"}).description), "l").flag("fan_in_fan_out", true));
}

TEST(Lora, NewAdaptersAreUniformAboveAndZeroBelow) {
  const TrainedModel model = adapted(decoder("llama"), {"q_proj", "down_proj"});
  AdapterWeights weights(model, 7), other(model, 8);
  const auto& parameters = adapters(model).parameters;
  std::vector<float> before;
  for (std::uint32_t p = 0; p < parameters.size(); ++p) {
    std::vector<float> values(elements(parameters[p])), others(values.size()), piece(values.size() - 5);
    weights.read(p, 0, values);
    weights.read(p, 5, piece);
    EXPECT_TRUE(std::equal(piece.begin(), piece.end(), values.begin() + 5));
    if (p % 2 == 1) {
      EXPECT_EQ(std::ranges::count(values, 0.0f), static_cast<std::ptrdiff_t>(values.size()));
      continue;
    }
    other.read(p, 0, others);
    EXPECT_NE(values, others);
    EXPECT_NE(values, before);
    const double bound = 1 / std::sqrt(static_cast<double>(parameters[p].shape[1]));
    double square = 0;
    for (const float value : values) {
      EXPECT_LE(std::abs(value), bound);
      square += static_cast<double>(value) * value / static_cast<double>(values.size());
    }
    EXPECT_NEAR(std::sqrt(3 * square) / bound, 1, 0.2);
    before = values;
  }
}

// What peft's save_pretrained() leaves.
class SavedAdapter {
 public:
  explicit SavedAdapter(const TrainedModel& model) : of_(model) {
    std::vector<TensorSpec> tensors;
    for (const Parameter& parameter : adapters(model).parameters) tensors.push_back({parameter.name, parameter.shape});
    write(tensors);
    for (const Attachment& file : model.description.attachments) {
      if (file.name == kAdapterConfig) text_ = file.text;
    }
    write_config(text_);
  }
  void write(const std::vector<TensorSpec>& tensors, float first = 0) {
    auto writer = SafetensorsWriter::create(folder_.path(), tensors, {.replace = true, .stem = kAdapterStem});
    for (std::size_t t = 0; t < tensors.size(); ++t) {
      std::uint64_t count = 1;
      for (const auto extent : tensors[t].shape) count *= extent;
      std::vector<float> values(count, static_cast<float>(t));
      values[0] += first;
      writer.write(t, 0, values);
    }
    writer.finish();
  }
  void write_config(const std::string& text) const { std::ofstream(folder_.path() / kAdapterConfig) << text; }
  // With `from` replaced.
  void change_config(const std::string& from, const std::string& to) const {
    std::string text = text_;
    const std::size_t at = text.find(from);
    ASSERT_NE(at, text.npos) << from;
    write_config(text.replace(at, from.size(), to));
  }
  AdapterWeights read() const { return read(of_); }
  AdapterWeights read(const TrainedModel& model, LoraConfig lora = {.rank = 3, .alpha = 6}) const {
    return {model, lora, folder_.path()};
  }

 private:
  TempDirectory folder_;
  TrainedModel of_;
  std::string text_;
};

TEST(Lora, AnAdapterOfPeftsIsReadByItsNames) {
  const SavedAdapter saved(adapted(gpt2(), {"c_fc"}));
  AdapterWeights weights = saved.read();
  for (std::uint32_t p = 0; p < 4; ++p) {
    std::vector<float> values(3);
    weights.read(p, 4, values);
    EXPECT_THAT(values, ElementsAre(p, p, p));
  }
}

TEST(Lora, AnAdapterOfAnotherBaseIsRefused) {
  const TrainedModel model = adapted(decoder("llama"), {"q_proj"});
  const SavedAdapter saved(model);
  EXPECT_THAT(refusal([&] { saved.read(adapted(decoder("llama", 3), {"q_proj"})); }),
              HasSubstr("tensor base_model.model.model.layers.2.self_attn.q_proj.lora_A.weight is missing"));
  EXPECT_THAT(
      refusal([&] { saved.read(adapted(decoder("llama", 1), {"q_proj"})); }),
      HasSubstr("layers.1.self_attn.q_proj.lora_A.weight is of no adapter that spillway.lora.targets asks for"));
  EXPECT_THAT(refusal([&] { saved.read(adapted(gpt2(), {"c_fc"})); }), HasSubstr("is missing"));
  EXPECT_THAT(refusal([&] { saved.read(adapted(decoder("llama"), {"k_proj"})); }), HasSubstr("k_proj"));
  TrainedModel wide = trained_model(ConfigJson(R"({"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 24,
      "num_attention_heads": 4, "vocab_size": 30, "max_position_embeddings": 32, "model_type": "llama"})",
                                               "wide"),
                                    8);
  EXPECT_THAT(refusal([&] { saved.read(adapted(wide, {"q_proj"})); }),
              HasSubstr("has shape [3, 16], this model's adapter has [3, 32]"));
}

TEST(Lora, AnAdapterThatIsNotWhatTheConfigurationSaysIsRefused) {
  const TrainedModel model = adapted(gpt2(), {"c_fc"});
  const SavedAdapter saved(model);
  EXPECT_THAT(refusal([&] { saved.read(model, {.rank = 4, .alpha = 6}); }),
              HasSubstr("\"r\" is 3, and spillway.lora.rank is 4"));
  EXPECT_THAT(refusal([&] { saved.read(model, {.rank = 3, .alpha = 5}); }),
              HasSubstr("\"lora_alpha\" is 6, and spillway.lora.alpha is 5"));
  for (const auto& [from, to, word] : std::vector<std::array<const char*, 3>>{
           {"\"use_dora\": false", "\"use_dora\": true", "use_dora"},
           {"\"use_rslora\": false", "\"use_rslora\": true", "use_rslora"},
           {"\"none\"", "\"all\"", "\"bias\" is \"all\""},
           {"\"LORA\"", "\"LOHA\"", "\"peft_type\" is \"LOHA\""},
           {"\"rank_pattern\": {}", "\"rank_pattern\": {\"c_fc\": 2}", "rank_pattern"},
           {"\"modules_to_save\": null", "\"modules_to_save\": [\"lm_head\"]", "modules_to_save"},
           {"\"LORA\"", "\"LORA\", \"alora_invocation_tokens\": [7]", "\"alora_invocation_tokens\" is set"}}) {
    saved.change_config(from, to);
    EXPECT_THAT(refusal([&] { saved.read(); }), HasSubstr(word));
  }
}

TEST(Lora, ADamagedAdapterIsRefused) {
  const TrainedModel model = adapted(gpt2(), {"c_fc"});
  SavedAdapter saved(model);
  std::vector<TensorSpec> tensors;
  for (const Parameter& parameter : adapters(model).parameters) tensors.push_back({parameter.name, parameter.shape});
  saved.write(tensors, NAN);
  EXPECT_THAT(refusal([&] { saved.read(); }), HasSubstr("holds values that are not finite"));
}

}  // namespace
}  // namespace spillway::models
