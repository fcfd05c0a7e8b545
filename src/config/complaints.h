// The errors of a configuration: collected with their places, and thrown as one Error that shows each of them.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "spillway/remedy.h"

namespace spillway {

// A text and its name. Offsets of the text that lies over another one are counted on from the end of that one, so that
// one number says file, line and column.
struct ConfigSource {
  std::string_view text;
  const std::string& name;
  std::size_t base = 0;
};

class Complaints {
 public:
  // A text that is wrong everywhere is not a configuration: what is said of it, and the time to find it out, are
  // bounded.
  static constexpr std::size_t kMost = 100;

  void add_source(std::string_view text, const std::string& name);
  const ConfigSource& source() const { return sources_.back(); }  // the one that is read
  const ConfigSource& source_of(std::size_t offset) const;
  bool overlaid() const { return sources_.size() > 1; }

  // Bytes [offset, end) are what it is about.
  void add(std::size_t offset, std::size_t end, std::string what, Hint hint);
  bool full() const { return complaints_.size() >= kMost; }
  bool empty() const { return complaints_.empty(); }

  // One line per complaint in the order of the texts, `name:line:column: what; hint`, and below each the line it is
  // about with the place marked; those lines begin with a space.
  [[noreturn]] void raise() const;

 private:
  struct Complaint {
    std::size_t offset = 0, end = 0;
    std::string what;
    Hint hint;
  };
  std::vector<ConfigSource> sources_;
  std::vector<Complaint> complaints_;
};

// Line `line` of a text with [offset, end) of it marked, as compilers do: two lines, of at most about 100 columns.
std::string marked_line(std::string_view text, std::size_t offset, std::size_t end);

// A text that came from anywhere, for a terminal: one '?' for each control character and each byte that is not UTF-8.
std::string shown_text(std::string_view text);

}  // namespace spillway
