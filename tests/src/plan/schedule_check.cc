#include "tests/src/plan/schedule_check.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <tuple>

#include "spillway/units.h"
#include "swap/policy/residency.h"

namespace spillway::testing {
namespace {

constexpr double kNever = -1;

class Checker {
 public:
  Checker(const ScheduleInput& input, const Schedule& schedule) : in_(input), schedule_(schedule), ops_(schedule.ops) {}

  void run() {
    lanes();
    places();
    tile_buffers();
    chunks();
    passing_memory();
    activations();
    accumulators();
    updates();
    commits();
    traffic();
    seconds();
  }

 private:
  // Fetched weights come after their checksum, or from host memory and through no buffer.
  bool from_update(const ScheduleOp& op) const {
    return op.kind == OpKind::kCopyWeights && op.buffer != kNothing && ops_[op.after[0]].kind == OpKind::kUpdate;
  }

  // Every operation comes to its end, after what it waits for and after those before it in its lane.
  void lanes() {
    std::array<double, kLanes> free{};
    for (std::uint32_t i = 0; i < ops_.size(); ++i) {
      const ScheduleOp& op = ops_[i];
      double& lane = free[static_cast<std::size_t>(op.lane)];
      ASSERT_GE(op.start, lane) << "operation " << i;
      ASSERT_GE(op.end, op.start) << "operation " << i;
      if (op.seconds > 0) {
        ASSERT_GT(op.end, op.start) << "operation " << i;
      }
      lane = op.end;
      for (const std::uint32_t before : op.after) {
        if (before == kNoOp) continue;
        ASSERT_LT(before, i);
        ASSERT_LE(ops_[before].end, op.start) << "operation " << i;
      }
    }
  }

  // A place holds one block at a time, and all of it when the block is computed.
  void places() {
    struct PlaceState {
      std::uint32_t block = kNothing;
      double used = 0, filled = 0;
      std::uint64_t bytes = 0;
      bool computed = true;
    };
    std::vector<PlaceState> places(in_.policies.weights.place_bytes.size());
    std::vector<std::uint64_t> block_bytes(in_.blocks.size());
    for (const ScheduleTile& tile : in_.tiles) block_bytes[tile.block] += tile.weight_bytes;
    for (const ScheduleOp& op : ops_) {
      const bool copy = op.kind == OpKind::kCopyWeights, compute = op.kind == OpKind::kCompute;
      if (in_.policies.weights.at_home || (!copy && !compute)) continue;
      ASSERT_LT(op.place, places.size());
      PlaceState& place = places[op.place];
      if (copy) {
        if (place.computed) place = {.block = op.block, .used = place.used, .computed = false};
        ASSERT_EQ(place.block, op.block);
        ASSERT_LE(in_.policies.weights.block_bytes[op.block], in_.policies.weights.place_bytes[op.place]);
        ASSERT_GE(op.start, place.used);
        place.filled = std::max(place.filled, op.end);
        place.bytes += op.bytes;
      } else {
        ASSERT_EQ(place.block, op.block);
        ASSERT_EQ(place.bytes, block_bytes[op.block]);
        ASSERT_GE(op.start, place.filled);
        place.used = op.end;
        place.computed = true;
      }
    }
  }

  // No two uses of one piece of memory overlap. A use is named by its piece and what it is for.
  struct Use {
    double begin = kNever, end = 0;
    std::size_t of = 0;  // operation that it is for
  };
  void disjoint(const char* what, const std::vector<std::pair<std::uint32_t, Use>>& uses, std::size_t pieces) {
    std::vector<double> free(pieces, 0);
    for (const auto& [piece, use] : uses) {
      ASSERT_LT(piece, pieces) << what;
      ASSERT_GE(use.begin, free[piece]) << what << " " << piece;
      free[piece] = use.end;
    }
  }

