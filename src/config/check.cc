#include "src/config/check.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <filesystem>
#include <iterator>
#include <limits>
#include <map>
#include <numeric>

#include <fmt/format.h>

#include "spillway/io_queue.h"
#include "spillway/log.h"
#include "spillway/units.h"
#include "src/plan/communication.h"
#include "src/plan/partition.h"
#include "src/plan/state_sections.h"
#include "swap/extents.h"
#include "swap/store_files.h"

namespace spillway {
namespace {

constexpr std::string_view kOffloadOptimizer = "zero_optimization.offload_optimizer";
constexpr std::string_view kOffloadParam = "zero_optimization.offload_param";

bool is_auto(const KeyPlaces& places, std::string_view path) {
  const auto at = places.find(path);
  return at != places.end() && at->second.automatic;
}

// There, and not what it should be: reported before.
bool is_wrong(const KeyPlaces& places, std::string_view path, bool valid) {
  return places.contains(path) && !is_auto(places, path) && !valid;
}

// "auto" leaves it to the other two; where they leave it open, the micro batch is the trainer's, or the largest part of
// it that divides a rank's batch.
void fill_batch(ConfigDraft& draft, const KeyPlaces& places) {
  const bool auto_micro = is_auto(places, "train_micro_batch_size_per_gpu");
  if (draft.train_batch) {
    if (auto_micro && !draft.accumulation) {
      draft.micro_batch = std::gcd(std::max<std::uint64_t>(1, *draft.train_batch / draft.ranks), kTrainerMicroBatch);
    }
    return;
  }
  if (!draft.micro_batch && (auto_micro || is_auto(places, "train_batch_size"))) {
    draft.micro_batch = kTrainerMicroBatch;
  }
  if (is_auto(places, "gradient_accumulation_steps")) draft.accumulation = 1;
}

// How a step's micro-batches are cut into parts: a rank has whole parts, all ranks the same number.
void finalize_sum_groups(const ConfigDraft& draft, const KeyPlaces& places, const ReportAt& report) {
  const std::uint32_t groups = draft.config.sum_groups, ranks = draft.ranks;
  const std::uint64_t micro_batches = std::uint64_t{draft.config.gradient_accumulation} * ranks;
  const bool fits = std::has_single_bit(groups) && micro_batches % groups == 0;
  if (!places.contains("spillway.sum_groups") || (fits && groups % ranks == 0)) return;
  if (ranks == 1) {
    report("spillway.sum_groups",
           fmt::format("{} parts of {} micro-batches a step (gradient_accumulation_steps)", groups, micro_batches),
           "take a power of two that divides them");
    return;
  }
  report("spillway.sum_groups",
         fmt::format("{} parts of {} micro-batches a step (gradient_accumulation_steps {} × {} ranks), on {} ranks",
                     groups, micro_batches, draft.config.gradient_accumulation, ranks, ranks),
         std::has_single_bit(ranks)
             ? fmt::format("take a power of two that divides {} and is {} or a multiple of it", micro_batches, ranks)
             : "no power of two is a multiple of the ranks: take 2, 4 or 8 of them, or leave this out");
}

// Any of the three may be missing, but one of the two sizes must be there: DeepSpeed's rule (runtime/config.py,
// _set_batch_related_parameters). DeepSpeed rounds a quotient down and then finds the contradiction.
void finalize_batch(ConfigDraft& draft, const KeyPlaces& places, const ReportAt& report) {
  if (draft.ranks == 0) return;
  if (is_wrong(places, "train_batch_size", draft.train_batch.has_value()) ||
      is_wrong(places, "train_micro_batch_size_per_gpu", draft.micro_batch.has_value()) ||
      is_wrong(places, "gradient_accumulation_steps", draft.accumulation.has_value())) {
    return;
  }
  fill_batch(draft, places);
  const auto &train = draft.train_batch, &micro = draft.micro_batch, &accumulation = draft.accumulation;
  if (!train && !micro) {
    report("", "neither train_batch_size nor train_micro_batch_size_per_gpu is there",
           "one of them must say how many rows a step takes");
    return;
  }
  const std::uint64_t ranks = draft.ranks, most = std::numeric_limits<std::uint32_t>::max();
  const std::uint64_t parts = (micro ? *micro : accumulation.value_or(1)) * ranks;  // what divides the whole batch
  const std::uint64_t quotient = train ? *train / parts : 0;
  const std::uint64_t rows = micro ? *micro : quotient;
  const std::uint64_t steps = accumulation ? *accumulation : train && micro ? quotient : 1;
  // Factors are at most 2^32 - 1 each, so that the product of two does not overflow.
  const std::uint64_t all_rows = rows * steps > most ? UINT64_MAX : rows * steps * ranks;
  if (train && all_rows != *train) {
    report(
        "train_batch_size",
        fmt::format("{} is not {} (micro batch) × {} (accumulation) × {} ({})", *train, rows, steps, ranks,
                    ranks == 1 ? "rank" : "ranks"),
        micro && accumulation && *train % (rows * ranks) == 0
            ? fmt::format("gradient_accumulation_steps {} keeps the batch, on however many GPUs it was trained before",
                          *train / (rows * ranks))
        : micro && accumulation ? fmt::format("{} would be; or leave one of the three out", rows * steps * ranks)
                                : fmt::format("it must be a multiple of {}", parts));
    return;
  }
  if (all_rows > most) {
    report(places.contains("gradient_accumulation_steps") ? "gradient_accumulation_steps" : "",
           ranks == 1 ? fmt::format("{} rows a step are too many", rows * steps)
                      : fmt::format("{} rows a step of each of {} ranks are too many", rows * steps, ranks),
           "lower the batch or the accumulation");
    return;
  }
  draft.config.micro_batch = static_cast<std::uint32_t>(rows);
  draft.config.gradient_accumulation = static_cast<std::uint32_t>(steps);
  finalize_sum_groups(draft, places, report);
  const std::string why = refusal_of_communication(draft.config);
  if (!why.empty()) report("communication_data_type", why, kOneOfTheTwo);
}

// Parameters of another type than the one that is configured, in a section of keys with such parameters.
void report_foreign(std::string_view section, std::string_view type, const KeyPlaces& places, const ReportAt& report) {
  for (const ConfigKey& key : config_keys()) {
    const auto types = choices_of(key.only_for);
    const bool foreign = !types.empty() && std::find(types.begin(), types.end(), type) == types.end();
    if (foreign && key.path.starts_with(section) && places.contains(key.path)) {
      report(key.path, fmt::format("not a parameter of {}", type), "only of " + list_of(types));
    }
  }
}

void finalize_groups(const ConfigDraft& draft, const KeyPlaces& places, const ReportAt& report) {
  constexpr std::string_view kGroups = "spillway.parameter_groups";
  if (places.contains("spillway.parameter_groups.parameters") && draft.config.parameter_groups.empty()) return;
  for (std::size_t g = 0; g < draft.config.parameter_groups.size(); ++g) {
    const ParameterGroup& group = draft.config.parameter_groups[g];
    if (group.parameters.empty()) {
      report(kGroups, fmt::format("group {} names no parameters", g), "add \"parameters\": [\"*.bias\"]");
    } else if (!group.learning_rate && !group.weight_decay) {
      report(kGroups, fmt::format("group {} sets neither lr nor weight_decay", g), "set one of them, or leave it out");
    }
  }
}

void report_adapters(const ConfigDraft& draft, const KeyPlaces& places, const ReportAt& report) {
  const std::vector<std::string>& targets = draft.config.lora.targets;
  if (places.contains("spillway.lora") && targets.empty()) {
    report("spillway.lora", "names no targets", "add \"targets\": [\"q_proj\", \"v_proj\"], or [\"all-linear\"]");
  }
}

void finalize_states(const ConfigDraft& draft, const KeyPlaces& places, const ReportAt& report) {
  const Config& config = draft.config;
  if (config.moments == MomentFormat::kFloat32) {
    for (const std::string_view key : {"spillway.exact_states", "spillway.rounding_seed"}) {
      if (places.contains(key))
        log(LogLevel::kInfo, fmt::format("{}: without effect, as spillway.states is fp32", key));
    }
    return;
  }
  if (can_reduce(config.optimizer.kind)) return;
  report("spillway.states",
         fmt::format("{}, and {} has exact states alone", name_of(config.moments), name_of(config.optimizer.kind)),
         "leave it out, or train with AdamW, Adam or Lion");
}

void finalize_optimizer(ConfigDraft& draft, const KeyPlaces& places, const ReportAt& report) {
  OptimizerConfig& optimizer = draft.config.optimizer;
  const std::string_view type = kOptimizerTypes[draft.optimizer_type];
  optimizer.kind = kOptimizerKinds[std::max<std::uint64_t>(draft.optimizer_type, 1) - 1];
  // DeepSpeed's defaults: ops/adam, ops/adagrad and ops/lion of 0.19.8, torch.optim.SGD.
  const bool adagrad = optimizer.kind == OptimizerKind::kAdagrad;
  optimizer.learning_rate = draft.learning_rate.value_or(adagrad ? 1e-2 : 1e-3);
  optimizer.epsilon = draft.epsilon.value_or(adagrad ? 1e-10 : 1e-8);
  report_foreign("optimizer.params.", type, places, report);
  // DeepSpeed ignores adam_w_mode with AdamW; a file that says both means one of them.
  if (type == "AdamW" && !draft.adam_w_mode) {
    report("optimizer.params.adam_w_mode", "false contradicts the optimizer's type, AdamW",
           "type \"Adam\" with adam_w_mode false adds weight decay to the gradient (L2)");
  }
  optimizer.decoupled_decay = draft.adam_w_mode;
  optimizer.weight_decay = draft.weight_decay.value_or(draft.torch_adam && draft.adam_w_mode ? 1e-2 : 0);
  // As in torch.optim.SGD.
  if (optimizer.nesterov && !(optimizer.momentum > 0 && optimizer.dampening == 0)) {
    report("optimizer.params.nesterov", "needs a momentum and no dampening", "set momentum to 0.9");
  }
  finalize_groups(draft, places, report);
  report_adapters(draft, places, report);
  finalize_states(draft, places, report);
}

void finalize_precision(ConfigDraft& draft, const KeyPlaces& places, const ReportAt& report) {
  draft.config.weights = draft.fp16 ? DType::kFloat16 : draft.bf16 ? DType::kBFloat16 : DType::kFloat32;
  if (draft.param_dtype && *draft.param_dtype != draft.config.weights) {
    report(
        "data_types.param_dtype",
        fmt::format("{} contradicts the weights' type, {}", name_of(*draft.param_dtype), name_of(draft.config.weights)),
        "bf16.enabled and fp16.enabled say it; leave this out");
  }
  if (!draft.fp16) return;
  const LossScaleConfig& scale = draft.config.loss_scale;
  if (draft.bf16) report("fp16.enabled", "contradicts bf16.enabled", "enable one of the two");
  if (scale.fixed == 0 && std::ldexp(1.0, static_cast<int>(scale.initial_power)) < scale.least) {
    report("fp16.min_loss_scale",
           fmt::format("{} is above the scale that it begins with, 2^{}", scale.least, scale.initial_power),
           "raise initial_scale_power, or lower it");
  }
  if (scale.fixed == 0) return;
  constexpr std::string_view kDynamic[] = {"fp16.initial_scale_power", "fp16.loss_scale_window", "fp16.hysteresis",
                                           "fp16.consecutive_hysteresis", "fp16.min_loss_scale"};
  std::vector<std::string_view> idle;
  std::ranges::copy_if(kDynamic, std::back_inserter(idle), [&](std::string_view key) { return places.contains(key); });
  if (!idle.empty())
    log(LogLevel::kInfo,
        fmt::format("fp16.loss_scale {} is static: without effect are {}", scale.fixed, list_of(idle)));
}

std::string_view name_of(ScheduleKind kind) {
  return choices_of(find_config_key("scheduler.type")->allowed)[static_cast<std::size_t>(kind) - 1];
}

void finalize_schedule(ConfigDraft& draft, const KeyPlaces& places, const ReportAt& report) {
  if (!places.contains("scheduler")) return;
  ScheduleConfig& schedule = draft.config.schedule;
  if (draft.ranks == 0) {
    schedule = {};
    return;
  }
  if (schedule.kind == ScheduleKind::kConstant) {
    const auto& allowed = find_config_key("scheduler.type")->allowed;
    const bool missing = !places.contains("scheduler.type");
    if (missing) report("scheduler", "the section has no type", "allowed: " + list_of(choices_of(allowed)));
    return;
  }
  constexpr std::string_view kPeak = "scheduler.params.warmup_max_lr";
  report_foreign("scheduler.params.", name_of(schedule.kind), places, report);
  const double fallback = is_auto(places, kPeak) ? draft.learning_rate.value_or(kTrainerRate)
                          : schedule.kind == ScheduleKind::kWarmup || draft.nulls.contains(kPeak)
                              ? draft.config.optimizer.learning_rate
                              : 1e-3;
  schedule.warmup_max_lr = draft.warmup_max_lr.value_or(fallback);
  schedule.warmup_steps = draft.warmup_steps.value_or(schedule.warmup_steps);
  schedule.total_steps = draft.total_steps.value_or(0);
  if (schedule.kind == ScheduleKind::kWarmup) return;
  if (!places.contains("scheduler.params.total_num_steps")) {
    report("scheduler", fmt::format("{} needs scheduler.params.total_num_steps", name_of(schedule.kind)),
           "add the number of steps that the schedule spans");
  } else if (is_auto(places, "scheduler.params.total_num_steps") && !draft.total_steps) {
    report("scheduler.params.total_num_steps", "\"auto\", and how many steps the run has is not known here",
           Remedy::kSayStepsOrNumber);
  } else if (draft.total_steps && schedule.total_steps < schedule.warmup_steps &&
             !is_wrong(places, "scheduler.params.warmup_num_steps", draft.warmup_steps.has_value())) {
    log(LogLevel::kWarning, fmt::format("scheduler: total_num_steps {} is less than warmup_num_steps {}",
                                        schedule.total_steps, schedule.warmup_steps));
  }
}

// One path from the offload sections, or several from the section "spillway", the first of which is that one.
void finalize_nvme_paths(ConfigDraft& draft, const KeyPlaces& places, const std::string& one_path,
                         const ReportAt& report) {
  Config& config = draft.config;
  constexpr std::string_view kPaths = "spillway.nvme_paths", kRates = "spillway.nvme_rates";
  if (!one_path.empty()) config.nvme_paths = {one_path};
  if (draft.nvme_paths) {
    const std::vector<std::string>& paths = *draft.nvme_paths;
    config.nvme_paths.assign(paths.begin(), paths.end());
    const auto problem = problem_of_paths(config.nvme_paths);
    if (paths.empty()) {
      report(kPaths, "no path is named", "name a directory on every drive");
    } else if (problem) {
      report(kPaths, problem->what, problem->hint);
    } else if (!one_path.empty() && paths.front() != one_path) {
      report(kPaths, fmt::format("\"{}\" is first, and nvme_path is \"{}\"", paths.front(), one_path),
             "put nvme_path first, or leave it out");
    } else if (config.io_depth * paths.size() > kLargestDepth) {
      report("aio.queue_depth", fmt::format("{} for each of {} paths", config.io_depth, paths.size()),
             fmt::format("choose 1 to {}", kLargestDepth / paths.size()));
    }
  } else if (places.contains(kPaths)) {
    return;  // wrong, and reported
  }
  if (!draft.nvme_rates) return;
  config.nvme_rates = *draft.nvme_rates;
  if (const auto problem = problem_of_rates(config)) report(kRates, problem->what, problem->hint);
}

void finalize_offload(ConfigDraft& draft, const KeyPlaces& places, const ReportAt& report) {
  Config& config = draft.config;
  const auto device_of = [](std::string_view section) { return std::string(section) + ".device"; };
  if (draft.cpu_offload && !places.contains(device_of(kOffloadOptimizer))) config.states = Placement::kHost;
  if (draft.cpu_offload_param && !places.contains(device_of(kOffloadParam))) config.parameters = Placement::kHost;

  const bool offloads = config.states != Placement::kHbm || config.parameters != Placement::kHbm;
  const bool stage_said = places.contains("zero_optimization.stage");
  draft.config.stage = static_cast<std::uint32_t>(draft.stage.value_or(0));
  if (draft.stage && *draft.stage < 3 && config.parameters != Placement::kHbm) {
    report("zero_optimization.stage",
           fmt::format("offload_param contradicts stage {}: weights leave the device in stage 3 alone", *draft.stage),
           "set stage to 3, or leave offload_param out");
  } else if (draft.stage == 0u && offloads) {
    report("zero_optimization.stage", "offload_optimizer contradicts stage 0: nothing leaves the device",
           "set stage to 2, or to 3 with offload_param");
  } else if (draft.stage && *draft.stage < 3 && config.states == Placement::kNvme) {
    log(LogLevel::kInfo,
        fmt::format("zero_optimization.stage {}: the optimizer states lie on NVMe as offload_optimizer "
                    "says; DeepSpeed would keep them in host memory",
                    *draft.stage));
  } else if (!stage_said && offloads) {
    report("zero_optimization", "offload_param and offload_optimizer need a stage", "add \"stage\": 3");
  }

  const std::string states_key = std::string(kOffloadOptimizer) + ".nvme_path";
  const std::string parameters_key = std::string(kOffloadParam) + ".nvme_path";
  const bool wrong_before = is_wrong(places, states_key, draft.states_path.has_value()) ||
                            is_wrong(places, parameters_key, draft.parameters_path.has_value());
  if (wrong_before) return;
  // As in DeepSpeed, a path is the directory of a section that offloads to nvme, and nothing beside another device.
  const auto path_in_use = [](Placement home, const std::string& key, const std::optional<std::string>& path) {
    if (home == Placement::kNvme || !path || path->empty()) return path.value_or("");
    log(LogLevel::kWarning, fmt::format("{} is not used: its device is not nvme; spillway.nvme_paths makes a store of "
                                        "what stays in memory",
                                        key));
    return std::string();
  };
  const std::string states_path = path_in_use(config.states, states_key, draft.states_path);
  const std::string parameters_path = path_in_use(config.parameters, parameters_key, draft.parameters_path);
  const std::string& one_path = states_path.empty() ? parameters_path : states_path;
  finalize_nvme_paths(draft, places, one_path, report);
  for (const std::filesystem::path& named : config.nvme_paths) {
    if (!named.empty() && *named.begin() == "~") {
      report(draft.nvme_paths      ? "spillway.nvme_paths"
             : states_path.empty() ? parameters_key
                                   : states_key,
             fmt::format("{} would be a directory of that name: only shells know ~", named.string()),
             "name the directory in full");
    }
  }
  const std::string_view user = config.states == Placement::kNvme ? kOffloadOptimizer : kOffloadParam;
  const bool uses_nvme = config.states == Placement::kNvme || config.parameters == Placement::kNvme;
  if (uses_nvme && one_path.empty() && !places.contains("spillway.nvme_paths")) {
    report(device_of(user), "device nvme needs an nvme_path", "name a directory: \"nvme_path\": \"/mnt/nvme\"");
  }
  if (!parameters_path.empty() && parameters_path != one_path) {
    report(parameters_key,
           fmt::format("\"{}\" differs from offload_optimizer.nvme_path, \"{}\"", parameters_path, one_path),
           "name one path in both, or in one of them");
  }
}

// DeepSpeed's default of 1e9 is made for one GPU's shard; a tile of that size costs gigabytes of host memory and
// brings nothing, so that an explicit value is taken up to kLargestTile.
void finalize_tiles(ConfigDraft& draft, const KeyPlaces& places) {
  if (!draft.sub_group_size) return;
  if (places.contains("spillway.tile_elements")) {
    log(LogLevel::kInfo, "zero_optimization.sub_group_size: spillway.tile_elements decides");
    return;
  }
  if (*draft.sub_group_size == 0) {  // in DeepSpeed a group for every parameter, whatever its size
    log(LogLevel::kInfo, fmt::format("zero_optimization.sub_group_size 0 leaves spillway.tile_elements at {}",
                                     draft.config.tile_elements));
    return;
  }
  constexpr std::uint64_t kLargestTile = 16 << 20;
  const auto buffer_bytes = [&draft](std::uint64_t elements) {  // a tile's weights and states
    const TileShape shape{.count = elements,
                          .type = draft.config.weights,
                          .optimizer = draft.config.optimizer.kind,
                          .states = reduced_states(draft.config)};
    return payload_bytes(shape, Part::kWeights) + payload_bytes(shape, Part::kStates);
  };
  const std::uint64_t wanted = *draft.sub_group_size;
  const std::uint64_t tile = std::clamp(align_down(wanted, kPartitionUnit), kPartitionUnit, kLargestTile);
  draft.config.tile_elements = tile;
  std::string line =
      fmt::format("zero_optimization.sub_group_size {} is taken as spillway.tile_elements {}", wanted, tile);
  if (wanted > tile && tile == kLargestTile) {
    line += fmt::format(": a tile buffer takes up to {} MiB of host memory, and would take {} MiB",
                        div_up(buffer_bytes(tile), kMiB), div_up(buffer_bytes(wanted), kMiB));
  }
  log(LogLevel::kInfo, line);
}

// A key that decides something, under two names: DeepSpeed refuses an older word beside its successor.
void report_two_names(const KeyPlaces& places, const ReportAt& report) {
  for (const ConfigKey& key : config_keys()) {
    const bool named_twice = places.contains(key.path) && places.contains(key.successor);
    if (key.successor.empty() || key.kind == KeyKind::kSection || !named_twice) continue;
    report(key.path, fmt::format("an older word or another name, and {} is there as well", key.successor),
           "leave one of the two out");
  }
}

}  // namespace

std::optional<ValueProblem> problem_of_paths(const std::vector<std::filesystem::path>& paths) {
  if (paths.size() > kMostStorePaths) {
    return ValueProblem{fmt::format("more than {} paths", kMostStorePaths), "name a directory on every drive"};
  }
  if (std::ranges::find(paths, "") != paths.end()) {
    return ValueProblem{"a path is empty", "name a directory on every drive"};
  }
  if (std::string twice = named_twice(paths); !twice.empty()) {
    return ValueProblem{std::move(twice), "name a directory on every drive, once"};
  }
  return std::nullopt;
}

std::optional<ValueProblem> problem_of_rates(const Config& config) {
  if (config.nvme_rates.size() == std::max<std::size_t>(1, config.nvme_paths.size())) return std::nullopt;
  return ValueProblem{fmt::format("{} rates for {} paths", config.nvme_rates.size(), config.nvme_paths.size()),
                      "one for every path, in the same order"};
}

std::string named_twice(const std::vector<std::filesystem::path>& paths) {
  std::map<std::filesystem::path, std::filesystem::path> names;  // by what they stand for
  for (const std::filesystem::path& path : paths) {
    std::error_code failure;
    std::filesystem::path directory = std::filesystem::absolute(path, failure);
    if (!failure) directory = std::filesystem::weakly_canonical(directory, failure);
    if (failure) directory = path.lexically_normal();
    if (!directory.has_filename()) directory = directory.parent_path();  // a slash at its end
    const auto [first, is_new] = names.emplace(directory, path);
    if (is_new) continue;
    if (first->second == path) return fmt::format("\"{}\" is named twice", path.string());
    return fmt::format("\"{}\" is named twice, once as \"{}\"", first->second.string(), path.string());
  }
  return "";
}

void finalize_config(ConfigDraft& draft, const KeyPlaces& places, const ReportAt& report) {
  report_two_names(places, report);
  finalize_batch(draft, places, report);
  finalize_optimizer(draft, places, report);
  finalize_precision(draft, places, report);
  finalize_schedule(draft, places, report);
  finalize_offload(draft, places, report);
  finalize_tiles(draft, places);
}

}  // namespace spillway
