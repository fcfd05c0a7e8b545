#include "src/config_table.h"

// Keys that DeepSpeed 0.19.8 knows and that decide nothing here: they tune machinery that Spillway does not have, or
// concern more ranks than one. They are accepted, so that one file serves both, and named in one log line.

namespace spillway {
namespace {

using enum KeyKind;

constexpr std::string_view kComm = "communication between ranks";
constexpr std::string_view kMonitor = "logging and profiling";
constexpr std::string_view kPrefetch = "prefetch and release follow the plan";
constexpr std::string_view kBuffers = "buffers follow the plan and the budgets";
constexpr std::string_view kFeature = "not a part of the engine";

constexpr ConfigKey kKeys[] = {
    {"steps_per_print", kAnything, "", kMonitor},
    {"wall_clock_breakdown", kBool, "", kMonitor},
    {"memory_breakdown", kBool, "", kMonitor},
    {"dump_state", kBool, "", kMonitor},
    {"log_level", kText, "", kMonitor},
    {"timers", kAnything, "", kMonitor},
    {"flops_profiler", kAnything, "", kMonitor},
    {"tensorboard", kAnything, "", kMonitor},
    {"wandb", kAnything, "", kMonitor},
    {"comet", kAnything, "", kMonitor},
    {"csv_monitor", kAnything, "", kMonitor},
    {"comms_logger", kAnything, "", kMonitor},
    {"managed_gradient_accumulation", kBool, "", "accumulation runs inside a block"},
    {"communication_data_type", kAnything, "", kComm},
    {"seq_parallel_communication_data_type", kText, "", kComm},
    {"prescale_gradients", kBool, "", kComm},
    {"gradient_predivide_factor", kNumber, "", kComm},
    {"gradient_allreduce_op", kText, "", kComm},
    {"sparse_gradients", kBool, "", kComm},
    {"disable_allgather", kBool, "", kComm},
    {"data_types", kAnything, "", "gradients are added in fp32"},
    {"disable_python_gc", kBool, "", kFeature},
    {"dataloader_drop_last", kBool, "", kFeature},
    {"zero_allow_untested_optimizer", kBool, "", kFeature},
    {"zero_force_ds_cpu_optimizer", kBool, "", kFeature},
    {"activation_checkpointing", kAnything, "", "block inputs are always kept and the inside recomputed"},
    {"checkpoint", kAnything, "", "every commit is a checkpoint"},
    {"data_efficiency", kAnything, "", kFeature},
    {"curriculum_learning", kAnything, "", kFeature},
    {"compression_training", kAnything, "", kFeature},
    {"autotuning", kAnything, "", kFeature},
    {"elasticity", kAnything, "", kFeature},
    {"compile", kAnything, "", kFeature},
    {"tensor_parallel", kAnything, "", kFeature},
    {"sequence_parallel", kAnything, "", kFeature},
    {"pipeline", kAnything, "", kFeature},
    {"hybrid_engine", kAnything, "", kFeature},
    {"torch_autocast", kAnything, "", kFeature},

    {"optimizer.legacy_fusion", kBool, "", kFeature},
    {"optimizer.params.torch_adam", kBool, "", "there is one Adam"},
    {"bf16.immediate_grad_update", kBool, "", "gradients are added as they are pushed"},
    {"bf16.check_grad_overflow", kBool, "", "gradients are always checked"},
    {"bf16.bf16_master_weights_and_grads", kBool, "", "the master is exact"},
    {"bf16.bf16_optimizer_states", kBool, "", "states are fp32"},
    {"fp16.auto_cast", kBool, "", "inputs are tokens"},
    {"fp16.fp16_master_weights_and_grads", kBool, "", "the master is fp32"},

    {"zero_optimization.contiguous_gradients", kBool, "", kBuffers},
    {"zero_optimization.reduce_scatter", kBool, "", kComm},
    {"zero_optimization.reduce_bucket_size", kInteger, "", kComm},
    {"zero_optimization.use_multi_rank_bucket_allreduce", kBool, "", kComm},
    {"zero_optimization.allgather_partitions", kBool, "", kComm},
    {"zero_optimization.allgather_bucket_size", kInteger, "", kComm},
    {"zero_optimization.compute_grad_norm", kBool, "", "the norm is always computed"},
    {"zero_optimization.load_from_fp32_weights", kBool, "", "import is exact"},
    {"zero_optimization.elastic_checkpoint", kBool, "", kFeature},
    {"zero_optimization.zenflow", kAnything, "", "updates are exact, never stale"},
    {"zero_optimization.cpu_offload_use_pin_memory", kBool, "", "host memory is always pinned"},
    {"zero_optimization.stage3_gather_16bit_weights_on_model_save", kBool, "", "an export is always whole"},
    {"zero_optimization.stage3_gather_fp16_weights_on_model_save", kBool, "", "an export is always whole"},
    {"zero_optimization.gather_16bit_weights_on_model_save", kBool, "", "an export is always whole"},
    {"zero_optimization.stage3_module_granularity_threshold", kInteger, "", kPrefetch},
    {"zero_optimization.stage3_use_all_reduce_for_fetch_params", kBool, "", kComm},
    {"zero_optimization.stage3_allgather_sequential", kBool, "", kComm},
    {"zero_optimization.ignore_unused_parameters", kBool, "", "the model description says what is trained"},
    {"zero_optimization.legacy_stage1", kBool, "", kFeature},
    {"zero_optimization.round_robin_gradients", kBool, "", kComm},
    {"zero_optimization.parameter_alignment", kBool, "", kBuffers},
    {"zero_optimization.zero_hpz_partition_size", kInteger, "", kComm},
    {"zero_optimization.zero_quantized_weights", kBool, "", kComm},
    {"zero_optimization.zero_quantized_nontrainable_weights", kBool, "", kComm},
    {"zero_optimization.zero_quantized_gradients", kBool, "", kComm},
    {"zero_optimization.zeropp_loco_param", kAnything, "", kComm},
    {.path = "zero_optimization.mics_shard_size", .kind = kNumber, .standard = "", .doc = kComm, .least = -1},
    {"zero_optimization.mics_hierarchical_params_gather", kBool, "", kComm},
    {"zero_optimization.memory_efficient_linear", kBool, "", kFeature},
    {"zero_optimization.pipeline_loading_checkpoint", kBool, "", kFeature},
    {"zero_optimization.override_module_apply", kBool, "", kFeature},
    {"zero_optimization.log_trace_cache_warnings", kBool, "", kMonitor},
    {"zero_optimization.enable_sanity_checks", kBool, "", "checks are always on"},
    {"zero_optimization.save_muon_momentum_buffer_in_memory", kBool, "", kFeature},
    {"zero_optimization.leaf_module", kAnything, "", "the model description says what is gathered together"},

    // Not in DeepSpeed's current model any more, but in many files in circulation.
    {"zero_optimization.offload_optimizer.buffer_size", kInteger, "", kBuffers},
    {"zero_optimization.offload_optimizer.max_in_cpu", kInteger, "", kBuffers},
    {"zero_optimization.offload_optimizer.pin_memory", kBool, "", "host memory is always pinned"},
    {"zero_optimization.offload_optimizer.pipeline", kBool, "", "pipeline_read and pipeline_write decide"},
    {"zero_optimization.offload_optimizer.fast_init", kBool, "", kBuffers},
    {.path = "zero_optimization.offload_optimizer.ratio", .kind = kNumber, .standard = "", .doc = kBuffers, .most = 1},
    {"zero_optimization.offload_optimizer.super_offload", kBool, "", kFeature},
    {.path = "zero_optimization.offload_optimizer.cpuadam_cores_perc",
     .kind = kNumber,
     .standard = "",
     .doc = "spillway.threads says how many",
     .most = 1},
    {"zero_optimization.offload_param.pin_memory", kBool, "", "host memory is always pinned"},

    {"aio.thread_count", kInteger, "", "one thread drives the queue"},
    {"aio.intra_op_parallelism", kInteger, "", "one thread drives the queue"},
    {"aio.num_threads", kInteger, "", "one thread drives the queue"},
    {"aio.single_submit", kBool, "", "requests are submitted in batches"},
    {"aio.overlap_events", kBool, "", "submission and completion always overlap"},
    {"aio.use_gds", kBool, "", "data travels through pinned memory"},
};

}  // namespace

std::span<const ConfigKey> config_keys_without_effect() { return kKeys; }

}  // namespace spillway
