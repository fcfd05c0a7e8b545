#include "tools/plan/answer.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>

#include "kernels/devices.h"
#include "kernels/thread_shares.h"
#include "spillway/error.h"
#include "src/plan/plan_summary.h"
#include "tools/drive/endurance.h"
#include "tools/plan/measure.h"
#include "tools/terminal/remedies.h"

namespace spillway::planning {
namespace {

constexpr std::size_t kMostChanges = 6;
constexpr double kTypicalLife = 600;  // times its size that a consumer drive of these years may be written

std::string device_text(const ChosenDevice& device, unsigned threads) {
  const DeviceType& type = *device.type;
  if (!type.on_cpu) return std::string(type.name) + (device.here() ? "" : ", which this machine does not have");
  std::string text = fmt::format("{}: {}, {} compute threads", type.name, type.hbm, threads);
  for (const auto& [other, why] : device.missing)
    text += fmt::format("; --device {} plans for a GPU ({})", other->name, why);
  return text;
}

bool drives_are_here(const Config& config) {
  return !config.nvme_paths.empty() && std::ranges::all_of(config.nvme_paths, [](const std::filesystem::path& path) {
    std::error_code ignored;
    return std::filesystem::is_directory(path, ignored);
  });
}

std::vector<std::string> disks_here(const std::filesystem::path& path) {
  std::error_code ignored;
  if (!std::filesystem::is_directory(path, ignored)) return {};
  const std::string device = drive::drive_of(drive::mount_of(path)).name;
  return device.empty() ? std::vector<std::string>{} : drive::disks_below(device);
}

// Of paths on one drive the first alone, so that none is counted twice; `said` hears of the others.
Config with_each_drive_once(const Config& config, std::vector<std::string>& said) {
  if (config.nvme_paths.size() < 2) return config;
  Config once = config;
  once.nvme_paths.clear();
  once.nvme_rates.clear();
  std::vector<std::vector<std::string>> disks;  // below each path of `once`
  for (std::size_t i = 0; i < config.nvme_paths.size(); ++i) {
    const std::filesystem::path& path = config.nvme_paths[i];
    const std::vector<std::string> below = disks_here(path);
    const auto shared = [&](const auto& others) { return std::ranges::find_first_of(below, others); };
    const auto same = std::ranges::find_if(disks, [&](const auto& others) { return shared(others) != below.end(); });
    if (same != disks.end()) {
      said.push_back(fmt::format("{} and {} are on the same drive, {}, which counts once",
                                 once.nvme_paths[static_cast<std::size_t>(same - disks.begin())].string(),
                                 path.string(), *shared(*same)));
      continue;
    }
    disks.push_back(below);
    once.nvme_paths.push_back(path);
    if (i < config.nvme_rates.size()) once.nvme_rates.push_back(config.nvme_rates[i]);
  }
  return once;
}

MeasuredRates find_rates(const PlanOptions& options, const ModelShape& shape, const ChosenDevice& device) {
  const Config& config = options.config;
  const GivenRates& given = options.rates;
  const bool here = drives_are_here(config);
  const bool drives = here && !(given.read && given.write);
  const bool wanted = !given.device || drives || (!given.h2d && !given.memory);
  if (!options.probe.value_or(device.here() && here && wanted)) return {};
  if (!device.here()) {
    throw Error(Code::kUnsupported, {.object = "--probe",
                                     .happened = "the run is planned for a device that this machine does not have",
                                     .errno_value = 0,
                                     .hint = "leave it out, or plan for --device host"});
  }
  try {
    return measure(config, shape, device.kind(),
                   {.drives = drives,
                    .drive_seconds = options.probe_seconds,
                    .compute = !given.device,
                    .sequence = options.sequence});
  } catch (const Error& error) {
    if (options.probe) throw;
    MeasuredRates none;
    none.facts.push_back(fmt::format("nothing was measured: {}", terminal::message_of(error)));
    return none;
  }
}

// Bytes that may still be written to the drives of the run, each of which `config` names once.
void find_life(const PlanOptions& options, const Config& config, DriveLife& life) {
  const auto drives = static_cast<double>(config.nvme_paths.size());
  if (options.drive_life) {
    life.life_bytes = drives * *options.drive_life;
    life.source = "--drive-life";
    return;
  }
  double left = 0, capacity = 0;
  bool told = true;
  for (const auto& path : config.nvme_paths) {
    const drive::DriveInfo drive =
        drives_are_here(config) ? drive::drive_of(drive::mount_of(path)) : drive::DriveInfo{};
    const auto endurance = drive::read_endurance(drive).endurance;
    told &= endurance && endurance->percent_used > 0 && endurance->percent_used < 100;
    if (told) left += endurance->written_bytes / endurance->percent_used * (100 - endurance->percent_used);
    capacity += static_cast<double>(drive.bytes);
  }
  if (told) {
    life.life_bytes = left;
    life.source = "what the drive says is left of it";
    return;
  }
  if (capacity == 0) capacity = static_cast<double>(config.nvme_bytes.value_or(0));
  if (capacity > 0) life.life_bytes = kTypicalLife * capacity;
  life.source = capacity > 0
                    ? fmt::format("typical: {:.0f} times the drive's size; --drive-life says better", kTypicalLife)
                    : "--drive-life says it";
}

// The fastest, as the end of a refusal; nothing when none does. A drive that is not there is no advice.
std::string placement_that_fits(const std::vector<PlacementRow>& table, bool has_drive) {
  const PlacementRow* best = nullptr;
  for (const PlacementRow& row : table) {
    const bool drive = row.states == Placement::kNvme || row.parameters == Placement::kNvme;
    if (!row.refused.empty() || (drive && !has_drive)) continue;
    if (!best || row.seconds < best->seconds) best = &row;
  }
  if (!best) return "";
  const auto device = [](Placement placement) {
    return placement == Placement::kHbm ? "none" : placement == Placement::kHost ? "cpu" : "nvme";
  };
  return fmt::format("; or {}offload_optimizer to \"{}\" and offload_param to \"{}\", which fits",
                     best->parameters == Placement::kHbm ? "" : "stage to 3, ", device(best->states),
                     device(best->parameters));
}

}  // namespace

Report answer(PlanOptions options) {
  const auto start = std::chrono::steady_clock::now();
  const ChosenDevice device = choose_device(options.config.device);
  // Ranks of a device on the CPU divide the cores (share_host), and a rank's working memory goes by the threads it has.
  const bool divided = device.type->on_cpu;
  const std::vector<ThreadShare> shares =
      share_threads_among(divided ? options.ranks.on_a_host : 1, options.config.threads);
  const unsigned threads = options.config.threads = threads_of(shares);

  Report report{.model = options.name,
                .config = options.config,
                .device = device_text(device, options.rates.cores.value_or(threads))};
  report.shape = options.model.empty() ? models::shape_of_size(options.parameters, options.sequence)
                                       : models::load_shape(options.model);
  const Loop usual = report.shape.gpt2 ? Loop::kFinetune : Loop::kPyTorch;
  report.run = {.device = device.kind(),
                .device_here = device.here(),
                .sequence = options.sequence,
                .loop = options.loop.value_or(usual),
                .ranks = options.ranks};
  const DescribedModel described = describe(report.shape, report.config, report.run);
  report.parameters = described.parameters;
  report.tokens = described.tokens * options.ranks.all;
  report.estimates = described.estimates;
  if (report.run.loop == Loop::kPyTorch && !options.python_keys.empty()) {
    report.estimates.push_back(
        fmt::format("as without {}: what they change is not planned", fmt::join(options.python_keys, ", ")));
  }
  if (options.model.empty()) {
    report.estimates.insert(report.estimates.begin(),
                            fmt::format("a GPT-2 of about {} parameters stands for the model", options.name));
  }
  const MeasuredRates measured = find_rates(options, report.shape, device);
  report.measured = measured.facts;
  std::vector<std::string> on_one_drive;
  const Config drives = with_each_drive_once(report.config, on_one_drive);
  report.rates = choose_rates(drives, device.kind(), options.rates, measured, threads, options.ranks);

  const auto nodes = static_cast<unsigned>(shares.size());
  try {
    report.prediction = predict(report.config, described, report.rates, nodes, {}, options.ranks.all);
    report.facts = report.prediction->plan.facts;
    for (std::string& fact : activation_summary(report.config, report.prediction->plan, described.model))
      report.facts.push_back(std::move(fact));
  } catch (const Error& error) {
    if (error.code() != Code::kDoesNotFit) throw;
    report.refused = terminal::message_of(error);
  }
  report.facts.insert(report.facts.end(), on_one_drive.begin(), on_one_drive.end());
  if (report.prediction && report.prediction->plan.has_store) {
    const StepInfo& step = report.prediction->step;
    report.life.emplace();
    report.life->bytes_per_day = static_cast<double>(step.traffic.nvme_write) / step.seconds * 86400;
    find_life(options, drives, *report.life);
  }
  const Question question{.config = report.config,
                          .shape = report.shape,
                          .run = report.run,
                          .rates = report.rates,
                          .nodes = nodes,
                          .has_drive = !report.config.nvme_paths.empty()};
  report.alternatives = find_alternatives(question, described, kMostChanges);
  if (!report.refused.empty()) report.refused += placement_that_fits(report.alternatives.table, question.has_drive);
  report.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return report;
}

}  // namespace spillway::planning
