// Decoders are what transformers makes of their config.json; what this program would compute otherwise is refused.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <functional>
#include <map>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "spillway/error.h"
#include "spillway/safetensors.h"
#include "tests/temp_directory.h"
#include "tools/models/config_json.h"
#include "tools/models/decoder/model.h"
#include "tools/models/gpt2/model.h"
#include "tools/models/weights.h"

namespace spillway::models {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

// A model of decoders.txt, as bench/peers/decoders.py wrote it.
struct Reference {
  struct Rotary {
    std::uint32_t layer = 0, sequence = 0, rotated = 0;
    std::map<std::uint32_t, std::vector<float>> at;  // cosines and sines of a position
  };
  std::string name, config, activation;
  std::uint64_t parameters = 0;
  std::vector<std::uint32_t> windows;
  std::vector<float> scales, caps, epsilon;  // scales: of attention; of the embedding, in fp32, bf16 and fp16
  std::map<std::string, std::vector<std::uint64_t>> tensors;  // outside of layers, and those of the last one
  std::vector<Rotary> rotary;                                 // of the first layer of each kind
};

template <typename T>
std::vector<T> rest(std::istream& line) {
  std::vector<T> values;
  for (T value; line >> value;) values.push_back(value);
  return values;
}

std::vector<Reference> references() {
  std::ifstream file(SPILLWAY_REFERENCES "/decoders.txt");
  std::vector<Reference> models;
  std::string text, word;
  std::getline(file, text);  // how it was made
  while (std::getline(file, text)) {
    std::istringstream line(text);
    line >> word;
    if (word == "model") {
      line >> models.emplace_back().name;
      std::getline(line >> std::ws, models.back().config);
      continue;
    }
    Reference& model = models.at(models.size() - 1);
    if (word == "parameters") line >> model.parameters;
    if (word == "activation") line >> model.activation;
    if (word == "windows") model.windows = rest<std::uint32_t>(line);
    if (word == "scales") model.scales = rest<float>(line);
    if (word == "caps") model.caps = rest<float>(line);
    if (word == "epsilon") model.epsilon = rest<float>(line);
    if (word == "tensor") {
      line >> word;
      model.tensors[word] = rest<std::uint64_t>(line);
    } else if (word == "rotary") {
      auto& rotary = model.rotary.emplace_back();
      line >> rotary.layer >> rotary.sequence >> rotary.rotated;
    } else if (word == "at") {
      std::uint32_t position = 0;
      line >> position;
      model.rotary.back().at[position] = rest<float>(line);
    }
  }
  return models;
}

DecoderConfig parse(const std::string& text) { return decoder_config(ConfigJson(text, "config.json")); }

TEST(ModelsDecoder, HasTheTensorsThatTransformersHas) {
  const auto models = references();
  EXPECT_EQ(models.size(), 26u);
  for (const Reference& reference : models) {
    SCOPED_TRACE(reference.name);
    const DecoderConfig config = parse(reference.config);
    std::uint64_t count = 0;
    std::map<std::string, std::vector<std::uint64_t>> tensors;
    const std::string last = "layers." + std::to_string(config.layers - 1) + ".";
    for (const Block& block : decoder_parameters(config).blocks) {
      for (const Parameter& parameter : block.parameters) {
        count += elements(parameter);
        const bool kept =
            parameter.name.find("layers.") == std::string::npos || parameter.name.find(last) != std::string::npos;
        if (kept) tensors[parameter.name] = parameter.shape;
      }
    }
    EXPECT_EQ(count, reference.parameters);
    EXPECT_EQ(tensors, reference.tensors);
  }
}

TEST(ModelsDecoder, ComputesWhatTransformersComputes) {
  for (const Reference& reference : references()) {
    SCOPED_TRACE(reference.name);
    const DecoderConfig config = parse(reference.config);
    std::vector<std::uint32_t> windows;
    for (const auto& layer : config.layer_rules) windows.push_back(layer.window);
    EXPECT_EQ(windows, reference.windows);
    const auto scale = static_cast<float>(1 / std::sqrt(static_cast<double>(config.head_width)));
    EXPECT_FLOAT_EQ(config.attention_scale != 0 ? config.attention_scale : scale, reference.scales.at(0));
    const TrainedModel model = trained_decoder(config, 1);
    EXPECT_FLOAT_EQ(model.embedding_scale, reference.scales.at(1));
    EXPECT_EQ(model.embedding_scale_in(DType::kBFloat16), reference.scales.at(2));
    EXPECT_EQ(model.embedding_scale_in(DType::kFloat16), reference.scales.at(3));
    EXPECT_THAT(reference.caps, ElementsAre(config.attention_soft_cap, config.head_soft_cap));
    EXPECT_FLOAT_EQ(config.epsilon, reference.epsilon.at(0));
    EXPECT_EQ(config.activation == Activation::kSilu ? "SiLUActivation" : "GELUTanh", reference.activation);
    EXPECT_EQ(config.norm_offset, config.family.starts_with("gemma") ? 1 : 0);
  }
}

// 1e-6 for angles of up to 4,095. PyTorch's powers in fp32 are not always the nearest ones: where the last bit of a
// frequency differs, so does the angle by 2^-23 of it. That is one pair of columns of Phi-3's 48.
TEST(ModelsDecoder, TurnsColumnsAsTransformersDoes) {
  std::size_t compared = 0, other_powers = 0;
  for (const Reference& reference : references()) {
    SCOPED_TRACE(reference.name);
    const DecoderConfig config = parse(reference.config);
    EXPECT_FALSE(reference.rotary.empty());
    for (const Reference::Rotary& rotary : reference.rotary) {
      const RotaryRules& rules = config.rotary.at(config.layer_rules.at(rotary.layer).rotary);
      ASSERT_EQ(rules.rotated, rotary.rotated);
      const std::vector<float> table = rotary_table(rules, rotary.sequence);
      const std::vector<float> frequencies = rotary_frequencies(rules, rotary.sequence);
      ASSERT_EQ(table.size(), std::size_t{rotary.sequence} * rotary.rotated);
      for (const auto& [position, values] : rotary.at) {
        ASSERT_EQ(values.size(), rotary.rotated);
        for (std::size_t i = 0; i < values.size(); ++i, ++compared) {
          const float ours = table[std::size_t{position} * rotary.rotated + i];
          if (std::abs(ours - values[i]) <= 1e-6f) continue;
          ++other_powers;
          EXPECT_NEAR(ours, values[i], frequencies[i / 2] * static_cast<float>(position) * 0x1.4p-23) << i;
        }
      }
    }
  }
  EXPECT_GT(compared, 2000u);
  EXPECT_LE(other_powers, 4u);
}

TEST(ModelsDecoder, RotatesByPositionThenPair) {
  const RotaryRules rules{.rotated = 4, .theta = 100};
  EXPECT_THAT(rotary_frequencies(rules, 3), ElementsAre(1, 0.1f));
  const std::vector<float> table = rotary_table(rules, 3);
  ASSERT_EQ(table.size(), 12u);
  EXPECT_THAT(std::vector(table.begin(), table.begin() + 4), ElementsAre(1, 0, 1, 0));
  EXPECT_FLOAT_EQ(table[8], std::cos(2.0f));
  EXPECT_FLOAT_EQ(table[9], std::sin(2.0f));
  EXPECT_FLOAT_EQ(table[10], std::cos(0.2f));
  EXPECT_FLOAT_EQ(table[11], std::sin(0.2f));
}

// The models of decoders.txt by name.
std::string config_of(const std::string& name) {
  for (const Reference& reference : references()) {
    if (reference.name == name) return reference.config;
  }
  ADD_FAILURE() << name;
  return "{}";
}

TrainedModel trained(const std::string& name) { return trained_decoder(parse(config_of(name)), 8); }

std::vector<std::string> names(const TrainedModel& model, const std::vector<ProductTensors>& products) {
  const auto& parameters = model.description.blocks[layer_block(0)].parameters;
  std::vector<std::string> result;
  for (const ProductTensors& product : products) {
    result.push_back(parameters.at(product.weight).name);
    EXPECT_EQ(parameters.at(product.weight).shape.at(0), product.out);
    if (product.bias) result.push_back(parameters.at(*product.bias).name);
  }
  return result;
}

TEST(ModelsDecoder, NamesItsTensorsForTheTrainer) {
  const TrainedModel qwen = trained("Qwen2.5-0.5B");
  const std::string at = "model.layers.0.";
  EXPECT_THAT(names(qwen, qwen.layers[0].qkv),
              ElementsAre(at + "self_attn.q_proj.weight", at + "self_attn.q_proj.bias", at + "self_attn.k_proj.weight",
                          at + "self_attn.k_proj.bias", at + "self_attn.v_proj.weight", at + "self_attn.v_proj.bias"));
  EXPECT_THAT(names(qwen, {qwen.layers[0].attention_out, qwen.layers[0].mlp_out}),
              ElementsAre(at + "self_attn.o_proj.weight", at + "mlp.down_proj.weight"));
  EXPECT_THAT(names(qwen, qwen.layers[0].mlp), ElementsAre(at + "mlp.gate_proj.weight", at + "mlp.up_proj.weight"));
  const auto& parameters = qwen.description.blocks[layer_block(0)].parameters;
  EXPECT_EQ(parameters.at(qwen.layers[0].attention_norm.weight).name, at + "input_layernorm.weight");
  EXPECT_EQ(parameters.at(qwen.layers[0].mlp_norm.weight).name, at + "post_attention_layernorm.weight");
  EXPECT_FALSE(qwen.layers[0].query_norm || qwen.layers[0].attention_after || qwen.layers[0].mlp_after);

  const TrainedModel phi = trained("Phi-4-mini");
  EXPECT_THAT(names(phi, phi.layers[0].qkv), ElementsAre(at + "self_attn.qkv_proj.weight"));
  EXPECT_THAT(names(phi, phi.layers[0].mlp), ElementsAre(at + "mlp.gate_up_proj.weight"));
  EXPECT_EQ(phi.rotations.at(0).rotated, 96u);
  EXPECT_EQ(phi.rotations.at(0).table.size(), 8u * 96);

  const TrainedModel gemma = trained("gemma-3-1b");
  const TrainedLayer& layer = gemma.layers[0];
  const auto norm = [&](ParameterIndex index) {
    return gemma.description.blocks[layer_block(0)].parameters.at(index).name.substr(at.size());
  };
  EXPECT_EQ(norm(layer.attention_norm.weight), "input_layernorm.weight");
  EXPECT_EQ(norm(layer.attention_after.value().weight), "post_attention_layernorm.weight");
  EXPECT_EQ(norm(layer.mlp_norm.weight), "pre_feedforward_layernorm.weight");
  EXPECT_EQ(norm(layer.mlp_after.value().weight), "post_feedforward_layernorm.weight");
  EXPECT_EQ(norm(layer.query_norm.value()), "self_attn.q_norm.weight");
  EXPECT_EQ(norm(layer.key_norm.value()), "self_attn.k_norm.weight");
  EXPECT_EQ(gemma.rotations.size(), 2u);
  EXPECT_EQ(layer.rotation, 1u);
  EXPECT_EQ(gemma.layers[5].rotation, 0u);
  EXPECT_EQ(gemma.layers[5].window, 0u);
}

TEST(ModelsDecoder, IsVisitedForwardThenBackwardWithTheHeadBetween) {
  for (const char* name : {"Llama-3.1-8B", "Llama-3.2-1B"}) {
    const TrainedModel model = trained(name);
    const auto layers = static_cast<std::uint32_t>(model.layers.size());
    std::vector<Visit> visits = {{kEmbeddingBlock, Pass::kForward}};
    for (std::uint32_t l = 0; l < layers; ++l) visits.push_back({layer_block(l), Pass::kForward});
    visits.push_back({model.head_block, Pass::kBackward});
    for (std::uint32_t l = layers; l-- > 0;) visits.push_back({layer_block(l), Pass::kBackward});
    visits.push_back({kEmbeddingBlock, Pass::kBackward});
    EXPECT_EQ(model.description.visits, visits);
    const bool tied = model.head_block == kEmbeddingBlock;
    EXPECT_EQ(tied, std::string(name) == "Llama-3.2-1B");
    const auto& head = model.description.blocks.at(model.head_block).parameters;
    EXPECT_EQ(head.at(model.head_weight).name, tied ? "model.embed_tokens.weight" : "lm_head.weight");
    EXPECT_EQ(head.at(model.final_norm.weight).name, "model.norm.weight");
    EXPECT_EQ(model.description.attachments.at(0).text, config_of(name));
  }
}

TEST(ModelsDecoder, TellsWhatShapesDoNotShow) {
  const auto facts = [](const std::string& more) {
    return trained_decoder(parse(R"({"model_type": "llama", "num_hidden_layers": 1, "hidden_size": 64,
      "intermediate_size": 64, "vocab_size": 10, "num_attention_heads": 4, "max_position_embeddings": 64)" +
                                 more + "}"),
                           4)
        .facts;
  };
  EXPECT_EQ(facts(""), facts(R"(, "rope_theta": 10000.0, "num_key_value_heads": 4)"));
  for (const char* other : {R"(, "rms_norm_eps": 1e-5)", R"(, "hidden_act": "gelu")", R"(, "rope_theta": 5e5)",
                            R"(, "rope_scaling": {"type": "linear", "factor": 2})"})
    EXPECT_NE(facts(""), facts(other)) << other;
}

