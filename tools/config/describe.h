// Rows of the table in words, for the reference and for --explain.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "src/config/table.h"

namespace spillway::config {

std::string kind_text(const ConfigKey& key);  // "a whole number, 1 to 4096", "none, cpu or nvme"
std::string auto_text(const ConfigKey& key);  // what "auto" stands for; empty: it is not taken

// The rows of a section ("": the top), those that decide something first.
std::vector<const ConfigKey*> keys_of(std::string_view section);
// All sections that hold keys, "" first, each after its parent.
std::vector<std::string_view> sections();

// What `spillway config --explain` prints of a path, or of every path that ends in it. Throws kNotFound with the
// closest key when there is none.
std::string explain(std::string_view path);

// docs/configuration.md.
std::string reference();

}  // namespace spillway::config
