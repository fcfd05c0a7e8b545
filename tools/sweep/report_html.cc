#include <fmt/format.h>

#include <bit>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include "spillway/units.h"
#include "tools/sweep/report.h"
#include "tools/terminal/amount.h"
#include "tools/terminal/html.h"

namespace spillway::sweep {
namespace {

using terminal::card;
using terminal::escaped;
using terminal::gb_per_s;
using terminal::HeatMap;
using terminal::LineChart;
using terminal::Series;
using terminal::text_of_size;

std::string cards(const SweepReport& report) {
  const auto rate = [&](Work work) { return fmt::format("{:.2f} GB/s", gb_per_s(report.chosen(work).rate)); };
  std::string html = "<div class='cards'>\n";
  html += card(text_of_size(report.setting.block_bytes), "block size");
  html += card(fmt::format("{}", report.setting.depth), "queue depth");
  html += card(std::string(name_of(report.way.engine)), "engine");
  html += card(rate(Work::kMixed), fmt::format("read and written {}:{}", kReadParts, kWriteParts));
  if (report.chosen(Work::kRead).repeats > 0) html += card(rate(Work::kRead), "read");
  if (report.chosen(Work::kWrite).repeats > 0) html += card(rate(Work::kWrite), "written");
  if (report.parameters > 0) {
    html += card(fmt::format("{:.1f} s", step_seconds(report)),
                 fmt::format("drive's time of a step, {:.3g} parameters", report.parameters));
  }
  return html + "</div>\n";
}

std::string facts(const SweepReport& report) {
  std::string html = fmt::format("<p class='soft'>{}, {} processors ({}), {} of memory</p>\n",
                                 escaped(report.machine.kernel), report.machine.processors,
                                 escaped(report.machine.processor), text_of_size(report.machine.memory_bytes));
  for (const PathInfo& path : report.paths) {
    const drive::DriveInfo& drive = path.drive;
    std::string text = fmt::format("{}: {} on {}", path.path.string(), path.mount.type,
                                   drive.name.empty() ? path.mount.source : drive.name);
    if (!drive.model.empty()) text += fmt::format(", {}", drive.model);
    if (!drive.link_now.empty()) text += fmt::format(", PCIe {} of {}", drive.link_now, drive.link_most);
    text += fmt::format(", {}, {} free", text_of_size(drive.bytes), text_of_size(path.free_bytes));
    html += fmt::format("<p class='soft'>{}</p>\n", escaped(text));
    for (const std::string& warning : path.warnings)
      html += fmt::format("<p class='warning'>{}</p>\n", escaped(warning));
  }
  return html;
}

HeatMap heat_map(const SweepReport& report, Work work, const std::string& title) {
  std::set<std::uint64_t> blocks;
  std::set<std::uint32_t> depths;
  for (const auto& [point, samples] : report.measurements) {
    if (point != report.searched(point.setting, point.work)) continue;
    blocks.insert(point.setting.block_bytes);
    depths.insert(point.setting.depth);
  }
  HeatMap map{.title = title};
  for (const std::uint64_t block : blocks) {
    const std::string name = text_of_size(block);
    map.columns.push_back(name.substr(0, name.size() - 2));  // `256 K`: the columns are narrow
  }
  for (const std::uint32_t depth : depths) {
    map.rows.push_back(fmt::format("{}", depth));
    for (const std::uint64_t block : blocks) {
      const Summary found = summary_of(report.measurements, report.searched({block, depth}, work));
      if (Setting{block, depth} == report.setting) map.marked = map.cells.size();
      map.cells.push_back(found.repeats ? std::optional(gb_per_s(found.rate)) : std::nullopt);
    }
  }
  return map;
}

// Latency over depth, a colour for each block size: the median, and dashed the 99th percentile.
std::string latency_curves(const SweepReport& report, Work work, const std::string& title) {
  std::map<std::uint64_t, std::map<std::uint32_t, Summary>> by_block;
  for (const auto& [point, samples] : report.measurements) {
    if (point != report.searched(point.setting, work)) continue;
    by_block[point.setting.block_bytes][point.setting.depth] = summarize(samples);
  }
  LineChart chart{.title = title, .x_name = "queue depth", .y_name = "ms", .log_x = true, .log_y = true};
  for (const auto& [block, depths] : by_block) {
    if (depths.size() < 2) continue;
    const auto colour = static_cast<std::size_t>(std::countr_zero(block / kKiB));  // the same in every chart
    Series middle{.name = text_of_size(block), .colour = colour}, tail{.dashed = true, .colour = colour};
    for (const auto& [depth, found] : depths) {
      middle.x.push_back(depth);
      middle.y.push_back(found.p50_us / 1000);
      tail.x.push_back(depth);
      tail.y.push_back(found.p99_us / 1000);
    }
    chart.series.push_back(std::move(middle));
    chart.series.push_back(std::move(tail));
  }
  chart.mark_x = report.setting.depth;
  return chart.series.empty() ? "" : terminal::line_chart_svg(chart);
}

std::string row(const SweepReport& report, const std::string& name, Point point, bool chosen,
                std::size_t most = SIZE_MAX) {
  const auto of = [&](Work work) {
    point.work = work;
    return summary_of(report.measurements, point, most);
  };
  const Summary mixed = of(Work::kMixed), read = of(Work::kRead), write = of(Work::kWrite);
  const auto rate = [](const Summary& s) { return s.repeats ? fmt::format("{:.2f}", gb_per_s(s.rate)) : "–"; };
  return fmt::format(
      "<tr{}><td>{}</td><td>{:.2f}</td><td>{:.2f} – {:.2f}</td><td>{}</td><td>{}</td><td>{}</td>"
      "<td>{:.2f}</td><td>{:.2f}</td><td>{:.4f}</td></tr>\n",
      chosen ? " class='chosen'" : "", escaped(name), gb_per_s(mixed.rate), gb_per_s(mixed.low), gb_per_s(mixed.high),
      mixed.repeats, rate(read), rate(write), mixed.p50_us / 1000, mixed.p99_us / 1000, mixed.cpu_seconds_per_gib);
}

std::string table(const std::string& what, const std::string& rows) {
  return fmt::format(
      "<div class='wide'><table><tr><th>{}</th><th>mixed GB/s</th><th>low – high</th><th>repeats</th>"
      "<th>read</th><th>write</th><th>p50 ms</th><th>p99 ms</th><th>CPU s/GiB</th></tr>\n{}</table></div>\n",
      what, rows);
}

std::string tables(const SweepReport& report) {
  std::string rows;
  for (std::size_t i = 0; i < report.candidates.size(); ++i) {
    const Setting& setting = report.candidates[i].setting;
    rows += row(report, fmt::format("{}, {}", text_of(setting), text_of_size(setting.in_flight_bytes())),
                report.searched(setting, Work::kMixed), i == report.choice.chosen);
  }
  std::string html = "<h2>Compared in turn</h2>\n" + table("block × depth, in flight", rows);
  rows.clear();
  for (const WayInfo& facts : report.ways) {
    if (facts.refused.empty()) {
      rows += row(report, text_of(facts.way), {report.setting, Work::kMixed, facts.way, report.measured_path},
                  facts.way == report.way, report.way_repeats);
    } else {
      rows += fmt::format("<tr><td>{}</td><td class='soft' colspan='8'>{}</td></tr>\n", text_of(facts.way),
                          escaped(facts.refused));
    }
  }
  html += "<h2>Engines</h2>\n" + table("at the chosen setting", rows);
  if (report.paths.size() < 2) return html;
  rows.clear();
  for (std::uint32_t path = 0; path < report.paths.size(); ++path) {
    rows += row(report, fmt::format("{}, share {}", report.paths[path].path.string(), report.shares[path]),
                {report.setting, Work::kMixed, report.way, path}, false, report.way_repeats);
  }
  rows += row(report, "all, striped", {report.setting, Work::kMixed, report.way, kAllPaths}, true, report.way_repeats);
  return html + "<h2>Paths</h2>\n" + table("alone and together", rows);
}

std::string sustained(const SweepReport& report) {
  if (!report.sustained) return "";
  const drive::Sustained& written = *report.sustained;
  LineChart chart{.title = fmt::format("{} written at full speed", text_of_size(written.written_bytes)),
                  .x_name = "seconds",
                  .y_name = "GB/s",
                  .width = 1140,
                  .height = 260};
  Series series;
  for (std::size_t i = 0; i < written.rates.size(); ++i) {
    series.x.push_back((static_cast<double>(i) + 0.5) * written.interval_seconds);
    series.y.push_back(gb_per_s(written.rates[i]));
  }
  chart.series.push_back(std::move(series));
  if (const auto drop = drive::find_drop(written.rates)) {
    chart.mark_x = static_cast<double>(drop->at) * written.interval_seconds;
  }
  std::string html = "<h2>Sustained</h2>\n" + terminal::line_chart_svg(chart);
  const std::string text = sustained_text(written);
  // Its last lines say what the curve means; the numbers before them are in the curve.
  html += fmt::format("<p>{}</p>\n", escaped(text.substr(text.rfind("\n  ", text.size() - 2) + 1)));
  for (const std::string& line : report.endurance) html += fmt::format("<p class='soft'>{}</p>\n", escaped(line));
  return html;
}

}  // namespace

std::string report_html(const SweepReport& report) {
  std::string names;
  for (const PathInfo& path : report.paths) names += (names.empty() ? "" : " + ") + path.path.string();
  std::string html = terminal::page_begin("spillway sweep " + names);
  html += facts(report) + cards(report);
  for (const std::string& reason : reasons(report)) html += fmt::format("<p>{}</p>\n", escaped(reason));
  html +=
      "<h2>Rates in GB/s: block size across, queue depth down; the frame is the choice</h2>\n<div class='charts'>\n";
  html += terminal::heat_map_svg(heat_map(report, Work::kMixed, fmt::format("mixed {}:{}", kReadParts, kWriteParts)));
  html += terminal::heat_map_svg(heat_map(report, Work::kRead, "read"));
  html += terminal::heat_map_svg(heat_map(report, Work::kWrite, "written"));
  html += "</div>\n<h2>Latency of a request: median, and dashed the 99th percentile</h2>\n<div class='charts'>\n";
  html += latency_curves(report, Work::kMixed, fmt::format("mixed {}:{}", kReadParts, kWriteParts));
  html += latency_curves(report, Work::kRead, "read");
  html += latency_curves(report, Work::kWrite, "written");
  html += "</div>\n" + tables(report) + sustained(report);
  html += fmt::format("<h2>For ds_config.json</h2>\n<pre>{}</pre>\n<h2>To check it with fio</h2>\n<pre>{}</pre>\n",
                      escaped(report_json(report)), escaped(fio_command(report)));
  for (const std::string& note : report.notes) html += fmt::format("<p class='warning'>note: {}</p>\n", escaped(note));
  return html + fmt::format("<p class='soft'>{}{:.1f} s, {} written to the drive</p>\n</body></html>\n",
                            report.exhaustive ? "every setting measured; " : "", report.seconds,
                            text_of_size(report.written_bytes));
}

}  // namespace spillway::sweep
