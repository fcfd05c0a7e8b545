#include "src/config_table.h"

#include <array>

// Meaning and defaults are those of DeepSpeed's documentation ("DeepSpeed Configuration JSON") and of its 0.19.8
// source; section "spillway" is ours.

namespace spillway {
namespace {

using enum KeyKind;
using D = ConfigDraft;
using V = KeyValue;

constexpr double kMost32 = 4294967295.0;
constexpr std::string_view kDevices = "none|cpu|nvme";
constexpr std::string_view kAdam = "AdamW|Adam";
constexpr std::string_view kLinear = "WarmupLR|WarmupDecayLR";

Placement placement_of(std::uint64_t choice) {
  return choice == 0 ? Placement::kHbm : choice == 1 ? Placement::kHost : Placement::kNvme;
}

constexpr ConfigKey kKeys[] = {
    {"train_batch_size", kInteger, "", "rows per optimizer step: micro batch × accumulation (one rank)",
     [](D& d, const V& v) { d.train_batch = v.integer; }, 1, kMost32},
    {"train_micro_batch_size_per_gpu", kInteger, "", "rows per forward pass; derived when missing",
     [](D& d, const V& v) { d.micro_batch = v.integer; }, 1, kMost32},
    {"gradient_accumulation_steps", kInteger, "", "micro-batches per optimizer step; derived when missing",
     [](D& d, const V& v) { d.accumulation = v.integer; }, 1, kMost32},
    {"gradient_clipping", kNumber, "1", "largest global gradient norm; 0 switches clipping off",
     [](D& d, const V& v) { d.config.gradient_clipping = v.number; }},

    {"optimizer", kSection, "", "the optimizer"},
    {.path = "optimizer.type",
     .kind = kChoice,
     .standard = "\"AdamW\"",
     .doc = "Adam is decoupled (AdamW) too, unless adam_w_mode is false",
     .set = [](D& d, const V& v) { d.optimizer_type = v.integer; },
     .allowed = "AdamW|Adam|Adagrad|Lion|SGD"},
    {"optimizer.params", kSection, "", "the optimizer's hyper-parameters"},
    {"optimizer.params.lr", kNumber, "1e-3", "learning rate; Adagrad: 1e-2 when missing",
     [](D& d, const V& v) { d.learning_rate = v.number; }},
    {.path = "optimizer.params.betas",
     .kind = kPair,
     .standard = "[0.9, 0.999]",
     .doc = "decay rates of the two moments; Lion: [0.9, 0.99] when missing",
     .set =
         [](D& d, const V& v) {
           d.betas = {v.number, v.second};
         },
     .most = 1,
     .below_most = true,
     .only_for = "AdamW|Adam|Lion"},
    {.path = "optimizer.params.eps",
     .kind = kNumber,
     .standard = "1e-8",
     .doc = "added to the denominator; Adagrad: 1e-10 when missing",
     .set = [](D& d, const V& v) { d.epsilon = v.number; },
     .only_for = "AdamW|Adam|Adagrad"},
    {"optimizer.params.weight_decay", kNumber, "0", "weight decay, for every parameter that no group excepts",
     [](D& d, const V& v) { d.config.optimizer.weight_decay = v.number; }},
    {.path = "optimizer.params.bias_correction",
     .kind = kBool,
     .standard = "true",
     .doc = "Adam's correction of the first steps' moments",
     .set = [](D& d, const V& v) { d.config.optimizer.bias_correction = v.flag; },
     .only_for = kAdam},
    {.path = "optimizer.params.adam_w_mode",
     .kind = kBool,
     .standard = "true",
     .doc = "type Adam: decoupled weight decay; false: L2",
     .set = [](D& d, const V& v) { d.adam_w_mode = v.flag; },
     .only_for = kAdam},
    {.path = "optimizer.params.momentum",
     .kind = kNumber,
     .standard = "0",
     .doc = "share of the last step's direction that goes on",
     .set = [](D& d, const V& v) { d.config.optimizer.momentum = v.number; },
     .most = 1,
     .below_most = true,
     .only_for = "SGD"},
    {.path = "optimizer.params.dampening",
     .kind = kNumber,
     .standard = "0",
     .doc = "share of the gradient that momentum leaves out",
     .set = [](D& d, const V& v) { d.config.optimizer.dampening = v.number; },
     .most = 1,
     .only_for = "SGD"},
    {.path = "optimizer.params.nesterov",
     .kind = kBool,
     .standard = "false",
     .doc = "Nesterov's momentum",
     .set = [](D& d, const V& v) { d.config.optimizer.nesterov = v.flag; },
     .only_for = "SGD"},

    {.path = "scheduler", .kind = kSection, .standard = "", .doc = "the learning rate's schedule", .nullable = true},
    {.path = "scheduler.type",
     .kind = kChoice,
     .standard = "",
     .doc = "the schedule; needed in this section",
     .set =
         [](D& d, const V& v) {
           constexpr std::array kKinds = {ScheduleKind::kWarmup, ScheduleKind::kWarmupDecay,
                                          ScheduleKind::kWarmupCosine};
           d.config.schedule.kind = kKinds[v.integer];
         },
     .allowed = "WarmupLR|WarmupDecayLR|WarmupCosineLR"},
    {"scheduler.params", kSection, "", "the schedule's parameters"},
    {.path = "scheduler.params.warmup_min_lr",
     .kind = kNumber,
     .standard = "0",
     .doc = "rate before the warm-up",
     .set = [](D& d, const V& v) { d.config.schedule.warmup_min_lr = v.number; },
     .only_for = kLinear},
    {.path = "scheduler.params.warmup_max_lr",
     .kind = kNumber,
     .standard = "",
     .doc = "rate after the warm-up; WarmupLR: the optimizer's, WarmupDecayLR: 1e-3 when missing",
     .set = [](D& d, const V& v) { d.warmup_max_lr = v.number; },
     .nullable = true,
     .only_for = kLinear},
    {"scheduler.params.warmup_num_steps", kInteger, "1000", "steps of warm-up; 1 counts as 2",
     [](D& d, const V& v) { d.config.schedule.warmup_steps = v.integer; }, 1},
    {.path = "scheduler.params.warmup_type",
     .kind = kChoice,
     .standard = "\"log\"",
     .doc = "shape of the warm-up",
     .set = [](D& d, const V& v) { d.config.schedule.logarithmic_warmup = v.integer == 0; },
     .allowed = "log|linear"},
    {.path = "scheduler.params.total_num_steps",
     .kind = kInteger,
     .standard = "",
     .doc = "steps of the whole schedule",
     .set = [](D& d, const V& v) { d.total_steps = v.integer; },
     .least = 1,
     .only_for = "WarmupDecayLR|WarmupCosineLR"},
    {.path = "scheduler.params.warmup_min_ratio",
     .kind = kNumber,
     .standard = "0",
     .doc = "first rate of the warm-up, as a share of the optimizer's",
     .set = [](D& d, const V& v) { d.config.schedule.warmup_min_ratio = v.number; },
     .most = 1,
     .only_for = "WarmupCosineLR"},
    {.path = "scheduler.params.cos_min_ratio",
     .kind = kNumber,
     .standard = "1e-4",
     .doc = "last rate, as a share of the optimizer's",
     .set = [](D& d, const V& v) { d.config.schedule.cosine_min_ratio = v.number; },
     .most = 1,
     .only_for = "WarmupCosineLR"},

    {"bf16", kSection, "", "bfloat16 training"},
    {"bf16.enabled", kBool, "false", "weights and gradients in bf16, with an exact fp32 master; false: fp32",
     [](D& d, const V& v) { d.config.weights = v.flag ? DType::kBFloat16 : DType::kFloat32; }},
    {"fp16", kSection, "", "half precision training; not supported"},
    {"fp16.enabled", kBool, "false", "must be false", [](D& d, const V& v) { d.fp16 = v.flag; }},

    {"zero_optimization", kSection, "", "what is partitioned, and where it lives"},
    {"zero_optimization.stage", kInteger, "", "3: weights, gradients and states",
     [](D& d, const V& v) { d.stage = v.integer; }, 0, 3},
    {.path = "zero_optimization.offload_optimizer",
     .kind = kSection,
     .standard = "",
     .doc = "where Adam's states live",
     .nullable = true},
    {.path = "zero_optimization.offload_optimizer.device",
     .kind = kChoice,
     .standard = "\"none\"",
     .doc = "none: HBM, cpu: pinned host memory, nvme",
     .set = [](D& d, const V& v) { d.config.states = placement_of(v.integer); },
     .allowed = kDevices},
    {.path = "zero_optimization.offload_optimizer.nvme_path",
     .kind = kText,
     .standard = "",
     .doc = "directory of the store; the same in both sections, or in one",
     .set = [](D& d, const V& v) { d.states_path = v.text; },
     .nullable = true},
    {.path = "zero_optimization.offload_param",
     .kind = kSection,
     .standard = "",
     .doc = "where the weights live",
     .nullable = true},
    {.path = "zero_optimization.offload_param.device",
     .kind = kChoice,
     .standard = "\"none\"",
     .doc = "none: HBM, cpu: pinned host memory, nvme",
     .set = [](D& d, const V& v) { d.config.parameters = placement_of(v.integer); },
     .allowed = kDevices},
    {.path = "zero_optimization.offload_param.nvme_path",
     .kind = kText,
     .standard = "",
     .doc = "directory of the store; the same in both sections, or in one",
     .set = [](D& d, const V& v) { d.parameters_path = v.text; },
     .nullable = true},
    {"zero_optimization.cpu_offload", kBool, "false", "older word for offload_optimizer {\"device\": \"cpu\"}",
     [](D& d, const V& v) { d.cpu_offload = v.flag; }},
    {"zero_optimization.cpu_offload_param", kBool, "false", "older word for offload_param {\"device\": \"cpu\"}",
     [](D& d, const V& v) { d.cpu_offload_param = v.flag; }},

    {"aio", kSection, "", "how the drive is driven"},
    {.path = "aio.block_size",
     .kind = kInteger,
     .standard = "1048576",
     .doc = "largest request, in bytes",
     .set = [](D& d, const V& v) { d.config.io_block_bytes = v.integer; },
     .least = 4096,
     .most = 1 << 30,
     .multiple_of = 4096},
    {"aio.queue_depth", kInteger, "32", "requests in flight",
     [](D& d, const V& v) { d.config.io_depth = static_cast<std::uint32_t>(v.integer); }, 1, 4096},

    {"spillway", kSection, "", "what DeepSpeed has no word for"},
    {"spillway.hbm_bytes", kBytes, "", "budget of GPU memory; what the plan asks for when missing",
     [](D& d, const V& v) { d.config.hbm_bytes = v.integer; }},
    {"spillway.host_bytes", kBytes, "", "budget of pinned host memory; what the plan asks for when missing",
     [](D& d, const V& v) { d.config.host_bytes = v.integer; }},
    {"spillway.nvme_bytes", kBytes, "", "budget on the drive; what the store needs when missing",
     [](D& d, const V& v) { d.config.nvme_bytes = v.integer; }},
    {"spillway.nvme_paths", kTexts, "", "directories, one per drive, that a store is striped over; nvme_path first",
     [](D& d, const V& v) { d.nvme_paths = v.texts; }},
    {.path = "spillway.nvme_rates",
     .kind = kNumbers,
     .standard = "",
     .doc = "GB/s of each path, reads and writes mixed, as the sweep measures them; probed when missing",
     .set = [](D& d, const V& v) { d.nvme_rates = v.numbers; },
     .least = 0.001,
     .most = 1e6},
    {.path = "spillway.tile_elements",
     .kind = kInteger,
     .standard = "4194304",
     .doc = "parameters per tile",
     .set = [](D& d, const V& v) { d.config.tile_elements = v.integer; },
     .least = 1024,
     .most = 1 << 30,
     .multiple_of = 1024},
    {"spillway.commit_every", kInteger, "", "steps between commits; 0: one slot, half the disk, no resume",
     [](D& d, const V& v) { d.config.commit_every = static_cast<std::uint32_t>(v.integer); }, 0, kMost32},
    {"spillway.no_decay", kBool, "false", "no weight decay for parameters of fewer than two dimensions: biases, norms",
     [](D& d, const V& v) { d.config.no_decay = v.flag; }},
    {"spillway.parameter_groups", kSections, "", "parameters with values of their own; the first that matches decides",
     [](D& d, const V& v) {
       auto& groups = d.config.parameter_groups;
       v.flag ? groups.clear() : static_cast<void>(groups.emplace_back());
     }},
    {"spillway.parameter_groups.parameters", kTexts, "", "their names; * stands for anything",
     [](D& d, const V& v) { d.config.parameter_groups.back().parameters = v.texts; }},
    {"spillway.parameter_groups.lr", kNumber, "", "learning rate, scaled by a schedule as the optimizer's is",
     [](D& d, const V& v) { d.config.parameter_groups.back().learning_rate = v.number; }},
    {"spillway.parameter_groups.weight_decay", kNumber, "", "weight decay; the optimizer's when missing",
     [](D& d, const V& v) { d.config.parameter_groups.back().weight_decay = v.number; }},
    {"spillway.threads", kInteger, "0", "compute threads; 0: one per core that this process may use",
     [](D& d, const V& v) { d.config.threads = static_cast<unsigned>(v.integer); }, 0, 4096},
    {.path = "spillway.io_engine",
     .kind = kChoice,
     .standard = "\"auto\"",
     .doc = "how requests reach the kernel",
     .set = [](D& d, const V& v) { d.config.io_engine = static_cast<IoEngineKind>(v.integer); },
     .allowed = "auto|io_uring|libaio|threads"},
};

}  // namespace

std::span<const ConfigKey> config_keys() { return kKeys; }

const ConfigKey* find_config_key(std::string_view path) {
  for (const auto& table : {config_keys(), config_keys_without_effect()}) {
    for (const ConfigKey& key : table) {
      if (key.path == path) return &key;
    }
  }
  return nullptr;
}

}  // namespace spillway
