// The optimizer whose weights are the caller's: the bits of the plain kernels over plain arrays, wherever its states
// live, whatever was left out, written by the caller, or interrupted between two steps.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <stdexcept>
#include <vector>

#include "kernels/norm.h"
#include "kernels/workers.h"
#include "spillway/bf16.h"
#include "spillway/error.h"
#include "spillway/fp16.h"
#include "spillway/offload_optimizer.h"
#include "spillway/units.h"
#include "tests/temp_directory.h"

namespace spillway {
namespace {

using ::testing::HasSubstr;

// Some smaller than a unit of 1,024 elements, one longer than a tile, none a multiple of anything.
constexpr std::uint64_t kElements[] = {700, 5000, 3, 150'001, 1024, 9};
constexpr std::uint32_t kTensors = 6;

ModelDescription six_tensors() {
  ModelDescription model;
  model.blocks = {{.name = "a", .parameters = {{.name = "a.0", .shape = {700}}, {.name = "a.1", .shape = {50, 100}}}},
                  {.name = "b",
                   .parameters = {{.name = "b.0", .shape = {3}},
                                  {.name = "b.1", .shape = {150'001}},
                                  {.name = "b.2", .shape = {1024}}}},
                  {.name = "c", .parameters = {{.name = "c.0", .shape = {9}}}}};
  return model;
}

// Room for a number of any of the three types.
class Values {
 public:
  Values(DType type, std::uint64_t count) : type_(type), bytes_(count * size_of(type)), count_(count) {}
  void* data() { return bytes_.data(); }
  const void* data() const { return bytes_.data(); }
  std::uint64_t count() const { return count_; }
  void put(std::uint64_t i, float value) {
    if (type_ == DType::kFloat32) reinterpret_cast<float*>(bytes_.data())[i] = value;
    if (type_ == DType::kBFloat16) reinterpret_cast<std::uint16_t*>(bytes_.data())[i] = float_to_bf16(value);
    if (type_ == DType::kFloat16) reinterpret_cast<std::uint16_t*>(bytes_.data())[i] = float_to_fp16(value);
  }
  float at(std::uint64_t i) const {
    if (type_ == DType::kFloat32) return reinterpret_cast<const float*>(bytes_.data())[i];
    const std::uint16_t half = reinterpret_cast<const std::uint16_t*>(bytes_.data())[i];
    return type_ == DType::kBFloat16 ? bf16_to_float(half) : fp16_to_float(half);
  }
  bool operator==(const Values& other) const { return bytes_ == other.bytes_; }

 private:
  DType type_;
  std::vector<std::byte> bytes_;
  std::uint64_t count_;
};

float random_value(std::uint64_t a, std::uint64_t b, std::uint64_t c) {
  std::uint64_t mixed = (a * 1'000'003 + b * 101 + c + 1) * 0x9e3779b97f4a7c15;
  mixed = (mixed ^ mixed >> 29) * 0xbf58476d1ce4e5b9;
  return static_cast<float>(mixed >> 40) / 0x1p23f - 1;
}

// A caller: its tensors, the gradients of a step, and what it does between steps.
struct Caller {
  explicit Caller(DType type) : type(type) {
    for (std::uint32_t t = 0; t < kTensors; ++t) {
      weights.emplace_back(type, kElements[t]);
      gradients.emplace_back(type, kElements[t]);
      for (std::uint64_t i = 0; i < kElements[t]; ++i) weights[t].put(i, random_value(0, t, i));
    }
  }
  void set_gradients(std::uint64_t step) {
    for (std::uint32_t t = 0; t < kTensors; ++t)
      for (std::uint64_t i = 0; i < kElements[t]; ++i) gradients[t].put(i, random_value(step, t, i));
  }
  // The third tensor rests in steps 2 and 3.
  static bool rests(std::uint64_t step, std::uint32_t t) { return t == 3 && (step == 2 || step == 3); }
  std::vector<OptimizerTensor> tensors(std::uint64_t step = 0) {
    std::vector<OptimizerTensor> all;
    for (std::uint32_t t = 0; t < kTensors; ++t)
      all.push_back({weights[t].data(), rests(step, t) ? nullptr : gradients[t].data()});
    return all;
  }

  DType type;
  std::vector<Values> weights, gradients;
};

constexpr std::uint32_t kGroupOf[] = {0, 1, 0, 1, 1, 0};

OptimizerConfig group_in(OptimizerKind kind, std::uint32_t group, std::uint64_t step) {
  OptimizerConfig values;
  values.kind = kind;
  values.learning_rate = (group == 0 ? 1e-3 : 3e-3) / static_cast<double>(step);
  values.beta1 = 0.9 - 0.01 * static_cast<double>(step);  // as cyclic schedules write it
  values.weight_decay = group == 0 ? 0 : 0.1;
  values.momentum = 0.8;
  return values;
}

OptimizerStepReport make_step(OffloadOptimizer& optimizer, Caller& caller, std::uint64_t step, OptimizerKind kind,
                              double scale = 0.5) {
  caller.set_gradients(step);
  const OptimizerConfig groups[] = {group_in(kind, 0, step), group_in(kind, 1, step)};
  const auto tensors = caller.tensors(step);
  const std::string blob = "step " + std::to_string(step);
  return optimizer.step({.tensors = tensors,
                         .groups = groups,
                         .group_of = kGroupOf,
                         .gradient_scale = scale,
                         .blob = std::as_bytes(std::span(blob))});
}

// Plain arrays and the plain kernels.
struct Reference {
  Reference(const Caller& caller, OptimizerKind kind) : kind(kind), type(caller.type), weights(caller.weights) {
    for (std::uint32_t t = 0; t < kTensors; ++t) {
      exp_avg.emplace_back(kElements[t]);
      exp_avg_sq.emplace_back(kElements[t]);
      residual.emplace_back(kElements[t]);
      master.emplace_back(kElements[t]);
      renew(t, 0, kElements[t]);
    }
  }
  void renew(std::uint32_t t, std::uint64_t begin, std::uint64_t end) {
    for (std::uint64_t i = begin; i < end; ++i) residual[t][i] = 0, master[t][i] = weights[t].at(i);
  }
  void step(const Caller& caller, std::uint64_t step, double scale = 0.5) {
    for (std::uint32_t t = 0; t < kTensors; ++t) {
      if (Caller::rests(step, t)) continue;
      OptimizerTile tile;
      tile.type = type;
      tile.weight = weights[t].data();
      if (type == DType::kBFloat16) tile.residual = residual[t].data();
      if (type == DType::kFloat16) tile.master = master[t].data();
      if (has_exp_avg(kind)) tile.exp_avg = exp_avg[t].data();
      if (has_exp_avg_sq(kind)) tile.exp_avg_sq = exp_avg_sq[t].data();
      tile.gradient = caller.gradients[t].data();
      tile.count = kElements[t];
      const auto scalars = optimizer_scalars(group_in(kind, kGroupOf[t], step), ++updates[t], scale);
      optimizer_update(tile, scalars, 0, tile.count);
    }
  }

  OptimizerKind kind;
  DType type;
  std::vector<Values> weights;
  std::vector<std::vector<float>> exp_avg, exp_avg_sq, master;
  std::vector<std::vector<std::int16_t>> residual;
  std::uint64_t updates[kTensors] = {};
};

enum class Where { kHost, kHostKept, kNvme, kBoth };

Config config_for(DType type, OptimizerKind kind, Where where, const std::filesystem::path& path) {
  Config config;
  config.weights = type;
  config.optimizer.kind = kind;
  config.states = where == Where::kHost || where == Where::kHostKept ? Placement::kHost : Placement::kNvme;
  if (where != Where::kHost) config.nvme_paths = {path};
  config.tile_elements = 64 * 1024;
  config.threads = 2;
  if (where == Where::kBoth) config.host_bytes = 6 << 20;  // some of the tiles
  return config;
}

struct Case {
  DType type;
  OptimizerKind kind;
  Where where;
};

class TensorOptimizerBits : public ::testing::TestWithParam<Case> {};

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const DType type : kDTypes) {
    for (const OptimizerKind kind : kOptimizerKinds) {
      all.push_back({type, kind, Where::kHost});
      all.push_back({type, kind, Where::kNvme});
    }
    for (const Where where : {Where::kHostKept, Where::kBoth}) all.push_back({type, OptimizerKind::kAdam, where});
  }
  return all;
}

std::string name_of_case(const ::testing::TestParamInfo<Case>& info) {
  constexpr const char* kWhere[] = {"InMemory", "InMemoryKept", "OnNvme", "InBoth"};
  return std::string(name_of(info.param.type)) + std::string(name_of(info.param.kind)) +
         kWhere[static_cast<int>(info.param.where)];
}
INSTANTIATE_TEST_SUITE_P(, TensorOptimizerBits, ::testing::ValuesIn(cases()), name_of_case);

// Two tensors that the caller writes between steps: one whole, of the other one element.
void write(Caller& caller, Reference& reference) {
  for (std::uint64_t i = 0; i < kElements[1]; ++i) caller.weights[1].put(i, random_value(99, 1, i));
  reference.weights[1] = caller.weights[1];
  reference.renew(1, 0, kElements[1]);
  caller.weights[3].put(70'000, 0.125f);
  reference.weights[3].put(70'000, 0.125f);
  reference.renew(3, 70'000 / 1024 * 1024, 70'000 / 1024 * 1024 + 1024);
}

TEST_P(TensorOptimizerBits, AreThoseOfThePlainKernelsAndSurviveAnEnd) {
  const auto [type, kind, where] = GetParam();
  TempDirectory directory;
  const Config config = config_for(type, kind, where, directory / "store");
  Caller caller(type);
  Reference reference(caller, kind);
  auto optimizer = OffloadOptimizer::create(config, six_tensors());
  optimizer->import_weights(caller.tensors());
  for (std::uint64_t step = 1; step <= 6; ++step) {
    if (step == 4) write(caller, reference);
    if (step == 5 && where != Where::kHost) {
      optimizer.reset();
      for (Values& weights : caller.weights) weights = Values(type, weights.count());
      optimizer = OffloadOptimizer::create(config, six_tensors(), {.on_existing = OnExisting::kResume});
      EXPECT_EQ(optimizer->current_step(), 4u);
      EXPECT_EQ(optimizer->update_counts(), (std::vector<std::uint64_t>{4, 4, 4, 2, 4, 4}));
      const auto blob = optimizer->blob();
      EXPECT_EQ(std::string(reinterpret_cast<const char*>(blob.data()), blob.size()), "step 4");
      optimizer->load_weights(caller.tensors());
    }
    const OptimizerStepReport report = make_step(*optimizer, caller, step, kind);
    EXPECT_EQ(report.step, step);
    EXPECT_EQ(report.durable_step, where == Where::kHost ? 0 : step);
    reference.step(caller, step);
    for (std::uint32_t t = 0; t < kTensors; ++t)
      ASSERT_TRUE(caller.weights[t] == reference.weights[t]) << "tensor " << t << " in step " << step;
  }
  std::vector<std::vector<float>> moments(kTensors);
  const OptimizerState state = has_exp_avg(kind) ? OptimizerState::kExpAvg : OptimizerState::kExpAvgSq;
  optimizer->export_state(state, caller.tensors(), [&](std::uint32_t t, std::uint64_t first, auto values) {
    EXPECT_EQ(first, moments[t].size()) << "in order";
    moments[t].insert(moments[t].end(), values.begin(), values.end());
  });
  EXPECT_EQ(moments, has_exp_avg(kind) ? reference.exp_avg : reference.exp_avg_sq);
}

// In memory each tensor's piece is updated by itself, on NVMe each tile.
TEST(TensorOptimizerStates, InFewerBytesTrainTheSameBitsEverywhere) {
  ModelDescription model = six_tensors();
  model.blocks[1].parameters[1].shape = {150'001, 1};  // vectors stay exact
  for (const MomentFormat moments : kMomentFormats) {
    std::vector<std::vector<Values>> trained;
    for (const Where where : {Where::kHost, Where::kNvme, Where::kBoth}) {
      for (const std::uint64_t tile : {64 * 1024, 5 * 1024}) {
        TempDirectory directory;
        Config config = config_for(DType::kBFloat16, OptimizerKind::kAdam, where, directory / "store");
        config.moments = moments;
        config.tile_elements = tile;
        Caller caller(DType::kBFloat16);
        const auto optimizer = OffloadOptimizer::create(config, model);
        optimizer->import_weights(caller.tensors());
        for (std::uint64_t step = 1; step <= 4; ++step) make_step(*optimizer, caller, step, OptimizerKind::kAdam);
        trained.push_back(caller.weights);
      }
    }
    for (const auto& weights : trained) EXPECT_TRUE(weights == trained.front()) << name_of(moments);
  }
}

class TensorOptimizerUse : public ::testing::Test {
 protected:
  std::unique_ptr<OffloadOptimizer> create(Where where, OffloadOptimizerOptions options = {},
                                           DType type = DType::kBFloat16) {
    return OffloadOptimizer::create(config_for(type, OptimizerKind::kAdam, where, directory / "store"), six_tensors(),
                                    options);
  }
  template <typename Call>
  static std::string refusal(Code code, Call&& call) {
    try {
      call();
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), code) << error.what();
      return error.what();
    }
    ADD_FAILURE() << "nothing was refused";
    return {};
  }

  TempDirectory directory;
  Caller caller{DType::kBFloat16};
};

TEST_F(TensorOptimizerUse, NormIsThatOfBlocksAsTheEngineAddsIt) {
  auto optimizer = create(Where::kHost);
  caller.set_gradients(1);
  auto workers = create_workers(2u);
  double sum = 0;
  std::uint32_t t = 0;
  for (const Block& block : six_tensors().blocks) {
    Values flat(DType::kBFloat16, 0);
    std::uint64_t at = 0;
    for (std::size_t p = 0; p < block.parameters.size(); ++p) at += align_up(kElements[t + p], std::uint64_t{1024});
    flat = Values(DType::kBFloat16, at);
    at = 0;
    for (std::size_t p = 0; p < block.parameters.size(); ++p, ++t) {
      for (std::uint64_t i = 0; i < kElements[t]; ++i) flat.put(at + i, caller.gradients[t].at(i));
      at += align_up(kElements[t], std::uint64_t{1024});
    }
    std::vector<double> leaves(at / 1024);
    sum += squared_norm(flat.data(), DType::kBFloat16, at, leaves, *workers).sum_of_squares;
  }
  const GradientNorm norm = optimizer->gradient_norm(caller.tensors());
  EXPECT_EQ(norm.norm, std::sqrt(sum));
  EXPECT_FALSE(norm.first_nonfinite);
}

TEST_F(TensorOptimizerUse, ANanInAGradientIsRefusedWithNothingChanged) {
  for (const Where where : {Where::kHost, Where::kNvme}) {
    auto optimizer = create(where, {.on_existing = OnExisting::kReplace});
    optimizer->import_weights(caller.tensors());
    make_step(*optimizer, caller, 1, OptimizerKind::kAdam);
    const auto before = caller.weights;
    caller.set_gradients(2);
    caller.gradients[4].put(1023, NAN);
    const OptimizerConfig groups[] = {group_in(OptimizerKind::kAdam, 0, 1), group_in(OptimizerKind::kAdam, 1, 1)};
    const auto tensors = caller.tensors();
    EXPECT_EQ(optimizer->gradient_norm(tensors).first_nonfinite, 4u);
    const std::string message = refusal(
        Code::kNonFinite, [&] { optimizer->step({.tensors = tensors, .groups = groups, .group_of = kGroupOf}); });
    EXPECT_THAT(message, HasSubstr("b.2: NaN or Inf in its gradient in step 2"));
    for (std::uint32_t t = 0; t < kTensors; ++t) EXPECT_TRUE(caller.weights[t] == before[t]);
    EXPECT_EQ(make_step(*optimizer, caller, 2, OptimizerKind::kAdam).step, 2u) << "it goes on";
  }
}

TEST_F(TensorOptimizerUse, ASnapshotBeginsARunWithTheSameBits) {
  for (const Where where : {Where::kHost, Where::kNvme}) {
    Caller first(DType::kFloat16), second(DType::kFloat16);
    auto optimizer = create(where, {.on_existing = OnExisting::kReplace}, DType::kFloat16);
    optimizer->import_weights(first.tensors());
    for (std::uint64_t step = 1; step <= 3; ++step) make_step(*optimizer, first, step, OptimizerKind::kAdam);
    optimizer->save(directory / "saved", {.replace = true}, first.tensors());
    make_step(*optimizer, first, 4, OptimizerKind::kAdam);
    optimizer.reset();
    const Where other = where == Where::kHost ? Where::kNvme : Where::kHost;
    optimizer = create(other, {.on_existing = OnExisting::kReplace, .snapshot = directory / "saved"}, DType::kFloat16);
    EXPECT_EQ(optimizer->current_step(), 3u);
    EXPECT_THAT(refusal(Code::kInvalidArgument, [&] { make_step(*optimizer, second, 4, OptimizerKind::kAdam); }),
                HasSubstr("call load_weights first"));
    optimizer->load_weights(second.tensors());
    make_step(*optimizer, second, 4, OptimizerKind::kAdam);
    for (std::uint32_t t = 0; t < kTensors; ++t) EXPECT_TRUE(second.weights[t] == first.weights[t]) << t;
  }
}

TEST_F(TensorOptimizerUse, StatesGoFromOneToAnother) {
  for (const Where where : {Where::kHost, Where::kNvme}) {
    for (const bool masters : {false, true}) {
      Caller first(DType::kFloat16), second(DType::kFloat16);
      auto from = create(Where::kHost, {}, DType::kFloat16);
      from->import_weights(first.tensors());
      for (std::uint64_t step = 1; step <= 3; ++step) make_step(*from, first, step, OptimizerKind::kAdam);
      std::map<OptimizerState, std::vector<std::vector<float>>> states;
      for (const auto state : {OptimizerState::kMaster, OptimizerState::kExpAvg, OptimizerState::kExpAvgSq}) {
        states[state].resize(kTensors);
        from->export_state(state, first.tensors(), [&](std::uint32_t t, std::uint64_t, auto values) {
          states[state][t].insert(states[state][t].end(), values.begin(), values.end());
        });
      }
      auto to = create(where, {.on_existing = OnExisting::kReplace}, DType::kFloat16);
      to->import_weights(second.tensors());
      make_step(*to, second, 1, OptimizerKind::kAdam);  // what is there is given up
      if (!masters) second.weights = first.weights;
      const std::uint64_t counts[] = {3, 3, 3, 1, 3, 3};
      to->import_state(3, counts, masters, second.tensors(),
                       [&](OptimizerState state, std::uint32_t t, std::uint64_t at, std::span<float> out) {
                         std::copy_n(states[state][t].begin() + static_cast<std::ptrdiff_t>(at), out.size(),
                                     out.begin());
                       });
      EXPECT_EQ(to->update_counts(), std::vector<std::uint64_t>(std::begin(counts), std::end(counts)));
      for (std::uint32_t t = 0; t < kTensors; ++t) EXPECT_TRUE(second.weights[t] == first.weights[t]) << t;
      if (!masters) {  // an fp16 weight's finer value is its own then
        Reference reference(first, OptimizerKind::kAdam);
        reference.exp_avg = states[OptimizerState::kExpAvg];
        reference.exp_avg_sq = states[OptimizerState::kExpAvgSq];
        std::ranges::copy(counts, reference.updates);
        make_step(*to, second, 4, OptimizerKind::kAdam);
        reference.step(second, 4);
        for (std::uint32_t t = 0; t < kTensors; ++t) EXPECT_TRUE(second.weights[t] == reference.weights[t]) << t;
        continue;
      }
      make_step(*from, first, 4, OptimizerKind::kAdam);
      make_step(*to, second, 4, OptimizerKind::kAdam);
      for (std::uint32_t t = 0; t < kTensors; ++t) EXPECT_TRUE(second.weights[t] == first.weights[t]) << t;
    }
  }
}

TEST_F(TensorOptimizerUse, StatesThatCannotBeHadEndItAtTheLastCommit) {
  auto optimizer = create(Where::kNvme);
  optimizer->import_weights(caller.tensors());
  make_step(*optimizer, caller, 1, OptimizerKind::kAdam);
  const std::vector<std::uint64_t> counts(kTensors, 1);
  EXPECT_THROW(optimizer->import_state(1, counts, false, caller.tensors(),
                                       [](auto...) { throw std::runtime_error("a file that ends"); }),
               std::runtime_error);
  EXPECT_THAT(refusal(Code::kIo, [&] { make_step(*optimizer, caller, 2, OptimizerKind::kAdam); }),
              HasSubstr("other states could not be had"));
  optimizer.reset();
  EXPECT_EQ(create(Where::kNvme, {.on_existing = OnExisting::kResume})->current_step(), 1u);
}

TEST_F(TensorOptimizerUse, AResultThatOverflowsEndsItAtTheLastCommit) {
  auto optimizer = create(Where::kNvme);
  optimizer->import_weights(caller.tensors());
  make_step(*optimizer, caller, 1, OptimizerKind::kAdam);
  const auto before = caller.weights;
  EXPECT_THAT(refusal(Code::kNonFinite, [&] { make_step(*optimizer, caller, 2, OptimizerKind::kAdam, 1e30); }),
              HasSubstr("the last committed step is intact"));
  EXPECT_THAT(refusal(Code::kIo, [&] { make_step(*optimizer, caller, 2, OptimizerKind::kAdam); }),
              HasSubstr("stopped after an earlier error"));
  optimizer.reset();
  optimizer = create(Where::kNvme, {.on_existing = OnExisting::kResume});
  optimizer->load_weights(caller.tensors());
  EXPECT_EQ(optimizer->current_step(), 1u);
  for (std::uint32_t t = 0; t < kTensors; ++t) EXPECT_TRUE(caller.weights[t] == before[t]);
}

TEST_F(TensorOptimizerUse, MemoryForGradientsIsThereWhenAskedFor) {
  auto without = create(Where::kHost);
  EXPECT_TRUE(without->gradient_memory(0).empty());
  auto with = create(Where::kHost, {.keep_gradients = true});
  std::vector<std::span<std::byte>> memory;
  std::uint64_t elements = 0;
  for (std::uint32_t t = 0; t < kTensors; ++t) {
    memory.push_back(with->gradient_memory(t));
    EXPECT_EQ(memory.back().size(), kElements[t] * 2);
    elements += kElements[t];
    if (t > 0) {
      EXPECT_GE(memory[t].data(), memory[t - 1].data() + memory[t - 1].size());
    }
  }
  EXPECT_GE(with->ledger().total(Placement::kHost), without->ledger().total(Placement::kHost) + elements * 2);
}

TEST_F(TensorOptimizerUse, RefusesWhatCannotBe) {
  Config config = config_for(DType::kBFloat16, OptimizerKind::kAdam, Where::kNvme, directory / "store");
  const auto create_refused = [&](const Config& wrong, const ModelDescription& model) {
    return refusal(Code::kInvalidArgument, [&] { OffloadOptimizer::create(wrong, model); });
  };
  Config wrong = config;
  wrong.commit_every = 2;
  EXPECT_THAT(create_refused(wrong, six_tensors()), HasSubstr("commits every step"));
  wrong = config;
  wrong.states = Placement::kHbm;
  EXPECT_THAT(create_refused(wrong, six_tensors()), HasSubstr("set offload_optimizer.device"));
  wrong = config;
  wrong.nvme_paths.clear();
  EXPECT_THAT(create_refused(wrong, six_tensors()), HasSubstr("nvme_path: is missing"));
  ModelDescription frozen = six_tensors();
  frozen.blocks[1].parameters[1].trainable = false;
  EXPECT_THAT(create_refused(config, frozen), HasSubstr("b.1: is described as frozen"));

  auto optimizer = create(Where::kNvme);
  const auto refused = [&](auto&& call) { return refusal(Code::kInvalidArgument, call); };
  EXPECT_THAT(refused([&] { make_step(*optimizer, caller, 1, OptimizerKind::kAdam); }),
              HasSubstr("call import_weights first"));
  auto tensors = caller.tensors();
  EXPECT_THAT(refused([&] { optimizer->import_weights(std::span(tensors).first(5)); }), HasSubstr("give all 6"));
  tensors[2].weight = nullptr;
  EXPECT_THAT(refused([&] { optimizer->import_weights(tensors); }), HasSubstr("b.0: has no memory"));
  caller.weights[3].put(5, INFINITY);
  EXPECT_THAT(refused([&] { optimizer->import_weights(caller.tensors()); }), HasSubstr("b.1: holds Inf at index 5"));
  const std::vector<std::uint64_t> none(kTensors);
  EXPECT_THAT(refused([&] { optimizer->import_state(0, none, false, caller.tensors(), [](auto...) {}); }),
              HasSubstr("b.1: holds Inf at index 5"));
  caller.weights[3].put(5, 1);
  optimizer->import_weights(caller.tensors());
  EXPECT_THAT(refused([&] { optimizer->import_weights(caller.tensors()); }), HasSubstr("has its weights already"));
  EXPECT_THAT(refused([&] { make_step(*optimizer, caller, 1, OptimizerKind::kLion); }), HasSubstr("of its kind"));
  EXPECT_EQ(make_step(*optimizer, caller, 1, OptimizerKind::kAdam).step, 1u) << "nothing was lost";
}

}  // namespace
}  // namespace spillway
