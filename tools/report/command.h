// `spillway report`: how a run went, and several beside each other.
#pragma once

#include <CLI/CLI.hpp>

namespace spillway::reporting {

void add_command(CLI::App& program, int& exit_code);

}  // namespace spillway::reporting
