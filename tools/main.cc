// The `spillway` program.
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <new>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "spillway/log.h"
#include "src/config/closest_key.h"
#include "tools/terminal/commands.h"
#include "tools/terminal/remedies.h"
#include "tools/terminal/tell.h"

namespace spillway {
namespace {

using terminal::tell;

constexpr const char* kNoMemory =
    "spillway: memory: none is left outside the planned arenas (Cannot allocate memory); raise ulimit -v or the "
    "cgroup's limit\n";

// CLI11's message in the form of every other error here; of a misspelled subcommand it says that one is missing.
int wrong_arguments(const CLI::App& program, std::string_view first, const CLI::ParseError& error) {
  std::vector<std::string_view> names;
  for (const CLI::App* known : program.get_subcommands({})) names.push_back(known->get_name());
  if (!first.empty() && !first.starts_with('-') && std::ranges::find(names, first) == names.end()) {
    const std::string_view near = closest(first, names);
    tell(stderr, "spillway: {}: is no subcommand; {}--help lists all of them\n", first,
         near.empty() ? "" : fmt::format("the closest is {}, ", near));
    return 1;
  }
  std::string what = error.what();
  std::replace(what.begin(), what.end(), '\n', ' ');
  const char* object = what.starts_with("--") && what.find(": ") != std::string::npos ? "" : "command line: ";
  tell(stderr, "spillway: {}{}; --help after the subcommand lists what it takes\n", object, what);
  return 1;
}

// What was printed is in a buffer until the end, where nothing else says that it went nowhere.
int with_output_written(int exit_code) {
  if (std::fflush(stdout) == 0 && !std::ferror(stdout)) return exit_code;
  if (exit_code == 128 + SIGPIPE) return exit_code;  // known, and why the run has ended
  const std::string why = errno == 0 ? "" : fmt::format(" ({})", std::strerror(errno));
  tell(stderr, "spillway: standard output: not all of it could be written{}; send it elsewhere\n", why);
  return exit_code == 0 ? 1 : exit_code;
}

// A file that is opened takes the lowest number that is free: a store in the place of a closed standard output would
// get what is printed. What stands there instead takes nothing, so that it is known.
void keep_standard_numbers() {
  for (const int number : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    if (::fcntl(number, F_GETFD) < 0) ::open("/dev/null", number == STDIN_FILENO ? O_WRONLY : O_RDONLY);
  }
}

int failed(const std::exception& error) {
  if (dynamic_cast<const std::bad_alloc*>(&error)) {
    std::fputs(kNoMemory, stderr);
    return 1;
  }
  const auto* system = dynamic_cast<const std::system_error*>(&error);
  if (system && system->code() == std::errc::resource_unavailable_try_again) {  // std::thread's, which says no more
    tell(stderr,
         "spillway: threads: one more cannot be started (Resource temporarily unavailable); raise ulimit -v, "
         "ulimit -u or the cgroup's limits\n");
    return 1;
  }
  tell(stderr, "spillway: {}\n", terminal::message_of(error));
  return 1;
}

int run(int argc, char** argv) {
  CLI::App program("Fine-tunes models that do not fit the GPU: weights, gradients and Adam states in three tiers");
  program.require_subcommand(1);
  program.footer(
      "Exit code: 0 done, 1 refused or failed, 2 a damaged store was shown, 3 the doctor found something slower, 4 "
      "something broken, 130 ended by Ctrl-C, 143 by SIGTERM, 129 by SIGHUP (a closed terminal), 141 by SIGPIPE (what "
      "reads the output has gone). Data goes to standard output, errors to standard error.");
  int exit_code = 0;
  models::finetune::add_commands(program, exit_code);
  models::generate::add_command(program, exit_code);
  store::add_command(program, exit_code);
  sweep::add_command(program, exit_code);
  doctor::add_command(program, exit_code);
  config::add_command(program, exit_code);
  planning::add_command(program, exit_code);
  reporting::add_command(program, exit_code);
  manual::add_commands(program, exit_code);
  try {
    program.parse(argc, argv);
    return with_output_written(exit_code);
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return with_output_written(program.exit(error));  // --help, --version
    return wrong_arguments(program, argc > 1 ? argv[1] : "", error);
  } catch (const std::exception& error) {
    return failed(error);
  }
}

}  // namespace
}  // namespace spillway

int main(int argc, char** argv) {
  ::umask(::umask(0) | S_IWGRP | S_IWOTH);  // what a run leaves is for nobody else to change
  std::signal(SIGXFSZ, SIG_IGN);            // a write beyond ulimit -f fails with EFBIG, like one that finds no room
  spillway::keep_standard_numbers();
  try {
    spillway::set_log_sink([](spillway::LogLevel, std::string_view message) {
      spillway::terminal::tell(stderr, "spillway: {}{}\n", message.starts_with(": ") ? "\"\"" : "", message);
    });
    return spillway::run(argc, argv);
  } catch (const std::bad_alloc&) {  // also for the words of another error
    std::fputs(spillway::kNoMemory, stderr);
    return 1;
  }
}
