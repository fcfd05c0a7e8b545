#include "tools/terminal/commands.h"

#include <fmt/format.h>

#include <cstdio>
#include <memory>
#include <string>

#include "tools/models/decoder/config.h"
#include "tools/plan/answer.h"
#include "tools/terminal/number_option.h"
#include "tools/terminal/output.h"
#include "tools/terminal/tell.h"

namespace spillway::planning {
namespace {

int plan(const TypedOptions& typed) {
  const UnderstoodOptions understood = understand(typed);
  for (const std::string& problem : understood.problems) terminal::tell(stderr, "spillway: {}\n", problem);
  if (!understood.problems.empty()) return 1;
  const PlanOptions& options = understood.options;
  if (!options.html.empty()) terminal::check_output("--report", options.html);
  const Report report = answer(options);
  if (options.json) {
    terminal::tell("{}\n", report_json(report));
  } else {
    const bool colours = terminal::shows_colours(stdout);
    terminal::write(stdout, terminal::masked_report(report_text(report, colours), colours));
  }
  std::fflush(stdout);
  if (!options.html.empty()) terminal::write_output("--report", options.html, report_html(report));
  if (report.refused.empty()) return 0;
  terminal::tell(stderr, "spillway: {}\n", report.refused);
  return 1;
}

}  // namespace

void add_command(CLI::App& program, int& exit_code) {
  const auto kept = std::make_shared<TypedOptions>();
  TypedOptions& options = *kept;
  auto* command = program.add_subcommand(
      "plan", "Say what a run would take of every tier, how long a step would be and what would make it shorter");
  command->add_option("--config", options.config, "ds_config.json; default: bf16, everything offloaded");
  command->add_option("--aio", options.aio, "What spillway sweep --json wrote: put over the configuration");
  command->add_option(
      "--model", options.model,
      fmt::format("Directory with a config.json: gpt2, {}, t5", fmt::join(models::decoder_families(), ", ")));
  command->add_option("--params", options.parameters, "In place of a model: a GPT-2 of so many parameters, such as 7B")
      ->type_name("COUNT");
  command->add_option("--seq", options.sequence, "Tokens of a row, as in finetune")
      ->type_name("UINT")
      ->capture_default_str();
  command
      ->add_option("--hbm", options.hbm,
                   "Budget of GPU memory, less than is free: 14GiB of a GPU of 24; default: the configuration's")
      ->type_name("SIZE");
  command->add_option("--host", options.host, "Budget of pinned host memory, less than is free, such as 48GiB")
      ->type_name("SIZE");
  command->add_option("--nvme", options.nvme, "Directory of the store, and how much of its drive; once a drive")
      ->type_name("PATH[=2TB]")
      ->allow_extra_args(false);
  command
      ->add_option("--device", options.device,
                   fmt::format("{}; default: what the run would have here", fmt::join(kDeviceNames, " or ")))
      ->type_name(fmt::format("TEXT:{{{}}}", fmt::join(kDeviceNames, ",")));
  command->add_option("--loop", options.loop, "finetune or pytorch; default: finetune for GPT-2, else pytorch")
      ->type_name("TEXT:{finetune,pytorch}");
  command->add_option("--device-rate", options.device_rate, "What the device computes, TFLOP/s")->type_name("TFLOPS");
  command->add_option("--hbm-rate", options.hbm_rate, "What an optimizer on the GPU moves in its memory")
      ->type_name("GB/S");
  command->add_option("--h2d-rate", options.h2d_rate, "Host to device; and back, unless --d2h-rate")->type_name("GB/S");
  command->add_option("--d2h-rate", options.d2h_rate, "Device to host")->type_name("GB/S");
  command->add_option("--read-rate", options.read_rate, "What all drives read together")->type_name("GB/S");
  command->add_option("--write-rate", options.write_rate, "What all drives write together")->type_name("GB/S");
  command->add_option("--mixed-rate", options.mixed_rate, "Reading and writing at once, both together")
      ->type_name("GB/S");
  command->add_option("--memory-rate", options.memory_rate, "What the optimizer moves in host memory")
      ->type_name("GB/S");
  command->add_option("--cores", options.cores, "Compute threads; default: as on this machine")->type_name("N");
  command->add_option("--ranks", options.ranks, "Processes with a device each that train together")
      ->type_name("N")
      ->capture_default_str();
  command->add_option("--ranks-per-host", options.ranks_per_host, "So many of them on a host; default: all")
      ->type_name("N");
  command
      ->add_option("--network", options.network,
                   "What a rank sends, and what it receives, at once; and what a call takes besides, microseconds")
      ->type_name("GBIT/S[,US]");
  command->add_option("--drive-life", options.drive_life, "What may be written to each drive, such as 1200TB")
      ->type_name("SIZE");
  auto* probe = command->add_flag_callback(
      "--probe", [kept] { kept->probe = true; },
      "Time this machine for rates that are not given, some seconds; default: where the drives are here");
  command
      ->add_flag_callback(
          "--no-probe", [kept] { kept->probe = false; }, "Take typical rates where none are given")
      ->excludes(probe);
  command
      ->add_option("--probe-seconds", options.probe_seconds,
                   "Time for the drives; default: 1, which a fast cache may outlast")
      ->transform(terminal::in_range(0.1, 3600.0));
  command->add_flag("--json", options.json, "Print it as JSON");
  command->add_option("--report", options.html, "Write a page with charts there");
  command->footer(
      "Example:\n  spillway plan --params 13B --hbm 14GiB --host 48GiB --nvme /mnt/nvme=2TB --device cuda\n\n"
      "Exit code: 0 it fits, 1 it does not, or an option or a file is wrong");
  command->callback([kept, &exit_code] { exit_code = plan(*kept); });
}

}  // namespace spillway::planning
