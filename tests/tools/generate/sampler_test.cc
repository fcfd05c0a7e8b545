#include "tools/generate/sampler.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "spillway/error.h"

namespace spillway::models::generate {
namespace {

using ::testing::ElementsAre;

// Of tokens with these probabilities.
std::vector<float> logits_of(const std::vector<double>& probabilities) {
  std::vector<float> logits;
  for (const double p : probabilities) logits.push_back(static_cast<float>(std::log(p)) + 3);
  return logits;
}

// How often each comes.
std::vector<int> counts(const Sampling& sampling, const std::vector<float>& logits, int draws) {
  Sampler sampler(sampling);
  std::vector<int> found(logits.size());
  for (int i = 0; i < draws; ++i) ++found[sampler.next(logits).token];
  return found;
}

constexpr int kDraws = 20000;
// Four standard deviations of a count.
double deviation(double p) { return 4 * std::sqrt(kDraws * p * (1 - p)); }

TEST(GenerateSampler, GreedyTakesTheFirstOfTheMostLikely) {
  Sampler sampler({});
  EXPECT_EQ(sampler.next(std::vector<float>{1, 4, 2, 4}).token, 1u);
  EXPECT_EQ(sampler.next(std::vector<float>{-5, -7, -5}).token, 0u);
}

TEST(GenerateSampler, LogProbabilitiesAreOfTheLogitsAsTheyAre) {
  const std::vector<float> logits = logits_of({0.1, 0.6, 0.3});
  EXPECT_NEAR(Sampler({}).next(logits).log_probability, std::log(0.6), 1e-6);
  const Choice drawn = Sampler({.temperature = 5, .top_p = 0.1f}).next(logits);
  EXPECT_EQ(drawn.token, 1u);
  EXPECT_NEAR(drawn.log_probability, std::log(0.6), 1e-6);
}

TEST(GenerateSampler, TokensComeByTheirProbability) {
  const std::vector<double> wanted = {0.1, 0.55, 0.05, 0.3};
  const std::vector<int> found = counts({.temperature = 1}, logits_of(wanted), kDraws);
  for (std::size_t t = 0; t < wanted.size(); ++t) EXPECT_NEAR(found[t], kDraws * wanted[t], deviation(wanted[t]));
}

TEST(GenerateSampler, ATemperatureDividesLogits) {
  // 2 makes roots of probabilities: 0.64 and 0.36 become 0.8 and 0.6, of 1.4.
  const std::vector<int> found = counts({.temperature = 2}, logits_of({0.64, 0.36}), kDraws);
  EXPECT_NEAR(found[0], kDraws * 0.8 / 1.4, deviation(0.8 / 1.4));
}

TEST(GenerateSampler, TopPKeepsTheFewestThatReachIt) {
  const std::vector<float> logits = logits_of({0.125, 0.5, 0.25, 0.125});
  const auto kept = [&](float top_p) {
    std::vector<std::size_t> tokens;
    const std::vector<int> found = counts({.temperature = 1, .top_p = top_p}, logits, 2000);
    for (std::size_t t = 0; t < found.size(); ++t)
      if (found[t] > 0) tokens.push_back(t);
    return tokens;
  };
  EXPECT_THAT(kept(0), ElementsAre(1));
  EXPECT_THAT(kept(0.49f), ElementsAre(1));
  EXPECT_THAT(kept(0.51f), ElementsAre(1, 2));
  EXPECT_THAT(kept(0.76f), ElementsAre(0, 1, 2));  // of equal ones the first
  EXPECT_THAT(kept(0.99f), ElementsAre(0, 1, 2, 3));
  const std::vector<int> found = counts({.temperature = 1, .top_p = 0.7f}, logits, kDraws);
  EXPECT_NEAR(found[1], kDraws * 2. / 3, deviation(2. / 3)) << "what is left is as likely as before to each other";
}

TEST(GenerateSampler, ASeedSaysWhatIsDrawn) {
  const std::vector<float> logits(50, 0.0f);
  const auto drawn = [&](std::uint64_t seed) {
    Sampler sampler({.temperature = 1, .seed = seed});
    std::vector<std::uint32_t> tokens;
    for (int i = 0; i < 20; ++i) tokens.push_back(sampler.next(logits).token);
    return tokens;
  };
  EXPECT_EQ(drawn(7), drawn(7));
  EXPECT_NE(drawn(7), drawn(8));
  EXPECT_NE(drawn(0), drawn(1));
}

TEST(GenerateSampler, LogitsThatAreNotFiniteAreRefused) {
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    for (const float temperature : {0.0f, 1.0f}) {
      Sampler sampler({.temperature = temperature});
      EXPECT_THROW(sampler.next(std::vector<float>{0, bad, 1}), Error);
    }
  }
}

}  // namespace
}  // namespace spillway::models::generate
