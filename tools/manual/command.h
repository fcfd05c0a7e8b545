// What the program says about itself, all of it made of the subcommands as they stand: `spillway manual` is a man page,
// `spillway completion SHELL` a script for a shell, --version what this build has.
#pragma once

#include <CLI/CLI.hpp>

namespace spillway::manual {

// To be called last: it describes what has been added before it.
void add_commands(CLI::App& program, int& exit_code);

}  // namespace spillway::manual
