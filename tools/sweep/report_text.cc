#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <set>

#include "spillway/units.h"
#include "tools/sweep/report.h"
#include "tools/terminal/amount.h"

namespace spillway::sweep {
namespace {

using terminal::gb_per_s;
using terminal::text_of_size;

std::string drive_text(const PathInfo& facts) {
  const drive::DriveInfo& drive = facts.drive;
  if (drive.name.empty()) return fmt::format("from {}", facts.mount.source);
  std::string text = "on " + drive.name;
  if (!drive.model.empty()) text += fmt::format(", {}", drive.model);
  if (!drive.firmware.empty()) text += fmt::format(" (firmware {})", drive.firmware);
  if (drive.is_virtual) text += ", virtual";
  if (drive.rotational.value_or(false) && !drive.is_virtual) text += ", rotating";
  if (!drive.parts.empty()) text += fmt::format(" over {}", fmt::join(drive.parts, " + "));
  return text + fmt::format(", {}", text_of_size(drive.bytes));
}

std::string queue_text(const drive::DriveInfo& drive) {
  std::string text = fmt::format("scheduler {}, write cache: {}, sectors of {}, requests up to {}",
                                 drive.scheduler.empty() ? "none" : drive.scheduler,
                                 drive.write_cache.empty() ? "unknown" : drive.write_cache, drive.sector_bytes,
                                 text_of_size(drive.largest_request_bytes));
  if (!drive.link_now.empty()) text += fmt::format(", PCIe {} of {}", drive.link_now, drive.link_most);
  if (drive.celsius) text += fmt::format(", {:.0f} °C", *drive.celsius);
  return text;
}

// Background colours of xterm's 256, dark to bright; the text on them is white, then black.
constexpr std::array kColours = {53, 54, 60, 25, 31, 37, 36, 71, 113, 185, 226};
constexpr std::size_t kFirstBright = 6;

std::string cell(double rate, double best, bool chosen, bool colour) {
  if (rate <= 0) return "      .  ";
  const std::string text = fmt::format("{}{:.2f}{}", chosen ? "[" : "", gb_per_s(rate), chosen ? "]" : " ");
  if (!colour) return fmt::format("{:>9}", text);
  const auto level = static_cast<std::size_t>(std::clamp(rate / best, 0.0, 1.0) * (kColours.size() - 1));
  return fmt::format(" \x1b[48;5;{};38;5;{}m{:>8}\x1b[0m", kColours[level], level >= kFirstBright ? 16 : 231, text);
}

std::string heat_map(const SweepReport& report, Work work, bool colour) {
  std::set<std::uint64_t> blocks;
  std::set<std::uint32_t> depths;
  double best = 0;
  for (const auto& [point, samples] : report.measurements) {
    if (point != report.searched(point.setting, work)) continue;
    blocks.insert(point.setting.block_bytes);
    depths.insert(point.setting.depth);
    best = std::max(best, summarize(samples).rate);
  }
  std::string text = fmt::format(
      "\n{}, GB/s; [ ] is the choice\n  depth",
      work == Work::kMixed ? fmt::format("read and written {}:{} at once", kReadParts, kWriteParts) : name_of(work));
  for (const std::uint64_t block : blocks) text += fmt::format("{:>9}", text_of_size(block));
  text += '\n';
  for (const std::uint32_t depth : depths) {
    text += fmt::format("  {:>5}", depth);
    for (const std::uint64_t block : blocks) {
      const Setting setting{block, depth};
      const Summary found = summary_of(report.measurements, report.searched(setting, work));
      text += cell(found.rate, best, setting == report.setting, colour);
    }
    text += '\n';
  }
  return text;
}

std::string row(const SweepReport& report, const std::string& name, const Point& point, std::size_t most = SIZE_MAX) {
  const auto of = [&](Work work) {
    Point other = point;
    other.work = work;
    return summary_of(report.measurements, other, most);
  };
  const Summary mixed = of(Work::kMixed), read = of(Work::kRead), write = of(Work::kWrite);
  if (mixed.repeats == 0) return fmt::format("  {:<30}  not measured\n", name);
  const auto rate = [](const Summary& s) { return s.repeats ? fmt::format("{:.2f}", gb_per_s(s.rate)) : "-"; };
  return fmt::format("  {:<30} {:>5.2f} {:>11} ×{:<2} {:>5} {:>6} {:>8.2f} {:>7.2f} {:>9.4f}\n", name,
                     gb_per_s(mixed.rate), fmt::format("{:.2f}–{:.2f}", gb_per_s(mixed.low), gb_per_s(mixed.high)),
                     mixed.repeats, rate(read), rate(write), mixed.p50_us / 1000, mixed.p99_us / 1000,
                     mixed.cpu_seconds_per_gib);
}

std::string header(const char* what) {
  return fmt::format("\n  {:<30} {:>5} {:>11} {:<3} {:>5} {:>6} {:>8} {:>7} {:>9}\n", what, "mixed", "low–high", "",
                     "read", "write", "p50 ms", "p99 ms", "CPU s/GiB");
}

std::string candidates_table(const SweepReport& report) {
  std::string text = header("block × depth, in flight");
  constexpr std::size_t kMostRows = 12;  // an exhaustive sweep compares them all
  for (std::size_t i = 0, rows = 0; i < report.candidates.size(); ++i) {
    const Setting& setting = report.candidates[i].setting;
    const bool marked = i == report.choice.chosen || i == report.choice.fastest;
    if (!marked && report.candidates.size() > kMostRows && ++rows > kMostRows - 2) continue;
    const char* mark = i == report.choice.chosen ? "→ " : i == report.choice.fastest ? "^ " : "  ";
    const std::string name = fmt::format("{}{}, {}", mark, text_of(setting), text_of_size(setting.in_flight_bytes()));
    text += row(report, name, report.searched(setting, Work::kMixed));
  }
  return text;
}

std::string ways_table(const SweepReport& report) {
  std::string text = header("engine");
  for (const WayInfo& facts : report.ways) {
    if (!facts.refused.empty()) {
      text += fmt::format("    {:<28}  {}\n", text_of(facts.way), facts.refused);
      continue;
    }
    const char* mark = facts.way == report.way ? "→ " : "  ";
    text += row(report, mark + text_of(facts.way), {report.setting, Work::kMixed, facts.way, report.measured_path},
                report.way_repeats);
  }
  return text;
}

std::string paths_table(const SweepReport& report) {
  std::string text = header("path");
  for (std::uint32_t path = 0; path < report.paths.size(); ++path) {
    const std::string name = fmt::format("  {}, share {}", report.paths[path].path.string(), report.shares[path]);
    text += row(report, name, {report.setting, Work::kMixed, report.way, path}, report.way_repeats);
  }
  const Point striped{report.setting, Work::kMixed, report.way, kAllPaths};
  text += row(report, "  all, striped", striped, report.way_repeats);
  double sum = 0;
  for (const double rate : mixed_rates(report)) sum += rate;
  const double together = gb_per_s(summary_of(report.measurements, striped, report.way_repeats).rate);
  if (sum > 0 && together < 0.8 * sum) {
    text += fmt::format("  striped they give {:.0f} % of their sum: they share a link, a controller or the processor\n",
                        together / sum * 100);
  }
  return text;
}

std::string step_text(const SweepReport& report) {
  const double bytes = report.parameters * (kReadParts + kWriteParts);
  return fmt::format(
      "\n{:.3g} parameters, bf16 weights and exact states on the drive: {} B read and {} B written each per step\n"
      "  {:.1f} GB at {:.2f} GB/s: {:.1f} s a step, if nothing but the drive takes time; compute may take longer\n",
      report.parameters, kReadParts, kWriteParts, bytes / 1e9, gb_per_s(report.chosen(Work::kMixed).rate),
      step_seconds(report));
}

}  // namespace

std::string preflight_text(const SweepReport& report) {
  const MachineInfo& machine = report.machine;
  std::string text =
      fmt::format("{}, {} processors ({}), {} of memory, locked memory: {}\n", machine.kernel, machine.processors,
                  machine.processor, text_of_size(machine.memory_bytes), machine.locked_memory);
  for (const PathInfo& facts : report.paths) {
    text += fmt::format("{}: {} ({}) {}\n  {} free, {}\n", facts.path.string(), facts.mount.type, facts.mount.options,
                        drive_text(facts), text_of_size(facts.free_bytes),
                        facts.direct ? fmt::format("direct I/O in multiples of {}", facts.alignment) : "no direct I/O");
    if (!facts.drive.name.empty()) text += fmt::format("  {}\n", queue_text(facts.drive));
    for (const std::string& warning : facts.warnings) text += fmt::format("  warning: {}\n", warning);
  }
  return text + fmt::format("writes at most {}, into {} of {} each that no longer {} a name and {} with the sweep\n",
                            text_of_size(report.most_written_bytes), report.paths.size() == 1 ? "a file" : "files",
                            text_of_size(report.file_bytes), report.paths.size() == 1 ? "has" : "have",
                            report.paths.size() == 1 ? "goes" : "go");
}

std::vector<double> mixed_rates(const SweepReport& report) {
  std::vector<double> rates;
  for (std::uint32_t path = 0; path < report.paths.size(); ++path) {
    const Summary alone = summary_of(report.measurements, {report.setting, Work::kMixed, report.way, path});
    const bool later = alone.repeats > 0 || path >= report.first_rates.size();
    rates.push_back(gb_per_s(later ? alone.rate : report.first_rates[path]));
  }
  return rates;
}

std::vector<DriveShare> shares_of_drives(const SweepReport& report) {
  const auto share_of = [&](std::size_t path) { return report.shares.empty() ? 1u : report.shares[path]; };
  double row = 0;
  for (std::size_t path = 0; path < report.paths.size(); ++path) row += share_of(path);
  std::vector<DriveShare> drives;
  for (std::size_t path = 0; path < report.paths.size(); ++path) {
    const PathInfo& facts = report.paths[path];
    const auto same = std::find_if(drives.begin(), drives.end(), [&](const DriveShare& drive) {
      return !facts.drive.name.empty() && drive.facts.drive.name == facts.drive.name;
    });
    if (same != drives.end()) {
      same->share += share_of(path) / row;
    } else if (share_of(path) > 0) {
      drives.push_back({facts, share_of(path) / row});
    }
  }
  return drives;
}

std::vector<std::string> reasons(const SweepReport& report) {
  const Setting& setting = report.setting;
  const Setting& fastest = report.candidates[report.choice.fastest].setting;
  std::vector<std::string> lines;
  const std::size_t repeats = report.candidates[report.choice.chosen].rates.size();
  if (setting == fastest) {
    lines.push_back(
        fmt::format("{} is the fastest; nothing with less in flight comes within {:.0f} % of it "
                    "(mixed, median of {} repeats)",
                    text_of(setting), 100 * (1 - kGoodShare), repeats));
  } else {
    const std::uint64_t less = setting.in_flight_bytes(), most = fastest.in_flight_bytes();
    lines.push_back(
        fmt::format("{} reaches {:.1f} % of the fastest, {} (mixed, median of the ratios of {} rounds), with {}",
                    text_of(setting), report.choice.share * 100, text_of(fastest), repeats,
                    less == most ? "as much in flight and less CPU"
                                 : fmt::format("{} in flight instead of {}", text_of_size(less), text_of_size(most))));
  }
  lines.push_back(
      fmt::format("{} is the first engine within {:.0f} % of the fastest one that no other undercuts in CPU",
                  name_of(report.way.engine), 100 * (1 - kGoodShare)));
  return lines;
}

std::string sustained_text(const drive::Sustained& sustained) {
  std::string text = fmt::format("\nwritten at full speed: {} in {:.1f} s, {:.2f} GB/s; one column is {:.1f} s\n  {}\n",
                                 text_of_size(sustained.written_bytes), sustained.seconds, gb_per_s(sustained.rate()),
                                 sustained.interval_seconds, drive::sparkline(sustained.rates));
  constexpr std::size_t kColumns = 10;
  text += "  GB/s:";
  for (std::size_t i = 0; i < sustained.rates.size(); ++i) {
    text += fmt::format("{} {:.2f}", i > 0 && i % kColumns == 0 ? "\n       " : "", gb_per_s(sustained.rates[i]));
  }
  text += '\n';
  if (const auto drop = drive::find_drop(sustained.rates)) {
    const double seconds = static_cast<double>(drop->at) * sustained.interval_seconds;
    double bytes = 0;
    for (std::size_t i = 0; i < drop->at; ++i) bytes += sustained.rates[i] * sustained.interval_seconds;
    text += fmt::format(
        "  after {:.1f} s, {}, it drops from {:.2f} to {:.2f} GB/s for good: a cache is full, or something throttles\n",
        seconds, text_of_size(static_cast<std::uint64_t>(bytes) / kMiB * kMiB), gb_per_s(drop->before),
        gb_per_s(drop->after));
  } else {
    text += fmt::format("  no lasting drop in {}\n", text_of_size(sustained.written_bytes));
  }
  if (sustained.file_bytes < sustained.written_bytes) {
    text += fmt::format("  the free space held {}, which were written over and over: a cache may have hidden longer\n",
                        text_of_size(sustained.file_bytes));
  }
  return text;
}

double step_seconds(const SweepReport& report) {
  const double rate = report.chosen(Work::kMixed).rate;
  return rate > 0 ? report.parameters * (kReadParts + kWriteParts) / rate : 0;
}

std::string fio_command(const SweepReport& report) {
  std::string files;
  for (const PathInfo& facts : report.paths) {
    files += fmt::format("{}{}", files.empty() ? "" : ":", (facts.path / "fio-check").string());
  }
  const bool ring = report.way.engine == IoEngineKind::kIoUring;
  const std::string_view engine = report.way.engine == IoEngineKind::kThreads ? "psync" : name_of(report.way.engine);
  // Without an asynchronous engine fio gets its depth from jobs.
  const std::string depth =
      report.way.engine == IoEngineKind::kThreads
          ? fmt::format("--thread --numjobs={}", std::min(report.setting.depth, 16u) * report.ranks)
          : fmt::format("--iodepth={}", report.setting.depth * report.paths.size());
  const std::string jobs =
      report.ranks > 1 && report.way.engine != IoEngineKind::kThreads ? fmt::format(" --numjobs={}", report.ranks) : "";
  return fmt::format(
      "fio --name=check --filename={} --size={}M --rw=rw --rwmixread={:.0f} --bs={}k {} --ioengine={} --direct={}{}"
      " --time_based --runtime=10 --unlink=1 --group_reporting{}",
      files, report.file_bytes / kMiB, 100.0 * kReadParts / (kReadParts + kWriteParts),
      report.setting.block_bytes / kKiB, depth, engine, report.paths.front().direct ? 1 : 0,
      ring && report.way.fixed_buffers ? " --fixedbufs=1 --registerfiles=1" : "", jobs);
}

std::string report_text(const SweepReport& report, bool colour) {
  std::string text = heat_map(report, Work::kMixed, colour);
  text += candidates_table(report) + ways_table(report);
  if (report.paths.size() > 1) text += paths_table(report);
  const Summary mixed = report.chosen(Work::kMixed);
  text += fmt::format("\nchosen: block_size {}, queue_depth {}, {}: {:.2f} GB/s mixed\n", report.setting.block_bytes,
                      report.setting.depth, text_of(report.way), gb_per_s(mixed.rate));
  for (const std::string& reason : reasons(report)) text += fmt::format("  {}\n", reason);
  if (report.parameters > 0) text += step_text(report);
  if (report.sustained) text += sustained_text(*report.sustained);
  for (const std::string& line : report.endurance) text += fmt::format("  {}\n", line);
  text += fmt::format("\nto check it with fio:\n  {}\n", fio_command(report));
  text += fmt::format("\nfor ds_config.json:\n{}\n", report_json(report));
  for (const std::string& note : report.notes) text += fmt::format("note: {}\n", note);
  return text + fmt::format("{:.1f} s, {} written to the drive\n", report.seconds, text_of_size(report.written_bytes));
}

}  // namespace spillway::sweep
