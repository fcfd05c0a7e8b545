#include "src/plan/plan_summary.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "spillway/error.h"
#include "src/plan/passes.h"

namespace spillway {
namespace {

struct Fact {
  const char* what;
  std::uint64_t count = 0;
};

std::uint64_t placed_bytes(const Plan& plan) {
  std::uint64_t bytes = 0;
  for (const Region& place : plan.hbm.places) bytes += place.bytes;
  return bytes;
}

// Whatever a knob can change, always in the same order. `most_ahead`: bytes from which on no limit is felt.
std::vector<Fact> info_of(const Plan& plan, std::uint64_t most_ahead) {
  const PlannedHits hits = planned_hits(plan);
  const std::uint64_t element_bytes = size_of(plan.tile_places[0].shape.type);
  const auto owned = std::ranges::count_if(plan.hbm.owners, [](const auto& owner) { return owner.has_value(); });
  const std::uint64_t spare = plan.host.buffers_count - std::min(plan.host.buffers_count, 1u);
  const auto cached = std::ranges::count_if(
      plan.tile_places, [](const TilePlace& t) { return t.home[index_of(Part::kWeights)] == Placement::kHost; });
  return {
      {"places of weights in HBM", plan.hbm.places.size()},
      {"blocks with a place of their own", static_cast<std::uint64_t>(owned)},
      {"visits a step that fetch their block", hits.visits - hits.hits},
      {"parameters fetched ahead before the next waits", std::min(plan.hbm.prefetch_bytes, most_ahead) / element_bytes},
      {"tile buffers", plan.host.buffers_count},
      {"tiles read ahead of the update", plan.host.reads_ahead ? spare : 0},
      {"tiles still being written after it", plan.host.writes_behind ? spare : 0},
      {"KiB of weights in flight", plan.host.chunks.bytes / kKiB},
      {"tiles whose weights stay in host memory", static_cast<std::uint64_t>(cached)}};
}

std::string changes(const Plan& with, const Plan& without) {
  const std::uint64_t most_ahead = placed_bytes(with);
  const std::vector<Fact> now = info_of(with, most_ahead), else_ = info_of(without, most_ahead);
  std::string text;
  for (std::size_t i = 0; i < now.size(); ++i) {
    if (now[i].count == else_[i].count) continue;
    text += fmt::format("{}{} {} instead of {}", text.empty() ? "" : ", ", now[i].what, now[i].count, else_[i].count);
  }
  return text;
}

// Of those that are added to in several visits; empty where each has a place in HBM.
std::string accumulator_fact(const Plan& plan) {
  std::size_t moving = 0;
  std::uint64_t bytes = 0;
  for (const BlockPlan& block : plan.blocks) {
    if (!block.accumulator_home) continue;
    ++moving;
    bytes += block.accumulator_home->bytes;
  }
  if (moving == 0) return {};
  return fmt::format(
      "gradient accumulators: of {} blocks at home in host memory, {} MiB, {} in hbm at a time; each goes down and up "
      "again between two micro-batches: more hbm_bytes would keep some",
      moving, div_up(bytes, kMiB), plan.hbm.accumulators.size());
}

std::string activations_text(const Plan& plan, const ModelDescription& model) {
  const ActivationPlan& activations = plan.activations;
  if (activations.uses.empty()) {
    std::uint64_t bytes = 0;
    for (const Activation& activation : model.activations) bytes += activation.bytes;
    return fmt::format("activations: {} of {} MiB, all in hbm", model.activations.size(), div_up(bytes, kMiB));
  }
  std::uint64_t in_host = 0, on_nvme = 0, down = 0, up = 0;
  for (std::size_t a = 0; a < activations.homes.size(); ++a) {
    if (activations.homes[a].home == Placement::kHost) in_host += model.activations[a].bytes;
    if (activations.homes[a].home == Placement::kNvme) on_nvme += model.activations[a].bytes;
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

std::string insides_text(const Config& config, const Plan& plan, const ModelDescription& model) {
  std::size_t kept = 0, blocks = 0;
  for (std::size_t b = 0; b < plan.blocks.size(); ++b) {
    blocks += model.blocks[b].inside_bytes > 0;
    kept += plan.blocks[b].insides_kept;
  }
  const std::string text = fmt::format("{} of {} blocks keep their inner activations: ", kept, blocks);
  if (kept == blocks) return text + "backward recomputes no block";
  const std::uint64_t more = bytes_to_keep_insides(config, model, plan) / kMiB;
  return text + fmt::format("backward recomputes {} block{}; {} MiB more of hbm_bytes save{} one", blocks - kept,
                            blocks - kept == 1 ? "" : "s", more, more == 1 ? "s" : "");
}

std::string bytes_fact(const Plan& plan) {
  std::uint64_t weights = 0, elements = 0;
  for (const BlockPlan& block : plan.blocks) {
    for (const ParameterPlace& place : block.partition.parameters) {
      weights += place.bytes ? 1 : 0;
      elements += place.bytes ? place.count : 0;
    }
  }
  if (weights == 0) return "";
  return fmt::format("{} bytes of frozen weights are in {} tensors of the program's own form, as quantized ones are",
                     elements * size_of(plan.tile_places[0].shape.type), weights);
}

// Empty where all are exact.
std::string states_fact(const Config& config, const Plan& plan) {
  std::uint64_t reduced = 0, exact = 0;
  for (const TilePlan& tile : plan.tiles) {
    if (tile.range.trainable) (tile.range.states.empty() ? exact : reduced) += tile.range.count;
  }
  if (reduced == 0) return "";
  return fmt::format("moments of {} elements are stored in {}, of {} in fp32", reduced, name_of(config.moments), exact);
}

}  // namespace

std::vector<std::string> describe_plan(const Config& config, const Plan& plan,
                                       const std::function<Plan(const Config&)>& plan_for) {
  std::vector<std::string> lines;
  const PlannedHits hits = planned_hits(plan);
  if (hits.visits > 0) {
    lines.push_back(fmt::format("of {} visits a step, {} find their block in HBM", hits.visits, hits.hits));
  }
  if (const PassTraffic pass = pass_traffic(plan); pass.weights > 0) {
    lines.push_back(fmt::format(
        "decoding: of {} MiB of weights a token (a forward pass between steps) fetches {} MiB, {} MiB of it from nvme",
        div_up(pass.weights, kMiB), div_up(pass.fetched, kMiB), div_up(pass.nvme_read, kMiB)));
  }
  const auto frozen = frozen_blocks(plan), stay = blocks_that_stay(plan);
  if (const auto count = std::ranges::count(frozen, 1); count > 0 && hits.visits > 0) {
    lines.push_back(
        fmt::format("of {} frozen blocks, {} stay in HBM from step to step", count, std::ranges::count(stay, 1)));
  }
  if (plan.has_store && hits.tile_bytes > 0) {
    lines.push_back(
        fmt::format("of {} bytes that an update works on, {} stay in memory", hits.tile_bytes, hits.tile_hit_bytes));
  }
  if (std::string fact = states_fact(config, plan); !fact.empty()) lines.push_back(std::move(fact));
  if (std::string fact = bytes_fact(plan); !fact.empty()) lines.push_back(std::move(fact));
  if (std::string fact = accumulator_fact(plan); !fact.empty()) lines.push_back(std::move(fact));
  std::string idle;
  const auto compare = [&](const char* key, auto DeepSpeedKnobs::*knob) {
    const auto& value = config.knobs.*knob;
    if (!value) return;
    Config without = config;
    (without.knobs.*knob).reset();
    const std::string name = fmt::format("{} {}", key, *value);
    std::string text;
    try {
      text = changes(plan, plan_for(without));
    } catch (const Error& refusal) {  // of the other plan: this one fits
      if (refusal.code() != Code::kDoesNotFit) throw;
      text = "without it " + refusal.parts().object + " would be too small";
    }
    if (text.empty()) {
      idle += (idle.empty() ? "" : ", ") + name;
    } else {
      lines.push_back(name + ": " + text);
    }
  };
  using Knobs = DeepSpeedKnobs;
  compare("stage3_max_live_parameters", &Knobs::max_live_parameters);
  compare("stage3_max_reuse_distance", &Knobs::max_reuse_distance);
  compare("stage3_prefetch_bucket_size", &Knobs::prefetch_bucket_size);
  compare("stage3_param_persistence_threshold", &Knobs::param_persistence_threshold);
  compare("stage3_model_persistence_threshold", &Knobs::model_persistence_threshold);
  compare("offload_param.buffer_count", &Knobs::param_buffer_count);
  compare("offload_param.buffer_size", &Knobs::param_buffer_size);
  compare("offload_param.max_in_cpu", &Knobs::max_in_cpu);
  compare("offload_optimizer.buffer_count", &Knobs::optimizer_buffer_count);
  compare("offload_optimizer.pipeline_read", &Knobs::pipeline_read);
  compare("offload_optimizer.pipeline_write", &Knobs::pipeline_write);
  if (!idle.empty()) lines.push_back("known from DeepSpeed, and no limit to this plan: " + idle);
  return lines;
}

std::vector<std::string> activation_summary(const Config& config, const Plan& plan, const ModelDescription& model) {
  std::vector<std::string> facts;
  if (!model.activations.empty()) facts.push_back(activations_text(plan, model));
  if (std::ranges::any_of(model.blocks, [](const Block& block) { return block.inside_bytes > 0; })) {
    facts.push_back(insides_text(config, plan, model));
  }
  if (const KeptPlan& kept = plan.kept; kept.host_bytes + kept.nvme_bytes > 0) {
    facts.push_back(fmt::format("block inputs: {} MiB in host memory, {} MiB on nvme, within the budgets",
                                div_up(kept.host_bytes, kMiB), div_up(kept.nvme_bytes, kMiB)));
  }
  return facts;
}

}  // namespace spillway
