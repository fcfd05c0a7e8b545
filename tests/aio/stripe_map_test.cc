// The arithmetic of a striped space, against the plainest way to say the same.
#include "spillway/stripe_map.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <set>
#include <utility>
#include <vector>

#include "spillway/error.h"
#include "temp_files.h"
#include "tests/seed.h"

namespace spillway::testing {
namespace {

using Shares = std::vector<std::uint32_t>;

constexpr std::uint64_t kUnit = 4, kHeader = 8;

// All shares of one to three files from 1 to 4, and some that are far apart.
std::vector<Shares> all_shares() {
  std::vector<Shares> all = {{255}, {255, 1}, {1, 255}, {17, 5, 1, 2}, {1, 1, 1, 1, 1, 1, 1, 1}};
  for (std::uint32_t a = 1; a <= 4; ++a) {
    all.push_back({a});
    for (std::uint32_t b = 1; b <= 4; ++b) {
      all.push_back({a, b});
      for (std::uint32_t c = 1; c <= 4; ++c) all.push_back({a, b, c});
    }
  }
  return all;
}

std::uint64_t row_bytes(const Shares& shares) {
  return std::accumulate(shares.begin(), shares.end(), std::uint64_t{0}) * kUnit;
}

std::string name(const Shares& shares) { return ::testing::PrintToString(shares); }

TEST(StripeMap, EveryByteOfTheSpaceHasItsOwnPlaceAndTheFilesHaveNoGaps) {
  for (const Shares& shares : all_shares()) {
    const StripeMap map(shares, kUnit, kHeader);
    std::vector<std::set<std::uint64_t>> places(shares.size());
    const std::uint64_t end = kHeader + 3 * row_bytes(shares);
    for (std::uint64_t at = kHeader; at < end; ++at) {
      const std::uint32_t file = map.file_of(at);
      ASSERT_LT(file, shares.size()) << name(shares);
      const StripeMap::Extent place = map.next_on(file, at);
      ASSERT_EQ(place.space_offset, at) << name(shares);
      ASSERT_TRUE(places[file].insert(place.file_offset).second) << "two bytes in one place, " << name(shares);
    }
    for (std::uint32_t file = 0; file < shares.size(); ++file) {
      ASSERT_EQ(places[file].size(), 3 * shares[file] * kUnit) << "its share of three rows, " << name(shares);
      ASSERT_EQ(*places[file].begin(), kHeader) << name(shares);
      ASSERT_EQ(*places[file].rbegin(), kHeader + places[file].size() - 1) << name(shares);
    }
  }
}

TEST(StripeMap, ARowOfTheSpaceIsOneStretchOfEveryFile) {
  for (const Shares& shares : all_shares()) {
    const StripeMap map(shares, kUnit, kHeader);
    for (std::uint64_t at = kHeader; at < kHeader + 3 * row_bytes(shares); ++at) {
      const std::uint64_t row = (at - kHeader) / row_bytes(shares);
      const std::uint32_t file = map.file_of(at);
      const std::uint64_t begin = kHeader + row * shares[file] * kUnit, place = map.next_on(file, at).file_offset;
      ASSERT_GE(place, begin) << name(shares);
      ASSERT_LT(place, begin + shares[file] * kUnit) << name(shares);
    }
  }
}

TEST(StripeMap, ARunIsContiguousInTheSpaceAndInTheFile) {
  for (const Shares& shares : all_shares()) {
    const StripeMap map(shares, kUnit, kHeader);
    const std::uint64_t end = kHeader + 2 * row_bytes(shares);
    for (std::uint64_t at = kHeader; at < end; ++at) {
      const std::uint32_t file = map.file_of(at);
      const StripeMap::Extent run = map.next_on(file, at);
      ASSERT_GT(run.bytes, 0u);
      for (std::uint64_t next = 1; next < run.bytes && at + next < end; ++next) {
        ASSERT_EQ(map.file_of(at + next), file) << name(shares);
        ASSERT_EQ(map.next_on(file, at + next).file_offset, run.file_offset + next) << name(shares);
      }
    }
  }
}

TEST(StripeMap, TheNextRunOnAFileIsTheFirstBytesOfItThatFollow) {
  for (const Shares& shares : all_shares()) {
    const StripeMap map(shares, kUnit, kHeader);
    for (std::uint32_t file = 0; file < shares.size(); ++file) {
      std::uint64_t following = kHeader;
      for (std::uint64_t at = kHeader; at < kHeader + 2 * row_bytes(shares); ++at) {
        following = std::max(following, at);
        while (map.file_of(following) != file) ++following;
        const StripeMap::Extent run = map.next_on(file, at);
        ASSERT_EQ(run.space_offset, following) << name(shares);
        ASSERT_EQ(run.file_offset, map.next_on(file, following).file_offset) << name(shares);
      }
    }
  }
}

TEST(StripeMap, AnyFewUnitsAreSpreadAsTheSharesSay) {
  for (const Shares& shares : all_shares()) {
    const StripeMap map(shares, kUnit, kHeader);
    const double units = static_cast<double>(row_bytes(shares) / kUnit);
    std::vector<double> had(shares.size(), 0);
    for (std::uint64_t unit = 0; unit < row_bytes(shares) / kUnit; ++unit) {
      had[map.file_of(kHeader + unit * kUnit)] += 1;
      for (std::size_t file = 0; file < shares.size(); ++file) {
        ASSERT_LE(std::abs(had[file] - static_cast<double>(unit + 1) * shares[file] / units), 1.0) << name(shares);
      }
    }
  }
}

TEST(StripeMap, AFileIsAsLargeAsItsLastUnitNeedsAndNoLarger) {
  for (const Shares& shares : all_shares()) {
    const StripeMap map(shares, kUnit, kHeader);
    std::vector<std::uint64_t> needed(shares.size(), kHeader);
    for (std::uint64_t end = kHeader; end < kHeader + 2 * row_bytes(shares); ++end) {
      for (std::uint32_t file = 0; file < shares.size(); ++file) {
        const std::uint64_t has = map.file_bytes(file, end);
        ASSERT_GE(has, needed[file]) << name(shares) << " up to " << end;
        ASSERT_LT(has, needed[file] + kUnit) << name(shares) << " up to " << end;
        if (shares.size() > 1) {
          ASSERT_EQ(has % kUnit, 0u);
        }
      }
      const std::uint32_t file = map.file_of(end);
      needed[file] = map.next_on(file, end).file_offset + 1;
    }
  }
}

TEST(StripeMap, OneFileIsTheSpace) {
  const StripeMap map(Shares{3}, kUnit, kHeader);
  for (const std::uint64_t at : {kHeader, kHeader + 1, std::uint64_t{1} << 50}) {
    EXPECT_EQ(map.next_on(0, at).file_offset, at);
    EXPECT_GE(map.next_on(0, at).bytes, std::uint64_t{1} << 60) << "and contiguous";
    EXPECT_EQ(map.file_bytes(0, at), at);
  }
}

TEST(StripeMap, SharesThatCannotBeAreRefused) {
  EXPECT_THROW(StripeMap(Shares{}, kUnit, kHeader), Error);
  EXPECT_THROW(StripeMap(Shares{1, 0}, kUnit, kHeader), Error);
  EXPECT_THROW(StripeMap(Shares{256}, kUnit, kHeader), Error);
  EXPECT_THROW(StripeMap(Shares{1}, 0, kHeader), Error);
}

TEST(StripeShares, FollowTheRatesInTheShortestRow) {
  const std::vector<std::uint64_t> room(3, 1000);
  const auto shares = [&](std::vector<double> rates, std::uint32_t row) {
    return stripe_shares(rates, std::span(room).first(rates.size()), 1000, row);
  };
  EXPECT_EQ(shares({1.0}, 32), Shares({1}));
  EXPECT_EQ(shares({2.5, 2.5}, 32), Shares({1, 1}));
  EXPECT_EQ(shares({2.0, 1.0}, 3), Shares({2, 1}));
  EXPECT_EQ(shares({3.0, 1.0}, 32), Shares({3, 1}));
  EXPECT_EQ(shares({1.0, 2.0, 5.0}, 8), Shares({1, 2, 5}));
  EXPECT_EQ(shares({1000.0, 1.0}, 32), Shares({1, 0})) << "not worth a single unit";
}

TEST(StripeShares, AFullDriveGetsWhatFitsAndTheOthersTheRest) {
  const auto shares = [](std::vector<double> rates, std::vector<std::uint64_t> room, std::uint64_t space) {
    return stripe_shares(rates, room, space, 32);
  };
  EXPECT_EQ(shares({1.0, 1.0}, {1000, 4000}, 4000), Shares({1, 3}));
  EXPECT_EQ(shares({9.0, 1.0}, {1000, 4000}, 4000), Shares({1, 3})) << "however fast it is";
  EXPECT_EQ(shares({1.0, 1.0}, {0, 4000}, 4000), Shares({0, 1}));
  EXPECT_EQ(shares({1.0, 1.0}, {3000, 1000}, 4000), Shares({3, 1})) << "to the last byte";
  EXPECT_EQ(shares({1.0, 1.0}, {UINT64_MAX, UINT64_MAX}, 4000), Shares({1, 1})) << "where space is not counted";
  EXPECT_EQ(shares({1.0, 1.0}, {1000, 2999}, 4000), Shares()) << "it does not fit";
  EXPECT_EQ(shares({1.0, 1.0}, {0, 0}, 4000), Shares());
}

// Every division of a row that fits, and when it is done: the shares are one of the earliest.
TEST(StripeShares, NoDivisionThatFitsIsDoneEarlier) {
  const std::uint64_t seed = test_seed();
  std::mt19937_64 random(seed);
  for (int round = 0; round < 2000; ++round) {
    const auto row = 1 + static_cast<std::uint32_t>(random() % 8);
    std::vector<double> rates;
    std::vector<std::uint64_t> room;
    for (int f = 0; f < 3; ++f) {
      rates.push_back(1.0 + static_cast<double>(random() % 50) / 10);
      room.push_back(random() % 1200);
    }
    double earliest = INFINITY;
    const auto done = [&](const Shares& s) {
      double last = 0;
      for (std::size_t f = 0; f < 3; ++f) {
        if (std::uint64_t{s[f]} * 1000 > room[f] * row) return double{INFINITY};
        last = std::max(last, s[f] / rates[f]);
      }
      return last;
    };
    for (std::uint32_t a = 0; a <= row; ++a) {
      for (std::uint32_t b = 0; a + b <= row; ++b) earliest = std::min(earliest, done({a, b, row - a - b}));
    }
    Shares shares = stripe_shares(rates, room, 1000, row);
    SCOPED_TRACE("SPILLWAY_SEED=" + std::to_string(seed) + ", round " + std::to_string(round));
    ASSERT_EQ(shares.empty(), std::isinf(earliest));
    if (shares.empty()) continue;
    const std::uint32_t sum = std::accumulate(shares.begin(), shares.end(), 0u);
    ASSERT_EQ(row % sum, 0u);
    for (std::uint32_t& share : shares) share *= row / sum;
    ASSERT_EQ(done(shares), earliest);
  }
}

}  // namespace
}  // namespace spillway::testing
