// `spillway plan`: what a run would take and how fast it would be, before it is made.
#pragma once

#include <CLI/CLI.hpp>

namespace spillway::planning {

void add_command(CLI::App& program, int& exit_code);

}  // namespace spillway::planning
