#include "tools/plan/options.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <iterator>

#include "kernels/devices.h"
#include "spillway/error.h"
#include "src/config/check.h"
#include "src/config/hidden_size.h"
#include "src/config/reader.h"
#include "tools/terminal/amount.h"
#include "tools/terminal/planned_config.h"
#include "tools/terminal/remedies.h"

namespace spillway::planning {
namespace {

class Reader {
 public:
  explicit Reader(const TypedOptions& typed) : typed_(typed) {}

  UnderstoodOptions read() {
    read_model();
    read_ranks();
    read_config();
    read_budgets();
    read_rates();
    options().json = typed_.json;
    options().html = typed_.html;
    options().probe = typed_.probe;
    if (typed_.probe_seconds && typed_.probe == false)
      problem("--probe-seconds", "there is no probe with --no-probe", "leave one of them out");
    options().probe_seconds = typed_.probe_seconds.value_or(options().probe_seconds);
    return std::move(result_);
  }

 private:
  PlanOptions& options() { return result_.options; }
  void problem(const std::string& object, const std::string& happened, const std::string& to_do) {
    result_.problems.push_back(fmt::format("{}: {}; {}", object, happened, to_do));
  }

  void read_model() {
    if (typed_.model.empty() == typed_.parameters.empty()) {
      problem("spillway plan", typed_.model.empty() ? "no model is named" : "--model and --params name two models",
              "give --model DIR with a config.json, or --params 7B");
    }
    options().model = typed_.model;
    options().name = typed_.model.empty() ? typed_.parameters : typed_.model.string();
    if (!typed_.parameters.empty()) {
      const auto count = terminal::count_of_text(typed_.parameters);
      if (count && *count >= 1e6 && *count <= 1e13) {
        options().parameters = *count;
      } else {
        problem("--params", fmt::format("\"{}\" is not a number from 1e6 to 1e13", typed_.parameters),
                "write it as 7B, 350M or 1e12");
      }
    }
    if (typed_.loop == "finetune") options().loop = Loop::kFinetune;
    if (typed_.loop == "pytorch") options().loop = Loop::kPyTorch;
    if (!typed_.loop.empty() && !options().loop)
      problem("--loop", fmt::format("\"{}\" is not known", typed_.loop), "it is finetune or pytorch");
    options().sequence = whole("--seq", typed_.sequence, 1u << 24).value_or(256);
  }

  void read_config() {
    Config& config = options().config;
    config.device.reset();
    if (typed_.config.empty()) {
      // What most begin with: bf16, and everything where there is room for it.
      config.weights = DType::kBFloat16;
      config.states = config.parameters = typed_.nvme.empty() ? Placement::kHost : Placement::kNvme;
      if (!typed_.aio.empty()) problem("--aio", "is put over a configuration, and none is named", "add --config");
    } else {
      try {
        AutoValues automatic;
        automatic.total_steps = kAnyTotalSteps;  // a schedule takes nothing of the machine
        if (!typed_.model.empty()) automatic.hidden_size = hidden_size_in(typed_.model);
        const EffectiveConfig effective = terminal::read_for_ranks(options().ranks.all, [&](std::uint32_t ranks) {
          return load_effective_files(typed_.config, typed_.aio, automatic, ranks);
        });
        config = effective.config;
        note_python_keys(effective);
      } catch (const std::exception& error) {
        result_.problems.emplace_back(terminal::message_of(error));
      }
    }
    if (typed_.device.empty()) return;
    if (const DeviceType* device = device_named(typed_.device)) {
      config.device = device->kind;
    } else {
      problem("--device", fmt::format("\"{}\" is not known", typed_.device),
              fmt::format("it is {}", fmt::join(kDeviceNames, " or ")));
    }
  }

  void note_python_keys(const EffectiveConfig& effective) {
    constexpr std::string_view kKeys[] = {"spillway.block_inputs", "activation_checkpointing.cpu_checkpointing",
                                          "spillway.micro_batches_together", "spillway.logit_slices",
                                          "spillway.block_slices"};
    for (const EffectiveKey& key : effective.keys) {
      const bool set = !key.written.empty() && key.value != key.key->standard;
      if (set && std::ranges::find(kKeys, key.key->path) != std::end(kKeys))
        options().python_keys.emplace_back(key.key->path);
    }
  }

