#include "src/plan/link_model.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "spillway/error.h"

namespace spillway {
namespace {

constexpr double kNotYet = -1;
constexpr unsigned bit(Lane lane) { return 1u << static_cast<unsigned>(lane); }
constexpr std::size_t at(Lane lane) { return static_cast<std::size_t>(lane); }
// Beside the lanes: the caller's thread computes, rather than waiting for a sync.
constexpr unsigned kCallerComputes = 1u << kLanes;
constexpr unsigned kNvmeReads = bit(Lane::kWeightReads) | bit(Lane::kTileReads);
constexpr unsigned kNvmeLanes = kNvmeReads | bit(Lane::kWrites);

struct Speeds {
  std::array<double, kLanes> of{};
  double cores = 0;  // in use
  bool known = false;
};

StallCause stall_of(OpKind kind) {
  switch (kind) {
    case OpKind::kReadWeights:
    case OpKind::kCheckWeights:
    case OpKind::kReadTile:
    case OpKind::kReadGradient:
    case OpKind::kReadActivation: return StallCause::kRead;
    case OpKind::kWriteTile:
    case OpKind::kSpillGradient:
    case OpKind::kWriteActivation: return StallCause::kWrite;
    case OpKind::kCopyGradient: return StallCause::kGradient;
    case OpKind::kUpdate:
    case OpKind::kHashTile: return StallCause::kUpdate;
    case OpKind::kCommit: return StallCause::kCommit;
    case OpKind::kGather:
    case OpKind::kScatter:
    case OpKind::kGatherGradient:
    case OpKind::kGatherLeaves:
    case OpKind::kAgree: return StallCause::kNetwork;
    default: return StallCause::kCopy;
  }
}

class LinkModel {
 public:
  LinkModel(std::span<ScheduleOp> ops, const MachineRates& rates, std::uint32_t from, std::uint32_t to)
      : ops_(ops),
        rates_(rates),
        from_(from),
        to_(to),
        next_(ops.size(), kNoOp),
        table_(std::size_t{1} << (kLanes + 1)) {
    std::array<std::uint32_t, kLanes> last;
    last.fill(kNoOp);
    for (auto* ends : {&head_, &blocked_on_}) ends->fill(kNoOp);
    for (std::uint32_t i = 0; i < ops.size(); ++i) {
      const std::size_t lane = at(ops[i].lane);
      (last[lane] == kNoOp ? head_[lane] : next_[last[lane]]) = i;
      last[lane] = i;
      ops[i].start = ops[i].end = kNotYet;
    }
  }

  ModelWindow run() {
    while (start_all()) advance();
    for (const std::uint32_t op : head_) SPILLWAY_CHECK(op == kNoOp, "every operation of a schedule comes to its end");
    return window_;
  }

 private:
  bool ended(std::uint32_t op) const { return ops_[op].end != kNotYet; }

  bool ready(std::size_t lane) {
    if (blocked_on_[lane] != kNoOp && !ended(blocked_on_[lane])) return false;
    for (const std::uint32_t op : ops_[head_[lane]].after) {
      if (op == kNoOp || ended(op)) continue;
      blocked_on_[lane] = op;
      return false;
    }
    blocked_on_[lane] = kNoOp;
    return true;
  }

  // False when nothing runs and nothing can start.
  bool start_all() {
    for (bool again = true; again;) {
      again = false;
      for (std::size_t lane = 0; lane < kLanes; ++lane) {
        if (active_ & (1u << lane)) continue;
        while (head_[lane] != kNoOp && ready(lane)) {
          ScheduleOp& op = ops_[head_[lane]];
          op.start = now_;
          if (op.seconds > 0) {
            left_[lane] = op.seconds;
            active_ |= 1u << lane;
            if (op.lane == Lane::kCaller && op.kind != OpKind::kCommit) active_ |= kCallerComputes;
            break;
          }
          finish(lane);
          again = true;
        }
      }
    }
    return active_ != 0;
  }

  void finish(std::size_t lane) {
    const std::uint32_t op = head_[lane];
    ops_[op].end = now_;
    head_[lane] = next_[op];
    active_ &= ~(1u << lane);
    if (lane == at(Lane::kCaller)) active_ &= ~kCallerComputes;
    if (op == from_) {
      window_.begin = now_;
      counting_ = true;
    }
    if (op == to_) {
      window_.end = now_;
      counting_ = false;
    }
  }

