#include "src/config/table.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <numeric>

#include "src/config/place.h"

// Meaning and defaults are those of DeepSpeed's documentation ("DeepSpeed Configuration JSON") and of its 0.19.8
// source; section "spillway" is ours. "auto" is what transformers (integrations/deepspeed.py, trainer_config_process
// and trainer_config_finalize) and accelerate (utils/dataclasses.py, DeepSpeedPlugin) fill in.

namespace spillway {
namespace {

using enum KeyKind;
using C = Config;
using D = ConfigDraft;
using V = KeyValue;
using A = AutoValues;
using Knobs = DeepSpeedKnobs;

constexpr double kMost32 = 4294967295.0;
constexpr std::string_view kDevices = "none|cpu|nvme";
constexpr std::string_view kAdam = "AdamW|Adam";
constexpr std::string_view kLinear = "WarmupLR|WarmupDecayLR";

Placement placement_of(std::uint64_t choice) {
  return choice == 0 ? Placement::kHbm : choice == 1 ? Placement::kHost : Placement::kNvme;
}

template <Placement Config::*member>
constexpr KeyPlace kDevice = {
    [](D& d, const V& v) { d.config.*member = placement_of(v.integer); },
    [](const C& c) { return json_string(choices_of(kDevices)[static_cast<std::size_t>(c.*member)]); }};

template <auto member>
constexpr KeyPlace kOfGroup = {[](D& d, const V& v) { assign(d.config.parameter_groups.back().*member, v); }};

constexpr KeyPlace kAsWritten = {[](D&, const V&) {}};  // read from the settings, by callers

// "auto" that is always the same.
template <std::size_t size>
struct Text {
  constexpr Text(const char (&text)[size]) { std::copy_n(text, size, value); }
  char value[size];
};
template <Text text>
std::string always(const A&) {
  return text.value;
}

// Values that depend on the model's width: the plan's own choice where that is not known.
template <auto of_width>
std::string from_width(const A& a) {
  return a.hidden_size ? std::to_string(of_width(*a.hidden_size)) : "";
}

// A limit on what the plan does by itself, in parameters, under both of its names. DeepSpeed's default of one of them
// is sys.maxsize.
constexpr ConfigKey limit(std::string_view path, std::string_view doc, KeyPlace place, AutoRule automatic = {}) {
  return {.path = path,
          .kind = kInteger,
          .standard = "",
          .doc = doc,
          .place = place,
          .most = 1.8e19,
          .automatic = automatic};
}
constexpr ConfigKey also(std::string_view path, const ConfigKey& key) {
  ConfigKey other = key;
  other.path = path;
  other.successor = key.path;
  return other;
}
constexpr ConfigKey kMaxLive =
    limit("zero_optimization.stage3_max_live_parameters",
          "parameters in HBM places at a time; two places are always kept", at<&C::knobs, &Knobs::max_live_parameters>);
constexpr ConfigKey kMaxReuse = limit("zero_optimization.stage3_max_reuse_distance",
                                      "a block stays in HBM between visits when fewer parameters are visited meanwhile",
                                      at<&C::knobs, &Knobs::max_reuse_distance>);
constexpr ConfigKey kPrefetch = limit("zero_optimization.stage3_prefetch_bucket_size",
                                      "another block is fetched ahead while fewer parameters than these are; 0: none",
                                      at<&C::knobs, &Knobs::prefetch_bucket_size>,
                                      {from_width<[](std::uint64_t h) { return h * h * 9 / 10; }>, "0.9 × width²"});
constexpr ConfigKey kPersistence = limit("zero_optimization.stage3_param_persistence_threshold",
                                         "blocks whose parameters are all this small have HBM places of their own",
                                         at<&C::knobs, &Knobs::param_persistence_threshold>,
                                         {from_width<[](std::uint64_t h) { return h * 10; }>, "10 × width"});
constexpr ConfigKey kModelPersistence =
    limit("zero_optimization.stage3_model_persistence_threshold", "parameters of all blocks with places of their own",
          at<&C::knobs, &Knobs::model_persistence_threshold>);

constexpr ConfigKey kKeys[] = {
    {.path = "train_batch_size",
     .kind = kInteger,
     .standard = "",
     .doc = "rows per optimizer step: micro batch × accumulation (one rank)",
     .place = drafted<&D::train_batch>(
         [](const C& c) { return json_of(std::uint64_t{c.micro_batch} * c.gradient_accumulation); }),
     .least = 1,
     .most = kMost32,
     .automatic = {always<"">, "micro batch × accumulation"}},
    {.path = "train_micro_batch_size_per_gpu",
     .kind = kInteger,
     .standard = "",
     .doc = "rows per forward pass; derived when missing",
     .place = drafted<&D::micro_batch>([](const C& c) { return json_of(c.micro_batch); }),
     .least = 1,
     .most = kMost32,
     .automatic = {always<"">, "what the other two leave, else 8"}},
    {.path = "gradient_accumulation_steps",
     .kind = kInteger,
     .standard = "",
     .doc = "micro-batches per optimizer step; derived when missing",
     .place = drafted<&D::accumulation>([](const C& c) { return json_of(c.gradient_accumulation); }),
     .least = 1,
     .most = kMost32,
     .automatic = {always<"">, "what the other two leave, else 1"}},
    {.path = "gradient_clipping",
     .kind = kNumber,
     .standard = "1",
     .doc = "largest global gradient norm; 0 switches clipping off",
     .place = at<&C::gradient_clipping>,
     .most = 1e38,
     .automatic = {always<"1">, "the trainer's max_grad_norm, 1"}},
    {"dataloader_drop_last", kBool, "", "the loader of Python's initialize() gives whole batches only", kAsWritten},

    {"optimizer", kSection, "", "the optimizer"},
    {.path = "optimizer.type",
     .kind = kChoice,
     .standard = "\"AdamW\"",
     .doc = "Adam is decoupled (AdamW) too, unless adam_w_mode is false",
     .place = {[](D& d, const V& v) { d.optimizer_type = v.integer; },
               [](const C& c) {
                 const bool adam_w = c.optimizer.kind == OptimizerKind::kAdam && c.optimizer.decoupled_decay;
                 return json_string(adam_w ? "AdamW" : name_of(c.optimizer.kind));
               }},
     .allowed = "AdamW|Adam|Adagrad|Lion|SGD",
     .refused = "Lamb|Muon|OneBitAdam|ZeroOneAdam|OneBitLamb|MuAdam|MuAdamW|MuSGD"},
    {"optimizer.params", kSection, "", "the optimizer's hyper-parameters"},
    {.path = "optimizer.params.lr",
     .kind = kNumber,
     .standard = "1e-3",
     .doc = "learning rate; Adagrad: 1e-2 when missing",
     .place = drafted<&D::learning_rate>([](const C& c) { return json_of(c.optimizer.learning_rate); }),
     .automatic = {[](const A&) { return json_of(kTrainerRate); }, "the trainer's learning_rate, 5e-5"}},
    {.path = "optimizer.params.betas",
     .kind = kPair,
     .standard = "[0.9, 0.999]",
     .doc = "decay rates of the two moments",
     .place = {[](D& d, const V& v) {
                 d.config.optimizer.beta1 = v.number;
                 d.config.optimizer.beta2 = v.second;
               },
               [](const C& c) { return pair_of(c.optimizer.beta1, c.optimizer.beta2); }},
     .most = 1,
     .below_most = true,
     .only_for = "AdamW|Adam|Lion",
     .automatic = {always<"[0.9, 0.999]">, "the trainer's adam_beta1 and 2, [0.9, 0.999]"}},
    {.path = "optimizer.params.eps",
     .kind = kNumber,
     .standard = "1e-8",
     .doc = "added to the denominator; Adagrad: 1e-10 when missing",
     .place = drafted<&D::epsilon>([](const C& c) { return json_of(c.optimizer.epsilon); }),
     .only_for = "AdamW|Adam|Adagrad",
     .automatic = {always<"1e-8">, "the trainer's adam_epsilon, 1e-8"}},
    {.path = "optimizer.params.weight_decay",
     .kind = kNumber,
     .standard = "0",
     .doc = "weight decay, for every parameter that no group excepts; 0.01 when missing beside torch_adam",
     .place = drafted<&D::weight_decay>([](const C& c) { return json_of(c.optimizer.weight_decay); }),
     .automatic = {always<"0">, "the trainer's weight_decay, 0"}},
    {.path = "optimizer.params.bias_correction",
     .kind = kBool,
     .standard = "true",
     .doc = "Adam's correction of the first steps' moments",
     .place = at<&C::optimizer, &OptimizerConfig::bias_correction>,
     .only_for = kAdam},
    {.path = "optimizer.params.adam_w_mode",
     .kind = kBool,
     .standard = "true",
     .doc = "type Adam: decoupled weight decay; false: L2",
     .place = drafted<&D::adam_w_mode>([](const C& c) { return json_of(c.optimizer.decoupled_decay); }),
     .only_for = kAdam},
    {.path = "optimizer.params.torch_adam",
     .kind = kBool,
     .standard = "",
     .doc = "the default of weight_decay is that of PyTorch's AdamW, 0.01, unless adam_w_mode is false",
     .place = drafted<&D::torch_adam>(),
     .only_for = kAdam},
    {.path = "optimizer.params.momentum",
     .kind = kNumber,
     .standard = "0",
     .doc = "share of the last step's direction that goes on",
     .place = at<&C::optimizer, &OptimizerConfig::momentum>,
     .most = 1,
     .below_most = true,
     .only_for = "SGD"},
    {.path = "optimizer.params.dampening",
     .kind = kNumber,
     .standard = "0",
     .doc = "share of the gradient that momentum leaves out",
     .place = at<&C::optimizer, &OptimizerConfig::dampening>,
     .most = 1,
     .only_for = "SGD"},
    {.path = "optimizer.params.nesterov",
     .kind = kBool,
     .standard = "false",
     .doc = "Nesterov's momentum",
     .place = at<&C::optimizer, &OptimizerConfig::nesterov>,
     .only_for = "SGD"},

    {.path = "scheduler", .kind = kSection, .standard = "", .doc = "the learning rate's schedule", .nullable = true},
    {.path = "scheduler.type",
     .kind = kChoice,
     .standard = "",
     .doc = "the schedule; needed in this section",
     .place = {[](D& d, const V& v) {
                 constexpr std::array kKinds = {ScheduleKind::kWarmup, ScheduleKind::kWarmupDecay,
                                                ScheduleKind::kWarmupCosine};
                 d.config.schedule.kind = kKinds[v.integer];
               },
               [](const C& c) {
                 constexpr std::string_view kNames[] = {"", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"};
                 const std::string_view name = kNames[static_cast<std::size_t>(c.schedule.kind)];
                 return name.empty() ? "" : json_string(name);
               }},
     .allowed = "WarmupLR|WarmupDecayLR|WarmupCosineLR",
     .refused = "OneCycle|LRRangeTest"},
    {"scheduler.params", kSection, "", "the schedule's parameters"},
    {.path = "scheduler.params.warmup_min_lr",
     .kind = kNumber,
     .standard = "0",
     .doc = "rate before the warm-up",
     .place = at<&C::schedule, &ScheduleConfig::warmup_min_lr>,
     .only_for = kLinear,
     .automatic = {always<"0">, "always 0"}},
    {.path = "scheduler.params.warmup_max_lr",
     .kind = kNumber,
     .standard = "",
     .doc = "rate after the warm-up; the optimizer's when null, or missing in WarmupLR; 1e-3 when missing in "
            "WarmupDecayLR",
     .place = drafted<&D::warmup_max_lr>([](const C& c) { return json_of(c.schedule.warmup_max_lr); }),
     .nullable = true,
     .only_for = kLinear,
     .automatic = {always<"">, "the optimizer's rate, or the trainer's, 5e-5"}},
    {.path = "scheduler.params.warmup_num_steps",
     .kind = kInteger,
     .standard = "1000",
     .doc = "steps of warm-up; 1 counts as 2",
     .place = drafted<&D::warmup_steps>([](const C& c) { return json_of(c.schedule.warmup_steps); }),
     .least = 1,
     .automatic = {always<"1">, "the trainer's warmup_steps, 0, which counts as 2"}},
    {.path = "scheduler.params.warmup_type",
     .kind = kChoice,
     .standard = "\"log\"",
     .doc = "shape of the warm-up",
     .place = {[](D& d, const V& v) { d.config.schedule.logarithmic_warmup = v.integer == 0; },
               [](const C& c) { return json_string(c.schedule.logarithmic_warmup ? "log" : "linear"); }},
     .allowed = "log|linear"},
    {.path = "scheduler.params.total_num_steps",
     .kind = kInteger,
     .standard = "",
     .doc = "steps of the whole schedule",
     .place = drafted<&D::total_steps>([](const C& c) { return json_of(c.schedule.total_steps); }),
     .least = 1,
     .only_for = "WarmupDecayLR|WarmupCosineLR",
     .automatic = {[](const A& a) { return json_of(a.total_steps); }, "--steps"}},
    {.path = "scheduler.params.warmup_min_ratio",
     .kind = kNumber,
     .standard = "0",
     .doc = "first rate of the warm-up, as a share of the optimizer's",
     .place = at<&C::schedule, &ScheduleConfig::warmup_min_ratio>,
     .most = 1,
     .only_for = "WarmupCosineLR"},
    {.path = "scheduler.params.cos_min_ratio",
     .kind = kNumber,
     .standard = "1e-4",
     .doc = "last rate, as a share of the optimizer's",
     .place = at<&C::schedule, &ScheduleConfig::cosine_min_ratio>,
     .most = 1,
     .only_for = "WarmupCosineLR"},

    {"bf16", kSection, "", "bfloat16 training"},
    {.path = "bf16.enabled",
     .kind = kBool,
     .standard = "false",
     .doc = "weights and gradients in bf16, with an exact fp32 master; false: fp32",
     .place = drafted<&D::bf16>([](const C& c) { return json_of(c.weights == DType::kBFloat16); }),
     .automatic = {always<"false">, "the trainer's bf16, false"}},
    {.path = "bfloat16", .kind = kSection, .standard = "", .doc = "older word for bf16", .successor = "bf16"},
    {.path = "bfloat16.enabled",
     .kind = kBool,
     .standard = "false",
     .doc = "older word for bf16.enabled",
     .place = drafted<&D::bf16>(),
     .automatic = {always<"false">, "the trainer's bf16, false"},
     .successor = "bf16.enabled"},
    {"fp16", kSection, "", "half precision training, with a scaled loss"},
    {.path = "fp16.enabled",
     .kind = kBool,
     .standard = "false",
     .doc = "weights and gradients in fp16, with an fp32 master",
     .place = drafted<&D::fp16>([](const C& c) { return json_of(c.weights == DType::kFloat16); }),
     .automatic = {always<"false">, "the trainer's fp16, false"}},
    {"fp16.loss_scale", kNumber, "0", "what the loss is multiplied with, best a power of two; 0: dynamic",
     at<&C::loss_scale, &LossScaleConfig::fixed>, 0, 0x1p64},
    {"fp16.initial_scale_power", kInteger, "16", "a dynamic scale begins with 2 to the power of this",
     at<&C::loss_scale, &LossScaleConfig::initial_power>, 0, kMostScalePower},
    {"fp16.loss_scale_window", kInteger, "1000", "steps without an overflow between two that double a dynamic scale",
     at<&C::loss_scale, &LossScaleConfig::window>, 1},
    {"fp16.hysteresis", kInteger, "2", "overflows until a dynamic scale is halved",
     at<&C::loss_scale, &LossScaleConfig::hysteresis>, 1, kMost32},
    {"fp16.consecutive_hysteresis", kBool, "false", "every step without an overflow makes the hysteresis whole again",
     at<&C::loss_scale, &LossScaleConfig::consecutive_hysteresis>},
    {"fp16.min_loss_scale", kNumber, "1", "the smallest dynamic scale; an overflow there ends the run",
     at<&C::loss_scale, &LossScaleConfig::least>, 1e-6, 0x1p64},
    {"data_types", kSection, "", "types beside bf16 and fp16"},
    {.path = "data_types.param_dtype",
     .kind = kChoice,
     .standard = "",
     .doc = "the type of weights once more, as bf16.enabled and fp16.enabled say it",
     .place = {[](D& d, const V& v) { d.param_dtype = static_cast<DType>(v.integer / 2); }},
     .allowed = "fp32|float32|bf16|bfloat16|fp16|float16",
     .nullable = true},

    {.path = "zero_optimization",
     .kind = kSection,
     .standard = "",
     .doc = "what is partitioned, and where it lives; true is stage 1, false stage 0",
     .flag_of = "zero_optimization.stage"},
    {.path = "zero_optimization.stage",
     .kind = kInteger,
     .standard = "",
     .doc = "3: everything may leave the device; 1, 2: all but the weights, as these say the same with one rank; 0: "
            "nothing",
     .place = drafted<&D::stage>(),
     .most = 3,
     .automatic = {always<"2">, "accelerate's zero_stage, 2"}},
    {.path = "zero_optimization.offload_optimizer",
     .kind = kSection,
     .standard = "",
     .doc = "where Adam's states live",
     .nullable = true},
    {.path = "zero_optimization.offload_optimizer.device",
     .kind = kChoice,
     .standard = "\"none\"",
     .doc = "none: HBM, cpu: pinned host memory, nvme",
     .place = kDevice<&C::states>,
     .allowed = kDevices},
    {.path = "zero_optimization.offload_optimizer.nvme_path",
     .kind = kText,
     .standard = "",
     .doc = "with device nvme: directory of the store; the same in both sections, or in one",
     .place = drafted<&D::states_path>(first_path),
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
     .place = kDevice<&C::parameters>,
     .allowed = kDevices},
    {.path = "zero_optimization.offload_param.nvme_path",
     .kind = kText,
     .standard = "",
     .doc = "with device nvme: directory of the store; the same in both sections, or in one",
     .place = drafted<&D::parameters_path>(first_path),
     .nullable = true},
    {.path = "zero_optimization.cpu_offload",
     .kind = kBool,
     .standard = "false",
     .doc = "older word for offload_optimizer {\"device\": \"cpu\"}",
     .place = drafted<&D::cpu_offload>(),
     .successor = "zero_optimization.offload_optimizer.device"},
    {.path = "zero_optimization.cpu_offload_param",
     .kind = kBool,
     .standard = "false",
     .doc = "older word for offload_param {\"device\": \"cpu\"}",
     .place = drafted<&D::cpu_offload_param>(),
     .successor = "zero_optimization.offload_param.device"},
    kMaxLive,
    also("zero_optimization.max_live_parameters", kMaxLive),
    kMaxReuse,
    also("zero_optimization.max_reuse_distance", kMaxReuse),
    kPrefetch,
    also("zero_optimization.prefetch_bucket_size", kPrefetch),
    kPersistence,
    also("zero_optimization.param_persistence_threshold", kPersistence),
    kModelPersistence,
    also("zero_optimization.model_persistence_threshold", kModelPersistence),
    {"zero_optimization.sub_group_size", kInteger, "",
     "spillway.tile_elements when that is missing, rounded and up to 16 Mi; 0: no say", drafted<&D::sub_group_size>()},
    {"zero_optimization.offload_optimizer.buffer_count", kInteger, "", "tile buffers in host memory",
     at<&C::knobs, &Knobs::optimizer_buffer_count>, 1, kMost32},
    {"zero_optimization.offload_optimizer.pipeline_read", kBool, "", "false: no tile is read while another is updated",
     at<&C::knobs, &Knobs::pipeline_read>},
    {"zero_optimization.offload_optimizer.pipeline_write", kBool, "",
     "false: a tile's writes are waited for before the next", at<&C::knobs, &Knobs::pipeline_write>},
    {"zero_optimization.offload_param.buffer_count", kInteger, "",
     "weights in flight take at most buffer_count × buffer_size in host memory",
     at<&C::knobs, &Knobs::param_buffer_count>, 1, kMost32},
    {"zero_optimization.offload_param.buffer_size", kInteger, "", "see buffer_count",
     at<&C::knobs, &Knobs::param_buffer_size>, 1, kMost32},
    {"zero_optimization.offload_param.max_in_cpu", kInteger, "",
     "at most so many weights are kept in host memory as a cache", at<&C::knobs, &Knobs::max_in_cpu>},

    {"aio", kSection, "", "how the drive is driven"},
    {"aio.block_size", kInteger, "1048576", "largest request, in bytes", at<&C::io_block_bytes>, 4096, 1 << 30, false,
     4096},
    {"aio.queue_depth", kInteger, "32", "requests in flight on each path, 4096 on all of them", at<&C::io_depth>, 1,
     4096},

    {"activation_checkpointing", kSection, "", "what is kept between forward and backward"},
    {"activation_checkpointing.cpu_checkpointing", kBool, "false", "block inputs wait for backward in host memory",
     kAsWritten},

    {"spillway", kSection, "", "what DeepSpeed has no word for"},
    {.path = "spillway.device",
     .kind = kChoice,
     .standard = "\"auto\"",
     .doc = "host: HBM is emulated in RAM; cuda: the GPU; auto: cuda where there is one, else host",
     .place = {[](D& d, const V& v) {
                 constexpr std::optional<DeviceKind> kChoices[] = {DeviceKind::kHost, DeviceKind::kCuda, std::nullopt};
                 d.config.device = kChoices[v.integer];
               },
               [](const C& c) {
                 return json_string(!c.device ? "auto" : *c.device == DeviceKind::kHost ? "host" : "cuda");
               }},
     .allowed = "host|cuda|auto"},
    {"spillway.hbm_bytes", kBytes, "", "budget of GPU memory; what the plan asks for when missing", at<&C::hbm_bytes>},
    {"spillway.host_bytes", kBytes, "", "budget of pinned host memory; what the plan asks for when missing",
     at<&C::host_bytes>},
    {"spillway.nvme_bytes", kBytes, "", "budget on the drive; what the store needs when missing", at<&C::nvme_bytes>},
    {"spillway.nvme_paths", kTexts, "",
     "directories, one per drive, that a store is striped over; nvme_path first; of any device",
     drafted<&D::nvme_paths>(all_paths)},
    {.path = "spillway.nvme_rates",
     .kind = kNumbers,
     .standard = "",
     .doc = "GB/s of each path, reads and writes mixed, as the sweep measures them; probed when missing",
     .place = drafted<&D::nvme_rates>([](const C& c) { return c.nvme_rates.empty() ? "" : json_of(c.nvme_rates); }),
     .least = 0.001,
     .most = 1e6},
    {"spillway.tile_elements", kInteger, "4194304", "parameters per tile", at<&C::tile_elements>, 1024, 1 << 30, false,
     1024},
    {"spillway.commit_every", kInteger, "", "steps between commits; 0: half the disk, no resume or export",
     at<&C::commit_every>, 0, kMost32},
    {"spillway.speculative_blocks", kInteger, "",
     "blocks updated inside backward on the guess that clipping has no effect; 0: none", at<&C::speculative_blocks>, 0,
     kMost32},
    {"spillway.no_decay", kBool, "false", "no weight decay for parameters of fewer than two dimensions: biases, norms",
     at<&C::no_decay>},
    {"spillway.parameter_groups",
     kSections,
     "",
     "parameters with values of their own; the first that matches decides",
     {[](D& d, const V& v) {
        auto& groups = d.config.parameter_groups;
        v.flag ? groups.clear() : static_cast<void>(groups.emplace_back());
      },
      all_groups}},
    {"spillway.parameter_groups.parameters", kTexts, "", "their names; * stands for anything",
     kOfGroup<&ParameterGroup::parameters>},
    {"spillway.parameter_groups.lr", kNumber, "", "learning rate, scaled by a schedule as the optimizer's is",
     kOfGroup<&ParameterGroup::learning_rate>},
    {"spillway.parameter_groups.weight_decay", kNumber, "", "weight decay; the optimizer's when missing",
     kOfGroup<&ParameterGroup::weight_decay>},
    {"spillway.block_slices", kInteger, "1", "Python's engine: parts of a batch that go through a block one by one",
     kAsWritten, 1, 4096},
    {.path = "spillway.block_inputs",
     .kind = kChoice,
     .standard = "\"none\"",
     .doc = "Python's engine: where what it keeps between blocks waits for backward; cpu with cpu_checkpointing",
     .place = kAsWritten,
     .allowed = kDevices},
    {"spillway.threads", kInteger, "0", "compute threads; 0: one per core that this process may use", at<&C::threads>,
     0, 4096},
    {.path = "spillway.io_engine",
     .kind = kChoice,
     .standard = "\"auto\"",
     .doc = "how requests reach the kernel",
     .place = {[](D& d, const V& v) { d.config.io_engine = static_cast<IoEngineKind>(v.integer); },
               [](const C& c) {
                 return json_string(choices_of("auto|io_uring|libaio|threads")[static_cast<std::size_t>(c.io_engine)]);
               }},
     .allowed = "auto|io_uring|libaio|threads"},
};

}  // namespace

std::span<const ConfigKey> config_keys() { return kKeys; }

}  // namespace spillway
