#include "src/config/table.h"

// Keys that DeepSpeed 0.19.8 knows and that decide nothing here: they tune resources that Spillway does not have, or
// concern more ranks than one. They are accepted, so that one file serves both, and named in one log line.

namespace spillway {
namespace {

using enum KeyKind;
using K = ConfigKey;

constexpr std::string_view kComm = "communication between ranks";
// zero/stage3.py and zero/parameter_offload.py: true gives reduction and gathering streams of their own; what is
// fetched ahead does not depend on it.
constexpr std::string_view kStream = "communication between ranks, and copies have streams of their own";
// What several ranks do whatever these say.
constexpr std::string_view kOwners = "a gradient's sum goes to the ranks that own a part of it, and to no others";
constexpr std::string_view kBlocks = "what ranks move at a time is a block, in pieces";
constexpr std::string_view kShares = "each rank owns an equal part of every block";
constexpr std::string_view kMean = "gradients are added in fp32 and divided once";
constexpr std::string_view kMonitor = "logging and profiling";
// Whoever switches one of these on looks for its files afterwards.
constexpr std::string_view kWritesNothing = "off only: it would write nothing";
constexpr std::string_view kReports =
    "leave it out or off; `finetune --log` and step()'s report say what each step did";
constexpr std::string_view kBuffers = "buffers follow the plan and the budgets";
constexpr std::string_view kFeature = "not a part of the engine";
constexpr std::string_view kOther = "off only: it trains something else";
constexpr std::string_view kPrecision = "off only: bf16 or fp16 decides";
constexpr std::string_view kRecomputed = "block inputs are always kept and the inside recomputed";
constexpr std::string_view kCommits = "every commit is a checkpoint";
constexpr std::string_view kExact = "updates are exact, never stale";
constexpr std::string_view kPinned = "host memory is always pinned";
constexpr std::string_view kAtHome = "the update runs where the states live";
constexpr std::string_view kWhole = "an export is always whole";
constexpr std::string_view kDescription = "the model description says what is gathered together";
constexpr std::string_view kSame = "the result is the same";
constexpr std::string_view kFp32States = "states are fp32";
constexpr std::string_view kOneThread = "one thread drives the queue";

constexpr ConfigKey silent(std::string_view path, std::string_view instead) {
  return K{path, kOff, "", kWritesNothing}.allows(instead);
}

constexpr ConfigKey older(std::string_view path, KeyKind kind, std::string_view why, std::string_view successor) {
  return K{path, kind, "", why}.now(successor);
}

constexpr ConfigKey kUnusedKeys[] = {
    {"$schema", kText, "", "for editors"},
    {"_comment", kText, "", "for readers"},
    K{"steps_per_print", kInteger, "", kMonitor}.or_null(),
    {"wall_clock_breakdown", kBool, "", kMonitor},
    {"memory_breakdown", kBool, "", kMonitor},
    {"dump_state", kBool, "", kMonitor},
    {"log_level", kText, "", kMonitor},
    {"timers", kObject, "", kMonitor},
    silent("flops_profiler", kReports),
    silent("tensorboard", kReports),
    silent("wandb", kReports),
    silent("comet", kReports),
    silent("csv_monitor", kReports),
    {"comms_logger", kObject, "", kMonitor},
    {"comms_config", kObject, "", kMonitor},  // this and the next: as DeepSpeed prints its own
    {"monitor_config", kObject, "", kMonitor},
    K{"managed_gradient_accumulation", kOnly, "",
      "true only: a step ends with its last micro-batch, or before it by step(early=True) in Python"}
        .allows("true"),
    {"seq_parallel_communication_data_type", kText, "", kComm},
    {"prescale_gradients", kBool, "", kMean},
    {"gradient_predivide_factor", kNumber, "", kMean},
    K{"gradient_allreduce_op", kChoice, "", kMean}.allows("mean", "sum"),
    {"fp32_allreduce", kBool, "", kMean},
    {"sparse_gradients", kBool, "", kComm},
    {"disable_allgather", kBool, "", kComm},
    K{"data_types.grad_accum_dtype", kText, "", "gradients are added in fp32"}.or_null(),
    K{"data_types.buffer_dtype", kOnly, "", "null only: buffers keep their types"}.allows("null"),
    K{"data_types.keep_in_fp32_modules", kTexts, "", "buffers keep their types"}.filled(
        {[](const AutoValues&) { return std::string(); }, "the model's list"}),
    K{"vocabulary_size", kInteger, "", "DeepSpeed only warns of it"}.or_null(),
    {"disable_python_gc", kBool, "", kFeature},
    {"zero_allow_untested_optimizer", kBool, "", kFeature},
    {"zero_force_ds_cpu_optimizer", kBool, "", kFeature},
    {"data_efficiency", kOff, "", kOther},
    {"curriculum_learning", kOff, "", kOther},
    {"progressive_layer_drop", kOff, "", kOther},
    {"compression_training", kOff, "", kOther},
    {"sparse_attention", kObject, "", kFeature},
    {"eigenvalue", kObject, "", kFeature},
    {"autotuning", kObject, "", kFeature},
    {"elasticity", kOff, "", "off only: batch sizes are those of the file"},
    {"compile", kObject, "", kFeature},
    {"tensor_parallel", kObject, "", kFeature},
    {"sequence_parallel", kObject, "", kFeature},
    {"pipeline", kObject, "", kFeature},
    {"hybrid_engine", kObject, "", kFeature},
    silent("nebula", "leave it out or off; a snapshot is saved while training goes on"),
    {"amp", kOff, "", kPrecision},
    {"torch_autocast", kOff, "", kPrecision},

    {"activation_checkpointing.partition_activations", kBool, "", kComm},
    {"activation_checkpointing.contiguous_memory_optimization", kBool, "", kBuffers},
    K{"activation_checkpointing.number_checkpoints", kInteger, "", kRecomputed}.or_null(),
    {"activation_checkpointing.synchronize_checkpoint_boundary", kBool, "", kRecomputed},
    {"activation_checkpointing.profile", kBool, "", kMonitor},

    {"checkpoint", kSection, "", "how checkpoints are written"},
    K{"checkpoint.tag_validation", kChoice, "", kComm}.allows("Warn|Ignore|Fail"),
    {"checkpoint.load_universal", kBool, "", "spillway import reads DeepSpeed's checkpoints"},
    {"checkpoint.use_node_local_storage", kBool, "", kCommits},
    {"checkpoint.checkpoint_serialization", kBool, "", kCommits},
    {"checkpoint.parallel_write", kSection, "", "who writes"},
    {"checkpoint.parallel_write.pipeline_stage", kBool, "", kCommits},
    K{"checkpoint.writer", kSection, "", "what writes"}.or_null(),
    K{"checkpoint.writer.type", kChoice, "", kCommits}.allows("MOCK|PYTHON|FAST"),
    {"checkpoint.writer.io_buffer_size", kInteger, "", kCommits},
    {"checkpoint.writer.io_buffer_double", kBool, "", kCommits},
    {"checkpoint.writer.show_statistics", kBool, "", kCommits},
    K{"checkpoint.writer.data_parallel", kChoice, "", kCommits}.allows("REPLICA|SOCKET|MACHINE"),
    {"checkpoint.writer.decoupled", kBool, "", kCommits},
    {"checkpoint.writer.io_multiplier", kInteger, "", kCommits},

    {"optimizer.legacy_fusion", kBool, "", kFeature},
    K{"optimizer.params.amsgrad", kOnly, "", "false only: Adam is computed without it"}.allows("false"),
    K{"optimizer.params.foreach", kBool, "", kSame}.or_null(),
    {"optimizer.params.set_grad_none", kBool, "", kSame},
    K{"optimizer.params.fp32_optimizer_states", kBool, "", kFp32States}.or_null(),
    K{"scheduler.params.last_batch_iteration", kOnly, "", "-1 only: the schedule goes by the step that the store knows"}
        .allows("-1"),
    {"bf16.immediate_grad_update", kBool, "", "gradients are added as they are pushed"},
    {"bf16.check_grad_overflow", kBool, "", "gradients are always checked"},
    {"bf16.bf16_master_weights_and_grads", kBool, "", "the master is exact"},
    {"bf16.bf16_optimizer_states", kBool, "", kFp32States},
    {"fp16.auto_cast", kBool, "", "inputs are tokens"},
    {"fp16.fp16_master_weights_and_grads", kBool, "", "the master is fp32"},

    K{"zero_optimization.overlap_comm", kBool, "", kStream}.or_null(),
    {"zero_optimization.contiguous_gradients", kBool, "", kBuffers},
    {"zero_optimization.reduce_scatter", kBool, "", kOwners},
    K{"zero_optimization.reduce_bucket_size", kInteger, "", kBlocks}.filled(
        {[](const AutoValues& a) {
           return a.hidden_size ? std::to_string(*a.hidden_size * *a.hidden_size) : std::string();
         },
         "width²"}),
    {"zero_optimization.use_multi_rank_bucket_allreduce", kBool, "", kOwners},
    {"zero_optimization.allgather_partitions", kBool, "", kBlocks},
    {"zero_optimization.allgather_bucket_size", kInteger, "", kBlocks},
    {"zero_optimization.compute_grad_norm", kBool, "", "the norm is always computed"},
    {"zero_optimization.load_from_fp32_weights", kBool, "", "import is exact"},
    {"zero_optimization.elastic_checkpoint", kBool, "", kCommits},
    K{"zero_optimization.zenflow", kSection, "", kExact}.or_null(),
    {"zero_optimization.zenflow.topk_ratio", kNumber, "", kExact, {}, 0, 1},
    K{"zero_optimization.zenflow.select_strategy", kChoice, "", kExact}.allows("auto|step|epoch"),
    {"zero_optimization.zenflow.select_interval", kInteger, "", kExact},
    {"zero_optimization.zenflow.update_interval", kInteger, "", kExact},
    {"zero_optimization.zenflow.overlap_step", kBool, "", kExact},
    {"zero_optimization.zenflow.offload", kBool, "", kExact},
    {"zero_optimization.zenflow.auto_ratio", kNumber, "", kExact, {}, 0, 1},
    {"zero_optimization.zenflow.full_warm_up_rounds", kInteger, "", kExact},
    {"zero_optimization.zenflow.pt_reserved_cores_perc", kNumber, "", kExact, {}, 0, 1},
    older("zero_optimization.cpu_offload_use_pin_memory", kBool, kPinned,
          "zero_optimization.offload_optimizer.pin_memory"),
    {"zero_optimization.stage3_gather_16bit_weights_on_model_save", kBool, "", kWhole},
    older("zero_optimization.stage3_gather_fp16_weights_on_model_save", kBool, kWhole,
          "zero_optimization.stage3_gather_16bit_weights_on_model_save"),
    older("zero_optimization.gather_16bit_weights_on_model_save", kBool, kWhole,
          "zero_optimization.stage3_gather_16bit_weights_on_model_save"),
    {"zero_optimization.stage3_module_granularity_threshold", kInteger, "", kDescription},
    older("zero_optimization.module_granularity_threshold", kInteger, kDescription,
          "zero_optimization.stage3_module_granularity_threshold"),
    {"zero_optimization.stage3_use_all_reduce_for_fetch_params", kBool, "", kBlocks},
    older("zero_optimization.use_all_reduce_for_fetch_params", kBool, kBlocks,
          "zero_optimization.stage3_use_all_reduce_for_fetch_params"),
    {"zero_optimization.stage3_allgather_sequential", kBool, "", kBlocks},
    older("zero_optimization.allgather_sequential", kBool, kBlocks, "zero_optimization.stage3_allgather_sequential"),
    K{"zero_optimization.ignore_unused_parameters", kOnly, "", "true only: a step may leave parameters out"}.allows(
        "true"),
    {"zero_optimization.legacy_stage1", kBool, "", kFeature},
    {"zero_optimization.round_robin_gradients", kBool, "", kShares},
    {"zero_optimization.parameter_alignment", kBool, "", kBuffers},
    {"zero_optimization.zero_hpz_partition_size", kInteger, "", kComm},
    {"zero_optimization.zero_quantized_weights", kBool, "", kComm},
    {"zero_optimization.zero_quantized_nontrainable_weights", kBool, "", kComm},
    {"zero_optimization.zero_quantized_gradients", kBool, "", kComm},
    K{"zero_optimization.zeropp_loco_param", kSection, "", kComm}.or_null(),
    {"zero_optimization.zeropp_loco_param.err_beta", kNumber, "", kComm, {}, 0, 1},
    {"zero_optimization.zeropp_loco_param.reset_T", kInteger, "", kComm},
    {"zero_optimization.mics_shard_size", kNumber, "", kComm, {}, -1},
    {"zero_optimization.mics_hierarchical_params_gather", kBool, "", kComm},
    {"zero_optimization.memory_efficient_linear", kBool, "", kFeature},
    {"zero_optimization.pipeline_loading_checkpoint", kBool, "", kFeature},
    {"zero_optimization.override_module_apply", kBool, "", kFeature},
    {"zero_optimization.log_trace_cache_warnings", kBool, "", kMonitor},
    {"zero_optimization.enable_sanity_checks", kBool, "", "checks are always on"},
    {"zero_optimization.save_muon_momentum_buffer_in_memory", kBool, "", kFeature},
    {"zero_optimization.leaf_module", kSection, "", kDescription},
    {"zero_optimization.leaf_module.classes", kTexts, "", kDescription},
    {"zero_optimization.leaf_module.names", kTexts, "", kDescription},
    {"zero_optimization.leaf_module.name_suffixes", kTexts, "", kDescription},

    // Not in DeepSpeed's current model any more, but in many files in circulation.
    {"zero_optimization.offload_optimizer.buffer_size", kInteger, "", kBuffers},
    {"zero_optimization.offload_optimizer.max_in_cpu", kInteger, "", kBuffers},
    {"zero_optimization.offload_optimizer.pin_memory", kBool, "", kPinned},
    {"zero_optimization.offload_optimizer.pipeline", kBool, "", "pipeline_read and pipeline_write decide"},
    {"zero_optimization.offload_optimizer.fast_init", kBool, "", kBuffers},
    {"zero_optimization.offload_optimizer.ratio", kNumber, "", kAtHome, {}, 0, 1},
    {"zero_optimization.offload_optimizer.super_offload", kBool, "", kAtHome},
    {"zero_optimization.offload_optimizer.cpuadam_cores_perc", kNumber, "", "spillway.threads says how many", {}, 0, 1},
    {"zero_optimization.offload_param.pin_memory", kBool, "", kPinned},

    older("aio.thread_count", kInteger, kOneThread, "aio.intra_op_parallelism"),
    {"aio.intra_op_parallelism", kInteger, "", kOneThread},
    older("aio.num_threads", kInteger, kOneThread, "aio.intra_op_parallelism"),
    {"aio.single_submit", kBool, "", "requests are submitted in batches"},
    {"aio.overlap_events", kBool, "", "submission and completion always overlap"},
    {"aio.use_gds", kBool, "", "data travels through pinned memory"},
};

}  // namespace

std::span<const ConfigKey> config_keys_without_effect() { return kUnusedKeys; }

}  // namespace spillway
