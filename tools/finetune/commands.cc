#include "tools/terminal/commands.h"

#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "spillway/error.h"
#include "spillway/export.h"
#include "spillway/store.h"
#include "tools/finetune/finetune.h"
#include "tools/finetune/import_deepspeed.h"
#include "tools/finetune/rows.h"
#include "tools/models/config_json.h"
#include "tools/models/gpt2/model.h"
#include "tools/models/init_model.h"
#include "tools/terminal/byte_bar.h"
#include "tools/terminal/interrupt.h"
#include "tools/terminal/number_option.h"
#include "tools/terminal/tell.h"

namespace spillway::models::finetune {
namespace {

struct InitOptions {
  std::filesystem::path directory, from;
  std::string preset;
  std::uint32_t layers = 12, width = 768, heads = 12, vocabulary = 50257, context = 1024;
  std::uint64_t seed = 1;
  DType type = DType::kFloat32;
};

struct ExportCommand {
  std::filesystem::path store, directory;
  std::vector<std::filesystem::path> others;
  DType type = DType::kFloat32;
  std::uint64_t shard_bytes = ExportOptions{}.max_file_bytes;
  std::string base;  // of adapters
};

template <typename Type>  // DType, or an optional one
CLI::Option* add_dtype(CLI::App* command, Type& type, const std::string& help) {
  const auto set = [&type](const std::string& name) {
    type = name == "bf16" ? DType::kBFloat16 : name == "fp16" ? DType::kFloat16 : DType::kFloat32;
  };
  return command->add_option_function<std::string>("--dtype", set, help)
      ->check(CLI::IsMember({"fp32", "bf16", "fp16"}));
}

int make_model(const InitOptions& options, const TrainedModel& model, std::string_view name) {
  const terminal::Interrupt interrupt("ending without a model");  // before anything that starts threads
  const std::uint64_t count =
      init_model(options.directory, model, options.seed, options.type, [&] { return interrupt.requested(); });
  if (count == 0) return interrupt.exit_code();
  terminal::tell("{}: a new {} of {} parameters, {} layers of width {}\n", options.directory.string(), name, count,
                 model.layers.size(), model.width);
  return 0;
}

int run_init_model(const InitOptions& options) {
  if (!options.from.empty()) {
    constexpr const char* kWanted = "--from wants the config.json of a model";
    const TrainedModel model = trained_model(ConfigJson::read(options.from, kWanted, kWanted), 1);
    return make_model(options, model, model.family);
  }
  ModelConfig config;
  config.layers = options.layers;
  config.width = options.width;
  config.heads = options.heads;
  for (const auto& preset : presets()) {
    if (preset.name != options.preset) continue;
    config.layers = preset.layers;
    config.width = preset.width;
    config.heads = preset.heads;
  }
  config.inner = 4 * config.width;
  config.positions = options.context;
  config.vocabulary = options.vocabulary;
  if (config.width % config.heads != 0) {
    throw Error(Code::kInvalidArgument,
                {.object = "--width",
                 .happened = fmt::format("{} is no multiple of {} heads", config.width, config.heads),
                 .errno_value = 0,
                 .hint = "every head has width / heads columns"});
  }
  config.text = model_config_text(config, options.type);
  return make_model(options, trained_gpt2(config), "GPT-2");
}

struct Stopped {};  // by Ctrl-C

// Of an adapter.
std::string told_of_loading(const ExportCommand& options) {
  const std::string directory = options.directory.string();
  if (options.base.empty())
    return fmt::format("PeftModel.from_pretrained(BASE, \"{}\") loads it over its base", directory);
  return fmt::format("AutoPeftModelForCausalLM.from_pretrained(\"{}\") loads it and {}", directory, options.base);
}

// Only an adapter's files name a base.
void refuse_base_without_adapter(const ExportCommand& options, const std::filesystem::path& snapshot,
                                 const std::vector<std::filesystem::path>& store) {
  bool adapter = false;
  if (!snapshot.empty()) {
    std::error_code ignored;
    adapter = std::filesystem::exists(snapshot / kAdapterConfig, ignored);
  } else {
    const StoreInfo info = inspect_store(store);
    adapter =
        std::ranges::find(info.model.attachments, kAdapterConfig, &Attachment::name) != info.model.attachments.end();
  }
  if (adapter) return;
  throw Error(Code::kInvalidArgument, {.object = "--base",
                                       .happened = fmt::format("is of an adapter, and {} has none",
                                                               (snapshot.empty() ? options.store : snapshot).string()),
                                       .errno_value = 0,
                                       .hint = "leave it out: all of the model is written"});
}

int run_export(const ExportCommand& options) {
  const terminal::Interrupt interrupt("ending without a model");  // before anything that starts threads
  terminal::ByteBar bar("exporting");
  const auto progress = [&](std::uint64_t done, std::uint64_t bytes) {
    if (interrupt.requested()) throw Stopped();
    bar.at(done, bytes);
  };
  const ExportOptions how = {.type = options.type,
                             .max_file_bytes = options.shard_bytes,
                             .replace = true,
                             .base = options.base,
                             .progress = progress};
  std::vector<std::filesystem::path> paths{options.store};
  paths.insert(paths.end(), options.others.begin(), options.others.end());
  // Where somebody keeps both in one directory, a store is what was named.
  std::error_code ignored;
  const bool store = std::filesystem::exists(options.store / "spillway.store", ignored);
  const std::filesystem::path snapshot = store ? "" : find_newest_snapshot(options.store);
  ExportedStore exported;
  RunPaths ranks;
  try {
    if (snapshot.empty()) ranks = find_ranks(paths);
    if (!options.base.empty()) refuse_base_without_adapter(options, snapshot, ranks.empty() ? paths : ranks.front());
    exported = !snapshot.empty() ? export_snapshot(snapshot, options.directory, how)
               : ranks.empty()   ? export_store(paths, options.directory, how)
                                 : export_run(ranks, options.directory, how);
  } catch (const Stopped&) {
    bar.clear();
    return interrupt.exit_code();
  }
  bar.clear();
  if (interrupt.requested()) terminal::tell(stderr, "spillway: all of it had been written already\n");
  const std::string of = !snapshot.empty() ? "the snapshot"
                         : ranks.empty()   ? "the store"
                                           : fmt::format("the stores of {} ranks", ranks.size());
  terminal::tell("{}: the {} of step {} of {} in {}\n", options.directory.string(),
                 exported.adapters ? "adapter" : "model", exported.step, of,
                 (snapshot.empty() ? options.store : snapshot).string());
  if (exported.adapters) terminal::tell("  {}\n", told_of_loading(options));
  return 0;
}

void add_init_model(CLI::App& program, int& exit_code) {
  const auto kept = std::make_shared<InitOptions>();
  InitOptions& options = *kept;
  auto* command = program.add_subcommand("init-model", "Make a new model with random weights");
  command->add_option("directory", options.directory, "Where the model goes")->required();
  const auto sizes = terminal::in_range(1u, 1u << 20);
  auto* layers = command->add_option("--layers", options.layers, "Layers")
                     ->transform(terminal::in_range(1u, kMostLayers))
                     ->capture_default_str();
  auto* width =
      command->add_option("--width", options.width, "Width of a token")->transform(sizes)->capture_default_str();
  auto* heads =
      command->add_option("--heads", options.heads, "Attention heads")->transform(sizes)->capture_default_str();
  command->add_option("--vocab", options.vocabulary, "Vocabulary")
      ->transform(terminal::in_range(1u, 1u << 24))
      ->capture_default_str();
  command->add_option("--context", options.context, "Positions")->transform(sizes)->capture_default_str();
  command->add_option("--seed", options.seed, "Seed of the weights")
      ->transform(terminal::in_range(std::uint64_t{0}, UINT64_MAX))
      ->capture_default_str();
  add_dtype(command, options.type, "Type of the weights")->default_str("fp32");
  std::vector<std::string> names;
  for (const auto& preset : presets()) names.emplace_back(preset.name);
  command->add_option("--preset", options.preset, "Layers, width and heads of a published size")
      ->check(CLI::IsMember(names))
      ->excludes(layers)
      ->excludes(width)
      ->excludes(heads);
  command->add_option("--from", options.from, "A config.json, of any family that finetune trains, in place of sizes")
      ->excludes("--layers")
      ->excludes("--width")
      ->excludes("--heads")
      ->excludes("--vocab")
      ->excludes("--context")
      ->excludes("--preset");
  command->footer("Example:\n  spillway init-model model --preset gpt2-medium --dtype bf16");
  command->callback([kept, &exit_code] { exit_code = run_init_model(*kept); });
}

// Of prepared data.
void take_row_length(FinetuneOptions& options, bool given) {
  const auto length = row_length_of(options.data);
  if (!length) return;
  if (given && options.sequence != *length) {
    throw Error(Code::kInvalidArgument, {.object = "--seq",
                                         .happened = fmt::format("is {}, and rows of {} have {} tokens",
                                                                 options.sequence, options.data.string(), *length),
                                         .errno_value = 0,
                                         .hint = "leave it out, or prepare the data with another --seq"});
  }
  options.sequence = *length;
}

void add_finetune(CLI::App& program, int& exit_code) {
  const auto kept = std::make_shared<FinetuneOptions>();
  FinetuneOptions& options = *kept;
  const auto steps = terminal::in_range(std::uint64_t{1}, std::uint64_t{1} << 40);
  auto* command = program.add_subcommand("finetune", "Train a language model through HBM, host memory and NVMe");
  command->add_option("--config", options.config, "ds_config.json")->required();
  command->add_option("--aio", options.aio, "What spillway sweep --json wrote: put over the configuration");
  command->add_option("--model", options.model, "Directory with config.json and model.safetensors")->required();
  command
      ->add_option("--data", options.data,
                   "A directory of spillway.prepare; FILE.bin: 16-bit tokens; any other file: bytes. Rows are read in "
                   "order, or --shuffle")
      ->required();
  command->add_option("--steps", options.steps, "Number of the last step")->required()->transform(steps);
  auto* length = command->add_option("--seq", options.sequence, "Tokens of a row; prepared data says them itself")
                     ->transform(terminal::in_range(1u, 1u << 24))
                     ->capture_default_str();
  command->add_option("--shuffle", options.shuffle, "Take the rows of each epoch in an order of its own: its seed")
      ->transform(terminal::in_range(std::uint64_t{0}, UINT64_MAX));
  const auto fuse = [&options](const std::string& name) {
    options.fusion = name == "none"   ? Fusion::kNone
                     : name == "gelu" ? Fusion::kGelu
                     : name == "all"  ? Fusion::kAll
                                      : Fusion::kAuto;
  };
  command
      ->add_option_function<std::string>(
          "--fuse", fuse, "On a GPU, inside its 16-bit products: nothing, gelu, or (all) bias gradients, too")
      ->check(CLI::IsMember({"auto", "none", "gelu", "all"}))
      ->default_str("auto");
  command->add_option("--out", options.out, "Where the trained model goes");
  command->add_option("--log", options.log, "Append one JSON line per step");
  command->add_option("--trace", options.trace, "Write a timeline that ui.perfetto.dev and chrome://tracing show");
  auto* save = command->add_option("--save", options.snapshots.directory,
                                   "Where snapshots go, DIR/step-000123: weights and states, complete or not there");
  auto* every =
      command
          ->add_option(
              "--save-every", options.snapshots.every,
              "Steps between snapshots, the last step has one, too; one that fails is reported, and training goes on")
          ->transform(steps)
          ->needs(save);
  save->needs(every);
  command->add_option("--keep", options.snapshots.keep, "Keep so many of them, the newest; default: all")
      ->transform(steps)
      ->needs(every);
  EvaluationOptions& evaluation = options.evaluation;
  auto* eval = command
                   ->add_option("--eval", evaluation.every,
                                "Steps between evaluations: loss and perplexity of held-out rows, DIR/eval of "
                                "--data; also before the first step and after the last")
                   ->transform(steps);
  command->add_option("--eval-data", evaluation.data, "Other rows to evaluate, in a form that --data takes")
      ->needs(eval);
  command->add_option("--best", evaluation.best, "Where the model goes each time the evaluation's loss is the lowest")
      ->needs(eval);
  auto* load = command->add_option("--load", options.load,
                                   "Begin with a snapshot, or the newest one of a directory of them, in a new store");
  auto* adapter = command->add_option("--adapter", options.adapter,
                                      "With spillway.lora: begin with the adapter that peft saved there");
  auto* resume = command->add_flag("--resume", options.resume, "Continue from the store, with any number of ranks")
                     ->excludes(load);
  adapter->excludes(load)->excludes(resume);
  command->add_flag("--fresh", options.fresh, "Give up the store that exists and start anew")->excludes(resume);
  command->footer(
      "Example:\n"
      "  spillway finetune --config ds_config.json --model gpt2 --data data --steps 1000 --out trained\n"
      "  spillway finetune --config ds_config.json --model gpt2 --data data --steps 2000 --resume");
  command->callback([kept, length, &exit_code] {
    take_row_length(*kept, length->count() > 0);
    exit_code = finetune(*kept);
  });
}

void add_export(CLI::App& program, int& exit_code) {
  const auto kept = std::make_shared<ExportCommand>();
  ExportCommand& options = *kept;
  auto* command = program.add_subcommand("export", "Write the model that a store or a snapshot holds");
  command
      ->add_option("store", options.store,
                   "Directory of the store, of the stores of all ranks, of a snapshot, or of snapshots: the newest")
      ->required();
  command->add_option("directory", options.directory, "Where the model goes")->required();
  command->add_option("--with", options.others, "The store's other directories, in the order of nvme_paths");
  add_dtype(command, options.type, "Type of the weights")->default_str("fp32");
  command->add_option("--max-shard-size", options.shard_bytes, "Largest file of weights: 5GB is 5·10^9, 5GiB 5·2^30")
      ->transform(terminal::as_size())
      ->default_str("50GB");
  command->add_option("--base", options.base, "Of an adapter: the model that it is of, for adapter_config.json")
      ->type_name("MODEL");
  command->footer("Example:\n  spillway export /mnt/nvme/run trained --dtype bf16 --max-shard-size 5GB");
  command->callback([kept, &exit_code] { exit_code = run_export(*kept); });
}

void add_import(CLI::App& program, int& exit_code) {
  const auto kept = std::make_shared<ImportCommand>();
  ImportCommand& options = *kept;
  auto* command =
      program.add_subcommand("import", "Make a snapshot of a DeepSpeed checkpoint: weights and Adam's states");
  command->add_option("checkpoint", options.checkpoint, "What save_checkpoint() was given, or a tag in it")->required();
  command->add_option("--model", options.model, "Directory with the model's config.json")->required();
  command->add_option("--out", options.out, "Where the snapshot goes; finetune --load takes it")->required();
  command->add_option("--tag", options.tag, "global_step100, say; default: the latest")->type_name("NAME");
  add_dtype(command, options.type, "Type of the weights to go on with; default: as trained. fp16: if it was so");
  command->add_flag("--no-verify", options.no_verify, "Do not compare the tensors with their CRC-32 first");
  command->add_flag("--json", options.json, "Print what was imported as JSON");
  command->footer("Example:\n  spillway import checkpoints --model gpt2 --out snapshot --dtype bf16");
  command->callback([kept, &exit_code] { exit_code = import_checkpoint(*kept); });
}

}  // namespace

void add_commands(CLI::App& program, int& exit_code) {
  add_init_model(program, exit_code);
  add_finetune(program, exit_code);
  add_export(program, exit_code);
  add_import(program, exit_code);
}

}  // namespace spillway::models::finetune
