// What can be said of a run in a few words, and of several in a table: rows that text and page share.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "spillway/stall.h"
#include "tools/report/steps.h"

namespace spillway::reporting {

struct Lowest {
  std::optional<double> loss = {};
  std::uint64_t at = 0;  // step
};

struct Summary {
  std::uint64_t first_step = 0, last_step = 0, steps = 0, made_again = 0, skipped = 0;
  double seconds = 0;
  std::optional<double> first_loss = {}, last_loss = {};  // the last: a median of the last tenth
  Lowest lowest = {}, lowest_held_out = {};
  std::optional<double> norm = {};                              // a median, as are those that follow
  double step_seconds = 0, fast_seconds = 0, slow_seconds = 0;  // and a tenth is faster, a tenth slower
  std::optional<double> tokens_per_second = {};
  double stalled = 0;  // shares of the time
  std::array<double, kStallNames.size()> stalled_by{};
  std::string link = {};                    // what was the slowest most often
  double link_share = 0, link_percent = 0;  // of the steps; of the step's time, where it was
  double read_bytes = 0, written_bytes = 0, up_bytes = 0, down_bytes = 0;  // a step
  double written_in_all = 0;
  double written_a_day() const { return seconds > 0 ? written_in_all / seconds * 86400 : 0; }
};

Summary summarize(const Run& run);

struct Row {
  std::string label;
  std::vector<std::string> cells;  // one for each run; empty: nothing to say
};

// `drive_life`: what may be written to the drive in all, in bytes; 0: not known.
std::vector<Row> rows_of(const std::vector<Run>& runs, double drive_life);
// What a reader must know beside the table, such as a line that was cut; a sentence each.
std::vector<std::string> notes_of(const std::vector<Run>& runs);

}  // namespace spillway::reporting
