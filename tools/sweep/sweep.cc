#include "tools/sweep/sweep.h"

#include <fmt/format.h>

#include <algorithm>
#include <random>
#include <set>
#include <string>
#include <utility>

#include "spillway/error.h"
#include "spillway/log.h"
#include "spillway/units.h"
#include "tools/sweep/lockstep.h"
#include "tools/sweep/pace.h"
#include "tools/sweep/sweep_setup.h"
#include "tools/terminal/amount.h"
#include "tools/terminal/interrupt.h"
#include "tools/terminal/json.h"
#include "tools/terminal/output.h"
#include "tools/terminal/progress.h"
#include "tools/terminal/ranks.h"
#include "tools/terminal/tell.h"

namespace spillway::sweep {
namespace {

using terminal::gb_per_s;
using terminal::text_of_size;

constexpr std::size_t kCoarsePasses = 2;
constexpr std::size_t kRounds = 3, kMostRounds = 9;  // repeats of what is compared: at least, and with time left over
constexpr std::size_t kFinalists = 6, kRefined = 12, kRefinedAtOnce = 3;
constexpr double kShareOfOthers = 0.1;  // of the drive's traffic, from which on the figures are doubtful
constexpr double kEnd = 0.97;           // of the time: nothing is begun after it
constexpr double kWarmup = 0.15;        // of a point
constexpr double kShareOfGlance = 0.5;  // length of a point that nothing is decided by, of the usual one
constexpr Setting kDefault{kMiB, 32};   // what ds_config.json means without a section "aio"
// Points that write, in units of the most that one may write: enough for every phase.
constexpr std::uint64_t kWritingPoints = 96, kWritingPointsPerPath = 8;
constexpr double kPointGiB = 0.7;  // the most that one writes, of a sweep of a minute

struct Stopped {};  // by Ctrl-C

class Sweep {
 public:
  Sweep(const SweepOptions& options, Lockstep& lockstep, std::FILE* out)
      : options_(options),
        out_(out),
        progress_(0, 0, out, lockstep.ranks() == 1),
        lockstep_(lockstep),
        setup_(lockstep.setup()),
        pace_(options.seconds, options.exhaustive, most_written()),
        ends_(PhaseEnds::of(options.paths.size())) {
    report_.exhaustive = options.exhaustive;
    report_.parameters = options.parameters;
    report_.ranks = lockstep.ranks();
    report_.most_written_bytes = pace_.most_written();
    set_log_sink([this](LogLevel, std::string_view message) { note(std::string(message)); });
  }
  ~Sweep() { set_log_sink({}); }
  Sweep(const Sweep&) = delete;
  Sweep& operator=(const Sweep&) = delete;

  int run() {
    try {
      measure_everything();
    } catch (const Stopped&) {
      progress_.clear();
      terminal::tell(out_, "stopped; nothing is chosen, and nothing is left on the drive\n");
      return 128 + lockstep_.signal();
    }
    progress_.clear();
    report_.written_bytes = pace_.written();
    report_.seconds = pace_.elapsed();
    const bool colours = terminal::shows_colours(out_);
    terminal::write(out_, terminal::masked_report(report_text(report_, colours), colours));
    if (!options_.json.empty()) terminal::write_output("--json", options_.json, report_json(report_));
    if (!options_.html.empty()) terminal::write_output("--report", options_.html, report_html(report_));
    std::fflush(out_);
    return 0;
  }

 private:
  // That one point may write, on all ranks.
  std::uint64_t point_bytes() const {
    const auto usual =
        static_cast<std::uint64_t>(kPointGiB * static_cast<double>(kGiB) * std::min(1.0, options_.seconds / 60));
    return std::max(usual, 4 * setup_.most_in_flight() * setup_.paths()) * lockstep_.ranks();
  }

  // The test files once; then the points.
  std::uint64_t most_written() const {
    std::uint64_t points = kWritingPoints + kWritingPointsPerPath * setup_.paths();
    if (options_.exhaustive) points += 2 * kRounds * full_grid(setup_.limits()).size();
    return lockstep_.file_bytes() + points * point_bytes() + options_.sustained_bytes;
  }

  void measure_everything() {
    report_.machine = examine_machine();
    report_.paths = setup_.facts();
    report_.file_bytes = setup_.file_bytes() / setup_.paths();
    if (lockstep_.ranks() > 1) terminal::tell(out_, "{}\n", ranks_text());
    terminal::tell(out_, "{}", preflight_text(report_));
    std::fflush(out_);
    prepare();
    if (setup_.paths() > 1) measure_paths_alone();
    search();
    choose_setting();
    compare_ways();
    if (setup_.paths() > 1) compare_paths();
    check_other_load();
    if (options_.sustained_bytes > 0) write_on();
  }

