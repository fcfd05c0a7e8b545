#include "tools/terminal/commands.h"

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>

#include "spillway/error.h"
#include "src/config/hidden_size.h"
#include "src/formats/plain_file.h"
#include "tools/config/describe.h"
#include "tools/config/report.h"
#include "tools/config/schema.h"
#include "tools/terminal/number_option.h"
#include "tools/terminal/tell.h"

namespace spillway::config {
namespace {

struct ConfigOptions {
  std::filesystem::path file, aio, model;
  std::string explain;
  std::uint64_t steps = 0;  // 0: not given
  bool json = false, schema = false, reference = false;
};

std::uint64_t width_of_model(const std::filesystem::path& directory) {
  const std::filesystem::path file = directory / "config.json";
  const auto width = hidden_size_of(read_text(file, 16 << 20));
  if (width) return *width;
  throw Error(Code::kInvalidArgument, {.object = file.string(),
                                       .happened = "it says no width: hidden_size, n_embd and d_model are missing",
                                       .errno_value = 0,
                                       .hint = "name the directory of a model as Hugging Face stores it"});
}

int run(const ConfigOptions& options) {
  if (options.schema) {
    terminal::tell("{}\n", schema());
  } else if (options.reference) {
    terminal::tell("{}", reference());
  } else if (!options.explain.empty()) {
    terminal::tell("{}", explain(options.explain));
  } else if (options.file.empty()) {
    throw Error(Code::kInvalidArgument, {.object = "config",
                                         .happened = "no file is named",
                                         .errno_value = 0,
                                         .hint = "spillway config ds_config.json, or --schema, or --explain KEY"});
  } else {
    AutoValues automatic;
    if (options.steps > 0) automatic.total_steps = options.steps;
    if (!options.model.empty()) automatic.hidden_size = width_of_model(options.model);
    const EffectiveConfig effective = read_config_files(options.file, options.aio, automatic);
    if (options.json) {
      terminal::tell("{}\n", report_json(effective));
    } else {
      terminal::tell("{}", report_text(effective));
    }
  }
  return 0;
}

}  // namespace

void add_command(CLI::App& program, int& exit_code) {
  const auto kept = std::make_shared<ConfigOptions>();
  ConfigOptions& options = *kept;
  auto* command = program.add_subcommand(
      "config", "Print what a configuration says, key by key, and where each value came from; changes nothing");
  auto* file = command->add_option("file", options.file, "ds_config.json");
  command->add_option("--aio", options.aio, "What spillway sweep --json wrote: put over the configuration")
      ->needs(file);
  command->add_option("--model", options.model, "Directory of the model, whose width \"auto\" may stand for")
      ->needs(file);
  command->add_option("--steps", options.steps, "Steps of the run, which \"auto\" may stand for")
      ->transform(terminal::in_range(std::uint64_t{1}, std::uint64_t{1} << 40))
      ->needs(file);
  command->add_flag("--json", options.json, "Print it as JSON, with the configuration as a file of its own")
      ->needs(file);
  auto* schema = command->add_flag("--schema", options.schema, "Print the JSON Schema of the file, for editors");
  auto* explain = command->add_option("--explain", options.explain, "Print what a key means: KEY, or the end of one")
                      ->type_name("KEY");
  auto* reference = command->add_flag("--reference", options.reference, "Print docs/configuration.md");
  for (auto* alone : {schema, explain, reference}) alone->excludes(file);
  schema->excludes(explain)->excludes(reference);
  explain->excludes(reference);
  command->footer(
      "Example:\n"
      "  spillway config ds_config.json --model gpt2 --steps 1000\n"
      "  spillway config --explain zero_optimization.offload_optimizer.buffer_count\n\n"
      "Exit code: 0 the configuration is right, 1 it is not; all of its errors are printed then");
  command->callback([kept, &exit_code] { exit_code = run(*kept); });
}

}  // namespace spillway::config