  // Another part of a use.
  static void extend(std::vector<std::pair<std::uint32_t, Use>>& uses, std::uint32_t piece, const Use& part) {
    const auto same = [&](const auto& use) { return use.first == piece && use.second.of == part.of; };
    const auto use = std::find_if(uses.rbegin(), uses.rend(), same);
    if (use == uses.rend()) {
      uses.push_back({piece, part});
    } else {
      use->second.end = std::max(use->second.end, part.end);
    }
  }

  void tile_buffers() {
    std::vector<std::pair<std::uint32_t, Use>> uses;
    std::vector<std::size_t> of_tile(in_.tiles.size());  // its last use
    std::vector<OpKind> before(in_.tiles.size(), OpKind::kAcquire);
    for (const ScheduleOp& op : ops_) {
      if (in_.update_on_device && op.kind == OpKind::kUpdate) continue;
      const bool brings =
          op.kind == OpKind::kReadTile || op.kind == OpKind::kReadGradient || op.kind == OpKind::kCopyTile;
      const bool works = op.kind == OpKind::kUpdate || op.kind == OpKind::kHashTile;
      if (!brings && !works && op.kind != OpKind::kWriteTile && !from_update(op)) continue;
      ASSERT_LT(op.buffer, in_.policies.updates.numbers());
      OpKind& last = before[op.tile];
      const bool there = last == OpKind::kReadTile || last == OpKind::kReadGradient || last == OpKind::kCopyTile;
      if ((brings || works) && !there) {
        of_tile[op.tile] = uses.size();
        uses.push_back({op.buffer, {.begin = op.start}});
      }
      last = op.kind;
      auto& [buffer, use] = uses[of_tile[op.tile]];
      ASSERT_EQ(buffer, op.buffer);
      use.end = std::max(use.end, op.end);
    }
    disjoint("tile buffer", uses, in_.policies.updates.numbers());
  }

  void chunks() {
    std::vector<std::pair<std::uint32_t, Use>> fetches, spills;
    for (std::size_t i = 0; i < ops_.size(); ++i) {
      const bool fetch = ops_[i].kind == OpKind::kReadWeights;
      if (!fetch && ops_[i].kind != OpKind::kSpillGradient) continue;
      const ScheduleOp &first = ops_[fetch ? i : i - 1], &last = ops_[fetch ? i + 2 : i];
      ASSERT_EQ(last.kind, fetch ? OpKind::kCopyWeights : OpKind::kSpillGradient);
      ASSERT_EQ(first.buffer, last.buffer);
      if (fetch) {
        ASSERT_GE(ops_[i + 1].start, first.end);
        ASSERT_GE(last.start, ops_[i + 1].end);
      }
      const std::uint64_t count = div_up(ops_[i].bytes, in_.chunk_bytes), most = fetch ? in_.chunks : in_.spill_chunks;
      ASSERT_LE(count, most);
      for (std::uint64_t c = 0; c < count; ++c) {
        (fetch ? fetches : spills)
            .push_back({static_cast<std::uint32_t>((first.buffer + c) % most), {first.start, last.end}});
      }
    }
    disjoint("chunk", fetches, in_.chunks);
    disjoint("spill chunk", spills, in_.spill_chunks);
  }

