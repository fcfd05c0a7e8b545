#include "tools/plan/rates.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>

#include "kernels/devices.h"
#include "src/plan/state_sections.h"
#include "swap/tile_place.h"

namespace spillway::planning {
namespace {

// What machines of these years have; each is printed as typical wherever it is used.
constexpr double kGpuFlops = 120e12;  // 40 % of the bf16 peak of an A100
constexpr double kCoreFlops = 50e9;   // of a core with AVX-512, in a step
constexpr double kPcieRate = 20e9;    // PCIe 4.0 × 16
constexpr double kCopyRate = 8e9;     // of the emulated device, which a core copies for
constexpr double kDriveRead = 6e9, kDriveWrite = 4e9;
constexpr double kMemoryRate = 40e9;       // of an update, which reads and writes
constexpr double kHbmRate = 1.2e12;        // of an update on a GPU: 60 % of what an A100's memory moves
constexpr double kChecksumRate = 15e9;     // of a core
constexpr double kNetworkRate = 12.5e9;    // 100 Gbit/s
constexpr double kNetworkSeconds = 20e-6;  // of a collective
constexpr double kSyncSeconds = 5e-3;      // of a commit on a drive without power-loss protection

// Bytes that the optimizer moves for an element: weight and states read and written, gradient read.
double update_bytes(const Config& config) {
  const TileShape shape{
      .count = 1 << 20, .type = config.weights, .optimizer = config.optimizer.kind, .states = reduced_states(config)};
  const double weight = static_cast<double>(payload_bytes(shape, Part::kWeights));
  const double states = static_cast<double>(payload_bytes(shape, Part::kStates));
  return (3 * weight + 2 * states) / static_cast<double>(shape.count);
}

class Chooser {
 public:
  Chooser(const GivenRates& given, const MeasuredRates& measured) : given_(given), measured_(measured) {}

  struct Line {
    const char *key, *name, *unit, *option;
  };
  double choose(const Line& line, std::optional<double> given, double measured, double typical,
                const std::string& why = "") {
    const double value = given ? *given : measured > 0 ? measured : typical;
    const std::string source = given ? line.option : measured > 0 ? "measured here" : why.empty() ? "typical" : why;
    rates.lines.push_back({line.key, line.name, value, line.unit, source});
    return value;
  }

  void choose_links(const Config& config, DeviceKind device, unsigned cores) {
    const MachineRates found = measured_.links.value_or(MachineRates{});
    MachineRates& links = rates.links;
    links.device_on_cores = device_of(device).on_cpu;
    links.cores = given_.cores.value_or(cores);
    rates.lines.push_back(
        {"cores", "compute threads", static_cast<double>(links.cores), "", given_.cores ? "--cores" : "this machine"});
    const double copies = links.device_on_cores ? kCopyRate : kPcieRate;
    links.h2d = choose({"h2d", "host to device", "B/s", "--h2d-rate"}, given_.h2d, found.h2d, copies);
    const auto down = given_.d2h ? given_.d2h : given_.h2d;
    links.d2h =
        choose({"d2h", "device to host", "B/s", given_.d2h ? "--d2h-rate" : "--h2d-rate"}, down, found.d2h, copies);
    const double bytes = update_bytes(config);
    const double memory = found.update_seconds > 0 ? bytes / found.update_seconds : 0;
    links.update_seconds = bytes / choose({"memory", "optimizer, memory moved", "B/s", "--memory-rate"}, given_.memory,
                                          memory, kMemoryRate);
    rates.device_update_seconds = links.update_seconds;
    if (!links.device_on_cores) {
      rates.device_update_seconds =
          bytes / choose({"hbm", "optimizer, HBM moved", "B/s", "--hbm-rate"}, given_.hbm, 0, kHbmRate);
    }
    links.checksum = choose({"checksum", "checksums, a core", "B/s", ""}, {}, found.checksum, kChecksumRate);
    choose_drives(config, found);
  }

  void choose_network(const RankCounts& ranks) {
    if (ranks.all == 1) return;
    MachineRates& links = rates.links;
    links.network = choose({"network", "network, each way", "B/s", "--network"}, given_.network, 0, kNetworkRate,
                           "typical: 100 Gbit/s a rank");
    links.network_seconds =
        choose({"network_call", "network, a call", "s", "--network"}, given_.network_seconds, 0, kNetworkSeconds);
  }

