#include "src/config/reader.h"

#include <algorithm>
#include <map>
#include <utility>

#include <fmt/format.h>

#include "spillway/error.h"
#include "spillway/log.h"
#include "src/config/check.h"
#include "src/config/complaints.h"
#include "src/config/hint.h"
#include "src/config/hjson.h"
#include "src/config/place.h"
#include "src/formats/plain_file.h"

namespace spillway {
namespace {

bool is_container(const JsonValue& value) {
  return value.kind == JsonValue::Kind::kObject || value.kind == JsonValue::Kind::kArray;
}

// A value in one line, numbers as they were written.
std::string one_line(const JsonValue& value, std::string_view text) {
  if (value.kind == JsonValue::Kind::kString) return json_string(value.text);
  if (!is_container(value)) return std::string(text.substr(value.offset, value.end - value.offset));
  const bool object = value.kind == JsonValue::Kind::kObject;
  std::string items;
  for (std::size_t i = 0; i < value.items.size(); ++i) {
    if (i > 0) items += ", ";
    if (object) items += json_string(value.keys[i].name) + ": ";
    items += one_line(value.items[i], text);
  }
  return object ? "{" + items + "}" : "[" + items + "]";
}

// Both JSON; a number is the same however it is written.
bool same_value(const std::string& a, std::string_view b) {
  JsonValue x, y;
  if (a == b) return true;
  if (parse_json(a, {}, x) || parse_json(b, {}, y) || x.items.size() != y.items.size()) return false;
  if (x.kind == JsonValue::Kind::kNumber) return y.kind == x.kind && x.number == y.number;
  if (x.kind != JsonValue::Kind::kArray) return false;
  for (std::size_t i = 0; i < x.items.size(); ++i) {
    if (x.items[i].number != y.items[i].number) return false;
  }
  return !x.items.empty();
}

class ConfigReader {
 public:
  ConfigReader(const AutoValues& automatic, std::uint32_t ranks) : autos_(automatic) { draft_.ranks = ranks; }

  // Reads one text, or a second one over it. False: it is no JSON object from end to end, and what keys say together
  // is not to be learned from it.
  bool read(const ConfigText& input) {
    std::string_view text = input.text;
    if (text.starts_with("\xef\xbb\xbf")) text.remove_prefix(3);  // some editors begin UTF-8 with a byte order mark
    complaints_.add_source(text, input.name);
    JsonValue root;
    const auto problem = parse_json(text, {}, root);
    if (problem) complain_syntax(*problem);
    if (root.kind != JsonValue::Kind::kObject) {
      if (!problem) {
        complain(root.offset, root.offset + 1, "a configuration is a JSON object", "write {\"train_batch_size\": …}");
      }
      return false;
    }
    if (!complaints_.overlaid()) places_[""] = {.offset = root.offset, .end = root.offset + 1};
    read_section("", root);
    return !problem;
  }

  EffectiveConfig finish(bool all_read) {
    if (all_read && !complaints_.full()) {
      finalize_config(draft_, places_, [&](std::string_view path, std::string what, Hint hint) {
        const auto at = places_.find(path);
        const WrittenKey& key = at == places_.end() ? places_[""] : at->second;
        complaints_.add(key.offset, key.end, path.empty() ? what : fmt::format("{}: {}", path, what), std::move(hint));
      });
    }
    if (!complaints_.empty()) complaints_.raise();
    draft_.config.optimizer_left_out = !places_.contains("optimizer");
    EffectiveConfig effective{.config = draft_.config, .keys = {}};
    for (const ConfigKey& key : config_keys()) {
      if (is_listed(key, draft_.config)) effective.keys.push_back(effective_key(key));
    }
    for (const ConfigKey* key : without_effect_) effective.keys.push_back(effective_key(*key));
    return effective;
  }

 private:
  void read_section(std::string_view section, const JsonValue& object) {
    std::map<std::string_view, std::size_t> first_use;
    const bool foreign = is_of_refused_type(section, object);
    for (std::size_t i = 0; i < object.items.size() && !complaints_.full(); ++i) {
      const JsonKey& key = object.keys[i];
      const std::string path = section.empty() ? key.name : fmt::format("{}.{}", section, key.name);
      const auto [first, is_new] = first_use.emplace(key.name, key.offset);
      if (!is_new) {
        const TextPosition at = position_of(complaints_.source().text, first->second);
        complain(key.offset, key.end, fmt::format("duplicate key \"{}\"", path),
                 fmt::format("it stands in line {} already", at.line));
        continue;
      }
      // A dot inside a name must not reach another section's row.
      const ConfigKey* row = key.name.find('.') == std::string::npos ? find_config_key(path) : nullptr;
      if (row == nullptr) {
        complain(key.offset, key.end, fmt::format("unknown key \"{}\"", path), hint_for_unknown(section, key.name));
      } else if (complaints_.overlaid() && section.empty() && path != "aio" && path != "spillway") {
        complain(key.offset, key.end, fmt::format("\"{}\" in a file that goes over a configuration", path),
                 "it may hold the sections aio and spillway; the rest belongs into the configuration");
      } else if (!foreign || key.name != "params") {
        read_key(*row, object.items[i]);
      }
    }
  }