  std::string ranks_text() const {
    const HostShare& share = lockstep_.share();
    return fmt::format("ranks: {} at the same time, {} on this machine, {} core{} for each; rates are of all together",
                       lockstep_.ranks(), share.ranks, share.cores, share.cores == 1 ? "" : "s");
  }

  void prepare() {
    say(fmt::format("filling {} with random data", text_of_size(lockstep_.file_bytes())));
    const double seconds = pace_.until(ends_.fill);
    pace_.note_written(lockstep_.fill(seconds, [&](double elapsed, std::uint64_t) {
      print_status(fmt::format("filling, {:.0f} s at most", seconds - elapsed));
      return go_on();
    }));
    if (lockstep_.signal() != 0) throw Stopped();
    lockstep_.limit_by_rate();
    report_.paths = setup_.facts();
    report_.file_bytes = setup_.filled_bytes(0);
    report_.ways = lockstep_.find_ways();
    const auto granted = std::find_if(report_.ways.begin(), report_.ways.end(),
                                      [](const WayInfo& facts) { return facts.refused.empty(); });
    SPILLWAY_CHECK(granted != report_.ways.end(), "threads are always to be had");
    report_.way = report_.searched_way = granted->way;
    report_.measured_path = setup_.paths() > 1 ? kAllPaths : 0;
  }

  // Each path's rate, for its share of the striped space. The setting is not chosen yet, so it is the default.
  void measure_paths_alone() {
    say("each path alone, for its share");
    const Setting setting = setup_.allowed(kDefault);
    const auto points = static_cast<double>(kRounds * setup_.paths());
    std::vector<double> rates(setup_.paths());
    for (std::size_t round = 0; round < kRounds; ++round) {
      for (std::uint32_t path = 0; path < setup_.paths(); ++path) {
        measure({setting, Work::kMixed, report_.way, path}, pace_.point_seconds(ends_.alone, points));
      }
    }
    for (std::uint32_t path = 0; path < setup_.paths(); ++path) {
      rates[path] = summary_of(report_.measurements, {setting, Work::kMixed, report_.way, path}).rate;
    }
    report_.shares = lockstep_.stripe(rates);
    report_.first_rates = rates;
    for (std::uint32_t path = 0; path < setup_.paths(); ++path) {
      if (report_.shares[path] == 0) {
        note(fmt::format("{}: too slow beside the others to take a share; it is left out",
                         options_.paths[path].string()));
      }
    }
  }

  void search() {
    Rates rates;
    std::vector<Setting> grid = options_.exhaustive ? full_grid(setup_.limits()) : coarse_grid(setup_.limits());
    say(fmt::format("{} grid: {} settings, mixed, read and written", options_.exhaustive ? "full" : "coarse",
                    grid.size()));
    if (options_.exhaustive) std::shuffle(grid.begin(), grid.end(), std::mt19937(1));
    const std::size_t passes = options_.exhaustive ? kRounds : kCoarsePasses;
    for (std::size_t pass = 0; pass < passes; ++pass) {
      survey(grid, options_.exhaustive || pass == 0, passes - pass, rates);
      // Back and forth: a drive that tires on the way must not tilt the map.
      std::reverse(grid.begin(), grid.end());
    }
    if (!options_.exhaustive) refine(rates);
    std::vector<Setting> best = finalists(rates, options_.exhaustive ? 2 * kFinalists : kFinalists);
    if (setup_.allowed(kDefault) == kDefault && std::find(best.begin(), best.end(), kDefault) == best.end()) {
      best.push_back(kDefault);  // what the choice gains over it is worth knowing
    }
    say(fmt::format("the best {}, in turn", best.size()));
    compare(best);
  }

  // Once over the grid, mixed; perhaps also read and written, at half the length, for the maps.
  void survey(const std::vector<Setting>& grid, bool with_others, std::size_t passes_left, Rates& rates) {
    const auto count = static_cast<double>(grid.size());
    double left = count * static_cast<double>(passes_left) + (with_others ? 2 * count * kShareOfGlance : 0);
    for (const Setting& setting : grid) {
      // A few are measured however late it is: without them there is nothing to choose from.
      if (pace_.past(ends_.coarse) && rates.size() >= 3) return;
      measure_point(setting, rates, pace_.point_seconds(ends_.coarse, left--));
    }
    for (const Work work : {Work::kRead, Work::kWrite}) {
      for (const Setting& setting : grid) {
        if (!with_others || pace_.past(ends_.coarse)) return;
        measure(at(setting, work), kShareOfGlance * pace_.point_seconds(ends_.coarse, left));
        left -= kShareOfGlance;
      }
    }
  }

