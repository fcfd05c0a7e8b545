#include <rapidjson/stringbuffer.h>
#include <rapidjson/writer.h>

#include <algorithm>
#include <cctype>

#include "src/config/table.h"

namespace spillway {

const ConfigKey* find_config_key(std::string_view path) {
  for (const auto& table : {config_keys(), config_keys_without_effect()}) {
    for (const ConfigKey& key : table) {
      if (key.path == path) return &key;
    }
  }
  return nullptr;
}

bool has_effect(const ConfigKey& key) { return key.place.set != nullptr; }

bool is_listed(const ConfigKey& key, const Config& config) {
  const ConfigKey* parent = find_config_key(parent_of(key.path));
  const bool in_group = parent != nullptr && parent->kind == KeyKind::kSections;
  if (key.kind == KeyKind::kSection || in_group || !key.successor.empty()) return false;
  const bool scheduled = config.schedule.kind != ScheduleKind::kConstant;
  if (key.path.starts_with("scheduler.params.") && !scheduled) return false;
  if (key.path.starts_with("spillway.lora.") && !config.lora.given()) return false;
  if (key.only_for.empty()) return true;
  const ConfigKey* type = find_config_key(key.path.starts_with("optimizer.") ? "optimizer.type" : "scheduler.type");
  const std::string now = type->place.show(config);
  const auto types = choices_of(key.only_for);
  return std::ranges::any_of(types, [&](std::string_view word) { return json_string(word) == now; });
}

std::string values_of_all_ranks(const Config& config) {
  std::string values;
  for (const ConfigKey& key : config_keys()) {
    if (key.of_rank || key.place.show == nullptr) continue;
    values.append(key.path).append(" ").append(key.place.show(config)).append("\n");
  }
  return values;
}

bool takes_auto(const ConfigKey& key) {
  if (key.automatic.value != nullptr) return true;
  if (key.kind == KeyKind::kSection) return false;
  const std::string_view top = key.path.substr(0, key.path.find('.'));
  return top == "zero_optimization" || top == "fp16" || top == "bf16";
}

std::string_view parent_of(std::string_view path) {
  const std::size_t dot = path.rfind('.');
  return dot == std::string_view::npos ? std::string_view{} : path.substr(0, dot);
}

std::string_view leaf_of(std::string_view path) { return path.substr(path.rfind('.') + 1); }  // npos + 1 is 0

std::vector<std::string_view> choices_of(std::string_view allowed) {
  std::vector<std::string_view> words;
  while (!allowed.empty()) {
    const std::size_t bar = std::min(allowed.find('|'), allowed.size());
    words.push_back(allowed.substr(0, bar));
    allowed.remove_prefix(std::min(bar + 1, allowed.size()));
  }
  return words;
}

std::string list_of(std::span<const std::string_view> words) {
  std::string list;
  for (const std::string_view word : words) list += (list.empty() ? "" : ", ") + std::string(word);
  return list;
}

bool same_word(std::string_view a, std::string_view b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](unsigned char x, unsigned char y) { return std::tolower(x) == std::tolower(y); });
}

std::string json_string(std::string_view text) {
  rapidjson::StringBuffer buffer;
  rapidjson::Writer<rapidjson::StringBuffer> writer(buffer);
  writer.String(std::string(text));
  return {buffer.GetString(), buffer.GetSize()};
}

}  // namespace spillway