  // Of a type that cannot be had here, whose parameters have no rows.
  static bool is_of_refused_type(std::string_view section, const JsonValue& object) {
    const JsonValue* type = object.member("type");
    const ConfigKey* row = find_config_key(fmt::format("{}.type", section));
    if (type == nullptr || row == nullptr) return false;
    const auto words = choices_of(row->refused);
    return std::any_of(words.begin(), words.end(), [&](std::string_view word) { return same_word(word, type->text); });
  }

  void read_key(const ConfigKey& row, const JsonValue& value) {
    if (row.nullable && value.kind == JsonValue::Kind::kNull) {
      draft_.nulls.insert(row.path);
      return;
    }
    // Cut short by an error that was reported.
    if (is_container(value) && value.end == 0 && row.kind != KeyKind::kSection) return;
    const bool automatic = value.kind == JsonValue::Kind::kString && value.text == "auto" && takes_auto(row);
    const std::size_t base = complaints_.source().base, end = is_container(value) ? value.offset + 1 : value.end;
    places_.insert_or_assign(std::string(row.path), WrittenKey{base + value.offset, base + end, automatic});
    if (row.kind != KeyKind::kSection) written_[row.path] = one_line(value, complaints_.source().text);
    if (row.kind != KeyKind::kSection && !has_effect(row)) without_effect_.push_back(&row);
    if (!automatic) return take(row, value);
    JsonValue filled;
    const std::string stands_for = row.automatic.value != nullptr ? row.automatic.value(autos_) : "";
    if (stands_for.empty() || parse_json(stands_for, {}, filled)) return;
    values_[row.path] = stands_for;
    filled.offset = value.offset;
    filled.end = value.end;
    take(row, filled);
  }

  // true or false where a section stands, which is older and still DeepSpeed's.
  void take_flag(const ConfigKey& row, JsonValue value) {
    value.kind = JsonValue::Kind::kNumber;
    value.integer = value.flag ? 1 : 0;
    value.number = value.flag ? 1 : 0;
    read_key(*find_config_key(row.flag_of), value);
  }

  void take(const ConfigKey& row, const JsonValue& value) {
    if (!row.flag_of.empty() && value.kind == JsonValue::Kind::kBool) return take_flag(row, value);
    KeyValue out;
    const auto problem = read_value(row, value, out);
    if (!problem && row.kind == KeyKind::kInteger) values_[row.path] = std::to_string(out.integer);
    if (problem) {
      complain(value.offset, is_container(value) ? value.offset + 1 : value.end,
               fmt::format("{}: {}", row.path, problem->what), problem->hint);
    } else if (row.kind == KeyKind::kSection) {
      read_section(row.path, value);
    } else if (row.kind == KeyKind::kSections) {
      read_sections(row, value);
    } else if (has_effect(row)) {
      const bool paths = row.path == "spillway.nvme_paths", rates = row.path == "spillway.nvme_rates";
      if (complaints_.overlaid() && (paths || rates) && !has_store()) return leave_out(row);
      if (complaints_.overlaid() && paths) replace_paths(out.texts);
      row.place.set(draft_, out);
    }
  }

  void read_sections(const ConfigKey& row, const JsonValue& array) {
    KeyValue all, each;
    all.flag = true;
    row.place.set(draft_, all);
    for (const JsonValue& item : array.items) {
      if (complaints_.full()) return;
      if (item.kind != JsonValue::Kind::kObject) {
        complain(item.offset, item.end, fmt::format("{}: expected an array of objects", row.path), "write [{…}, {…}]");
        continue;
      }
      row.place.set(draft_, each);
      read_section(row.path, item);
    }
  }

  bool has_store() const {
    const auto on_nvme = [](Placement home) { return home == Placement::kNvme; };
    return draft_.nvme_paths || on_nvme(draft_.config.states) || on_nvme(draft_.config.parameters);
  }

  // What a sweep found of drives makes no store for a configuration that has none.
  void leave_out(const ConfigKey& row) {
    places_.erase(std::string(row.path));
    if (row.kind != KeyKind::kTexts) return;
    log(LogLevel::kWarning, fmt::format("{}: spillway.nvme_paths is not used: no device of the configuration is nvme; "
                                        "name the paths in its own section \"spillway\" for a store of what stays in "
                                        "memory",
                                        complaints_.source().name));
  }

