#include "kernels/tile_update.h"

#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "kernels/optimizer.h"
#include "kernels/workers.h"
#include "spillway/units.h"
#include "tests/kernels/optimizer_tile.h"

namespace spillway {
namespace {

constexpr std::uint64_t kPadding = 64 * kKiB;

// A tile as it lies in memory: an extent of weights and one of states, both padded.
struct Tile {
  Tile(DType dtype, OptimizerKind optimizer, std::size_t elements, std::uint64_t seed)
      : type(dtype), kind(optimizer), count(elements) {
    std::mt19937_64 random(seed);
    const auto small = [&random] { return static_cast<float>(static_cast<std::int32_t>(random())) * 1e-10f; };
    OwnedTile values(type, kind, count);
    for (std::size_t i = 0; i < count; ++i) values.set(i, small(), small(), std::abs(small()), small());
    weights = values.weight;
    gradient = values.gradient;
    const auto append = [this](const auto& array) {
      const auto bytes = std::as_bytes(std::span(array));
      states.insert(states.end(), bytes.begin(), bytes.end());
    };
    append(values.exp_avg), append(values.exp_avg_sq), append(values.residual), append(values.master);
    weights.resize(align_up(weights.size(), kPadding));
    states.resize(align_up(states.size(), kPadding));
  }
  OptimizerTile arrays() {
    OptimizerTile tile{.type = type, .weight = weights.data(), .gradient = gradient.data(), .count = count};
    std::byte* at = states.data();
    const auto next = [&at, this](auto*& array, bool there) {
      if (!there) return;
      array = reinterpret_cast<std::remove_reference_t<decltype(array)>>(at);
      at += count * sizeof(*array);
    };
    next(tile.exp_avg, has_exp_avg(kind)), next(tile.exp_avg_sq, has_exp_avg_sq(kind));
    next(tile.residual, type == DType::kBFloat16), next(tile.master, type == DType::kFloat16);
    return tile;
  }

  ElementBytes weight_bytes() const { return {size_of(type)}; }
  ElementBytes state_bytes() {
    const OptimizerTile tile = arrays();
    ElementBytes bytes = {};
    std::size_t next = 0;
    for (const float* array : {tile.exp_avg, tile.exp_avg_sq, tile.master}) {
      if (array != nullptr) bytes[next++] = sizeof *array;
    }
    if (tile.residual != nullptr) bytes[next++] = sizeof *tile.residual;
    return bytes;
  }

  DType type;
  OptimizerKind kind;
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

class TileUpdateTest : public ::testing::TestWithParam<std::tuple<DType, OptimizerKind, std::size_t>> {};

TEST_P(TileUpdateTest, HashesAndUpdatesAsSeparatePassesDo) {
  const auto [type, kind, count] = GetParam();
  const auto workers = create_workers(3);
  // Groups that end inside a hashed piece's neighbour, inside a group of pieces, and at the end; between two of them,
  // elements that are not updated.
  const OptimizerScalars scalars[] = {optimizer_scalars({.kind = kind, .weight_decay = 0.01}, 7, 0.5),
                                      optimizer_scalars({.kind = kind, .learning_rate = 1e-2}, 7, 0.5)};
  const GroupRange groups[] = {{count / 1024 / 3 * 1024, 1},
                               {count / 1024 * 2 / 5 * 1024, kNotUpdated},
                               {count / 1024 / 2 * 1024, 0},
                               {count, 1}};
  Tile wanted(type, kind, count, 1);
  const auto weights_before = granules_of(wanted.weights), states_before = granules_of(wanted.states);
  std::uint64_t begin = 0;
  for (const GroupRange& range : groups) {
    if (range.group != kNotUpdated) {
      EXPECT_TRUE(optimizer_update_reference(wanted.arrays(), scalars[range.group], begin, range.end));
    }
    begin = range.end;
  }
  const auto weights_after = granules_of(wanted.weights), states_after = granules_of(wanted.states);

  // Bits: weights before and after, states before and after. What a run asks for, each alone, and nothing.
  for (const unsigned choice : {15u, 1u, 2u, 4u, 8u, 0u}) {
    Tile tile(type, kind, count, 1);
    std::vector<std::uint64_t> sums[4];
    const auto room = [&](unsigned which, std::size_t granules) -> std::span<std::uint64_t> {
      if ((choice >> which & 1) != 0) sums[which].assign(granules, 0);
      return sums[which];
    };
    const std::size_t w = weights_before.size(), s = states_before.size();
    const TileUpdate update{.tile = tile.arrays(),
                            .groups = groups,
                            .scalars = scalars,
                            .weights = {tile.weights, room(0, w), room(1, w), tile.weight_bytes()},
                            .states = {tile.states, room(2, s), room(3, s), tile.state_bytes()}};
    ASSERT_TRUE(update_tile(update, *workers));
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
  const auto [type, kind, count] = GetParam();
  const auto workers = create_workers(2);
  Tile tile(type, kind, count, 2);
  const std::uint32_t infinity = 0x7f800000u;
  const auto* first = reinterpret_cast<const std::byte*>(&infinity) + (type == DType::kFloat32 ? 0 : 2);
  std::copy_n(first, size_of(type), tile.gradient.data() + count / 2 * size_of(type));
  std::vector<std::uint64_t> after(granules_of(tile.states).size());
  const OptimizerScalars scalars[] = {optimizer_scalars({.kind = kind}, 1, 1.0)};
  const GroupRange groups[] = {{count, 0}};
  const TileUpdate update{.tile = tile.arrays(),
                          .groups = groups,
                          .scalars = scalars,
                          .weights = {tile.weights, {}, {}, tile.weight_bytes()},
                          .states = {tile.states, {}, after, tile.state_bytes()}};
  EXPECT_FALSE(update_tile(update, *workers));
  EXPECT_EQ(after, granules_of(tile.states));
}

std::string case_name(const ::testing::TestParamInfo<TileUpdateTest::ParamType>& info) {
  return std::string(name_of(std::get<0>(info.param))) + "_" + std::string(name_of(std::get<1>(info.param))) + "_" +
         std::to_string(std::get<2>(info.param));
}

// Whole groups, and tiles that end inside one.
INSTANTIATE_TEST_SUITE_P(Sizes, TileUpdateTest,
                         ::testing::Combine(::testing::ValuesIn(kAllTypes), ::testing::Values(OptimizerKind::kAdam),
                                            ::testing::Values(1024, 129 * 1024, 256 * 1024)),
                         case_name);
INSTANTIATE_TEST_SUITE_P(Kinds, TileUpdateTest,
                         ::testing::Combine(::testing::ValuesIn(kAllTypes),
                                            ::testing::Values(OptimizerKind::kAdagrad, OptimizerKind::kLion,
                                                              OptimizerKind::kSgd),
                                            ::testing::Values(128 * 1024)),
                         case_name);

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

TEST(RunningChecksum, PartsOfAnySizeGiveTheChecksumOfTheWhole) {
  std::vector<std::byte> bytes(100'000);
  std::mt19937_64 random(4);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
  RunningChecksum checksum;
  for (const std::size_t part : {1u, 1000u, 65536u, 100'000u}) {
    checksum.restart();
    for (std::size_t at = 0; at < bytes.size(); at += part) {
      checksum.add(std::span(bytes).subspan(at, std::min(part, bytes.size() - at)));
    }
    EXPECT_EQ(checksum.value(), granule_checksum(bytes)) << part;
  }
}

}  // namespace
}  // namespace spillway
