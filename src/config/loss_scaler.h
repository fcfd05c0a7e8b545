// What the loss is multiplied with in fp16 training, so that small gradients do not become 0, and what a step does
// whose gradients overflow. The rules are those of DeepSpeed 0.19.8, deepspeed/runtime/fp16/loss_scaler.py:
//
//   overflow:  the step is skipped. Dynamic: of the hysteresis one is used up, but for its last one; with that, the
//              scale is halved, down to its minimum, where an overflow is an error.
//   otherwise: dynamic: when as many steps lie between the last overflow (or the start) and this one as the window has,
//              or a multiple of it, the scale is doubled and the hysteresis is whole again (`consecutive`: with every
//              such step).
//
// Pure. Outside fp16 the scale is 1, and nothing may be skipped.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "spillway/config.h"

namespace spillway {

struct LossScalerState {
  static constexpr std::size_t kBytes = 32;

  double scale = 1;
  std::uint64_t clean = 0;       // steps since the last overflow, or the start
  std::uint64_t skipped = 0;     // steps of the whole run
  std::uint32_t hysteresis = 1;  // overflows until the scale drops, that one included

  void encode(std::span<std::byte, kBytes> out) const;
  // Nothing for bytes that encode() does not write.
  static std::optional<LossScalerState> decode(std::span<const std::byte> bytes);
};

class LossScaler {
 public:
  // Throws kInvalidArgument, naming the key, for values that no scale can follow from.
  explicit LossScaler(const Config& config);

  double scale() const noexcept { return state_.scale; }
  std::optional<double> reported() const { return scales_ ? std::optional(state_.scale) : std::nullopt; }
  // Steps that were skipped, of all there were: the optimizer has not seen them.
  std::uint64_t skipped() const noexcept { return state_.skipped; }
  bool skipped_last() const noexcept { return scales_ && state_.clean == 0 && state_.skipped > 0; }

  // Whether a step with an overflow may be skipped now; else it is an error, and nothing changes.
  bool may_skip() const noexcept {
    return scales_ && !(dynamic_ && last_hysteresis() && state_.scale == config_.least);
  }
  // A step is done, or skipped.
  void update(bool overflow);

  // What a commit or a snapshot keeps of a run, beside its tiles: in fp16 the state, and then the caller's blob.
  // Returns `out`.
  std::span<const std::byte> record(std::span<const std::byte> blob, std::vector<std::byte>& out) const;
  std::size_t record_bytes() const { return scales_ ? LossScalerState::kBytes : 0; }  // before the blob
  // Takes the state out of the record of a step, as far as the configuration lets it, and the blob. Throws kCorrupt.
  void resume(std::span<const std::byte> record, std::uint64_t step, std::vector<std::byte>& blob);

 private:
  bool last_hysteresis() const noexcept { return state_.hysteresis == 1; }

  const LossScaleConfig config_;
  const bool scales_, dynamic_;
  LossScalerState state_;
};

}  // namespace spillway
