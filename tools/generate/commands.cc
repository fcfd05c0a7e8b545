#include "tools/terminal/commands.h"

#include <memory>
#include <string>

#include "tools/generate/generate.h"
#include "tools/terminal/number_option.h"

namespace spillway::models::generate {

void add_command(CLI::App& program, int& exit_code) {
  const auto kept = std::make_shared<GenerateOptions>();
  GenerateOptions& options = *kept;
  auto* command = program.add_subcommand("generate", "Continue a prompt with a model that need not fit in memory");
  command->add_option("--model", options.model, "Directory with config.json and model.safetensors, or of a store")
      ->required();
  command->add_option("--with", options.others, "The store's other directories, in the order of nvme_paths");
  command->add_option("--adapter", options.adapter, "Directory of a LoRA adapter of the model, as peft saves it");
  command->add_option("--config", options.config, "ds_config.json; without: all in memory, in the type of the files");
  auto* text = command->add_option("--prompt", options.prompt, "The text to go on with")->type_name("STRING");
  auto* file = command->add_option("--prompt-file", options.prompt_file, "The same in a file; - is standard input");
  file->excludes(text);
  command->add_option("--tokens", options.tokens, "New tokens at the most")
      ->transform(terminal::in_range(1u, 1u << 24))
      ->capture_default_str();
  auto* temperature = command
                          ->add_option("--temperature", options.sampling.temperature,
                                       "Draw tokens, from logits divided by it; default: take the most likely")
                          ->transform(terminal::in_range(0.01f, 100.0f));
  auto* top_p = command
                    ->add_option("--top-p", options.sampling.top_p,
                                 "Draw from the fewest most likely tokens whose probabilities reach it")
                    ->transform(terminal::in_range(0.0f, 1.0f));
  auto* seed = command->add_option("--seed", options.sampling.seed, "Of what is drawn")
                   ->transform(terminal::in_range(std::uint64_t{0}, UINT64_MAX))
                   ->capture_default_str();
  command
      ->add_flag_callback(
          "--greedy", [] {}, "Take the most likely token each time, which is the default")
      ->excludes(temperature)
      ->excludes(top_p)
      ->excludes(seed);
  command->add_flag("--past-end", options.past_end, "Go on where the model ends its text");
  auto* ids = command->add_flag("--ids", options.ids, "The prompt, and what is printed, are numbers of tokens");
  command->add_flag("--chat", options.chat, "The prompt is what a user says, in the tokenizer's chat template")
      ->excludes(ids);
  command
      ->add_option("--tokenizer", options.tokenizer, "Directory of the tokenizer, or a tokenizer.json; else --model's")
      ->excludes(ids);
  command->add_option("--store", options.store,
                      "Keep the store that weights are streamed from there, for the next time");
  const auto set = [&options](const std::string& name) {
    options.cache = name == "hbm" ? Placement::kHbm : name == "host" ? Placement::kHost : Placement::kNvme;
  };
  command
      ->add_option_function<std::string>("--cache", set,
                                         "Where keys and values are; default: the first of these with room for them")
      ->check(CLI::IsMember({"hbm", "host", "nvme"}));
  command->add_option("--slice", options.slice, "Tokens of the prompt that are computed at one time")
      ->transform(terminal::in_range(1u, 1u << 16))
      ->capture_default_str();
  command->add_option("--log", options.log, "Append one JSON line per token");
  command->add_option("--trace", options.trace, "Write a timeline that ui.perfetto.dev and chrome://tracing show");
  command->add_flag("--verbose", options.verbose, "Say on standard error what goes where");
  command->footer(
      "Example:\n"
      "  spillway generate --model gpt2 --prompt 'Once upon a time'\n"
      "  spillway generate --config ds_config.json --model big --chat --prompt 'Who are you?' --top-p 0.9");
  command->callback([kept, top_p, temperature, seed, &exit_code] {
    const bool drawn = top_p->count() + temperature->count() + seed->count() > 0;
    if (drawn && temperature->count() == 0) kept->sampling.temperature = 1;
    exit_code = generate(*kept);
  });
}

}  // namespace spillway::models::generate
