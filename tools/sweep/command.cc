#include "tools/sweep/command.h"

#include <fmt/format.h>

#include <cmath>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>

#include "spillway/units.h"
#include "tools/sweep/sweep.h"

namespace spillway::sweep {
namespace {

[[noreturn]] void refuse(const char* option, const std::string& text, const char* wanted) {
  throw CLI::ValidationError(option, fmt::format("{} is not {}", text, wanted));
}

// Splits `7.5B` into 7.5 and what stands behind; NaN when it does not begin with a number.
std::pair<double, std::string> number_and_unit(const std::string& text) {
  try {
    std::size_t used = 0;
    const double value = std::stod(text, &used);
    return {value, text.substr(used)};
  } catch (const std::logic_error&) {
    return {NAN, ""};
  }
}

// 7e9, 7B or 350M.
double parameters_of(const std::string& text) {
  const auto [value, unit] = number_and_unit(text);
  const double factor = unit.empty() ? 1 : unit == "M" || unit == "m" ? 1e6 : unit == "B" || unit == "b" ? 1e9 : 0;
  if (!(value * factor >= 1 && value * factor < 1e18)) refuse("--params", text, "a number such as 7e9, 7B or 350M");
  return value * factor;
}

std::uint64_t gib_of(const std::string& text) {
  const auto [value, unit] = number_and_unit(text);
  const bool fine = (unit.empty() || unit == "GiB") && value >= 0.01 && value <= 1e6;
  if (!fine) refuse("--sustained", text, "a number of GiB from 0.01 to 1e6");
  return align_up(static_cast<std::uint64_t>(value * static_cast<double>(kGiB)), 16 * kMiB);
}

}  // namespace

void add_command(CLI::App& program, int& exit_code) {
  const auto kept = std::make_shared<SweepOptions>();
  SweepOptions& options = *kept;
  auto* command = program.add_subcommand("sweep", "Find a drive's best block size, queue depth and engine");
  command->add_option("paths", options.paths, "Directories, one per drive")->required();
  command->add_option("--size", options.size_bytes, "Size of the test file on each path, such as 4GiB")
      ->transform(CLI::AsSizeValue(false));
  command->add_option("--seconds", options.seconds, "Time for everything but --sustained and --exhaustive")
      ->check(CLI::Range(1.0, 86400.0))
      ->capture_default_str();
  command->add_option("--json", options.json, "Write the settings for ds_config.json there; - is stdout");
  command->add_option("--report", options.html, "Write a page with charts there");
  command->add_flag("--exhaustive", options.exhaustive, "Measure every block size and depth; takes minutes");
  command->add_option_function<std::string>(
      "--sustained", [&options](const std::string& text) { options.sustained_bytes = gib_of(text); },
      "Write this many GiB at full speed, to see a drive's cache run out");
  command->add_option_function<std::string>(
      "--params", [&options](const std::string& text) { options.parameters = parameters_of(text); },
      "Parameters of a model, such as 7B: the step time that the drive allows");
  command->add_flag("--allow-buffered", options.allow_buffered, "Measure where there is no direct I/O, or no drive");
  command->footer("Example:\n  spillway sweep /mnt/nvme --json aio.json --report sweep.html --params 7B");
  command->callback([kept, &exit_code] { exit_code = sweep(*kept); });
}

}  // namespace spillway::sweep
