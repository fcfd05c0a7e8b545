// The seed of a test's random cases: the same in every run, so that a commit which passed passes again.
// SPILLWAY_SEED=123 takes another one, SPILLWAY_SEED=random a new one every time. Printed, so that a failure can be
// repeated.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string_view>

namespace spillway {

inline std::uint64_t test_seed() {
  const char* given = std::getenv("SPILLWAY_SEED");
  std::uint64_t seed = 20260103;
  if (given != nullptr) {
    seed = std::string_view(given) == "random" ? std::random_device()() : std::strtoull(given, nullptr, 10);
  }
  std::printf("SPILLWAY_SEED=%llu\n", static_cast<unsigned long long>(seed));
  return seed;
}

}  // namespace spillway
