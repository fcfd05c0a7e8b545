// The sweep itself: measures what the search asks for, inside its time and its bytes.
#pragma once

#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <vector>

#include "tools/sweep/report.h"

namespace spillway::sweep {

struct SweepOptions {
  std::vector<std::filesystem::path> paths;
  std::filesystem::path json, html;   // empty: none; `-`: stdout, and the words for people go to stderr
  std::uint64_t size_bytes = 0;       // of the test file on each path; 0: what suits the drive
  std::uint64_t sustained_bytes = 0;  // 0: no sustained writing
  double seconds = 60;
  double parameters = 0;
  bool exhaustive = false, allow_buffered = false;
  bool ranks = false;  // with all other processes that mpirun started
};

// 0, or what the signal that ended it makes of it (terminal/interrupt.h). Errors: spillway::Error.
int sweep(const SweepOptions& options);

}  // namespace spillway::sweep
