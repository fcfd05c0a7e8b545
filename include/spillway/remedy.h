// What can be done about an error, where the words depend on the client: a flag of a command line, an argument of a
// function. The library's own words name its options; a client has a table of its own from the code to its words, and
// puts them into the message with Error::message_in(). A code keeps its number for good.
#pragma once

#include "spillway/cplusplus.h"

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "spillway/masked.h"

namespace spillway {

enum class Remedy : std::int32_t {
  kNone,  // the hint, if there is one, is the same for everybody
  kResumeOrReplace,
  kReplace,
  kRestoreOrReplace,
  kOtherPathOrReplace,
  kThatVersionOrReplace,
  kItsSettingsOrReplace,
  kCopyAgainOrReplace,
  kReplaceAndKeepSteps,
  kResume,
  kRepairAndResume,  // what to repair
  kCheckDriveAndRewrite,
  kCheckDriveAndGoBack,    // the step to which
  kCheckDriveAndRollBack,  // the step, the directories of the store, the step before
  kCheckDriveAndRestore,   // the step that is damaged
  kCheckDriveAndReplace,
  kCheckRecordsAndRestore,
  kNoStepIsLeft,
  kNothingWasChanged,  // the step that cannot be gone back to
  kCheckPathOrBegin,
  kMakeRoomOrHalve,
  kRaiseBudget,         // the key in the section spillway, the size
  kRaiseBudgetOrHalve,  // the same
  kNameTag,
  kNameAnotherTag,
  kImportUnverified,
  kSayStepsOrNumber,
  kReopen,
  kCutShort,
  kRenewStore,
  kItsStatesOrSnapshot,
};

struct RemedyWords {
  Remedy remedy;
  std::string_view words;  // `{}` stands for a value
};

// In the order of the codes.
inline constexpr RemedyWords kRemedyWords[] = {
    {Remedy::kNone, ""},
    {Remedy::kResumeOrReplace, "go on with on_existing resume, or start over with on_existing replace"},
    {Remedy::kReplace, "start over with on_existing replace"},
    {Remedy::kRestoreOrReplace, "restore a snapshot, or start over with on_existing replace"},
    {Remedy::kOtherPathOrReplace, "name another nvme_path, or start over with on_existing replace"},
    {Remedy::kThatVersionOrReplace, "use that version, or start over with on_existing replace"},
    {Remedy::kItsSettingsOrReplace,
     "use the model and settings it was made with, name another nvme_path, or start over with on_existing replace"},
    {Remedy::kCopyAgainOrReplace, "copy it again, or start over with on_existing replace"},
    {Remedy::kReplaceAndKeepSteps,
     "start over with on_existing replace, and write the model at the end, or set commit_every to 1"},
    {Remedy::kResume, "the store is at its last commit, go on with on_existing resume"},
    {Remedy::kRepairAndResume, "{}; the store is at its last commit, go on with on_existing resume"},
    {Remedy::kCheckDriveAndRewrite, "check the drive; a run with on_existing resume brings it, and writes it anew"},
    {Remedy::kCheckDriveAndGoBack,
     "check the drive; step {}, the last committed one, is not affected: on_existing resume goes back to it"},
    {Remedy::kCheckDriveAndRollBack,
     "check the drive; that is part of step {}, the last committed one: spillway store {} --rollback goes back to step "
     "{} if all of it is intact"},
    {Remedy::kCheckDriveAndRestore,
     "check the drive; that is part of step {}, the last committed one, and no other is left; restore a snapshot, or "
     "start over with on_existing replace"},
    {Remedy::kCheckDriveAndReplace,
     "check the drive; commit_every 0 keeps no step to go back to: start over with on_existing replace"},
    {Remedy::kCheckRecordsAndRestore, "check the drive; restore a snapshot, or start over with on_existing replace"},
    {Remedy::kNoStepIsLeft, "no intact step is left; restore a snapshot, or start over with on_existing replace"},
    {Remedy::kNothingWasChanged,
     "step {} is overwritten or damaged and nothing was changed; restore a snapshot, or start over with on_existing "
     "replace"},
    {Remedy::kCheckPathOrBegin, "check the path, or start a run without on_existing resume"},
    {Remedy::kMakeRoomOrHalve,
     "free some space, name another nvme_path, or set spillway.commit_every to 0 (half the disk, no resume: write the "
     "model at the end)"},
    {Remedy::kRaiseBudget, "set spillway.{} to \"{}\" or more"},
    {Remedy::kRaiseBudgetOrHalve,
     "set spillway.{} to \"{}\" or more, or spillway.commit_every to 0 (half the disk, no resume: write the model at "
     "the end)"},
    {Remedy::kNameTag, "give the name of one as the tag"},
    {Remedy::kNameAnotherTag, "give the name of another one as the tag"},
    {Remedy::kImportUnverified, "check the drive; if it was saved without any, import it without verifying"},
    {Remedy::kSayStepsOrNumber, "say how many steps the run has, or write the number"},
    {Remedy::kReopen, "open the store again and resume"},
    {Remedy::kCutShort, "somebody cut the store short: restore a snapshot, or start over with on_existing replace"},
    {Remedy::kRenewStore, "go on with on_existing resume, save a snapshot, and start a new store from it"},
    {Remedy::kItsStatesOrSnapshot,
     "go on with the states it was made with, save a snapshot, and start a new store from that: it converts"},
};
inline constexpr std::size_t kRemedies = std::size(kRemedyWords);

consteval bool remedies_are_in_order() {
  for (std::size_t i = 0; i < kRemedies; ++i) {
    if (static_cast<std::size_t>(kRemedyWords[i].remedy) != i) return false;
  }
  return true;
}
static_assert(remedies_are_in_order() && static_cast<std::size_t>(Remedy::kItsStatesOrSnapshot) + 1 == kRemedies);

inline std::string_view words_of(Remedy remedy) { return kRemedyWords[static_cast<std::size_t>(remedy)].words; }

// Words with values in the places of their `{}`, in turn.
inline std::string with_values(std::string_view words, const std::vector<std::string>& values) {
  std::string text;
  for (std::size_t used = 0;; ++used) {
    const std::size_t place = words.find("{}");
    text += words.substr(0, place);
    if (place == std::string_view::npos) return text;
    if (used < values.size()) text += values[used];
    words.remove_prefix(place + 2);
  }
}

// What to do about an error: a text for everybody, or a remedy with its values.
struct Hint {
  Hint(const char* same_for_all) : text(same_for_all) {}
  Hint(std::string same_for_all) : text(std::move(same_for_all)) {}
  Hint(Remedy code, std::vector<std::string> named = {}) : remedy(code), values(std::move(named)) {
    for (std::string& value : values) value = masked(value, LineEnds::kMask);  // paths, most of them
    text = with_values(words_of(code), values);
  }

  std::string text;
  Remedy remedy = Remedy::kNone;
  std::vector<std::string> values;
};

}  // namespace spillway
