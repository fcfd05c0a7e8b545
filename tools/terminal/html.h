// Pages, and charts as inline SVG. Their colours for text and lines are the page's CSS variables, so they follow light
// and dark.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <vector>

namespace spillway::terminal {

std::string escaped(const std::string& text);  // for HTML

// A page up to its heading, with the style of all pages: light or dark as the reader's system is. Its colours are the
// variables --s0 to --s8, --ink, --soft, --line, --card and --empty.
std::string page_begin(const std::string& title);
// A figure that is to be seen first, for a <div class='cards'>.
std::string card(const std::string& value, const std::string& what);
// An SVG text, with `more` attributes.
std::string text_at(double x, double y, const char* anchor, const std::string& text, const char* more = "");

struct HeatMap {
  std::string title = {};
  std::vector<std::string> columns = {}, rows = {};
  std::vector<std::optional<double>> cells = {};  // row by row; empty: not measured
  std::optional<std::size_t> marked = {};         // cell
};
std::string heat_map_svg(const HeatMap& map);

struct Series {
  std::string name = {};
  std::vector<double> x = {}, y = {};
  bool dashed = false;
  std::size_t colour = 0;  // one of eight; series of one colour belong together
};

struct LineChart {
  std::string title = {}, x_name = {}, y_name = {};
  bool log_x = false, log_y = false;  // powers of two, powers of ten
  bool from_zero = true;              // y, where it is not logarithmic
  std::vector<Series> series = {};
  std::optional<double> mark_x = {};  // a vertical line
  double width = 350, height = 260;
};
std::string line_chart_svg(const LineChart& chart);

}  // namespace spillway::terminal