  // Staging, and the buffers that gradients pass through.
  void passing_memory() {
    const GradientMemoryOptions& memory = in_.policies.gradients;
    std::vector<std::pair<std::uint32_t, Use>> staging, passing;
    std::vector<double> landed(in_.tiles.size()), computed(in_.blocks.size(), kNever), compute_began(in_.blocks.size());
    std::vector<std::size_t> compute(in_.blocks.size());
    for (std::size_t i = 0; i < ops_.size(); ++i) {
      const ScheduleOp& op = ops_[i];
      switch (op.kind) {
        case OpKind::kCompute:
        case OpKind::kScatter:  // after it, with several ranks: what is rounded is the sum of all
          computed[op.block] = op.end;
          compute_began[op.block] = op.start;
          compute[op.block] = i;
          break;
        case OpKind::kCopyGradient:
          ASSERT_GE(op.start, computed[op.block]);
          ASSERT_LE(memory.blocks[op.block].bytes, memory.staging_bytes[op.place]);
          extend(staging, op.place, {compute_began[op.block], op.end, compute[op.block]});
          if (!memory.blocks[op.block].home) {
            ASSERT_LE(memory.blocks[op.block].bytes, memory.passing_bytes[op.buffer]);
            extend(passing, op.buffer, {op.start, op.end, compute[op.block]});
          }
          landed[op.tile] = op.end;
          break;
        case OpKind::kSpillGradient:  // the engine's spill of a staging is one at a time
          ASSERT_GE(op.start, landed[op.tile]);
          extend(staging, ops_[i - 1].place, {compute_began[op.block], op.end, compute[op.block]});
          break;
        case OpKind::kUpdate:
          if (!updated_in_backward(op.tile)) break;
          ASSERT_GE(op.start, landed[op.tile]);
          for (auto& [buffer, use] : passing) {
            if (use.of == compute[op.block]) use.end = std::max(use.end, op.end);
          }
          break;
        default: break;
      }
    }
    disjoint("staging", staging, memory.staging_bytes.size());
    disjoint("passing", passing, memory.passing_bytes.size());
  }

  // A use finds its activation in its place, as the use before left it, and nothing else comes there meanwhile.
  void activations() {
    struct PlaceState {
      std::uint32_t activation = kNothing;
      double free = 0;
    };
    std::map<std::uint32_t, PlaceState> places;
    std::vector<double> home(in_.uses.size());  // of what a use sent there
    std::vector<std::pair<std::uint32_t, Use>> leaving, coming;
    std::uint32_t made = 0;
    for (std::size_t i = 0; i < ops_.size(); ++i) {
      const ScheduleOp& op = ops_[i];
      if (op.kind == OpKind::kStep) {
        ASSERT_EQ(made, in_.uses.size());
        made = 0;
        for (auto& [index, place] : places) place.activation = kNothing;
      }
      if (op.use == kNothing) continue;
      const ScheduleUse& use = in_.uses[op.use];
      PlaceState& place = places[use.place];
      switch (op.kind) {
        case OpKind::kCompute:
          ASSERT_EQ(op.use, made++);
          if (!use.fetch && use.after != kNothing) place.activation = use.activation;
          if (place.activation == kNothing) place.activation = use.activation;  // the step's first in this place
          ASSERT_EQ(place.activation, use.activation) << "use " << op.use;
          ASSERT_GE(op.start, place.free);
          place.free = op.end;
          break;
        case OpKind::kSaveActivation:
          ASSERT_EQ(place.activation, use.activation);
          ASSERT_GE(op.start, place.free);
          place.free = home[op.use] = op.end;
          if (use.nvme_bytes > 0) leaving.push_back({op.buffer, {op.start, ops_[i + 1].end}});
          break;
        case OpKind::kWriteActivation:
          ASSERT_GE(op.start, home[op.use]);
          home[op.use] = op.end;
          break;
        case OpKind::kReadActivation:
          ASSERT_GE(op.start, home[use.source]);
          coming.push_back({op.buffer, {op.start, ops_[i + 1].end}});
          break;
        case OpKind::kLoadActivation:
          ASSERT_GE(op.start, use.nvme_bytes > 0 ? ops_[i - 1].end : home[use.source]);
          ASSERT_GE(op.start, place.free);
          place = {use.activation, op.end};
          break;
        default: break;
      }
    }
    disjoint("activations on their way to NVMe", leaving, in_.activation_buffers);
    disjoint("activations on their way back", coming, in_.activation_buffers);
  }

