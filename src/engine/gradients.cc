#include "src/engine/gradients.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "spillway/error.h"
#include "spillway/units.h"

namespace spillway {

GradientCollector::GradientCollector(const Plan& plan, GradientMemoryOptions memory, GradientPushes& pushes,
                                     const GradientMovers& movers, GradientSpills* spills)
    : plan_(plan),
      pushes_(pushes),
      movers_(movers),
      spills_(spills),
      type_(plan.tile_places[0].shape.type),
      memory_(std::move(memory)),
      blocks_(plan.blocks.size()),
      staging_(plan.hbm.staging.size()) {
  std::uint64_t largest = 0;
  for (std::size_t b = 0; b < blocks_.size(); ++b) {
    const BlockPartition& partition = plan.blocks[b].partition;
    blocks_[b].in_staging.resize(partition.parameters.size());
    blocks_[b].landed = device().create_event();
    largest = std::max(largest, partition.trainable_elements);
    if (alone()) continue;
    blocks_[b].brought.resize(div_up(partition.parameters.size(), std::size_t{64}));
    blocks_[b].shares = share_sections(partition, plan.peers);
    for (const SectionShare& share : blocks_[b].shares) {
      std::vector<std::uint64_t> sums, rounded, leaves;
      for (const std::uint64_t elements : share.elements_of) {
        sums.push_back(elements * sizeof(float));
        rounded.push_back(elements * size_of(type_));
        leaves.push_back(elements / kNormLeaf * sizeof(double));
      }
      blocks_[b].sum_bytes.push_back(std::move(sums));
      blocks_[b].rounded_bytes.push_back(std::move(rounded));
      blocks_[b].leaf_bytes.push_back(std::move(leaves));
    }
  }
  for (Staging& staging : staging_) {
    staging.filled = device().create_event();
    staging.free = device().create_event();
  }
  leaves_.resize(div_up(largest, static_cast<std::uint64_t>(kNormLeaf)));
  last_copy_ = device().create_event();
  rounded_ = device().create_event();
  summed_ = device().create_event();
  scattered_ = device().create_event();
}

NormResult& GradientCollector::host_norm(std::uint32_t block) const {
  return reinterpret_cast<NormResult*>(movers_.host.data() + plan_.host.norms.offset)[block];
}

void GradientCollector::begin_step() {
  pushes_.begin_step();
  memory_.begin_step();
  for (std::uint32_t b = 0; b < blocks_.size(); ++b) {
    blocks_[b].unnormed = blocks_[b].joined = false;
    std::ranges::fill(blocks_[b].in_staging, std::uint8_t{0});
    host_norm(b) = {};
  }
  if (movers_.accumulators) movers_.accumulators->begin_step();
}

// Every refusal comes before the push counts, so that a refused one can be made again.
bool GradientCollector::push(const Gradient& gradient, Stream& stream) {
  const auto [b, p] = std::pair(gradient.block, gradient.parameter);
  pushes_.check(gradient);
  pushes_.refuse_unless_due(gradient);
  const bool adds = pushes_.accumulates(b);
  // Only now does the push need staging: sums in an accumulator need it once, when the block is complete.
  if (!adds || pushes_.would_complete(gradient)) {
    if (const auto holder = memory_.in_the_way(b)) {
      refuse_gradient(pushes_.block_name(*holder),
                      "its gradients are incomplete while those of other blocks come, and go to nvme as a whole",
                      "push all gradients of a block before the next, or raise spillway.host_bytes");
    }
  }
  memory_.come(b);
  const bool is_complete = pushes_.take(gradient);
  if (gradient.data == nullptr) {
    if (!adds) fill_zeros(staging_for(b, stream), b, p, 0, stream);
  } else if (adds) {
    add_up(gradient, stream);
  } else {
    round_into(staging_for(b, stream), b, p, gradient.data, gradient.dtype, stream);
  }
  if (is_complete) complete(b, stream);
  return is_complete;
}

// The parameter's partial sums, and what is done with them before more is added or all are one.
struct GradientCollector::PartialSums {
  Device& device;
  Stream& stream;
  float* first;  // of slot 0
  std::uint64_t apart, count;

