#include "tools/terminal/commands.h"

#include <memory>

#include "spillway/version.h"
#include "tools/manual/build_info.h"
#include "tools/manual/outline.h"
#include "tools/terminal/tell.h"

namespace spillway::manual {
namespace {

constexpr const char* kVersion = "spillway " SPILLWAY_VERSION
                                 "\n"
                                 "devices    host; " SPILLWAY_CUDA
                                 "\n"
                                 "engines    io_uring (liburing " SPILLWAY_LIBURING
                                 "), libaio, threads\n"
                                 "libraries  oneTBB " SPILLWAY_TBB ", hwloc " SPILLWAY_HWLOC
                                 ", Highway " SPILLWAY_HIGHWAY ", libzip " SPILLWAY_LIBZIP
                                 "\n"
                                 "built      by " SPILLWAY_COMPILER ", " SPILLWAY_BUILD;

std::string script_for(const std::string& shell, const Outline& outline) {
  if (shell == "zsh") return zsh_completion(outline);
  return shell == "fish" ? fish_completion(outline) : bash_completion(outline);
}

}  // namespace

void add_commands(CLI::App& program, int& exit_code) {
  program.set_version_flag("--version", kVersion, "Print what this build has and exit");
  const auto shell = std::make_shared<std::string>();
  auto* completion =
      program.add_subcommand("completion", "Print a script that lets a shell complete subcommands and options");
  completion->add_option("shell", *shell, "The shell")->required()->check(CLI::IsMember({"bash", "zsh", "fish"}));
  completion->footer("Example:\n  source <(spillway completion bash)");
  completion->callback([&program, shell, &exit_code] {
    terminal::tell("{}", script_for(*shell, outline_of(program)));
    exit_code = 0;
  });
  auto* manual = program.add_subcommand("manual", "Print the manual page");
  manual->footer("Example:\n  spillway manual | man -l -");
  manual->callback([&program, &exit_code] {
    terminal::tell("{}", man_page(outline_of(program), SPILLWAY_VERSION));
    exit_code = 0;
  });
}

}  // namespace spillway::manual