// What config.json of a small model with `more` in it is refused with.
std::string refusal(const std::string& family, const std::string& more) {
  const std::string text = R"({"model_type": ")" + family + R"(", "num_hidden_layers": 2, "hidden_size": 64,
    "intermediate_size": 64, "vocab_size": 10, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 64)" +
                           (more.empty() ? "" : ", ") + more + "}";
  try {
    parse(text);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Code::kInvalidArgument);
    EXPECT_TRUE(error.parts().object.starts_with("config.json"));
    EXPECT_FALSE(error.parts().hint.empty());
    return error.what();
  }
  return "accepted";
}

TEST(ModelsDecoder, RefusesByNameWhatItDoesNotCompute) {
  const struct {
    const char *family, *more, *words;
  } kCases[] = {
      {"mixtral", "", "\"model_type\" is \"mixtral\"; mixtures of experts are not trained"},
      {"qwen3_moe", "", "\"model_type\" is \"qwen3_moe\"; mixtures of experts"},
      {"gemma3", "", "\"model_type\" is \"gemma3\"; a model that sees pictures"},
      {"falcon", "", "\"model_type\" is \"falcon\"; "},
      {"llama", R"("hidden_act": "relu2")", "\"hidden_act\" is \"relu2\""},
      {"llama", R"("rms_norm_eps": 0)", "\"rms_norm_eps\" must be above 0"},
      {"llama", R"("quantization_config": {"bits": 4})", "\"quantization_config\" is there"},
      {"llama", R"("clip_qkv": 8)", "\"clip_qkv\" is not known for this model_type"},
      {"llama", R"("sliding_window": 8)", "\"sliding_window\" is not known"},
      {"llama", R"("is_llama_config": true, "transformers.js_config": {"dtype": "q4"}, "rope_interleaved": true)",
       "\"rope_interleaved\" is true; only models with false are trained"},
      {"mistral", R"("attention_bias": true)", "\"attention_bias\" is true"},
      {"phi3", R"("lm_head_bias": true)", "\"lm_head_bias\" is true"},
      {"phi3", R"("full_attn_mod": 2)", "\"full_attn_mod\" is 2"},
      {"gemma2", R"("use_bidirectional_attention": true)", "\"use_bidirectional_attention\" is true"},
      {"gemma2", R"("query_pre_attn_scalar": 0)", "\"query_pre_attn_scalar\" is 0"},
      {"gemma2", R"("final_logit_softcapping": 0)", "\"final_logit_softcapping\" is 0"},
      {"gemma2", R"("hidden_act": "silu")", "\"hidden_act\" is not the \"hidden_activation\""},
      {"gemma2", R"("sliding_window": null)", "layer 0 looks back over a window, and none is said"},
      {"gemma3_text", R"("attn_logit_softcapping": 50.0)", "\"attn_logit_softcapping\" is 50"},
      {"gemma3_text", R"("_sliding_window_pattern": 2)", "\"_sliding_window_pattern\" is there without"},
      {"gemma3_text", R"("layer_types": ["full_attention"])", "\"layer_types\" has 1 layers, and there are 2"},
      {"qwen3", R"("layer_types": ["full_attention", "linear_attention"])", "has \"linear_attention\""},
      {"qwen3", R"("layer_types": ["full_attention", "sliding_attention"])", "layer 1 looks back over a window"},
      {"llama", R"("rope_scaling": {"rope_type": "mrope"})", "\"rope_type\" is \"mrope\""},
      {"llama", R"("rope_scaling": {"type": "linear"})", "config.json, \"rope_scaling\": \"factor\" is missing"},
      {"llama", R"("rope_scaling": {"type": "linear", "factor": 0.5})", "\"factor\" is 0.5, and must be 1 or more"},
      {"llama", R"("rope_scaling": {"type": "linear", "factor": 2, "beta": 3})", "\"beta\" is not known here"},
      {"llama", R"("rope_scaling": "linear")", "\"rope_scaling\" is not a JSON object"},
      {"llama", R"("rope_scaling": {"type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4})",
       "\"high_freq_factor\" must be above"},
      {"llama", R"("rope_scaling": {"type": "longrope", "short_factor": [1], "long_factor": [1]})",
       "\"short_factor\" has 1 numbers, and 16 columns"},
      {"llama", R"("rope_scaling": {"type": "linear", "factor": 2}, "rope_parameters": {"rope_theta": 1e4})",
       "are both there"},
      {"llama", R"("rope_parameters": {"full_attention": {}})", "\"full_attention\" is not known here"},
      {"llama", R"("partial_rotary_factor": 0.5)", "\"partial_rotary_factor\" is 0.5"},
      {"llama", R"("rope_theta": 1)", "\"rope_theta\" is 1"},
      {"llama", R"("rope_scaling": {"type": "dynamic", "factor": 1e300})", "holds numbers that no angle comes of"},
      {"phi3", R"("rope_scaling": {"type": "linear", "factor": 2})", "Phi-3 has default and longrope"},
      {"phi3", R"("partial_rotary_factor": 0.2)", "3 columns of a head of 16 cannot be turned in pairs"},
      {"gemma3_text", R"("rope_parameters": {"rope_theta": 1e6})", "\"rope_theta\" is no kind of layer"},
  };
  for (const auto& [family, more, words] : kCases) EXPECT_THAT(refusal(family, more), HasSubstr(words)) << more;
}