  float* slot(std::uint32_t slot) const { return first + slot * apart; }
  auto zero() const {
    return [this](std::uint32_t at) { device.fill_async(slot(at), std::byte{0}, count * sizeof(float), stream); };
  }
  auto add() const {
    return [this](std::uint32_t into, std::uint32_t from) {
      device.accumulate_async(slot(into), slot(from), DType::kFloat32, count, false, stream);
    };
  }
};

GradientCollector::PartialSums GradientCollector::sums_of(std::uint32_t b, std::uint32_t p, Stream& stream) {
  const BlockPartition& partition = plan_.blocks[b].partition;
  const ParameterPlace& place = partition.parameters[p];
  return {device(), stream, accumulator(b, stream) + place.first, partition.trainable_elements, place.count};
}

void GradientCollector::add_up(const Gradient& gradient, Stream& stream) {
  if (scattered_->recorded()) device().wait(stream, *scattered_);  // it may be the same memory
  const PartialSums sums = sums_of(gradient.block, gradient.parameter, stream);
  PartSums& tree = pushes_.sums(gradient.block, gradient.parameter);
  // Which sum this micro-batch goes to decides the bits, so a policy says it and not the order of arrival.
  const PartSums::At at = tree.open(pushes_.part_of(gradient), sums.zero(), sums.add());
  device().accumulate_async(sums.slot(at.slot), gradient.data, gradient.dtype, sums.count, at.first, stream);
}

float* GradientCollector::accumulator(std::uint32_t block, Stream& stream) {
  if (plan_.blocks[block].accumulator_home) return movers_.accumulators->acquire(block, stream);
  return reinterpret_cast<float*>(hbm(*plan_.blocks[block].accumulator));
}

void GradientCollector::expect(std::uint32_t block) {
  if (plan_.blocks[block].accumulator_home && pushes_.open(block)) movers_.accumulators->expect(block);
}

// Where the block's rounded gradient is put together.
std::byte* GradientCollector::staging_for(std::uint32_t block, Stream& stream) {
  if (plan_.gradients_in_hbm) return hbm(plan_.blocks[block].gradient);
  const GradientStaging staged = memory_.stage(block);
  // Another block's gradient lies in the staging: what has come of it goes down in parts, and its norm is computed
  // later.
  if (staged.down) send_down(*staged.down, stream);
  // A spill must be waited for by the host, for its checksums; a plain copy by the stream alone.
  if (staged.free == StagingFree::kWritten) spills_->wait_written(staged.staging);
  if (staged.free == StagingFree::kCopied) device().wait(stream, *staging_[staged.staging].free);
  return hbm(plan_.hbm.staging[staged.staging]);
}

void GradientCollector::round_into(std::byte* staging, std::uint32_t block, std::uint32_t parameter, const void* from,
                                   DType type, Stream& stream) {
  const ParameterPlace& place = plan_.blocks[block].partition.parameters[parameter];
  std::byte* to = staging + place.first * size_of(type_);
  device().cast_async(to, type_, from, type, place.count, stream);
  fill_zeros(staging, block, parameter, place.count, stream);
}

// The parameter's elements from `first` on, and its padding.
void GradientCollector::fill_zeros(std::byte* staging, std::uint32_t block, std::uint32_t parameter,
                                   std::uint64_t first, Stream& stream) {
  const ParameterPlace& place = plan_.blocks[block].partition.parameters[parameter];
  const std::uint64_t zeros = align_up(place.count, std::uint64_t{kNormLeaf}) - first;
  std::byte* to = staging + (place.first + first) * size_of(type_);
  // Parameters start at multiples of a norm leaf; zeros between them add nothing to a leaf's sum.
  if (zeros > 0) device().fill_async(to, std::byte{0}, zeros * size_of(type_), stream);
  blocks_[block].in_staging[parameter] = 1;
}

// Every gradient of the block has come.
void GradientCollector::complete(std::uint32_t b, Stream& stream) {
  if (alone()) {
    if (pushes_.accumulates(b)) round_sums(b, stream);
    return land(b, stream);
  }
  if (scattered_->recorded()) device().wait(stream, *scattered_);
  finish_sums(b, stream);
  waiting_ = {b, accumulator(b, stream)};
  // The ranks' sum itself waits for join(): a collective that began here would delay what the next visit gathers.
  device().record(*summed_, stream);
  if (plan_.blocks[b].accumulator_home) join();  // the next visit's sums may come to where these are
}

void GradientCollector::join() {
  const auto [block, sums] = std::exchange(waiting_, {});
  if (!block) return;
  join_sums(*block, sums);
  land(*block, *movers_.net);
}

// `stream`: on which the block's gradient was rounded.
void GradientCollector::land(std::uint32_t b, Stream& stream) {
  const GradientDown down = memory_.complete(b);
  // In parts, the whole gradient is together only in host memory: wait_landed() computes its norm there.
  if (down.way != DownWay::kParts) {
    norm(b, hbm(down.way == DownWay::kStays ? plan_.blocks[b].gradient : plan_.hbm.staging[down.staging]), stream);
  }
  if (down.way != DownWay::kStays) send_down(down, stream);
  device().record(*blocks_[b].landed, movers_.d2h);
}

void GradientCollector::round_sums(std::uint32_t b, Stream& stream) {
  const BlockPlan& plan = plan_.blocks[b];
  std::byte* staging = staging_for(b, stream);
  for (std::uint32_t p = 0; p < plan.partition.parameters.size(); ++p) {
    if (!pushes_.trainable(b, p)) continue;
    if (pushes_.brought(b)[p]) {
      const PartialSums sums = sums_of(b, p, stream);
      pushes_.sums(b, p).finish(sums.zero(), sums.add());
      round_into(staging, b, p, sums.first, DType::kFloat32, stream);
    } else {
      fill_zeros(staging, b, p, 0, stream);
    }
  }
  if (plan.accumulator_home) movers_.accumulators->complete(b, stream);
}

// This rank's sums of the block, zeros where it has none: all of its vector.
void GradientCollector::finish_sums(std::uint32_t b, Stream& stream) {
  const BlockPlan& plan = plan_.blocks[b];
  for (std::uint32_t p = 0; p < plan.partition.parameters.size(); ++p) {
    if (!pushes_.trainable(b, p)) continue;
    const PartialSums sums = sums_of(b, p, stream);
    const bool brought = pushes_.brought(b)[p] != 0;
    if (brought) pushes_.sums(b, p).finish(sums.zero(), sums.add());
    const std::uint64_t from = brought ? sums.count : 0, end = align_up(sums.count, std::uint64_t{kNormLeaf});
    if (end > from) device().fill_async(sums.first + from, std::byte{0}, (end - from) * sizeof(float), stream);
  }
}

// All ranks' sums are added up, and each rounds its share of them, which is its gradient from here on; where ranks own
// no parts, what all have rounded is everybody's.
void GradientCollector::join_sums(std::uint32_t b, float* sums) {
  const BlockPlan& plan = plan_.blocks[b];
  BlockState& block = blocks_[b];
  Stream& net = *movers_.net;
  device().wait(net, *summed_);
  std::byte* const staging = staging_for(b, net);
  const std::uint64_t size = size_of(type_);
  for (std::size_t s = 0; s < block.shares.size(); ++s) {
    const SectionShare& share = block.shares[s];
    if (!share.trainable) continue;
    const std::uint64_t elements = plan.partition.sections[s].elements;
    movers_.communicator->reduce_scatter({sums + share.first, elements}, block.sum_bytes[s], plan_.sums,
                                         static_cast<std::int32_t>(b), net, plan_.wire);
    std::byte* const to = staging + (parted() ? share.gradient_first : share.own.first) * size;
    // Rounded once, by the rank that owns the part, after the sums of all ranks are added.
    device().cast_async(to, type_, sums + share.own.first, DType::kFloat32, share.own.count, net);
    if (parted()) continue;
    movers_.communicator->all_gather({staging + share.first * size, elements * size}, block.rounded_bytes[s],
                                     static_cast<std::int32_t>(b), net);
  }
  // From here on the memory of the sums may be added to again.
  device().record(*scattered_, net);
  const BlockNetwork moved = network_of(plan_, b);
  moved_ += moved.sums;
  moved_ += moved.rounded;
  moved_ += moved.leaves;
  if (plan.accumulator_home) movers_.accumulators->complete(b, net);
  std::ranges::fill(block.brought, 0u);
  for (std::size_t p = 0; p < plan.partition.parameters.size(); ++p)
    block.brought[p / 64] |= std::uint64_t{pushes_.brought(b)[p]} << p % 64;
  for (std::size_t w = 0; w < block.brought.size(); w += kMostScalars) {
    const auto words = std::span(block.brought).subspan(w, std::min(kMostScalars, block.brought.size() - w));
    movers_.communicator->all_reduce(words, Fold::kOr, static_cast<std::int32_t>(b), net);
  }
}

std::span<const std::uint8_t> GradientCollector::brought(std::uint32_t b) {
  BlockState& block = blocks_[b];
  if (!alone() && !std::exchange(block.joined, true)) {
    for (std::uint32_t p = 0; p < block.in_staging.size(); ++p) {
      if ((block.brought[p / 64] >> p % 64 & 1) != 0) pushes_.note_brought(b, p);
    }
  }
  return pushes_.brought(b);
}

void GradientCollector::norm(std::uint32_t b, const std::byte* rounded, Stream& stream) {
  auto* result = reinterpret_cast<NormResult*>(hbm(plan_.hbm.norms)) + b;
  auto* const leaves = reinterpret_cast<double*>(hbm(plan_.hbm.leaves));
  const std::uint64_t elements = plan_.blocks[b].partition.trainable_elements;
  // On the copy stream, so that the caller's own goes on with backward.
  Stream& norms = alone() ? movers_.d2h : stream;
  if (alone()) {
    device().record(*rounded_, stream);
    device().wait(norms, *rounded_);
    device().leaf_sums_async(rounded, type_, elements, leaves, norms);
  } else {
    sum_leaves(b, rounded, leaves);
  }
  device().add_leaves_async(leaves, elements / kNormLeaf, result, norms);
  device().copy_async(CopyKind::kDeviceToHost, &host_norm(b), result, sizeof *result, norms);
  if (!alone()) {
    device().record(*rounded_, norms);
    device().wait(movers_.d2h, *rounded_);
  }
  device().record(*last_copy_, movers_.d2h);
}

// Each rank's of what it owns, for all of them.
void GradientCollector::sum_leaves(std::uint32_t b, const std::byte* rounded, double* leaves) {
  const BlockPlan& plan = plan_.blocks[b];
  Stream& net = *movers_.net;
  if (!parted()) return device().leaf_sums_async(rounded, type_, plan.partition.trainable_elements, leaves, net);
  for (std::size_t s = 0; s < plan.shares.size(); ++s) {
    const SectionShare& share = plan.shares[s];
    if (!share.trainable) continue;
    device().leaf_sums_async(rounded + share.gradient_first * size_of(type_), type_, share.own.count,
                             leaves + share.own.first / kNormLeaf, net);
    const std::span<double> section(leaves + share.first / kNormLeaf, plan.partition.sections[s].elements / kNormLeaf);
    movers_.communicator->all_gather(std::as_writable_bytes(section), blocks_[b].leaf_bytes[s],
                                     static_cast<std::int32_t>(b), net);
  }
}

// What the block's staging holds goes down, and the staging is another's.
void GradientCollector::send_down(const GradientDown& down, Stream& stream) {
  BlockState& block = blocks_[down.block];
  Staging& staging = staging_[down.staging];
  const std::byte* from = hbm(plan_.hbm.staging[down.staging]);
  // What is copied down must have been computed: the copy stream waits for the caller's.
  device().record(*staging.filled, stream);
  if (down.way == DownWay::kSpill) return spills_->start(down.staging, down.block, from, *staging.filled);
  device().wait(movers_.d2h, *staging.filled);
  if (down.way == DownWay::kWhole) {
    copy_down(down.block, from, 0, plan_.blocks[down.block].gradient.bytes);
  } else {
    block.unnormed = true;
    for (std::size_t p = 0; p < block.in_staging.size(); ++p) {
      if (!block.in_staging[p]) continue;
      const ParameterPlace& place = plan_.blocks[down.block].partition.parameters[p];
      const std::uint64_t elements = align_up(place.count, std::uint64_t{kNormLeaf});
      copy_down(down.block, from, place.first * size_of(type_), elements * size_of(type_));
    }
  }
  std::ranges::fill(block.in_staging, std::uint8_t{0});
  device().record(*staging.free, movers_.d2h);
  device().record(*last_copy_, movers_.d2h);
}

void GradientCollector::copy_down(std::uint32_t b, const std::byte* staging, std::uint64_t first, std::uint64_t bytes) {
  const StreamSpan span(movers_.timeline, {.kind = SpanKind::kGradientDown, .subject = b, .bytes = bytes}, movers_.d2h);
  device().copy_async(CopyKind::kDeviceToHost, host_gradient(b) + first, staging + first, bytes, movers_.d2h);
  d2h_bytes_ += bytes;
}

void GradientCollector::wait_landed(std::uint32_t b) {
  device().synchronize(*blocks_[b].landed);
  if (!blocks_[b].unnormed) return;
  host_norm(b) =
      squared_norm(gradient(b), type_, plan_.blocks[b].partition.trainable_elements, leaves_, movers_.workers);
  blocks_[b].unnormed = false;
}

void GradientCollector::wait_idle() {
  join();
  if (movers_.accumulators) movers_.accumulators->wait_idle();
  for (std::uint32_t s = 0; s < staging_.size(); ++s) {
    if (memory_.leaving(s) != StagingFree::kWritten) continue;
    spills_->wait_written(s);
    memory_.written(s);
  }
  if (last_copy_->recorded()) device().synchronize(*last_copy_);
  memory_.copied();
}

void GradientCollector::wait_landed() {
  wait_idle();
  for (std::uint32_t b = 0; b < blocks_.size(); ++b) {
    if (blocks_[b].unnormed) wait_landed(b);
  }
}

double GradientCollector::squared_norm_sum() const {
  double sum = 0;
  for (std::uint32_t b = 0; b < blocks_.size(); ++b) sum += host_norm(b).sum_of_squares;
  return sum;
}

std::optional<std::string> GradientCollector::first_nonfinite() const {
  for (std::uint32_t b = 0; b < blocks_.size(); ++b) {
    const std::uint64_t at = host_norm(b).first_nonfinite;
    if (at != kAllFinite) return pushes_.parameter_at(b, at);
  }
  return std::nullopt;
}

const std::byte* GradientCollector::gradient(std::uint32_t block) const {
  return plan_.gradients_in_hbm ? hbm(plan_.blocks[block].gradient) : host_gradient(block);
}

void GradientCollector::read(std::uint32_t b, std::uint64_t first, std::span<std::byte> to) {
  const std::byte* from = gradient(b) + first * size_of(type_);
  if (!plan_.gradients_in_hbm) return void(std::memcpy(to.data(), from, to.size()));
  const std::span<std::byte> through = movers_.host.subspan(plan_.host.buffers.offset, plan_.host.buffers.bytes);
  for (std::size_t at = 0; at < to.size(); at += through.size()) {
    const std::span<std::byte> piece = through.first(std::min(through.size(), to.size() - at));
    device().copy_async(CopyKind::kDeviceToHost, piece.data(), from + at, piece.size(), movers_.d2h);
    movers_.d2h.synchronize();
    std::ranges::copy(piece, to.begin() + static_cast<std::ptrdiff_t>(at));
  }
}

void GradientCollector::write(std::uint32_t b, std::uint64_t first, std::span<const std::byte> from) {
  const std::uint64_t offset = first * size_of(type_);
  if (!plan_.gradients_in_hbm) return void(std::memcpy(host_gradient(b) + offset, from.data(), from.size()));
  std::byte* gradient = hbm(plan_.blocks[b].gradient) + offset;
  const std::span<std::byte> through = movers_.host.subspan(plan_.host.buffers.offset, plan_.host.buffers.bytes);
  for (std::size_t at = 0; at < from.size(); at += through.size()) {
    const std::span<std::byte> piece = through.first(std::min(through.size(), from.size() - at));
    std::ranges::copy(from.subspan(at, piece.size()), piece.begin());
    device().copy_async(CopyKind::kHostToDevice, gradient + at, piece.data(), piece.size(), movers_.d2h);
    movers_.d2h.synchronize();
  }
}

// Nothing is on its way down, so that staging is free: with several ranks nothing is put together there by and by.
void GradientCollector::norm_again(std::uint32_t b) {
  if (alone() && !plan_.gradients_in_hbm) {
    blocks_[b].unnormed = true;
    return wait_landed(b);
  }
  Stream& stream = alone() ? movers_.d2h : *movers_.net;
  std::byte* rounded = hbm(plan_.blocks[b].gradient);
  if (!plan_.gradients_in_hbm) {
    rounded = hbm(plan_.hbm.staging.front());
    const std::uint64_t bytes = plan_.blocks[b].gradient.bytes;
    if (bytes > 0) device().copy_async(CopyKind::kHostToDevice, rounded, host_gradient(b), bytes, stream);
  }
  norm(b, rounded, stream);
  if (!alone()) moved_ += network_of(plan_, b).leaves;
  device().record(*blocks_[b].landed, movers_.d2h);
  movers_.d2h.synchronize();
}

std::byte* GradientCollector::host_gradient(std::uint32_t block) const {
  const bool passes = !plan_.blocks[block].gradient_home;
  const Region& region = passes ? plan_.host.passing[*memory_.passing(block)] : plan_.blocks[block].gradient;
  return movers_.host.data() + region.offset;
}

}  // namespace spillway
