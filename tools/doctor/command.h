// `spillway doctor` on the command line.
#pragma once

#include <CLI/CLI.hpp>

namespace spillway::doctor {

// The command runs while the program parses, and leaves its exit code; errors are spillway::Error.
void add_command(CLI::App& program, int& exit_code);

}  // namespace spillway::doctor
