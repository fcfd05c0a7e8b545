#include <rapidjson/prettywriter.h>
#include <rapidjson/stringbuffer.h>

#include <algorithm>

#include "tools/sweep/report.h"

namespace spillway::sweep {

// The keys are those that DeepSpeed's engine reads (deepspeed/runtime/swap_tensor/constants.py, 0.19), with its types;
// our own reader is strict about its section, so nothing but settings goes in.
std::string report_json(const SweepReport& report) {
  rapidjson::StringBuffer buffer;
  rapidjson::PrettyWriter<rapidjson::StringBuffer> json(buffer);
  json.SetIndent(' ', 2);
  json.SetFormatOptions(rapidjson::kFormatSingleLineArray);
  json.SetMaxDecimalPlaces(3);
  json.StartObject();
  json.Key("aio");
  json.StartObject();
  json.Key("block_size");
  json.Uint64(report.setting.block_bytes);
  json.Key("queue_depth");
  json.Uint(report.setting.depth);
  json.Key("intra_op_parallelism");
  json.Uint(1);
  json.Key("single_submit");
  json.Bool(false);
  json.Key("overlap_events");
  json.Bool(true);
  json.Key("use_gds");
  json.Bool(false);
  json.EndObject();
  json.Key("spillway");
  json.StartObject();
  json.Key("io_engine");
  json.String(name_of(report.way.engine));
  if (report.paths.size() > 1) {
    const std::vector<double> rates = mixed_rates(report);
    json.Key("nvme_paths");
    json.StartArray();
    for (std::size_t i = 0; i < rates.size(); ++i) {
      if (report.shares[i] > 0) json.String(report.paths[i].path.c_str());
    }
    json.EndArray();
    json.Key("nvme_rates");
    json.StartArray();
    for (std::size_t i = 0; i < rates.size(); ++i) {
      if (report.shares[i] > 0) json.Double(std::max(rates[i], 0.001));  // 0 is no rate
    }
    json.EndArray();
  }
  json.EndObject();
  json.EndObject();
  return buffer.GetString();
}

}  // namespace spillway::sweep
