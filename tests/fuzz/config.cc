// ds_config.json; after a zero byte, which no such text holds, the file that goes over it (`spillway sweep --json`).
#include "spillway/config.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <set>

#include "src/config/reader.h"
#include "src/formats/json_tree.h"
#include "tests/fuzz/targets.h"
#include "tools/config/report.h"

namespace spillway::fuzz {
namespace {

AutoValues known_values() {
  AutoValues values;
  values.hidden_size = 768;
  values.total_steps = 1000;
  return values;
}

EffectiveConfig load(Bytes input) {
  const std::size_t zero = text_of(input).find('\0');
  if (zero == std::string_view::npos) {
    const ConfigText texts[] = {{text_of(input), "ds_config.json"}};
    return read_config(texts, known_values());
  }
  const auto base = scratch_file("ds_config.json", input.first(zero));
  return read_config_files(base, scratch_file("aio.json", input.subspan(zero + 1)), known_values());
}

// What is printed of a configuration is one itself, and says the same.
void check_report(const EffectiveConfig& effective) {
  SPILLWAY_CHECK(!config::report_text(effective).empty(), "there is something to say");
  JsonValue report;
  const std::string text = config::report_json(effective);
  SPILLWAY_CHECK(!parse_json(text, {}, report), "a report is JSON");
  const JsonValue* printed = report.member("config");
  const ConfigText texts[] = {
      {std::string_view(text).substr(printed->offset, printed->end - printed->offset), "again"}};
  const EffectiveConfig again = read_config(texts, {});
  std::map<std::string_view, std::string_view> values;
  for (const EffectiveKey& key : effective.keys) values[key.key->path] = key.value;
  for (const EffectiveKey& key : again.keys) {
    SPILLWAY_CHECK(values.at(key.key->path) == key.value, "a printed configuration means the same");
  }
}

void check_paths(const Config& config) {
  const bool uses_nvme = config.states == Placement::kNvme || config.parameters == Placement::kNvme;
  SPILLWAY_CHECK(!uses_nvme || !config.nvme_paths.empty(), "what goes to NVMe has a path");
  SPILLWAY_CHECK(config.nvme_paths.size() <= 16, "a store has 16 paths at most");
  SPILLWAY_CHECK(config.io_depth * config.nvme_paths.size() <= 4096, "the queue of all paths has a depth");
  std::set<std::string> names;
  for (const auto& path : config.nvme_paths) {
    SPILLWAY_CHECK(!path.empty() && path.string().find('\0') == std::string::npos, "the kernel sees all of a path");
    SPILLWAY_CHECK(names.insert(path.string()).second, "no path is named twice");
  }
  SPILLWAY_CHECK(
      config.nvme_rates.empty() || config.nvme_rates.size() == std::max<std::size_t>(1, config.nvme_paths.size()),
      "every path has a rate, or none");
  SPILLWAY_CHECK(std::ranges::all_of(config.nvme_rates, [](double rate) { return rate > 0 && std::isfinite(rate); }),
                 "rates are above 0");
}

void check_numbers(const Config& config) {
  SPILLWAY_CHECK(config.micro_batch > 0 && config.gradient_accumulation > 0, "a step has rows");
  SPILLWAY_CHECK(config.io_block_bytes >= 4096 && config.io_block_bytes % 4096 == 0, "requests are aligned");
  SPILLWAY_CHECK(config.io_depth >= 1 && config.io_depth <= 4096, "the queue has a depth");
  SPILLWAY_CHECK(config.tile_elements >= 1024 && config.tile_elements % 1024 == 0, "tiles are whole units");
  SPILLWAY_CHECK(config.threads <= 4096, "threads are limited");
  const OptimizerConfig& optimizer = config.optimizer;
  for (const double share : {optimizer.beta1, optimizer.beta2, optimizer.momentum}) {
    SPILLWAY_CHECK(share >= 0 && share < 1, "decay rates are below 1");
  }
  for (const double number : {optimizer.learning_rate, optimizer.epsilon, optimizer.weight_decay,
                              config.gradient_clipping, optimizer.dampening}) {
    SPILLWAY_CHECK(number >= 0 && std::isfinite(number), "hyper-parameters are finite");
  }
  for (const std::uint64_t step : {1ull, 2ull, 3ull, 1000ull, 1ull << 40, ~0ull}) {
    const double rate = learning_rate(config, step);
    SPILLWAY_CHECK(rate >= 0 && std::isfinite(rate), "every step has a learning rate");
  }
  for (const ParameterGroup& group : config.parameter_groups) {
    SPILLWAY_CHECK(!group.parameters.empty() && (group.learning_rate || group.weight_decay), "a group says something");
  }
}

}  // namespace

void config(Bytes input) {
  const auto effective = accepted([&] { return load(input); });
  if (!effective) return;
  check_paths(effective->config);
  check_numbers(effective->config);
  check_report(*effective);
}

}  // namespace spillway::fuzz