TEST(ModelsDecoder, TakesWhatChangesNothing) {
  for (const std::string_view family : decoder_families())
    EXPECT_EQ(refusal(std::string(family),
                      R"("architectures": ["X"], "torch_dtype": "bfloat16", "bos_token_id": 1, "use_cache": true,
      "eos_token_id": [1, 2], "initializer_range": 0.02, "transformers_version": "5.0", "unheard_of": null,
      "attention_dropout": 0.0)"),
              "accepted");
  EXPECT_EQ(refusal("gemma3_text", R"("_sliding_window_pattern": 6, "use_bidirectional_attention": false,
    "layer_types": ["full_attention", "sliding_attention"])"),
            "accepted");
}

TEST(ModelsDecoder, MissesWhatTheFileMustSay) {
  const std::string llama = R"({"model_type": "llama", "num_hidden_layers": 1, "hidden_size": 64,
    "intermediate_size": 64, "vocab_size": 10, "num_attention_heads": 4)";
  const auto missing = [](std::string text) -> std::string {
    try {
      parse(text);
    } catch (const Error& error) {
      return error.parts().happened;
    }
    return "accepted";
  };
  EXPECT_EQ(missing("{}"), "\"model_type\" is missing");
  EXPECT_EQ(missing(llama + "}"), "\"max_position_embeddings\" is missing");
  EXPECT_EQ(missing(llama + R"(, "max_position_embeddings": 8})"), "accepted");
  std::string mistral = llama + R"(, "max_position_embeddings": 8)";
  mistral.replace(mistral.find("llama"), 5, "mistral");
  EXPECT_EQ(missing(mistral + "}"), "\"num_key_value_heads\" is missing");
  EXPECT_EQ(missing(mistral + R"(, "num_key_value_heads": null})"), "accepted");
  EXPECT_EQ(missing(mistral + R"(, "num_key_value_heads": 3})"),
            "\"num_attention_heads\" 4 is not a multiple of \"num_key_value_heads\" 3");
}

