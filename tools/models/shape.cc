#include "tools/models/shape.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "tools/models/config_json.h"
#include "tools/models/decoder/model.h"
#include "tools/models/linear.h"
#include "tools/models/t5/model.h"

namespace spillway::models {
namespace {

ModelShape gpt2_shape(ModelConfig model) {
  ModelShape shape{.family = "gpt2"};
  shape.layers = model.layers;
  shape.width = model.width;
  shape.inner = model.inner;
  shape.vocabulary = model.vocabulary;
  shape.positions = model.positions;
  shape.heads = shape.kv_heads = model.heads;
  shape.head_width = model.width / model.heads;
  shape.tied = true;
  shape.gated = false;
  shape.text = model.text;
  shape.name = "config.json";
  shape.gpt2 = std::move(model);
  return shape;
}

ModelShape family_shape(const ConfigJson& json) {
  const std::string family = json.text("model_type", "");
  if (family == "gpt2") return gpt2_shape(model_config(json));
  if (is_decoder(family)) return decoder_shape(decoder_sizes(json));
  if (family == "t5") return t5_shape(json);
  json.refuse(family.empty() ? "\"model_type\" is missing" : fmt::format("\"model_type\" is \"{}\"", family),
              fmt::format("gpt2, {} and t5 are known; --params plans for a number of parameters",
                          fmt::join(decoder_families(), ", ")));
}

ModelShape shape_of(const ConfigJson& json) {
  ModelShape shape = family_shape(json);
  shape.text = json.text();
  shape.name = json.name();
  return shape;
}

}  // namespace

void check_heads(const ConfigJson& json, std::uint32_t heads, std::uint32_t head_width) {
  if (std::uint64_t{heads} * head_width <= kLargestSize) return;
  json.refuse(fmt::format("{} heads of width {} are wider than {}", heads, head_width, kLargestSize), kNoLarger);
}

ModelShape parse_shape(std::string_view text, const std::string& name) { return shape_of(ConfigJson(text, name)); }

ModelShape load_shape(const std::filesystem::path& directory) { return shape_of(ConfigJson::load(directory)); }

// Published models grow in width and depth together, in width a little faster: width / depth is 64 at 124 M parameters
// (gpt2), 128 at 175 B (Brown et al. 2020, table 2.1), 200 at 1 T (Narayanan et al. 2021, table 1).
ModelShape shape_of_size(double parameters, std::uint32_t sequence) {
  ModelConfig model;
  model.positions = std::max(model.positions, sequence);
  const double aspect = 64 * std::pow(std::max(parameters, 124e6) / 124e6, 0.125);
  const auto table = [&](double width) { return (model.vocabulary + model.positions) * width; };
  double low = 1, high = 1 << 22;
  for (int i = 0; i < 100; ++i) {
    const double width = (low + high) / 2;
    (12 * width * width * width / aspect + table(width) < parameters ? low : high) = width;
  }
  const double head = high >= 3072 ? 128 : 64;
  const double width = std::max(head, std::round(high / head) * head);
  model.width = static_cast<std::uint32_t>(width);
  model.heads = static_cast<std::uint32_t>(width / head);
  model.inner = 4 * model.width;
  const double layers = std::round((parameters - table(width)) / (12 * width * width + 13 * width));
  model.layers = static_cast<std::uint32_t>(std::clamp(layers, 1.0, static_cast<double>(kMostLayers)));
  model.text = model_config_text(model, DType::kBFloat16);
  return gpt2_shape(std::move(model));
}

ModelDescription describe_parameters(const ModelShape& shape) {
  if (shape.gpt2) return describe_model(*shape.gpt2, 0);
  return shape.decoder ? decoder_parameters(*shape.decoder) : t5_parameters(shape);
}

}  // namespace spillway::models
