#include <fmt/format.h>

#include <algorithm>

#include "tools/manual/outline.h"

namespace spillway::manual {
namespace {

// As one word of a shell.
std::string quoted(const std::string& text) {
  std::string out = "'";
  for (const char c : text) out += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return out + "'";
}

std::string joined(const std::vector<std::string>& words, const char* between) {
  return fmt::format("{}", fmt::join(words, between));
}

std::vector<std::string> names_of(const Outline& outline) {
  std::vector<std::string> names;
  for (const Command& command : outline.commands) names.push_back(command.name);
  return names;
}

std::vector<std::string> options_of(const Command& command) {
  std::vector<std::string> names;
  for (const Argument& a : command.arguments) {
    if (!a.positional) names.push_back(a.name);
  }
  return names;
}

bool is_free(const Argument& argument) { return !argument.flag && !argument.path && argument.choices.empty(); }

// Descriptions inside zsh's `name[description]` and `name:description`.
std::string zsh_text(const std::string& text) {
  std::string out;
  for (const char c : text) {
    if (c == ':' || c == '[' || c == ']' || c == '\\') out += '\\';
    out += c;
  }
  return out;
}

std::string zsh_argument(const Argument& a) {
  const std::string values = a.choices.empty() ? (a.path ? "_files" : " ") : "(" + joined(a.choices, " ") + ")";
  if (a.positional) return fmt::format("{}:{}:{}", a.many ? "*" : "", zsh_text(a.name), values);
  const std::string text = fmt::format("{}[{}]", a.name, zsh_text(a.text));
  return a.flag ? text : fmt::format("{}:{}:{}", text, zsh_text(a.value), values);
}

}  // namespace

std::string bash_completion(const Outline& outline) {
  std::string out = "# Made by `spillway completion bash`.\n_spillway() {\n";
  out += "  local current=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD - 1]} command= i\n";
  out += "  COMPREPLY=()\n  for ((i = 1; i < COMP_CWORD; ++i)); do\n    case ${COMP_WORDS[i]} in\n";
  out += fmt::format("      {}) command=${{COMP_WORDS[i]}}; break ;;\n    esac\n  done\n",
                     joined(names_of(outline), " | "));
  out += "  case $command:$before in\n";
  for (const Command& command : outline.commands) {
    for (const Argument& a : command.arguments) {
      if (a.positional || a.flag || a.path) continue;  // files are what readline offers by itself
      if (is_free(a)) {
        out += fmt::format("    {}:{}) compopt +o default; return ;;\n", command.name, a.name);
      } else {
        out += fmt::format("    {}:{}) COMPREPLY=($(compgen -W '{}' -- \"$current\")); return ;;\n", command.name,
                           a.name, joined(a.choices, " "));
      }
    }
  }
  out += "  esac\n  local words=\n";
  out += "  case $command:$current in\n";
  for (const Command& command : outline.commands)
    out += fmt::format("    {}:-*) words='{}' ;;\n", command.name, joined(options_of(command), " "));
  for (const Command& command : outline.commands) {
    for (const Argument& a : command.arguments) {
      if (a.positional && !a.choices.empty())
        out += fmt::format("    {}:*) words='{}' ;;\n", command.name, joined(a.choices, " "));
    }
  }
  out += fmt::format("    :*) words='--help --version {}' ;;\n  esac\n", joined(names_of(outline), " "));
  out += "  [[ $words ]] && COMPREPLY=($(compgen -W \"$words\" -- \"$current\"))\n  return 0\n}\n";
  return out + "complete -o default -F _spillway spillway\n";
}

std::string zsh_completion(const Outline& outline) {
  std::string out = "#compdef spillway\n# Made by `spillway completion zsh`.\n_spillway() {\n  local state\n";
  out += "  local -a commands=(\n";
  for (const Command& command : outline.commands)
    out += "    " + quoted(command.name + ":" + zsh_text(command.text)) + "\n";
  out += "  )\n  _arguments -C '--help[print a help message]' '--version[print what this build has]' \\\n";
  out += "    '1:subcommand:->subcommand' '*::argument:->argument'\n  case $state in\n";
  out += "    subcommand) _describe subcommand commands ;;\n    argument)\n      case $words[1] in\n";
  for (const Command& command : outline.commands) {
    out += fmt::format("        {})\n          _arguments", command.name);
    for (const Argument& a : command.arguments) out += " \\\n            " + quoted(zsh_argument(a));
    out += "\n          ;;\n";
  }
  return out + "      esac\n      ;;\n  esac\n}\n_spillway \"$@\"\n";
}

std::string fish_completion(const Outline& outline) {
  std::string out = "# Made by `spillway completion fish`.\n";
  const std::string first = "complete -c spillway -n __fish_use_subcommand";
  out += first + " -l help -d 'Print a help message'\n" + first + " -l version -d 'Print what this build has'\n";
  for (const Command& command : outline.commands) {
    out += fmt::format("{} -f -a {} -d {}\n", first, command.name, quoted(command.text));
    const std::string behind = fmt::format("complete -c spillway -n '__fish_seen_subcommand_from {}'", command.name);
    for (const Argument& a : command.arguments) {
      const std::string values = a.choices.empty() ? "" : " -a " + quoted(joined(a.choices, " "));
      if (a.positional && !values.empty()) out += behind + " -f" + values + "\n";
      if (a.positional) continue;
      const char* takes = a.flag ? "" : a.path ? " -r" : " -x";
      out += fmt::format("{} -l {}{}{} -d {}\n", behind, a.name.substr(2), takes, values, quoted(a.text));
    }
  }
  return out;
}

}  // namespace spillway::manual
