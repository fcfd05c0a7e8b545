// `spillway config`: what a configuration says, key by key, and what there is to say.
#pragma once

#include <CLI/CLI.hpp>

namespace spillway::config {

void add_command(CLI::App& program, int& exit_code);

}  // namespace spillway::config
