// The subcommands of `spillway`, each added by the folder that has it. A command runs while the program parses its
// arguments, and leaves its exit code in `exit_code`; errors are spillway::Error.
#pragma once

#include <CLI/CLI.hpp>

namespace spillway {

namespace config {  // config: what a configuration says, key by key, and what there is to say
void add_command(CLI::App& program, int& exit_code);
}
namespace doctor {  // doctor: what keeps this machine from training, or makes it slow
void add_command(CLI::App& program, int& exit_code);
}
namespace planning {  // plan: what a run would take and how fast it would be, before it is made
void add_command(CLI::App& program, int& exit_code);
}
namespace reporting {  // report: how a run went, and several beside each other
void add_command(CLI::App& program, int& exit_code);
}
namespace store {  // store: what a store holds, and whether it is whole
void add_command(CLI::App& program, int& exit_code);
}
namespace sweep {  // sweep: how fast a drive is, and with which settings
void add_command(CLI::App& program, int& exit_code);
}
namespace models::finetune {  // init-model, finetune, export
void add_commands(CLI::App& program, int& exit_code);
}
namespace models::generate {  // generate
void add_command(CLI::App& program, int& exit_code);
}
// manual, completion and --version, all of them made of the subcommands as they stand: to be called last.
namespace manual {
void add_commands(CLI::App& program, int& exit_code);
}

}  // namespace spillway
