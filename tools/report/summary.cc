#include "tools/report/summary.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <utility>

#include "tools/terminal/amount.h"

namespace spillway::reporting {
namespace {

// What a file says may be more than there can be.
std::string text_of_bytes(double bytes) {
  return terminal::fixed_text_of_size(static_cast<std::uint64_t>(std::min(bytes, 1e18)));
}

// The value that a share of them lies below; 0.5 is the median.
double quantile(std::vector<double> values, double share) {
  if (values.empty()) return 0;
  const auto at = values.begin() + static_cast<std::ptrdiff_t>(share * static_cast<double>(values.size() - 1) + 0.5);
  std::nth_element(values.begin(), at, values.end());
  return *at;
}

template <typename Value>
std::vector<double> all(const std::vector<Step>& steps, const Value& value) {
  std::vector<double> values;
  for (const Step& step : steps) {
    if (const std::optional<double> one = value(step)) values.push_back(*one);
  }
  return values;
}

template <typename Count>
double median_of(const std::vector<Step>& steps, Count Step::*count) {
  return quantile(all(steps, [&](const Step& step) { return std::optional(static_cast<double>(step.*count)); }), 0.5);
}

Lowest lowest_of(const std::vector<Step>& steps, std::optional<double> Step::*loss) {
  Lowest lowest;
  for (const Step& step : steps) {
    if (!(step.*loss) || (lowest.loss && *lowest.loss <= *(step.*loss))) continue;
    lowest = {.loss = step.*loss, .at = step.step};
  }
  return lowest;
}

void summarize_loss(const std::vector<Step>& steps, Summary& found) {
  found.lowest = lowest_of(steps, &Step::loss);
  found.lowest_held_out = lowest_of(steps, &Step::held_out_loss);
  const auto first = std::ranges::find_if(steps, [](const Step& step) { return step.loss.has_value(); });
  if (first != steps.end()) found.first_loss = first->loss;
  const std::vector<double> losses = all(steps, [](const Step& step) { return step.loss; });
  if (losses.empty()) return;
  const auto last = static_cast<std::ptrdiff_t>(std::max<std::size_t>(1, losses.size() / 10));
  found.last_loss = quantile({losses.end() - last, losses.end()}, 0.5);
}

// The first step reads what later ones find in memory, so a rate is one of those that follow.
void summarize_time(const std::vector<Step>& steps, Summary& found) {
  const std::vector<Step> later(steps.size() > 1 ? steps.begin() + 1 : steps.begin(), steps.end());
  const std::vector<double> seconds = all(later, [](const Step& step) { return std::optional(step.seconds); });
  found.step_seconds = quantile(seconds, 0.5);
  found.fast_seconds = quantile(seconds, 0.1);
  found.slow_seconds = quantile(seconds, 0.9);
  double total = 0, tokens = 0;
  for (const Step& step : later) {
    total += step.seconds;
    tokens += static_cast<double>(step.tokens);
    found.stalled += step.stall_seconds;
    for (std::size_t cause = 0; cause < step.stalls.size(); ++cause) found.stalled_by[cause] += step.stalls[cause];
  }
  if (total <= 0) return;
  if (tokens > 0) found.tokens_per_second = tokens / total;
  found.stalled /= total;
  for (double& share : found.stalled_by) share /= total;
}

void summarize_link(const std::vector<Step>& steps, Summary& found) {
  std::map<std::string, std::vector<double>> percents;
  for (const Step& step : steps) {
    if (!step.link.empty()) percents[step.link].push_back(step.link_percent);
  }
  std::size_t most = 0;
  for (const auto& [link, shares] : percents) {
    if (shares.size() <= most) continue;
    most = shares.size();
    found.link = link;
    found.link_percent = quantile(shares, 0.5);
  }
  found.link_share = static_cast<double>(most) / static_cast<double>(steps.size());
}

std::string text_of_days(double days) {
  if (days > 730) return fmt::format("{:.0f} years", days / 365);
  return days >= 2 ? fmt::format("{:.0f} days", days) : fmt::format("{:.0f} hours", days * 24);
}

class Table {
 public:
  explicit Table(const std::vector<Summary>& runs) : runs_(runs) {}

  // `text` says nothing, by an empty string, of a run that has no such figure.
  template <typename Text>
  void row(std::string label, const Text& text) {
    Row row{.label = std::move(label), .cells = {}};
    for (const Summary& run : runs_) row.cells.push_back(text(run));
    if (std::any_of(row.cells.begin(), row.cells.end(), [](const auto& cell) { return !cell.empty(); }))
      rows.push_back(std::move(row));
  }

  std::vector<Row> rows;

