#include "src/engine/step_meter.h"

#include <algorithm>
#include <utility>

namespace spillway {

StepMeter::Traffic StepMeter::traffic() const {
  Traffic sum;
  if (resources_.store) {
    const IoStats io = resources_.thread->stats();
    sum.nvme_read = io.read_bytes;
    sum.nvme_write = io.write_bytes;
  }
  sum.h2d = resources_.mover->h2d_bytes() + (resources_.fetcher ? resources_.fetcher->copied_bytes() : 0) +
            resources_.gradients->h2d_bytes();
  sum.tiles = resources_.mover->hits();
  sum.d2h = resources_.mover->d2h_bytes() + resources_.gradients->d2h_bytes();
  sum.network = resources_.weights->moved();
  sum.network += resources_.gradients->moved();
  if (resources_.activation_fetcher) {
    sum.h2d += resources_.activation_fetcher->copied_bytes();
    sum.d2h += resources_.activation_spiller->copied_bytes();
  }
  return sum;
}

void StepMeter::start() {
  start_ = Clock::now();
  traffic_ = traffic();
  idle_ = idle_seconds();
  adam_ = resources_.updater->adam_seconds();
  resources_.stalls->take();
}

void StepMeter::computed() { compute_seconds_ = seconds() - (idle_seconds() - idle_); }

// The clock is read on both sides of what was idle, so that this never takes longer than the step.
void StepMeter::report(StepReport& report) {
  // Before all else, so that what this function takes belongs to the next step.
  const Clock::time_point next = Clock::now();
  report.stalls = resources_.stalls->take();
  report.seconds = seconds();
  const Clock::time_point begin = std::exchange(start_, next);
  report.stall_seconds = report.stalls.total();
  idle_ = idle_seconds();
  report.adam_seconds = resources_.updater->adam_seconds() - std::exchange(adam_, resources_.updater->adam_seconds());
  const Traffic before = std::exchange(traffic_, traffic());
  report.nvme_read_bytes = traffic_.nvme_read - before.nvme_read;
  report.nvme_write_bytes = traffic_.nvme_write - before.nvme_write;
  report.h2d_bytes = traffic_.h2d - before.h2d;
  report.d2h_bytes = traffic_.d2h - before.d2h;
  report.tile_bytes = traffic_.tiles.bytes - before.tiles.bytes;
  report.tile_hit_bytes = traffic_.tiles.hit_bytes - before.tiles.hit_bytes;

  const MachineRates& rates = resources_.rates;
  auto own_time = [](std::uint64_t bytes, double rate) { return rate > 0 ? static_cast<double>(bytes) / rate : 0; };
  // What each link needs for its own bytes at its measured rate. Links overlap, so their times do not add up to the
  // step's.
  const std::pair<const char*, double> links[] = {
      {"compute", std::min(report.seconds, compute_seconds_ + report.adam_seconds)},
      {"nvme", own_time(report.nvme_read_bytes + report.nvme_write_bytes, rates.nvme_mixed)},
      {"h2d", own_time(report.h2d_bytes, rates.h2d)},
      {"d2h", own_time(report.d2h_bytes, rates.d2h)},
      {"network", own_time(traffic_.network.bytes - before.network.bytes, rates.network) +
                      static_cast<double>(traffic_.network.calls - before.network.calls) * rates.network_seconds}};
  const auto* slowest = std::ranges::max_element(links, {}, &std::pair<const char*, double>::second);
  report.link = slowest->first;
  report.link_percent = 100 * slowest->second / report.seconds;

  if (Timeline* timeline = resources_.timeline()) {
    timeline->add({.kind = SpanKind::kStep,
                   .subject = report.step,
                   .begin_ns = timeline->ns_at(begin),
                   .end_ns = timeline->ns_at(start_)});
  }
}

}  // namespace spillway
