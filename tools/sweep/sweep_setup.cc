#include "tools/sweep/sweep_setup.h"

#include <fmt/format.h>
#include <sys/statvfs.h>

#include <algorithm>
#include <set>
#include <utility>

#include "spillway/error.h"
#include "spillway/units.h"
#include "tools/terminal/ranks.h"

namespace spillway::sweep {
namespace {

// More in flight than a drive moves in this time buys nothing but waiting.
constexpr double kLongestQueueSeconds = 0.1;
constexpr std::uint64_t kMostInFlight = 128 * kMiB, kLeastInFlight = 4 * kMiB, kMostMemory = kGiB;
constexpr std::uint64_t kFillMemory = 8 * kMiB, kLeastFill = 32 * kMiB;
constexpr std::uint64_t kRows = 4;  // of stripes that a test file holds, at least
constexpr double kFreeSpaceToUse = 0.9;

void refuse_twice(const std::vector<PathInfo>& facts, const std::filesystem::path& path) {
  for (const PathInfo& other : facts) {
    if (std::filesystem::equivalent(other.path, path)) {
      throw Error(Code::kInvalidArgument, {.object = path.string(),
                                           .happened = "is named twice",
                                           .errno_value = 0,
                                           .hint = "name each directory once"});
    }
  }
}

// A rank's directory. Where there is none, it is made and goes again as soon as the test file in it has lost its name,
// so that nothing is left however the sweep ends.
class Directory {
 public:
  explicit Directory(std::filesystem::path path) : path_(std::move(path)) {
    std::error_code error;
    made_ = std::filesystem::create_directory(path_, error);
    if (error) {
      throw Error(Code::kIo, {.object = path_.string(),
                              .happened = "cannot be made",
                              .errno_value = error.value(),
                              .hint = "name a directory that you may write to"});
    }
  }
  ~Directory() {
    std::error_code ignored;  // somebody else may have put something into it
    if (made_) std::filesystem::remove(path_, ignored);
  }
  Directory(const Directory&) = delete;
  Directory& operator=(const Directory&) = delete;
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
  bool made_ = false;
};

}  // namespace

SweepSetup::SweepSetup(const SweepOptions& options, const RankPlace& place) {
  for (const auto& path : options.paths) {
    PathInfo facts = examine_path(path, options.allow_buffered);
    std::optional<Directory> directory;
    std::filesystem::path where = facts.path;
    if (place.ranks > 1) {
      where = directory.emplace(terminal::path_of_rank(facts.path, place.rank, place.ranks)).path();
      facts = examine_path(where, options.allow_buffered);  // perhaps another drive is mounted there
      facts.path = where.parent_path();
      facts.free_bytes /= place.here;
    }
    refuse_twice(facts_, facts.path);
    for (const PathInfo& other : facts_) {
      if (!facts.drive.name.empty() && other.drive.name == facts.drive.name) {
        facts.warnings.push_back(
            fmt::format("on the same drive as {}: striping over both gains nothing", other.path.string()));
      }
    }
    const std::uint64_t bytes = test_bytes(facts, options.size_bytes);
    files_.emplace_back(where, bytes);
    const File& file = files_.back().file();
    note_direct_io(facts, file.direct(), file.alignment(), options.allow_buffered);
    sizes_.push_back(bytes);
    facts_.push_back(std::move(facts));
    limits_.least_block = std::max<std::uint64_t>(limits_.least_block, file.alignment());
    limits_.most_in_flight = std::min(limits_.most_in_flight, bytes / 4);
  }
  for (const PathInfo& facts : facts_) {
    if (const auto moved = drive::moved_bytes(facts.drive)) moved_before_[facts.drive.name] = *moved;
  }
  const std::uint64_t memory = std::min(kMostMemory, examine_machine().memory_bytes / 8 / place.here);
  limits_.most_in_flight = std::min({limits_.most_in_flight, kMostInFlight, memory / paths()});
  if (paths() > 1) {
    limits_.most_block = kStripeUnitBytes;  // no request is larger there
  } else {
    members_.push_back(0);
  }
  memory_ = std::make_unique<drive::LoadMemory>(std::max(limits_.most_in_flight * paths(), kFillMemory));
}

std::uint64_t SweepSetup::file_bytes() const {
  std::uint64_t bytes = 0;
  for (const std::uint64_t size : sizes_) bytes += size;
  return bytes;
}

Setting SweepSetup::allowed(const Setting& wanted) const {
  Setting setting = wanted;
  setting.block_bytes = std::clamp(setting.block_bytes, limits_.least_block, limits_.most_block);
  while (setting.depth > 1 && setting.in_flight_bytes() > limits_.most_in_flight) setting.depth /= 2;
  return setting;
}

std::uint64_t SweepSetup::fill(double seconds, const drive::Watch& go_on) {
  const auto share = seconds / paths();
  std::uint64_t written = 0;
  for (std::uint32_t path = 0; path < paths(); ++path) {
    drive::TestFile& file = files_[path];
    bool wanted = true;
    const std::uint64_t least = std::min(sizes_[path], kLeastFill);
    fill_rates_.push_back(file.fill(memory_->bytes(), share, least, [&](double elapsed, std::uint64_t moved) {
      wanted = go_on(share * path + elapsed, moved);
      return wanted;
    }));
    written += file.filled_bytes();
    moved_ += file.filled_bytes();
    if (!wanted) break;
    warn_of_caches(facts_[path], file.filled_bytes());
  }
  return written;
}

void SweepSetup::limit_by_rate() {
  const double rate = *std::max_element(fill_rates_.begin(), fill_rates_.end());
  const auto queue = static_cast<std::uint64_t>(rate * kLongestQueueSeconds);
  limits_.most_in_flight = std::min(limits_.most_in_flight, std::max(queue, kLeastInFlight));
  for (const drive::TestFile& file : files_) {
    limits_.most_in_flight = std::min(limits_.most_in_flight, file.filled_bytes() / 4);
  }
}

std::vector<WayInfo> SweepSetup::find_ways() {
  std::vector<WayInfo> ways;
  std::vector<File*> files;
  for (drive::TestFile& file : files_) files.push_back(&file.file());
  const std::span<std::byte> regions[] = {memory_->bytes()};
  std::vector<Way> tried;
  for (const IoEngineKind engine : kIoEngines) {
    if (engine == IoEngineKind::kIoUring) tried.push_back({engine, true});
    tried.push_back({engine, false});
  }
  for (const Way& way : tried) {
    WayInfo facts{way, ""};
    try {
      const auto queue =
          IoQueue::create({.engine = way.engine}, files, std::span(regions).first(way.fixed_buffers ? 1 : 0));
      const bool registered = queue->describe().find(", registered buffers") != std::string::npos;
      if (way.fixed_buffers && !registered) facts.refused = "the kernel does not register the memory";
    } catch (const Error& error) {
      if (error.code() != Code::kUnsupported) throw;
      facts.refused = error.parts().happened;
    }
    ways.push_back(std::move(facts));
  }
  return ways;
}

std::uint64_t SweepSetup::least_filled_bytes() const {
  std::uint64_t smallest = drive::kNoLimit;
  for (const drive::TestFile& file : files_) smallest = std::min(smallest, file.filled_bytes());
  return smallest;
}

std::vector<std::uint32_t> SweepSetup::stripe(std::span<const double> rates, std::uint64_t filled_bytes) {
  const auto row_units =
      static_cast<std::uint32_t>(std::min<std::uint64_t>(kStripeRowUnits, filled_bytes / kStripeUnitBytes / kRows));
  std::vector<double> known(rates.begin(), rates.end());
  for (double& rate : known) rate = std::max(rate, 1.0);
  const std::vector<std::uint64_t> room(paths(), drive::kNoLimit);
  const std::vector<std::uint32_t> shares = stripe_shares(known, room, 1, row_units);
  std::vector<std::uint32_t> held;
  for (std::uint32_t path = 0; path < paths(); ++path) {
    if (shares[path] == 0) continue;
    members_.push_back(path);
    held.push_back(shares[path]);
  }
  stripes_.emplace(held, kStripeUnitBytes, 0);
  std::uint64_t rows = drive::kNoLimit, row = 0;
  for (std::size_t i = 0; i < members_.size(); ++i) {
    rows = std::min(rows, files_[members_[i]].filled_bytes() / kStripeUnitBytes / held[i]);
    row += held[i];
  }
  space_bytes_ = rows * row * kStripeUnitBytes;
  SPILLWAY_CHECK(rows >= kRows, "a test file holds a few rows of stripes");
  return shares;
}

std::vector<drive::LoadFile> SweepSetup::load_files(std::uint32_t path) {
  std::vector<drive::LoadFile> files;
  for (std::uint32_t p = 0; p < paths(); ++p) {
    const bool member =
        path == kAllPaths ? std::find(members_.begin(), members_.end(), p) != members_.end() : p == path;
    if (member) files.push_back({&files_[p].file(), files_[p].filled_bytes(), 0});
  }
  return files;
}

drive::LoadSpec SweepSetup::spec(const Point& point) const {
  drive::LoadSpec spec{.engine = point.way.engine,
                       .fixed_buffers = point.way.fixed_buffers,
                       .block_bytes = point.setting.block_bytes,
                       .depth = point.setting.depth,
                       .read_parts = point.work == Work::kWrite ? 0 : kReadParts,
                       .write_parts = point.work == Work::kRead ? 0 : kWriteParts};
  if (point.path == kAllPaths) {
    spec.stripes = &*stripes_;
    spec.space_bytes = space_bytes_;
  }
  return spec;
}

drive::LoadResult SweepSetup::run(const Point& point, const drive::LoadSpec& spec) {
  drive::LoadResult result = drive::run_load(load_files(point.path), memory_->bytes(), spec);
  moved_ += result.moved_in_all;
  return result;
}

std::optional<SweepSetup::Traffic> SweepSetup::traffic() const {
  std::uint64_t all = 0;
  std::set<std::string> counted;
  for (const PathInfo& facts : facts_) {
    const auto before = moved_before_.find(facts.drive.name);
    const auto now = drive::moved_bytes(facts.drive);
    if (before == moved_before_.end() || !now) return std::nullopt;
    if (counted.insert(facts.drive.name).second) all += *now - before->second;
  }
  return Traffic{all > moved_ ? all - moved_ : 0, moved_};
}

std::uint64_t SweepSetup::row_bytes(std::size_t member) const {
  return stripes_ ? stripes_->shares()[member] * kStripeUnitBytes : limits_.most_block;
}

// As many as hold `bytes`, and as the fullest file system allows; several members may lie on one.
std::uint64_t SweepSetup::rows_to_grow(std::uint64_t bytes) const {
  const auto file_system = [&](std::size_t member) {
    const drive::MountInfo& mount = facts_[members_[member]].mount;
    return std::pair(mount.major, mount.minor);
  };
  std::uint64_t row = 0;
  std::map<std::pair<unsigned, unsigned>, std::uint64_t> row_on;
  for (std::size_t i = 0; i < members_.size(); ++i) {
    row += row_bytes(i);
    row_on[file_system(i)] += row_bytes(i);
  }
  std::uint64_t rows = (bytes + row - 1) / row;
  for (std::size_t i = 0; i < members_.size(); ++i) {
    struct statvfs space {};
    if (::statvfs(facts_[members_[i]].path.c_str(), &space) != 0) return 0;
    const double free = static_cast<double>(std::uint64_t{space.f_bavail} * space.f_frsize) * kFreeSpaceToUse;
    rows = std::min(rows, static_cast<std::uint64_t>(free) / row_on[file_system(i)]);
  }
  return rows;
}

drive::Sustained SweepSetup::write_sustained(const Setting& setting, const Way& way, std::uint64_t bytes,
                                             const drive::Watch& go_on) {
  std::uint64_t written_rows = drive::kNoLimit;
  for (std::size_t i = 0; i < members_.size(); ++i) {
    written_rows = std::min(written_rows, sizes_[members_[i]] / row_bytes(i));
  }
  // What was written before has its blocks already, and is quicker to write for that: it is used only when the free
  // space is no match for it.
  std::uint64_t rows = rows_to_grow(bytes);
  const bool fresh = rows > written_rows;
  if (!fresh) rows += written_rows;
  std::vector<drive::LoadFile> files;
  drive::LoadSpec load = spec({setting, Work::kWrite, way, stripes_ ? kAllPaths : 0});
  load.space_bytes = 0;
  for (std::size_t i = 0; i < members_.size(); ++i) {
    const std::uint32_t path = members_[i];
    const std::uint64_t begin = fresh ? sizes_[path] : 0, end = begin + rows * row_bytes(i);
    files_[path].grow(end);
    files.push_back({&files_[path].file(), end, begin});
    load.space_bytes += end - begin;
  }
  return drive::write_sustained(files, memory_->bytes(), load, bytes, go_on);
}

}  // namespace spillway::sweep
