#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "tools/report/report.h"
#include "tools/report/summary.h"
#include "tools/terminal/html.h"

namespace spillway::reporting {
namespace {

using terminal::card;
using terminal::escaped;
using terminal::LineChart;
using terminal::Series;

constexpr double kWidth = 538;            // two charts beside each other
constexpr std::size_t kMostPoints = 400;  // of a line: more are one on another

// Of every so many steps that follow each other one point, their mean.
template <typename Value>
Series series_of(const Run& run, std::size_t colour, const Value& value) {
  Series series{.name = run.name, .colour = colour};
  const std::size_t together = (run.steps.size() + kMostPoints - 1) / kMostPoints;
  for (std::size_t first = 0; first < run.steps.size(); first += together) {
    double sum = 0, at = 0;
    std::size_t count = 0;
    for (std::size_t i = first; i < std::min(first + together, run.steps.size()); ++i) {
      const std::optional<double> one = value(run.steps[i]);
      if (!one) continue;
      sum += *one;
      at += static_cast<double>(run.steps[i].step);
      ++count;
    }
    if (count == 0) continue;
    series.x.push_back(at / static_cast<double>(count));
    series.y.push_back(sum / static_cast<double>(count));
  }
  return series;
}

// A run's line beside those of others: runs with the same bits lie on each other, so every second one is dashed.
template <typename Value>
Series line_of(const std::vector<Run>& runs, std::size_t run, const Value& value) {
  Series series = series_of(runs[run], run, value);
  series.dashed = run % 2 == 1;
  if (runs.size() == 1) series.name.clear();  // the page's title has it
  return series;
}

LineChart chart_of(std::string title, std::string y_name) {
  return {.title = std::move(title), .x_name = "step", .y_name = std::move(y_name), .width = kWidth, .height = 280};
}

// A line for each run; nothing where no run has the figure.
template <typename Value>
std::string chart(const std::vector<Run>& runs, LineChart chart, const Value& value) {
  for (std::size_t run = 0; run < runs.size(); ++run) {
    Series series = line_of(runs, run, value);
    const bool says_something = std::ranges::any_of(series.y, [](double y) { return y != 0; });
    if (says_something) chart.series.push_back(std::move(series));
  }
  return chart.series.empty() ? "" : terminal::line_chart_svg(chart);
}

std::string written_chart(const std::vector<Run>& runs) {
  LineChart chart = chart_of("Written to the drive in all", "GB");
  for (std::size_t run = 0; run < runs.size(); ++run) {
    double sum = 0;
    const Series series = line_of(runs, run, [&](const Step& step) -> std::optional<double> {
      return sum += static_cast<double>(step.written_bytes) / 1e9;
    });
    if (sum > 0) chart.series.push_back(series);
  }
  return chart.series.empty() ? "" : terminal::line_chart_svg(chart);
}

// What a run waited for, step by step: a line for each cause that matters.
std::string stall_chart(const Run& run) {
  const Summary summary = summarize(run);
  LineChart chart = chart_of(fmt::format("{}: stalled, by cause", run.name), "seconds a step");
  for (std::size_t cause = 0; cause < kStallNames.size(); ++cause) {
    if (summary.stalled_by[cause] < 0.005) continue;
    Series series = series_of(run, cause, [&](const Step& step) { return std::optional(step.stalls[cause]); });
    series.name = kStallNames[cause];
    chart.series.push_back(std::move(series));
  }
  return chart.series.empty() ? "" : terminal::line_chart_svg(chart);
}

// A bar for each run, cut into what its time went into.
std::string time_bars(const std::vector<Run>& runs) {
  constexpr double kLeft = 8, kBar = 1120, kRow = 46;
  const double height = kRow * static_cast<double>(runs.size());
  std::string svg = fmt::format("<svg viewBox='0 0 1140 {0:.0f}' width='1140'>", height);
  std::array<bool, kStallNames.size()> shown{};
  for (std::size_t run = 0; run < runs.size(); ++run) {
    const Summary summary = summarize(runs[run]);
    const double top = kRow * static_cast<double>(run);
    svg += terminal::text_at(kLeft, top + 13, "start",
                             fmt::format("{}: {:.3f} s a step, computing for {:.0f} % of it", runs[run].name,
                                         summary.step_seconds, 100 * (1 - summary.stalled)));
    svg += fmt::format("<rect x='{:.1f}' y='{:.1f}' width='{:.1f}' height='20' class='empty'/>", kLeft, top + 19, kBar);
    double from = kLeft + kBar * std::clamp(1 - summary.stalled, 0.0, 1.0);
    for (std::size_t cause = 0; cause < kStallNames.size(); ++cause) {
      const double width = std::min(kBar * summary.stalled_by[cause], kLeft + kBar - from);
      if (width < 0.5) continue;
      shown[cause] = true;
      svg += fmt::format(
          "<rect x='{:.1f}' y='{:.1f}' width='{:.1f}' height='20' style='fill:var(--s{})'><title>{} {:.1f} "
          "%</title></rect>",
          from, top + 19, width, cause, kStallNames[cause], 100 * summary.stalled_by[cause]);
      from += width;
    }
  }
  std::string legend;
  for (std::size_t cause = 0; cause < kStallNames.size(); ++cause) {
    if (shown[cause]) legend += fmt::format("<span><i class='key k{}'></i>{}</span>", cause, kStallNames[cause]);
  }
  return fmt::format("<figure>{}</svg><div class='legend'>{}</div></figure>\n", svg, legend);
}

std::string table(const std::vector<Run>& runs, double drive_life) {
  std::string html = "<div class='wide'><table><tr><th></th>";
  for (const Run& run : runs) html += fmt::format("<th>{}</th>", escaped(run.name));
  html += "</tr>\n";
  for (const Row& row : rows_of(runs, drive_life)) {
    const bool part = row.label.starts_with(' ');
    html += fmt::format("<tr><td>{}{}</td>", part ? "&emsp;" : "", escaped(row.label));
    for (const std::string& cell : row.cells) html += fmt::format("<td>{}</td>", escaped(cell));
    html += "</tr>\n";
  }
  return html + "</table></div>\n";
}

std::string cards(const Run& run) {
  const Summary summary = summarize(run);
  std::string html = "<div class='cards'>\n" + card(fmt::format("{}", summary.steps), "steps");
  if (summary.last_loss) html += card(fmt::format("{:.4f}", *summary.last_loss), "loss, last tenth");
  html += card(fmt::format("{:.3f} s", summary.step_seconds), "a step, median");
  if (summary.tokens_per_second) html += card(fmt::format("{:.0f}", *summary.tokens_per_second), "tokens a second");
  html += card(fmt::format("{:.1f} %", 100 * summary.stalled), "stalled");
  if (summary.written_in_all > 0) {
    html += card(fmt::format("{:.3g} TB", summary.written_a_day() / 1e12), "written a day, at this pace");
  }
  return html + "</div>\n";
}

std::string charts(const std::vector<Run>& runs) {
  LineChart loss = chart_of("Loss", "loss");
  loss.from_zero = false;
  std::string html = chart(runs, loss, [](const Step& step) { return step.loss; });
  LineChart held_out = chart_of("Loss of held-out rows", "loss");
  held_out.from_zero = false;
  html += chart(runs, held_out, [](const Step& step) { return step.held_out_loss; });
  html += chart(runs, chart_of("Gradient norm", "norm"), [](const Step& step) { return step.norm; });
  html += chart(runs, chart_of("Time of a step", "seconds"), [](const Step& s) { return std::optional(s.seconds); });
  html += chart(runs, chart_of("Learning rate", "millionths"), [](const Step& step) -> std::optional<double> {
    return step.learning_rate ? std::optional(1e6 * *step.learning_rate) : std::nullopt;
  });
  html += chart(runs, chart_of("Read from the drive", "GB a step"),
                [](const Step& step) { return std::optional(static_cast<double>(step.read_bytes) / 1e9); });
  html += chart(runs, chart_of("Written to the drive", "GB a step"),
                [](const Step& step) { return std::optional(static_cast<double>(step.written_bytes) / 1e9); });
  html += written_chart(runs);
  return "<div class='charts'>\n" + html + "</div>\n";
}

}  // namespace

std::string report_html(const std::vector<Run>& runs, double drive_life) {
  std::string names;
  for (const Run& run : runs) names += (names.empty() ? "" : ", ") + run.name;
  std::string html = terminal::page_begin("spillway report " + names);
  if (runs.size() == 1) html += cards(runs.front());
  for (const std::string& note : notes_of(runs)) html += fmt::format("<p class='warning'>{}</p>\n", escaped(note));
  html += "<h2>Training</h2>\n" + charts(runs);
  html += "<h2>Where the time went: computing, and what it waited for</h2>\n<div class='charts'>\n" + time_bars(runs);
  for (const Run& run : runs) html += stall_chart(run);
  html += "</div>\n";
  html += fmt::format("<h2>In figures</h2>\n{}", table(runs, drive_life));
  return html + "</body></html>\n";
}

}  // namespace spillway::reporting
