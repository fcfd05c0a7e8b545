#include "src/config/table.h"

#include <algorithm>
#include <array>
#include <cstddef>

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
using K = ConfigKey;

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
  return K{path, kInteger, "", doc, place, 0, 1.8e19}.filled(automatic);
}
constexpr ConfigKey also(std::string_view path, const ConfigKey& key) {
  ConfigKey other = key.now(key.path);
  other.path = path;
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
    K{"train_batch_size", kInteger, "", "rows per optimizer step, of all ranks: micro batch × accumulation × ranks",
      drafted<&D::train_batch>(
          [](const C& c) { return json_of(std::uint64_t{c.micro_batch} * c.gradient_accumulation); }),
      1, kMost32}
        .filled({always<"">, "micro batch × accumulation × ranks"}),
    K{"train_micro_batch_size_per_gpu", kInteger, "", "rows per forward pass of a rank; derived when missing",
      drafted<&D::micro_batch>([](const C& c) { return json_of(c.micro_batch); }), 1, kMost32}
        .filled({always<"">, "what the other two leave, else 8"}),
    K{"gradient_accumulation_steps", kInteger, "", "micro-batches per optimizer step of a rank; derived when missing",
      drafted<&D::accumulation>([](const C& c) { return json_of(c.gradient_accumulation); }), 1, kMost32}
        .filled({always<"">, "what the other two leave, else 1"}),
    K{"gradient_clipping", kNumber, "1", "largest global gradient norm; 0 switches clipping off",
      at<&C::gradient_clipping>, 0, 1e38}
        .filled({always<"1">, "the trainer's max_grad_norm, 1"}),
    {"dataloader_drop_last", kBool, "", "the loader of Python's initialize() gives whole batches only", kAsWritten},

    {"optimizer", kSection, "", "the optimizer"},
    K{"optimizer.type",
      kChoice,
      "\"AdamW\"",
      "Adam is decoupled (AdamW) too, unless adam_w_mode is false",
      {[](D& d, const V& v) { d.optimizer_type = v.integer; },
       [](const C& c) {
         const bool adam_w = c.optimizer.kind == OptimizerKind::kAdam && c.optimizer.decoupled_decay;
         return json_string(adam_w ? "AdamW" : name_of(c.optimizer.kind));
       }}}
        .allows("AdamW|Adam|Adagrad|Lion|SGD", "Lamb|Muon|OneBitAdam|ZeroOneAdam|OneBitLamb|MuAdam|MuAdamW|MuSGD"),
    {"optimizer.params", kSection, "", "the optimizer's hyper-parameters"},
    K{"optimizer.params.lr", kNumber, "1e-3", "learning rate; Adagrad: 1e-2 when missing",
      drafted<&D::learning_rate>([](const C& c) { return json_of(c.optimizer.learning_rate); })}
        .filled({[](const A&) { return json_of(kTrainerRate); }, "the trainer's learning_rate, 5e-5"}),
    K{"optimizer.params.betas",
      kPair,
      "[0.9, 0.999]",
      "decay rates of the two moments",
      {[](D& d, const V& v) {
         d.config.optimizer.beta1 = v.number;
         d.config.optimizer.beta2 = v.second;
       },
       [](const C& c) { return pair_of(c.optimizer.beta1, c.optimizer.beta2); }}}
        .below(1)
        .only_of("AdamW|Adam|Lion")
        .filled({always<"[0.9, 0.999]">, "the trainer's adam_beta1 and 2, [0.9, 0.999]"}),
    K{"optimizer.params.eps", kNumber, "1e-8", "added to the denominator; Adagrad: 1e-10 when missing",
      drafted<&D::epsilon>([](const C& c) { return json_of(c.optimizer.epsilon); })}
        .only_of("AdamW|Adam|Adagrad")
        .filled({always<"1e-8">, "the trainer's adam_epsilon, 1e-8"}),
    K{"optimizer.params.weight_decay", kNumber, "0",
      "weight decay, for every parameter that no group excepts; 0.01 when missing beside torch_adam",
      drafted<&D::weight_decay>([](const C& c) { return json_of(c.optimizer.weight_decay); })}
        .filled({always<"0">, "the trainer's weight_decay, 0"}),
    K{"optimizer.params.bias_correction", kBool, "true", "Adam's correction of the first steps' moments",
      at<&C::optimizer, &OptimizerConfig::bias_correction>}
        .only_of(kAdam),
    K{"optimizer.params.adam_w_mode", kBool, "true", "type Adam: decoupled weight decay; false: L2",
      drafted<&D::adam_w_mode>([](const C& c) { return json_of(c.optimizer.decoupled_decay); })}
        .only_of(kAdam),
    K{"optimizer.params.torch_adam", kBool, "",
      "the default of weight_decay is that of PyTorch's AdamW, 0.01, unless adam_w_mode is false",
      drafted<&D::torch_adam>()}
        .only_of(kAdam),
    K{"optimizer.params.momentum", kNumber, "0", "share of the last step's direction that goes on",
      at<&C::optimizer, &OptimizerConfig::momentum>}
        .below(1)
        .only_of("SGD"),
    K{"optimizer.params.dampening", kNumber, "0", "share of the gradient that momentum leaves out",
      at<&C::optimizer, &OptimizerConfig::dampening>, 0, 1}
        .only_of("SGD"),
    K{"optimizer.params.nesterov", kBool, "false", "Nesterov's momentum", at<&C::optimizer, &OptimizerConfig::nesterov>}
        .only_of("SGD"),

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

    {"bf16", kSection, "", "bfloat16 training"},
    K{"bf16.enabled", kBool, "false", "weights and gradients in bf16, with an exact fp32 master; false: fp32",
      drafted<&D::bf16>([](const C& c) { return json_of(c.weights == DType::kBFloat16); })}
        .filled({always<"false">, "the trainer's bf16, false"}),
    K{"bfloat16", kSection, "", "older word for bf16"}.now("bf16"),
    K{"bfloat16.enabled", kBool, "false", "older word for bf16.enabled", drafted<&D::bf16>()}
        .now("bf16.enabled")
        .filled({always<"false">, "the trainer's bf16, false"}),
    {"fp16", kSection, "", "half precision training, with a scaled loss"},
    K{"fp16.enabled", kBool, "false", "weights and gradients in fp16, with an fp32 master",
      drafted<&D::fp16>([](const C& c) { return json_of(c.weights == DType::kFloat16); })}
        .filled({always<"false">, "the trainer's fp16, false"}),
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
    K{"data_types.param_dtype",
      kChoice,
      "",
      "the type of weights once more, as bf16.enabled and fp16.enabled say it",
      {[](D& d, const V& v) { d.param_dtype = static_cast<DType>(v.integer / 2); }}}
        .allows("fp32|float32|bf16|bfloat16|fp16|float16")
        .or_null(),

    K{"zero_optimization", kSection, "", "what is partitioned, and where it lives; true is stage 1, false stage 0"}
        .or_flag("zero_optimization.stage"),
    K{"zero_optimization.stage", kInteger, "",
      "3: everything may leave the device; 1, 2: all but the weights, as these say the same with one rank; 0: "
      "nothing",
      drafted<&D::stage>(), 0, 3}
        .filled({always<"2">, "accelerate's zero_stage, 2"}),
    K{"zero_optimization.offload_optimizer", kSection, "", "where Adam's states live"}.or_null(),
    K{"zero_optimization.offload_optimizer.device", kChoice, "\"none\"", "none: HBM, cpu: pinned host memory, nvme",
      kDevice<&C::states>}
        .allows(kDevices),
    K{"zero_optimization.offload_optimizer.nvme_path", kText, "",
      "with device nvme: directory of the store; the same in both sections, or in one",
      drafted<&D::states_path>(first_path)}
        .or_null(),
    K{"zero_optimization.offload_param", kSection, "", "where the weights live"}.or_null(),
    K{"zero_optimization.offload_param.device", kChoice, "\"none\"", "none: HBM, cpu: pinned host memory, nvme",
      kDevice<&C::parameters>}
        .allows(kDevices),
    K{"zero_optimization.offload_param.nvme_path", kText, "",
      "with device nvme: directory of the store; the same in both sections, or in one",
      drafted<&D::parameters_path>(first_path)}
        .or_null(),
    K{"zero_optimization.cpu_offload", kBool, "false", "older word for offload_optimizer {\"device\": \"cpu\"}",
      drafted<&D::cpu_offload>()}
        .now("zero_optimization.offload_optimizer.device"),
    K{"zero_optimization.cpu_offload_param", kBool, "false", "older word for offload_param {\"device\": \"cpu\"}",
      drafted<&D::cpu_offload_param>()}
        .now("zero_optimization.offload_param.device"),
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
    K{"aio.block_size", kInteger, "1048576", "largest request, in bytes", at<&C::io_block_bytes>, 4096, 1 << 30}
        .multiples_of(4096),
    {"aio.queue_depth", kInteger, "32", "requests in flight on each path, 4096 on all of them", at<&C::io_depth>, 1,
     4096},

    {"activation_checkpointing", kSection, "", "what is kept between forward and backward"},
    {"activation_checkpointing.cpu_checkpointing", kBool, "false", "block inputs wait for backward in host memory",
     kAsWritten},

    {"spillway", kSection, "", "what DeepSpeed has no word for"},
    K{"spillway.device",
      kChoice,
      "\"auto\"",
      "host: HBM is emulated in RAM; cuda: the GPU; auto: cuda where there is one, else host",
      {[](D& d, const V& v) {
         constexpr std::optional<DeviceKind> kChoices[] = {DeviceKind::kHost, DeviceKind::kCuda, std::nullopt};
         d.config.device = kChoices[v.integer];
       },
       [](const C& c) { return json_string(!c.device                        ? "auto"
                                           : *c.device == DeviceKind::kHost ? "host"
                                                                            : "cuda"); }}}
        .allows("host|cuda|auto"),
    {"spillway.hbm_bytes", kBytes, "", "budget of GPU memory; what the plan asks for when missing", at<&C::hbm_bytes>},
    {"spillway.host_bytes", kBytes, "", "budget of pinned host memory; what the plan asks for when missing",
     at<&C::host_bytes>},
    {"spillway.nvme_bytes", kBytes, "", "budget on the drive; what the store needs when missing", at<&C::nvme_bytes>},
    {"spillway.nvme_paths", kTexts, "",
     "directories, one per drive, that a store is striped over; nvme_path first; of any device",
     drafted<&D::nvme_paths>(all_paths)},
    {"spillway.nvme_rates", kNumbers, "",
     "GB/s of each path, reads and writes mixed, as the sweep measures them; probed when missing",
     drafted<&D::nvme_rates>([](const C& c) { return c.nvme_rates.empty() ? "" : json_of(c.nvme_rates); }), 0.001, 1e6},
    K{"spillway.tile_elements", kInteger, "4194304", "parameters per tile", at<&C::tile_elements>, 1024, 1 << 30}
        .multiples_of(1024),
    {"spillway.commit_every", kInteger, "", "steps between commits; 0: half the disk, no resume or export",
     at<&C::commit_every>, 0, kMost32},
    {"spillway.speculative_blocks", kInteger, "",
     "blocks updated inside backward on the guess that clipping has no effect; 0: none", at<&C::speculative_blocks>, 0,
     kMost32},
    {"spillway.sum_groups", kInteger, "1",
     "a power of two that divides gradient_accumulation_steps × ranks, and is a multiple of the ranks: micro-batches "
     "are summed in so many parts, these by a tree",
     at<&C::sum_groups>, 1, kMostSumGroups},
    {"spillway.no_decay", kBool, "false", "no weight decay for parameters of fewer than two dimensions: biases, norms",
     at<&C::no_decay>},
    K{"spillway.states",
      kChoice,
      "\"fp32\"",
      "how the moments of Adam and Lion are stored, beside exact master weights: fp32 is exact",
      {[](D& d, const V& v) { d.config.moments = static_cast<MomentFormat>(v.integer); },
       [](const C& c) { return json_string(name_of(c.moments)); }}}
        .allows("fp32|bf16|int8"),
    {"spillway.exact_states", kTexts, "[\"*embed*\", \"*wte*\", \"*wpe*\"]",
     "names of parameters whose moments stay fp32, as those of fewer than two dimensions do; * stands for anything",
     at<&C::exact_states>},
    {"spillway.rounding_seed",
     kInteger,
     "0",
     "of the random bits that round moments in fewer bytes; the number of the update is in them, too",
     {[](D& d, const V& v) { d.config.optimizer.seed = v.integer; },
      [](const C& c) { return json_of(c.optimizer.seed); }},
     0,
     kMost32},
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
    {"spillway.logit_slices", kInteger, "1",
     "Python's engine: parts of a batch's tokens for which a model's head and the loss run one by one", kAsWritten, 1,
     65536},
    {"spillway.micro_batches_together", kBool, "false",
     "Python's engine and Trainer: the micro-batches of a step go through block after block together", kAsWritten},
    K{"spillway.block_inputs", kChoice, "\"none\"",
      "Python's engine: where what it keeps between blocks waits for backward; cpu with cpu_checkpointing", kAsWritten}
        .allows(kDevices),
    {"spillway.threads", kInteger, "0", "compute threads; 0: one per core that this process may use", at<&C::threads>,
     0, 4096},
    K{"spillway.io_engine",
      kChoice,
      "\"auto\"",
      "how requests reach the kernel",
      {[](D& d, const V& v) { d.config.io_engine = static_cast<IoEngineKind>(v.integer); },
       [](const C& c) {
         return json_string(choices_of("auto|io_uring|libaio|threads")[static_cast<std::size_t>(c.io_engine)]);
       }}}
        .allows("auto|io_uring|libaio|threads"),
};

}  // namespace

std::span<const ConfigKey> config_keys() { return kKeys; }

}  // namespace spillway
