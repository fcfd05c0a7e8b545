#include <fmt/format.h>

#include <algorithm>

#include "spillway/error.h"
#include "src/plan/layout.h"
#include "swap/extents.h"

namespace spillway {
namespace {

constexpr std::uint64_t kMostChunks = 8;  // each way

[[noreturn]] void refuse(std::size_t activation, const char* happened, const char* hint) {
  throw Error(Code::kInvalidArgument, {fmt::format("activation {}", activation), happened, 0, hint});
}

// All in HBM, each in a place of its own size.
std::uint64_t all_bytes(const ModelDescription& model) {
  std::uint64_t sum = 0;
  for (const Activation& activation : model.activations) sum += align_up(activation.bytes, kPage);
  return sum;
}

// A place that any of them fits.
std::uint64_t place_bytes(const ModelDescription& model) {
  std::uint64_t most = 0;
  for (const Activation& activation : model.activations) most = std::max(most, align_up(activation.bytes, kPage));
  return most;
}

// How often each leaves HBM or comes back in a step.
std::vector<std::uint32_t> moves_of(const PlanDraft& draft) {
  std::vector<std::uint32_t> moves(draft.model.activations.size(), 0);
  const ActivationPlan& plan = draft.plan.activations;
  for (std::size_t u = 0; u < plan.uses.size(); ++u) {
    const UsePlace& use = plan.uses[u];
    moves[plan.order[u].activation] += (use.fetch ? 1 : 0) + (use.spill ? 1 : 0);
  }
  return moves;
}

}  // namespace

void check_activations(const ModelDescription& model) {
  for (std::size_t a = 0; a < model.activations.size(); ++a) {
    if (model.activations[a].bytes == 0) refuse(a, "has no bytes", "leave it out");
  }
  if (model.activations_held == 0) {
    throw Error(Code::kInvalidArgument,
                {"model", "activations_held is 0", 0, "describe the most that are acquired at one time"});
  }
  if (model.micro_batches == 0) {
    throw Error(Code::kInvalidArgument, {"model", "micro_batches is 0", 0, "describe those of one step"});
  }
  std::vector<bool> written(model.activations.size(), false);
  for (const ActivationUse& use : model.activation_uses) {
    if (use.activation >= written.size()) {
      refuse(use.activation, "is used and not described", "use the indices of the description");
    }
    if (use.access != Access::kWrite && !written[use.activation]) {
      refuse(use.activation, "is read before a step has written it", "what it holds is lost between steps");
    }
    if (!model.visits.empty() && use.visit >= model.visits.size()) {
      refuse(use.activation, "is used in a visit that is not described", "use the indices of the visits");
    }
    written[use.activation] = true;
  }
}

std::uint64_t least_activation_bytes(const ModelDescription& model) {
  const std::uint64_t all = all_bytes(model);
  if (model.activation_uses.empty() || model.activations_held >= model.activations.size()) return all;
  return std::min(all, model.activations_held * place_bytes(model));
}

void place_activations(PlanDraft& draft, PlanArena& hbm, std::uint64_t budget) {
  const ModelDescription& model = draft.model;
  ActivationPlan& plan = draft.plan.activations;
  const std::uint64_t left = budget - hbm.used();
  if (all_bytes(model) <= left) {
    for (const Activation& activation : model.activations)
      plan.places.push_back(hbm.take("activations", activation.bytes));
    return;
  }
  const std::uint64_t bytes = place_bytes(model);
  for (std::uint64_t p = left / bytes; p > 0; --p) plan.places.push_back(hbm.take("activations", bytes));
  for (const Activation& activation : model.activations) plan.bytes.push_back(activation.bytes);
  plan.order = model.activation_uses;
  plan.uses =
      assign_activations(model.activation_uses, model.activations_held, static_cast<std::uint32_t>(plan.places.size()));
}

HomeBytes activation_home_bytes(const PlanDraft& draft) {
  HomeBytes bytes;
  const std::vector<std::uint32_t> moves = moves_of(draft);
  for (std::size_t a = 0; a < moves.size(); ++a) {
    if (moves[a] > 0) bytes.all += align_up(draft.model.activations[a].bytes, kPage);
  }
  // A chunk each way is what NVMe takes.
  bytes.least = draft.plan.has_store ? std::min(bytes.all, 2 * draft.plan.host.chunk_bytes) : bytes.all;
  return bytes;
}

// Host memory as far as it goes, what moves most often first; NVMe for the rest.
void place_activation_homes(PlanDraft& draft, PlanArena& host, std::uint64_t budget) {
  ActivationPlan& plan = draft.plan.activations;
  if (plan.uses.empty()) return;
  const std::vector<std::uint32_t> moves = moves_of(draft);
  std::vector<std::size_t> order;
  for (std::size_t a = 0; a < moves.size(); ++a) {
    if (moves[a] > 0) order.push_back(a);
  }
  std::ranges::stable_sort(order, [&moves](std::size_t a, std::size_t b) { return moves[a] > moves[b]; });
  plan.homes.resize(moves.size());
  const std::uint64_t left = budget - host.used();
  if (activation_home_bytes(draft).all > left) {
    const std::uint64_t chunk = draft.plan.host.chunk_bytes;
    const std::uint64_t bytes = chunk * std::clamp<std::uint64_t>(left / 4 / chunk, 1, kMostChunks);
    plan.down = host.take("activations in flight", bytes);
    plan.up = host.take("activations in flight", bytes);
  }
  for (std::size_t a : order) {
    const std::uint64_t bytes = draft.model.activations[a].bytes;
    if (host.used() + align_up(bytes, kPage) <= budget) {
      plan.homes[a] = {Placement::kHost, host.take("activations", bytes).offset};
    } else {
      Region& scratch = draft.plan.nvme.activations;
      plan.homes[a] = {Placement::kNvme, scratch.bytes};
      scratch.bytes += align_up(bytes, kExtentAlignment);
    }
  }
}

}  // namespace spillway
