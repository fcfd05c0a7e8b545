#include "tools/terminal/commands.h"

#include <fmt/format.h>

#include <memory>
#include <string>

#include "spillway/units.h"
#include "tools/sweep/sweep.h"
#include "tools/terminal/amount.h"
#include "tools/terminal/number_option.h"

namespace spillway::sweep {
namespace {

[[noreturn]] void refuse(const char* option, const std::string& text, const char* wanted) {
  throw CLI::ValidationError(option, fmt::format("{} is not {}", text, wanted));
}

// 7e9, 7B or 350M.
double parameters_of(const std::string& text) {
  const double count = terminal::count_of_text(text).value_or(0);
  if (!(count >= 1 && count < 1e18)) refuse("--params", text, "a number such as 7e9, 7B or 350M");
  return count;
}

// GiB, unless a unit says otherwise.
std::uint64_t sustained_bytes_of(const std::string& text) {
  const auto gib = terminal::number_of_text(text);
  const auto bytes = gib ? *gib * static_cast<double>(kGiB) : terminal::size_of_text(text).value_or(0);
  const bool fine = bytes >= 0.01 * static_cast<double>(kGiB) && bytes <= 1e6 * static_cast<double>(kGiB);
  if (!fine) refuse("--sustained", text, "a number of GiB from 0.01 to 1e6, or a size such as 200GB");
  return align_up(static_cast<std::uint64_t>(bytes), 16 * kMiB);
}

}  // namespace

void add_command(CLI::App& program, int& exit_code) {
  const auto kept = std::make_shared<SweepOptions>();
  SweepOptions& options = *kept;
  auto* command = program.add_subcommand("sweep", "Find a drive's best block size, queue depth and engine");
  command->add_option("paths", options.paths, "Directories, one per drive")->required();
  command->add_option("--size", options.size_bytes, "Size of the test file on each path, such as 4GiB")
      ->transform(terminal::as_size());
  command->add_option("--seconds", options.seconds, "Time for everything but --sustained and --exhaustive")
      ->transform(terminal::in_range(1.0, 86400.0))
      ->capture_default_str();
  command->add_option("--json", options.json, "Write the settings for ds_config.json there; - is stdout");
  command->add_option("--report", options.html, "Write a page with charts there");
  command->add_flag("--exhaustive", options.exhaustive, "Measure every block size and depth; takes minutes");
  command
      ->add_option_function<std::string>(
          "--sustained", [&options](const std::string& text) { options.sustained_bytes = sustained_bytes_of(text); },
          "Write this many GiB at full speed, to see a drive's cache run out")
      ->type_name("SIZE");
  command
      ->add_option_function<std::string>(
          "--params", [&options](const std::string& text) { options.parameters = parameters_of(text); },
          "Parameters of a model, such as 7B: the step time that the drive allows")
      ->type_name("COUNT");
  command->add_flag("--allow-buffered", options.allow_buffered, "Measure where there is no direct I/O, or no drive");
  command->add_flag("--ranks", options.ranks, "With mpirun before it: all ranks use the drive at the same time");
  command->footer("Example:\n  spillway sweep /mnt/nvme --json aio.json --report sweep.html --params 7B");
  command->callback([kept, &exit_code] { exit_code = sweep(*kept); });
}

}  // namespace spillway::sweep
