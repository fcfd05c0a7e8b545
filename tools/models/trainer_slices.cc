// How a micro-batch is cut into slices, and which activations a step has for them.
#include <fmt/format.h>

#include <algorithm>

#include "spillway/error.h"
#include "tools/models/trainer.h"

namespace spillway::models {
namespace {

// Parts of a row begin where one of attention's blocks of keys does.
constexpr std::uint32_t kPartUnit = 128;

}  // namespace

// Slices of about the same size: as many as the largest size makes necessary.
Shape Trainer::sliced_shape(const TrainedModel& model, const TrainerOptions& options) {
  const std::size_t most = options.slice / kPartUnit * kPartUnit;
  if (options.slice != 0 && most == 0) {
    throw Error(Code::kInvalidArgument,
                {.object = "spillway.slice_tokens",
                 .happened = fmt::format("is {}, and a slice has {} tokens or more", options.slice, kPartUnit),
                 .errno_value = 0,
                 .hint = "give more, or 0 for no slices"});
  }
  Shape shape = model.shape(options.type, options.micro_batch, options.sequence);
  if (most == 0 || shape.tokens() <= most) return shape;
  const bool of_rows = shape.sequence <= most;
  const std::size_t units = of_rows ? shape.batch : shape.sequence, fit = of_rows ? most / shape.sequence : most;
  const std::size_t even = div_up(units, div_up(units, fit));
  shape.slice = static_cast<std::uint32_t>(of_rows ? even * shape.sequence : align_up<std::size_t>(even, kPartUnit));
  return shape;
}

void Trainer::make_slices() {
  const auto tokens = static_cast<std::uint32_t>(shape_.tokens());
  const auto most = static_cast<std::uint32_t>(shape_.slice_tokens());
  const std::uint32_t unit = rows_in_parts() ? shape_.sequence : tokens;  // whose end a slice does not cross
  for (std::uint32_t b = 0; b < options_.accumulation; ++b) {
    std::uint32_t index = 0;
    for (std::uint32_t first = 0, count = 0; first < tokens; first += count) {
      const std::uint32_t left = unit - first % unit;
      count = std::min(most, left);
      slices_.push_back({.micro_batch = b,
                         .index = index++,
                         .first = first,
                         .count = count,
                         .position = first % shape_.sequence,
                         .begins = b % part() == 0 && first == 0,
                         .ends = (b + 1) % part() == 0 && first + count == tokens,
                         .ends_row = count == left});
    }
    slices_per_micro_batch_ = index;
  }
  for (std::uint32_t b = 0; b < options_.accumulation; ++b) {
    for (std::uint32_t s = slices_per_micro_batch_; s-- > 0;) {
      Slice slice = slices_[b * slices_per_micro_batch_ + s];
      slice.begins = b % part() == 0 && s + 1 == slices_per_micro_batch_;
      slice.ends = (b + 1) % part() == 0 && s == 0;
      backward_slices_.push_back(slice);
    }
  }
}

// Parts of the same row.
std::span<const Trainer::Slice> Trainer::slices_before(const Slice& slice) const {
  const std::size_t at = std::size_t{slice.micro_batch} * slices_per_micro_batch_ + slice.index;
  const std::size_t count = slice.position / shape_.slice_tokens();
  return std::span(slices_).subspan(at - count, count);
}

// Inputs of layers that go backward are kept, and the last one's output; the others' take turns in two places.
std::uint32_t Trainer::kept_input(std::uint32_t layer) const {
  return layer < lowest() ? layer % 2 : layer - lowest() + std::min(lowest(), 2u);
}

std::uint32_t Trainer::activation(std::uint32_t layer, const Slice& slice) const {
  return (kept_input(layer) * options_.accumulation + slice.micro_batch) * slices_per_micro_batch_ + slice.index;
}

// In the order of run_step().
void Trainer::describe_activations(ModelDescription& description) const {
  const auto layers = static_cast<std::uint32_t>(model_.layers.size());
  const std::uint64_t token_bytes = std::uint64_t{shape_.width} * size_of(shape_.type);
  for (std::uint32_t i = 0; i <= kept_input(layers); ++i) {
    for (const Slice& slice : slices_) description.activations.push_back({.bytes = slice.count * token_bytes});
  }
  description.activations_held = 2;
  std::uint32_t visit = 0;
  const auto use = [&](std::uint32_t layer, const Slice& slice, Access access) {
    description.activation_uses.push_back({activation(layer, slice), access, visit});
  };
  for (const Slice& slice : slices_) use(0, slice, Access::kWrite);
  if (!trains_base()) ++visit;  // of the adapters, here and after the head
  for (std::uint32_t l = 0; l < layers; ++l) {
    ++visit;
    for (const Slice& slice : slices_) {
      use(l, slice, Access::kRead);
      use(l + 1, slice, Access::kWrite);
    }
  }
  ++visit;
  for (const Slice& slice : slices_) use(layers, slice, Access::kUpdate);
  if (!trains_base()) ++visit;
  for (std::uint32_t l = layers; l-- > lowest();) {
    ++visit;
    for (const Slice& slice : backward_slices_) {
      if (rows_in_parts() && slice.ends_row) {
        for (const Slice& before : slices_before(slice)) use(l, before, Access::kRead);
      }
      use(l, slice, Access::kRead);
      use(layers, slice, Access::kUpdate);
    }
  }
  if (!trains_base()) return;
  ++visit;
  for (const Slice& slice : slices_) use(layers, slice, Access::kRead);
}

}  // namespace spillway::models
