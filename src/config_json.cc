#include <algorithm>
#include <map>
#include <span>
#include <string>
#include <vector>

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

// A text that is wrong everywhere is not a configuration: what is said of it, and the time to find it out, are bounded.
constexpr std::size_t kMostComplaints = 100;

struct Complaint {
  std::size_t offset = 0;
  std::string what, hint;
};

// A text and its name. Offsets of the text that lies over another one are counted on from the end of that one, so that
// one number says file, line and column.
struct Source {
  std::string_view text;
  const std::string& name;
  std::size_t base = 0;
};

// One Error whose text has a line per complaint, in the order of the texts.
[[noreturn]] void throw_complaints(std::vector<Complaint> complaints, std::span<const Source> sources) {
  std::stable_sort(complaints.begin(), complaints.end(),
                   [](const Complaint& a, const Complaint& b) { return a.offset < b.offset; });
  const auto place = [&](const Complaint& complaint) {
    const Source& source = complaint.offset < sources.back().base ? sources.front() : sources.back();
    const TextPosition at = position_of(source.text, complaint.offset - source.base);
    return fmt::format("{}:{}:{}", source.name, at.line, at.column);
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
  if (complaints.size() >= kMostComplaints) {
    parts.happened += fmt::format("\n{}: what follows was not looked at", sources.back().name);
    parts.hint = "correct these first";
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
  // Reads one text, or a second one over it. False: it is no JSON object, and nothing more is to be learned from it.
  bool read(std::string_view text, const std::string& name) {
    // One more than the text has: a complaint about its end is still about this text.
    const std::size_t base = sources_.empty() ? 0 : sources_.back().text.size() + 1;
    sources_.push_back({text, name, base});
    JsonValue root;
    if (const auto problem = parse_json(text, {}, root)) {
      complain(problem->offset, problem->what, "correct the text there, or just before");
      return false;
    }
    if (root.kind != JsonValue::Kind::kObject) {
      complain(root.offset, "a configuration is a JSON object", "write {\"train_batch_size\": …}");
      return false;
    }
    if (base == 0) places_[""] = root.offset;
    read_section("", root);
    return true;
  }

  Config finish(bool all_read) {
    if (all_read && complaints_.size() < kMostComplaints) {
      settle_config(draft_, places_, [&](std::string_view path, std::string what, std::string hint) {
        const auto at = places_.find(path);
        complaints_.push_back({at == places_.end() ? places_[""] : at->second,
                               path.empty() ? what : fmt::format("{}: {}", path, what), std::move(hint)});
      });
    }
    if (!complaints_.empty()) throw_complaints(std::move(complaints_), sources_);
    for (const auto& [name, keys] : without_effect_) {
      log(LogLevel::kInfo, fmt::format("{}: known, but without effect here: {}", name, list_of(keys)));
    }
    return draft_.config;
  }

 private:
  void read_section(std::string_view section, const JsonValue& object) {
    std::map<std::string_view, std::size_t> first_use;
    for (std::size_t i = 0; i < object.items.size() && complaints_.size() < kMostComplaints; ++i) {
      const JsonKey& key = object.keys[i];
      const std::string path = section.empty() ? key.name : fmt::format("{}.{}", section, key.name);
      const auto [first, is_new] = first_use.emplace(key.name, key.offset);
      if (!is_new) {
        const TextPosition at = position_of(sources_.back().text, first->second);
        complain(key.offset, fmt::format("duplicate key \"{}\"", path),
                 fmt::format("it stands in line {} already", at.line));
        continue;
      }
      // A dot inside a name must not reach another section's row.
      const ConfigKey* row = key.name.find('.') == std::string::npos ? find_config_key(path) : nullptr;
      if (row == nullptr) {
        complain(key.offset, fmt::format("unknown key \"{}\"", path), hint_for(section, key.name));
        continue;
      }
      if (sources_.size() > 1 && section.empty() && path != "aio" && path != "spillway") {
        complain(key.offset, fmt::format("\"{}\" in a file that goes over a configuration", path),
                 "it may hold the sections aio and spillway; the rest belongs into the configuration");
        continue;
      }
      read_key(*row, object.items[i]);
    }
  }

  void read_key(const ConfigKey& row, const JsonValue& value) {
    // "auto" in these keys is harmless, whoever was to fill it in.
    const bool is_auto = value.kind == JsonValue::Kind::kString && value.text == "auto";
    const bool effect = row.set != nullptr || row.kind == KeyKind::kSection;
    if (row.nullable && value.kind == JsonValue::Kind::kNull) return;
    if (!effect || (row.automatic && is_auto)) {
      without_effect_[sources_.back().name].emplace_back(row.path);
      if (is_auto) return;
    }
    places_.insert_or_assign(std::string(row.path), sources_.back().base + value.offset);
    KeyValue out;
    if (const auto problem = read_value(row, value, out)) {
      complain(value.offset, fmt::format("{}: {}", row.path, problem->what), problem->hint);
    } else if (row.kind == KeyKind::kSection) {
      read_section(row.path, value);
    } else if (row.kind == KeyKind::kSections) {
      read_sections(row, value);
    } else if (row.set != nullptr) {
      row.set(draft_, out);
      if (sources_.size() > 1 && row.path == "spillway.nvme_paths") forget_single_path();
    }
  }

  void read_sections(const ConfigKey& row, const JsonValue& array) {
    KeyValue all, each;
    all.flag = true;
    row.set(draft_, all);
    for (const JsonValue& item : array.items) {
      if (complaints_.size() >= kMostComplaints) return;
      if (item.kind != JsonValue::Kind::kObject) {
        complain(item.offset, fmt::format("{}: expected an array of objects", row.path), "write [{…}, {…}]");
        continue;
      }
      row.set(draft_, each);
      read_section(row.path, item);
    }
  }

  // Paths that lie over a configuration are where the store goes, whatever single path it names.
  void forget_single_path() {
    for (auto* path : {&draft_.states_path, &draft_.parameters_path}) path->reset();
    for (const char* section : {"offload_optimizer", "offload_param"}) {
      places_.erase(fmt::format("zero_optimization.{}.nvme_path", section));
    }
  }

  void complain(std::size_t offset, std::string what, std::string hint) {
    complaints_.push_back({sources_.back().base + offset, std::move(what), std::move(hint)});
  }

  std::vector<Source> sources_;
  ConfigDraft draft_;
  KeyPlaces places_;
  std::vector<Complaint> complaints_;
  std::map<std::string, std::vector<std::string_view>> without_effect_;  // by source
};

}  // namespace

Config config_from_json(std::string_view text, const std::string& name) {
  ConfigReader reader;
  const bool read = reader.read(text, name);
  return reader.finish(read);
}

Config load_config(const std::filesystem::path& file, const std::filesystem::path& overlay) {
  constexpr std::uint64_t kLargest = 4 << 20;  // a configuration is a few KB; anything near this is another file
  const std::string text = read_text(file, kLargest), name = file.string();
  if (overlay.empty()) return config_from_json(text, name);
  const std::string over_text = read_text(overlay, kLargest), over_name = overlay.string();
  ConfigReader reader;
  const bool read = reader.read(text, name), over_read = reader.read(over_text, over_name);
  return reader.finish(read && over_read);
}

}  // namespace spillway
