#include "tools/doctor/probe.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "spillway/units.h"
#include "tools/drive/load.h"
#include "tools/drive/sustained.h"
#include "tools/drive/test_file.h"

namespace spillway::doctor {
namespace {

constexpr double kWriteShare = 0.8;
constexpr std::uint64_t kLeast = 16 * kMiB, kMost = 8 * kGiB, kMostInFlight = 64 * kMiB;

double mean(std::span<const double> rates) {
  return std::accumulate(rates.begin(), rates.end(), 0.0) / static_cast<double>(rates.size());
}

}  // namespace

std::uint64_t probe_bytes(std::uint64_t free_bytes, std::uint64_t file_limit) {
  return align_down(std::min({free_bytes / 4, kMost, file_limit}), kLeast);
}

std::optional<ProbeInfo> probe_drive(const ProbeOptions& options) {
  drive::TestFile file(options.directory, options.most_bytes);
  drive::LoadSpec spec{.engine = options.required->engine, .block_bytes = options.required->block_bytes};
  spec.block_bytes = std::clamp<std::uint64_t>(align_up(spec.block_bytes, 64 * kKiB), 64 * kKiB, 4 * kMiB);
  // What a run would have in flight, within reason; and never as much as the file holds.
  const std::uint64_t in_flight = std::min(kMostInFlight, options.most_bytes / 2);
  spec.depth = static_cast<std::uint32_t>(
      std::clamp<std::uint64_t>(in_flight / spec.block_bytes, 1, std::max(options.required->depth, 1u)));
  drive::LoadMemory memory(spec.depth * spec.block_bytes);
  const drive::LoadFile files[] = {{&file.file(), options.most_bytes, 0}};

  const double write_seconds = kWriteShare * options.seconds;
  bool wanted = true;
  const auto watch = [&](double before, double length) {
    return [&, before, length](double seconds, std::uint64_t) {
      wanted = options.go_on(before + seconds);
      return wanted && seconds < length;
    };
  };
  const drive::Sustained sustained =
      drive::write_sustained(files, memory.bytes(), spec, drive::kNoLimit, watch(0, write_seconds));
  if (!wanted) return std::nullopt;
  file.file().sync();

  ProbeInfo facts;
  facts.interval_seconds = sustained.interval_seconds;
  facts.rates = sustained.rates;
  facts.write_seconds = sustained.seconds;
  facts.written_bytes = sustained.written_bytes;
  facts.file_bytes = options.most_bytes;
  facts.write_rate = sustained.rate();

  const drive::LoadFile written[] = {
      {&file.file(), align_down(std::min(options.most_bytes, sustained.written_bytes), spec.block_bytes), 0}};
  if (written[0].bytes == 0) return facts;
  spec.go_on = watch(write_seconds, options.seconds - write_seconds);
  facts.read_rate = drive::run_load(written, memory.bytes(), spec).rate();
  if (!wanted) return std::nullopt;
  return facts;
}

Ends ends_of(const ProbeInfo& probe) {
  if (probe.rates.empty()) return {};
  const double total = probe.interval_seconds * static_cast<double>(probe.rates.size());
  const double window = std::min(1.0, total / 5);
  const auto count = std::clamp<std::size_t>(static_cast<std::size_t>(std::lround(window / probe.interval_seconds)), 1,
                                             probe.rates.size());
  const std::span<const double> rates = probe.rates;
  return {mean(rates.first(count)), mean(rates.last(count)), static_cast<double>(count) * probe.interval_seconds};
}

}  // namespace spillway::doctor
