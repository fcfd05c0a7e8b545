#include "tools/terminal/commands.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "spillway/error.h"
#include "tools/doctor/checks.h"
#include "tools/doctor/finding.h"
#include "tools/terminal/heard.h"
#include "tools/terminal/interrupt.h"
#include "tools/terminal/number_option.h"
#include "tools/terminal/progress.h"
#include "tools/terminal/tell.h"

namespace spillway::doctor {
namespace {

struct DoctorOptions {
  std::vector<std::filesystem::path> paths;
  RequirementOptions required;
  std::optional<std::string> ranks;  // how many; empty: as many as a launcher has started
  double probe_seconds = 5;
  bool no_probe = false, json = false;
};

[[noreturn]] void refuse_ranks(std::string happened, std::string hint) {
  throw Error(Code::kInvalidArgument,
              {.object = "--ranks", .happened = std::move(happened), .errno_value = 0, .hint = std::move(hint)});
}

// Without a number it is about the processes of a launcher, with one about a run of a configuration.
void check_ranks_option(const DoctorOptions& options) {
  const bool configured = !options.required.config.empty();
  if (!options.ranks) return;
  if (options.ranks->empty() && (configured || !options.paths.empty()))
    refuse_ranks("has no number, and looks at what mpirun has started alone",
                 "say how many train by --config, or leave the rest out");
  if (!options.ranks->empty() && !configured)
    refuse_ranks(fmt::format("{} of them train by a configuration, and none is named", *options.ranks),
                 "add --config, or leave the number out");
}

class Doctor {
 public:
  explicit Doctor(const DoctorOptions& options) : options_(options) {}

  int run() {
    if (options_.ranks && options_.ranks->empty()) {
      add(check_ranks());
      return findings_.empty() ? 0 : report();
    }
    probe_machine();
    if (!options_.paths.empty()) required_.paths = options_.paths;
    for (const auto& path : required_.paths) {
      paths_.push_back(path_info(path, required_.engine, required_.ranks));
      if (!probe(paths_.back())) return stopped();
    }
    add(check_paths(paths_, required_, nodes_));
    for (const PathInfo& path : paths_) add(check_path(path, required_));
    if (required_.paths.empty()) {
      findings_.push_back(
          {"", "paths", Status::kSkipped,
           options_.required.config.empty()
               ? "none was given: name the directories for stores, or --config ds_config.json"
               : "the configuration has none, so a run makes no store: name directories to look at them",
           "", ""});
    }
    return report();
  }

 private:
  int report() const {
    if (options_.json) {
      terminal::tell("{}\n", findings_json(findings_));
    } else {
      const bool colours = terminal::shows_colours(stdout);
      terminal::write(stdout, terminal::masked_report(findings_text(findings_, colours), colours));
    }
    return exit_code_of(worst_of(findings_));
  }

  void add(Findings findings) {
    for (Finding& finding : findings) findings_.push_back(std::move(finding));
  }

  void probe_machine() {
    const MemoryInfo memory = memory_info();  // first: what is tried below takes memory and address space
    const CpuInfo cpu = cpu_info();
    required_ = requirements_of(options_.required);
    const KernelInfo kernel = kernel_info();
    const RingInfo ring = ring_info();
    const GpuInfo gpu = gpu_info();
    nodes_ = {.gpu = gpu_node(gpu), .cpus = cpu.nodes};
    add(check_kernel(kernel, ring));
    add(check_ring(ring, kernel, required_));
    add(check_memory(memory, required_));
    limits_ = limit_info();
    add(check_limits(limits_, required_));
    add(check_cpu(cpu));
    add(check_gpu(gpu, kernel));
  }

  // False when Ctrl-C ended it.
  bool probe(PathInfo& facts) {
    // With what a quota leaves, and where a file was had.
    const std::uint64_t room = std::min(facts.free_bytes, facts.quota_left.value_or(UINT64_MAX));
    const std::uint64_t bytes = probe_bytes(room, limits_.file_bytes.value_or(UINT64_MAX));
    if (options_.no_probe) {
      facts.no_probe = "left out (--no-probe)";
    } else if (!facts.written) {
      facts.no_probe = "no file to probe with";
    } else if (!facts.engine_refused.empty()) {
      facts.no_probe = "no engine to probe with";
    } else if (!facts.direct || drive::medium_of(facts.mount.type) == drive::Medium::kMemory) {
      facts.no_probe = "memory would be measured, not a drive";
    } else if (bytes == 0) {
      facts.no_probe = probe_bytes(room) == 0 ? "too little is free" : "ulimit -f allows too small a file";
    } else {
      return measure(facts, bytes);
    }
    return !interrupt_.requested();
  }

