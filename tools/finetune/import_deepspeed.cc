#include "tools/finetune/import_deepspeed.h"

#include <fmt/format.h>

#include <string_view>
#include <utility>
#include <vector>

#include "spillway/error.h"
#include "spillway/import.h"
#include "tools/models/trained_model.h"
#include "tools/terminal/byte_bar.h"
#include "tools/terminal/interrupt.h"
#include "tools/terminal/tell.h"

namespace spillway::models::finetune {
namespace {

std::string joined(const std::vector<std::string>& names) { return fmt::format("{}", fmt::join(names, ", ")); }

// Those that the checkpoint says.
std::vector<std::pair<const char*, double>> settings_of(const DeepSpeedGroup& group) {
  std::vector<std::pair<const char*, double>> settings;
  for (const auto& [name, value] : {std::pair("lr", group.learning_rate),
                                    {"beta1", group.beta1},
                                    {"beta2", group.beta2},
                                    {"eps", group.epsilon},
                                    {"weight_decay", group.weight_decay}}) {
    if (value) settings.emplace_back(name, *value);
  }
  return settings;
}

std::string settings_text(const DeepSpeedGroup& group) {
  std::vector<std::string> said;
  for (const auto& [name, value] : settings_of(group)) said.push_back(fmt::format("{} {}", name, value));
  return joined(said);
}

std::string schedule_text(const DeepSpeedInfo& facts) {
  if (!facts.schedule_steps) return "none was saved; that of finetune's configuration begins after the step above";
  if (*facts.schedule_steps == facts.optimizer_steps)
    return fmt::format("{} steps made; the same one in finetune's configuration goes on from there",
                       facts.optimizer_steps);
  return fmt::format("{} steps made there, but {} by Adam, which finetune's schedule goes on from",
                     *facts.schedule_steps, facts.optimizer_steps);
}

void print_text(const ImportCommand& command, const DeepSpeedInfo& facts) {
  terminal::tell("{}: step {} of {}, {} parameters with {} elements\n", command.out.string(), facts.step,
                 (command.checkpoint / facts.tag).string(), facts.parameters, facts.elements);
  terminal::tell("checkpoint: {}ZeRO stage {}, {} rank{}, {} flat group{} of parameters{}\n",
                 facts.version.empty() ? "" : fmt::format("DeepSpeed {}, ", facts.version), facts.stage, facts.ranks,
                 facts.ranks == 1 ? "" : "s", facts.sub_groups, facts.sub_groups == 1 ? "" : "s",
                 facts.swapped == 0 ? "" : fmt::format(", {} arrays from NVMe's swap files, unchecked", facts.swapped));
  const bool scales = facts.snapshot_weights == DType::kFloat16;
  terminal::tell("carried: fp32 master weights, exp_avg, exp_avg_sq, and Adam's step{}\n",
                 scales ? fmt::format(", {}; the loss scale, {}, and {} skipped step{}", facts.optimizer_steps,
                                      facts.loss_scale->scale, facts.skipped_steps, facts.skipped_steps == 1 ? "" : "s")
                        : "");
  terminal::tell("learning rate schedule: {}\n", schedule_text(facts));
  if (facts.global_steps != facts.step || (facts.skipped_steps > 0 && !scales))
    terminal::tell("not carried: the engine's own count, {} steps with {} skipped\n", facts.global_steps,
                   facts.skipped_steps);
  for (const DeepSpeedGroup& group : facts.groups) {
    if (const std::string text = settings_text(group); !text.empty())
      terminal::tell("not carried, finetune's configuration says it: {}\n", text);
  }
  if (facts.loss_scale && !scales)
    terminal::tell("not carried: loss scale {}, which fp16 alone needs\n", facts.loss_scale->scale);
  if (facts.samples > 0)
    terminal::tell("not carried: the place in the data, {} rows on; finetune begins with the first row of --data\n",
                   facts.samples);
  if (!facts.client_state.empty()) terminal::tell("not carried: the program's own {}\n", joined(facts.client_state));
  terminal::tell("finetune --load {} goes on with step {}\n", command.out.string(), facts.step + 1);
}

}  // namespace

int import_checkpoint(const ImportCommand& command) {
  struct Stopped {};                                                 // by Ctrl-C
  const terminal::Interrupt interrupt("ending without a snapshot");  // before anything that starts threads
  const ModelDescription model = load_trained_model(command.model, 1).description;
  terminal::ByteBar bar("importing");
  const auto progress = [&](std::uint64_t done, std::uint64_t bytes) {
    if (interrupt.requested()) throw Stopped();
    bar.at(done, bytes);
  };
  DeepSpeedInfo facts;
  try {
    facts = import_deepspeed(
        command.checkpoint, model, command.out,
        {.tag = command.tag, .weights = command.type, .verify = !command.no_verify, .progress = progress});
  } catch (const Stopped&) {
    bar.clear();
    return interrupt.exit_code();
  }
  bar.clear();
  if (command.json)
    terminal::tell("{}\n", info_json(facts, command.out));
  else
    print_text(command, facts);
  return 0;
}

}  // namespace spillway::models::finetune
