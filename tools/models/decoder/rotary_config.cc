#include "tools/models/decoder/rotary_config.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <string>

#include "tools/models/config_json.h"

namespace spillway::models {
namespace {

constexpr const char* kScaled = "default, linear, dynamic, yarn, llama3 and longrope are trained";

RotaryScaling scaling_of(const ConfigJson& given, const std::string& family) {
  // The second name is the old one.
  std::string type = given.text("rope_type", given.text("type", "default"));
  const bool phi = family == "phi3";
  if (phi && (type == "su" || type == "yarn")) type = "longrope";  // what older files of Phi-3 call it
  if (phi && type != "default" && type != "longrope")
    given.refuse(fmt::format("\"rope_type\" is \"{}\"", type), "Phi-3 has default and longrope");
  if (type == "default") return RotaryScaling::kNone;
  if (type == "linear") return RotaryScaling::kLinear;
  if (type == "dynamic") return RotaryScaling::kDynamic;
  if (type == "yarn") return RotaryScaling::kYarn;
  if (type == "llama3") return RotaryScaling::kLlama3;
  if (type == "longrope") return RotaryScaling::kLongRope;
  given.refuse(fmt::format("\"rope_type\" is \"{}\"", type), kScaled);
}

double at_least(const ConfigJson& given, const char* key, double least, std::optional<double> otherwise = {}) {
  if (!otherwise && !given.has(key)) given.refuse(fmt::format("\"{}\" is missing", key));
  const double value = given.number(key, otherwise.value_or(0));
  if (value < least) given.refuse(fmt::format("\"{}\" is {}, and must be {} or more", key, value, least));
  return value;
}

std::vector<double> factors(const ConfigJson& given, const char* key, std::uint32_t rotated) {
  std::vector<double> values = given.numbers(key);
  if (values.size() != rotated / 2) {
    given.refuse(fmt::format("\"{}\" has {} numbers, and {} columns of a head are turned in pairs", key, values.size(),
                             rotated));
  }
  if (std::ranges::any_of(values, [](double value) { return value <= 0; }))
    given.refuse(fmt::format("\"{}\" holds a number that is not above 0", key));
  return values;
}

// The columns that are turned: Phi-3 may leave the last ones of a head alone.
std::uint32_t rotated_of(const ConfigJson& json, const ConfigJson& given, const DecoderConfig& model) {
  const double part = given.number("partial_rotary_factor", json.number("partial_rotary_factor", 1));
  if (!(part > 0 && part <= 1)) given.refuse("\"partial_rotary_factor\" must be above 0 and at most 1");
  if (part != 1 && model.family != "phi3") {
    given.refuse(fmt::format("\"partial_rotary_factor\" is {}", part),
                 fmt::format("{} turns all columns of a head", model.family));
  }
  const auto rotated = static_cast<std::uint32_t>(model.head_width * part);
  if (rotated < 2 || rotated % 2 != 0)
    given.refuse(fmt::format("{} columns of a head of {} cannot be turned in pairs", rotated, model.head_width));
  return rotated;
}

void read_yarn(const ConfigJson& given, RotaryRules& rules, bool by_layer) {
  rules.factor = at_least(given, "factor", 1);
  // 0 stands for the default.
  if (const double fast = at_least(given, "beta_fast", 0, 0); fast != 0) rules.beta_fast = fast;
  if (const double slow = at_least(given, "beta_slow", 0, 0); slow != 0) rules.beta_slow = slow;
  if (rules.beta_fast < rules.beta_slow) given.refuse("\"beta_fast\" is less than \"beta_slow\"");
  rules.mscale = at_least(given, "mscale", 0, 0);
  rules.mscale_all_dim = at_least(given, "mscale_all_dim", 0, 0);
  // Where layers differ, transformers 5.24 looks for it in the wrong place.
  if (!by_layer) rules.truncate = given.flag("truncate", true);
}

// Of numbers that fp32 does not have, or whose differences it rounds to 0, come infinite angles and none at all.
void check_numbers(const ConfigJson& given, const RotaryRules& rules) {
  const auto positions = static_cast<float>(rules.positions);
  const auto turns = [&](float frequency) { return std::isfinite(frequency * positions); };
  for (const std::uint32_t sequence : {1u, rules.positions + 1}) {
    if (!std::ranges::all_of(rotary_frequencies(rules, sequence), turns) ||
        !std::isfinite(static_cast<float>(rotary_attention_factor(rules))))
      given.refuse("holds numbers that no angle comes of");
  }
}

// `theta`: where `given` says none. by_layer: `given` is of some layers only.
RotaryRules read_rules(const ConfigJson& json, const ConfigJson& given, const DecoderConfig& model, double theta,
                       bool by_layer) {
  RotaryRules rules{.scaling = scaling_of(given, model.family), .rotated = rotated_of(json, given, model)};
  rules.theta = given.number("rope_theta", theta);
  if (!(rules.theta > 1)) given.refuse(fmt::format("\"rope_theta\" is {}, and must be above 1", rules.theta));
  rules.positions = model.positions;
  rules.original_positions = given.size("original_max_position_embeddings", model.positions);
  // Beside rope_parameters it counts before what is in them; Phi-3 always has it.
  if (!by_layer && (json.has("original_max_position_embeddings") || model.family == "phi3"))
    rules.original_positions = json.size("original_max_position_embeddings", 4096);
  switch (rules.scaling) {
    case RotaryScaling::kNone: break;
    case RotaryScaling::kDynamic:
      if (rules.rotated == 2) given.refuse("\"rope_type\" is \"dynamic\", which heads of 2 columns have none of");
      [[fallthrough]];
    case RotaryScaling::kLinear: rules.factor = at_least(given, "factor", 1); break;
    case RotaryScaling::kYarn: read_yarn(given, rules, by_layer); break;
    case RotaryScaling::kLlama3:
      rules.factor = at_least(given, "factor", 1);
      rules.low_freq_factor = at_least(given, "low_freq_factor", 0);
      rules.high_freq_factor = at_least(given, "high_freq_factor", 0);
      if (!(rules.high_freq_factor > rules.low_freq_factor && rules.low_freq_factor > 0))
        given.refuse("\"high_freq_factor\" must be above \"low_freq_factor\", and that above 0");
      break;
    case RotaryScaling::kLongRope:
      rules.factor = at_least(given, "factor", 0, static_cast<double>(rules.positions) / rules.original_positions);
      rules.short_factor = factors(given, "short_factor", rules.rotated);
      rules.long_factor = factors(given, "long_factor", rules.rotated);
      if (rules.original_positions < 2) given.refuse("\"original_max_position_embeddings\" is less than 2");
      break;
  }
  const bool may_scale = rules.scaling == RotaryScaling::kYarn || rules.scaling == RotaryScaling::kLongRope;
  if (may_scale && given.has("attention_factor")) rules.attention_factor = at_least(given, "attention_factor", 0);
  if (const auto unread = given.unread(); !unread.empty())
    given.refuse(fmt::format("\"{}\" is not known here", unread[0]), "Spillway would train another model without it");
  check_numbers(given, rules);
  return rules;
}

}  // namespace

std::vector<RotaryRules> read_rotary(const ConfigJson& json, const DecoderConfig& model) {
  const ConfigJson scaling = json.section("rope_scaling"), parameters = json.section("rope_parameters");
  const bool old = !scaling.unread().empty();
  if (old && !parameters.unread().empty())
    json.refuse("\"rope_scaling\" and \"rope_parameters\" are both there",
                "leave the one that the model was made with");
  if (model.family != "gemma3_text") {
    const double theta = json.number("rope_theta", 10000);
    return {read_rules(json, old ? scaling : parameters, model, theta, false)};
  }
  const ConfigJson full = parameters.section("full_attention"), sliding = parameters.section("sliding_attention");
  std::vector<RotaryRules> rules = {read_rules(json, old ? scaling : full, model, json.number("rope_theta", 1e6), true),
                                    read_rules(json, sliding, model, json.number("rope_local_base_freq", 1e4), true)};
  if (const auto unread = parameters.unread(); !unread.empty())
    parameters.refuse(fmt::format("\"{}\" is no kind of layer", unread[0]));
  return rules;
}

}  // namespace spillway::models
