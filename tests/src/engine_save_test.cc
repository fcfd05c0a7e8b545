// A snapshot is written while training goes on: of the step that it was begun after, whole before the next backward
// pass, and no matter of the training when it fails.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "spillway/error.h"
#include "spillway/snapshot.h"
#include "tests/src/layout_cases.h"

namespace spillway {
namespace {

using testing::LayoutCase;
using testing::LayoutRun;

constexpr std::uint64_t kSaved = 4, kSteps = 6;  // blocks are updated on a guess by then

std::map<std::string, std::string> files_of(const std::filesystem::path& directory) {
  std::map<std::string, std::string> files;
  for (const auto& entry : std::filesystem::directory_iterator(directory)) {
    std::ifstream in(entry.path(), std::ios::binary);
    files[entry.path().filename()] = {std::istreambuf_iterator<char>(in), {}};
  }
  return files;
}

// From now on what this process writes of the file finds no room. The number of such files.
int fill_up(const std::string& name) {
  int found = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code gone;
    const std::string target = std::filesystem::read_symlink(entry.path(), gone);
    if (gone || !target.ends_with(name)) continue;
    const int full = ::open("/dev/full", O_WRONLY | O_CLOEXEC);
    found += ::dup2(full, std::stoi(entry.path().filename())) >= 0;
    ::close(full);
  }
  return found;
}

struct Wanted {
  std::map<std::string, std::string> snapshot;  // of kSaved
  std::vector<std::uint32_t> bits;              // of kSteps
};

class EngineSave : public ::testing::TestWithParam<double> {
 protected:
  static void clip(Config& config) { config.gradient_clipping = GetParam(); }
  static LayoutRun run_to_save(const LayoutCase& layout) {
    LayoutRun run(layout, DType::kBFloat16, clip);
    while (run.engine->current_step() < kSaved) run.trainer->run_step();
    return run;
  }
  std::filesystem::path at(const std::string& name) const { return directory_.path() / name; }

  // Of a run that stands still for its snapshot.
  const Wanted& wanted(const LayoutCase& layout) {
    Wanted& of = wanted_[layout.kind()];
    if (of.bits.empty()) {
      LayoutRun run = run_to_save(testing::in_hbm_like(layout));
      run.engine->save(at("wanted"));
      of = {files_of(at("wanted")), run.until(kSteps).bits};
      remove_snapshot(at("wanted"));
    }
    return of;
  }

  testing::TempStore directory_;

 private:
  std::map<std::uint64_t, Wanted> wanted_;
};

INSTANTIATE_TEST_SUITE_P(, EngineSave, ::testing::Values(0.0, 0.5, 100.0), [](const auto& info) {
  return info.param == 0 ? "Unclipped" : info.param < 1 ? "Clipped" : "BelowTheLimit";
});

TEST_P(EngineSave, TrainingGoesOnMeanwhile) {
  for (const LayoutCase& layout : testing::layout_cases(GetParam())) {
    SCOPED_TRACE(layout.name);
    LayoutRun run = run_to_save(layout);
    run.engine->begin_save(at("saved"), {});
    if (layout.states != Placement::kHbm) {
      EXPECT_FALSE(find_snapshot(at("saved"))) << "the call has waited for it";
    }
    run.trainer->run_step();
    EXPECT_TRUE(find_snapshot(at("saved"))) << "it was not whole before the backward pass";
    run.engine->finish_save();
    EXPECT_TRUE(files_of(at("saved")) == wanted(layout).snapshot);
    EXPECT_TRUE(run.until(kSteps).bits == wanted(layout).bits);
    remove_snapshot(at("saved"));
  }
}

TEST_P(EngineSave, AFullDiskIsSaidOnceAndChangesNothingOfTheTraining) {
  for (const LayoutCase& layout : testing::layout_cases(GetParam())) {
    if (layout.states == Placement::kHbm) continue;  // written by begin_save() itself
    for (const char* name : {"/.model.safetensors.partial", "/.exp_avg.safetensors.partial"}) {
      SCOPED_TRACE(layout.name + " " + name);
      LayoutRun run = run_to_save(layout);
      run.engine->begin_save(at("saved"), {});
      ASSERT_EQ(fill_up(name), 1);
      run.trainer->run_step();
      try {
        run.engine->finish_save();
        ADD_FAILURE() << "nothing was said";
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), Code::kIo) << error.what();
        EXPECT_EQ(error.parts().errno_value, ENOSPC);
      }
      EXPECT_TRUE(std::filesystem::is_empty(directory_.path())) << "something is left";
      run.engine->finish_save();
      EXPECT_TRUE(run.until(kSteps).bits == wanted(layout).bits);
    }
  }
}

TEST_P(EngineSave, WhateverEndsTheUpdateEndsIt) {
  const LayoutCase layout = testing::layout_case("nvme");
  const std::pair<const char*, std::function<void(LayoutRun&)>> ends[] = {
      {"flush", [](LayoutRun& run) { run.engine->flush(); }},
      {"export", [&](LayoutRun& run) { EXPECT_EQ(testing::exported(*run.engine).empty(), false); }},
      {"half a forward pass, then another",
       [&](LayoutRun& run) {
         run.engine->acquire(0, Pass::kForward, run.engine->stream()).release();
         run.engine->begin_save(at("another"), {});
         EXPECT_TRUE(find_snapshot(at("another")));  // there was no update left
         EXPECT_TRUE(files_of(at("another")) == wanted(layout).snapshot);
       }},
      {"the end", [](LayoutRun& run) { run.engine.reset(); }},
  };
  for (const auto& [name, end] : ends) {
    SCOPED_TRACE(name);
    LayoutRun run = run_to_save(layout);
    run.engine->begin_save(at("saved"), {});
    end(run);
    EXPECT_TRUE(find_snapshot(at("saved")));
    EXPECT_TRUE(files_of(at("saved")) == wanted(layout).snapshot);
    remove_snapshot(at("saved"));
  }
}

TEST_P(EngineSave, ASecondOneEndsTheFirst) {
  const LayoutCase layout = testing::layout_case("nvme");
  LayoutRun run = run_to_save(layout);
  run.engine->begin_save(at("saved"), {});
  EXPECT_THROW(run.engine->begin_save(at("saved"), {}), Error) << "the first one is whole and in the way";
  EXPECT_TRUE(files_of(at("saved")) == wanted(layout).snapshot);
  EXPECT_TRUE(run.until(kSteps).bits == wanted(layout).bits);
}

}  // namespace
}  // namespace spillway