  void refine(Rates& rates) {
    say("between them, where it is worth it");
    for (std::size_t refined = 0; refined < kRefined && !pace_.past(ends_.refine);) {
      const auto settings = worth_measuring(setup_.limits(), rates, kRefinedAtOnce);
      if (settings.empty()) break;
      for (const Setting& setting : settings) {
        for (std::size_t pass = 0; pass < kCoarsePasses; ++pass) {
          const auto points = static_cast<double>(kCoarsePasses * (kRefined - std::min(refined, kRefined - 1)));
          measure_point(setting, rates, pace_.point_seconds(ends_.refine, points));
        }
        ++refined;
      }
    }
  }

  void measure_point(const Setting& setting, Rates& rates, double seconds) {
    measure(at(setting, Work::kMixed), seconds);
    rates[setting] = summary_of(report_.measurements, at(setting, Work::kMixed)).rate;
  }

  // Rounds of all settings: mixed, and in the first three also read and written. The first is measured however late it
  // is; rounds beyond three need time left.
  void compare(const std::vector<Setting>& settings) {
    for (const Setting& setting : settings) report_.candidates.push_back({setting, {}, 0});
    for (std::size_t round = 0; round < kMostRounds; ++round) {
      if (enough_ && pace_.past(ends_.finals) && (round >= kRounds || pace_.past(ends_.paths))) break;
      compare_once(round);
      // A round that time or bytes cut short compares nothing.
      const auto missed = [round](const Candidate& candidate) { return candidate.rates[round] <= 0; };
      const bool cut = std::any_of(report_.candidates.begin(), report_.candidates.end(), missed);
      for (Candidate& candidate : report_.candidates) {
        if (cut) candidate.rates.pop_back();
      }
      if (cut) break;
      enough_ = true;
    }
    for (Candidate& candidate : report_.candidates) {
      candidate.cpu_seconds_per_gib =
          summary_of(report_.measurements, at(candidate.setting, Work::kMixed)).cpu_seconds_per_gib;
    }
    if (const std::size_t repeats = report_.candidates.front().rates.size(); repeats < kRounds) {
      note(fmt::format("only {} repeat{} in {:.0f} s; a larger --seconds gives more certainty", repeats,
                       repeats == 1 ? "" : "s", options_.seconds));
    }
  }

  void compare_once(std::size_t round) {
    auto& candidates = report_.candidates;
    const std::size_t rounds_left = kRounds > round ? kRounds - round : 1;
    const auto count = static_cast<double>(candidates.size());
    const bool with_others = round < kRounds;
    const double points = static_cast<double>(rounds_left) * count * (with_others ? 1 + 2 * kShareOfGlance : 1);
    for (std::size_t turn = 0; turn < candidates.size(); ++turn) {
      // Another one first each time: who comes after an idle moment may have it easier.
      Candidate& candidate = candidates[(turn + round) % candidates.size()];
      const double rate = measure(at(candidate.setting, Work::kMixed), pace_.point_seconds(ends_.finals, points));
      candidate.rates.push_back(rate);
    }
    for (const Work work : {Work::kRead, Work::kWrite}) {
      for (const Candidate& candidate : candidates) {
        if (!with_others || pace_.past(ends_.finals)) return;
        measure(at(candidate.setting, work), kShareOfGlance * pace_.point_seconds(ends_.finals, points - count));
      }
    }
  }

  void choose_setting() {
    if (report_.candidates.front().rates.empty()) {
      throw Error(Code::kIo, {.object = options_.paths[0].string(),
                              .happened = fmt::format("too little was done in {:.0f} s to choose", options_.seconds),
                              .errno_value = 0,
                              .hint = "use a larger --seconds"});
    }
    report_.choice = choose(report_.candidates);
    report_.setting = report_.candidates[report_.choice.chosen].setting;
  }

