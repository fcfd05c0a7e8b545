#include <algorithm>
#include <cmath>

#include "tools/sweep/report.h"
#include "tools/terminal/json.h"

namespace spillway::sweep {

// The keys are those that DeepSpeed's engine reads (deepspeed/runtime/swap_tensor/constants.py, 0.19), with its types;
// our own reader is strict about its section, so nothing but settings goes in.
std::string report_json(const SweepReport& report) {
  terminal::Json json;
  json.put("aio", [&] {
    json.put("block_size", report.setting.block_bytes);
    json.put("queue_depth", report.setting.depth);
    json.put("intra_op_parallelism", 1);
    json.put("single_submit", false);
    json.put("overlap_events", true);
    json.put("use_gds", false);
  });
  json.put("spillway", [&] {
    json.put("io_engine", name_of(report.way.engine));
    if (report.paths.size() < 2) return;
    const std::vector<double> mixed = mixed_rates(report);
    std::vector<std::filesystem::path> paths;
    std::vector<double> rates;
    for (std::size_t i = 0; i < mixed.size(); ++i) {
      if (report.shares[i] == 0) continue;
      paths.push_back(report.paths[i].path);
      rates.push_back(std::max(std::round(1000 * mixed[i]) / 1000, 0.001));  // 0 is no rate
    }
    json.put("nvme_paths", paths);
    json.put("nvme_rates", rates);
  });
  return json.text();
}

}  // namespace spillway::sweep
