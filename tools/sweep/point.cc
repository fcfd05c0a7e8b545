#include "tools/sweep/point.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>

#include "tools/drive/load.h"
#include "tools/terminal/amount.h"

namespace spillway::sweep {

using drive::median;

const char* name_of(Work work) {
  switch (work) {
    case Work::kRead: return "read";
    case Work::kWrite: return "write";
    case Work::kMixed: return "mixed";
  }
  return "?";
}

std::string text_of(const Setting& setting) {
  return fmt::format("{} × {}", terminal::text_of_size(setting.block_bytes), setting.depth);
}

std::string text_of(const Way& way) {
  if (way.engine != IoEngineKind::kIoUring) return std::string(name_of(way.engine));
  return way.fixed_buffers ? "io_uring, registered buffers" : "io_uring, plain buffers";
}

Summary summarize(std::span<const Sample> samples) {
  const auto all = [&](double Sample::*field) {
    std::vector<double> values;
    for (const Sample& sample : samples) values.push_back(sample.*field);
    return values;
  };
  if (samples.empty()) return {};
  const std::vector<double> rates = all(&Sample::rate);
  const auto [low, high] = std::minmax_element(rates.begin(), rates.end());
  return {.repeats = samples.size(),
          .rate = median(rates),
          .low = *low,
          .high = *high,
          .cpu_seconds_per_gib = median(all(&Sample::cpu_seconds_per_gib)),
          .p50_us = median(all(&Sample::p50_us)),
          .p99_us = median(all(&Sample::p99_us))};
}

Summary summary_of(const Measurements& measurements, const Point& point, std::size_t most) {
  const auto found = measurements.find(point);
  if (found == measurements.end()) return {};
  const std::span<const Sample> samples = found->second;
  return summarize(samples.last(std::min(most, samples.size())));
}

}  // namespace spillway::sweep