  // To the next end of an operation.
  void advance() {
    const Speeds& speeds = speeds_of(active_);
    double step = std::numeric_limits<double>::infinity();
    std::size_t first = 0;
    for (std::size_t lane = 0; lane < kLanes; ++lane) {
      if (!(active_ & (1u << lane))) continue;
      const double needs = left_[lane] / speeds.of[lane];
      if (needs < step) {
        step = needs;
        first = lane;
      }
    }
    if (counting_) count(speeds, step);
    now_ += step;
    const unsigned running = active_;
    for (std::size_t lane = 0; lane < kLanes; ++lane) {
      if (!(running & (1u << lane))) continue;
      left_[lane] -= speeds.of[lane] * step;
      // What is left of equal operations that run side by side is the rounding of their sums.
      if (lane == first || left_[lane] <= 1e-12 * ops_[head_[lane]].seconds) finish(lane);
    }
  }

  const Speeds& speeds_of(unsigned active) {
    Speeds& speeds = table_[active];
    if (speeds.known) return speeds;
    speeds.known = true;
    const double cores = rates_.cores, device = rates_.device_on_cores ? 1 : 0;
    std::array<double, kLanes> wants{};
    wants[at(Lane::kCompute)] = device * cores;
    wants[at(Lane::kCaller)] = active & kCallerComputes ? cores : 0;
    wants[at(Lane::kEarlyUpdates)] = cores;
    wants[at(Lane::kChecks)] = 1;
    wants[at(Lane::kH2d)] = wants[at(Lane::kD2h)] = wants[at(Lane::kNet)] = device;  // its thread carries them out
    double wanted = 0;
    for (std::size_t lane = 0; lane < kLanes; ++lane) wanted += active & (1u << lane) ? wants[lane] : 0;
    const double share = wanted > cores ? cores / wanted : 1;
    speeds.cores = wanted * share;
    for (std::size_t lane = 0; lane < kLanes; ++lane) speeds.of[lane] = wants[lane] > 0 ? share : 1;

    const bool both = (active & kNvmeReads) && (active & bit(Lane::kWrites));
    auto while_both = [&](double alone) {
      return both && rates_.nvme_mixed > 0 ? std::min(1.0, rates_.nvme_mixed / 2 / alone) : 1;
    };
    const double readers = (active & kNvmeReads) == kNvmeReads ? 2 : 1;
    for (Lane lane : {Lane::kWeightReads, Lane::kTileReads}) {
      speeds.of[at(lane)] = while_both(rates_.nvme_read) / readers;
    }
    speeds.of[at(Lane::kWrites)] = while_both(rates_.nvme_write);
    return speeds;
  }

  void count(const Speeds& speeds, double step) {
    auto work = [&](Lane lane) { return active_ & bit(lane) ? speeds.of[at(lane)] * step : 0; };
    auto busy = [&](Link link) -> double& { return window_.busy[static_cast<std::size_t>(link)]; };
    busy(Link::kCompute) += work(Lane::kCompute);
    busy(Link::kCpu) += speeds.cores / rates_.cores * step;
    busy(Link::kNvme) += active_ & kNvmeLanes ? step : 0;
    busy(Link::kH2d) += work(Lane::kH2d);
    busy(Link::kD2h) += work(Lane::kD2h);
    busy(Link::kNetwork) += work(Lane::kNet);
    if (!(active_ & kCallerComputes)) busy(Link::kSync) += work(Lane::kCaller);
    if (active_ & bit(Lane::kCompute)) {
      window_.shared += step - work(Lane::kCompute);
    } else {
      window_.stalls[stall_of(ops_[awaited()].kind)] += step;
    }
  }

  // What runs now and keeps compute (after its last operation, the caller) from going on.
  std::uint32_t awaited() const {
    std::uint32_t op = head_[at(Lane::kCompute)];
    if (op == kNoOp) op = head_[at(Lane::kCaller)];
    for (;;) {
      const std::size_t lane = at(ops_[op].lane);
      op = head_[lane];  // whatever lies before it in its lane
      if (active_ & (1u << lane)) return op;
      op = *std::ranges::find_if(ops_[op].after, [this](std::uint32_t d) { return d != kNoOp && !ended(d); });
    }
  }

  std::span<ScheduleOp> ops_;
  const MachineRates& rates_;
  const std::uint32_t from_, to_;
  std::vector<std::uint32_t> next_;               // in the lane
  std::array<std::uint32_t, kLanes> head_;        // of each lane: running or next
  std::array<std::uint32_t, kLanes> blocked_on_;  // what the head was last seen to wait for
  std::array<double, kLanes> left_{};             // seconds of work of the head
  unsigned active_ = 0;
  std::vector<Speeds> table_;  // by active lanes
  double now_ = 0;
  bool counting_ = false;
  ModelWindow window_;
};

}  // namespace

ModelWindow run_link_model(std::span<ScheduleOp> ops, const MachineRates& rates, std::uint32_t from, std::uint32_t to) {
  return LinkModel(ops, rates, from, to).run();
}

}  // namespace spillway