  // A place holds the sums of one block; what was added to them is there when more is, wherever they were meanwhile.
  void accumulators() {
    struct Sums {
      bool begun = false, at_home = false;
      double ready = 0;  // where they are
    };
    std::vector<Sums> blocks(in_.blocks.size());
    std::vector<double> free(in_.accumulator_place_bytes.size());
    std::vector<std::uint32_t> last(in_.blocks.size(), kNothing);  // the visit that completes it
    for (std::uint32_t v = 0; v < in_.visits.size(); ++v) {
      if (in_.visits[v].pass == Pass::kBackward) last[in_.visits[v].block] = v;
    }
    for (const ScheduleOp& op : ops_) {
      if (op.block == kNothing || in_.blocks[op.block].accumulator_bytes == 0) continue;
      Sums& sums = blocks[op.block];
      if (op.kind == OpKind::kSaveAccumulator) {
        ASSERT_TRUE(sums.begun && !sums.at_home);
        ASSERT_GE(op.start, sums.ready);
        sums.at_home = true;
        sums.ready = free[op.place] = op.end;
      } else if (op.kind == OpKind::kLoadAccumulator) {
        ASSERT_TRUE(sums.begun && sums.at_home);
        ASSERT_GE(op.start, std::max(sums.ready, free[op.place]));
        ASSERT_LE(op.bytes, in_.accumulator_place_bytes[op.place]);
        sums.ready = free[op.place] = op.end;
      } else if (op.kind == OpKind::kCompute && in_.visits[op.visit].pass == Pass::kBackward) {
        ASSERT_GE(op.start, sums.begun ? sums.ready : 0);
        for (const Sums& other : blocks) {  // what others added to is at home, or on its way there
          ASSERT_TRUE(&other == &sums || !other.begun || other.at_home);
        }
        sums = {.begun = op.visit != last[op.block], .ready = op.end};
      }
    }
  }

  // Step n of a program (from 0) makes update n of what waits for all gradients, before the block is computed and
  // before the gradient is overwritten; what is updated in backward has had n updates when forward begins.
  void updates() {
    std::vector<std::uint32_t> count(in_.tiles.size());
    std::vector<double> updated(in_.tiles.size()), written(in_.tiles.size()), read(in_.tiles.size());
    std::vector<double> spilled(in_.tiles.size());
    std::vector<std::uint32_t> completed(in_.blocks.size());  // how many visits had begun by then
    std::uint32_t step = 0, begun = 0;
    for (const ScheduleOp& op : ops_) {
      if (op.kind == OpKind::kStep) ++step;
      begun += op.kind == OpKind::kAcquire;
      if (op.kind == OpKind::kCopyGradient) completed[op.block] = begun;
      const bool early = op.kind == OpKind::kUpdate && op.lane == Lane::kEarlyUpdates && begun % in_.visits.size() > 0;
      ASSERT_TRUE(!early || begun > completed[op.block]);  // after the visit after
      if (op.kind == OpKind::kCompute) {
        const ScheduleBlock& block = in_.blocks[op.block];
        for (std::uint32_t t = block.first_tile; t < block.first_tile + block.tiles; ++t) {
          if (in_.tiles[t].elements == 0) continue;
          // What is updated in backward keeps its old weights too, for whoever visits it once more in that step.
          const bool early = updated_in_backward(t);
          ASSERT_GE(count[t], step + (early || in_.update_on_device ? 0 : 1)) << "tile " << t;
          ASSERT_LE(count[t], step + (in_.update_on_device ? 0 : 1)) << "tile " << t;
          if (count[t] == step + 1 && early) continue;
          ASSERT_GE(op.start, updated[t]);
        }
      }
      if (op.tile == kNothing) continue;
      switch (op.kind) {
        case OpKind::kReadTile:
          ASSERT_GE(op.start, written[op.tile]);
          read[op.tile] = op.end;
          break;
        case OpKind::kReadGradient:
          ASSERT_GE(op.start, spilled[op.tile]);
          read[op.tile] = std::max(read[op.tile], op.end);
          break;
        case OpKind::kReadWeights:
          ASSERT_GE(op.start, written[op.tile]);
          ASSERT_GE(op.start, updated[op.tile]);
          break;
        case OpKind::kUpdate:
          ++count[op.tile];
          ASSERT_GE(op.start, read[op.tile]);
          updated[op.tile] = op.end;
          break;
        case OpKind::kWriteTile:
          ASSERT_GE(op.start, updated[op.tile]);
          written[op.tile] = op.end;
          break;
        case OpKind::kSpillGradient: spilled[op.tile] = op.end; break;
        case OpKind::kCopyGradient:
          if (!updated_in_backward(op.tile)) {
            ASSERT_GE(op.start, updated[op.tile]);  // its memory still held the last one
          }
          break;
        default: break;
      }
    }
    for (std::size_t t = 0; t < in_.tiles.size(); ++t) {
      const bool late = in_.tiles[t].elements == 0 || !updated_in_backward(static_cast<std::uint32_t>(t));
      ASSERT_TRUE(late || count[t] == step) << "tile " << t;
    }
  }

