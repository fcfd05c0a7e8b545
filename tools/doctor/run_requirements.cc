#include "tools/doctor/run_requirements.h"

#include <fmt/format.h>

#include <optional>
#include <utility>
#include <vector>

#include "kernels/devices.h"
#include "kernels/thread_shares.h"
#include "spillway/config.h"
#include "spillway/error.h"
#include "src/config/hidden_size.h"
#include "src/config/reader.h"
#include "src/plan/plan.h"
#include "tools/models/config_json.h"
#include "tools/models/decoder/model.h"
#include "tools/models/lora.h"
#include "tools/models/trained_model.h"
#include "tools/models/trainer.h"
#include "tools/terminal/planned_config.h"
#include "tools/terminal/remedies.h"

namespace spillway::doctor {
namespace {

constexpr const char* kNoPlan = "spillway plan says what a PyTorch loop takes";

// As the engine makes it; operations of a device that this machine does not have take as much as those of the host.
void plan(const RequirementOptions& options, models::TrainedModel model, Config config, const ChosenDevice& device,
          RunRequirements& required) {
  const auto refuse = [&](const Error& error) {
    required.refused = error.parts().object + ": " + error.parts().happened;
    required.remedy = terminal::hint_of(error);
  };
  try {
    models::check_row(model, options.sequence);
  } catch (const Error& error) {
    return refuse(error);
  }
  if (config.lora.given()) models::add_adapters(model, config.lora);
  const std::vector<ThreadShare> shares = share_threads_among(device.type->on_cpu ? options.ranks : 1, config.threads);
  config.threads = threads_of(shares);
  try {
    models::TrainerOptions how =
        models::trainer_options(config, device.here() ? device.kind() : DeviceKind::kHost, options.sequence);
    how.rank_count = options.ranks;
    const models::Trainer trainer(std::move(model), how);
    const Plan made =
        make_plan(config, trainer.description(), static_cast<unsigned>(shares.size()), {0, options.ranks});
    required.host_bytes = made.ledger.total(Placement::kHost);
    required.memory_bytes = *required.host_bytes + (device.type->on_cpu ? made.ledger.total(Placement::kHbm) : 0);
    required.store_bytes = made.ledger.total(Placement::kNvme);
  } catch (const Error& error) {
    if (error.code() != Code::kDoesNotFit && error.code() != Code::kUnsupported) throw;
    refuse(error);
  }
}

}  // namespace

RunRequirements requirements_of(const RequirementOptions& options) {
  RunRequirements required;
  if (options.config.empty()) return required;
  AutoValues automatic;
  automatic.total_steps = kAnyTotalSteps;  // a schedule takes nothing of the machine
  if (!options.model.empty()) automatic.hidden_size = hidden_size_in(options.model);
  const Config config = terminal::read_for_ranks(
      options.ranks, [&](std::uint32_t ranks) { return load_config(options.config, options.aio, automatic, ranks); });
  required.ranks = options.ranks;
  required.paths = config.nvme_paths;
  required.rates = config.nvme_rates;
  required.engine = config.io_engine;
  required.block_bytes = config.io_block_bytes;
  required.depth = config.io_depth;
  const ChosenDevice device = choose_device(config.device);
  if (!options.model.empty()) {
    const models::ConfigJson json = models::ConfigJson::load(options.model);
    const std::string family = json.text("model_type", "gpt2");
    std::optional<models::TrainedModel> model;
    if (family == "gpt2" || models::is_decoder(family)) {
      try {
        model = models::trained_model(json, options.sequence);
      } catch (const Error& error) {
        if (error.code() != Code::kInvalidArgument || family == "gpt2") throw;
        required.no_plan = fmt::format("{}: {}; {}", error.parts().object, error.parts().happened, kNoPlan);
      }
    } else {
      required.no_plan = fmt::format("{} is of the family {}, which finetune does not train; {}",
                                     options.model.string(), family, kNoPlan);
    }
    if (model) {
      plan(options, std::move(*model), config, device, required);
      return required;
    }
  }
  // Without a plan the budgets are all there is to know; a run may take less.
  required.host_bytes = config.host_bytes;
  if (!device.type->on_cpu) {
    required.memory_bytes = config.host_bytes;
  } else if (config.host_bytes && config.hbm_bytes) {
    required.memory_bytes = *config.host_bytes + *config.hbm_bytes;
  }
  required.store_bytes = config.nvme_bytes;
  return required;
}

}  // namespace spillway::doctor
