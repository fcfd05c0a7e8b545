#include "src/engine/step_predictor.h"

#include <algorithm>
#include <utility>

#include "spillway/units.h"
#include "src/engine/clip_guess.h"

namespace spillway {
namespace {

constexpr std::uint32_t kSpeculations = 32;  // how many counts are tried at most, evenly spaced

double seconds_with(ScheduleInput& input, const Plan& plan, std::uint32_t speculative) {
  speculate(input, plan, speculative);
  return make_schedule(input).seconds();
}

}  // namespace

std::uint32_t best_speculation(ScheduleInput& input, const Plan& plan, std::uint32_t tries) {
  const auto most = static_cast<std::uint32_t>(std::ranges::count_if(plan.blocks, &BlockPlan::speculative));
  const std::uint32_t stride = std::max(1u, div_up(most, tries));
  std::uint32_t best = 0;
  double best_seconds = seconds_with(input, plan, 0);
  for (std::uint32_t count = stride; count <= most; count += stride) {
    const double seconds = seconds_with(input, plan, count);
    // Of equals the smaller count: what is updated early may have to be undone.
    if (seconds >= best_seconds) continue;
    best = count;
    best_seconds = seconds;
  }
  return best;
}

void speculate(ScheduleInput& input, const Plan& plan, std::uint32_t blocks) {
  for (std::size_t b = 0; b < plan.blocks.size(); ++b) input.blocks[b].early = plan.blocks[b].early;
  for (const std::uint32_t block : speculated_blocks(plan, blocks)) input.blocks[block].early = true;
}

StepPredictor::StepPredictor(Device& device, std::size_t visits, std::size_t leases)
    : device_(device), leases_(leases) {
  forget(visits);
}

void StepPredictor::forget(std::size_t visits) {
  for (std::uint32_t lease = 0; lease < leases_.size(); ++lease) {
    // A visit that is open was timed for the order of visits that is forgotten here.
    while (leases_[lease].watched || leases_[lease].unplanned > 0) end_visit(lease);
  }
  visits_ = std::vector<Watched>(visits);
  for (Watched& visit : visits_) visit.watch = device_.create_stopwatch();
}

void StepPredictor::begin_visit(std::uint32_t lease, std::optional<std::size_t> visit, Stream& stream) {
  // A visit out of the plan, or one that is being timed already, is only counted, so that end_visit() ends the right
  // one.
  if (!visit || *visit >= visits_.size() || visits_[*visit].stream || leases_[lease].unplanned > 0) {
    ++leases_[lease].unplanned;
    return;
  }
  Watched& watched = visits_[*visit];
  watched.stream = &stream;
  watched.outer = std::exchange(leases_[lease].watched, &watched);
  watched.watch->start(stream);
}

void StepPredictor::end_visit(std::uint32_t lease) {
  Lease& of = leases_[lease];
  if (of.unplanned > 0) {
    --of.unplanned;
  } else if (Watched* const watched = of.watched) {
    of.watched = watched->outer;
    watched->watch->stop(*std::exchange(watched->stream, nullptr));
  }
}

void StepPredictor::end_step() {
  for (Watched& visit : visits_) {
    const std::optional<double> taken = visit.watch->seconds();
    // The shortest: whatever else ran on the machine only ever made a visit longer.
    if (taken && (!visit.best_seconds || *taken < *visit.best_seconds)) visit.best_seconds = taken;
  }
}

std::optional<ScheduleInput> StepPredictor::input(const Plan& plan, std::span<const Visit> visits,
                                                  const MachineRates& rates, Step step) const {
  std::vector<double> seconds;
  for (const Watched& visit : visits_) {
    // Without a time for every visit there is no prediction: the first steps have none.
    if (!visit.best_seconds) return std::nullopt;
    seconds.push_back(*visit.best_seconds);
  }
  if (seconds.size() != visits.size()) return std::nullopt;
  Plan taken = plan;
  taken.visits.assign(visits.begin(), visits.end());
  ScheduleInput input = schedule_input(taken, rates, seconds, step.nodes);
  input.commits &= step.commits;
  return input;
}

std::optional<double> StepPredictor::step_seconds(const Plan& plan, std::span<const Visit> visits,
                                                  const MachineRates& rates, Step step,
                                                  std::uint32_t speculative) const {
  std::optional<ScheduleInput> input = this->input(plan, visits, rates, step);
  if (!input) return std::nullopt;
  return seconds_with(*input, plan, speculative);
}

std::optional<std::uint32_t> StepPredictor::best_speculation(const Plan& plan, std::span<const Visit> visits,
                                                             const MachineRates& rates, Step step) const {
  std::optional<ScheduleInput> input = this->input(plan, visits, rates, step);
  if (!input) return std::nullopt;
  return spillway::best_speculation(*input, plan, kSpeculations);
}

}  // namespace spillway