  // The engines at the chosen setting. Plain buffers are measured to show what registered ones are worth: the queue
  // registers its buffers whenever it may, so there is nothing to choose.
  void compare_ways() {
    say(fmt::format("engines at {}", text_of(report_.setting)));
    report_.way_repeats = kRounds;
    std::vector<Candidate> ways;
    std::vector<Way> granted;
    for (const WayInfo& facts : report_.ways) {
      if (facts.refused.empty()) granted.push_back(facts.way);
    }
    for (std::size_t round = 0; round < kRounds; ++round) {
      const auto points = static_cast<double>((kRounds - round) * granted.size());
      for (std::size_t i = 0; i < granted.size(); ++i) {
        // Another one first each time: who comes after an idle moment may have it easier.
        const Way& way = granted[(i + round) % granted.size()];
        measure({report_.setting, Work::kMixed, way, report_.measured_path}, pace_.point_seconds(ends_.ways, points));
      }
    }
    std::vector<Way> choosable;
    for (const Way& way : granted) {
      const Way better{way.engine, true};
      if (!way.fixed_buffers && std::find(granted.begin(), granted.end(), better) != granted.end()) continue;
      const auto& samples = report_.measurements[{report_.setting, Work::kMixed, way, report_.measured_path}];
      if (samples.size() < kRounds) continue;
      Candidate candidate{report_.setting, {}, summarize(samples).cpu_seconds_per_gib};
      for (std::size_t round = samples.size() - kRounds; round < samples.size(); ++round) {
        candidate.rates.push_back(samples[round].rate);
      }
      choosable.push_back(way);
      ways.push_back(std::move(candidate));
    }
    if (!ways.empty()) report_.way = choosable[choose_way(ways)];
    for (std::size_t round = 0; report_.way != report_.searched_way && round < kRounds; ++round) {
      for (const Work work : {Work::kRead, Work::kWrite}) {
        measure(at(report_.setting, work), pace_.point_seconds(ends_.ways, 2 * kRounds));
      }
    }
  }

  void compare_paths() {
    say("each path alone and all of them striped");
    for (std::size_t round = 0; round < kRounds; ++round) {
      const auto points = static_cast<double>((kRounds - round) * (setup_.paths() + 1) * std::size(kWorks));
      for (const Work work : kWorks) {
        for (std::uint32_t path = 0; path < setup_.paths(); ++path) {
          measure({report_.setting, work, report_.way, path}, pace_.point_seconds(ends_.paths, points));
        }
        measure({report_.setting, work, report_.way, kAllPaths}, pace_.point_seconds(ends_.paths, points));
      }
    }
  }

  // Whoever else used the drive meanwhile took a part of every rate, now of this setting and now of that one.
  // What other ranks moved is no other's, and is not known here.
  void check_other_load() {
    if (lockstep_.ranks() > 1) return;
    const auto traffic = setup_.traffic();
    if (!traffic || static_cast<double>(traffic->others) < kShareOfOthers * static_cast<double>(traffic->here)) return;
    note(fmt::format("others moved {} on the drive meanwhile, beside {} of the sweep: run it again when they are done",
                     text_of_size(traffic->others / kMiB * kMiB), text_of_size(traffic->here / kMiB * kMiB)));
  }

  void write_on() {
    say(fmt::format("writing {} at full speed", text_of_size(options_.sustained_bytes)));
    const std::uint64_t bytes = std::min(options_.sustained_bytes, pace_.may_write());
    report_.sustained = setup_.write_sustained(report_.setting, report_.way, bytes, [&](double seconds, auto moved) {
      const double share = static_cast<double>(moved) / static_cast<double>(bytes);
      const double rate = static_cast<double>(moved) / std::max(seconds, 1e-9);
      progress_.at(share, moved > 0 ? static_cast<double>(bytes - moved) / rate : -1,
                   fmt::format("{} written, {:.2f} GB/s", text_of_size(moved), gb_per_s(rate)));
      return go_on();
    });
    pace_.note_written(report_.sustained->written_bytes);
    if (lockstep_.signal() != 0) throw Stopped();
    for (const auto& [facts, share] : shares_of_drives(report_)) {
      const double written = share * static_cast<double>(report_.sustained->written_bytes);
      report_.endurance.push_back(fmt::format("{}: {}",
                                              facts.drive.name.empty() ? facts.path.string() : facts.drive.name,
                                              drive::endurance_text(drive::read_endurance(facts.drive), written)));
    }
  }

  Point at(const Setting& setting, Work work) const { return {setting, work, report_.way, report_.measured_path}; }

