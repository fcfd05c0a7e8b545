// Which token follows, by its logits.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace spillway::models::generate {

struct Sampling {
  // 0: greedy, the most likely token; of equal ones the first.
  float temperature = 0;
  // Of the tokens in the order of their probability the fewest whose sum reaches this (nucleus sampling: Holtzman and
  // others, 2019, arXiv:1904.09751); at least one.
  float top_p = 1;
  std::uint64_t seed = 0;  // the same one draws the same tokens of the same logits
};

struct Choice {
  std::uint32_t token;
  float log_probability;  // of the logits as they are: without temperature and top_p
};

class Sampler {
 public:
  explicit Sampler(const Sampling& sampling) : sampling_(sampling) {}
  // Logits that are not finite are refused (kNonFinite).
  Choice next(std::span<const float> logits);

 private:
  struct Candidate {
    float logit, probability;
    std::uint32_t token;
  };
  std::uint32_t drawn(std::span<const float> logits);

  const Sampling sampling_;
  std::uint64_t draws_ = 0;
  std::vector<Candidate> candidates_;
};

}  // namespace spillway::models::generate
