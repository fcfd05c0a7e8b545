// What the links and the device of the planned machine do, and where each figure comes from.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "spillway/config.h"
#include "src/plan/machine_rates.h"
#include "tools/plan/description.h"

namespace spillway::planning {

// Of compute, by what a visit does: operations per second.
struct ComputeRates {
  double forward = 0, backward = 0, head = 0;
  double push_seconds = 0;  // of an element of the embedding's gradient, until it is handed over
};

// Given on the command line; bytes per second, device: operations per second.
struct GivenRates {
  std::optional<double> device = {}, hbm = {}, h2d = {}, d2h = {}, read = {}, write = {}, mixed = {}, memory = {};
  std::optional<double> network = {}, network_seconds = {};  // of a rank, each way; of a collective
  std::optional<unsigned> cores = {};
};

// Found on this machine; nothing where it was not looked for.
struct MeasuredRates {
  std::optional<MachineRates> links = {};  // nvme_* are 0 where only the machine was looked at
  std::optional<ComputeRates> compute = {};
  std::vector<std::string> facts = {};  // what was done for it, a sentence each
};

struct RateLine {
  std::string key;     // for JSON
  std::string name;    // for people
  double value = 0;    // bytes or operations per second, seconds, or a number
  std::string unit;    // "B/s", "FLOP/s", "s", ""
  std::string source;  // `--read-rate`, `measured here`, `typical: …`
};

struct Rates {
  MachineRates links;
  double device_update_seconds = 0;  // of the optimizer per element, where everything stays in HBM
  ComputeRates compute;
  std::vector<RateLine> lines;
};

// What is given counts before what was measured, that before what is typical. `cores`: the compute threads that a run
// has on this machine.
Rates choose_rates(const Config& config, DeviceKind device, const GivenRates& given, const MeasuredRates& measured,
                   unsigned cores, const RankCounts& ranks = {});

// Of every visit of the model. `kept`: by block, whether its insides stay for backward.
std::vector<double> visit_seconds(const DescribedModel& described, const ComputeRates& rates,
                                  const std::vector<bool>& kept);

}  // namespace spillway::planning
