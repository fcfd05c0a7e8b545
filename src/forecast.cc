#include "src/forecast.h"

#include <algorithm>

#include "spillway/units.h"
#include "src/schedule.h"
#include "src/speculation.h"

namespace spillway {
namespace {

std::int64_t now_ns() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

constexpr std::uint32_t kSpeculations = 32;  // how many counts are tried at most, evenly spaced

}  // namespace

Forecast::Forecast(std::size_t visits, std::size_t leases) : visits_(visits), leases_(leases) {}

void Forecast::forget(std::size_t visits) {
  visits_ = std::vector<Watch>(visits);
  for (Lease& lease : leases_) lease = {};
}

void Forecast::begin_visit(std::uint32_t lease, std::optional<std::size_t> visit, Device& device, Stream& stream) {
  leases_[lease] = {};
  if (!visit || *visit >= visits_.size()) return;
  leases_[lease] = {&visits_[*visit], &stream};
  device.call_async([](void* watch) { static_cast<Watch*>(watch)->begin_ns = now_ns(); }, leases_[lease].watch, stream);
}

void Forecast::end_visit(std::uint32_t lease, Device& device) {
  const auto [watch, stream] = leases_[lease];
  if (!watch) return;
  leases_[lease] = {};
  device.call_async(
      [](void* argument) {
        auto& visit = *static_cast<Watch*>(argument);
        const std::int64_t taken = now_ns() - visit.begin_ns;
        if (visit.best_ns == 0 || taken < visit.best_ns) visit.best_ns = taken;
      },
      watch, *stream);
}

std::optional<double> Forecast::step_seconds(const Plan& plan, std::span<const Visit> visits, const MachineRates& rates,
                                             unsigned nodes, std::uint32_t speculative) const {
  std::vector<double> seconds;
  for (const Watch& visit : visits_) {
    if (visit.best_ns == 0) return std::nullopt;
    seconds.push_back(1e-9 * static_cast<double>(visit.best_ns));
  }
  if (seconds.size() != visits.size()) return std::nullopt;
  Plan taken = plan;
  taken.visits.assign(visits.begin(), visits.end());
  speculate(taken, speculative);
  return make_schedule(schedule_input(taken, rates, seconds, nodes)).seconds();
}

std::optional<std::uint32_t> Forecast::best_speculation(const Plan& plan, std::span<const Visit> visits,
                                                        const MachineRates& rates, unsigned nodes) const {
  const auto most = static_cast<std::uint32_t>(std::ranges::count_if(plan.blocks, &BlockPlan::speculative));
  const std::uint32_t stride = std::max(1u, static_cast<std::uint32_t>(div_up(most, kSpeculations)));
  std::optional<std::uint32_t> best;
  double best_seconds = 0;
  for (std::uint32_t count = 0; count <= most; count += stride) {
    const std::optional<double> seconds = step_seconds(plan, visits, rates, nodes, count);
    if (!seconds) return std::nullopt;
    if (best && *seconds >= best_seconds) continue;
    best = count;
    best_seconds = *seconds;
  }
  return best;
}

}  // namespace spillway
