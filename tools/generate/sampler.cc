#include "tools/generate/sampler.h"

#include <algorithm>
#include <cmath>

#include "spillway/error.h"
#include "tools/models/splitmix.h"

namespace spillway::models::generate {

Choice Sampler::next(std::span<const float> logits) {
  if (!std::ranges::all_of(logits, [](float logit) { return std::isfinite(logit); })) {
    throw Error(Code::kNonFinite, {.object = "logits",
                                   .happened = "are not finite",
                                   .errno_value = 0,
                                   .hint = "generate in fp32, and look at the run that trained the model"});
  }
  const auto most = static_cast<std::uint32_t>(std::ranges::max_element(logits) - logits.begin());
  const std::uint32_t token = sampling_.temperature == 0 ? most : drawn(logits);
  double sum = 0;
  for (const float logit : logits) sum += std::exp(static_cast<double>(logit) - logits[most]);
  return {token, static_cast<float>(static_cast<double>(logits[token]) - logits[most] - std::log(sum))};
}

// In fp32, and in the order of probability: what is drawn is a matter of the logits and the seed alone.
std::uint32_t Sampler::drawn(std::span<const float> logits) {
  const float most = *std::ranges::max_element(logits);
  candidates_.clear();
  float sum = 0;
  for (std::uint32_t token = 0; token < logits.size(); ++token) {
    const float probability = std::exp((logits[token] - most) / sampling_.temperature);
    candidates_.push_back({logits[token], probability, token});
    sum += probability;
  }
  std::ranges::sort(candidates_, [](const Candidate& a, const Candidate& b) {
    return a.logit != b.logit ? a.logit > b.logit : a.token < b.token;
  });
  std::size_t kept = 0;
  float reached = 0;
  while (kept < candidates_.size() && (kept == 0 || reached < sampling_.top_p * sum))
    reached += candidates_[kept++].probability;
  // 24 bits, all of which a float holds.
  const auto bits = static_cast<float>(mix(mix(sampling_.seed) + draws_++) >> 40);
  const float at = bits * 0x1p-24f * reached;
  float passed = 0;
  for (std::size_t i = 0; i + 1 < kept; ++i) {
    passed += candidates_[i].probability;
    if (at < passed) return candidates_[i].token;
  }
  return candidates_[kept - 1].token;
}

}  // namespace spillway::models::generate
