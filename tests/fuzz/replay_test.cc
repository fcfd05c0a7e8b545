// Every target on every committed input: seeds, and what fuzzers have found. Needs no fuzzer, so that findings stay
// fixed wherever the tests run. The input is named before it is run, for one that ends the process.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <vector>

#include "spillway/log.h"
#include "tests/fuzz/targets.h"

namespace spillway::fuzz {
namespace {

struct Target {
  const char* name;
  void (*run)(Bytes input);
};

std::vector<std::filesystem::path> seeds_of(const std::string& target) {
  std::vector<std::filesystem::path> seeds;
  for (const auto& entry : std::filesystem::directory_iterator(std::filesystem::path(SPILLWAY_SEEDS) / target)) {
    seeds.push_back(entry.path());
  }
  std::ranges::sort(seeds);
  return seeds;
}

class Replay : public testing::TestWithParam<Target> {
 protected:
  Replay() { set_log_sink({}); }
};

TEST_P(Replay, EverySeedIsParsedOrRefused) {
  const auto seeds = seeds_of(GetParam().name);
  EXPECT_FALSE(seeds.empty());
  for (const auto& seed : seeds) {
    std::ifstream file(seed, std::ios::binary);
    const std::vector<char> input{std::istreambuf_iterator<char>(file), {}};
    std::fprintf(stderr, "%s\n", seed.c_str());
    EXPECT_NO_THROW(GetParam().run(std::as_bytes(std::span(input)))) << seed;
  }
}

TEST_P(Replay, TheEmptyInputIsParsedOrRefused) { EXPECT_NO_THROW(GetParam().run({})); }

INSTANTIATE_TEST_SUITE_P(, Replay,
                         testing::Values(Target{"config", config}, Target{"safetensors_header", safetensors_header},
                                         Target{"safetensors_index", safetensors_index}, Target{"manifest", manifest},
                                         Target{"store_description", store_description},
                                         Target{"snapshot_record", snapshot_record}, Target{"step_log", step_log},
                                         Target{"model_config", model_config}, Target{"decoder_config", decoder_config},
                                         Target{"pickle", pickle}, Target{"token_file", token_file},
                                         Target{"file_names", file_names}, Target{"prepared", prepared}),
                         [](const auto& target) { return std::string(target.param.name); });

}  // namespace
}  // namespace spillway::fuzz