TEST(ModelsDecoder, SaysThatDropoutIsOff) {
  std::string config = config_of("Phi-4-mini");
  EXPECT_FALSE(parse(config).has_dropout);
  config.insert(1, R"("attention_dropout": 0.1, )");
  EXPECT_TRUE(parse(config).has_dropout);
}

// The names that a file of a small model has, by `change`, or what it is refused with.
std::string stored(bool tied, const std::function<void(std::vector<TensorSpec>&)>& change) {
  const TempDirectory folder;
  const TrainedModel model = trained_decoder(parse(R"({"model_type": "llama", "num_hidden_layers": 1, "hidden_size": 8,
      "intermediate_size": 8, "vocab_size": 10, "num_attention_heads": 2, "max_position_embeddings": 64,
      "tie_word_embeddings": )" + std::string(tied ? "true}" : "false}")),
                                             4);
  std::vector<TensorSpec> tensors;
  for (const Block& block : model.description.blocks) {
    for (const Parameter& parameter : block.parameters) tensors.push_back({parameter.name, parameter.shape});
  }
  change(tensors);
  auto writer = SafetensorsWriter::create(folder / "model", tensors, {});
  for (std::size_t t = 0; t < tensors.size(); ++t) {
    std::uint64_t count = 1;
    for (const auto extent : tensors[t].shape) count *= extent;
    writer.write(t, 0, std::vector<float>(count));
  }
  writer.finish();
  try {
    ModelWeights(folder / "model", model.description).check(DType::kFloat32);
  } catch (const Error& error) {
    return error.parts().happened;
  }
  return "accepted";
}

