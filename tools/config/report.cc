#include "tools/config/report.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>

#include "src/config/complaints.h"
#include "tools/terminal/json.h"

namespace spillway::config {
namespace {

using terminal::Json;

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
  if (!key.replaced.empty()) said += fmt::format(", in place of {}", key.replaced);
  if (!has_effect(*key.key)) said += fmt::format("; no effect: {}", key.key->doc);
  return said;
}

// Members of a section, and of the sections inside it, out of keys that are set.
void put_section(Json& json, std::string_view section, const EffectiveConfig& effective) {
  for (const auto& row : config_keys()) {
    if (parent_of(row.path) != section || !row.successor.empty()) continue;
    if (row.kind == KeyKind::kSection) {
      const std::string inside = std::string(row.path) + ".";
      const bool has_any = std::any_of(effective.keys.begin(), effective.keys.end(), [&](const EffectiveKey& key) {
        return has_effect(*key.key) && key.key->path.starts_with(inside) && !key.value.empty();
      });
      if (!has_any) continue;
      json.put(leaf_of(row.path), [&] { put_section(json, row.path, effective); });
      continue;
    }
    for (const EffectiveKey& key : effective.keys) {
      if (key.key == &row && !key.value.empty()) json.put_raw(leaf_of(row.path), key.value);
    }
  }
}

void put_key(Json& json, const EffectiveKey& key) {
  json.put("key", key.key->path);
  json.put_raw("value", key.value.empty() ? "null" : key.value);
  json.put("origin", name_of(key.origin));
  if (key.origin == Origin::kAuto && key.key->automatic.value != nullptr) json.put("auto", key.key->automatic.doc);
  if (!key.file.empty()) {
    json.put("file", key.file);
    json.put("line", key.line);
    json.put_raw("written", key.written);
    json.put("name", key.name);
  }
  json.put("effect", has_effect(*key.key));
  if (!has_effect(*key.key)) json.put("why", key.key->doc);
}

}  // namespace

std::string report_text(const EffectiveConfig& effective) {
  constexpr std::size_t kWidest = 24;  // of values; a longer one moves what stands after it
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
  Json json;
  json.put("config", [&] { put_section(json, "", effective); });
  json.list("keys", [&] {
    for (const EffectiveKey& key : effective.keys) json.item([&] { put_key(json, key); });
  });
  return json.text();
}

}  // namespace spillway::config
