// A few seconds of writing and reading at full speed: the rates, and whether they hold.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "tools/doctor/run_requirements.h"
#include "tools/drive/drive.h"

namespace spillway::doctor {

struct ProbeInfo {
  double interval_seconds = 0;
  std::vector<double> rates = {};  // of the writes, bytes per second, one per interval
  double write_seconds = 0;
  std::uint64_t written_bytes = 0, file_bytes = 0;
  double write_rate = 0, read_rate = 0;                                               // bytes per second
  std::optional<double> celsius_before = {}, celsius_after = {}, celsius_limit = {};  // of the warmest drive
};

struct ProbeOptions {
  std::filesystem::path directory = {};
  double seconds = 5;                              // four fifths of it written, the rest read
  std::uint64_t most_bytes = 0;                    // of the file, which is written again and again
  const RunRequirements* required = nullptr;       // block size, depth and engine
  std::function<bool(double seconds)> go_on = {};  // false ends the probe early; called at least ten times a second
};

// The file for it: a quarter of what is free, at most 8 GiB, and no more than a file may have. 0: too little to measure
// anything with.
std::uint64_t probe_bytes(std::uint64_t free_bytes, std::uint64_t file_limit = UINT64_MAX);

// Nothing when it was ended early. Throws spillway::Error when a transfer fails.
std::optional<ProbeInfo> probe_drive(const ProbeOptions& options);

// Rates of the first and of the last second (of short probes: the first and the last fifth); 0 without any.
struct Ends {
  double first = 0, last = 0, seconds = 0;
};
Ends ends_of(const ProbeInfo& probe);

}  // namespace spillway::doctor
