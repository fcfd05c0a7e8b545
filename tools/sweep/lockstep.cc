#include "tools/sweep/lockstep.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <future>
#include <string>

#include "spillway/error.h"
#include "spillway/units.h"

namespace spillway::sweep {
namespace {

enum class Task : std::uint64_t { kEnd, kFill, kLimit, kWays, kStripe, kRun };

constexpr double kNano = 1e9;

std::uint64_t nano(double seconds) { return static_cast<std::uint64_t>(seconds * kNano); }

// What must be the same for the ranks to do the same.
std::vector<terminal::Subject> subjects_of(const SweepOptions& options) {
  std::string paths;
  for (const auto& path : options.paths) {
    paths += paths.empty() ? "" : " ";
    paths += path.string();
  }
  return {{"the directories", paths},
          {"--size", options.size_bytes == 0 ? "not given" : fmt::format("{} bytes", options.size_bytes)},
          {"--allow-buffered", options.allow_buffered ? "given" : "not given"}};
}

}  // namespace

Lockstep::Lockstep(const SweepOptions& options, terminal::Ranks& ranks, const terminal::Interrupt& interrupt)
    : ranks_(ranks), interrupt_(interrupt) {
  ranks_.agree(subjects_of(options));
  if (!ranks_.alone()) share_ = share_host(ranks_.communicator());
  ranks_.together([&] {
    setup_ = std::make_unique<SweepSetup>(options, RankPlace{ranks_.rank(), ranks_.count(), share_.ranks});
    file_bytes_ = setup_->file_bytes();
  });
  if (ranks_.alone()) return;
  ranks_.fold({&file_bytes_, 1}, Fold::kSum);
  agree_on_limits();
  following_ = true;
}

Lockstep::~Lockstep() {
  if (!ranks_.first() || !following_) return;
  try {
    Words words{static_cast<std::uint64_t>(Task::kEnd)};
    tell(words);
  } catch (const Error&) {  // they have left already
  }
}

int Lockstep::signal() const { return signal_ != 0 ? signal_ : interrupt_.signal(); }

// Until a step has gone well on all ranks, nobody waits for the next one.
void Lockstep::tell(Words& words) {
  following_ = false;
  if (!ranks_.first()) words = {};
  ranks_.fold(words, Fold::kOr);
}

void Lockstep::share_signal() {
  auto signal = static_cast<std::uint64_t>(interrupt_.signal());
  ranks_.fold({&signal, 1}, Fold::kMax);
  signal_ = static_cast<int>(signal);
}

std::uint64_t Lockstep::fill(double seconds, const drive::Watch& go_on) {
  if (ranks_.alone()) return setup_->fill(seconds, go_on);
  Words words{static_cast<std::uint64_t>(Task::kFill), std::bit_cast<std::uint64_t>(seconds)};
  tell(words);
  return fill_here(seconds, go_on);
}

std::uint64_t Lockstep::fill_here(double seconds, const drive::Watch& go_on) {
  std::uint64_t written = 0;
  ranks_.together([&] { written = setup_->fill(seconds, go_on); });
  share_signal();
  ranks_.fold({&written, 1}, Fold::kSum);
  following_ = true;
  return written;
}

void Lockstep::limit_by_rate() {
  if (ranks_.alone()) return setup_->limit_by_rate();
  Words words{static_cast<std::uint64_t>(Task::kLimit)};
  tell(words);
  limit_by_rate_here();
}

void Lockstep::limit_by_rate_here() {
  setup_->limit_by_rate();
  agree_on_limits();
}

void Lockstep::agree_on_limits() {
  Limits limits = setup_->limits();
  std::uint64_t most[] = {limits.most_block, limits.most_in_flight};
  ranks_.fold({&limits.least_block, 1}, Fold::kMax);
  ranks_.fold(most, Fold::kMin);
  limits.most_block = most[0];
  limits.most_in_flight = most[1];
  setup_->limit(limits);
  following_ = true;
}

std::vector<WayInfo> Lockstep::find_ways() {
  if (ranks_.alone()) return setup_->find_ways();
  Words words{static_cast<std::uint64_t>(Task::kWays)};
  tell(words);
  return find_ways_here();
}

std::vector<WayInfo> Lockstep::find_ways_here() {
  std::vector<WayInfo> ways;
  ranks_.together([&] { ways = setup_->find_ways(); });
  std::vector<std::uint64_t> refused;
  for (const WayInfo& facts : ways) refused.push_back(facts.refused.empty() ? 0 : 1);
  ranks_.fold(refused, Fold::kMax);
  for (std::size_t way = 0; way < ways.size(); ++way) {
    if (refused[way] != 0 && ways[way].refused.empty()) ways[way].refused = "another rank does not get it";
  }
  following_ = true;
  return ways;
}

std::vector<std::uint32_t> Lockstep::stripe(std::span<const double> rates) {
  if (ranks_.alone()) return setup_->stripe(rates);
  Words words{static_cast<std::uint64_t>(Task::kStripe)};
  tell(words);
  std::vector<std::uint64_t> whole;
  for (const double rate : rates) whole.push_back(static_cast<std::uint64_t>(rate));
  return stripe_here(whole);
}

// The same shares on all ranks: of the first one's rates, and of files that are as long everywhere.
std::vector<std::uint32_t> Lockstep::stripe_here(std::vector<std::uint64_t> rates) {
  for (std::uint64_t& rate : rates) ranks_.fold({&rate, 1}, Fold::kMax);
  std::uint64_t filled = setup_->least_filled_bytes();
  ranks_.fold({&filled, 1}, Fold::kMin);
  std::vector<std::uint32_t> shares;
  ranks_.together([&] { shares = setup_->stripe(std::vector<double>(rates.begin(), rates.end()), filled); });
  following_ = true;
  return shares;
}

Lockstep::Measured Lockstep::run(const Point& point, const drive::LoadSpec& spec) {
  if (ranks_.alone()) {
    const drive::LoadResult result = setup_->run(point, spec);
    return {{.rate = result.rate(),
             .cpu_seconds_per_gib = result.cpu_seconds_per_gib(),
             .p50_us = result.latency_us(0.5),
             .p99_us = result.latency_us(0.99)},
            result.written_in_all};
  }
  Words words{static_cast<std::uint64_t>(Task::kRun),
              point.setting.block_bytes,
              point.setting.depth,
              static_cast<std::uint64_t>(point.work),
              static_cast<std::uint64_t>(point.way.engine),
              point.way.fixed_buffers ? 1u : 0u,
              point.path,
              std::bit_cast<std::uint64_t>(spec.warmup_seconds),
              std::bit_cast<std::uint64_t>(spec.seconds),
              spec.most_written_bytes};
  tell(words);
  return run_here(point, spec);
}

Lockstep::Measured Lockstep::run_here(const Point& point, drive::LoadSpec spec) {
  drive::LoadResult result;
  ranks_.together([&] { result = load_beside_others(point, spec); });
  share_signal();
  // A point that one rank did not get to measure is none.
  std::uint64_t measured = result.rate() > 0 ? 1 : 0;
  ranks_.fold({&measured, 1}, Fold::kMin);
  std::uint64_t sums[] = {static_cast<std::uint64_t>(result.rate()), nano(result.cpu_seconds),
                          result.read_bytes + result.written_bytes, result.written_in_all};
  ranks_.fold(sums, Fold::kSum);
  std::uint64_t latencies[] = {nano(result.latency_us(0.5)), nano(result.latency_us(0.99))};
  ranks_.fold(latencies, Fold::kMax);
  following_ = true;
  Measured all{{}, sums[3]};
  if (measured == 0) return all;
  all.sample = {.rate = static_cast<double>(sums[0]),
                .cpu_seconds_per_gib =
                    static_cast<double>(sums[1]) / kNano / static_cast<double>(sums[2]) * static_cast<double>(kGiB),
                .p50_us = static_cast<double>(latencies[0]) / kNano,
                .p99_us = static_cast<double>(latencies[1]) / kNano};
  return all;
}

// Begins when all ranks are ready, and keeps the drive busy until the windows of all have closed. Whoever fails before
// comes to both places, too: the others are on their way there.
drive::LoadResult Lockstep::load_beside_others(const Point& point, drive::LoadSpec& spec) {
  bool begun = false;
  std::future<void> closed;
  const auto meet = [this] { ranks_.together([] {}); };
  const auto begin = [&] {
    begun = true;
    meet();
  };
  const auto close = [&] {
    if (!begun) begin();
    if (!closed.valid()) closed = std::async(std::launch::async, meet);
  };
  spec.begin = begin;
  spec.hold = [&] {
    close();
    return closed.wait_for(std::chrono::seconds(0)) != std::future_status::ready;
  };
  drive::LoadResult result;
  try {
    result = setup_->run(point, spec);
  } catch (...) {
    ranks_.communicator().throw_if_failed();
    close();
    closed.get();
    throw;
  }
  close();
  closed.get();
  return result;
}

int Lockstep::follow() {
  const auto go_on = [this](double, std::uint64_t) { return !interrupt_.requested(); };
  for (Words words{}; true;) {
    tell(words);
    switch (static_cast<Task>(words[0])) {
      case Task::kEnd: return signal() == 0 ? 0 : 128 + signal();
      case Task::kFill: fill_here(std::bit_cast<double>(words[1]), go_on); break;
      case Task::kLimit: limit_by_rate_here(); break;
      case Task::kWays: find_ways_here(); break;
      case Task::kStripe: stripe_here(std::vector<std::uint64_t>(setup_->paths())); break;
      case Task::kRun: {
        const Point point{.setting = {words[1], static_cast<std::uint32_t>(words[2])},
                          .work = static_cast<Work>(words[3]),
                          .way = {static_cast<IoEngineKind>(words[4]), words[5] != 0},
                          .path = static_cast<std::uint32_t>(words[6])};
        drive::LoadSpec spec = setup_->spec(point);
        spec.warmup_seconds = std::bit_cast<double>(words[7]);
        spec.seconds = std::bit_cast<double>(words[8]);
        spec.most_written_bytes = words[9];
        spec.go_on = go_on;
        run_here(point, spec);
        break;
      }
    }
  }
}

}  // namespace spillway::sweep
