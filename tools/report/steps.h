// The steps of a run as `spillway finetune --log` appends them, one JSON object a line, or a PyTorch loop in its place.
#pragma once

#include <array>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "spillway/stall.h"

namespace spillway::reporting {

struct Step {
  std::uint64_t step = 0;
  double seconds = 0;
  std::optional<double> loss = {}, norm = {}, learning_rate = {};  // empty: not there, or not finite
  std::optional<double> held_out_loss = {};                        // of the evaluation after it
  std::uint64_t tokens = 0;
  std::uint64_t read_bytes = 0, written_bytes = 0, up_bytes = 0, down_bytes = 0;  // NVMe's, then to and from the device
  double stall_seconds = 0;
  std::array<double, kStallNames.size()> stalls{};  // the same by cause
  std::string link = {};
  double link_percent = 0;
  bool skipped = false;  // fp16: a gradient overflowed
};

struct Run {
  std::string name;         // of the file, as it was typed
  std::vector<Step> steps;  // by number; of one that was made again after a crash the last
  std::uint64_t made_again = 0;
  double written_bytes = 0;  // of all lines: the drive wore with those that were made again, too
  double seconds = 0;        // likewise
  bool cut = false;          // the last line was not finished, and does not count
};

// Throws an Error with file and line for what is no such log. Keys that it does not know are passed over.
Run read_run(const std::filesystem::path& file);

}  // namespace spillway::reporting
