#include "kernels/tile_update.h"

#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "kernels/optimizer.h"
#include "kernels/workers.h"
#include "spillway/units.h"
#include "tests/kernels/reduced_tile.h"

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

// States in fewer bytes: | exp_avg | exp_avg_sq | residual or master | scales | padding |
struct SmallTile {
  SmallTile(DType type, MomentFormat format, std::size_t count) {
    std::mt19937_64 random(4);
    ReducedTile values = random_reduced(type, OptimizerKind::kAdam, format, count, random);
    for (std::size_t i = 0; i < count; ++i) values.weights.set(i, 0.5f, 0, 0, static_cast<float>(i % 13) * 1e-3f);
    for (std::uint16_t& scale : values.exp_avg_scales) scale = float_to_bf16(0.25f + static_cast<float>(random() % 7));
    for (std::uint16_t& scale : values.exp_avg_sq_scales) scale = float_to_bf16(1 + static_cast<float>(random() % 5));
    if (format == MomentFormat::kBFloat16) {
      std::ranges::fill(values.exp_avg, std::byte{0x3c});  // 0.0115, as bf16
      std::ranges::fill(values.exp_avg_sq, std::byte{0x3d});
    }
    weights = values.weights.weight, gradient = values.weights.gradient;
    tile = {.type = type, .weight = nullptr, .count = count};
    tile.reduced.format = format;
    const auto append = [&](const auto& array, bool scales) {
      const auto bytes = std::as_bytes(std::span(array));
      if (!bytes.empty()) offsets.push_back(states.size());
      if (!bytes.empty() && !scales) elements[offsets.size() - 1] = bytes.size() / count;
      states.insert(states.end(), bytes.begin(), bytes.end());
    };
    append(values.exp_avg, false), append(values.exp_avg_sq, false);
    append(values.weights.residual, false), append(values.weights.master, false);
    append(values.exp_avg_scales, true), append(values.exp_avg_sq_scales, true);
    weights.resize(align_up(weights.size(), kPadding)), states.resize(align_up(states.size(), kPadding));
  }
  OptimizerTile arrays() {
    OptimizerTile at = tile;
    std::size_t next = 0;
    const auto place = [&] { return states.data() + offsets[next++]; };
    at.weight = weights.data(), at.gradient = gradient.data();
    at.reduced.exp_avg = place(), at.reduced.exp_avg_sq = place();
    if (at.type == DType::kBFloat16) at.residual = reinterpret_cast<std::int16_t*>(place());
    if (at.type == DType::kFloat16) at.master = reinterpret_cast<float*>(place());
    if (at.reduced.format == MomentFormat::kInt8) {
      at.reduced.exp_avg_scales = reinterpret_cast<std::uint16_t*>(place());
      at.reduced.exp_avg_sq_scales = reinterpret_cast<std::uint16_t*>(place());
    }
    return at;
  }
  OptimizerTile tile;
  ElementBytes elements = {};
  std::vector<std::byte> weights, states, gradient;
  std::vector<std::size_t> offsets;
};

// One pass where the tile is of whole units, three where it is not; and hashes wanted on both sides, or one.
TEST(TileUpdate, HashesAndUpdatesMomentsInFewerBytes) {
  const auto workers = create_workers(3);
  const OptimizerScalars scalars[] = {
      optimizer_scalars({.learning_rate = 1e-5, .weight_decay = 0.01, .seed = 9}, 7, 0.5)};
  for (const DType type : kDTypes) {
    for (const MomentFormat format : kReducedFormats) {
      for (const std::size_t count : {std::size_t{5 * 1024}, std::size_t{kHashedByteUnit}, 3 * kHashedTileUnit}) {
        if (count > kHashedByteUnit && type != DType::kBFloat16) continue;  // the odd one, once
        const GroupRange groups[] = {{count / 2048 * 1024, 0}, {count / 2048 * 1024 + 1024, kNotUpdated}, {count, 0}};
        SmallTile wanted(type, format, count);
        const auto states_before = granules_of(wanted.states), weights_before = granules_of(wanted.weights);
        EXPECT_TRUE(optimizer_update(wanted.arrays(), scalars[0], 0, groups[0].end));
        EXPECT_TRUE(optimizer_update(wanted.arrays(), scalars[0], groups[1].end, count));
        for (const bool before : {true, false}) {
          SmallTile tile(type, format, count);
          std::vector<std::uint64_t> sums[4];
          for (auto& s : sums) s.resize(&s < sums + 2 ? weights_before.size() : states_before.size());
          if (!before) sums[0].clear(), sums[2].clear();
          const TileUpdate update{.tile = tile.arrays(),
                                  .groups = groups,
                                  .scalars = scalars,
                                  .weights = {tile.weights, sums[0], sums[1], {size_of(type)}},
                                  .states = {tile.states, sums[2], sums[3], tile.elements}};
          ASSERT_TRUE(update_tile(update, *workers));
          EXPECT_EQ(tile.weights, wanted.weights) << name_of(type) << name_of(format) << count;
          EXPECT_EQ(tile.states, wanted.states) << name_of(type) << name_of(format) << count;
          EXPECT_EQ(sums[1], granules_of(wanted.weights));
          EXPECT_EQ(sums[3], granules_of(wanted.states)) << name_of(type) << name_of(format) << count;
          if (!before) continue;
          EXPECT_EQ(sums[0], weights_before);
          EXPECT_EQ(sums[2], states_before) << name_of(type) << name_of(format) << count;
        }
      }
    }
  }
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
                         ::testing::Combine(::testing::ValuesIn(kDTypes), ::testing::Values(OptimizerKind::kAdam),
                                            ::testing::Values(1024, 129 * 1024, 256 * 1024)),
                         case_name);
INSTANTIATE_TEST_SUITE_P(Kinds, TileUpdateTest,
                         ::testing::Combine(::testing::ValuesIn(kDTypes), ::testing::ValuesIn(kOptimizerKinds),
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
