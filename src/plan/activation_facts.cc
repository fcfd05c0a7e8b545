#include <fmt/format.h>

#include <algorithm>

#include "src/plan/plan.h"

namespace spillway {
namespace {

std::string activations_text(const Plan& plan, const ModelDescription& model) {
  const ActivationPlan& activations = plan.activations;
  if (activations.uses.empty()) {
    std::uint64_t bytes = 0;
    for (const Activation& activation : model.activations) bytes += activation.bytes;
    return fmt::format("activations: {} of {} MiB, all in hbm", model.activations.size(), div_up(bytes, kMiB));
  }
  std::uint64_t in_host = 0, on_nvme = 0, down = 0, up = 0;
  for (std::size_t a = 0; a < activations.homes.size(); ++a) {
    if (activations.homes[a].host) in_host += model.activations[a].bytes;
    if (activations.homes[a].scratch) on_nvme += model.activations[a].bytes;
  }
  for (std::size_t u = 0; u < activations.uses.size(); ++u) {
    const std::uint64_t bytes = model.activations[model.activation_uses[u].activation].bytes;
    down += activations.uses[u].spill ? bytes : 0;
    up += activations.uses[u].fetch ? bytes : 0;
  }
  return fmt::format(
      "activations: {} of {} in hbm at a time; {} MiB at home in host memory, {} MiB on nvme; a step moves {} MiB down "
      "and {} MiB up",
      activations.places.size(), model.activations.size(), div_up(in_host, kMiB), div_up(on_nvme, kMiB),
      div_up(down, kMiB), div_up(up, kMiB));
}

std::string insides_text(const Plan& plan, const ModelDescription& model) {
  std::size_t kept = 0, blocks = 0;
  std::uint64_t most = 0;
  for (std::size_t b = 0; b < plan.blocks.size(); ++b) {
    blocks += model.blocks[b].inside_bytes > 0;
    kept += plan.blocks[b].insides_kept;
    most = std::max(most, model.blocks[b].inside_bytes * model.micro_batches);
  }
  std::string text = fmt::format("insides of {} of {} blocks are kept: ", kept, blocks);
  if (kept == blocks) return text + "no block is computed once more in backward";
  return text + fmt::format("{} block{} computed once more in backward; {} MiB more of hbm_bytes save{} one",
                            blocks - kept, blocks - kept == 1 ? " is" : "s are", div_up(most, kMiB),
                            div_up(most, kMiB) == 1 ? "s" : "");
}

}  // namespace

std::vector<std::string> activation_facts(const Plan& plan, const ModelDescription& model) {
  std::vector<std::string> facts;
  if (!model.activations.empty()) facts.push_back(activations_text(plan, model));
  if (std::ranges::any_of(model.blocks, [](const Block& block) { return block.inside_bytes > 0; })) {
    facts.push_back(insides_text(plan, model));
  }
  return facts;
}

}  // namespace spillway
