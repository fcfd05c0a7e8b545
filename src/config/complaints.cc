#include "src/config/complaints.h"

#include <fmt/format.h>

#include <algorithm>

#include "spillway/error.h"
#include "spillway/masked.h"
#include "src/formats/json_tree.h"

namespace spillway {
namespace {

// A line's characters as they are shown, one column each, and the byte each begins at.
struct Column {
  std::string shown;
  std::size_t offset = 0;
};

std::vector<Column> columns_of(std::string_view text, std::size_t base) {
  std::vector<Column> columns;
  while (!text.empty()) {
    const std::size_t bytes = character_bytes(text);
    const std::string_view character = text.substr(0, std::max<std::size_t>(1, bytes));
    const bool tab = character == "\t";
    columns.push_back({tab ? " " : bytes == 0 || is_control(character) ? "?" : std::string(character), base});
    base += character.size();
    text.remove_prefix(character.size());
  }
  return columns;
}

}  // namespace

std::string shown_text(std::string_view text) {
  std::string shown;
  for (const Column& column : columns_of(text, 0)) shown += column.shown;
  return shown;
}

std::string marked_line(std::string_view text, std::size_t offset, std::size_t end) {
  // Of a line that is megabytes long, a piece around the place is looked at.
  constexpr std::size_t kBefore = 60, kAfter = 40, kFar = 1024;
  offset = std::min(offset, text.size());
  const std::size_t newline = offset == 0 ? std::string_view::npos : text.rfind('\n', offset - 1);
  const std::size_t line_start = newline == std::string_view::npos ? 0 : newline + 1;
  std::size_t line_end = std::min(text.find('\n', offset), text.size());
  if (line_end > offset && text[line_end - 1] == '\r') --line_end;
  const std::size_t start = offset - line_start > kFar ? offset - kFar : line_start;
  const std::size_t stop = std::min(line_end, offset + kFar);
  const std::vector<Column> columns = columns_of(text.substr(start, stop - start), start);

  const auto column_of = [&](std::size_t byte) {
    return static_cast<std::size_t>(std::lower_bound(columns.begin(), columns.end(), byte,
                                                     [](const Column& c, std::size_t at) { return c.offset < at; }) -
                                    columns.begin());
  };
  const std::size_t marked = column_of(offset);
  const std::size_t first = marked > kBefore ? marked - kBefore : 0;
  const std::size_t last = std::min(columns.size(), marked + kAfter);
  std::string shown = first > 0 || start > line_start ? "…" : "";
  std::string marks = first > 0 || start > line_start ? " " : "";
  for (std::size_t c = first; c < last; ++c) shown += columns[c].shown;
  if (last < columns.size() || stop < line_end) shown += "…";
  const std::size_t mark_end = std::clamp(column_of(std::min(end, stop)), marked + 1, std::max(last, marked + 1));
  marks += std::string(marked - first, ' ') + std::string(mark_end - marked, '^');
  const std::size_t line = position_of(text, offset).line;
  while (shown.ends_with(' ')) shown.pop_back();
  return fmt::format(" {:>4} | {}\n      | {}", line, shown, marks);
}

void Complaints::add_source(std::string_view text, const std::string& name) {
  // One more than the text has: a complaint about its end is still about this text.
  sources_.push_back({text, name, sources_.empty() ? 0 : sources_.back().text.size() + 1});
}

const ConfigSource& Complaints::source_of(std::size_t offset) const {
  return offset < sources_.back().base ? sources_.front() : sources_.back();
}

void Complaints::add(std::size_t offset, std::size_t end, std::string what, Hint hint) {
  hint.text = shown_text(hint.text);
  complaints_.push_back({offset, end, shown_text(what), std::move(hint)});
}

void Complaints::raise() const {
  std::vector<Complaint> sorted = complaints_;
  std::stable_sort(sorted.begin(), sorted.end(),
                   [](const Complaint& a, const Complaint& b) { return a.offset < b.offset; });
  const auto place = [&](const Complaint& complaint) {
    const ConfigSource& source = source_of(complaint.offset);
    const TextPosition at = position_of(source.text, complaint.offset - source.base);
    return fmt::format("{}:{}:{}", source.name, at.line, at.column);
  };
  const auto marked = [&](const Complaint& complaint) {
    const ConfigSource& source = source_of(complaint.offset);
    return fmt::format("\n{}", marked_line(source.text, complaint.offset - source.base, complaint.end - source.base));
  };
  // Error puts object and text together for the first line; the others follow in the same form. What has a remedy is
  // the error's hint, whichever complaint it belongs to.
  ErrorParts parts{.object = place(sorted[0]), .happened = {}, .errno_value = 0, .hint = {}};
  std::string* text = &parts.happened;
  for (const Complaint& complaint : sorted) {
    if (&complaint != &sorted[0]) *text += fmt::format("\n{}: ", place(complaint));
    *text += complaint.what;
    const Hint& hint = complaint.hint;
    if (hint.remedy != Remedy::kNone && parts.remedy == Remedy::kNone) {
      parts.hint = hint.text;
      parts.remedy = hint.remedy;
      parts.values = hint.values;
      text = &parts.more;
    } else if (!hint.text.empty()) {
      *text += fmt::format("; {}", hint.text);
    }
    *text += marked(complaint);
  }
  if (full()) {
    *text += fmt::format("\n{}: what follows was not looked at; correct these first", sources_.back().name);
  }
  throw Error(Code::kInvalidArgument, std::move(parts));
}

}  // namespace spillway