  void read_budgets() {
    Config& config = options().config;
    if (const auto bytes = size("--hbm", typed_.hbm)) config.hbm_bytes = static_cast<std::uint64_t>(*bytes);
    if (const auto bytes = size("--host", typed_.host)) config.host_bytes = static_cast<std::uint64_t>(*bytes);
    if (!typed_.nvme.empty()) {
      config.nvme_paths.clear();
      config.nvme_rates.clear();
      config.nvme_bytes.reset();
    }
    std::size_t sized = 0;
    for (const std::string& drive : typed_.nvme) {
      const std::size_t sign = drive.rfind('=');
      const std::string path = drive.substr(0, sign);
      if (path.empty()) problem("--nvme", fmt::format("\"{}\" names no path", drive), "write PATH=2TB");
      config.nvme_paths.emplace_back(path);
      if (sign == drive.npos) continue;
      ++sized;
      if (const auto bytes = size("--nvme", drive.substr(sign + 1)))
        config.nvme_bytes = config.nvme_bytes.value_or(0) + static_cast<std::uint64_t>(*bytes);
    }
    if (const std::string twice = typed_.nvme.empty() ? "" : named_twice(config.nvme_paths); !twice.empty())
      problem("--nvme", twice, "name a directory on every drive, once");
    if (sized > 0 && sized < typed_.nvme.size())
      problem("--nvme", "some paths have a size and others have none", "write PATH=2TB for each, or for none");
    if (const auto bytes = size("--drive-life", typed_.drive_life)) options().drive_life = bytes;
  }

  void read_rates() {
    GivenRates& rates = options().rates;
    rates.device = rate("--device-rate", typed_.device_rate, 1e12, "TFLOP/s");
    rates.hbm = rate("--hbm-rate", typed_.hbm_rate, 1e9, "GB/s");
    rates.h2d = rate("--h2d-rate", typed_.h2d_rate, 1e9, "GB/s");
    rates.d2h = rate("--d2h-rate", typed_.d2h_rate, 1e9, "GB/s");
    rates.read = rate("--read-rate", typed_.read_rate, 1e9, "GB/s");
    rates.write = rate("--write-rate", typed_.write_rate, 1e9, "GB/s");
    rates.mixed = rate("--mixed-rate", typed_.mixed_rate, 1e9, "GB/s");
    rates.memory = rate("--memory-rate", typed_.memory_rate, 1e9, "GB/s");
    if (!typed_.cores.empty()) rates.cores = whole("--cores", typed_.cores, 1u << 16);
  }

  void read_ranks() {
    RankCounts& ranks = options().ranks;
    ranks.all = whole("--ranks", typed_.ranks, 1u << 16).value_or(1);
    ranks.on_a_host = ranks.all;
    if (!typed_.ranks_per_host.empty())
      ranks.on_a_host = whole("--ranks-per-host", typed_.ranks_per_host, 1u << 16).value_or(1);
    if (ranks.on_a_host > ranks.all)
      problem("--ranks-per-host", fmt::format("{} are more than the {} ranks", ranks.on_a_host, ranks.all),
              "leave it out, or raise --ranks");
    if (typed_.network.empty()) return;
    if (ranks.all == 1) problem("--network", "one rank has none", "add --ranks");
    const std::size_t comma = typed_.network.find(',');
    if (const auto given = rate("--network", typed_.network.substr(0, comma), 1e9 / 8, "Gbit/s"))
      options().rates.network = given;
    if (comma == typed_.network.npos) return;
    const auto micros = terminal::number_of_text(typed_.network.substr(comma + 1));
    if (micros && *micros >= 0 && *micros <= 1e6) {
      options().rates.network_seconds = *micros * 1e-6;
    } else {
      problem("--network", fmt::format("\"{}\" is no number of microseconds", typed_.network.substr(comma + 1)),
              "write it as 100,20");
    }
  }

  std::optional<double> size(const char* option, const std::string& text) {
    if (text.empty()) return std::nullopt;
    const auto bytes = terminal::size_of_text(text);
    if (!bytes || *bytes < 1) problem(option, fmt::format("\"{}\" is not a size", text), "write it as 24GiB or 2TB");
    return bytes;
  }
  std::optional<double> rate(const char* option, const std::string& text, double unit, const char* name) {
    if (text.empty()) return std::nullopt;
    const auto value = terminal::number_of_text(text);
    if (value && *value >= 1e-6 && *value <= 1e9) return *value * unit;
    problem(option, fmt::format("\"{}\" is not a rate", text), fmt::format("write a number of {}", name));
    return std::nullopt;
  }
  std::optional<std::uint32_t> whole(const char* option, const std::string& text, std::uint32_t most) {
    std::uint32_t value = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (error == std::errc() && end == text.data() + text.size() && value > 0 && value <= most) return value;
    problem(option, fmt::format("\"{}\" is not a whole number from 1 to {}", text, most), "write such a number");
    return std::nullopt;
  }

  const TypedOptions& typed_;
  UnderstoodOptions result_;
};

}  // namespace

UnderstoodOptions understand(const TypedOptions& typed) { return Reader(typed).read(); }

}  // namespace spillway::planning
