#include "tools/sweep/html_charts.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>

namespace spillway::sweep {
namespace {

struct Rgb {
  double red, green, blue;
};
// viridis (Smith, van der Walt), from low to high.
constexpr std::array<Rgb, 5> kScale = {Rgb{68, 1, 84}, {59, 82, 139}, {33, 145, 140}, {94, 201, 98}, {253, 231, 37}};

Rgb colour_of(double share) {
  const double at = std::clamp(share, 0.0, 1.0) * (kScale.size() - 1);
  const auto low = std::min(static_cast<std::size_t>(at), kScale.size() - 2);
  const double rest = at - static_cast<double>(low);
  const auto mix = [&](double Rgb::*part) {
    return kScale[low].*part + rest * (kScale[low + 1].*part - kScale[low].*part);
  };
  return {mix(&Rgb::red), mix(&Rgb::green), mix(&Rgb::blue)};
}

// Black or white, whichever is read more easily on the colour.
const char* ink_on(const Rgb& colour) {
  return 0.299 * colour.red + 0.587 * colour.green + 0.114 * colour.blue > 140 ? "#10151c" : "#ffffff";
}

std::string text_at(double x, double y, const char* anchor, const std::string& text, const char* more = "") {
  return fmt::format("<text x='{:.1f}' y='{:.1f}' text-anchor='{}' {}>{}</text>", x, y, anchor, more, escaped(text));
}

// From a value to a place on the chart.
struct Axis {
  double low, high, from, to;
  bool log;

