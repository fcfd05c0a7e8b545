// Everything that a sweep found out, and the forms in which it is told.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "tools/drive/endurance.h"
#include "tools/drive/sustained.h"
#include "tools/sweep/point.h"
#include "tools/sweep/preflight.h"
#include "tools/sweep/search.h"

namespace spillway::sweep {

struct SweepReport {
  MachineInfo machine;
  std::vector<PathInfo> paths;
  std::vector<WayInfo> ways;     // those that were tried
  std::size_t way_repeats = 0;   // of the samples of ways, and of paths, the latest so many were taken in turn
  std::uint64_t file_bytes = 0;  // of the test file on the first path
  bool exhaustive = false;
  std::uint32_t ranks = 1;  // that measured together: rates are of all of them
  Measurements measurements;

  std::uint32_t measured_path = 0;    // what was searched: 0, or kAllPaths when there are several
  Way searched_way;                   // the best one to be had, before the engines were compared
  std::vector<Candidate> candidates;  // the settings of the final rounds
  Choice choice;
  Setting setting;                    // the chosen one
  Way way;                            // the chosen one
  std::vector<std::uint32_t> shares;  // of the striped space, per path; 0: too slow to take part
  std::vector<double> first_rates;    // by which the shares were cut: per path, bytes per second
  std::optional<drive::Sustained> sustained;
  std::vector<std::string> endurance;  // one line per drive
  std::vector<std::string> notes;      // what went otherwise than wanted
  std::uint64_t written_bytes = 0, most_written_bytes = 0;
  double seconds = 0, parameters = 0;  // parameters: 0 when no model was named

  Point searched(const Setting& at, Work work) const { return {at, work, searched_way, measured_path}; }
  Summary chosen(Work work) const { return summary_of(measurements, {setting, work, way, measured_path}); }
};

// GB/s of each path alone, reads and writes mixed, at the chosen setting; where time ran out, at the first one.
std::vector<double> mixed_rates(const SweepReport& report);

// Which part of what is written striped each drive takes, at its first path; one that takes none is left out.
struct DriveShare {
  const PathInfo& facts;
  double share = 0;
};
std::vector<DriveShare> shares_of_drives(const SweepReport& report);

// Why the chosen setting is the one, in sentences of a line each.
std::vector<std::string> reasons(const SweepReport& report);
std::string sustained_text(const drive::Sustained& sustained);

// Tables, heat map and reasons.
std::string report_text(const SweepReport& report, bool colour);
std::string preflight_text(const SweepReport& report);

// A fragment of ds_config.json.
std::string report_json(const SweepReport& report);

// One self-contained page.
std::string report_html(const SweepReport& report);

// A fio command that does the same to the drive.
std::string fio_command(const SweepReport& report);
// The seconds that the drive needs for a step of `parameters` bf16 parameters that live on it.
double step_seconds(const SweepReport& report);

}  // namespace spillway::sweep
