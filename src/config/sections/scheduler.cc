// Section "scheduler".
#include <array>
#include <cstddef>

#include "src/config/place.h"

namespace spillway {
namespace {

using namespace key_rows;

constexpr std::string_view kLinear = "WarmupLR|WarmupDecayLR";

constexpr ConfigKey kSchedulerKeys[] = {
    K{"scheduler", kSection, "", "the learning rate's schedule"}.or_null(),
    K{"scheduler.type",
      kChoice,
      "",
      "the schedule; needed in this section",
      {[](D& d, const V& v) {
         constexpr std::array kKinds = {ScheduleKind::kWarmup, ScheduleKind::kWarmupDecay, ScheduleKind::kWarmupCosine};
         d.config.schedule.kind = kKinds[v.integer];
       },
       [](const C& c) {
         constexpr std::string_view kNames[] = {"", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"};
         const std::string_view name = kNames[static_cast<std::size_t>(c.schedule.kind)];
         return name.empty() ? "" : json_string(name);
       }}}
        .allows("WarmupLR|WarmupDecayLR|WarmupCosineLR", "OneCycle|LRRangeTest"),
    {"scheduler.params", kSection, "", "the schedule's parameters"},
    K{"scheduler.params.warmup_min_lr", kNumber, "0", "rate before the warm-up",
      at<&C::schedule, &ScheduleConfig::warmup_min_lr>}
        .only_of(kLinear)
        .filled({always<"0">, "always 0"}),
    K{"scheduler.params.warmup_max_lr", kNumber, "",
      "rate after the warm-up; the optimizer's when null, or missing in WarmupLR; 1e-3 when missing in "
      "WarmupDecayLR",
      drafted<&D::warmup_max_lr>([](const C& c) { return json_of(c.schedule.warmup_max_lr); })}
        .or_null()
        .only_of(kLinear)
        .filled({always<"">, "the optimizer's rate, or the trainer's, 5e-5"}),
    K{"scheduler.params.warmup_num_steps", kInteger, "1000", "steps of warm-up; 1 counts as 2",
      drafted<&D::warmup_steps>([](const C& c) { return json_of(c.schedule.warmup_steps); }), 1}
        .filled({always<"1">, "the trainer's warmup_steps, 0, which counts as 2"}),
    K{"scheduler.params.warmup_type",
      kChoice,
      "\"log\"",
      "shape of the warm-up",
      {[](D& d, const V& v) { d.config.schedule.logarithmic_warmup = v.integer == 0; },
       [](const C& c) { return json_string(c.schedule.logarithmic_warmup ? "log" : "linear"); }}}
        .allows("log|linear"),
    K{"scheduler.params.total_num_steps", kInteger, "", "steps of the whole schedule",
      drafted<&D::total_steps>([](const C& c) { return json_of(c.schedule.total_steps); }), 1}
        .only_of("WarmupDecayLR|WarmupCosineLR")
        .filled({[](const A& a) { return json_of(a.total_steps); }, "--steps"}),
    K{"scheduler.params.warmup_min_ratio", kNumber, "0", "first rate of the warm-up, as a share of the optimizer's",
      at<&C::schedule, &ScheduleConfig::warmup_min_ratio>, 0, 1}
        .only_of("WarmupCosineLR"),
    K{"scheduler.params.cos_min_ratio", kNumber, "1e-4", "last rate, as a share of the optimizer's",
      at<&C::schedule, &ScheduleConfig::cosine_min_ratio>, 0, 1}
        .only_of("WarmupCosineLR"),
};

}  // namespace

std::span<const ConfigKey> scheduler_keys() { return kSchedulerKeys; }

}  // namespace spillway
