#include "src/engine/run_summary.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <utility>

#include "kernels/devices.h"
#include "kernels/optimizer.h"
#include "src/plan/parameter_groups.h"
#include "src/plan/plan_summary.h"

namespace spillway {
namespace {

// Where gradients wait for the update.
std::string gradient_fact(const Plan& plan) {
  std::uint64_t host = 0, spilled = 0;
  std::size_t early = 0, speculative = 0;
  for (const BlockPlan& block : plan.blocks) {
    if (block.gradient_home == Placement::kHost) host += block.gradient.bytes;
    if (block.gradient_home == Placement::kNvme) spilled += block.gradient.bytes;
    early += block.early;
    speculative += block.speculative;
  }
  std::string fact = fmt::format("gradients: {} MiB in host memory", div_up(host, kMiB));
  if (spilled > 0) {
    fact += fmt::format(", {} MiB on nvme, written and read once a step: host_bytes has no room for them",
                        div_up(spilled, kMiB));
  }
  if (early > 0) {
    fact += fmt::format("; {} of {} blocks are updated inside backward and store none", early, plan.blocks.size());
  }
  if (speculative > 0) {
    fact += fmt::format("; while clipping has no effect up to {} of {} blocks are updated inside backward", speculative,
                        plan.blocks.size());
  }
  return fact;
}

// Of weights and states, by home.
std::array<std::uint64_t, 3> bytes_at_home(const Plan& plan) {
  std::array<std::uint64_t, 3> bytes{};
  for (const TilePlace& tile : plan.tile_places) {
    for (Part part : {Part::kWeights, Part::kStates}) {
      if (const Home& home = tile.home[index_of(part)])
        bytes[static_cast<std::size_t>(*home)] += payload_bytes(tile.shape, part);
    }
  }
  return bytes;
}

// Without a budget the plan takes the least host memory that works, whatever the machine has. An eighth of what is idle
// is left to the page cache and to other programs.
std::string idle_fact(const Config& config, const Plan& plan, const ModelDescription& model, std::uint64_t idle,
                      unsigned nodes) {
  constexpr auto kNvme = static_cast<std::size_t>(Placement::kNvme);
  const std::uint64_t now = bytes_at_home(plan)[kNvme];
  if (config.host_bytes || now < kMiB || idle < kGiB) return {};
  Config with = config;
  with.host_bytes = plan.ledger.total(Placement::kHost) + idle / 8 * 7;
  // A plan is pure and takes a fraction of a second: what more memory would bring is computed, not estimated.
  const Plan more = make_plan(with, model, nodes, plan.rank);
  const std::uint64_t then = bytes_at_home(more)[kNvme];
  if (then >= now) return {};
  return fmt::format(
      "host_bytes is not set: {} GiB of RAM are idle; \"{}MiB\" would leave {} of {} MiB of weights and states on "
      "nvme; `spillway plan` says what a step takes then{}",
      idle / kGiB, div_up(more.ledger.total(Placement::kHost), kMiB), then / kMiB, now / kMiB,
      config.commit_every ? "" : ", and how many a crash loses (one with spillway.commit_every 1)");
}

}  // namespace

std::vector<std::string> run_summary(const Config& config, const Plan& plan, const ModelDescription& model,
                                     const RunResources& resources, std::optional<std::uint32_t> commit_every,
                                     unsigned nodes) {
  std::vector<std::string> facts;
  facts.push_back("device: " + resources.device->describe());
  const ChosenDevice device = choose_device(config.device);
  for (const auto& [type, why] : device.missing) facts.push_back(fmt::format("no {} device: {}", type->name, why));
  if (std::string slow = slow_optimizers(); !slow.empty()) facts.push_back(std::move(slow));
  if (resources.trace) facts.push_back(resources.trace->describe());
  for (std::string& group : describe_groups(plan.groups, model)) facts.push_back(std::move(group));
  const auto bytes = bytes_at_home(plan);
  facts.push_back(
      fmt::format("weights and states at home: {} MiB in hbm, {} MiB in host memory, {} MiB on nvme; {} tiles",
                  bytes[0] / kMiB, bytes[1] / kMiB, bytes[2] / kMiB, plan.tiles.size()));
  if (std::string idle = idle_fact(config, plan, model, resources.idle_bytes, nodes); !idle.empty()) {
    facts.push_back(std::move(idle));
  }
  if (!config.hbm_bytes && !device.type->on_cpu) {
    facts.push_back(fmt::format(
        "hbm_bytes is not set: {} MiB of the GPU's memory are taken, and the rest is the caller's; `spillway "
        "plan` says what more brings",
        div_up(plan.ledger.total(Placement::kHbm), kMiB)));
  }
  if (!plan.hbm.places.empty()) {
    facts.push_back(fmt::format(
        "blocks in HBM at a time: {} of {}{}", plan.hbm.places.size(), plan.blocks.size(),
        plan.hbm.places.size() == 1 ? " (fetch and compute take turns: more hbm_bytes would overlap them)" : ""));
  }
  facts.insert(facts.end(), plan.facts.begin(), plan.facts.end());
  for (std::string& fact : activation_summary(config, plan, model)) facts.push_back(std::move(fact));
  if (!plan.gradients_in_hbm) facts.push_back(gradient_fact(plan));
  if (resources.store) {
    const std::span<const File> files = resources.store->files().files();
    facts.push_back(fmt::format("io: {}, {} requests of {} KiB, {}", resources.thread->description(), config.io_depth,
                                config.io_block_bytes / kKiB,
                                std::ranges::all_of(files, &File::direct)
                                    ? "direct"
                                    : "through the page cache: the file system grants no direct I/O"));
    std::string names;
    for (const File& file : files) {  // a new one has this name from the first commit on
      names += (names.empty() ? "" : ", ") + (file.path().parent_path() / kStoreFileName).string();
    }
    facts.push_back(fmt::format("store: {}, {} MiB, {}", names, plan.store_bytes / kMiB,
                                !commit_every ? std::string("commit_every chosen after step 2")
                                : *commit_every == 0
                                    ? std::string("one slot a tile, no resume or export (commit_every 0)")
                                    : fmt::format("commit_every {}", *commit_every)));
  } else {
    facts.push_back("no store, so this run cannot be resumed: spillway.nvme_paths names a directory for one");
  }
  return facts;
}

}  // namespace spillway