  // Paths that lie over a configuration are where the store goes, whatever paths it names itself.
  void replace_paths(const std::vector<std::string>& by) {
    std::vector<std::string> before = draft_.nvme_paths.value_or(std::vector<std::string>());
    const Config& config = draft_.config;
    for (const auto& [home, single] :
         {std::pair(config.states, &draft_.states_path), std::pair(config.parameters, &draft_.parameters_path)}) {
      if (before.empty() && home == Placement::kNvme && !single->value_or("").empty()) before = {**single};
    }
    if (!before.empty() && before != by) replaced_paths_ = before.size() == 1 ? json_of(before[0]) : json_of(before);
    for (auto* path : {&draft_.states_path, &draft_.parameters_path}) path->reset();
    for (const char* section : {"offload_optimizer", "offload_param"}) {
      places_.erase(fmt::format("zero_optimization.{}.nvme_path", section));
    }
  }

  void complain(std::size_t offset, std::size_t end, std::string what, Hint hint) {
    const std::size_t base = complaints_.source().base;
    complaints_.add(base + offset, base + end, std::move(what), std::move(hint));
  }

  void complain_syntax(const JsonProblem& problem) {
    if (const auto advice = hjson_advice(complaints_.source().text, problem)) {
      complain(advice->offset, advice->end, advice->what, advice->hint);
    } else {
      complain(problem.offset, problem.offset + 1, problem.what, "correct the text there, or just before");
    }
  }

  EffectiveKey effective_key(const ConfigKey& key) const {
    EffectiveKey effective{.key = &key, .value = {}, .name = key.path, .written = {}, .file = {}, .replaced = {}};
    if (key.place.show != nullptr) effective.value = key.place.show(draft_.config);
    if (key.path == "train_batch_size") effective.value = json_of(rows_of_all_ranks());  // a Config is of one
    const std::string_view name = name_in_file(key);
    const auto at = places_.find(name);
    if (at == places_.end()) {
      const bool standard = key.standard.empty() ? effective.value.empty() : same_value(effective.value, key.standard);
      effective.origin = standard ? Origin::kDefault : Origin::kDerived;
      return effective;
    }
    const ConfigSource& source = complaints_.source_of(at->second.offset);
    effective.name = name;
    effective.written = written_.at(name);
    effective.file = source.name;
    effective.line = position_of(source.text, at->second.offset - source.base).line;
    effective.origin = at->second.automatic ? Origin::kAuto : source.base > 0 ? Origin::kOverlay : Origin::kFile;
    if (key.path == "spillway.nvme_paths") effective.replaced = replaced_paths_;
    if (key.place.show != nullptr) return effective;
    const auto value = values_.find(name);
    if (!at->second.automatic) effective.value = effective.written;
    if (value != values_.end()) effective.value = value->second;
    return effective;
  }

  std::uint64_t rows_of_all_ranks() const {
    return std::uint64_t{draft_.config.micro_batch} * draft_.config.gradient_accumulation * draft_.ranks;
  }

  // The key's own, or the other name of it that the file has.
  std::string_view name_in_file(const ConfigKey& key) const {
    if (places_.contains(key.path)) return key.path;
    for (const ConfigKey& other : config_keys()) {
      if (other.successor == key.path && places_.contains(other.path)) return other.path;
    }
    return key.path;
  }

  const AutoValues autos_;
  Complaints complaints_;
  ConfigDraft draft_;
  KeyPlaces places_;
  std::string replaced_paths_;  // as JSON
  // As JSON: what stands in the text, and of whole numbers and of "auto" what that is.
  std::map<std::string_view, std::string> written_, values_;
  std::vector<const ConfigKey*> without_effect_;
};

}  // namespace

EffectiveConfig read_config(std::span<const ConfigText> texts, const AutoValues& automatic, std::uint32_t ranks) {
  SPILLWAY_CHECK(texts.size() == 1 || texts.size() == 2, "a configuration, and what goes over it");
  ConfigReader reader(automatic, ranks);
  bool all_read = true;
  for (const ConfigText& text : texts) all_read = reader.read(text) && all_read;
  return reader.finish(all_read);
}

EffectiveConfig read_config_files(const std::filesystem::path& file, const std::filesystem::path& overlay,
                                  const AutoValues& automatic, std::uint32_t ranks) {
  constexpr std::uint64_t kLargest = 4 << 20;  // a configuration is a few KB; anything near this is another file
  std::vector<std::string> contents{read_text(file, kLargest)};
  if (!overlay.empty()) contents.push_back(read_text(overlay, kLargest));
  std::vector<ConfigText> texts{{contents[0], file.string()}};
  if (!overlay.empty()) texts.push_back({contents[1], overlay.string()});
  return read_config(texts, automatic, ranks);
}

}  // namespace spillway
