// A run that goes on from a snapshot in its middle: with the bits of the run that saved it, and when the snapshot is
// refused, with its own.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <vector>

#include "spillway/error.h"
#include "spillway/snapshot.h"
#include "tests/error_of.h"
#include "tests/src/layout_cases.h"

namespace spillway {
namespace {

using testing::error_of;

using testing::LayoutCase;
using testing::LayoutRun;

constexpr std::uint64_t kSaved = 2, kLoadedAt = 4, kSteps = 6;

// Doing it twice undoes it.
void flip_bit(const std::filesystem::path& path, std::uint64_t from_end) {
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  const auto offset = static_cast<std::streamoff>(std::filesystem::file_size(path) - from_end);
  file.seekg(offset);
  const int old = file.get();
  file.seekp(offset);
  file.put(static_cast<char>(old ^ 4));
}

class EngineLoad : public ::testing::TestWithParam<double> {
 protected:
  static void clip(Config& config) { config.gradient_clipping = GetParam(); }
  // After some steps with other gradients than those of the snapshot's run.
  LayoutRun run_past_snapshot(const LayoutCase& layout) {
    LayoutRun run(layout, DType::kBFloat16, clip, true);
    while (run.engine->current_step() < kSaved) run.trainer->run_step();
    if (find_snapshot(saved_)) remove_snapshot(saved_);
    run.engine->save(saved_);
    while (run.engine->current_step() < kLoadedAt) run.trainer->run_step();
    return run;
  }

  testing::TempStore directory_;
  const std::filesystem::path saved_ = directory_.path() / "saved";
};

INSTANTIATE_TEST_SUITE_P(, EngineLoad, ::testing::Values(0.0, 0.5, 100.0), [](const auto& info) {
  return info.param == 0 ? "Unclipped" : info.param < 1 ? "Clipped" : "BelowTheLimit";
});

TEST_P(EngineLoad, TheStepsBehindASnapshotAreMadeAgainWithTheSameBits) {
  for (const LayoutCase& layout : testing::layout_cases(GetParam())) {
    SCOPED_TRACE(layout.name);
    LayoutRun run = run_past_snapshot(layout);
    const auto wanted = run.until(kSteps).bits;
    for (const bool inside : {false, true}) {
      run.engine->set_learning_rate(1.0);
      if (inside) {  // a step that nobody will finish
        for (const std::uint32_t block : {0u, 1u}) run.engine->acquire(block, Pass::kForward, run.engine->stream());
      }
      run.engine->load_snapshot(saved_);
      EXPECT_EQ(run.engine->current_step(), kSaved);
      EXPECT_TRUE(run.until(kSteps).bits == wanted) << inside;
    }
    run.engine->load_snapshot(saved_);
    testing::end_and_expect_store_at(run, kSaved);
    run.open(OnExisting::kResume);
    run.engine->load_snapshot(saved_);
    EXPECT_TRUE(run.until(kSteps).bits == wanted);
  }
}

TEST_P(EngineLoad, OneThatIsRefusedChangesNothing) {
  for (const LayoutCase& layout : testing::layout_cases(GetParam())) {
    SCOPED_TRACE(layout.name);
    LayoutRun undisturbed = run_past_snapshot(layout), run = run_past_snapshot(layout);
    const Error missing = error_of([&] { run.engine->load_snapshot(directory_.path() / "none"); });
    EXPECT_EQ(missing.code(), Code::kNotFound);
    for (const char* file : {"model.safetensors", "exp_avg_sq.safetensors", "spillway.json"}) {
      flip_bit(saved_ / file, 100);
      EXPECT_EQ(error_of([&] { run.engine->load_snapshot(saved_); }).code(), Code::kCorrupt) << file;
      flip_bit(saved_ / file, 100);
    }
    {
      const Lease lease = run.engine->acquire(0, Pass::kForward, run.engine->stream());
      EXPECT_EQ(error_of([&] { run.engine->load_snapshot(saved_); }).code(), Code::kInvalidArgument);
    }
    run.engine->discard_step();
    EXPECT_EQ(run.engine->current_step(), kLoadedAt);
    EXPECT_TRUE(run.until(kSteps).bits == undisturbed.until(kSteps).bits);
  }
}

TEST(EngineLoadFits, ASnapshotOfAnotherRunIsRefused) {
  const testing::TempStore directory;
  const std::filesystem::path saved = directory.path() / "saved";
  LayoutRun(testing::kInHbm, DType::kBFloat16).engine->save(saved);
  LayoutRun other(testing::kInHbm, DType::kFloat32);
  const Error error = error_of([&] { other.engine->load_snapshot(saved); });
  EXPECT_EQ(error.code(), Code::kInvalidArgument);
  EXPECT_NE(error.parts().happened.find("is of a run with weights in bf16, this one has fp32"), std::string::npos);
  other.until(1);
}

}  // namespace
}  // namespace spillway
