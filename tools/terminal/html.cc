#include "tools/terminal/html.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

namespace spillway::terminal {
namespace {

constexpr const char* kStyle = R"(
:root { --paper: #fbfcfd; --card: #ffffff; --ink: #1b2430; --soft: #5c6b7c; --line: #dfe5ec; --accent: #0b7285;
  --empty: #eef1f5; --s0: #0b7285; --s1: #d9480f; --s2: #5f3dc4; --s3: #2b8a3e; --s4: #c2255c; --s5: #846300;
  --s6: #1864ab; --s7: #495057; --s8: #9c36b5; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #12171e; --card: #1a212a; --ink: #e4eaf1; --soft: #94a3b4; --line: #303b48; --accent: #3bc9db;
    --empty: #232c37; --s0: #3bc9db; --s1: #ff922b; --s2: #b197fc; --s3: #69db7c; --s4: #f783ac; --s5: #ffd43b;
    --s6: #74c0fc; --s7: #ced4da; --s8: #da77f2; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1240px; padding: 28px 24px 60px; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
h1 { font-size: 26px; margin: 0 0 2px; } h2 { font-size: 18px; margin: 36px 0 10px; }
p { margin: 4px 0; } .soft { color: var(--soft); } .warning { color: var(--s1); }
.cards { display: flex; flex-wrap: wrap; gap: 12px; margin: 18px 0 6px; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 10px 16px;
  min-width: 140px; }
.card b { display: block; font-size: 22px; font-weight: 650; } .card span { color: var(--soft); font-size: 13px; }
.charts { display: flex; flex-wrap: wrap; gap: 16px; }
figure { margin: 0; background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 12px 14px; }
figcaption { font-weight: 600; margin-bottom: 6px; }
svg { max-width: 100%; height: auto; display: block; } svg text { fill: var(--ink); font-size: 12px; }
svg .axis { fill: var(--soft); } .grid { stroke: var(--line); } .empty { fill: var(--empty); }
.marked { stroke: var(--s1); stroke-width: 4; paint-order: stroke; }
.mark { stroke: var(--s1); stroke-dasharray: 4 4; }
.series { fill: none; stroke-width: 2; } .dashed { stroke-dasharray: 5 4; }
.s0 { stroke: var(--s0); } .s1 { stroke: var(--s1); } .s2 { stroke: var(--s2); }
.s3 { stroke: var(--s3); } .s4 { stroke: var(--s4); } .s5 { stroke: var(--s5); }
.s6 { stroke: var(--s6); } .s7 { stroke: var(--s7); } .s8 { stroke: var(--s8); }
.legend { display: flex; flex-wrap: wrap; gap: 4px 14px; font-size: 13px; color: var(--soft); margin-top: 4px; }
.key { display: inline-block; width: 14px; height: 3px; margin: 0 6px 4px 0; }
.k0 { background: var(--s0); } .k1 { background: var(--s1); } .k2 { background: var(--s2); }
.k3 { background: var(--s3); } .k4 { background: var(--s4); } .k5 { background: var(--s5); }
.k6 { background: var(--s6); } .k7 { background: var(--s7); } .k8 { background: var(--s8); }
.wide { overflow-x: auto; }
table { border-collapse: collapse; background: var(--card); border: 1px solid var(--line); font-size: 14px; }
th, td { padding: 5px 12px; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } th { color: var(--soft); font-weight: 600; }
tr.chosen td { font-weight: 650; color: var(--accent); } td.soft { text-align: left; }
pre { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 12px 14px; overflow-x: auto;
  font: 13px/1.45 ui-monospace, "DejaVu Sans Mono", monospace; }
)";

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

Axis axis_of(const LineChart& chart, std::vector<double> Series::*values, bool log, bool from_zero, double from,
             double to) {
  double low = std::numeric_limits<double>::infinity(), high = 0;
  for (const Series& series : chart.series) {
    for (const double value : series.*values) {
      if (log && value <= 0) continue;
      low = std::min(low, value);
      high = std::max(high, value);
    }
  }
  low = std::min(low, high);
  if (log) return {low, high, from, to, log};
  if (from_zero) return {0, high * 1.05, from, to, log};
  const double margin = high > low ? 0.05 * (high - low) : 0.05 * std::abs(high);
  return {low - margin, high + margin, from, to, log};
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
  const double span = axis.high - axis.low;
  double step = std::pow(10, std::floor(std::log10(span / 4)));
  for (const double more : {2.0, 2.5, 2.0}) {
    if (span / step > 6) step *= more;
  }
  const double first = std::ceil(axis.low / step);
  // Counted: a number that is large beside the span may be equal to the one after it.
  for (int i = 0; i < 10 && (first + i) * step <= axis.high; ++i) ticks.push_back((first + i) * step);
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

std::string page_begin(const std::string& title) {
  return fmt::format(
      "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>\n"
      "<meta name='viewport' content='width=device-width, initial-scale=1'><meta name='color-scheme' content='light "
      "dark'>\n"
      "<title>{0}</title>\n<style>{1}</style></head><body>\n<h1>{0}</h1>\n",
      escaped(title), kStyle);
}

std::string card(const std::string& value, const std::string& what) {
  return fmt::format("<div class='card'><b>{}</b><span>{}</span></div>\n", escaped(value), escaped(what));
}

std::string text_at(double x, double y, const char* anchor, const std::string& text, const char* more) {
  return fmt::format("<text x='{:.1f}' y='{:.1f}' text-anchor='{}' {}>{}</text>", x, y, anchor, more, escaped(text));
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
  const Axis x = axis_of(chart, &Series::x, chart.log_x, true, kLeft, chart.width - kRight);
  const Axis y = axis_of(chart, &Series::y, chart.log_y, chart.from_zero, chart.height - kBottom, kTop);
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

}  // namespace spillway::terminal
