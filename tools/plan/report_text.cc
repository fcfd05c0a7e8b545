#include <fmt/format.h>

#include <algorithm>
#include <iterator>

#include "tools/finetune/report.h"
#include "tools/plan/report.h"
#include "tools/terminal/amount.h"

namespace spillway::planning {
namespace {

using terminal::fixed_text_of_size;

class Text {
 public:
  Text(const Report& report, bool colour) : report_(report), colour_(colour) {}

  std::string write() {
    line("{}", title_of(report_));
    line("device: {}", report_.device);
    for (const std::string& estimate : report_.estimates) line("estimate: {}", estimate);
    if (report_.estimates.empty()) line("memory is exact: the plan of spillway finetune");
    for (const std::string& fact : report_.facts) line("{}", fact);
    if (report_.prediction) write_prediction(*report_.prediction);
    write_rates();
    if (report_.life) line("\ndrive: {}", life_of(*report_.life));
    write_table();
    write_changes();
    for (const std::string& fact : coarse_summary(report_)) line("\n{}", fact);
    return std::move(text_);
  }

 private:
  template <typename... Arguments>
  void line(fmt::format_string<Arguments...> format, Arguments&&... arguments) {
    fmt::format_to(std::back_inserter(text_), format, std::forward<Arguments>(arguments)...);
    text_ += '\n';
  }
  std::string bold(const std::string& text) const { return colour_ ? "\x1b[1m" + text + "\x1b[0m" : text; }

  void write_prediction(const Prediction& made) {
    line("\n{}\n{}", bold("memory, reserved before step 1"), models::finetune::ledger_text(made.plan.ledger).substr(0));
    text_.pop_back();  // the ledger ends its own lines
    if (report_.run.ranks.all > 1) write_ranks();
    line("\n{}", bold("step"));
    line("  {} on average, {:.4g} tokens/s; {}", seconds_text(made.step.seconds),
         static_cast<double>(report_.tokens) / made.step.seconds, limit_text(made));
    write_links(made);
    write_stalls(made.schedule);
    if (const std::string commits = commits_of(report_); !commits.empty()) line("  {}", commits);
    if (made.speculative > 0) {
      line("  {} blocks are updated inside backward; {} while clipping has an effect", made.speculative,
           seconds_text(made.clipped.seconds));
    }
    if (made.visits_recomputed > 0) {
      line("  backward recomputes {} of {} layers: hbm_bytes has no room for what they keep", made.visits_recomputed,
           made.visits_with_insides);
    }
  }

  void write_ranks() {
    const RankCounts& ranks = report_.run.ranks;
    line("{}", bold(fmt::format("ranks: {}, {} on a host", ranks.all, ranks.on_a_host)));
    line("  {:<6} {:>13} {:>13} {:>13}", "", "a rank", "a host", "all");
    for (const RanksMemory& row : ranks_memory(report_))
      line("  {:<6} {:>13} {:>13} {:>13}", name_of(row.tier), fixed_text_of_size(row.of_a_rank),
           fixed_text_of_size(row.of_a_host), fixed_text_of_size(row.of_all));
    line("  at most: the first rank has most, up to 1,024 elements of a block more than the last");
  }

  void write_links(const Prediction& made) {
    const Schedule& schedule = made.schedule;
    const ScheduleTraffic& traffic = made.step.traffic;
    for (std::size_t l = 0; l < kLinks; ++l) {
      const auto link = static_cast<Link>(l);
      std::string moved;
      if (link == Link::kNvme) {
        if (traffic.nvme_read + traffic.nvme_write == 0) continue;
        moved = fmt::format("{} read, {} written", fixed_text_of_size(traffic.nvme_read),
                            fixed_text_of_size(traffic.nvme_write));
      } else if (link == Link::kH2d) {
        moved = fixed_text_of_size(traffic.h2d);
      } else if (link == Link::kD2h) {
        moved = fixed_text_of_size(traffic.d2h);
      } else if (link == Link::kNetwork && report_.run.ranks.all > 1) {
        moved = network_text(traffic);
      } else if (schedule.busy[l] <= 0) {
        continue;
      }
      const std::string name = fmt::format("{:<8}", spillway::name_of(link));
      const std::string row =
          fmt::format("  {}{:>10}  {:>4.0f} %  {}", link == schedule.limit() ? bold(name) : name,
                      seconds_text(schedule.busy[l]), 100 * schedule.busy[l] / schedule.seconds(), moved);
      line("{}", row.substr(0, row.find_last_not_of(' ') + 1));
    }
  }

  void write_stalls(const Schedule& schedule) {
    std::string causes;
    double sum = schedule.shared;
    for (std::size_t s = 0; s < kStallNames.size(); ++s) {
      sum += schedule.stalls.of[s];
      if (schedule.stalls.of[s] < 0.01 * schedule.seconds()) continue;
      causes += fmt::format(", {} {}", kStallNames[s], seconds_text(schedule.stalls.of[s]));
    }
    if (schedule.shared >= 0.01 * schedule.seconds())
      causes += fmt::format(", sharing its cores {}", seconds_text(schedule.shared));
    if (!causes.empty()) line("  compute waits {}: {}", seconds_text(sum), causes.substr(2));
  }

  void write_rates() {
    line("\n{}", bold("rates"));
    for (const RateLine& rate : report_.rates.lines)
      line("  {:<26}{:>16}  {}", rate.name, rate_text(rate), rate.source);
    for (const std::string& fact : report_.measured) line("  {}", fact);
  }

  void write_table() {
    line("\n{}", bold("placements: optimizer states / parameters"));
    line("  {:<13} {:<6} {:>11} {:>11} {:>11} {:>10}  {}", "", "stages", "hbm", "host", "nvme", "step", "limit");
    for (const PlacementRow& row : report_.alternatives.table) {
      const auto bytes = [&](std::uint64_t TierBytes::*tier) {
        return row.bytes ? fixed_text_of_size((*row.bytes).*tier) : std::string("?");
      };
      const std::string last = row.refused.empty() ? row.limit : refusal_of(row);
      const std::string text =
          fmt::format("{} {:<13} {:<6} {:>11} {:>11} {:>11} {:>10}  {}", row.chosen ? '>' : ' ', place_text(row),
                      row.stages, bytes(&TierBytes::hbm), bytes(&TierBytes::host), bytes(&TierBytes::nvme),
                      row.refused.empty() ? seconds_text(row.seconds) : "-", last);
      line("{}", row.chosen ? bold(text) : text);
    }
  }

  void write_changes() {
    if (report_.alternatives.changes.empty()) return;
    line("\n{}", bold("what would make a token cheaper"));
    for (const Change& change : report_.alternatives.changes) line("  {}: {}", change.what, effect_text(change));
  }

  const Report& report_;
  const bool colour_;
  std::string text_;
};

}  // namespace

std::string report_text(const Report& report, bool colour) { return Text(report, colour).write(); }

}  // namespace spillway::planning
