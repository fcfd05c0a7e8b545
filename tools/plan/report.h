// Everything that is known of a run before it begins, and the forms in which it is told.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "spillway/config.h"
#include "tools/plan/alternatives.h"
#include "tools/plan/prediction.h"

namespace spillway::planning {

struct DriveLife {
  double bytes_per_day = 0;               // written, while the run goes on
  std::optional<double> life_bytes = {};  // that may still be written to all drives of the run
  std::string source = {};                // where that comes from
  std::optional<double> days() const;
};

struct Report {
  std::string model = {};  // as it was named: a directory, or `7B`
  ModelShape shape = {};
  RunShape run = {};
  Config config = {};
  std::string device = {};                   // in words
  std::uint64_t parameters = 0, tokens = 0;  // tokens: of a step
  std::vector<std::string> estimates = {};   // what is not exact; none: everything is
  Rates rates = {};
  std::vector<std::string> measured = {};  // what was done to find rates
  std::optional<Prediction> prediction = {};
  std::vector<std::string> facts = {};  // of the plan, as the engine says them
  std::string refused = {};             // why there is no prediction
  std::optional<DriveLife> life = {};   // with a store
  Alternatives alternatives = {};
  double seconds = 0;  // that all of this took
};

// What several ranks take together, of the plan of one, which has most.
struct RanksMemory {
  Placement tier;
  std::uint64_t of_a_rank = 0, of_a_host = 0, of_all = 0;
};
std::vector<RanksMemory> ranks_memory(const Report& report);
std::string network_text(const ScheduleTraffic& traffic);

std::string report_text(const Report& report, bool colour);
std::string report_json(const Report& report);
// One self-contained page.
std::string report_html(const Report& report);

// The words that the forms share.
std::string title_of(const Report& report);    // `gpt2, 124439808 parameters: …`
std::string commits_of(const Report& report);  // how often a step is durable; empty: no store
std::string life_of(const DriveLife& life);
std::string rate_text(const RateLine& line);
std::string seconds_text(double seconds);
std::string effect_text(const Change& change);  // `-21 % a token, 0.70 s a step`
std::string place_text(const PlacementRow& row);
std::string refusal_of(const PlacementRow& row);
// What was made coarser, for very large models; a sentence each.
std::vector<std::string> coarse_summary(const Report& report);
std::string limit_text(const Prediction& made);

// How busy a lane of the schedule is over a step, in so many equal parts of it; 0 to 1.
std::vector<double> busy_parts(const Schedule& schedule, Lane lane, std::size_t parts);
const char* name_of(Lane lane);

}  // namespace spillway::planning
