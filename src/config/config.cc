#include <fmt/format.h>

#include <map>
#include <string>

#include "spillway/config.h"
#include "spillway/log.h"
#include "src/config/reader.h"

namespace spillway {
namespace {

void append(std::string& list, std::string_view item, std::string_view between = "; ") {
  if (!list.empty()) list += between;
  list += item;
}

// What no text is read for where nobody trains: how many rows and steps there are.
bool is_of_training(std::string_view path) {
  return path.starts_with("train_") || path == "gradient_accumulation_steps" || path.starts_with("scheduler.");
}

// What a run should not find out by surprise: keys that do nothing, names of another time, what "auto" became, and what
// an overlay has decided. A sweep writes its overlay for DeepSpeed as well, with keys of that queue.
void log_notes(const EffectiveConfig& effective, std::uint32_t ranks) {
  struct Notes {
    std::string idle, automatic, planned, renamed, overlaid;
  };
  std::map<std::string, Notes> notes;  // by file
  for (const EffectiveKey& key : effective.keys) {
    if (key.file.empty()) continue;
    Notes& of_file = notes[key.file];
    const std::string_view successor = key.name != key.key->path ? key.key->path : key.key->successor;
    if (!successor.empty()) append(of_file.renamed, fmt::format("{}, now {}", key.name, successor));
    const bool overlaid = key.origin == Origin::kOverlay;
    if (!has_effect(*key.key)) {
      if (!overlaid || !key.name.starts_with("aio.")) append(of_file.idle, key.name, ", ");
    } else if (overlaid) {
      const std::string instead = key.replaced.empty() ? "" : " in place of " + key.replaced;
      append(of_file.overlaid, fmt::format("{} {}{}", key.name, key.value, instead), ", ");
    } else if (key.origin == Origin::kAuto && ranks == 0 && is_of_training(key.key->path)) {
      continue;
    } else if (key.origin == Origin::kAuto && key.value.empty()) {
      append(of_file.planned, key.name);
    } else if (key.origin == Origin::kAuto && key.value != std::to_string(kAnyTotalSteps)) {
      append(of_file.automatic, fmt::format("{} {}", key.name, key.value));
    }
  }
  for (const auto& [file, said] : notes) {
    const auto note = [&file = file](std::string_view what, const std::string& list) {
      if (!list.empty()) log(LogLevel::kInfo, fmt::format("{}: {}: {}", file, what, list));
    };
    note("put over the configuration", said.overlaid);
    note("older or other names", said.renamed);
    note("\"auto\" is", said.automatic);
    note("\"auto\" leaves it to the plan", said.planned);
    note("known, but without effect here", said.idle);
  }
}

}  // namespace

Config config_from_json(std::string_view text, const std::string& name, const AutoValues& automatic,
                        std::uint32_t ranks) {
  const ConfigText texts[] = {{text, name}};
  return load_effective(texts, automatic, ranks).config;
}

EffectiveConfig load_effective(std::span<const ConfigText> texts, const AutoValues& automatic, std::uint32_t ranks) {
  EffectiveConfig effective = read_config(texts, automatic, ranks);
  log_notes(effective, ranks);
  return effective;
}

EffectiveConfig load_effective_files(const std::filesystem::path& file, const std::filesystem::path& overlay,
                                     const AutoValues& automatic, std::uint32_t ranks) {
  EffectiveConfig effective = read_config_files(file, overlay, automatic, ranks);
  log_notes(effective, ranks);
  return effective;
}

Config load_config(const std::filesystem::path& file, const std::filesystem::path& overlay, const AutoValues& automatic,
                   std::uint32_t ranks) {
  return load_effective_files(file, overlay, automatic, ranks).config;
}

std::string settings_json(const EffectiveConfig& effective) {
  std::string settings;
  for (const EffectiveKey& key : effective.keys) {
    if (has_effect(*key.key) && !key.value.empty())
      append(settings, json_string(key.key->path) + ": " + key.value, ", ");
  }
  return "{" + settings + "}";
}

}  // namespace spillway