  void choose_compute(DeviceKind device) {
    const ComputeRates found = measured_.compute.value_or(ComputeRates{});
    const bool host = device_of(device).on_cpu;
    const double typical = host ? kCoreFlops * rates.links.cores : kGpuFlops;
    const std::string why = host ? fmt::format("typical: {:.0f} GFLOP/s a core", kCoreFlops / 1e9)
                                 : std::string("typical: 40 % of an A100");
    const auto of = [&](const char* key, const char* name, double measured) {
      return choose({key, name, "FLOP/s", "--device-rate"}, given_.device, measured, typical, why);
    };
    rates.compute.forward = of("forward", "compute, forward", found.forward);
    rates.compute.backward = of("backward", "compute, backward", found.backward);
    rates.compute.head = of("head", "compute, head", found.head);
    rates.compute.push_seconds = given_.device ? 0 : found.push_seconds;
  }

  Rates rates;

 private:
  // Where none is named, too: other placements than the configuration's are planned.
  void choose_drives(const Config& config, const MachineRates& found) {
    MachineRates& links = rates.links;
    const auto drives = static_cast<double>(std::max<std::size_t>(1, config.nvme_paths.size()));
    // Of a sweep; each path's, reads and writes mixed, GB/s.
    const double swept = 1e9 * std::accumulate(config.nvme_rates.begin(), config.nvme_rates.end(), 0.0);
    const std::string nameless = config.nvme_paths.empty() ? "typical of a drive: none is named" : "";
    const std::string why = swept > 0 ? "nvme_rates of the configuration" : nameless;
    const auto typical = [&](double rate) { return swept > 0 ? swept : drives * rate; };
    links.nvme_read = choose({"nvme_read", "nvme read", "B/s", "--read-rate"}, given_.read, found.nvme_read,
                             typical(kDriveRead), why);
    links.nvme_write = choose({"nvme_write", "nvme write", "B/s", "--write-rate"}, given_.write, found.nvme_write,
                              typical(kDriveWrite), why);
    const bool given = given_.read || given_.write;
    links.nvme_mixed =
        choose({"nvme_mixed", "nvme both at once", "B/s", "--mixed-rate"}, given_.mixed, given ? 0 : found.nvme_mixed,
               swept > 0 && !given ? swept : (links.nvme_read + links.nvme_write) / 2,
               swept > 0 && !given ? why : "half of read and write together");
    links.sync_seconds = choose({"sync", "syncs of a commit", "s", ""}, {}, found.sync_seconds, kSyncSeconds, nameless);
  }

  const GivenRates& given_;
  const MeasuredRates& measured_;
};

}  // namespace

Rates choose_rates(const Config& config, DeviceKind device, const GivenRates& given, const MeasuredRates& measured,
                   unsigned cores, const RankCounts& ranks) {
  Chooser chooser(given, measured);
  chooser.choose_links(config, device, cores);
  chooser.choose_network(ranks);
  chooser.choose_compute(device);
  return std::move(chooser.rates);
}

std::vector<double> visit_seconds(const DescribedModel& described, const ComputeRates& rates,
                                  const std::vector<bool>& kept) {
  std::vector<double> seconds;
  seconds.reserve(described.work.size());
  for (std::size_t v = 0; v < described.work.size(); ++v) {
    const VisitWork& work = described.work[v];
    switch (work.work) {
      case Work::kEmbed: seconds.push_back(0); break;
      case Work::kForward: seconds.push_back(work.flops / rates.forward); break;
      case Work::kHead: seconds.push_back(work.flops / rates.head); break;
      case Work::kBackward: {
        const double again = kept[described.model.visits[v].block] ? 0 : work.again_flops / rates.forward;
        seconds.push_back(work.flops / rates.backward + again);
        break;
      }
      case Work::kEmbedBackward: seconds.push_back(work.pushed * rates.push_seconds); break;
    }
  }
  return seconds;
}

}  // namespace spillway::planning