  double place(double value) const {
    const auto scaled = [&](double v) { return log ? std::log2(v) : v; };
    const double span = scaled(high) - scaled(low);
    return from + (span > 0 ? (scaled(value) - scaled(low)) / span : 0.5) * (to - from);
  }
};

Axis axis_of(const LineChart& chart, std::vector<double> Series::*values, bool log, double from, double to) {
  double low = 0, high = 0;
  for (const Series& series : chart.series) {
    for (const double value : series.*values) {
      if (log && value <= 0) continue;
      low = low == 0 ? value : std::min(low, value);
      high = std::max(high, value);
    }
  }
  if (!log) low = 0;
  return {log ? low : 0, high * (log ? 1 : 1.05), from, to, log};
}

// Powers of two, or 1, 2, 5, 10, …; evenly spaced where the axis is not logarithmic.
std::vector<double> ticks_of(const Axis& axis, bool powers_of_two) {
  std::vector<double> ticks;
  if (axis.high <= 0) return ticks;
  if (axis.log) {
    const double base = powers_of_two ? 2 : 10;
    for (double power = std::pow(base, std::floor(std::log(axis.low) / std::log(base))); power <= axis.high;
         power *= base) {
      for (const double tick : {power, 2 * power, 5 * power}) {
        const bool inside = tick >= axis.low * 0.999 && tick <= axis.high * 1.001;
        if (inside && (!powers_of_two || tick == power)) ticks.push_back(tick);
      }
    }
    return ticks;
  }
  double step = std::pow(10, std::floor(std::log10(axis.high / 4)));
  for (const double more : {2.0, 2.5, 2.0}) {
    if (axis.high / step > 6) step *= more;
  }
  for (double tick = 0; tick <= axis.high; tick += step) ticks.push_back(tick);
  return ticks;
}

}  // namespace

std::string escaped(const std::string& text) {
  std::string safe;
  for (const char c : text) {
    switch (c) {
      case '&': safe += "&amp;"; break;
      case '<': safe += "&lt;"; break;
      case '>': safe += "&gt;"; break;
      case '"': safe += "&quot;"; break;
      case '\'': safe += "&#39;"; break;
      default: safe += c;
    }
  }
  return safe;
}

std::string heat_map_svg(const HeatMap& map) {
  constexpr double kCellWidth = 48, kCellHeight = 27, kLeft = 34, kTop = 26;
  const double width = kLeft + kCellWidth * static_cast<double>(map.columns.size()) + 2;
  const double height = kTop + kCellHeight * static_cast<double>(map.rows.size()) + 2;
  double best = 0, worst = 0;
  for (const auto& cell : map.cells) {
    if (!cell) continue;
    best = std::max(best, *cell);
    worst = worst == 0 ? *cell : std::min(worst, *cell);
  }
  std::string svg = fmt::format("<figure><figcaption>{}</figcaption><svg viewBox='0 0 {:.0f} {:.0f}' width='{:.0f}'>",
                                escaped(map.title), width, height, width);
  for (std::size_t c = 0; c < map.columns.size(); ++c) {
    svg += text_at(kLeft + kCellWidth * (static_cast<double>(c) + 0.5), kTop - 10, "middle", map.columns[c]);
  }
  for (std::size_t r = 0; r < map.rows.size(); ++r) {
    const double y = kTop + kCellHeight * static_cast<double>(r);
    svg += text_at(kLeft - 8, y + kCellHeight / 2 + 4, "end", map.rows[r]);
    for (std::size_t c = 0; c < map.columns.size(); ++c) {
      const double x = kLeft + kCellWidth * static_cast<double>(c);
      const auto& cell = map.cells[r * map.columns.size() + c];
      const char* frame = map.marked == r * map.columns.size() + c ? "class='marked'" : "";
      if (!cell) {
        svg += fmt::format("<rect x='{:.1f}' y='{:.1f}' width='{}' height='{}' rx='3' class='empty'/>", x + 1, y + 1,
                           kCellWidth - 2, kCellHeight - 2);
        continue;
      }
      const Rgb colour = colour_of(best > worst ? (*cell - worst) / (best - worst) : 1);
      svg +=
          fmt::format("<rect x='{:.1f}' y='{:.1f}' width='{}' height='{}' rx='3' fill='rgb({:.0f},{:.0f},{:.0f})' {}/>",
                      x + 1, y + 1, kCellWidth - 2, kCellHeight - 2, colour.red, colour.green, colour.blue, frame);
      svg += text_at(x + kCellWidth / 2, y + kCellHeight / 2 + 4, "middle", fmt::format("{:.2f}", *cell),
                     fmt::format("style='fill:{}'", ink_on(colour)).c_str());
    }
  }
  return svg + "</svg></figure>\n";
}

std::string line_chart_svg(const LineChart& chart) {
  constexpr double kLeft = 58, kRight = 14, kTop = 12, kBottom = 42;
  const Axis x = axis_of(chart, &Series::x, chart.log_x, kLeft, chart.width - kRight);
  const Axis y = axis_of(chart, &Series::y, chart.log_y, chart.height - kBottom, kTop);
  std::string svg = fmt::format("<figure><figcaption>{}</figcaption><svg viewBox='0 0 {:.0f} {:.0f}' width='{:.0f}'>",
                                escaped(chart.title), chart.width, chart.height, chart.width);
  for (const double tick : ticks_of(y, false)) {
    svg += fmt::format("<line x1='{:.1f}' x2='{:.1f}' y1='{:.1f}' y2='{:.1f}' class='grid'/>", x.from, x.to,
                       y.place(tick), y.place(tick));
    svg += text_at(kLeft - 8, y.place(tick) + 4, "end", fmt::format("{:g}", tick));
  }
  for (const double tick : ticks_of(x, true)) {
    svg += text_at(x.place(tick), chart.height - kBottom + 18, "middle", fmt::format("{:g}", tick));
  }
  svg += text_at((x.from + x.to) / 2, chart.height - 6, "middle", chart.x_name, "class='axis'");
  svg += fmt::format("<text transform='translate(14 {:.1f}) rotate(-90)' text-anchor='middle' class='axis'>{}</text>",
                     (y.from + y.to) / 2, escaped(chart.y_name));
  if (chart.mark_x) {
    svg += fmt::format("<line x1='{0:.1f}' x2='{0:.1f}' y1='{1:.1f}' y2='{2:.1f}' class='mark'/>",
                       x.place(*chart.mark_x), y.from, y.to);
  }
  for (const Series& series : chart.series) {
    std::string points;
    for (std::size_t i = 0; i < series.x.size(); ++i) {
      if (chart.log_y && series.y[i] <= 0) continue;
      points += fmt::format("{:.1f},{:.1f} ", x.place(series.x[i]), y.place(series.y[i]));
    }
    svg += fmt::format("<polyline points='{}' class='series s{}{}'/>", points, series.colour % 8,
                       series.dashed ? " dashed" : "");
  }
  svg += "</svg>";
  std::string legend;
  for (const Series& series : chart.series) {
    if (!series.name.empty()) {
      legend += fmt::format("<span><i class='key k{}'></i>{}</span>", series.colour % 8, escaped(series.name));
    }
  }
  return svg + (legend.empty() ? "" : "<div class='legend'>" + legend + "</div>") + "</figure>\n";
}

}  // namespace spillway::sweep
