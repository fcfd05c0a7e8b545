#include <algorithm>
#include <map>

#include <fmt/format.h>

#include "spillway/config.h"
#include "spillway/error.h"
#include "spillway/log.h"
#include "src/closest_key.h"
#include "src/config_check.h"
#include "src/config_table.h"
#include "src/json_tree.h"
#include "src/plain_file.h"

namespace spillway {
namespace {

struct Complaint {
  std::size_t offset = 0;
  std::string what, hint;
};

// One Error whose text has a line per complaint, in the order of the text.
[[noreturn]] void throw_complaints(std::vector<Complaint> complaints, std::string_view text, const std::string& name) {
  std::stable_sort(complaints.begin(), complaints.end(),
                   [](const Complaint& a, const Complaint& b) { return a.offset < b.offset; });
  const auto place = [&](const Complaint& complaint) {
    const TextPosition at = position_of(text, complaint.offset);
    return fmt::format("{}:{}:{}", name, at.line, at.column);
  };
  ErrorParts parts{.object = place(complaints[0]), .happened = complaints[0].what, .hint = complaints[0].hint};
  if (complaints.size() > 1) {
    // Error puts object and text together for the first line; the others follow in the same form.
    if (!parts.hint.empty()) parts.happened += "; " + parts.hint;
    parts.hint.clear();
    for (auto next = complaints.begin() + 1; next != complaints.end(); ++next) {
      parts.happened +=
          fmt::format("\n{}: {}{}{}", place(*next), next->what, next->hint.empty() ? "" : "; ", next->hint);
    }
  }
  throw Error(Code::kInvalidArgument, std::move(parts));
}

std::string_view parent_of(std::string_view path) {
  const std::size_t dot = path.rfind('.');
  return dot == std::string_view::npos ? std::string_view{} : path.substr(0, dot);
}

std::string_view leaf_of(std::string_view path) { return path.substr(path.rfind('.') + 1); }  // npos + 1 is 0

// The keys of a section, those that decide something first.
std::vector<std::string_view> leaves_of(std::string_view section, bool all) {
  std::vector<std::string_view> leaves;
  for (const auto& table : {config_keys(), config_keys_without_effect()}) {
    for (const ConfigKey& key : table) {
      if (parent_of(key.path) == section) leaves.push_back(leaf_of(key.path));
    }
    if (!all) break;
  }
  return leaves;
}

// A word for an unknown key: the nearest one in its section, else the same key elsewhere (aio put into
// zero_optimization is the classic), else what the section knows.
std::string hint_for(std::string_view section, std::string_view leaf) {
  if (const auto near = closest(leaf, leaves_of(section, true)); !near.empty())
    return fmt::format("closest key: {}", near);
  for (const ConfigKey& key : config_keys()) {
    if (leaf_of(key.path) == leaf) return fmt::format("closest key: {}", key.path);
  }
  return "known keys: " + list_of(leaves_of(section, false));
}

class ConfigReader {
 public:
  ConfigReader(std::string_view text, const std::string& name) : text_(text), name_(name) {}

  Config read() {
    JsonValue root;
    if (const auto problem = parse_json(text_, {}, root)) {
      complaints_.push_back({problem->offset, problem->what, "correct the text there, or just before"});
    }
    if (complaints_.empty() && root.kind != JsonValue::Kind::kObject) {
      complaints_.push_back({root.offset, "a configuration is a JSON object", "write {\"train_batch_size\": …}"});
    }
    if (complaints_.empty()) {
      places_[""] = root.offset;
      read_section("", root);
      settle_config(draft_, places_, [&](std::string_view path, std::string what, std::string hint) {
        const auto at = places_.find(path);
        complaints_.push_back({at == places_.end() ? places_[""] : at->second,
                               path.empty() ? what : fmt::format("{}: {}", path, what), std::move(hint)});
      });
    }
    if (!complaints_.empty()) throw_complaints(std::move(complaints_), text_, name_);
    if (!without_effect_.empty()) {
      log(LogLevel::kInfo, fmt::format("{}: known, but without effect here: {}", name_, list_of(without_effect_)));
    }
    return draft_.config;
  }

 private:
  void read_section(std::string_view section, const JsonValue& object) {
    std::map<std::string_view, std::size_t> first_use;
    for (std::size_t i = 0; i < object.items.size(); ++i) {
      const JsonKey& key = object.keys[i];
      const std::string path = section.empty() ? key.name : fmt::format("{}.{}", section, key.name);
      const auto [first, is_new] = first_use.emplace(key.name, key.offset);
      if (!is_new) {
        complaints_.push_back({key.offset, fmt::format("duplicate key \"{}\"", path),
                               fmt::format("it stands in line {} already", position_of(text_, first->second).line)});
        continue;
      }
      // A dot inside a name must not reach another section's row.
      const ConfigKey* row = key.name.find('.') == std::string::npos ? find_config_key(path) : nullptr;
      if (row == nullptr) {
        complaints_.push_back({key.offset, fmt::format("unknown key \"{}\"", path), hint_for(section, key.name)});
        continue;
      }
      read_key(*row, object.items[i]);
    }
  }

  void read_key(const ConfigKey& row, const JsonValue& value) {
    const bool effect = row.set != nullptr || row.kind == KeyKind::kSection;
    if (row.nullable && value.kind == JsonValue::Kind::kNull) return;
    if (!effect) {
      without_effect_.emplace_back(row.path);
      // "auto" in these keys is harmless, whoever was to fill it in.
      if (value.kind == JsonValue::Kind::kString && value.text == "auto") return;
    }
    places_.emplace(row.path, value.offset);
    KeyValue out;
    if (const auto problem = read_value(row, value, out)) {
      complaints_.push_back({value.offset, fmt::format("{}: {}", row.path, problem->what), problem->hint});
    } else if (row.kind == KeyKind::kSection) {
      read_section(row.path, value);
    } else if (row.set != nullptr) {
      row.set(draft_, out);
    }
  }

  std::string_view text_;
  const std::string& name_;
  ConfigDraft draft_;
  KeyPlaces places_;
  std::vector<Complaint> complaints_;
  std::vector<std::string_view> without_effect_;
};

}  // namespace

Config config_from_json(std::string_view text, const std::string& name) { return ConfigReader(text, name).read(); }

Config load_config(const std::filesystem::path& file) {
  constexpr std::uint64_t kLargest = 4 << 20;  // a configuration is a few KB; anything near this is another file
  return config_from_json(read_text(file, kLargest), file.string());
}

}  // namespace spillway
