// What else could be done with a model and a machine: the other placements, and what would make a step shorter. Each
// is planned and scheduled as the run itself.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "spillway/config.h"
#include "tools/plan/prediction.h"

namespace spillway::planning {

struct TierBytes {
  std::uint64_t hbm = 0, host = 0, nvme = 0;
};
TierBytes totals_of(const Plan& plan);

// A row of the table that DeepSpeed's estimators print, but planned.
struct PlacementRow {
  Placement states = Placement::kHbm, parameters = Placement::kHbm;
  std::string stages;   // of ZeRO, whose meaning it has
  bool chosen = false;  // the configuration's
  std::optional<TierBytes> bytes = {};
  double seconds = 0;
  std::string limit = {};    // the link that is busiest
  std::string refused = {};  // does not fit, and the smallest change that would let it; empty: it fits
  std::string needs = {};    // then, if that is more of one budget: its key in the section spillway
  std::uint64_t needed_bytes = 0;
};

// Something that makes a token cheaper.
struct Change {
  std::string what;                     // `16 GiB more host memory`
  double effect = 0;                    // of the time for a token: -0.21 is 21 % less
  double seconds = 0;                   // of a step then
  std::optional<TierBytes> bytes = {};  // that it takes then
};

struct Question {
  Config config;
  ModelShape shape;
  RunShape run;
  Rates rates;
  unsigned nodes = 1;
  bool has_drive = false;  // a path is known, though nothing may lie on it
};

struct Alternatives {
  std::vector<PlacementRow> table;
  std::vector<Change> changes;      // best first; none: nothing that was tried is of use
  std::uint64_t tile_elements = 0;  // of all of them; more than the run's where the model is very large
};

// At most `most` changes, each of at least 1 %.
Alternatives find_alternatives(const Question& question, const DescribedModel& described, std::size_t most);

const char* name_of(Placement placement);  // hbm, host, nvme

}  // namespace spillway::planning
