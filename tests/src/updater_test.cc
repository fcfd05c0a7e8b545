// What the updater has under way beside the tile that it works on.
#include "src/engine/updater.h"

#include <gtest/gtest.h>

#include <functional>
#include <optional>
#include <vector>

#include "src/engine/run_resources.h"
#include "tests/src/toy_trainer.h"

namespace spillway {
namespace {

// A run whose weights and gradients are zero, without an engine around it.
class SweepSetup {
 public:
  explicit SweepSetup(const std::function<void(DeepSpeedKnobs&)>& set) {
    set(config.knobs);
    config.knobs.optimizer_buffer_count = 8;  // more than block 0 has tiles, so two are for those after it
    plan = make_plan(config, model);
    resources = std::make_unique<RunResources>(config, model, plan, EngineOptions{}, share_threads(2), alone);
    TileMover& mover = *resources->mover;
    for (std::uint32_t t = 0; t < plan.tiles.size(); ++t) {
      mover.blank(t, 0);
      mover.start_save(0, Save::kNew);
      mover.finish_save(0);
    }
    resources->store->commit(0, {}, *resources->thread, resources->host_region(plan.host.record));
    parameters.emplace(config, plan, model);
    parameters->begin_update(1, 1.0);
    const std::vector<std::uint8_t> brought(2, 1);  // a block of this model has two parameters
    for (std::uint32_t b = 0; b < model.blocks.size(); ++b) parameters->take(b, brought);
    resources->updater->begin(*parameters);
    resources->tiles->run_until(0, nullptr);  // several tiles, and more after them
  }
  ~SweepSetup() { resources->updater->finish(); }
  SweepSetup(const SweepSetup&) = delete;
  SweepSetup& operator=(const SweepSetup&) = delete;

  std::uint32_t busy() const {
    std::uint32_t count = 0;
    for (std::uint32_t b = 0; b < resources->mover->buffers(); ++b) count += !resources->mover->idle(b);
    return count;
  }
  std::uint32_t reading() const {
    for (std::uint32_t b = 0; b < resources->mover->buffers(); ++b) resources->mover->finish_save(b);
    return busy();
  }

 private:
  testing::TempStore store;
  const ModelDescription model = testing::toy_model(3, 3000, 1);
  Config config = testing::toy_config(Placement::kNvme, Placement::kNvme, DType::kBFloat16, store.path());
  Plan plan;
  Agreement alone{nullptr};
  std::unique_ptr<RunResources> resources;
  std::optional<ParameterUpdates> parameters;
};

TEST(Updater, ReadsTheNextTilesWhileOneIsUpdated) {
  EXPECT_GT(SweepSetup([](DeepSpeedKnobs&) {}).reading(), 0u);
}

TEST(Updater, ReadsNothingAheadWithoutPipelineRead) {
  EXPECT_EQ(SweepSetup([](DeepSpeedKnobs& k) { k.pipeline_read = false; }).reading(), 0u);
}

TEST(Updater, WaitsForItsWritesWithoutPipelineWrite) {
  EXPECT_GT(SweepSetup([](DeepSpeedKnobs& k) { k.pipeline_write = false; }).busy(), 0u) << "reads go on";
  for (int i = 0; i < 10; ++i) {
    EXPECT_EQ(SweepSetup([](DeepSpeedKnobs& k) { k.pipeline_read = k.pipeline_write = false; }).busy(), 0u);
  }
}

}  // namespace
}  // namespace spillway