TEST(ModelsDecoder, ReadsTheFilesThatTransformersWrites) {
  const auto as_it_is = [](std::vector<TensorSpec>&) {};
  const auto add = [](const char* name, std::vector<std::uint64_t> shape) {
    return [=](std::vector<TensorSpec>& tensors) { tensors.push_back({name, shape}); };
  };
  for (const bool tied : {false, true}) {
    EXPECT_EQ(stored(tied, as_it_is), "accepted");
    EXPECT_EQ(stored(tied, add("model.layers.0.self_attn.rotary_emb.inv_freq", {2})), "accepted");
    // Of a model without its head, as LlamaModel saves it.
    const auto bare = [](std::vector<TensorSpec>& tensors) {
      for (TensorSpec& tensor : tensors) {
        if (tensor.name.starts_with("model.")) tensor.name = tensor.name.substr(6);
      }
    };
    EXPECT_EQ(stored(tied, bare), "accepted");
    EXPECT_EQ(stored(tied, add("model.layers.0.self_attn.q_proj.bias", {8})),
              "tensor model.layers.0.self_attn.q_proj.bias is no part of the model that config.json describes");
  }
  EXPECT_EQ(stored(true, add("lm_head.weight", {10, 8})), "accepted");
  EXPECT_EQ(stored(false, [](auto& tensors) { tensors.pop_back(); }), "tensor lm_head.weight is missing");
}

}  // namespace
}  // namespace spillway::models
