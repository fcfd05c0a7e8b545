// A test of the tests: each of these faults must make the same-bits comparison fail, and without one it must hold.
//
// Two of them sit in Spillway itself. This program is linked with `--wrap` (meson.build), so that the engine's calls of
// optimizer_update and TileStore::note_written arrive here and go on to the real ones, or do not.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>

#include "kernels/optimizer.h"
#include "spillway/error.h"
#include "swap/tile_store.h"
#include "tests/src/toy_trainer.h"

namespace {
std::atomic<bool> zero_residual = false, skip_slot_flip = false;
std::atomic<int> fired = 0;
}  // namespace

// The linker's names for the two functions, in the C++ ABI's spelling. `note_written` is a member: `this` comes first.
extern "C" {
bool __real__ZN8spillway16optimizer_updateERKNS_13OptimizerTileERKNS_16OptimizerScalarsEmm(
    const spillway::OptimizerTile& tile, const spillway::OptimizerScalars& scalars, std::size_t begin, std::size_t end);
bool __wrap__ZN8spillway16optimizer_updateERKNS_13OptimizerTileERKNS_16OptimizerScalarsEmm(
    const spillway::OptimizerTile& tile, const spillway::OptimizerScalars& scalars, std::size_t begin,
    std::size_t end) {
  const bool finite =
      __real__ZN8spillway16optimizer_updateERKNS_13OptimizerTileERKNS_16OptimizerScalarsEmm(tile, scalars, begin, end);
  if (zero_residual && tile.residual) {
    std::fill(tile.residual + begin, tile.residual + end, std::int16_t{0});
    ++fired;
  }
  return finite;
}

void __real__ZN8spillway9TileStore12note_writtenEjNS_4PartEm(spillway::TileStore* store, std::uint32_t tile,
                                                             spillway::Part part, std::uint64_t checksum);
void __wrap__ZN8spillway9TileStore12note_writtenEjNS_4PartEm(spillway::TileStore* store, std::uint32_t tile,
                                                             spillway::Part part, std::uint64_t checksum) {
  if (skip_slot_flip) {
    ++fired;
    return;
  }
  __real__ZN8spillway9TileStore12note_writtenEjNS_4PartEm(store, tile, part, checksum);
}
}

namespace spillway {
namespace {

using testing::ToyTrainer;

// Two would not do: a + b is b + a in floating point too.
constexpr std::uint32_t kMicroBatches = 3;

struct Fault {
  std::atomic<bool>* in_spillway = nullptr;
  bool swap_micro_batches = false, use_after_release = false;
};

// The trained bits of a run through NVMe; nothing when the engine noticed the fault itself.
std::vector<std::uint32_t> train(Placement placement, Fault fault = {}, DType type = DType::kBFloat16) {
  testing::TempStore store;
  const ModelDescription model = testing::toy_model(4, 2000, kMicroBatches);
  auto engine =
      Engine::create(testing::toy_config(placement, placement, type, store.path()), model, {.poison_released = true});
  engine->import_weights(testing::toy_weights());
  ToyTrainer trainer{*engine, model, type, kMicroBatches};
  trainer.swap_micro_batches = fault.swap_micro_batches;
  trainer.use_after_release = fault.use_after_release;
  if (fault.in_spillway) *fault.in_spillway = true;
  std::vector<std::uint32_t> bits;
  try {
    for (int s = 0; s < 4; ++s) trainer.run_step();
    bits = testing::exported(*engine);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Code::kNonFinite) << error.what();
  }
  if (fault.in_spillway) *fault.in_spillway = false;
  return bits;
}

class DeliberateFaults : public ::testing::Test {
 protected:
  const std::vector<std::uint32_t> expected_ = train(Placement::kHbm);
};

TEST_F(DeliberateFaults, WithoutOneTheBitsAreTheSame) {
  ASSERT_FALSE(expected_.empty());
  EXPECT_EQ(train(Placement::kNvme), expected_);
}

TEST_F(DeliberateFaults, AResidualThatIsZeroedShows) {
  fired = 0;
  EXPECT_NE(train(Placement::kNvme, {.in_spillway = &zero_residual}), expected_);
  EXPECT_GT(fired, 0);
}

TEST_F(DeliberateFaults, ASlotFlipThatIsSkippedShows) {
  fired = 0;
  EXPECT_NE(train(Placement::kNvme, {.in_spillway = &skip_slot_flip}), expected_);
  EXPECT_GT(fired, 0);
}

// In fp32: a sum that differs in its last bit rarely rounds to another bf16 number.
TEST_F(DeliberateFaults, MicroBatchesThatAreSwappedShow) {
  const auto expected = train(Placement::kHbm, {}, DType::kFloat32);
  EXPECT_EQ(train(Placement::kNvme, {}, DType::kFloat32), expected);
  for (Placement placement : {Placement::kHbm, Placement::kNvme}) {
    const auto bits = train(placement, {.swap_micro_batches = true}, DType::kFloat32);
    EXPECT_FALSE(bits.empty());
    EXPECT_NE(bits, expected);
  }
}

TEST_F(DeliberateFaults, ALeaseThatIsKeptPastItsReleaseShows) {
  EXPECT_NE(train(Placement::kNvme, {.use_after_release = true}), expected_);
}

}  // namespace
}  // namespace spillway
