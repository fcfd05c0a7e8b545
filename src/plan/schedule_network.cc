// The part of a schedule's program in which ranks tell each other something: Weights::gather and
// GradientCollector::join, collective by collective.
#include "src/plan/schedule_program.h"

namespace spillway {

std::uint32_t ScheduleProgram::collective(OpKind kind, std::uint32_t block, const Collectives& of,
                                          std::initializer_list<std::uint32_t> after) {
  return add(
      {.kind = kind,
       .lane = Lane::kNet,
       .block = block,
       .bytes = of.bytes,
       .seconds = seconds_of(of.bytes, in_.rates.network) + static_cast<double>(of.calls) * in_.rates.network_seconds},
      after);
}

// After this rank's own part, into the same place.
void ScheduleProgram::gather(std::uint32_t v, std::uint32_t index) {
  PlaceOps& place = places_[index];
  const std::uint32_t block = in_.visits[v].block;
  place.ready =
      collective(OpKind::kGather, block, in_.blocks[block].network.weights, {issued_, place.ready, place.released});
}

// The engine's pushes wait for sums before them to leave: it may be the same memory.
std::uint32_t ScheduleProgram::add_sums(std::uint32_t v, std::uint32_t computed) {
  return add({.kind = OpKind::kAddSums, .lane = Lane::kCompute, .visit = v, .block = in_.visits[v].block},
             {issued_, computed, scattered_});
}

// Of the block that was completed last: GradientCollector::join.
void ScheduleProgram::join() {
  const auto [block, computed] = std::exchange(waiting_, {});
  if (block == kNothing) return;
  const BlockNetwork& network = in_.blocks[block].network;
  const std::uint32_t staging = in_.update_on_device ? kNoOp : stage_gradient(block);
  scattered_ = collective(OpKind::kScatter, block, network.sums, {computed, staging});
  if (network.rounded.calls > 0) {
    scattered_ = collective(OpKind::kGatherGradient, block, network.rounded, {scattered_});
  }
  const std::uint32_t rounded = collective(OpKind::kGatherLeaves, block, network.leaves, {scattered_});
  if (in_.update_on_device) return;
  complete_gradient(block, rounded);
  completing_ = block;
}

}  // namespace spillway
