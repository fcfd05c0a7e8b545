// An effective configuration for readers: lines for people, JSON for machines.
#pragma once

#include <string>

#include "src/config/reader.h"

namespace spillway::config {

// A line per key: path, value, where it came from.
std::string report_text(const EffectiveConfig& effective);

// {"config": {…}, "keys": [{"key", "value", "origin", …}]}. "config" is a configuration of its own, with every value
// that is set, that means the same as what was read.
std::string report_json(const EffectiveConfig& effective);

}  // namespace spillway::config
