// The subcommands of a program and what they take, as plain values.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

namespace spillway::manual {

struct Argument {
  std::string name;  // "--config", or "paths" for one without a name on the command line
  bool positional = false, required = false, flag = false, many = false;
  std::string value;                 // what stands for its value: "FILE", "N"; of a flag empty
  std::vector<std::string> choices;  // all values there are; empty: any
  bool path = false;                 // it is a file or a directory
  std::string text, standard;        // what it says, and the default
};

struct Command {
  std::string name, text, footer;
  std::vector<Argument> arguments;  // those without a name first
};

struct Outline {
  std::string name, text, footer;
  std::vector<Command> commands;
};

Outline outline_of(const CLI::App& program);

std::string man_page(const Outline& outline, const std::string& version);
std::string bash_completion(const Outline& outline);
std::string zsh_completion(const Outline& outline);
std::string fish_completion(const Outline& outline);

}  // namespace spillway::manual
