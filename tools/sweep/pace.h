// A sweep's time and bytes: how long the next points may take, and how much they may write.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>

namespace spillway::sweep {

// The sweep's phases end at these shares of its time. What a phase leaves over, the next ones have.
struct PhaseEnds {
  double fill = 0.15, alone = 0.15, coarse = 0.43, refine = 0.53, finals = 0.84, ways = 0.95, paths = 0.95;
  static PhaseEnds of(std::size_t paths) {
    if (paths == 1) return {};
    return {.fill = 0.15, .alone = 0.20, .coarse = 0.44, .refine = 0.52, .finals = 0.74, .ways = 0.82, .paths = 0.95};
  }
};

class Pace {
 public:
  // `unlimited`: no phase ends before it is done.
  Pace(double seconds, bool unlimited, std::uint64_t most_written);

  double elapsed() const;
  double total() const { return seconds_; }
  double until(double share) const;  // seconds left to that share of the time, possibly negative
  bool past(double share) const { return !unlimited_ && until(share) <= 0; }
  // The length of a point when `points` of its weight are to be done by `share` of the time.
  double point_seconds(double share, double points) const;
  // A point of `wanted` seconds took `took`: what goes beyond is the price of any point.
  void note(double wanted, double took);

  std::uint64_t written() const { return written_; }
  std::uint64_t most_written() const { return most_written_; }
  std::uint64_t may_write() const { return most_written_ - written_; }
  void note_written(std::uint64_t bytes) { written_ += bytes; }

 private:
  using Clock = std::chrono::steady_clock;
  const double seconds_;
  const bool unlimited_;
  const std::uint64_t most_written_;
  std::uint64_t written_ = 0;
  double price_ = 0.03;
  Clock::time_point start_ = Clock::now();
};

}  // namespace spillway::sweep