  // One sample of a point, its rate; 0 when the sweep's time or bytes are used up.
  double measure(const Point& point, double seconds) {
    if (enough_ && pace_.past(kEnd)) return 0;
    drive::LoadSpec spec = setup_.spec(point);
    spec.warmup_seconds = kWarmup * seconds;
    spec.seconds = seconds - spec.warmup_seconds;
    if (point.work != Work::kRead) {
      const std::uint64_t share = point.work == Work::kMixed ? kReadParts + kWriteParts : kWriteParts;
      spec.most_written_bytes = std::min(pace_.may_write(), point_bytes() * kWriteParts / share) / lockstep_.ranks();
      if (pace_.may_write() < point_bytes()) {
        note("the announced bytes are used up; what is left is not measured");
        return 0;
      }
    }
    spec.go_on = [this](double, std::uint64_t) { return go_on(); };
    const double before = pace_.elapsed();
    const auto [sample, written_bytes] = lockstep_.run(point, spec);
    pace_.note(seconds, pace_.elapsed() - before);
    pace_.note_written(written_bytes);
    if (lockstep_.signal() != 0) throw Stopped();
    if (sample.rate <= 0) return 0;
    report_.measurements[point].push_back(sample);
    print_status(fmt::format("{} {}: {:.2f} GB/s", text_of(point.setting), name_of(point.work), gb_per_s(sample.rate)));
    return sample.rate;
  }

  bool go_on() const { return lockstep_.signal() == 0; }
  void say(const std::string& what) { progress_.line(fmt::format("{:5.1f} s  {}", pace_.elapsed(), what)); }
  void print_status(const std::string& what) {
    const double end = options_.exhaustive ? exhaustive_seconds() : ends_.paths * pace_.total();
    progress_.at(pace_.elapsed() / end, std::max(0.0, end - pace_.elapsed()), what);
  }
  double exhaustive_seconds() const {
    const auto settings = static_cast<double>(full_grid(setup_.limits()).size());
    return pace_.total() * ends_.fill + settings * kRounds * (1 + 2 * kShareOfGlance) * (pace_.total() / 300 + 0.03);
  }
  void note(const std::string& what) {
    if (!told_.insert(what).second) return;
    report_.notes.push_back(what);
    progress_.line("note: " + what);
  }

  const SweepOptions& options_;
  std::FILE* const out_;
  terminal::Progress progress_;
  Lockstep& lockstep_;
  SweepSetup& setup_;
  Pace pace_;
  const PhaseEnds ends_;
  SweepReport report_;
  bool enough_ = false;  // was measured to choose by
  std::set<std::string> told_;
};

void check(const SweepOptions& options) {
  terminal::check_output("--json", options.json);
  terminal::check_output("--report", options.html);
  for (const std::filesystem::path& path : options.paths) {
    std::error_code ignored;
    const std::string name = std::filesystem::canonical(path, ignored).string();
    if (options.json.empty() || options.paths.size() == 1 || terminal::Json::utf8(name) == name) continue;
    throw Error(Code::kInvalidArgument, {.object = name,
                                         .happened = "is no UTF-8, so that --json cannot name it",
                                         .errno_value = 0,
                                         .hint = "give it another name"});
  }
}

void check_ranks(const SweepOptions& options, const terminal::Ranks& ranks) {
  if (ranks.alone()) {
    throw Error(Code::kInvalidArgument, {.object = "--ranks",
                                         .happened = "there is one process, and none beside it",
                                         .errno_value = 0,
                                         .hint = "put mpirun -n 2 before the command, or as many ranks as will train; "
                                                 "or leave --ranks out"});
  }
  if (options.sustained_bytes > 0) {
    throw Error(Code::kInvalidArgument, {.object = "--sustained",
                                         .happened = "is not measured with --ranks",
                                         .errno_value = 0,
                                         .hint = "a drive's cache runs out in the same way for one process: run it "
                                                 "without mpirun and --ranks"});
  }
}

int sweep_with(terminal::Ranks& ranks, const terminal::Interrupt& interrupt, const SweepOptions& options) {
  if (options.ranks) check_ranks(options, ranks);
  ranks.together([&] {
    if (ranks.first()) check(options);
  });
  Lockstep lockstep(options, ranks, interrupt);
  if (!ranks.first()) return lockstep.follow();
  return Sweep(options, lockstep, options.json == "-" || options.html == "-" ? stderr : stdout).run();
}

}  // namespace

int sweep(const SweepOptions& options) {
  terminal::Interrupt interrupt("ending the sweep");  // before anything that starts threads
  // Of a slow drive one rank's file may be full long before another's.
  const auto communicator =
      make_communicator(options.ranks ? "auto" : "self", {.patience_seconds = std::max(60.0, options.seconds)});
  terminal::Ranks ranks(*communicator);
  if (!ranks.first()) interrupt.say_nothing();
  try {
    return sweep_with(ranks, interrupt, options);
  } catch (const Error&) {
    // The first rank says for all what they have failed with together.
    communicator->throw_if_failed();
    if (ranks.first()) throw;
    return 1;
  }
}

}  // namespace spillway::sweep
