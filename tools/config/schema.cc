#include "tools/config/schema.h"

#include <fmt/format.h>

#include <array>
#include <cctype>

#include "tools/config/describe.h"
#include "tools/config/json_text.h"

namespace spillway::config {
namespace {

void words(Json& json, const char* key, std::span<const std::string_view> all) {
  json.Key(key);
  json.StartArray();
  for (const std::string_view word : all) json.String(word.data(), static_cast<rapidjson::SizeType>(word.size()));
  json.EndArray();
}

void bounds(Json& json, const ConfigKey& key) {
  raw(json, "minimum", fmt::format("{}", key.least));
  if (key.most < 1e18) raw(json, key.below_most ? "exclusiveMaximum" : "maximum", fmt::format("{}", key.most));
  if (key.multiple_of > 1) raw(json, "multipleOf", std::to_string(key.multiple_of));
}

// A word in any case of letters, as the reader takes it: [Aa][Dd][Aa][Mm].
std::string any_case(std::string_view word) {
  std::string pattern;
  for (const char c : word) {
    const auto letter = static_cast<unsigned char>(c);
    pattern += std::isalpha(letter) ? fmt::format("[{}{}]", static_cast<char>(std::toupper(letter)),
                                                  static_cast<char>(std::tolower(letter)))
                                    : std::string(1, c);
  }
  return pattern;
}

void properties(Json& json, std::string_view section);

void section_value(Json& json, std::string_view section) {
  text(json, "type", "object");
  properties(json, section);
  json.Key("additionalProperties");
  json.Bool(false);
}

void array_of(Json& json, const char* type, const ConfigKey& key) {
  text(json, "type", "array");
  json.Key("items");
  json.StartObject();
  text(json, "type", type);
  if (key.kind != KeyKind::kTexts) bounds(json, key);
  json.EndObject();
}

// What is neither looked into nor on, however deep it says so. %24 is $, which some readers want escaped.
constexpr std::string_view kOffRule = R"({"properties": {"enabled": {"enum": [false, null, "auto"]}},)"
                                      R"( "additionalProperties": {"$ref": "#/%24defs/off"}})";

// What a key holds that is neither null nor "auto".
void plain_value(Json& json, const ConfigKey& key) {
  switch (key.kind) {
    case KeyKind::kSection: return section_value(json, key.path);
    case KeyKind::kBool: return text(json, "type", "boolean");
    case KeyKind::kText: return text(json, "type", "string");
    case KeyKind::kObject: return text(json, "type", "object");
    case KeyKind::kOff: text(json, "type", "object"); return raw(json, "allOf", R"([{"$ref": "#/%24defs/off"}])");
    case KeyKind::kTexts: return array_of(json, "string", key);
    case KeyKind::kNumbers: return array_of(json, "number", key);
    case KeyKind::kChoice: return words(json, "enum", choices_of(key.allowed));
    case KeyKind::kBytes:
    case KeyKind::kInteger: text(json, "type", "integer"); return bounds(json, key);
    case KeyKind::kNumber: text(json, "type", "number"); return bounds(json, key);
    case KeyKind::kPair:
      array_of(json, "number", key);
      raw(json, "minItems", "2");
      return raw(json, "maxItems", "2");
    case KeyKind::kSections:
      text(json, "type", "array");
      json.Key("items");
      json.StartObject();
      section_value(json, key.path);
      return static_cast<void>(json.EndObject());
  }
}

// Another way to write it.
void other_value(Json& json, const ConfigKey& key) {
  if (key.kind == KeyKind::kBytes) {
    json.StartObject();
    text(json, "type", "string");
    text(json, "pattern", "^[0-9]*(\\.[0-9]*)?[ ]*(B|KiB|MiB|GiB|TiB|KB|MB|GB|TB)?$");
    json.EndObject();
  }
  if (key.kind == KeyKind::kChoice) {
    std::string all;
    for (const std::string_view word : choices_of(key.allowed)) {
      all += fmt::format("{}{}", all.empty() ? "" : "|", any_case(word));
    }
    json.StartObject();
    text(json, "type", "string");
    text(json, "pattern", "^(" + all + ")$");
    json.EndObject();
  }
  if (takes_auto(key)) {
    json.StartObject();
    words(json, "enum", std::array<std::string_view, 1>{"auto"});
    json.EndObject();
  }
  if (key.nullable) {
    json.StartObject();
    text(json, "type", "null");
    json.EndObject();
  }
}

std::string description(const ConfigKey& key) {
  const bool section = key.kind == KeyKind::kSection || key.kind == KeyKind::kSections;
  std::string said = fmt::format("{}{}", has_effect(key) || section ? "" : "No effect here: ", key.doc);
  if (!key.only_for.empty()) said += fmt::format("; only for {}", list_of(choices_of(key.only_for)));
  if (key.automatic.value != nullptr) said += fmt::format("; \"auto\": {}", key.automatic.doc);
  if (!key.successor.empty()) said += fmt::format("; the key is now {}", key.successor);
  return said;
}

void key_value(Json& json, const ConfigKey& key) {
  json.StartObject();
  text(json, "description", description(key));
  if (!key.standard.empty()) raw(json, "default", key.standard);
  if (!key.successor.empty()) raw(json, "deprecated", "true");
  const bool more = key.kind == KeyKind::kBytes || key.kind == KeyKind::kChoice || key.nullable || takes_auto(key);
  if (more) {
    json.Key("anyOf");
    json.StartArray();
    json.StartObject();
    plain_value(json, key);
    json.EndObject();
    other_value(json, key);
    json.EndArray();
  } else {
    plain_value(json, key);
  }
  json.EndObject();
}

void properties(Json& json, std::string_view section) {
  json.Key("properties");
  json.StartObject();
  for (const ConfigKey* key : keys_of(section)) {
    const std::string name(leaf_of(key->path));
    json.Key(name.c_str());
    key_value(json, *key);
  }
  json.EndObject();
}

}  // namespace

std::string schema() {
  rapidjson::StringBuffer buffer;
  Json json(buffer);
  json.SetIndent(' ', 1);
  json.StartObject();
  text(json, "$schema", "https://json-schema.org/draft/2020-12/schema");
  text(json, "title", "Spillway's configuration, a DeepSpeed-style ds_config.json");
  section_value(json, "");
  json.Key("$defs");
  json.StartObject();
  raw(json, "off", kOffRule);
  json.EndObject();
  json.EndObject();
  return buffer.GetString();
}

}  // namespace spillway::config
