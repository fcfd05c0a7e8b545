#include "tools/terminal/remedies.h"

#include <iterator>

namespace spillway::terminal {
namespace {

// In the order of the codes.
constexpr RemedyWords kWords[] = {
    {Remedy::kNone, ""},
    {Remedy::kResumeOrReplace, "go on with --resume, or start over with --fresh"},
    {Remedy::kReplace, "start over with --fresh"},
    {Remedy::kRestoreOrReplace, "restore a snapshot, or start over with --fresh"},
    {Remedy::kOtherPathOrReplace, "name another nvme_path, or start over with --fresh"},
    {Remedy::kThatVersionOrReplace, "use that version, or start over with --fresh"},
    {Remedy::kItsSettingsOrReplace,
     "use the model and settings it was made with, name another nvme_path, or start over with --fresh"},
    {Remedy::kCopyAgainOrReplace, "copy it again, or start over with --fresh"},
    {Remedy::kReplaceAndKeepSteps, "start over with --fresh, and give --out, or set commit_every to 1"},
    {Remedy::kResume, "the store is at its last commit, go on with --resume"},
    {Remedy::kRepairAndResume, "{}; the store is at its last commit, go on with --resume"},
    {Remedy::kCheckDriveAndRewrite, "check the drive; a run with --resume brings it, and writes it anew"},
    {Remedy::kCheckDriveAndGoBack,
     "check the drive; step {}, the last committed one, is not affected: --resume goes back to it"},
    {Remedy::kCheckDriveAndRollBack,
     "check the drive; that is part of step {}, the last committed one: spillway store {} --rollback goes back to step "
     "{} if all of it is intact"},
    {Remedy::kCheckDriveAndRestore,
     "check the drive; that is part of step {}, the last committed one, and no other is left; restore a snapshot, or "
     "start over with --fresh"},
    {Remedy::kCheckDriveAndReplace,
     "check the drive; commit_every 0 keeps no step to go back to: start over with --fresh"},
    {Remedy::kCheckRecordsAndRestore, "check the drive; restore a snapshot, or start over with --fresh"},
    {Remedy::kNoStepIsLeft, "no intact step is left; restore a snapshot, or start over with --fresh"},
    {Remedy::kNothingWasChanged,
     "step {} is overwritten or damaged and nothing was changed; restore a snapshot, or start over with --fresh"},
    {Remedy::kCheckPathOrBegin, "check the path, or start a run without --resume"},
    {Remedy::kMakeRoomOrHalve,
     "free some space, name another nvme_path, or set spillway.commit_every to 0 (half the disk, no resume: give "
     "--out)"},
    {Remedy::kRaiseBudget, "set spillway.{} to \"{}\" or more"},
    {Remedy::kRaiseBudgetOrHalve,
     "set spillway.{} to \"{}\" or more, or spillway.commit_every to 0 (half the disk, no resume: give --out)"},
    {Remedy::kNameTag, "name one with --tag"},
    {Remedy::kNameAnotherTag, "name another one with --tag"},
    {Remedy::kImportUnverified,
     "check the drive; if it was saved without any, import it without verifying, with --no-verify"},
    {Remedy::kSayStepsOrNumber, "say it with --steps, or write the number"},
    {Remedy::kReopen, "run it again with --resume"},
    {Remedy::kCutShort, "somebody cut the store short: restore a snapshot, or start over with --fresh"},
    {Remedy::kRenewStore, "go on with --resume, save a snapshot, and start a new store from it with --load"},
    {Remedy::kItsStatesOrSnapshot,
     "go on with the spillway.states it was made with, or save a snapshot with them and start a new store with --load "
     "SNAPSHOT, which converts"},
};

consteval bool has_all_in_order() {
  for (std::size_t i = 0; i < std::size(kWords); ++i) {
    if (static_cast<std::size_t>(kWords[i].remedy) != i) return false;
  }
  return std::size(kWords) == kRemedies;
}
static_assert(has_all_in_order());

std::string_view own_words_of(Remedy remedy) { return kWords[static_cast<std::size_t>(remedy)].words; }

}  // namespace

std::string message_of(const std::exception& error) {
  const auto* own = dynamic_cast<const Error*>(&error);
  const std::string message = own ? own->message_in(own_words_of(own->parts().remedy)) : error.what();
  std::string shown = message.starts_with(": ") ? "\"\"" : "";  // an empty path, which nothing would show
  return shown += message;
}

std::string hint_of(const Error& error) {
  const ErrorParts& parts = error.parts();
  return parts.remedy == Remedy::kNone ? parts.hint : with_values(own_words_of(parts.remedy), parts.values);
}

}  // namespace spillway::terminal
