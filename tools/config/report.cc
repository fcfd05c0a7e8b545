#include "tools/config/report.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>

#include "src/config/complaints.h"
#include "tools/config/json_text.h"

namespace spillway::config {
namespace {

std::string_view name_of(Origin origin) {
  switch (origin) {
    case Origin::kDefault: return "default";
    case Origin::kDerived: return "derived";
    case Origin::kFile: return "file";
    case Origin::kOverlay: return "sweep";
    case Origin::kAuto: return "auto";
  }
  return "?";
}

std::string origin_text(const EffectiveKey& key) {
  const std::string place = fmt::format("{}:{}", key.file, key.line);
  std::string said;
  switch (key.origin) {
    case Origin::kDefault: said = key.value.empty() ? "not set" : "default"; break;
    case Origin::kDerived: said = "from other keys"; break;
    case Origin::kFile: said = place; break;
    case Origin::kOverlay: said = "sweep " + place; break;
    case Origin::kAuto: {
      const bool planned = key.value.empty() && has_effect(*key.key);
      said = fmt::format("auto {}: {}", place,
                         planned || key.key->automatic.value == nullptr ? "left to the plan" : key.key->automatic.doc);
      break;
    }
  }
  if (key.name != key.key->path) said += fmt::format(", as {}", key.name);
  const bool rewritten = key.origin != Origin::kAuto && !key.written.empty() && key.written != key.value;
  if (rewritten && key.name == key.key->path) said += fmt::format(", as {}", key.written);
  if (!has_effect(*key.key)) said += fmt::format("; no effect: {}", key.key->doc);
  return said;
}

// Members of a section, and of the sections inside it, out of keys that are set.
void write_section(Json& json, std::string_view section, const EffectiveConfig& effective) {
  json.StartObject();
  for (const auto& row : config_keys()) {
    if (parent_of(row.path) != section || !row.successor.empty()) continue;
    if (row.kind == KeyKind::kSection) {
      const std::string inside = std::string(row.path) + ".";
      const bool has_any = std::any_of(effective.keys.begin(), effective.keys.end(), [&](const EffectiveKey& key) {
        return has_effect(*key.key) && key.key->path.starts_with(inside) && !key.value.empty();
      });
      if (!has_any) continue;
      add_key(json, leaf_of(row.path));
      write_section(json, row.path, effective);
      continue;
    }
    for (const EffectiveKey& key : effective.keys) {
      if (key.key == &row && !key.value.empty()) raw(json, leaf_of(row.path), key.value);
    }
  }
  json.EndObject();
}

}  // namespace

std::string report_text(const EffectiveConfig& effective) {
  constexpr std::size_t kWidest = 24;  // of values; a longer one moves what stands behind it
  std::size_t keys = 0, values = 0;
  for (const EffectiveKey& key : effective.keys) {
    keys = std::max(keys, key.key->path.size());
    if (key.value.size() <= kWidest) values = std::max(values, key.value.size());
  }
  std::string report;
  for (const EffectiveKey& key : effective.keys) {
    fmt::format_to(std::back_inserter(report), "{:<{}}  {:<{}}  {}\n", key.key->path, keys,
                   key.value.empty() ? "-" : shown_text(key.value), values, shown_text(origin_text(key)));
  }
  return report;
}

std::string report_json(const EffectiveConfig& effective) {
  rapidjson::StringBuffer buffer;
  Json json(buffer);
  json.SetIndent(' ', 2);
  json.StartObject();
  json.Key("config");
  write_section(json, "", effective);
  json.Key("keys");
  json.StartArray();
  for (const EffectiveKey& key : effective.keys) {
    json.StartObject();
    text(json, "key", key.key->path);
    raw(json, "value", key.value.empty() ? "null" : key.value);
    text(json, "origin", name_of(key.origin));
    if (key.origin == Origin::kAuto && key.key->automatic.value != nullptr) text(json, "auto", key.key->automatic.doc);
    if (!key.file.empty()) {
      text(json, "file", key.file);
      raw(json, "line", std::to_string(key.line));
      raw(json, "written", key.written);
      text(json, "name", key.name);
    }
    raw(json, "effect", has_effect(*key.key) ? "true" : "false");
    if (!has_effect(*key.key)) text(json, "why", key.key->doc);
    json.EndObject();
  }
  json.EndArray();
  json.EndObject();
  return buffer.GetString();
}

}  // namespace spillway::config
