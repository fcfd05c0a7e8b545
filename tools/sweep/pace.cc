#include "tools/sweep/pace.h"

#include <algorithm>

namespace spillway::sweep {
namespace {

// A point's length is a 300th of the time, 0.2 s of a minute, when there is time for it.
constexpr double kUsualShare = 1.0 / 300, kShortest = 0.01, kLongest = 2;
constexpr double kMemory = 0.8;  // of past points in the price of the next one

}  // namespace

Pace::Pace(double seconds, bool unlimited, std::uint64_t most_written)
    : seconds_(seconds), unlimited_(unlimited), most_written_(most_written) {}

double Pace::elapsed() const { return std::chrono::duration<double>(Clock::now() - start_).count(); }

double Pace::until(double share) const { return share * seconds_ - elapsed(); }

double Pace::point_seconds(double share, double points) const {
  const double usual = std::clamp(seconds_ * kUsualShare, kShortest, kLongest);
  if (unlimited_) return usual;
  return std::clamp(until(share) / std::max(1.0, points) - price_, kShortest, usual);
}

void Pace::note(double wanted, double took) {
  price_ = kMemory * price_ + (1 - kMemory) * std::max(0.0, took - wanted);
}

}  // namespace spillway::sweep
