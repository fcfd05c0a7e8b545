// What no single key can say: keys that decide something together, and contradictions between them.
#pragma once

#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "spillway/remedy.h"
#include "src/config/table.h"

namespace spillway {

// Where the value of a key stands that was present, right or wrong.
struct WrittenKey {
  std::size_t offset = 0, end = 0;
  bool automatic = false;  // it is "auto"
};
using KeyPlaces = std::map<std::string, WrittenKey, std::less<>>;  // "" is the whole text

// Receives an error: the path whose place it concerns, what is wrong, what to do.
using ReportAt = std::function<void(std::string_view path, std::string what, Hint hint)>;

// Fills what several keys decide together into draft.config, and reports contradictions. A key that is present but
// wrong was reported before and is not reported again as missing.
void finalize_config(ConfigDraft& draft, const KeyPlaces& places, const ReportAt& report);

// What is wrong with the paths of a store, and with rates that are given for them.
std::optional<ValueProblem> problem_of_paths(const std::vector<std::filesystem::path>& paths);
std::optional<ValueProblem> problem_of_rates(const Config& config);

// Says which of these directories is named by two of them, through links or other words too; empty: none.
std::string named_twice(const std::vector<std::filesystem::path>& paths);

}  // namespace spillway
