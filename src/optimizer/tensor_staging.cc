#include "src/optimizer/tensor_staging.h"

#include <algorithm>
#include <utility>

#include "spillway/error.h"
#include "spillway/log.h"
#include "spillway/units.h"

namespace spillway {

TensorStaging::TensorStaging(const Plan& plan, std::span<const TensorPiece> pieces,
                             std::span<const std::size_t> first_piece, std::span<std::byte> memory,
                             TensorCarrier* carrier)
    : element_(size_of(plan.tile_places[0].shape.type)),
      chunk_elements_(plan.host.staged_elements),
      pieces_(pieces),
      memory_(memory),
      carrier_(carrier) {
  for (std::size_t tile = 0; tile + 1 < first_piece.size(); ++tile) {
    first_chunk_.push_back(chunks_.size());
    if (!carrier_) continue;
    for (std::size_t i = first_piece[tile]; i < first_piece[tile + 1]; ++i) {
      const TensorPiece& piece = pieces_[i];
      const bool fits =
          chunks_.size() > first_chunk_.back() &&
          piece.at + align_up(std::uint64_t{piece.count}, kPartitionUnit) <= chunks_.back().at + chunk_elements_;
      if (!fits) chunks_.push_back({.first = i, .end = i, .at = piece.at});
      chunks_.back().end = i + 1;
    }
  }
  first_chunk_.push_back(chunks_.size());
  if (carrier_) slots_.resize(memory_.size() / (2 * chunk_elements_ * element_));
}

template <typename Work>
void TensorStaging::for_each_tensor(const Chunk& chunk, Work&& work) const {
  for (std::size_t i = chunk.first, end; i < chunk.end; i = end) {
    for (end = i + 1; end < chunk.end && pieces_[end].tensor == pieces_[i].tensor;) ++end;
    work(pieces_[i], pieces_[end - 1]);
  }
}

bool TensorStaging::asks_weight(const OptimizerTensor& tensor) const {
  if (brings_ == Brings::kNothing || !is_elsewhere(tensor.weight)) return false;
  return brings_ != Brings::kUpdated || tensor.gradient != nullptr;
}

bool TensorStaging::asks_gradient(const OptimizerTensor& tensor) const {
  return (brings_ == Brings::kWeightsAndGradients || brings_ == Brings::kUpdated) && is_elsewhere(tensor.gradient);
}

void TensorStaging::begin(std::span<const OptimizerTensor> tensors, Brings brings) {
  tensors_ = tensors, brings_ = brings, next_ = 0;
}

bool TensorStaging::brought(const Chunk& chunk) const {
  bool found = false;
  for_each_tensor(chunk, [&](const TensorPiece& piece, const TensorPiece&) {
    const OptimizerTensor& tensor = tensors_[piece.tensor];
    found = found || asks_weight(tensor) || asks_gradient(tensor);
  });
  return found;
}

TensorStaging::Slot TensorStaging::slot(std::uint32_t index) const {
  const std::uint64_t bytes = chunk_elements_ * element_;
  std::byte* const begin = memory_.data() + 2 * index * bytes;
  return {.weights = begin, .gradients = begin + bytes, .index = index};
}

void TensorStaging::wait(std::uint32_t index) {
  if (std::exchange(slots_[index].moving, false)) carrier_->wait(index);
}

// In turn, so that what is on its way in a slot has had the most time.
TensorStaging::Slot TensorStaging::take() {
  for (std::size_t tries = 0; tries < slots_.size(); ++tries) {
    const std::uint32_t index = std::exchange(turn_, static_cast<std::uint32_t>((turn_ + 1) % slots_.size()));
    if (slots_[index].chunk) continue;
    wait(index);
    return slot(index);
  }
  SPILLWAY_CHECK(false, "one slot is always left");
  return {};
}

void TensorStaging::bring(std::size_t chunk) {
  const Chunk& brought = chunks_[chunk];
  const Slot to = take();
  slots_[to.index] = {.chunk = chunk, .moving = true};
  for_each_tensor(brought, [&](const TensorPiece& first, const TensorPiece& last) {
    const OptimizerTensor& tensor = tensors_[first.tensor];
    const std::uint64_t at = (first.at - brought.at) * element_;
    const bool weight = asks_weight(tensor), gradient = asks_gradient(tensor);
    if (!weight && !gradient) return;
    carrier_->bring({.slot = to.index,
                     .tensor = first.tensor,
                     .first = first.first,
                     .count = last.first + last.count - first.first,
                     .weight = weight ? to.weights + at : nullptr,
                     .gradient = gradient ? to.gradients + at : nullptr});
  });
}

TensorStaging::Slot TensorStaging::arrive(const Chunk& chunk) {
  const auto wanted = static_cast<std::size_t>(&chunk - chunks_.data());
  for (; next_ <= wanted; ++next_) {
    if (next_ == wanted) bring(wanted);
  }
  std::uint32_t found = 0;
  while (slots_[found].chunk != wanted) ++found;
  wait(found);
  // One slot stays free, for what is given back.
  const auto free = [this] { return std::ranges::count_if(slots_, [](const SlotState& s) { return !s.chunk; }); };
  for (; next_ < chunks_.size() && free() > 1; ++next_) {
    if (brought(chunks_[next_])) bring(next_);
  }
  return slot(found);
}

void TensorStaging::give(const Chunk& chunk, const Slot& from) {
  slots_[from.index] = {.chunk = std::nullopt, .moving = true};
  for_each_tensor(chunk, [&](const TensorPiece& first, const TensorPiece& last) {
    const OptimizerTensor& tensor = tensors_[first.tensor];
    if (!is_elsewhere(tensor.weight) || (brings_ == Brings::kUpdated && tensor.gradient == nullptr)) return;
    carrier_->give({.slot = from.index,
                    .tensor = first.tensor,
                    .first = first.first,
                    .count = last.first + last.count - first.first,
                    .weight = from.weights + (first.at - chunk.at) * element_,
                    .gradient = nullptr});
  });
}

void TensorStaging::finish() {
  for (std::uint32_t index = 0; index < slots_.size(); ++index) wait(index);
}

void TensorStaging::abandon() noexcept {
  for (std::uint32_t index = 0; index < slots_.size(); ++index) {
    try {
      wait(index);
    } catch (const std::exception& error) {
      log(LogLevel::kWarning, error.what());
    }
    slots_[index] = {};
  }
  tensors_ = {};
}

}  // namespace spillway
