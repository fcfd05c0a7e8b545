// The rigs of all ranks as one: each step of a measurement is made by all of them at once, and what comes of it is of
// all together. The sweep runs on the first rank alone, and calls; the others follow.
//
//   rank 0   run(point) ──┬─ ready ─┬─ warm-up │ window │ hold ─┬─ drain ── sum of rates ──► the search
//   rank 1   follow()   ──┘         └─ warm-up │  window  │     └─ drain ──┘
//                       told what   all are ready      all windows have closed
//
// Where a step fails on one rank, all throw what that one has to say. Of one process alone the calls are the setup's
// own.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "spillway/communicator.h"
#include "tools/sweep/sweep_setup.h"
#include "tools/terminal/interrupt.h"
#include "tools/terminal/ranks.h"

namespace spillway::sweep {

class Lockstep {
 public:
  // Makes the rigs. Both arguments outlive this.
  Lockstep(const SweepOptions& options, terminal::Ranks& ranks, const terminal::Interrupt& interrupt);
  ~Lockstep();  // the first rank's sends the others home
  Lockstep(const Lockstep&) = delete;
  Lockstep& operator=(const Lockstep&) = delete;

  SweepSetup& setup() { return *setup_; }
  std::uint32_t ranks() const { return ranks_.count(); }
  const HostShare& share() const { return share_; }
  std::uint64_t file_bytes() const { return file_bytes_; }  // of all ranks
  int signal() const;                                       // that asked some rank to end; 0: none

  // As the setup's, of all ranks.
  std::uint64_t fill(double seconds, const drive::Watch& go_on);
  void limit_by_rate();
  std::vector<WayInfo> find_ways();
  std::vector<std::uint32_t> stripe(std::span<const double> rates);
  // The sample is of all: the sum of their rates, and the latencies of the slowest.
  struct Measured {
    Sample sample;
    std::uint64_t written_bytes = 0;
  };
  Measured run(const Point& point, const drive::LoadSpec& spec);

  // On every rank but the first: does what that one is told to do, until it is done. Returns the exit code.
  int follow();

 private:
  using Words = std::array<std::uint64_t, 12>;
  void tell(Words& words);  // the first rank's, on every rank
  void share_signal();
  void agree_on_limits();
  void limit_by_rate_here();
  std::uint64_t fill_here(double seconds, const drive::Watch& go_on);
  std::vector<WayInfo> find_ways_here();
  std::vector<std::uint32_t> stripe_here(std::vector<std::uint64_t> rates);
  Measured run_here(const Point& point, drive::LoadSpec spec);
  drive::LoadResult load_beside_others(const Point& point, drive::LoadSpec& spec);

  terminal::Ranks& ranks_;
  const terminal::Interrupt& interrupt_;
  HostShare share_;
  std::unique_ptr<SweepSetup> setup_;
  std::uint64_t file_bytes_ = 0;
  int signal_ = 0;
  bool following_ = false;  // the others wait for a word of the first rank
};

}  // namespace spillway::sweep
