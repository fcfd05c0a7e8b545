// Configurations as they came about: what every key holds, and why. load_config() and `spillway config` read with this.
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "spillway/config.h"
#include "src/config/table.h"

namespace spillway {

struct ConfigText {
  std::string_view text;
  std::string name;
};

enum class Origin : std::uint8_t {
  kDefault,
  kDerived,  // other keys decide it
  kFile,
  kOverlay,  // the file that goes over the first one
  kAuto,     // the file says "auto"
};

struct EffectiveKey {
  const ConfigKey* key = nullptr;
  Origin origin = Origin::kDefault;
  std::string value;      // as JSON; empty: not set, and the plan chooses
  std::string_view name;  // of the key in the file: its own, or another one that says the same
  std::string written;    // what stands in the file, as JSON in one line; empty where nothing does
  std::string file;       // where that is
  std::size_t line = 0;
  std::string replaced;  // paths that these stand for, as JSON; empty: none, or they are these
};

struct EffectiveConfig {
  Config config;
  // The keys that decide something, all that the optimizer and the schedule know, in the table's order; then those
  // without effect that stand in a file, in its order. Other names of a key stand under the key.
  std::vector<EffectiveKey> keys;
};

// As AutoValues::total_steps where nothing asks for a learning rate, so that any number does; no log line names it.
inline constexpr std::uint64_t kAnyTotalSteps = std::uint64_t{1} << 40;

// One text, or one and a second that goes over it. Errors as config_from_json().
EffectiveConfig read_config(std::span<const ConfigText> texts, const AutoValues& automatic, std::uint32_t ranks = 1);
// The same, with its log lines.
EffectiveConfig load_effective(std::span<const ConfigText> texts, const AutoValues& automatic, std::uint32_t ranks = 1);
EffectiveConfig read_config_files(const std::filesystem::path& file, const std::filesystem::path& overlay,
                                  const AutoValues& automatic, std::uint32_t ranks = 1);
// The same, with its log lines: what load_config() reads.
EffectiveConfig load_effective_files(const std::filesystem::path& file, const std::filesystem::path& overlay,
                                     const AutoValues& automatic, std::uint32_t ranks = 1);

// {"optimizer.params.lr": 0.0001, …}: the keys that decide something, but for those that are left to the plan.
std::string settings_json(const EffectiveConfig& effective);

}  // namespace spillway
