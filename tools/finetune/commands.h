// `spillway init-model`, `finetune` and `export` on the command line.
#pragma once

#include <CLI/CLI.hpp>

namespace spillway::models::finetune {

// A command runs while the program parses, and leaves its exit code; errors are spillway::Error.
void add_commands(CLI::App& program, int& exit_code);

}  // namespace spillway::models::finetune
