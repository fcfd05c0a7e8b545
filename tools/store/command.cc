#include "tools/store/command.h"

#include <cstdio>
#include <filesystem>
#include <memory>
#include <optional>
#include <vector>

#include "tools/store/report.h"
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

Verified verify(const StoreOptions& options) {
  terminal::ByteBar bar(kReading);
  Verified verified;
  const auto on_bad = [&](const BadExtent& bad) {
    verified.bad.push_back(bad);
    bar.line(bad_text(bad));
  };
  verified.checked =
      verify_store(options.paths, {.on_bad = on_bad, .progress = [&](auto done, auto bytes) { bar.at(done, bytes); }});
  verified.seconds = bar.seconds();
  bar.clear();
  return verified;
}

int roll_back(const StoreOptions& options) {
  const std::optional<std::uint64_t> before = inspect_store(options.paths).step;
  terminal::ByteBar bar(kReading);
  const std::uint64_t step =
      roll_back_store(options.paths, {.progress = [&](auto done, auto bytes) { bar.at(done, bytes); }});
  bar.clear();
  terminal::tell("{}: {} step {}, every byte of which is intact; finetune --resume goes on from there\n",
                 options.paths.front().string(), before < step ? "the last --rollback is taken back, on at" : "back at",
                 step);
  return kWhole;
}

int show(const StoreOptions& options) {
  if (options.roll_back) return roll_back(options);
  const StoreInfo info = inspect_store(options.paths);
  if (!options.json) terminal::tell("{}", store_text(info));
  std::fflush(stdout);
  std::optional<Verified> verified;
  if (options.verify) verified = verify(options);
  if (options.json) {
    terminal::tell("{}\n", store_json(info, verified));
  } else if (verified) {
    terminal::tell("{}\n", verified_text(*verified));
    if (verified->checked.bad_extents > 0 && info.older_step) {
      terminal::tell("to do     --rollback goes back to step {} if all of it is intact\n", *info.older_step);
    }
  }
  return damage_of(info).empty() && (!verified || verified->checked.bad_extents == 0) ? kWhole : kDamaged;
}

}  // namespace

void add_command(CLI::App& program, int& exit_code) {
  const auto kept = std::make_shared<StoreOptions>();
  StoreOptions& options = *kept;
  auto* command = program.add_subcommand("store", "Show a store, and check whether it is whole; changes nothing");
  command->add_option("paths", options.paths, "The store's directories, in the order of nvme_paths")->required();
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
  command->callback([kept, &exit_code] { exit_code = show(*kept); });
}

}  // namespace spillway::store