  bool updated_in_backward(std::uint32_t t) const {
    return in_.blocks[in_.tiles[t].block].early && !in_.update_on_device && backward(in_.tiles[t].block);
  }
  bool backward(std::uint32_t block) const {
    return std::ranges::any_of(
        in_.visits, [block](const ScheduleVisit& v) { return v.block == block && v.pass == Pass::kBackward; });
  }

  // What was updated is where it lives when the step is finished. A commit finds all of it written, and no slot is
  // written twice without one between.
  void commits() {
    double moved = 0;
    for (const ScheduleOp& op : ops_) {
      if (op.kind == OpKind::kWriteTile || from_update(op)) moved = std::max(moved, op.end);
      if (op.kind == OpKind::kFinishStep) {
        ASSERT_GE(op.start, moved);
      }
    }
    if (!in_.commits) return;
    // What the update writes of a tile, and what the commit does.
    std::vector<double> written[2] = {std::vector<double>(in_.tiles.size(), kNever), {}};
    written[1] = written[0];
    double last_write = 0, committed = 0;
    for (const ScheduleOp& op : ops_) {
      if (op.kind == OpKind::kWriteTile) {
        ASSERT_GE(op.start, committed);
        double& before = written[ops_[op.after[0]].kind == OpKind::kHashTile][op.tile];
        ASSERT_EQ(before, kNever) << "tile " << op.tile;
        before = op.end;
        last_write = std::max(last_write, op.end);
      } else if (op.kind == OpKind::kCommit) {
        ASSERT_GE(op.start, last_write);
        committed = op.end;
        for (auto& part : written) std::ranges::fill(part, kNever);
      }
    }
  }

  // Bytes of a step, from the tiles and the visits alone.
  void traffic() {
    ScheduleTraffic expected;
    for (std::uint32_t t = 0; t < in_.tiles.size(); ++t) {
      const ScheduleTile& tile = in_.tiles[t];
      expected.nvme_write += in_.commits ? tile.commit_bytes : 0;
      expected.d2h += in_.commits ? tile.commit_d2h_bytes : 0;
      expected.nvme_read += in_.commits ? tile.commit_read_bytes : 0;
      if (tile.elements == 0 || in_.update_on_device) continue;
      expected.nvme_read += tile.read_bytes;
      expected.nvme_write += tile.write_bytes;
      if (in_.policies.weights.at_home) expected.h2d += tile.weight_bytes;
      if (!backward(tile.block)) continue;
      expected.d2h += tile.gradient_bytes;
      expected.nvme_write += tile.spill_bytes;
      expected.nvme_read += tile.spill_bytes;
    }
    for (const ScheduleUse& use : in_.uses) {
      if (use.spill) expected.d2h += use.bytes, expected.nvme_write += use.nvme_bytes;
      if (use.fetch) expected.h2d += use.bytes, expected.nvme_read += use.nvme_bytes;
    }
    for (const ScheduleOp& op : std::span(ops_).subspan(schedule_.second)) {  // accumulators() has seen that they must
      if (op.kind == OpKind::kSaveAccumulator) expected.d2h += in_.blocks[op.block].accumulator_bytes;
      if (op.kind == OpKind::kLoadAccumulator) expected.h2d += in_.blocks[op.block].accumulator_bytes;
    }
    if (!in_.policies.weights.at_home) fetches(expected);
    // A block whose update another's visit makes, before its own, may then be fetched ahead for its second visit, and
    // serve the first from there: fewer fetches than planned.
    EXPECT_LE(schedule_.traffic.nvme_read, expected.nvme_read);
    EXPECT_LE(schedule_.traffic.h2d, expected.h2d);
    if (!updated_by_another_) {
      EXPECT_EQ(schedule_.traffic.nvme_read, expected.nvme_read);
      EXPECT_EQ(schedule_.traffic.h2d, expected.h2d);
    }
    EXPECT_EQ(schedule_.traffic.nvme_write, expected.nvme_write);
    EXPECT_EQ(schedule_.traffic.d2h, expected.d2h);
  }

