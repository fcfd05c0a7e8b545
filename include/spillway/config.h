// The effective configuration of a run: plain values with their defaults. config_from_json() reads a DeepSpeed-style
// ds_config.json; the keys and their meaning are DeepSpeed's, the section "spillway" holds what DeepSpeed has no word
// for.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "spillway/device.h"
#include "spillway/dtype.h"
#include "spillway/io_queue.h"
#include "spillway/optimizer.h"
#include "spillway/placement.h"

namespace spillway {

// Trainable parameters with a learning rate or weight decay of their own.
struct ParameterGroup {
  std::vector<std::string> parameters;                // names, as shell patterns: * stands for anything
  std::optional<double> learning_rate, weight_decay;  // the optimizer's when missing
};

enum class ScheduleKind : std::uint8_t { kConstant, kWarmup, kWarmupDecay, kWarmupCosine };

struct ScheduleConfig {
  ScheduleKind kind = ScheduleKind::kConstant;
  double warmup_min_lr = 0, warmup_max_lr = 1e-3;
  std::uint64_t warmup_steps = 1000, total_steps = 0;
  bool logarithmic_warmup = true;                        // warmup_type "log"; false: "linear"
  double warmup_min_ratio = 0, cosine_min_ratio = 1e-4;  // WarmupCosineLR, as shares of the optimizer's rate
  std::optional<double> given_lr = {};                   // Engine::set_learning_rate: in place of all of this
};

// The factor for the loss in fp16 training, by DeepSpeed's rules (docs/deepspeed.md). A power of two changes no bit of
// a gradient that is neither too small nor too large for fp16.
struct LossScaleConfig {
  double fixed = 0;  // fp16.loss_scale; 0: dynamic, by what follows
  std::uint32_t initial_power = 16;
  std::uint64_t window = 1000;   // steps without an overflow between two that double it
  std::uint32_t hysteresis = 2;  // overflows until it is halved
  bool consecutive_hysteresis = false;
  double least = 1;  // where one more overflow is an error
};
inline constexpr std::uint32_t kMostScalePower = 64;

// DeepSpeed's knobs of stage 3 and of offloading, when a file sets them; sizes in parameters. Each is a limit on what
// the plan would do by itself, and Engine::describe() says what it changes. docs/deepspeed.md has the meaning of each.
struct DeepSpeedKnobs {
  std::optional<std::uint64_t> max_live_parameters;  // in HBM places at a time; two places are always kept
  std::optional<std::uint64_t> max_reuse_distance;   // visited between two visits of a block that stays in HBM: fewer
  std::optional<std::uint64_t> prefetch_bucket_size;
  std::optional<std::uint64_t> param_persistence_threshold;  // of a block's largest parameter, to have its own place
  std::optional<std::uint64_t> model_persistence_threshold;  // of all such blocks together
  std::optional<std::uint64_t> param_buffer_count, param_buffer_size;  // offload_param: weights in flight
  std::optional<std::uint64_t> max_in_cpu;                             // weights kept in host memory as a cache
  std::optional<std::uint64_t> optimizer_buffer_count;                 // offload_optimizer: tile buffers
  std::optional<bool> pipeline_read, pipeline_write;
};

// Low-rank adapters of a model's products, which alone are trained (`spillway finetune`): y += alpha / rank · B A x.
struct LoraConfig {
  std::uint32_t rank = 8;
  double alpha = 8;
  // Modules by their names, or the ends of these after a dot, as peft's target_modules; "all-linear": all of the
  // layers'. None: every parameter is trained.
  std::vector<std::string> targets = {};
  std::uint64_t seed = 0;  // of A; B begins as zeros

  bool given() const { return !targets.empty(); }
};

inline constexpr std::uint32_t kMostSumGroups = 65536;

struct Config {
  std::uint32_t micro_batch = 1;            // train_micro_batch_size_per_gpu
  std::uint32_t gradient_accumulation = 1;  // gradient_accumulation_steps
  // For programs that compute a micro-batch slice by slice: the most tokens of a slice; 0: all of it at once.
  std::uint32_t slice_tokens = 16384;
  // A power of two that divides a step's number of micro-batches: they are summed in so many parts, and the parts by a
  // balanced tree.
  std::uint32_t sum_groups = 1;
  // communication_data_type: the type in which sums of gradients travel between ranks. 16 bits exclude sum_groups.
  DType communication = DType::kFloat32;
  double gradient_clipping = 1;     // maximal norm, 0: off; the default is DeepSpeed's (0.19)
  DType weights = DType::kFloat32;  // bf16.enabled, fp16.enabled
  LossScaleConfig loss_scale;       // of fp16
  OptimizerConfig optimizer;        // optimizer.type and params; each type has DeepSpeed's defaults
  bool optimizer_left_out = false;  // the file has no such section: the program that trains chooses
  // zero_optimization.stage: what each of several ranks owns a part of. 3: weights, gradients and states; 1 and 2: all
  // but the weights, which are whole in HBM; 0: nothing. One rank owns everything.
  std::uint32_t stage = 3;
  ScheduleConfig schedule;

