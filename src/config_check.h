// What no single key can say: keys that decide something together, and contradictions between them.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <string_view>

#include "src/config_table.h"

namespace spillway {

// Where every key that was present stands (its value's offset), right or wrong; "" is the whole text.
using KeyPlaces = std::map<std::string, std::size_t, std::less<>>;

// Receives an error: the path whose place it concerns, what is wrong, what to do.
using ReportAt = std::function<void(std::string_view path, std::string what, std::string hint)>;

// Fills what several keys decide together into draft.config, and reports contradictions. A key that is present but
// wrong was reported before and is not reported again as missing.
void settle_config(ConfigDraft& draft, const KeyPlaces& places, const ReportAt& report);

}  // namespace spillway
