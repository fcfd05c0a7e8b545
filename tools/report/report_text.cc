#include <fmt/format.h>

#include <algorithm>

#include "tools/report/report.h"
#include "tools/report/summary.h"

namespace spillway::reporting {
namespace {

// fmt counts characters, which is what a column needs: a path may be in any script.
std::string line(const std::string& label, const std::vector<std::string>& cells, std::size_t label_width,
                 const std::vector<std::size_t>& widths) {
  std::string text = fmt::format("{:<{}}", label, label_width);
  for (std::size_t run = 0; run < cells.size(); ++run) text += fmt::format("  {:>{}}", cells[run], widths[run]);
  while (text.ends_with(' ')) text.pop_back();
  return text + "\n";
}

}  // namespace

std::string report_text(const std::vector<Run>& runs, double drive_life) {
  const std::vector<Row> rows = rows_of(runs, drive_life);
  std::vector<std::string> names;
  std::vector<std::size_t> widths;
  std::size_t label_width = 0;
  for (const Row& row : rows) label_width = std::max(label_width, row.label.size());
  for (std::size_t run = 0; run < runs.size(); ++run) {
    names.push_back(runs[run].name);
    widths.push_back(names.back().size());
    for (const Row& row : rows) widths.back() = std::max(widths.back(), row.cells[run].size());
  }
  std::string text = line("", names, label_width, widths);
  for (const Row& row : rows) text += line(row.label, row.cells, label_width, widths);
  for (const std::string& note : notes_of(runs)) text += fmt::format("note: {}\n", note);
  return text;
}

}  // namespace spillway::reporting