  // Every planned fetch, but that of a first visit in forward whose block the update brings whole.
  void fetches(ScheduleTraffic& expected) {
    std::vector<std::uint32_t> visit_blocks;
    for (const ScheduleVisit& visit : in_.visits) visit_blocks.push_back(visit.block);
    const WeightResidencyOptions& of = in_.policies.weights;
    const auto filled = places_that_stay(of.owners, of.frozen);
    const auto planned = assign_places(visit_blocks, of.block_bytes, of.place_bytes,
                                       {.owners = of.owners, .reuse_bytes = of.reuse_bytes, .filled = filled});
    std::vector<bool> waits(in_.blocks.size(), true);  // has tiles whose update is still to come
    std::size_t updated = 0;                           // of the order
    std::vector<std::uint32_t> order;
    for (const std::uint32_t t : in_.policies.updates.order) {
      if (!in_.update_on_device && !updated_in_backward(t)) order.push_back(t);
    }
    for (std::size_t v = 0; v < planned.size(); ++v) {
      const std::uint32_t b = visit_blocks[v];
      const std::size_t before = updated;
      if (in_.visits[v].pass == Pass::kBackward) updated = order.size();
      const auto of_block = [&](std::uint32_t t) { return in_.tiles[t].block == b; };
      const auto first = std::find_if(order.begin(), order.end(), of_block);
      const auto last = std::find_if(order.rbegin(), order.rend(), of_block).base();
      const std::size_t begin = first - order.begin(), end = first == order.end() ? 0 : last - order.begin();
      bool delivered = false;
      if (planned[v].fetch) {
        delivered =
            updated <= begin && updated < end && in_.policies.updates.nodes == 1 && end - begin == in_.blocks[b].tiles;
        while (updated < end) updated += std::min<std::size_t>(in_.policies.updates.nodes, order.size() - updated);
      }
      for (std::size_t i = before; i < updated; ++i) {
        const std::uint32_t other = in_.tiles[order[i]].block;
        const auto rest = std::span(visit_blocks).subspan(v + 1);
        updated_by_another_ |= other != b && std::ranges::count(rest, other) > 1;
      }
      if (!planned[v].fetch) continue;
      for (std::uint32_t t = in_.blocks[b].first_tile; t < in_.blocks[b].first_tile + in_.blocks[b].tiles; ++t) {
        expected.h2d += in_.tiles[t].weight_bytes;
        if (!delivered) expected.nvme_read += in_.tiles[t].fetch_bytes;
      }
    }
  }

  // No link is busier than the step is long, and compute works or waits.
  void seconds() {
    const double step = schedule_.seconds(), rounding = 1e-9 * (step + 1e-12);
    for (const double busy : schedule_.busy) EXPECT_LE(busy, step + rounding);
    const double stalled = schedule_.stalls.total();
    const double compute = schedule_.busy[static_cast<std::size_t>(Link::kCompute)];
    EXPECT_NEAR(compute + schedule_.shared + stalled, step, rounding);
  }

  const ScheduleInput& in_;
  const Schedule& schedule_;
  const std::vector<ScheduleOp>& ops_;
  bool updated_by_another_ = false;
};

}  // namespace

void check_schedule(const ScheduleInput& input, const Schedule& schedule) { Checker(input, schedule).run(); }

}  // namespace spillway::testing
