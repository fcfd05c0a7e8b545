#include "src/config/loss_scaler.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "spillway/error.h"

namespace spillway {
namespace {

constexpr std::uint32_t kScaleFormat = 1;

// As it lies in a record.
struct Encoded {
  double scale;
  std::uint64_t clean, skipped;
  std::uint32_t hysteresis, format;
};
static_assert(sizeof(Encoded) == LossScalerState::kBytes);

void check(const LossScaleConfig& config) {
  const auto refuse = [](const char* key, const std::string& happened, const char* hint) {
    throw Error(Code::kInvalidArgument, {std::string("fp16.") + key, happened, 0, hint});
  };
  if (!std::isfinite(config.fixed) || config.fixed < 0)
    refuse("loss_scale", fmt::format("{} is no scale", config.fixed), "take 0, which is dynamic, or a power of two");
  if (config.fixed > 0) return;
  if (!std::isfinite(config.least) || config.least <= 0)
    refuse("min_loss_scale", fmt::format("{} is no scale", config.least), "take 1, the default");
  if (config.window == 0) refuse("loss_scale_window", "is 0 steps", "take 1000, the default");
  if (config.hysteresis == 0) refuse("hysteresis", "is 0", "take 2, the default");
  if (config.initial_power > kMostScalePower ||
      std::ldexp(1.0, static_cast<int>(config.initial_power)) < config.least) {
    refuse("initial_scale_power",
           fmt::format("2^{} is not between min_loss_scale, {}, and 2^{}", config.initial_power, config.least,
                       kMostScalePower),
           "take 16, the default");
  }
}

}  // namespace

void LossScalerState::encode(std::span<std::byte, kBytes> out) const {
  const Encoded encoded{scale, clean, skipped, hysteresis, kScaleFormat};
  std::memcpy(out.data(), &encoded, sizeof encoded);
}

std::optional<LossScalerState> LossScalerState::decode(std::span<const std::byte> bytes) {
  Encoded encoded;
  if (bytes.size() != sizeof encoded) return std::nullopt;
  std::memcpy(&encoded, bytes.data(), sizeof encoded);
  const bool possible = std::isfinite(encoded.scale) && encoded.scale > 0 && encoded.hysteresis > 0;
  if (encoded.format != kScaleFormat || !possible) return std::nullopt;
  return LossScalerState{
      .scale = encoded.scale, .clean = encoded.clean, .skipped = encoded.skipped, .hysteresis = encoded.hysteresis};
}

LossScaler::LossScaler(const Config& config)
    : config_(config.loss_scale),
      scales_(config.weights == DType::kFloat16),
      dynamic_(scales_ && config.loss_scale.fixed == 0) {
  if (!scales_) return;
  check(config_);
  state_.scale = dynamic_ ? std::ldexp(1.0, static_cast<int>(config_.initial_power)) : config_.fixed;
  state_.hysteresis = dynamic_ ? config_.hysteresis : 1;
}

void LossScaler::update(bool overflow) {
  if (overflow) {
    SPILLWAY_CHECK(may_skip(), "whoever skips a step has asked");
    ++state_.skipped;
    state_.clean = 0;
    if (!dynamic_) return;
    if (last_hysteresis()) {
      state_.scale = std::max(state_.scale / 2, config_.least);
    } else {
      --state_.hysteresis;
    }
    return;
  }
  const std::uint64_t before = state_.clean++;  // steps between the last overflow and this one
  if (!dynamic_) return;
  const bool grows = before > 0 && before % config_.window == 0;
  if (config_.consecutive_hysteresis || grows) state_.hysteresis = config_.hysteresis;
  if (grows) state_.scale *= 2;
}

std::span<const std::byte> LossScaler::record(std::span<const std::byte> blob, std::vector<std::byte>& out) const {
  out.resize(record_bytes() + blob.size());
  if (scales_) state_.encode(std::span(out).first<LossScalerState::kBytes>());
  std::ranges::copy(blob, out.begin() + static_cast<std::ptrdiff_t>(record_bytes()));
  return out;
}

void LossScaler::resume(std::span<const std::byte> record, std::uint64_t step, std::vector<std::byte>& blob) {
  if (!scales_) return blob.assign(record.begin(), record.end());
  const auto state = LossScalerState::decode(record.first(std::min(record.size(), record_bytes())));
  if (!state || state->skipped > step) {
    throw Error(Code::kCorrupt, {"the loss scale of the last step", "is not as it was written", 0,
                                 "go on with the version of Spillway that wrote it"});
  }
  const double scale = dynamic_ ? std::max(state->scale, config_.least) : config_.fixed;
  const std::uint32_t hysteresis = dynamic_ ? std::min(state->hysteresis, config_.hysteresis) : 1;
  state_ = {.scale = scale, .clean = state->clean, .skipped = state->skipped, .hysteresis = hysteresis};
  blob.assign(record.begin() + static_cast<std::ptrdiff_t>(record_bytes()), record.end());
}

}  // namespace spillway