 private:
  const std::vector<Summary>& runs_;
};

void add_training(Table& table, const Summary& first, bool several) {
  const auto decimal = [](std::optional<double> value, int digits) {
    return value ? fmt::format("{:.{}f}", *value, digits) : std::string();
  };
  table.row("steps", [](const Summary& s) { return fmt::format("{} to {}", s.first_step, s.last_step); });
  table.row("made again", [](const Summary& s) { return s.made_again ? fmt::format("{}", s.made_again) : ""; });
  table.row("skipped", [](const Summary& s) { return s.skipped ? fmt::format("{}", s.skipped) : ""; });
  table.row("loss, first", [&](const Summary& s) { return decimal(s.first_loss, 4); });
  table.row("loss, last tenth", [&](const Summary& s) { return decimal(s.last_loss, 4); });
  const auto lowest = [](const Lowest& of) { return of.loss ? fmt::format("{:.4f} at {}", *of.loss, of.at) : ""; };
  table.row("loss, lowest", [&](const Summary& s) { return lowest(s.lowest); });
  table.row("of held-out rows", [&](const Summary& s) { return lowest(s.lowest_held_out); });
  table.row("gradient norm", [&](const Summary& s) { return decimal(s.norm, 3); });
  table.row("seconds a step", [](const Summary& s) { return fmt::format("{:.3f}", s.step_seconds); });
  if (several && first.step_seconds > 0) {
    table.row("beside the first",
              [&](const Summary& s) { return fmt::format("× {:.2f}", s.step_seconds / first.step_seconds); });
  }
  table.row("80 % of them", [](const Summary& s) {
    return s.steps > 2 ? fmt::format("{:.3f} to {:.3f}", s.fast_seconds, s.slow_seconds) : "";
  });
  table.row("tokens a second", [&](const Summary& s) { return decimal(s.tokens_per_second, 0); });
}

void add_links(Table& table) {
  const auto bytes = [](double Summary::*of) {
    return [of](const Summary& s) { return s.*of > 0 ? text_of_bytes(s.*of) : std::string(); };
  };
  table.row("slowest link", [](const Summary& s) {
    return s.link.empty() ? "" : fmt::format("{} at {:.0f} %", s.link, s.link_percent);
  });
  table.row("in so many steps",
            [](const Summary& s) { return s.link.empty() ? "" : fmt::format("{:.0f} %", 100 * s.link_share); });
  table.row("stalled", [](const Summary& s) { return fmt::format("{:.1f} %", 100 * s.stalled); });
  for (std::size_t cause = 0; cause < kStallNames.size(); ++cause) {
    table.row(fmt::format("  for {}", kStallNames[cause]), [&](const Summary& s) {
      return s.stalled_by[cause] >= 0.0005 ? fmt::format("{:.1f} %", 100 * s.stalled_by[cause]) : "";
    });
  }
  table.row("read a step", bytes(&Summary::read_bytes));
  table.row("written a step", bytes(&Summary::written_bytes));
  table.row("to the device", bytes(&Summary::up_bytes));
  table.row("from the device", bytes(&Summary::down_bytes));
}

void add_wear(Table& table, double drive_life) {
  table.row("written in all",
            [](const Summary& s) { return s.written_in_all > 0 ? text_of_bytes(s.written_in_all) : ""; });
  table.row("a day, at this pace", [](const Summary& s) {
    return s.written_in_all > 0 ? fmt::format("{:.3g} TB", s.written_a_day() / 1e12) : "";
  });
  if (drive_life <= 0) return;
  table.row("of the drive's life", [&](const Summary& s) {
    const double percent = 100 * s.written_in_all / drive_life;
    if (percent <= 0) return std::string();
    return percent < 0.01 ? "< 0.01 %" : fmt::format("{:.2f} %", percent);
  });
  table.row("it lasts, at this pace", [&](const Summary& s) {
    return s.written_a_day() > 0 ? text_of_days(drive_life / s.written_a_day()) : "";
  });
}

}  // namespace

Summary summarize(const Run& run) {
  const std::vector<Step>& steps = run.steps;
  Summary found{.first_step = steps.front().step,
                .last_step = steps.back().step,
                .steps = steps.size(),
                .made_again = run.made_again,
                .seconds = run.seconds};
  found.skipped = static_cast<std::uint64_t>(std::ranges::count_if(steps, &Step::skipped));
  summarize_loss(steps, found);
  summarize_time(steps, found);
  summarize_link(steps, found);
  const std::vector<double> norms = all(steps, [](const Step& step) { return step.norm; });
  if (!norms.empty()) found.norm = quantile(norms, 0.5);
  found.read_bytes = median_of(steps, &Step::read_bytes);
  found.written_bytes = median_of(steps, &Step::written_bytes);
  found.up_bytes = median_of(steps, &Step::up_bytes);
  found.down_bytes = median_of(steps, &Step::down_bytes);
  found.written_in_all = run.written_bytes;
  return found;
}

std::vector<Row> rows_of(const std::vector<Run>& runs, double drive_life) {
  std::vector<Summary> summaries;
  for (const Run& run : runs) summaries.push_back(summarize(run));
  Table table(summaries);
  add_training(table, summaries.front(), runs.size() > 1);
  add_links(table);
  add_wear(table, drive_life);
  return std::move(table.rows);
}

std::vector<std::string> notes_of(const std::vector<Run>& runs) {
  std::vector<std::string> notes;
  for (const Run& run : runs) {
    if (run.made_again > 0) {
      notes.push_back(fmt::format(
          "{}: {} steps were made again after a crash; the last run counts; written bytes and seconds are of all runs",
          run.name, run.made_again));
    }
    if (run.cut) notes.push_back(fmt::format("{}: ends in the middle of a line, which is left out", run.name));
  }
  return notes;
}

}  // namespace spillway::reporting
