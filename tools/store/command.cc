#include "tools/terminal/commands.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <optional>
#include <vector>

#include "spillway/error.h"
#include "spillway/tensor_store.h"
#include "tools/store/report.h"
#include "tools/store/tensors.h"
#include "tools/terminal/byte_bar.h"
#include "tools/terminal/tell.h"

namespace spillway::store {
namespace {

constexpr int kWhole = 0, kDamaged = 2;

struct StoreOptions {
  std::vector<std::filesystem::path> paths;
  bool verify = false, roll_back = false, json = false;
};

constexpr const char* kReading = "reading every byte";

// What is inspected at: one store, or those of all ranks that lie below the directories.
struct InspectedStore {
  explicit InspectedStore(const StoreOptions& options) : ranks(find_ranks(options.paths)) {
    ranks.empty() ? void(store = inspect_store(options.paths)) : void(run = inspect_run(ranks));
  }
  std::optional<std::uint64_t> step() const { return store ? store->step : run->step; }
  std::vector<std::string> damage() const { return store ? damage_of(*store) : damage_of(*run); }
  // There may be one to go back to.
  bool has_older_step() const {
    return store ? store->older_step.has_value()
                 : std::ranges::all_of(run->ranks, [](const StoreInfo& rank) { return rank.older_step.has_value(); });
  }

  RunPaths ranks;
  std::optional<StoreInfo> store;
  std::optional<RunInfo> run;
};

Verified verify(const StoreOptions& options, const InspectedStore& inspected) {
  terminal::ByteBar bar(kReading);
  Verified verified;
  const auto on_bad = [&](const BadExtent& bad) {
    verified.bad.push_back(bad);
    bar.line(bad_text(bad));
  };
  const CheckOptions how = {.on_bad = on_bad, .progress = [&](auto done, auto bytes) { bar.at(done, bytes); }};
  verified.checked = inspected.store ? verify_store(options.paths, how) : verify_run(inspected.ranks, how);
  verified.seconds = bar.seconds();
  bar.clear();
  return verified;
}

int roll_back(const StoreOptions& options) {
  const InspectedStore inspected(options);
  terminal::ByteBar bar(kReading);
  const CheckOptions how = {.progress = [&](auto done, auto bytes) { bar.at(done, bytes); }};
  const std::uint64_t step =
      inspected.store ? roll_back_store(options.paths, how) : roll_back_run(inspected.ranks, how);
  bar.clear();
  terminal::tell("{}: {} step {}{}, every byte of which is intact; finetune --resume goes on from there\n",
                 options.paths.front().string(),
                 inspected.step() < step ? "the last --rollback is taken back, on at" : "back at", step,
                 inspected.store ? "" : " on all ranks");
  return kWhole;
}

int print_store(const StoreOptions& options) {
  if (holds_tensors(options.paths)) {
    if (!options.roll_back) return print_tensors(options.paths, {.verify = options.verify, .json = options.json});
    throw Error(Code::kUnsupported, {options.paths.front().string(), "holds named tensors, of the last commit alone", 0,
                                     "go on with that commit; there is none before it"});
  }
  if (options.roll_back) return roll_back(options);
  const InspectedStore inspected(options);
  if (!options.json) terminal::tell("{}", inspected.store ? store_text(*inspected.store) : run_text(*inspected.run));
  std::fflush(stdout);
  std::optional<Verified> verified;
  if (options.verify) verified = verify(options, inspected);
  if (options.json) {
    terminal::tell("{}\n",
                   inspected.store ? store_json(*inspected.store, verified) : run_json(*inspected.run, verified));
  } else if (verified) {
    terminal::tell("{}\n", verified_text(*verified));
    if (verified->checked.bad_extents > 0 && inspected.has_older_step()) {
      terminal::tell(
          "to do     --rollback goes back to {} if all of it is intact\n",
          inspected.store ? fmt::format("step {}", *inspected.store->older_step) : "the step before on all ranks");
    }
  }
  const bool whole = inspected.damage().empty() && (!verified || verified->checked.bad_extents == 0);
  return whole ? kWhole : kDamaged;
}

}  // namespace

void add_command(CLI::App& program, int& exit_code) {
  const auto kept = std::make_shared<StoreOptions>();
  StoreOptions& options = *kept;
  auto* command = program.add_subcommand(
      "store", "Show a store, and check whether it is whole; changes nothing without --rollback");
  command
      ->add_option(
          "paths", options.paths,
          "The store's directories, in the order of nvme_paths; of several ranks, those that hold rank0 and so on")
      ->required();
  auto* verify = command->add_flag("--verify", options.verify, "Read every byte of the committed step");
  auto* json = command->add_flag("--json", options.json, "Print it as JSON");
  command
      ->add_flag("--rollback", options.roll_back,
                 "Go back to the commit before the last, if every byte of it is intact; this changes the store")
      ->excludes(verify)
      ->excludes(json);
  command->footer(
      "Example:\n  spillway store /mnt/nvme/run --verify\n\nExit code: 0 the store is whole, 2 it is damaged, 1 it "
      "cannot be shown or rolled back");
  command->callback([kept, &exit_code] { exit_code = print_store(*kept); });
}

}  // namespace spillway::store
