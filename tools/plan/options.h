// The command line of `spillway plan`, as it was typed and as it is meant.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "spillway/config.h"
#include "tools/plan/description.h"
#include "tools/plan/rates.h"

namespace spillway::planning {

struct TypedOptions {
  std::filesystem::path config = {}, aio = {}, model = {}, html = {};
  std::string parameters = {}, hbm = {}, host = {};
  std::vector<std::string> nvme = {};  // PATH or PATH=SIZE
  std::string device = {}, loop = {};
  std::string device_rate = {}, hbm_rate = {}, h2d_rate = {}, d2h_rate = {}, read_rate = {}, write_rate = {},
              mixed_rate = {};
  std::string memory_rate = {}, cores = {}, drive_life = {}, sequence = "256";
  std::string ranks = "1", ranks_per_host = {}, network = {};
  std::optional<bool> probe = {};  // not set: where the drives of the run are
  std::optional<double> probe_seconds = {};
  bool json = false;
};

struct PlanOptions {
  Config config = {};  // with the budgets and paths of the command line put over those of the file
  std::vector<std::string> python_keys = {};  // of the file: what Python's engine does by them is not planned
  std::filesystem::path model = {}, html = {};
  double parameters = 0;  // in place of a model
  std::string name = {};  // of the model, as it was typed
  std::uint32_t sequence = 256;
  std::optional<Loop> loop = {};  // not set: finetune's, for what it trains
  RankCounts ranks = {};
  GivenRates rates = {};
  std::optional<double> drive_life = {};  // bytes that may be written to each drive
  std::optional<bool> probe = {};
  double probe_seconds = 1;  // of the drives
  bool json = false;
};

// Everything that is wrong, a line each in the form of every error here; `options` is of use when there is none.
struct UnderstoodOptions {
  PlanOptions options = {};
  std::vector<std::string> problems = {};
};
UnderstoodOptions understand(const TypedOptions& typed);

}  // namespace spillway::planning
