// Tensors that are elsewhere: the optimizer has the bits that it has with the same tensors in host memory, by a carrier
// that copies as late as it may, and nothing is lost where that fails.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <map>
#include <stdexcept>
#include <vector>

#include "kernels/norm.h"
#include "kernels/workers.h"
#include "spillway/bf16.h"
#include "spillway/error.h"
#include "spillway/offload_optimizer.h"
#include "spillway/units.h"
#include "tests/temp_directory.h"

namespace spillway {
namespace {

using ::testing::HasSubstr;

constexpr std::uint64_t kCounts[] = {5000, 3, 400'001, 1024, 300'000, 77};
constexpr std::uint32_t kCount = 6;
constexpr std::uint32_t kGroups[kCount] = {};

ModelDescription description() {
  ModelDescription model;
  model.blocks = {{.name = "a", .parameters = {{.name = "a.0", .shape = {5000}}, {.name = "a.1", .shape = {3}}}},
                  {.name = "b",
                   .parameters = {{.name = "b.0", .shape = {400'001}},
                                  {.name = "b.1", .shape = {1024}},
                                  {.name = "b.2", .shape = {300'000}}}},
                  {.name = "c", .parameters = {{.name = "c.0", .shape = {77}}}}};
  return model;
}

// bf16 weights and gradients, by tensor.
struct Tensors {
  Tensors() {
    for (std::uint32_t t = 0; t < kCount; ++t) {
      weights.emplace_back(kCounts[t]);
      gradients.emplace_back(kCounts[t]);
      for (std::uint64_t i = 0; i < kCounts[t]; ++i) weights[t][i] = float_to_bf16(std::sin(static_cast<float>(i + t)));
    }
  }
  void set_gradients(std::uint64_t step) {
    for (std::uint32_t t = 0; t < kCount; ++t)
      for (std::uint64_t i = 0; i < kCounts[t]; ++i)
        gradients[t][i] = float_to_bf16(std::cos(static_cast<float>(i * (step + 1) + t)));
  }
  bool rests(std::uint64_t step, std::uint32_t t) const { return step == 2 && t == 4; }
  std::vector<OptimizerTensor> shown(std::uint64_t step, const std::function<bool(std::uint32_t)>& away) {
    std::vector<OptimizerTensor> all;
    for (std::uint32_t t = 0; t < kCount; ++t) {
      void* const gradient = rests(step, t) ? nullptr : away(t) ? elsewhere() : gradients[t].data();
      all.push_back({away(t) ? elsewhere() : weights[t].data(), gradient});
    }
    return all;
  }
  std::vector<std::vector<std::uint16_t>> weights, gradients;
};

// Copies when it is waited for, and not before; what is on its way is poison until then.
class LateCarrier final : public TensorCarrier {
 public:
  explicit LateCarrier(Tensors& tensors) : tensors_(tensors) {}
  void bring(const CarriedPiece& piece) override {
    if (fails == "bring") throw std::runtime_error("the link is down");
    ++pieces;
    most = std::max(most, piece.count);
    for (void* to : {piece.weight, piece.gradient}) {
      if (to != nullptr) std::memset(to, 0xab, piece.count * 2);
    }
    waiting_[piece.slot].push_back([this, piece] {
      if (piece.weight) std::memcpy(piece.weight, &tensors_.weights[piece.tensor][piece.first], piece.count * 2);
      if (piece.gradient) std::memcpy(piece.gradient, &tensors_.gradients[piece.tensor][piece.first], piece.count * 2);
    });
  }
  void give(const CarriedPiece& piece) override {
    ++given;
    waiting_[piece.slot].push_back(
        [this, piece] { std::memcpy(&tensors_.weights[piece.tensor][piece.first], piece.weight, piece.count * 2); });
  }
  void wait(std::uint32_t slot) override {
    if (fails == "wait" && given > 2) throw Error(Code::kInvalidArgument, {"link", "is down", 0, ""});
    for (const auto& copy : std::exchange(waiting_[slot], {})) copy();
  }
  void leaf_sums(std::uint32_t tensor, std::span<double> sums) override {
    const auto workers = create_workers(1u);
    const auto& gradient = tensors_.gradients[tensor];
    squared_norm(gradient.data(), DType::kBFloat16, gradient.size(), sums, *workers);
  }
  void forget() { waiting_.clear(); }
  bool idle() const {
    return std::ranges::all_of(waiting_, [](const auto& slot) { return slot.second.empty(); });
  }
  std::uint64_t most = 0, pieces = 0, given = 0;
  std::string fails;

 private:
  Tensors& tensors_;
  std::map<std::uint32_t, std::vector<std::function<void()>>> waiting_;
};

struct Case {
  const char* name;
  bool nvme, mostly, all;
  std::uint64_t tile_elements, host_bytes;
};

Config config_of(const Case& with, const std::filesystem::path& path) {
  Config config;
  config.weights = DType::kBFloat16;
  config.optimizer.kind = OptimizerKind::kAdam;
  config.states = with.nvme ? Placement::kNvme : Placement::kHost;
  if (with.nvme) config.nvme_paths = {path};
  config.tile_elements = with.tile_elements;
  config.threads = 2;
  if (with.host_bytes > 0) config.host_bytes = with.host_bytes;
  return config;
}

void make_step(OffloadOptimizer& optimizer, std::span<const OptimizerTensor> tensors) {
  OptimizerConfig group;
  group.learning_rate = 1e-2;
  optimizer.step({.tensors = tensors, .groups = std::span(&group, 1), .group_of = kGroups});
}

class TensorStagingBits : public ::testing::TestWithParam<Case> {};
INSTANTIATE_TEST_SUITE_P(, TensorStagingBits,
                         ::testing::Values(Case{"InMemory", false, true, true, 64 << 10, 0},
                                           Case{"InMemoryThroughOneSlot", false, false, true, 512 << 10, 0},
                                           Case{"SomeInMemory", false, true, false, 64 << 10, 0},
                                           Case{"OnNvme", true, true, true, 64 << 10, 0},
                                           Case{"OnNvmeThroughOneSlot", true, false, true, 512 << 10, 0},
                                           Case{"SomeOnNvme", true, true, false, 64 << 10, 0},
                                           Case{"OnNvmeInATightBudget", true, true, true, 512 << 10, 16 << 20}),
                         [](const auto& info) { return info.param.name; });

TEST_P(TensorStagingBits, AreThoseOfTensorsInHostMemory) {
  const Case& with = GetParam();
  TempDirectory directory;
  Tensors here, there;
  LateCarrier carrier(there);
  const auto away = [&](std::uint32_t t) { return with.all || t % 2 == 0; };
  const auto nowhere = [](std::uint32_t) { return false; };
  auto expected = OffloadOptimizer::create(config_of(with, directory / "expected"), description());
  auto optimizer = OffloadOptimizer::create(config_of(with, directory / "found"), description(),
                                            {.carrier = &carrier, .mostly_elsewhere = with.mostly});
  EXPECT_TRUE(expected->staging().empty());
  expected->import_weights(here.shown(0, nowhere));
  optimizer->import_weights(there.shown(0, away));
  for (std::uint64_t step = 1; step <= 4; ++step) {
    here.set_gradients(step), there.set_gradients(step);
    if (step == 3) here.weights[2][70'000] = there.weights[2][70'000] = float_to_bf16(0.125f);  // the caller's
    const auto tensors = there.shown(step, away);
    EXPECT_EQ(expected->gradient_norm(here.shown(step, nowhere)).norm, optimizer->gradient_norm(tensors).norm);
    make_step(*expected, here.shown(step, nowhere));
    make_step(*optimizer, tensors);
    EXPECT_TRUE(carrier.idle());
    for (std::uint32_t t = 0; t < kCount; ++t) ASSERT_EQ(here.weights[t], there.weights[t]) << t << " in " << step;
  }
  EXPECT_GT(carrier.pieces, 5u);
  EXPECT_LE(carrier.most * 4 * (with.mostly ? 3 : 1), optimizer->staging().size());

  // What the weights are more exactly, and a snapshot; then the weights of it into other tensors.
  const auto masters = [](OffloadOptimizer& of, std::span<const OptimizerTensor> tensors) {
    std::vector<float> all;
    of.export_state(OptimizerState::kMaster, tensors, [&](std::uint32_t, std::uint64_t, auto values) {
      all.insert(all.end(), values.begin(), values.end());
    });
    return all;
  };
  EXPECT_EQ(masters(*expected, here.shown(0, nowhere)), masters(*optimizer, there.shown(0, away)));
  optimizer->save(directory / "saved", {}, there.shown(0, away));
  optimizer.reset();
  for (auto& weights : there.weights) std::ranges::fill(weights, std::uint16_t{0});
  Case in_memory = with;
  in_memory.nvme = false;
  optimizer =
      OffloadOptimizer::create(config_of(in_memory, {}), description(),
                               {.snapshot = directory / "saved", .carrier = &carrier, .mostly_elsewhere = with.mostly});
  optimizer->load_weights(there.shown(0, away));
  EXPECT_TRUE(carrier.idle());
  for (std::uint32_t t = 0; t < kCount; ++t) EXPECT_EQ(here.weights[t], there.weights[t]) << t;
  if (!with.nvme) return;
  for (auto& weights : there.weights) std::ranges::fill(weights, std::uint16_t{0});
  optimizer = OffloadOptimizer::create(config_of(with, directory / "found"), description(),
                                       {.on_existing = OnExisting::kResume, .carrier = &carrier});
  optimizer->load_weights(there.shown(0, away));
  for (std::uint32_t t = 0; t < kCount; ++t) EXPECT_EQ(here.weights[t], there.weights[t]) << t;
}

template <typename Call>
std::string message_of(Call&& call) {
  try {
    call();
  } catch (const std::exception& error) {
    return error.what();
  }
  ADD_FAILURE() << "nothing was refused";
  return {};
}

TEST(TensorStaging, AGradientThatIsNotFiniteChangesNothing) {
  Tensors tensors;
  LateCarrier carrier(tensors);
  auto optimizer = OffloadOptimizer::create(config_of({"", false, true, true, 64 << 10, 0}, {}), description(),
                                            {.carrier = &carrier, .mostly_elsewhere = true});
  const auto shown = tensors.shown(0, [](std::uint32_t) { return true; });
  optimizer->import_weights(shown);
  const auto before = tensors.weights;
  tensors.set_gradients(1);
  tensors.gradients[2][399'999] = 0x7f80;  // infinite
  EXPECT_EQ(2u, optimizer->gradient_norm(shown).first_nonfinite);
  EXPECT_THAT(message_of([&] { make_step(*optimizer, shown); }),
              HasSubstr("b.0: NaN or Inf in its gradient in step 1"));
  EXPECT_EQ(before, tensors.weights);
  tensors.set_gradients(1);
  make_step(*optimizer, shown);
}

// In the middle of a step the weights are those of two steps, whatever the carrier calls its error.
TEST(TensorStaging, ACarrierThatFailsEndsTheOptimizerAndTheStoreHasTheLastStep) {
  for (const char* fails : {"bring", "wait"}) {
    TempDirectory directory;
    Tensors tensors;
    LateCarrier carrier(tensors);
    const Case with{"", true, true, true, 64 << 10, 0};
    auto optimizer = OffloadOptimizer::create(config_of(with, directory / "store"), description(),
                                              {.carrier = &carrier, .mostly_elsewhere = true});
    const auto shown = tensors.shown(0, [](std::uint32_t) { return true; });
    optimizer->import_weights(shown);
    tensors.set_gradients(1);
    make_step(*optimizer, shown);
    const auto after = tensors.weights;
    carrier.fails = fails;
    carrier.given = 0;
    EXPECT_THAT(message_of([&] { make_step(*optimizer, shown); }), HasSubstr("is down"));
    carrier.fails.clear();
    carrier.forget();
    EXPECT_THAT(message_of([&] { make_step(*optimizer, shown); }), HasSubstr("stopped after an earlier error"));
    optimizer.reset();
    optimizer = OffloadOptimizer::create(config_of(with, directory / "store"), description(),
                                         {.on_existing = OnExisting::kResume, .carrier = &carrier});
    optimizer->load_weights(shown);
    EXPECT_EQ(1u, optimizer->current_step());
    EXPECT_EQ(after, tensors.weights);
  }
}

TEST(TensorStaging, WithoutACarrierNothingIsElsewhere) {
  Tensors tensors;
  auto optimizer = OffloadOptimizer::create(config_of({"", false, true, true, 64 << 10, 0}, {}), description());
  EXPECT_THAT(message_of([&] { optimizer->import_weights(tensors.shown(0, [](std::uint32_t) { return true; })); }),
              HasSubstr("a.0: is elsewhere, and there is no carrier; give one"));
}

}  // namespace
}  // namespace spillway
