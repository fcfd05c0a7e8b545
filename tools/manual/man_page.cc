#include <fmt/format.h>

#include <algorithm>
#include <sstream>

#include "tools/manual/outline.h"

namespace spillway::manual {
namespace {

// Text in roff: nothing in it is a request or an escape, and hyphens are the ones to be copied.
std::string roff(const std::string& text) {
  std::string out;
  for (const char c : text) {
    if (c == '\\') {
      out += "\\e";
    } else if (c == '-') {
      out += "\\-";
    } else {
      if ((c == '.' || c == '\'') && (out.empty() || out.back() == '\n')) out += "\\&";
      out += c;
    }
  }
  return out;
}

std::string shown(const Argument& argument) {
  std::string text =
      argument.positional ? "\\fI" + roff(argument.name) + "\\fR" : "\\fB" + roff(argument.name) + "\\fR";
  if (!argument.positional && !argument.flag) text += " \\fI" + roff(argument.value) + "\\fR";
  if (argument.many) text += "...";
  return text;
}

// Lines that begin with two spaces are to be typed as they are; the others are paragraphs.
std::string paragraphs(const std::string& text) {
  std::string out;
  std::istringstream lines(text);
  bool typed = false;
  for (std::string line; std::getline(lines, line);) {
    const bool now = line.starts_with("  ");
    if (now != typed) out += now ? ".RS 4\n.nf\n" : ".fi\n.RE\n";
    typed = now;
    if (line.empty()) {
      out += ".PP\n";
    } else {
      out += roff(now ? line.substr(2) : line) + "\n";
    }
  }
  if (typed) out += ".fi\n.RE\n";
  return out;
}

std::string section_of(const Command& command) {
  std::string out = fmt::format(".SS spillway {}\n", roff(command.name));
  out += fmt::format("\\fBspillway {}\\fR", roff(command.name));
  for (const Argument& a : command.arguments) {
    if (a.name == "--help") continue;
    out += a.required ? " " + shown(a) : " [" + shown(a) + "]";
  }
  out += "\n.PP\n" + roff(command.text) + ".\n";
  for (const Argument& a : command.arguments) {
    if (a.name == "--help") continue;
    out += ".TP\n" + shown(a) + "\n" + roff(a.text) + ".";
    std::string words;
    for (const std::string& choice : a.choices) words += (words.empty() ? "" : ", ") + choice;
    if (!words.empty()) out += roff(" One of " + words + ".");
    if (!a.standard.empty()) out += roff(" Default: " + a.standard + ".");
    out += "\n";
  }
  if (!command.footer.empty()) out += ".PP\n" + paragraphs(command.footer);
  return out;
}

}  // namespace

std::string man_page(const Outline& outline, const std::string& version) {
  std::string out = ".\\\" Made by `spillway manual` from the program's own options.\n";
  out += fmt::format(".TH SPILLWAY 1 \"\" \"spillway {}\" \"Spillway\"\n", roff(version));
  out += ".SH NAME\nspillway \\- " + roff(outline.text) + "\n";
  out += ".SH SYNOPSIS\n\\fBspillway\\fR \\fISUBCOMMAND\\fR [\\fIOPTIONS\\fR]\n";
  out += ".SH SUBCOMMANDS\n";
  for (const Command& command : outline.commands) out += section_of(command);
  out += ".SH EXIT STATUS\n" + paragraphs(outline.footer);
  out +=
      ".SH ENVIRONMENT\n.TP\n\\fBNO_COLOR\\fR\nWhen it is set, nothing is coloured. Elsewhere colours are for "
      "terminals.\n";
  return out;
}

}  // namespace spillway::manual
