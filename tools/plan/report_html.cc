#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "tools/plan/report.h"
#include "tools/terminal/amount.h"
#include "tools/terminal/html.h"

namespace spillway::planning {
namespace {

using terminal::card;
using terminal::escaped;
using terminal::fixed_text_of_size;
using terminal::text_at;

constexpr double kWidth = 1140, kLeft = 110, kRight = 20;
constexpr double kSpan = kWidth - kLeft - kRight;
constexpr std::size_t kColours = 8, kParts = 500, kLevels = 8;

// A box that says what it is when it is pointed at.
std::string box(double x, double y, double width, double height, const std::string& style, const std::string& title) {
  return fmt::format("<rect x='{:.2f}' y='{:.1f}' width='{:.2f}' height='{:.1f}' style='{}'>{}</rect>", x, y, width,
                     height, style, title.empty() ? "" : "<title>" + escaped(title) + "</title>");
}

std::string cards(const Report& report) {
  const Prediction& made = *report.prediction;
  const TierBytes bytes = totals_of(made.plan);
  std::string html = "<div class='cards'>\n";
  html += card(seconds_text(made.step.seconds), "a step");
  html += card(fmt::format("{:.4g}", static_cast<double>(report.tokens) / made.step.seconds), "tokens a second");
  html += card(limit_text(made), "busiest link");
  html += card(fixed_text_of_size(bytes.hbm), "hbm");
  html += card(fixed_text_of_size(bytes.host), "host memory");
  if (bytes.nvme > 0) html += card(fixed_text_of_size(bytes.nvme), "nvme");
  if (report.life) {
    html += card(fmt::format("{:.2f} TB", report.life->bytes_per_day / 1e12), "written a day");
    if (const auto days = report.life->days())
      html += card(fmt::format("{:.{}f} days", *days, *days < 10 ? 1 : 0), "until the drives are worn out");
  }
  return html + "</div>\n";
}

// Each tier's budget as a bar, divided by purpose.
std::string tiers(const Ledger& ledger) {
  struct Tier {
    Placement placement;
    std::uint64_t budget;
  };
  constexpr double kRow = 46;
  std::string html;
  for (const Tier& tier : {Tier{Placement::kHbm, ledger.hbm_budget}, Tier{Placement::kHost, ledger.host_budget},
                           Tier{Placement::kNvme, ledger.nvme_budget}}) {
    const std::uint64_t total = ledger.total(tier.placement), all = std::max(total, tier.budget);
    if (total == 0) continue;
    const auto scale = [&](std::uint64_t bytes) {
      return kSpan * static_cast<double>(bytes) / static_cast<double>(all);
    };
    std::string svg = box(kLeft, 4, kSpan, kRow - 14, "fill:var(--empty)", "free"), legend;
    svg += text_at(kLeft - 10, kRow / 2 + 1, "end", name_of(tier.placement), "style='font-weight:600'");
    double at = kLeft;
    std::size_t colour = 0;
    for (const Reservation& line : ledger.reservations) {
      if (line.tier != tier.placement) continue;
      const std::string size = fixed_text_of_size(line.bytes);
      const std::size_t c = colour++ % kColours;
      svg += box(at, 4, scale(line.bytes), kRow - 14, fmt::format("fill:var(--s{})", c), line.purpose + ": " + size);
      legend += fmt::format("<span><i class='key k{}'></i>{} {}</span>", c, escaped(line.purpose), size);
      at += scale(line.bytes);
    }
    html += fmt::format(
        "<figure class='whole'><figcaption>{}: {} of {}</figcaption><svg viewBox='0 0 {} {}' width='{}'>{}</svg>"
        "<div class='legend'>{}</div></figure>\n",
        name_of(tier.placement), fixed_text_of_size(total), fixed_text_of_size(tier.budget), kWidth, kRow, kWidth, svg,
        legend);
  }
  return html;
}

// Neighbours that are as busy are one box, the fainter the less of the time they are busy.
std::string lane_boxes(const std::vector<double>& busy, double y, double height, std::size_t colour,
                       const std::string& title) {
  const auto level = [&](std::size_t part) { return std::ceil(busy[part] * kLevels - 1e-6); };
  std::string svg;
  for (std::size_t from = 0, to; from < busy.size(); from = to) {
    for (to = from + 1; to < busy.size() && level(to) == level(from); ++to) {
    }
    if (level(from) <= 0) continue;
    const double part = kSpan / static_cast<double>(busy.size());
    svg += box(kLeft + part * static_cast<double>(from), y, part * static_cast<double>(to - from), height,
               fmt::format("fill:var(--s{});fill-opacity:{:.3f}", colour, level(from) / kLevels), title);
  }
  return svg;
}

// Ticks at 1, 2 or 5 times a power of ten.
double tick_of(double span) {
  double step = std::pow(10, std::floor(std::log10(span / 5)));
  for (const double more : {2.0, 2.5, 2.0}) {
    if (span / step > 10) step *= more;
  }
  return step;
}

// Compute of one pass alone, for a colour of its own.
Schedule of_pass(const Prediction& made, Pass pass) {
  Schedule part;
  part.begin = made.schedule.begin;
  part.end = made.schedule.end;
  for (const ScheduleOp& op : made.schedule.ops) {
    if (op.lane == Lane::kCompute && op.visit < made.plan.visits.size() && made.plan.visits[op.visit].pass == pass)
      part.ops.push_back(op);
  }
  return part;
}

std::string timeline(const Prediction& made) {
  constexpr double kRow = 26, kTop = 6;
  const Schedule& schedule = made.schedule;
  const double seconds = schedule.seconds();
  std::string lanes, grid;
  double y = kTop;
  const auto name = [&](const std::string& text) { lanes += text_at(kLeft - 10, y + 15, "end", text); };
  name("compute");
  lanes += lane_boxes(busy_parts(of_pass(made, Pass::kForward), Lane::kCompute, kParts), y, kRow - 6, 0, "forward");
  lanes += lane_boxes(busy_parts(of_pass(made, Pass::kBackward), Lane::kCompute, kParts), y, kRow - 6, 2, "backward");
  y += kRow;
  constexpr std::array kLanesShown = {Lane::kCaller,      Lane::kEarlyUpdates, Lane::kTileReads,
                                      Lane::kWeightReads, Lane::kChecks,       Lane::kWrites,
                                      Lane::kH2d,         Lane::kD2h,          Lane::kNet};
  constexpr std::array<std::size_t, kLanesShown.size()> kColourOf = {1, 1, 3, 3, 7, 4, 5, 6, 8};
  for (std::size_t l = 0; l < kLanesShown.size(); ++l) {
    const std::vector<double> busy = busy_parts(schedule, kLanesShown[l], kParts);
    if (std::ranges::all_of(busy, [](double part) { return part <= 0; })) continue;
    name(name_of(kLanesShown[l]));
    lanes += lane_boxes(busy, y, kRow - 6, kColourOf[l], name_of(kLanesShown[l]));
    y += kRow;
  }
  const double step = tick_of(seconds);
  for (double tick = 0; tick <= seconds * 1.0001; tick += step) {
    const double x = kLeft + kSpan * tick / seconds;
    grid += fmt::format("<line x1='{0:.1f}' x2='{0:.1f}' y1='{1}' y2='{2:.1f}' class='grid'/>", x, kTop, y);
    grid += text_at(x, y + 16, "middle", fmt::format("{:g}", tick));
  }
  grid += text_at(kWidth - kRight, y + 34, "end", "seconds from the end of one step to the end of the next",
                  "class='axis'");
  return fmt::format(
      "<figure class='whole'><figcaption>When each link is at work in a step; fainter: part of the time</figcaption>"
      "<svg viewBox='0 0 {} {:.0f}' width='{}'>{}{}</svg>"
      "<div class='legend'><span><i class='key k0'></i>forward</span><span><i class='key k2'></i>backward</span>"
      "<span><i class='key k1'></i>optimizer</span><span><i class='key k3'></i>nvme read</span>"
      "<span><i class='key k4'></i>nvme written</span><span><i class='key k5'></i>to the device</span>"
      "<span><i class='key k6'></i>from the device</span>{}</div></figure>\n",
      kWidth, y + 42, kWidth, grid, lanes,
      made.plan.rank.count > 1 ? "<span><i class='key k8'></i>network</span>" : "");
}

std::string links(const Prediction& made) {
  constexpr double kRow = 28;
  const Schedule& schedule = made.schedule;
  std::string svg;
  double y = 4;
  for (std::size_t l = 0; l < kLinks; ++l) {
    if (schedule.busy[l] <= 0) continue;
    const double share = schedule.busy[l] / schedule.seconds();
    const bool limit = static_cast<Link>(l) == schedule.limit();
    const char* name = spillway::name_of(static_cast<Link>(l));
    svg += text_at(kLeft - 10, y + 15, "end", name, limit ? "style='font-weight:700'" : "");
    svg += box(kLeft, y, kSpan, kRow - 8, "fill:var(--empty)", "");
    svg += box(kLeft, y, kSpan * std::min(share, 1.0), kRow - 8, limit ? "fill:var(--s1)" : "fill:var(--s0)", name);
    const std::string label = fmt::format("{}, {:.0f} %", seconds_text(schedule.busy[l]), 100 * share);
    // On the empty part where the bar leaves room for it.
    svg += share < 0.8
               ? text_at(kLeft + kSpan * share + 8, y + 15, "start", label)
               : text_at(kLeft + kSpan * std::min(share, 1.0) - 8, y + 15, "end", label, "style='fill:var(--card)'");
    y += kRow;
  }
  return fmt::format(
      "<figure class='whole'><figcaption>Each link's own time in a step of {}</figcaption><svg viewBox='0 0 {} {:.0f}' "
      "width='{}'>{}</svg></figure>\n",
      seconds_text(schedule.seconds()), kWidth, y, kWidth, svg);
}

std::string table(const Report& report) {
  std::string html =
      "<div class='wide'><table><tr><th>optimizer states / parameters</th><th>ZeRO stages</th><th>hbm</th>"
      "<th>host</th><th>nvme</th><th>step</th><th>busiest link</th></tr>\n";
  for (const PlacementRow& row : report.alternatives.table) {
    const auto bytes = [&](std::uint64_t TierBytes::*tier) {
      return row.bytes ? fixed_text_of_size((*row.bytes).*tier) : std::string("?");
    };
    html += fmt::format("<tr{}><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td>",
                        row.chosen ? " class='chosen'" : "", place_text(row), row.stages, bytes(&TierBytes::hbm),
                        bytes(&TierBytes::host), bytes(&TierBytes::nvme));
    html += row.refused.empty()
                ? fmt::format("<td>{}</td><td>{}</td></tr>\n", seconds_text(row.seconds), escaped(row.limit))
                : fmt::format("<td class='soft' colspan='2'>{}</td></tr>\n", escaped(refusal_of(row)));
  }
  return html + "</table></div>\n";
}

std::string changes(const Report& report) {
  if (report.alternatives.changes.empty()) return "";
  std::string html = "<h2>What would make a token cheaper</h2>\n<div class='wide'><table>\n";
  html += "<tr><th>change</th><th>time for a token</th><th>a step</th></tr>\n";
  for (const Change& change : report.alternatives.changes) {
    html += fmt::format("<tr><td>{}</td><td>{:+.0f} %</td><td>{}</td></tr>\n", escaped(change.what),
                        100 * change.effect, seconds_text(change.seconds));
  }
  return html + "</table></div>\n";
}

std::string rates(const Report& report) {
  std::string html = "<h2>Rates</h2>\n<div class='wide'><table><tr><th>link</th><th>rate</th><th>source</th></tr>\n";
  for (const RateLine& line : report.rates.lines) {
    html += fmt::format("<tr><td>{}</td><td>{}</td><td class='soft'>{}</td></tr>\n", escaped(line.name),
                        rate_text(line), escaped(line.source));
  }
  html += "</table></div>\n";
  for (const std::string& fact : report.measured) html += fmt::format("<p class='soft'>{}</p>\n", escaped(fact));
  return html;
}

}  // namespace

std::string report_html(const Report& report) {
  std::string html = terminal::page_begin("spillway plan " + report.model);
  html += "<style>.whole { width: 100%; } .charts + p { margin-top: 14px; }</style>\n";
  const auto line = [&](const char* kind, const std::string& text) {
    html += fmt::format("<p class='{}'>{}</p>\n", kind, escaped(text));
  };
  line("", title_of(report));
  line("soft", "device: " + report.device);
  for (const std::string& estimate : report.estimates) line("soft", "estimate: " + estimate);
  if (!report.refused.empty()) line("warning", report.refused);
  if (report.prediction) {
    html += cards(report);
    html += "<h2>Memory, reserved before step 1</h2>\n<div class='charts'>\n";
    html += tiers(report.prediction->plan.ledger) + "</div>\n";
    html += "<h2>A step</h2>\n<div class='charts'>\n" + timeline(*report.prediction) + links(*report.prediction) +
            "</div>\n";
    if (const std::string commits = commits_of(report); !commits.empty()) line("", commits);
    if (report.life) line("", life_of(*report.life));
    for (const std::string& fact : report.facts) line("soft", fact);
  }
  html += "<h2>Placements</h2>\n" + table(report) + changes(report) + rates(report);
  for (const std::string& fact : coarse_summary(report)) line("soft", fact);
  return html + fmt::format("<p class='soft'>planned in {}</p>\n</body></html>\n", seconds_text(report.seconds));
}

}  // namespace spillway::planning
