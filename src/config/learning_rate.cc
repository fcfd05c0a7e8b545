#include <algorithm>
#include <cmath>
#include <numbers>

#include "spillway/config.h"

// The formulas are those of DeepSpeed 0.19.8, deepspeed/runtime/lr_schedules.py (WarmupLR, WarmupDecayLR,
// WarmupCosineLR), in double and in the same order of operations.
//
// Which iteration an optimizer step sees: DeepSpeed sets the rate once when the schedule is made, with iteration -1
// ("not started": warmup_min_lr, and plain 0 for WarmupCosineLR), and then steps the schedule *after* each optimizer
// step (engine.py, _take_model_step). So step 1 uses iteration -1, step 2 iteration 0, step s iteration s - 2.

namespace spillway {
namespace {

// The share of the way from the smallest to the largest rate while warming up. DeepSpeed takes 1 step for 2, since
// log(1) is 0.
double warmup_share(const ScheduleConfig& schedule, std::uint64_t iteration, std::uint64_t warmup_steps) {
  const double at = static_cast<double>(iteration), steps = static_cast<double>(warmup_steps);
  return schedule.logarithmic_warmup ? 1.0 / std::log(steps) * std::log(at + 1) : at / steps;
}

double decay_share(const ScheduleConfig& schedule, std::uint64_t iteration, std::uint64_t warmup_steps) {
  const double total = static_cast<double>(schedule.total_steps);
  return std::max(0.0,
                  (total - static_cast<double>(iteration)) / std::max(1.0, total - static_cast<double>(warmup_steps)));
}

double cosine_ratio(const ScheduleConfig& schedule, std::uint64_t iteration, std::uint64_t warmup_steps) {
  if (iteration < warmup_steps) {
    return schedule.warmup_min_ratio +
           warmup_share(schedule, iteration, warmup_steps) * (1.0 - schedule.warmup_min_ratio);
  }
  const double done = static_cast<double>(iteration - warmup_steps + 1);
  const double all = std::max(1.0, static_cast<double>(schedule.total_steps) - static_cast<double>(warmup_steps));
  const double wave = (1 + std::cos(std::numbers::pi * std::min(1.0, done / all))) / 2;
  return std::max(0.0, schedule.cosine_min_ratio + (1.0 - schedule.cosine_min_ratio) * wave);
}

}  // namespace

double learning_rate(const Config& config, std::uint64_t step) {
  const ScheduleConfig& schedule = config.schedule;
  if (schedule.given_lr) return *schedule.given_lr;
  const std::uint64_t warmup_steps = std::max<std::uint64_t>(2, schedule.warmup_steps);
  const bool started = step >= 2;
  const std::uint64_t iteration = started ? step - 2 : 0;
  const double range = schedule.warmup_max_lr - schedule.warmup_min_lr;
  switch (schedule.kind) {
    case ScheduleKind::kConstant: return config.optimizer.learning_rate;
    case ScheduleKind::kWarmup: {
      if (!started) return schedule.warmup_min_lr;
      const double share = iteration < warmup_steps ? warmup_share(schedule, iteration, warmup_steps) : 1.0;
      return schedule.warmup_min_lr + range * share;
    }
    case ScheduleKind::kWarmupDecay: {
      if (!started) return schedule.warmup_min_lr;
      const double share = iteration < warmup_steps ? warmup_share(schedule, iteration, warmup_steps)
                                                    : decay_share(schedule, iteration, warmup_steps);
      return schedule.warmup_min_lr + range * share;
    }
    case ScheduleKind::kWarmupCosine:
      return started ? config.optimizer.learning_rate * cosine_ratio(schedule, iteration, warmup_steps) : 0.0;
  }
  return config.optimizer.learning_rate;
}

}  // namespace spillway
