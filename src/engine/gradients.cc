#include "src/engine/gradients.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "spillway/error.h"
#include "spillway/units.h"

namespace spillway {

GradientCollector::GradientCollector(const Plan& plan, const ModelDescription& model, DType type, Device& device,
                                     HostWorkers& workers, std::span<std::byte> host, Stream& d2h,
                                     BlockSpiller* spiller, std::uint64_t scratch_offset, Timeline* timeline,
                                     AccumulatorPlaces* accumulators)
    : plan_(plan),
      model_(model),
      type_(type),
      device_(device),
      workers_(workers),
      host_(host),
      d2h_(d2h),
      spiller_(spiller),
      scratch_offset_(scratch_offset),
      spilled_checksums_(plan.tiles.size()),
      timeline_(timeline),
      accumulators_(accumulators) {
  blocks_.resize(plan.blocks.size());
  std::uint64_t largest = 0;
  for (std::size_t b = 0; b < blocks_.size(); ++b) {
    blocks_[b].pushes.resize(model.blocks[b].parameters.size());
    blocks_[b].brought.resize(model.blocks[b].parameters.size());
    blocks_[b].in_staging.resize(model.blocks[b].parameters.size());
    blocks_[b].landed = device.create_event();
    largest = std::max(largest, plan.blocks[b].partition.trainable_elements);
  }
  passing_.resize(plan.host.passing.size());
  staging_.resize(plan.hbm.staging.size());
  std::size_t most_tiles = 0;
  for (const BlockPlan& block : plan.blocks) most_tiles = std::max<std::size_t>(most_tiles, block.tiles);
  for (Staging& staging : staging_) {
    staging.filled = device.create_event();
    staging.free = device.create_event();
    if (!spiller) continue;
    const std::uint64_t bytes = largest * size_of(type) + most_tiles * kExtentAlignment;
    staging.spill = std::make_unique<BlockSpill>(device, most_tiles, div_up(bytes, kGranuleBytes) + most_tiles);
  }
  leaves_.resize(div_up(largest, static_cast<std::uint64_t>(kNormLeaf)));
  last_copy_ = device.create_event();
  rounded_ = device.create_event();
}

GradientCollector::~GradientCollector() {
  for (Staging& staging : staging_) {
    try {
      finish_spill(staging);
    } catch (const Error&) {  // nobody reads it any more
    }
  }
}

NormResult& GradientCollector::host_norm(std::uint32_t block) const {
  return reinterpret_cast<NormResult*>(host_.data() + plan_.host.norms.offset)[block];
}

void GradientCollector::begin_step() {
  for (std::size_t b = 0; b < blocks_.size(); ++b) {
    BlockState& block = blocks_[b];
    std::ranges::fill(block.pushes, 0u);
    std::ranges::fill(block.brought, std::uint8_t{0});
    block.open = 0;
    for (const Parameter& parameter : model_.blocks[b].parameters)
      block.open += parameter.trainable && parameter.pushes > 0;
    block.staging.reset();
    block.passing.reset();
    block.piecewise = false;
    std::ranges::fill(block.in_staging, std::uint8_t{0});
    host_norm(static_cast<std::uint32_t>(b)) = {};
  }
  for (Staging& staging : staging_) staging.block.reset();
  for (auto& passing : passing_) passing.reset();
  accumulator_owner_.reset();
  if (accumulators_) accumulators_->begin_step();
}

std::optional<std::uint32_t> GradientCollector::free_passing(std::uint32_t block) const {
  std::optional<std::uint32_t> choice;  // the last that fits: only the first holds the largest
  for (std::uint32_t i = 0; i < passing_.size(); ++i) {
    if (!passing_[i] && plan_.host.passing[i].bytes >= plan_.blocks[block].gradient.bytes) choice = i;
  }
  return choice;
}

bool GradientCollector::has_room(std::uint32_t block) const {
  return plan_.blocks[block].gradient_home || blocks_[block].passing || free_passing(block);
}

void GradientCollector::forget(std::uint32_t block) {
  if (blocks_[block].passing) passing_[*blocks_[block].passing].reset();
}

namespace {

void refuse(const std::string& object, const std::string& happened, const std::string& hint) {
  throw Error(Code::kInvalidArgument, {object, happened, 0, hint});
}

}  // namespace

void GradientCollector::check(const Gradient& gradient) const {
  if (gradient.block >= blocks_.size() || gradient.parameter >= blocks_[gradient.block].pushes.size()) {
    refuse("push_gradient", "names a block or parameter that does not exist", "use the indices of the description");
  }
  const Parameter& parameter = model_.blocks[gradient.block].parameters[gradient.parameter];
  const std::uint64_t count = plan_.blocks[gradient.block].partition.parameters[gradient.parameter].count;
  if (gradient.elements != 0 && gradient.elements != count) {
    refuse(parameter.name, fmt::format("its gradient has {} elements, and it has {}", gradient.elements, count),
           "push the gradient of the parameter that it is of");
  }
  if (gradient.data == nullptr) return;
  if (reinterpret_cast<std::uintptr_t>(gradient.data) % size_of(gradient.dtype) != 0) {
    refuse(parameter.name, "its gradient's address is no multiple of its type's size", "align it");
  }
  const std::uint64_t bytes = count * size_of(gradient.dtype);
  if (lies_in({static_cast<const std::byte*>(gradient.data), bytes}, device_.hbm())) return;
  refuse(parameter.name, "its gradient does not lie in the HBM arena", "push from Engine::workspace()");
}

bool GradientCollector::push(const Gradient& gradient, Stream& stream) {
  check(gradient);
  const Parameter& parameter = model_.blocks[gradient.block].parameters[gradient.parameter];
  BlockState& block = blocks_[gradient.block];
  std::uint32_t& pushes = block.pushes[gradient.parameter];
  if (!parameter.trainable) refuse(parameter.name, "is frozen and takes no gradient", "describe it as trainable");
  if (gradient.dtype != DType::kFloat32 && gradient.dtype != type_) {
    refuse(parameter.name, "a gradient is fp32 or of the weights' type", "convert it first");
  }
  if (pushes == parameter.pushes) {
    refuse(parameter.name, "got more gradients than described in one step", "set Parameter::pushes");
  }
  // Every refusal comes before the push counts, so that a refused one can be made again.
  const bool brings = gradient.data != nullptr;
  if (brings && plan_.blocks[gradient.block].accumulator_shared &&
      accumulator_owner_.value_or(gradient.block) != gradient.block) {
    refuse(parameter.name, "its gradient came while another block's was being accumulated",
           "push all micro-batches of a block before the next, or describe more than one backward visit");
  }
  const bool completes = pushes + 1 == parameter.pushes && block.open == 1;
  if (!plan_.gradients_in_hbm && !block.staging && (!accumulates(gradient.block) || completes)) {
    const auto& holder = staging_[next_staging_for(gradient.block)].block;
    if (holder && plan_.blocks[*holder].gradient_home == Placement::kNvme) {
      refuse("block " + model_.blocks[*holder].name,
             "its gradients are incomplete while those of other blocks come, and go to nvme as a whole",
             "push all gradients of a block before the next, or raise spillway.host_bytes");
    }
  }
  if (!plan_.blocks[gradient.block].gradient_home && !block.passing) {
    block.passing = free_passing(gradient.block);
    SPILLWAY_CHECK(block.passing, "has_room() was asked");
    passing_[*block.passing] = gradient.block;
  }
  const bool last = ++pushes == parameter.pushes;
  const bool first = brings && std::exchange(block.brought[gradient.parameter], std::uint8_t{1}) == 0;
  const ParameterPlace& place = plan_.blocks[gradient.block].partition.parameters[gradient.parameter];
  if (!brings) {
    if (!accumulates(gradient.block))
      fill_zeros(staging_for(gradient.block, stream), gradient.block, gradient.parameter, 0, stream);
  } else if (accumulates(gradient.block)) {
    if (plan_.blocks[gradient.block].accumulator_shared) accumulator_owner_ = gradient.block;
    float* sum = accumulator(gradient.block, stream) + place.first;
    device_.accumulate_async(sum, gradient.data, gradient.dtype, place.count, first, stream);
  } else {
    std::byte* staging = staging_for(gradient.block, stream);
    round_into(staging, gradient.block, gradient.parameter, gradient.data, gradient.dtype, stream);
  }
  if (!last || --block.open > 0) return false;
  complete(gradient.block, stream);
  return true;
}

bool GradientCollector::accumulates(std::uint32_t block) const {
  return plan_.blocks[block].accumulator || plan_.blocks[block].accumulator_home;
}

float* GradientCollector::accumulator(std::uint32_t block, Stream& stream) {
  if (plan_.blocks[block].accumulator_home) return accumulators_->acquire(block, stream);
  return reinterpret_cast<float*>(hbm(plan_.blocks[block].accumulator->offset));
}

void GradientCollector::expect(std::uint32_t block) {
  if (plan_.blocks[block].accumulator_home && blocks_[block].open > 0) accumulators_->expect(block);
}

// A free one that is large enough, in turn; with none free, the first in turn that is large enough.
std::uint32_t GradientCollector::next_staging_for(std::uint32_t block) const {
  const auto count = static_cast<std::uint32_t>(staging_.size());
  auto fits = [&](std::uint32_t i) { return plan_.hbm.staging[i].bytes >= plan_.blocks[block].gradient.bytes; };
  std::uint32_t index = next_staging_;
  for (std::uint32_t i = 0; i < count && (staging_[index].block || !fits(index)); ++i) index = (index + 1) % count;
  while (!fits(index)) index = (index + 1) % count;  // the first holds the largest
  return index;
}

// Where the block's rounded gradient is put together.
std::byte* GradientCollector::staging_for(std::uint32_t block, Stream& stream) {
  if (plan_.gradients_in_hbm) return hbm(plan_.blocks[block].gradient.offset);
  BlockState& state = blocks_[block];
  if (!state.staging) {
    const std::uint32_t index = next_staging_for(block);
    Staging& staging = staging_[index];
    if (staging.block) {  // more blocks are open than there is staging: what has come of this one goes down now
      blocks_[*staging.block].piecewise = true;
      send_down(*staging.block, stream);
    }
    next_staging_ = (index + 1) % static_cast<std::uint32_t>(staging_.size());
    finish_spill(staging);
    if (staging.free->recorded()) device_.wait(stream, *staging.free);
    staging.block = block;
    state.staging = index;
  }
  return hbm(plan_.hbm.staging[*state.staging].offset);
}

void GradientCollector::round_into(std::byte* staging, std::uint32_t block, std::uint32_t parameter, const void* from,
                                   DType type, Stream& stream) {
  const ParameterPlace& place = plan_.blocks[block].partition.parameters[parameter];
  std::byte* to = staging + place.first * size_of(type_);
  device_.cast_async(to, type_, from, type, place.count, stream);
  fill_zeros(staging, block, parameter, place.count, stream);
}

// The parameter's elements from `first` on, and its padding.
void GradientCollector::fill_zeros(std::byte* staging, std::uint32_t block, std::uint32_t parameter,
                                   std::uint64_t first, Stream& stream) {
  const ParameterPlace& place = plan_.blocks[block].partition.parameters[parameter];
  const std::uint64_t zeros = align_up(place.count, std::uint64_t{kNormLeaf}) - first;
  std::byte* to = staging + (place.first + first) * size_of(type_);
  if (zeros > 0) device_.fill_async(to, std::byte{0}, zeros * size_of(type_), stream);
  blocks_[block].in_staging[parameter] = 1;
}

// Copies what the block's staging holds to host memory and gives the staging back.
void GradientCollector::send_down(std::uint32_t b, Stream& stream) {
  BlockState& block = blocks_[b];
  const BlockPlan& plan = plan_.blocks[b];
  Staging& staging = staging_[*block.staging];
  const std::byte* from = hbm(plan_.hbm.staging[*block.staging].offset);
  device_.record(*staging.filled, stream);
  if (plan.gradient_home == Placement::kNvme) {
    start_spill(staging, b, from);
    staging.block.reset();
    block.staging.reset();
    return;
  }
  std::byte* to = host_gradient(b);
  auto copy = [&](std::uint64_t first, std::uint64_t bytes) {
    const StreamSpan span(timeline_, {.kind = SpanKind::kGradientDown, .subject = b, .bytes = bytes}, d2h_);
    device_.copy_async(CopyKind::kDeviceToHost, to + first, from + first, bytes, d2h_);
    d2h_bytes_ += bytes;
  };
  device_.wait(d2h_, *staging.filled);
  if (!block.piecewise) {
    copy(0, plan.gradient.bytes);
  } else {
    for (std::size_t p = 0; p < block.in_staging.size(); ++p) {
      if (!block.in_staging[p]) continue;
      const ParameterPlace& place = plan.partition.parameters[p];
      copy(place.first * size_of(type_), align_up(place.count, std::uint64_t{kNormLeaf}) * size_of(type_));
    }
  }
  std::ranges::fill(block.in_staging, std::uint8_t{0});
  device_.record(*staging.free, d2h_);
  device_.record(*last_copy_, d2h_);
  staging.block.reset();
  block.staging.reset();
}

void GradientCollector::start_spill(Staging& staging, std::uint32_t b, const std::byte* from) {
  const BlockPlan& block = plan_.blocks[b];
  BlockSpill& spill = *staging.spill;
  spill.pieces.clear();
  for (std::uint32_t t = block.first_tile; t < block.first_tile + block.tiles; ++t) {
    const TilePlan& tile = plan_.tiles[t];
    if (!tile.range.trainable) continue;
    spill.pieces.push_back({.from = from + tile.range.first * size_of(type_),
                            .payload_bytes = tile.range.count * size_of(type_),
                            .extent = {scratch_offset_ + tile.gradient.offset, tile.gradient.bytes}});
  }
  spill.after = staging.filled.get();
  staging.spilling_block = b;
  spiller_->start(spill);
}

void GradientCollector::finish_spill(Staging& staging) {
  if (!staging.spilling_block) return;
  const BlockPlan& block = plan_.blocks[*staging.spilling_block];
  staging.spilling_block.reset();
  spiller_->wait_written(*staging.spill);
  auto piece = staging.spill->pieces.begin();
  for (std::uint32_t t = block.first_tile; t < block.first_tile + block.tiles; ++t) {
    if (plan_.tiles[t].range.trainable) spilled_checksums_[t] = (piece++)->checksum;
  }
}

std::optional<GradientCollector::Spilled> GradientCollector::spilled(std::uint32_t t) const {
  const TilePlan& tile = plan_.tiles[t];
  if (plan_.blocks[tile.block].gradient_home != Placement::kNvme) return std::nullopt;
  return Spilled{{scratch_offset_ + tile.gradient.offset, tile.gradient.bytes}, spilled_checksums_[t]};
}

// Every gradient of the block has come.
void GradientCollector::complete(std::uint32_t b, Stream& stream) {
  const BlockPlan& plan = plan_.blocks[b];
  BlockState& block = blocks_[b];
  if (accumulates(b)) {
    std::byte* staging = staging_for(b, stream);
    const float* sums = accumulator(b, stream);
    for (std::uint32_t p = 0; p < block.pushes.size(); ++p) {
      if (!model_.blocks[b].parameters[p].trainable) continue;
      if (block.brought[p]) {
        round_into(staging, b, p, sums + plan.partition.parameters[p].first, DType::kFloat32, stream);
      } else {
        fill_zeros(staging, b, p, 0, stream);
      }
    }
    if (accumulator_owner_ == b) accumulator_owner_.reset();
    if (plan.accumulator_home) accumulators_->complete(b, stream);
  }
  if (!block.piecewise) {
    auto* norm = reinterpret_cast<NormResult*>(hbm(plan_.hbm.norms.offset)) + b;
    std::byte* const staging = staging_for(b, stream);
    device_.record(*rounded_, stream);
    device_.wait(d2h_, *rounded_);
    device_.squared_norm_async(staging, type_, plan.partition.trainable_elements,
                               reinterpret_cast<double*>(hbm(plan_.hbm.leaves.offset)), norm, d2h_);
    device_.copy_async(CopyKind::kDeviceToHost, &host_norm(b), norm, sizeof *norm, d2h_);
    device_.record(*last_copy_, d2h_);
  }
  if (!plan_.gradients_in_hbm) send_down(b, stream);
  device_.record(*block.landed, d2h_);
}

bool GradientCollector::begun() const {
  return std::ranges::any_of(blocks_, [](const BlockState& block) {
    return std::ranges::any_of(block.pushes, [](std::uint32_t pushes) { return pushes > 0; });
  });
}

bool GradientCollector::leaves_out(const Gradient& gradient) const {
  const BlockState& block = blocks_[gradient.block];
  const Parameter& parameter = model_.blocks[gradient.block].parameters[gradient.parameter];
  return parameter.trainable && gradient.data == nullptr && !block.brought[gradient.parameter] &&
         block.pushes[gradient.parameter] + 1 == parameter.pushes;
}

void GradientCollector::check_complete() const {
  for (std::size_t b = 0; b < blocks_.size(); ++b) {
    for (std::size_t p = 0; p < blocks_[b].pushes.size(); ++p) {
      const Parameter& parameter = model_.blocks[b].parameters[p];
      if (!parameter.trainable || blocks_[b].pushes[p] == parameter.pushes) continue;
      throw Error(Code::kInvalidArgument, {parameter.name + " of block " + model_.blocks[b].name,
                                           "got " + std::to_string(blocks_[b].pushes[p]) + " of " +
                                               std::to_string(parameter.pushes) + " gradients in this step",
                                           0,
                                           "push every trainable parameter's gradient before step(), null where "
                                           "there is none"});
    }
  }
}

bool GradientCollector::landed(std::uint32_t block) const { return device_.done(*blocks_[block].landed); }

void GradientCollector::wait_landed(std::uint32_t b) {
  device_.synchronize(*blocks_[b].landed);
  if (!blocks_[b].piecewise) return;
  host_norm(b) = squared_norm(gradient(b), type_, plan_.blocks[b].partition.trainable_elements, leaves_, workers_);
  blocks_[b].piecewise = false;
}

void GradientCollector::settle() {
  if (accumulators_) accumulators_->settle();
  for (Staging& staging : staging_) finish_spill(staging);
  if (last_copy_->recorded()) device_.synchronize(*last_copy_);
}

void GradientCollector::wait_landed() {
  settle();
  for (std::uint32_t b = 0; b < blocks_.size(); ++b) {
    if (blocks_[b].piecewise) wait_landed(b);
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
    if (at == kAllFinite) continue;
    const auto& places = plan_.blocks[b].partition.parameters;
    for (std::size_t p = 0; p < places.size(); ++p) {
      if (at < places[p].first || at >= places[p].first + places[p].count) continue;
      return model_.blocks[b].parameters[p].name + " of block " + model_.blocks[b].name;
    }
    return "block " + model_.blocks[b].name;
  }
  return std::nullopt;
}

const std::byte* GradientCollector::gradient(std::uint32_t block) const {
  return plan_.gradients_in_hbm ? hbm(plan_.blocks[block].gradient.offset) : host_gradient(block);
}

std::byte* GradientCollector::host_gradient(std::uint32_t block) const {
  const bool passes = !plan_.blocks[block].gradient_home;
  const Region& region = passes ? plan_.host.passing[*blocks_[block].passing] : plan_.blocks[block].gradient;
  return host_.data() + region.offset;
}

}  // namespace spillway
