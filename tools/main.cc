// The `spillway` program.
#include <fmt/format.h>
#include <sys/stat.h>

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
#include "tools/config/command.h"
#include "tools/doctor/command.h"
#include "tools/gpt2/commands.h"
#include "tools/manual/command.h"
#include "tools/plan/command.h"
#include "tools/store/command.h"
#include "tools/sweep/command.h"

namespace {

// CLI11's message in the form of every other error here; of a misspelled subcommand it says that one is missing.
int wrong_arguments(const CLI::App& program, std::string_view first, const CLI::ParseError& error) {
  std::vector<std::string_view> names;
  for (const CLI::App* known : program.get_subcommands({})) names.push_back(known->get_name());
  if (!first.empty() && !first.starts_with('-') && std::ranges::find(names, first) == names.end()) {
    const std::string_view near = spillway::closest(first, names);
    fmt::print(stderr, "spillway: {}: is no subcommand; {}--help lists all of them\n", first,
               near.empty() ? "" : fmt::format("the closest is {}, ", near));
    return 1;
  }
  std::string what = error.what();
  std::replace(what.begin(), what.end(), '\n', ' ');
  const char* object = what.starts_with("--") && what.find(": ") != std::string::npos ? "" : "command line: ";
  fmt::print(stderr, "spillway: {}{}; --help after the subcommand lists what it takes\n", object, what);
  return 1;
}

// The library says what to do in the words of its own options; here they have others.
std::string in_words_of_the_program(std::string_view message) {
  static constexpr std::pair<std::string_view, std::string_view> kWords[] = {
      {"on_existing resume", "--resume"},
      {"on_existing replace", "--fresh"},
      {"write the model at the end", "give --out"},
      {"say how many steps the run has", "say it with --steps"},
  };
  std::string text(message.starts_with(": ") ? "\"\"" : "");  // an empty path, which nothing would show
  text += message;
  for (const auto& [library, program] : kWords) {
    for (std::size_t at; (at = text.find(library)) != text.npos;) text.replace(at, library.size(), program);
  }
  return text;
}

// What was printed is in a buffer until the end, where nothing else says that it went nowhere.
int with_output_written(int exit_code) {
  if (std::fflush(stdout) == 0 && !std::ferror(stdout)) return exit_code;
  const std::string why = errno == 0 ? "" : fmt::format(" ({})", std::strerror(errno));
  fmt::print(stderr, "spillway: standard output: not all of it could be written{}; send it elsewhere\n", why);
  return exit_code == 0 ? 1 : exit_code;
}

}  // namespace

int main(int argc, char** argv) {
  ::umask(::umask(0) | S_IWGRP | S_IWOTH);  // what a run leaves is for nobody else to change
  std::signal(SIGXFSZ, SIG_IGN);            // a write beyond ulimit -f fails with EFBIG, like one that finds no room
  CLI::App program("Fine-tunes models that do not fit the GPU: weights, gradients and Adam states in three tiers");
  program.require_subcommand(1);
  program.footer(
      "Exit code: 0 done, 1 refused or failed, 2 a damaged store was shown, 3 the doctor found something slower, 4 "
      "something broken, 130 ended by Ctrl-C, 143 by SIGTERM. Data goes to standard output, errors to standard error.");
  spillway::set_log_sink([](spillway::LogLevel, std::string_view message) {
    fmt::print(stderr, "spillway: {}\n", in_words_of_the_program(message));
  });
  int exit_code = 0;
  spillway::gpt2::add_commands(program, exit_code);
  spillway::store::add_command(program, exit_code);
  spillway::sweep::add_command(program, exit_code);
  spillway::doctor::add_command(program, exit_code);
  spillway::config::add_command(program, exit_code);
  spillway::planning::add_command(program, exit_code);
  spillway::manual::add_commands(program, exit_code);
  try {
    program.parse(argc, argv);
    return with_output_written(exit_code);
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return with_output_written(program.exit(error));  // --help, --version
    return wrong_arguments(program, argc > 1 ? argv[1] : "", error);
  } catch (const std::bad_alloc&) {
    fmt::print(stderr,
               "spillway: memory: none is left outside the planned arenas (Cannot allocate memory); raise "
               "ulimit -v or the cgroup's limit\n");
    return 1;
  } catch (const std::exception& error) {
    const auto* system = dynamic_cast<const std::system_error*>(&error);
    if (system && system->code() == std::errc::resource_unavailable_try_again) {  // std::thread's, which says no more
      fmt::print(stderr,
                 "spillway: threads: one more cannot be started (Resource temporarily unavailable); raise ulimit -v, "
                 "ulimit -u or the cgroup's limits\n");
      return 1;
    }
    if (system && std::string_view(error.what()).starts_with("cannot write to file"))
      return with_output_written(1);  // fmt's
    fmt::print(stderr, "spillway: {}\n", in_words_of_the_program(error.what()));
    return 1;
  }
}
