#include "tools/plan/report.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "tools/terminal/amount.h"

namespace spillway::planning {

std::optional<double> DriveLife::days() const {
  if (!life_bytes || bytes_per_day <= 0) return std::nullopt;
  return *life_bytes / bytes_per_day;
}

std::string title_of(const Report& report) {
  const ModelShape& shape = report.shape;
  const std::string layers =
      shape.encodes() ? fmt::format("{} + {}", shape.layers, shape.decoder_layers) : fmt::format("{}", shape.layers);
  return fmt::format("{} ({}): {} parameters, {} layers of width {}, {}; {} tokens a step ({}{} x {} rows of {}){}",
                     report.model, shape.family, report.parameters, layers, shape.width,
                     spillway::name_of(report.config.weights), report.tokens,
                     report.run.ranks.all > 1 ? fmt::format("{} ranks x ", report.run.ranks.all) : "",
                     report.config.gradient_accumulation, report.config.micro_batch, report.run.sequence,
                     report.run.loop == Loop::kPyTorch ? ", in a PyTorch loop" : "");
}

std::vector<RanksMemory> ranks_memory(const Report& report) {
  std::vector<RanksMemory> memory;
  for (const Placement tier : {Placement::kHbm, Placement::kHost, Placement::kNvme}) {
    const std::uint64_t bytes = report.prediction->plan.ledger.total(tier);
    memory.push_back({tier, bytes, bytes * report.run.ranks.on_a_host, bytes * report.run.ranks.all});
  }
  return memory;
}

std::string network_text(const ScheduleTraffic& traffic) {
  using terminal::fixed_text_of_size;
  return fmt::format("{} of weights gathered, {} of sums scattered, {} of the norm",
                     fixed_text_of_size(traffic.gathered), fixed_text_of_size(traffic.scattered),
                     fixed_text_of_size(traffic.leaves));
}

std::string commits_of(const Report& report) {
  const Prediction& made = *report.prediction;
  if (!made.plan.has_store) return "";
  if (made.commit_every == 0) return "no step survives a crash (commit_every 0)";
  if (made.commit_every == 1) return "every step survives a crash";
  return fmt::format("a crash loses up to {} steps: a commit takes {}{}", made.commit_every,
                     seconds_text(made.commit_seconds),
                     report.config.commit_every ? "" : ", so that it costs at most 2 % of the time");
}

std::string life_of(const DriveLife& life) {
  std::string text = fmt::format("{:.2f} TB written a day", life.bytes_per_day / 1e12);
  if (const auto days = life.days()) {
    const std::string lasts = *days > 730 ? fmt::format("{:.1f} years", *days / 365.25)
                                          : fmt::format("{:.{}f} days", *days, *days < 10 ? 1 : 0);
    text += fmt::format(": {:.0f} TB of life are worn out in {} of training ({})", *life.life_bytes / 1e12, lasts,
                        life.source);
  } else if (life.bytes_per_day > 0) {
    text += "; the drive's life is not known (" + life.source + ")";
  }
  return text;
}

std::string rate_text(const RateLine& line) {
  if (line.unit == "B/s") return fmt::format("{:.2f} GB/s", line.value / 1e9);
  if (line.unit == "FLOP/s") {
    return line.value >= 1e12 ? fmt::format("{:.1f} TFLOP/s", line.value / 1e12)
                              : fmt::format("{:.1f} GFLOP/s", line.value / 1e9);
  }
  if (line.unit == "s") return fmt::format("{:.2f} ms", 1e3 * line.value);
  return fmt::format("{:g}", line.value);
}

std::string seconds_text(double seconds) {
  if (seconds >= 7200) return fmt::format("{:.1f} h", seconds / 3600);
  if (seconds >= 100) return fmt::format("{:.0f} s", seconds);
  return seconds >= 0.1 ? fmt::format("{:.2f} s", seconds) : fmt::format("{:.2f} ms", 1e3 * seconds);
}

std::string effect_text(const Change& change) {
  return fmt::format("{:+.0f} % time for a token, {} a step", 100 * change.effect, seconds_text(change.seconds));
}

std::string place_text(const PlacementRow& row) {
  return fmt::format("{} / {}", name_of(row.states), name_of(row.parameters));
}

std::string refusal_of(const PlacementRow& row) {
  if (row.needs.empty()) return "does not fit: " + row.refused;
  return fmt::format("does not fit: needs {} of {}", terminal::fixed_text_of_size(row.needed_bytes), row.needs);
}

std::vector<std::string> coarse_summary(const Report& report) {
  std::vector<std::string> facts;
  if (report.prediction && report.prediction->joined > 1) {
    facts.push_back(fmt::format("the step is scheduled with up to {} of {} tiles as one", report.prediction->joined,
                                report.prediction->plan.tiles.size()));
  }
  const std::uint64_t elements = report.alternatives.tile_elements;
  if (elements != report.config.tile_elements)
    facts.push_back(fmt::format("placements and changes are compared with tiles of {} Mi elements", elements >> 20));
  return facts;
}

std::string limit_text(const Prediction& made) {
  const Schedule& schedule = made.schedule;
  const double busy = schedule.busy[static_cast<std::size_t>(schedule.limit())];
  return fmt::format("{} at {:.0f} %", spillway::name_of(schedule.limit()),
                     schedule.seconds() > 0 ? 100 * busy / schedule.seconds() : 0);
}

const char* name_of(Lane lane) {
  constexpr const char* kNames[kLanes] = {"compute",       "update",     "early update", "read weights", "read tiles",
                                          "check weights", "nvme write", "to device",    "from device",  "network"};
  return kNames[static_cast<std::size_t>(lane)];
}

std::vector<double> busy_parts(const Schedule& schedule, Lane lane, std::size_t parts) {
  std::vector<double> busy(parts);
  const double part = schedule.seconds() / static_cast<double>(parts);
  if (!(part > 0)) return busy;
  for (const ScheduleOp& op : schedule.ops) {
    if (op.lane != lane || op.seconds <= 0 || op.end <= schedule.begin || op.start >= schedule.end) continue;
    const double from = (std::max(op.start, schedule.begin) - schedule.begin) / part;
    const double to = (std::min(op.end, schedule.end) - schedule.begin) / part;
    for (auto p = static_cast<std::size_t>(from); p < parts && static_cast<double>(p) < to; ++p) {
      const double begin = std::max(from, static_cast<double>(p)), end = std::min(to, static_cast<double>(p + 1));
      busy[p] = std::min(1.0, busy[p] + std::max(0.0, end - begin));
    }
  }
  return busy;
}

}  // namespace spillway::planning
