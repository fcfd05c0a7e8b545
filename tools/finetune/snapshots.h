// The snapshots of a fine-tune: DIR/step-000100, DIR/step-000200 …, of which the oldest go.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <set>
#include <string>
#include <utility>

#include "spillway/engine.h"
#include "spillway/error.h"
#include "spillway/snapshot.h"

namespace spillway::models::finetune {

struct SnapshotOptions {
  std::filesystem::path directory;  // empty: none
  std::uint64_t every = 0;          // steps
  std::uint64_t keep = 0;           // the newest so many; 0: all
};

class Snapshots {
 public:
  // `speaks`: of several ranks, which all call, the one that removes and warns for all of them.
  Snapshots(SnapshotOptions options, bool speaks) : options_(std::move(options)), speaks_(speaks) {}

  bool due(std::uint64_t step, std::uint64_t last_step) const {
    return !options_.directory.empty() && (step % options_.every == 0 || step == last_step);
  }
  // Begins one of the engine's last step, which is written while the next step runs. A snapshot that fails, here or
  // later, is no reason to stop: a warning in the log says why.
  void begin(Engine& engine);
  // Ends the one that was begun, and removes what is too old. Returns a line on what was done; empty when there was
  // nothing to do, and after a failure.
  std::string finish(Engine& engine);
  // The last that was ended whole: its step and its directory. Nothing and empty before the first.
  std::optional<std::uint64_t> taken() const { return taken_; }
  std::filesystem::path place() const;

 private:
  void remove_oldest(const SnapshotInfo& newest);
  void warn(std::uint64_t step, const Error& error) const;

  const SnapshotOptions options_;
  const bool speaks_;
  std::optional<std::uint64_t> begun_, taken_;  // steps
  std::set<std::filesystem::path> kept_;        // for what else is in them, as was said already
};

// `directory` when it is a snapshot, else the newest one in it; empty when there is none.
std::filesystem::path find_newest_snapshot(const std::filesystem::path& directory);
// The same, but throws kNotFound.
std::filesystem::path newest_snapshot(const std::filesystem::path& directory);

}  // namespace spillway::models::finetune
