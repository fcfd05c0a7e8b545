#include "kernels/tile_update.h"

#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "kernels/adam.h"
#include "kernels/workers.h"
#include "random.h"
#include "spillway/bf16.h"
#include "spillway/units.h"

namespace spillway {
namespace {

constexpr std::uint64_t kPadding = 64 * kKiB;

// A tile as it lies in memory: an extent of weights and one of states, both padded.
struct Tile {
  Tile(DType type, std::size_t elements, std::uint64_t seed) : type(type), count(elements) {
    weights.resize(align_up(count * size_of(type), kPadding));
    states.resize(align_up(count * (type == DType::kBFloat16 ? 10 : 8), kPadding));
    gradient.resize(count * size_of(type));
    std::mt19937_64 random(seed);
    const auto small = [&random] { return static_cast<float>(static_cast<std::int32_t>(random())) * 1e-10f; };
    for (std::size_t i = 0; i < count; ++i) {
      put(weights, i, small());
      put(gradient, i, small());
      const float m = small(), v = std::abs(small());
      std::memcpy(states.data() + 4 * i, &m, 4);
      std::memcpy(states.data() + 4 * (count + i), &v, 4);
      if (type == DType::kBFloat16) std::memcpy(states.data() + 8 * count + 2 * i, &i, 2);
    }
  }
  void put(std::vector<std::byte>& to, std::size_t i, float value) const {
    const std::uint16_t half = float_to_bf16(value);
    std::memcpy(to.data() + i * size_of(type), type == DType::kFloat32 ? static_cast<void*>(&value) : (void*)&half,
                size_of(type));
  }
  AdamTile arrays() {
    AdamTile tile{.type = type, .weight = weights.data(), .gradient = gradient.data(), .count = count};
    tile.exp_avg = reinterpret_cast<float*>(states.data());
    tile.exp_avg_sq = tile.exp_avg + count;
    if (type == DType::kBFloat16) tile.residual = reinterpret_cast<std::int16_t*>(states.data() + 8 * count);
    return tile;
  }

  DType type;
  std::size_t count;
  std::vector<std::byte> weights, states, gradient;
};

std::vector<std::uint64_t> granules_of(std::span<const std::byte> extent) {
  std::vector<std::uint64_t> sums;
  for (std::uint64_t at = 0; at < extent.size(); at += kGranuleBytes) {
    sums.push_back(granule_checksum(extent.subspan(at, std::min<std::uint64_t>(kGranuleBytes, extent.size() - at))));
  }
  return sums;
}

class TileUpdateTest : public ::testing::TestWithParam<std::tuple<DType, std::size_t>> {};

TEST_P(TileUpdateTest, HashesAndUpdatesAsSeparatePassesDo) {
  const auto [type, count] = GetParam();
  const auto workers = create_workers(3);
  const AdamScalars scalars = adam_scalars({.weight_decay = 0.01}, 7, 0.5);
  Tile wanted(type, count, 1);
  const auto weights_before = granules_of(wanted.weights), states_before = granules_of(wanted.states);
  EXPECT_TRUE(adam_update_reference(wanted.arrays(), scalars, 0, count));
  const auto weights_after = granules_of(wanted.weights), states_after = granules_of(wanted.states);

  // Bits: weights before and after, states before and after. What a run asks for, each alone, and nothing.
  for (const unsigned choice : {15u, 1u, 2u, 4u, 8u, 0u}) {
    Tile tile(type, count, 1);
    std::vector<std::uint64_t> sums[4];
    const auto room = [&](unsigned which, std::size_t granules) -> std::span<std::uint64_t> {
      if ((choice >> which & 1) != 0) sums[which].assign(granules, 0);
      return sums[which];
    };
    const std::size_t w = weights_before.size(), s = states_before.size();
    const TileUpdate update{.tile = tile.arrays(),
                            .weights = {tile.weights, room(0, w), room(1, w)},
                            .states = {tile.states, room(2, s), room(3, s)}};
    ASSERT_TRUE(update_tile(update, scalars, *workers));
    EXPECT_EQ(tile.weights, wanted.weights) << choice;
    EXPECT_EQ(tile.states, wanted.states) << choice;
    const std::vector<std::uint64_t>* all[] = {&weights_before, &weights_after, &states_before, &states_after};
    for (unsigned which = 0; which < 4; ++which) {
      if ((choice >> which & 1) != 0) {
        EXPECT_EQ(sums[which], *all[which]) << choice << ' ' << which;
      }
    }
  }
}

TEST_P(TileUpdateTest, AValueThatIsNotFiniteIsReported) {
  const auto [type, count] = GetParam();
  const auto workers = create_workers(2);
  Tile tile(type, count, 2);
  tile.put(tile.gradient, count / 2, 3e38f);
  std::vector<std::uint64_t> after(granules_of(tile.states).size());
  const TileUpdate update{.tile = tile.arrays(), .weights = {tile.weights, {}, {}}, .states = {tile.states, {}, after}};
  EXPECT_FALSE(update_tile(update, adam_scalars({}, 1, 1.0), *workers));
  EXPECT_EQ(after, granules_of(tile.states));
}

// Whole groups, and tiles that end inside one.
INSTANTIATE_TEST_SUITE_P(, TileUpdateTest,
                         ::testing::Combine(::testing::Values(DType::kFloat32, DType::kBFloat16),
                                            ::testing::Values(1024, 129 * 1024, 256 * 1024)),
                         [](const auto& info) {
                           return std::string(name_of(std::get<0>(info.param))) +
                                  std::to_string(std::get<1>(info.param));
                         });

TEST(GranuleHasher, PartsOfAnySizeGiveTheChecksumsOfWholeGranules) {
  std::vector<std::byte> bytes(3 * kGranuleBytes);
  std::mt19937_64 random(3);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
  for (const std::size_t part : {64u, 1000u, 65536u, 300000u, 1000000u}) {
    std::vector<std::uint64_t> sums(3);
    GranuleHasher hasher(sums.data());
    for (std::size_t at = 0; at < bytes.size(); at += part) {
      hasher.add(std::span(bytes).subspan(at, std::min(part, bytes.size() - at)));
    }
    EXPECT_EQ(sums, granules_of(bytes)) << part;
  }
}

}  // namespace
}  // namespace spillway
