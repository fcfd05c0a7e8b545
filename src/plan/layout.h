// How make_plan divides each tier's budget, a tier a file. Private to the plan.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "spillway/units.h"
#include "src/plan/plan.h"

namespace spillway {

inline constexpr std::uint64_t kPage = 4096;
inline constexpr std::uint32_t kLeastPlaces = 2;  // of weights, that a knob leaves, where the budget has room for them
inline constexpr const char* kAccumulators = "gradient accumulators (fp32)";  // in the ledger of both tiers
inline constexpr const char* kKept = "block inputs";                          // likewise

// A plan under way.
struct PlanDraft {
  const Config& config;
  const ModelDescription& model;
  const std::uint64_t nodes;  // NUMA nodes
  Plan plan;
  std::optional<CallerMemory> caller = {};  // weights are the caller's

  // All of them are in HBM, always.
  bool weights_stay() const {
    return config.parameters == Placement::kHbm && (plan.rank.count == 1 || config.stage < 3);
  }
  std::uint64_t element_bytes() const { return size_of(config.weights); }
};

// Throws kInvalidArgument for a description that contradicts itself or cannot be written to files, kDoesNotFit for what
// no machine has.
void check_model(const ModelDescription& model);
inline constexpr std::uint64_t kMostAttachmentBytes = 64 * kMiB;
// Throws kUnsupported for a type of weights that the program does not handle.
void check_weight_type(const ModelDescription& model, DType weights);
// In this order; each throws kDoesNotFit.
void lay_out_hbm(PlanDraft& draft);
void lay_out_host(PlanDraft& draft);
void lay_out_nvme(PlanDraft& draft);

class PlanArena;

// No push of its gradients is known to be the last before the step says so: its sums live for the whole step, and no
// update of it begins in backward.
bool takes_any_number(const Block& block);

// Frozen blocks whose weights stay in HBM from step to step, in places of their own.
std::vector<std::uint32_t> blocks_that_may_stay(const Plan& plan);  // rising
bool anything_trained(const Plan& plan);
// What weights have of HBM in a plan that keeps none, and how many of its places have no owner.
struct WeightsRoom {
  std::uint64_t bytes = 0;
  std::size_t shared = 0;
};
// Rising: blocks for which there is room beside places for the rest, as evenly as can be between those that are
// fetched.
std::vector<std::uint32_t> choose_kept(const Plan& plan, WeightsRoom room);
// Whatever place only one block uses that may stay is that block's.
void own_where_alone(Plan& plan);
std::uint64_t fetched_bytes(const Plan& plan);  // of weights, by the visits of a step

// Activations, called by the layouts of the tiers. Throws kInvalidArgument when their description contradicts itself.
void check_activations(const ModelDescription& model);
std::uint64_t least_activation_bytes(const ModelDescription& model);  // in HBM
void place_activations(PlanDraft& draft, PlanArena& hbm, std::uint64_t budget);
// In host memory, for what leaves HBM: all of it, and the least where the rest goes to NVMe.
struct HomeBytes {
  std::uint64_t all = 0, least = 0;
};
HomeBytes activation_home_bytes(const PlanDraft& draft);
void place_activation_homes(PlanDraft& draft, PlanArena& host, std::uint64_t budget);

// Hands out addresses of an arena and lists what for.
class PlanArena {
 public:
  PlanArena(Placement tier, Ledger& ledger) : tier_(tier), ledger_(ledger) {}

  Region take(const std::string& purpose, std::uint64_t bytes) {
    const Region region{used_, bytes};
    if (bytes == 0) return region;
    const std::uint64_t padded = align_up(bytes, kPage);
    used_ += padded;
    for (Reservation& line : ledger_.reservations) {
      if (line.tier == tier_ && line.purpose == purpose) {
        line.bytes += padded;
        return region;
      }
    }
    ledger_.reservations.push_back({tier_, purpose, padded});
    return region;
  }
  std::uint64_t used() const { return used_; }

 private:
  Placement tier_;
  Ledger& ledger_;
  std::uint64_t used_ = 0;
};

// The largest unit that names the number exactly, in the configuration's own words: a hint taken literally must fit,
// and must be the smallest that does.
std::string size_text(std::uint64_t bytes);

// `have` bytes of spillway.KEY are too few: kDoesNotFit.
[[noreturn]] void refuse_budget(const char* key, std::uint64_t have, std::uint64_t need, const char* what);

}  // namespace spillway