  bool measure(PathInfo& facts, std::uint64_t bytes) {
    terminal::Progress progress(0, 0, stderr);
    const terminal::Heard heard;  // the lines of path and machine have said it
    const auto go_on = [&](double seconds) {
      progress.at(seconds / options_.probe_seconds, std::max(0.0, options_.probe_seconds - seconds),
                  facts.path.string());
      return !interrupt_.requested();
    };
    const std::vector<DiskInfo> before = facts.disks;
    try {
      facts.probe = probe_drive({.directory = facts.directory,
                                 .seconds = options_.probe_seconds,
                                 .most_bytes = bytes,
                                 .required = &required_,
                                 .go_on = go_on});
    } catch (const Error& error) {
      facts.probe_failed = error.parts();
    }
    progress.clear();
    for (const std::string& line : heard.lines()) {
      if (terminal::Heard::hangs(line)) facts.hung = line.substr(line.find(": ") + 2);
    }
    if (facts.probe) note_heat(before, facts);
    return !interrupt_.requested();
  }

  // Of the warmest drive. A link that slept is awake now, too.
  static void note_heat(const std::vector<DiskInfo>& before, PathInfo& facts) {
    facts.disks = disks_of(facts.drive);
    for (std::size_t i = 0; i < facts.disks.size() && i < before.size(); ++i) {
      const drive::DriveInfo& drive = facts.disks[i].drive;
      if (!drive.celsius || *drive.celsius < facts.probe->celsius_after.value_or(-300)) continue;
      facts.probe->celsius_before = before[i].drive.celsius;
      facts.probe->celsius_after = drive.celsius;
      facts.probe->celsius_limit = drive.celsius_limit;
    }
  }

  int stopped() {
    terminal::tell(stderr, "spillway: doctor: stopped; nothing is left on the drive\n");
    return interrupt_.exit_code();
  }

  const DoctorOptions& options_;
  terminal::Interrupt interrupt_{"ending the probe"};  // before anything that starts threads
  RunRequirements required_;
  NodesInUse nodes_;
  LimitInfo limits_;
  std::vector<PathInfo> paths_;
  Findings findings_;
};

}  // namespace

void add_command(CLI::App& program, int& exit_code) {
  const auto kept = std::make_shared<DoctorOptions>();
  DoctorOptions& options = *kept;
  auto* command = program.add_subcommand(
      "doctor",
      "Say what in this machine, its limits and its drives makes training slower or breaks it, and what "
      "repairs it; changes nothing");
  command->add_option("paths", options.paths, "Directories for stores; default: the configuration's");
  auto* config =
      command->add_option("--config", options.required.config, "ds_config.json: its paths, budgets and engine");
  command->add_option("--aio", options.required.aio, "What spillway sweep --json wrote: put over the configuration")
      ->needs(config);
  auto* model = command->add_option("--model", options.required.model, "Directory of the model: what a run of it takes")
                    ->needs(config);
  command->add_option("--seq", options.required.sequence, "Tokens of a row, as in finetune")
      ->transform(terminal::in_range(1u, 1u << 24))
      ->capture_default_str()
      ->needs(model);
  auto* no_probe = command->add_flag("--no-probe", options.no_probe, "Leave out the probe, which writes to the drive");
  command->add_option("--probe-seconds", options.probe_seconds, "Time for each path's probe; four fifths are writing")
      ->transform(terminal::in_range(0.1, 3600.0))
      ->capture_default_str()
      ->excludes(no_probe);
  command->add_flag("--json", options.json, "Print it as JSON");
  const CLI::Validator number = terminal::in_range(1u, 1u << 16);
  command
      ->add_option_function<std::string>(
          "--ranks",
          [kept](const std::string& text) {
            kept->ranks = text;
            if (!text.empty()) std::from_chars(text.data(), text.data() + text.size(), kept->required.ranks);
          },
          "With --config: so many processes train by it on this machine. Without a number, under mpirun: what its "
          "processes do together, and nothing else")
      ->transform(
          CLI::Validator([number](std::string& text) { return text.empty() ? std::string() : number(text); }, ""))
      ->expected(0, 1)
      ->type_name("[N]");
  command->footer(
      "Example:\n  spillway doctor --config ds_config.json --model gpt2-medium\n\n"
      "Exit code: 0 all is well, 3 something makes training slower, 4 something breaks it, 1 an option or a file is "
      "wrong, 129, 130, 141 and 143 after SIGHUP, Ctrl-C, SIGPIPE and SIGTERM");
  command->callback([kept, &exit_code] {
    check_ranks_option(*kept);
    exit_code = Doctor(*kept).run();
  });
}

}  // namespace spillway::doctor
