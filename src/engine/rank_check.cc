#include "src/engine/rank_check.h"

#include <fmt/format.h>

#include <array>
#include <concepts>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/checksum.h"
#include "spillway/error.h"
#include "spillway/version.h"
#include "src/config/table.h"

namespace spillway {
namespace {

// Words of a text that has the same bytes where everything that is put into it is the same.
class Summary {
 public:
  template <typename... Values>
  void add(const Values&... values) {
    ((text_ += word(values), text_ += '\n'), ...);
  }
  template <typename Value>
  void add_all(const std::vector<Value>& values) {
    add(values.size());
    for (const Value& value : values) add(value);
  }
  template <typename Value>
  void add_optional(const std::optional<Value>& value) {
    value ? add(*value) : add("-");
  }
  std::uint64_t hash() const { return granule_checksum(std::as_bytes(std::span(text_))); }

 private:
  static std::string_view word(std::string_view text) { return text; }
  template <std::integral Integer>
  static std::string word(Integer value) {
    return std::to_string(value);
  }

  std::string text_;
};

std::uint64_t hash_of(const ModelDescription& model) {
  Summary summary;
  for (const Block& block : model.blocks) {
    summary.add(block.name, block.parameters.size(), block.inside_bytes, block.held);
    for (const Parameter& p : block.parameters)
      summary.add_all(p.shape), summary.add(p.name, p.trainable, p.pushes, p.in_order, p.bytes);
  }
  for (const Activation& activation : model.activations) summary.add(activation.bytes);
  return summary.hash();
}

// What no row of the table shows is added here.
std::uint64_t hash_of(const Config& config) {
  Summary summary;
  summary.add(values_of_all_ranks(config), config.stage, config.nvme_paths.empty());
  return summary.hash();
}

// Where weights, sums and activations lie, and in which order they are used.
std::uint64_t hash_of(const Plan& plan) {
  Summary summary;
  for (const Region& place : plan.hbm.places) summary.add(place.bytes);
  for (const auto& owner : plan.hbm.owners) summary.add_optional(owner);
  summary.add(plan.hbm.reuse_bytes, plan.hbm.prefetch_bytes);
  for (const Visit& visit : plan.visits) summary.add(visit.block, static_cast<int>(visit.pass));
  for (const BlockPlan& block : plan.blocks) summary.add(block.accumulator_shared, block.sum_slots);
  return summary.hash();
}

std::uint64_t hash_of(const EngineOptions& options) {
  Summary summary;
  summary.add(static_cast<int>(options.on_existing), options.snapshot.empty());
  return summary.hash();
}

}  // namespace

void refuse_different_ranks(Agreement& agreement, const Config& config, const ModelDescription& model, const Plan& plan,
                            const EngineOptions& options) {
  if (agreement.alone()) return;
  Summary version;
  // Compared first: another version may hash the rest in another way.
  version.add(SPILLWAY_VERSION);
  const struct {
    const char* what;
    std::uint64_t hash;
    const char* hint;
  } subjects[] = {
      {"version of Spillway", version.hash(), "install the same on all hosts"},
      {"model", hash_of(model), "start all ranks with the same"},
      {"configuration", hash_of(config),
       "start all ranks with the same; paths, rates, threads and host_bytes may differ"},
      {"plan of device memory", hash_of(plan), "give all ranks the same hbm_bytes, knobs and order of visits"},
      {"way to begin", hash_of(options), "resume on all ranks or on none, with the same snapshot or without"},
  };
  for (const auto& [what, hash, hint] : subjects) {
    // Eight bytes of each rank, whatever the size of the model.
    const std::vector<std::uint64_t> hashes = agreement.gather(hash);
    for (std::uint32_t r = 1; r < hashes.size(); ++r) {
      if (hashes[r] == hashes[0]) continue;
      throw Error(Code::kInvalidArgument,
                  {"ranks", fmt::format("rank {} has another {} than rank 0", r, what), 0, hint});
    }
  }
}

void refuse_different_snapshots(Agreement& agreement, const SnapshotReader& snapshot) {
  if (agreement.alone()) return;
  using Identity = std::array<std::uint64_t, 2>;
  const Identity own = {snapshot.step(), snapshot.identity()};
  Identity firsts = own;
  agreement.broadcast(std::as_writable_bytes(std::span(firsts)), 0);
  agreement.all([&] {
    if (own == firsts) return;
    const char* const other = own[0] == firsts[0] ? ", and holds something else there" : "";
    throw Error(Code::kInvalidArgument,
                {snapshot.directory().string(),
                 fmt::format("is at step {} here, and at step {} where rank 0 reads it{}", own[0], firsts[0], other), 0,
                 "bring one snapshot, as it was at one time, to every host"});
  });
}

}  // namespace spillway
