// Which settings are worth measuring, and which one is chosen. Pure decisions: no clock, no file.
//
// The grid has blocks of 128 KiB to 16 MiB and depths of 1 to 256, in powers of two. A drive's rate over it is a
// plateau with a slope towards few bytes in flight; what is looked for is the cheapest point of the plateau:
//
//   depth   1    2    4    8   16   32         1. every second block and depth, once
//   1 MiB   .    o    .    x    X    .         2. between them, where the rate is near the best (x), cheapest first
//   4 MiB   o    x    X    .    .    .         3. the best few (X) again and again, in turn
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <vector>

#include "tools/sweep/point.h"

namespace spillway::sweep {

// A setting counts as good as the best one when its rate is at least this share of it.
inline constexpr double kGoodShare = 0.97;

struct Limits {
  std::uint64_t least_block = 128 << 10, most_block = 16 << 20;
  std::uint64_t most_in_flight = 128 << 20;  // per path
};

std::vector<Setting> full_grid(const Limits& limits);
// Every second block and depth, from the middle outwards, so that a search that runs out of time has seen the middle.
std::vector<Setting> coarse_grid(const Limits& limits);

// Rates measured so far, one number each.
using Rates = std::map<Setting, double>;

// Settings of the grid not measured yet that may be good and cheaper than what is good so far, or better than the best;
// the most promising first, at most `most`. Empty: nothing more to look for.
std::vector<Setting> worth_measuring(const Limits& limits, const Rates& rates, std::size_t most);

// The settings to be measured again, at most `most`: the cheapest that look good, and the fastest.
std::vector<Setting> finalists(const Rates& rates, std::size_t most);

// A setting with one rate for each round; in a round all candidates were measured shortly after one another.
struct Candidate {
  Setting setting;
  std::vector<double> rates;
  double cpu_seconds_per_gib = 0;
};

struct Choice {
  std::size_t chosen = 0, fastest = 0;  // indices of candidates
  double share = 0;                     // rate of the chosen one over that of the fastest
};

// The least memory in flight among those within 3 % of the fastest; of two with the same, the one that takes less CPU.
// A drive's mood changes from round to round, so rates are compared inside a round, and the median of these ratios
// counts.
Choice choose(std::span<const Candidate> candidates);

// Index of the first way within 3 % of the fastest, or of a later one there that takes less than nine tenths of its
// CPU.
std::size_t choose_way(std::span<const Candidate> ways);

}  // namespace spillway::sweep