  Placement states = Placement::kHbm;             // offload_optimizer.device
  Placement parameters = Placement::kHbm;         // offload_param.device
  std::vector<std::filesystem::path> nvme_paths;  // a store is striped over all of them; at most 16
  std::vector<double> nvme_rates;                 // GB/s of each, its share of a new store; empty: probed
  std::uint64_t io_block_bytes = 1 << 20;         // aio.block_size
  std::uint32_t io_depth = 32;                    // aio.queue_depth
  DeepSpeedKnobs knobs;

  std::optional<DeviceKind> device;  // not set: cuda where there is a GPU, else host
  // Section "spillway". Absent budgets take what the plan asks for (nvme: what the store needs).
  std::optional<std::uint64_t> hbm_bytes, host_bytes, nvme_bytes;
  std::uint64_t tile_elements = 4 << 20;      // multiple of 1,024; sub_group_size when that alone is set
  std::optional<std::uint32_t> commit_every;  // steps between commits; 0: one slot, no resume or export
  // With clipping: how many blocks are updated inside backward on the guess that clipping has no effect, as in the
  // steps before; where the guess is wrong they are updated once more. 0: none; not set: the number that makes the step
  // shortest by the schedule.
  std::optional<std::uint32_t> speculative_blocks;
  bool no_decay = false;                         // parameters of fewer than two dimensions: biases and norms
  std::vector<ParameterGroup> parameter_groups;  // the first one that matches decides
  // How moments are stored, for Adam and Lion and for parameters of two or more dimensions that no name or shell
  // pattern in exact_states matches. All other moments are exact.
  MomentFormat moments = MomentFormat::kFloat32;
  std::vector<std::string> exact_states = {"*embed*", "*wte*", "*wpe*"};
  LoraConfig lora;
  unsigned threads = 0;  // compute threads; 0: one per core this process may use
  IoEngineKind io_engine = IoEngineKind::kAuto;
};

// What "auto" in a file stands for where that depends on the run. Everywhere else "auto" is what the Hugging Face
// trainer would put there, by the defaults of its TrainingArguments, before DeepSpeed sees the file. A value that
// "auto" stands for is checked and printed like one that was written out.
struct AutoValues {
  std::optional<std::uint64_t> hidden_size;  // the model's width, for bucket sizes; missing: the plan chooses
  std::optional<std::uint64_t> total_steps;  // of the run; missing: an error in a schedule that is to span them
};

// Parses a configuration. `name` stands in error messages (`name:line:column: what; hint`, below it the line with the
// place marked). All errors of the text are reported in one Error (kInvalidArgument), in the order of the text. What
// has no effect, and what "auto" became, goes to the log. Relative paths are taken as they are. `ranks`: how many train
// by it together, DeepSpeed's world size. train_batch_size counts the rows of all ranks; the Config that is returned is
// one rank's. 0: nobody trains by it: rows, micro-batches and the schedule keep their defaults, and are not checked.
Config config_from_json(std::string_view text, const std::string& name, const AutoValues& automatic = {},
                        std::uint32_t ranks = 1);
// `overlay`, unless empty, is a second file, with the sections "aio" and "spillway" alone, that is put over the first,
// key by key: what `spillway sweep --json` writes. Its nvme_paths replace those of the first file, if that one has a
// store: it keeps something on nvme, or names nvme_paths.
Config load_config(const std::filesystem::path& file, const std::filesystem::path& overlay = {},
                   const AutoValues& automatic = {}, std::uint32_t ranks = 1);

// The learning rate of optimizer step `step` (1 is the first; skipped ones do not count).
double learning_rate(const Config& config, std::uint64_t step);

}  // namespace spillway
