#include "tools/finetune/snapshots.h"

#include <fmt/format.h>

#include <charconv>
#include <map>
#include <optional>
#include <string_view>
#include <system_error>
#include <utility>

#include "spillway/error.h"
#include "spillway/log.h"
#include "tools/terminal/remedies.h"

namespace spillway::models::finetune {
namespace {

constexpr std::string_view kName = "step-";

std::string name_of_step(std::uint64_t step) { return fmt::format("{}{:06}", kName, step); }

// Directories that are snapshots and are named after their step, by step. A snapshot that a killed process was
// replacing (spillway/snapshot.h) counts where its step has no other. `damaged`: why others with such a name are none.
std::map<std::uint64_t, std::pair<std::filesystem::path, SnapshotInfo>> snapshots_in(
    const std::filesystem::path& directory, std::map<std::uint64_t, std::string>* damaged = nullptr) {
  std::map<std::uint64_t, std::pair<std::filesystem::path, SnapshotInfo>> found;
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator(directory, ignored)) {
    const std::string name = entry.path().filename().string();
    if (!name.starts_with(kName)) continue;
    std::string why;
    const std::optional<SnapshotInfo> facts = find_snapshot(entry.path(), &why);
    if (facts && name == name_of_step(facts->step)) found[facts->step] = {entry.path(), *facts};
    if (facts && name == name_of_step(facts->step) + ".replaced") found.try_emplace(facts->step, entry.path(), *facts);
    if (facts || !damaged) continue;
    std::uint64_t step = 0;
    std::from_chars(name.data() + kName.size(), name.data() + name.size(), step);
    if (name == name_of_step(step)) (*damaged)[step] = why;
  }
  return found;
}

}  // namespace

void Snapshots::warn(std::uint64_t step, const Error& error) const {
  if (!speaks_) return;
  log(LogLevel::kWarning, fmt::format("no snapshot of step {}: {}", step, terminal::message_of(error)));
}

void Snapshots::begin(Engine& engine) {
  const std::uint64_t step = engine.current_step();
  const std::filesystem::path place = options_.directory / name_of_step(step);
  begun_.reset();
  try {
    // A snapshot of this model and step is of a run that was stopped and has come here again, or of one that was given
    // up. Whatever else has that name is not replaced.
    engine.begin_save(place, {.replace = true});
    begun_ = step;
  } catch (const Error& error) {
    warn(step, error);
  }
}

std::string Snapshots::finish(Engine& engine) {
  if (!begun_) return {};
  const std::uint64_t step = *std::exchange(begun_, std::nullopt);
  const std::filesystem::path place = options_.directory / name_of_step(step);
  try {
    engine.finish_save();
  } catch (const Error& error) {
    warn(step, error);
    return {};
  }
  taken_ = step;
  const auto facts = options_.keep > 0 && speaks_ ? find_snapshot(place) : std::nullopt;
  if (facts) remove_oldest(*facts);
  return fmt::format("snapshot: {}", place.string());
}

std::filesystem::path Snapshots::place() const {
  return taken_ ? options_.directory / name_of_step(*taken_) : std::filesystem::path();
}

// Only snapshots of this model, in this directory, and none of a later step: they belong to a run that was taken back
// to an earlier one.
void Snapshots::remove_oldest(const SnapshotInfo& newest) {
  auto found = snapshots_in(options_.directory);
  std::erase_if(found, [&](const auto& item) {
    const auto& [path, facts] = item.second;
    std::error_code ignored;
    const bool link = std::filesystem::is_symlink(path, ignored);  // somebody keeps what it leads to
    return link || facts.model != newest.model || facts.step > newest.step || kept_.contains(path);
  });
  for (; found.size() > options_.keep; found.erase(found.begin())) {
    const std::filesystem::path& path = found.begin()->second.first;
    try {
      remove_snapshot(path);
    } catch (const Error& error) {
      kept_.insert(path);
      log(LogLevel::kWarning, fmt::format("{}; --keep leaves {} alone", terminal::message_of(error), path.string()));
    }
  }
}

std::filesystem::path find_newest_snapshot(const std::filesystem::path& directory) {
  std::error_code error;
  if (std::filesystem::exists(directory / "spillway.json", error)) return directory;
  if (!error) std::filesystem::directory_iterator(directory, error);
  if (error && error != std::errc::no_such_file_or_directory && error != std::errc::not_a_directory) {
    throw Error(Code::kIo, {.object = directory.string(),
                            .happened = "cannot be looked into",
                            .errno_value = error.value(),
                            .hint = "check who may read it, and its drive"});
  }
  std::map<std::uint64_t, std::string> damaged;
  const auto found = snapshots_in(directory, &damaged);
  // Who finds a run begin at an earlier step than was saved must not have to guess.
  for (const auto& [step, why] : damaged) {
    if (found.empty() || step > found.rbegin()->first)
      log(LogLevel::kWarning, fmt::format("{}; no snapshot of step {}, looking for an older one", why, step));
  }
  return found.empty() ? std::filesystem::path() : found.rbegin()->second.first;
}

std::filesystem::path newest_snapshot(const std::filesystem::path& directory) {
  if (std::filesystem::path found = find_newest_snapshot(directory); !found.empty()) return found;
  throw Error(Code::kNotFound, {.object = directory.string(),
                                .happened = "is no snapshot, and holds none",
                                .errno_value = 0,
                                .hint = "name what --save of an earlier run was given"});
}

}  // namespace spillway::models::finetune
