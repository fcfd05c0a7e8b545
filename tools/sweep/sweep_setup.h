// What measurements are made with: the test files, the memory, the engines, and the space striped over several files.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "spillway/stripe_map.h"
#include "tools/drive/load.h"
#include "tools/drive/sustained.h"
#include "tools/drive/test_file.h"
#include "tools/sweep/preflight.h"
#include "tools/sweep/search.h"
#include "tools/sweep/sweep.h"

namespace spillway::sweep {

// Of several processes that use the drives at once: which one this is, and how many of them are on its machine.
struct RankPlace {
  std::uint32_t rank = 0, ranks = 1, here = 1;
};

class SweepSetup {
 public:
  // Examines the paths, makes their test files and takes the memory. Nothing is written yet. One of several ranks works
  // in its own directory of each path, as a training run does, and leaves free space and memory to the others.
  explicit SweepSetup(const SweepOptions& options, const RankPlace& place = {});

  std::uint32_t paths() const { return static_cast<std::uint32_t>(files_.size()); }
  const std::vector<PathInfo>& facts() const { return facts_; }
  std::uint64_t file_bytes() const;  // of all test files
  std::uint64_t filled_bytes(std::uint32_t path) const { return files_[path].filled_bytes(); }
  const Limits& limits() const { return limits_; }
  std::uint64_t most_in_flight() const { return limits_.most_in_flight; }  // per path
  Setting allowed(const Setting& wanted) const;                            // with the depth cut to the limits

  // Fills the files one after the other, for at most `seconds`. Returns the bytes written.
  std::uint64_t fill(double seconds, const drive::Watch& go_on);
  // After the fill: a slow drive gets less in flight, so that no point takes long to end.
  void limit_by_rate();
  // Tries every engine with the most that it may have to carry.
  std::vector<WayInfo> find_ways();
  // What all ranks can do, where this one could do more.
  void limit(const Limits& limits) { limits_ = limits; }
  std::uint64_t least_filled_bytes() const;  // of a path
  // Stripes the files by these rates, as far as `filled_bytes` go on each; returns the shares, 0 for a path that is
  // left out.
  std::vector<std::uint32_t> stripe(std::span<const double> rates, std::uint64_t filled_bytes);
  std::vector<std::uint32_t> stripe(std::span<const double> rates) { return stripe(rates, least_filled_bytes()); }

  // The load of a point, without its length; then the load itself.
  drive::LoadSpec spec(const Point& point) const;
  drive::LoadResult run(const Point& point, const drive::LoadSpec& spec);

  // What others moved on these drives since the setup was made, in bytes, and what was moved here; nothing when a drive
  // does not count.
  struct Traffic {
    std::uint64_t others = 0, here = 0;
  };
  std::optional<Traffic> traffic() const;

  // Striped over the paths that have a share, so as fast as the slowest of them allows; in fresh places as far as the
  // free space goes.
  drive::Sustained write_sustained(const Setting& setting, const Way& way, std::uint64_t bytes,
                                   const drive::Watch& go_on);

 private:
  std::vector<drive::LoadFile> load_files(std::uint32_t path);
  std::uint64_t row_bytes(std::size_t member) const;  // its part of a row of stripes
  std::uint64_t rows_to_grow(std::uint64_t bytes) const;

  std::vector<PathInfo> facts_;
  std::vector<drive::TestFile> files_;
  std::vector<double> fill_rates_;
  std::vector<std::uint64_t> sizes_;
  Limits limits_;
  std::unique_ptr<drive::LoadMemory> memory_;
  std::optional<StripeMap> stripes_;
  std::vector<std::uint32_t> members_;  // paths with a share; of one path alone it
  std::uint64_t space_bytes_ = 0;
  std::map<std::string, std::uint64_t> moved_before_;  // by drive
  std::uint64_t moved_ = 0;
};

}  // namespace spillway::sweep
