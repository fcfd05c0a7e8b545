// config.json of a Hugging Face model.
#include "tools/models/gpt2/model.h"

#include <cmath>

#include "tests/fuzz/targets.h"

namespace spillway::fuzz {

void model_config(Bytes input) {
  const auto config = accepted([&] { return models::parse_model_config(text_of(input), "config.json"); });
  if (!config) return;
  SPILLWAY_CHECK(config->width % config->heads == 0, "heads share the width");
  SPILLWAY_CHECK(config->epsilon > 0 && std::isfinite(config->epsilon), "a layer norm divides by something");
  // What travels with the trained model describes the same model, and so does what travels with that one.
  const auto again = models::parse_model_config(config->text, "config.json");
  SPILLWAY_CHECK(again.text == config->text, "the exported text is exported as it is");
  SPILLWAY_CHECK(again.layers == config->layers && again.width == config->width && again.heads == config->heads &&
                     again.inner == config->inner && again.positions == config->positions &&
                     again.vocabulary == config->vocabulary && again.epsilon == config->epsilon,
                 "it says the same");
  if (config->layers > 4) return;  // the next ones are like these
  for (const Block& block : models::describe_model(*config, 0).blocks) {
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
