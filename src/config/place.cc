#include "src/config/place.h"

namespace spillway {

std::string first_path(const Config& config) {
  return config.nvme_paths.empty() ? "" : json_string(config.nvme_paths.front().native());
}

std::string all_paths(const Config& config) {
  std::vector<std::string> paths;
  for (const auto& path : config.nvme_paths) paths.push_back(path.native());
  return paths.empty() ? "" : json_of(paths);
}

std::string all_groups(const Config& config) {
  if (config.parameter_groups.empty()) return "";
  std::string all;
  for (const ParameterGroup& group : config.parameter_groups) {
    all += all.empty() ? "{" : ", {";
    all += "\"parameters\": " + json_of(group.parameters);
    if (group.learning_rate) all += ", \"lr\": " + json_of(*group.learning_rate);
    if (group.weight_decay) all += ", \"weight_decay\": " + json_of(*group.weight_decay);
    all += "}";
  }
  return "[" + all + "]";
}

std::string pair_of(double first, double second) { return fmt::format("[{}, {}]", first, second); }

}  // namespace spillway
