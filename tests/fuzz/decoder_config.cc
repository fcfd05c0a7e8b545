// config.json of a Llama, a Gemma and the like.
#include <algorithm>
#include <cmath>

#include "tests/fuzz/targets.h"
#include "tools/models/config_json.h"
#include "tools/models/decoder/model.h"

namespace spillway::fuzz {

void decoder_config(Bytes input) {
  const auto parse = [](std::string_view text) {
    return models::decoder_config(models::ConfigJson(text, "config.json"));
  };
  const auto config = accepted([&] { return parse(text_of(input)); });
  if (!config) return;
  SPILLWAY_CHECK(config->heads % config->kv_heads == 0, "heads share keys");
  SPILLWAY_CHECK(config->epsilon > 0 && std::isfinite(config->epsilon), "a norm divides by something");
  SPILLWAY_CHECK(config->layer_rules.size() == config->layers, "every layer has its rules");
  for (const auto& layer : config->layer_rules)
    SPILLWAY_CHECK(layer.rotary < config->rotary.size(), "a layer's positions are there");
  std::uint32_t widest = 0;
  for (const auto& rules : config->rotary) {
    SPILLWAY_CHECK(rules.rotated % 2 == 0 && rules.rotated > 0 && rules.rotated <= config->head_width,
                   "pairs of a head's columns are turned");
    widest = std::max(widest, rules.rotated);
  }
  if (config->layers > 4 || widest > 1024) return;  // the next ones are like these
  const models::TrainedModel model = models::trained_decoder(*config, 3);
  SPILLWAY_CHECK(models::trained_decoder(parse(config->text), 3).facts == model.facts,
                 "the exported text says the same");
  for (const auto& rotation : model.rotations) {
    SPILLWAY_CHECK(rotation.table.size() == 3 * rotation.rotated, "a table has a row for each position");
    SPILLWAY_CHECK(std::ranges::all_of(rotation.table, [](float value) { return std::isfinite(value); }),
                   "sines are numbers");
  }
  for (const Block& block : model.description.blocks) {
    for (const Parameter& parameter : block.parameters) {
      std::uint64_t count = 1;
      for (const std::uint64_t extent : parameter.shape) {
        SPILLWAY_CHECK(extent > 0 && !__builtin_mul_overflow(count, extent, &count), "no size overflows");
      }
      SPILLWAY_CHECK(count <= std::uint64_t{1} << 55, "no tensor is larger than the engine takes");
    }
  }
}

}  // namespace spillway::fuzz
