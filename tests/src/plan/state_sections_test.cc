// A block's flat vector in sections whose states are described otherwise: from the plan through slots, checksums and
// updates to an export. Nothing of it changes what is trained.
//
// The program is linked with `--wrap` (meson.build), so that the test says which states a parameter has.
#include "src/plan/state_sections.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <fstream>
#include <iterator>
#include <string>

#include "spillway/error.h"
#include "spillway/export.h"
#include "spillway/store.h"
#include "src/plan/description.h"
#include "src/plan/plan.h"
#include "tests/src/toy_trainer.h"

namespace spillway {

StateList real_states_of(const Config&,
                         const Parameter&) asm("__real__ZN8spillway9states_ofERKNS_6ConfigERKNS_9ParameterE");
StateList given_states_of(const Config&,
                          const Parameter&) asm("__wrap__ZN8spillway9states_ofERKNS_6ConfigERKNS_9ParameterE");

namespace {

StateList given;  // of what is named `weight`; empty: all states are exact

}  // namespace

StateList given_states_of(const Config& config, const Parameter& parameter) {
  return given.empty() || !parameter.name.ends_with("weight") ? real_states_of(config, parameter) : given;
}

namespace {

using ::testing::HasSubstr;
using testing::TempStore;
using testing::ToyTrainer;

constexpr std::uint32_t kBlocks = 3;

// Adam's, the other way round.
constexpr std::array<StateArray, 3> kReversed = {{{.name = kResidual, .type = "int16", .bytes = 2},
                                                  {.name = kExpAvgSq, .type = "fp32", .bytes = 4},
                                                  {.name = kExpAvg, .type = "fp32", .bytes = 4}}};
// Lion's, and bytes that no update knows: their granules are of several groups, so that they take three passes.
constexpr std::array<StateArray, 3> kWithBytes = {{{.name = kExpAvg, .type = "fp32", .bytes = 4},
                                                   {.name = kResidual, .type = "int16", .bytes = 2},
                                                   {.name = "marks", .type = "uint8", .bytes = 1}}};

struct Case {
  OptimizerKind optimizer;
  StateList states;
};
const Case kCases[] = {{OptimizerKind::kAdam, kReversed}, {OptimizerKind::kLion, kWithBytes}};

// Tiles of a whole hashed unit, and what is left.
ModelDescription some_model() { return testing::toy_model(kBlocks, 60'000, 1); }

Config config_for(const Case& of, Placement states, const std::filesystem::path& store) {
  Config config = testing::toy_config(Placement::kNvme, states, DType::kBFloat16, store);
  config.optimizer.kind = of.optimizer;
  config.tile_elements = kHashedTileUnit;
  config.commit_every = 1;
  config.gradient_clipping = 0;
  return config;
}

std::vector<std::uint32_t> train(const Config& config, OnExisting on_existing) {
  const ModelDescription model = some_model();
  const auto engine = Engine::create(config, model, {.on_existing = on_existing});
  if (on_existing != OnExisting::kResume) engine->import_weights(testing::toy_weights());
  ToyTrainer trainer{*engine, model, config.weights, 1};
  for (int s = 0; s < 2; ++s) trainer.run_step();
  engine->flush();
  return testing::exported(*engine);
}

std::string exported_file(const std::filesystem::path& store, const std::filesystem::path& to) {
  export_store({store}, to, {});
  std::ifstream file(to / "model.safetensors", std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

TEST(StateSections, AreWhatTheTilesOfAPlanAreCutAt) {
  const Case& lion = kCases[1];
  const Config config = config_for(lion, Placement::kNvme, "/nowhere");
  const Plan exact = make_plan(config, some_model());
  given = lion.states;
  const Plan plan = make_plan(config, some_model());
  given = {};
  EXPECT_EQ(plan.blocks[1].partition.sections.size(), 2u);
  EXPECT_EQ(plan.blocks[0].partition.sections.size(), 1u);
  EXPECT_GT(space_bytes(store_shape(plan)), space_bytes(store_shape(exact)));
  std::uint64_t at = 0;
  for (std::uint32_t t = plan.blocks[1].first_tile; t < plan.blocks[1].first_tile + plan.blocks[1].tiles; ++t) {
    const TileShape& shape = plan.tile_places[t].shape;
    const bool weight = at < align_up(std::uint64_t{3 * 60'000}, kPartitionUnit);
    EXPECT_EQ(payload_bytes(shape, Part::kStates), shape.count * (weight ? 7 : 6));
    EXPECT_EQ(plan.tiles[t].range.first, at);
    at += shape.count;
  }
  EXPECT_NE(plan.identity.fingerprint, exact.identity.fingerprint);
}

TEST(StateSections, AStoreOfTwoOpensUpdatesVerifiesAndExportsTheSameBits) {
  for (const Case& of : kCases) {
    for (const Placement states : {Placement::kNvme, Placement::kHost}) {
      SCOPED_TRACE(std::string(name_of(of.optimizer)) + " " + std::to_string(static_cast<int>(states)));
      const TempStore directory;
      const auto path = [&](const char* name) { return directory.path() / name; };
      const Config exact = config_for(of, states, path("exact")), other = config_for(of, states, path("other"));
      train(exact, OnExisting::kReplace);
      const std::vector<std::uint32_t> bits = train(exact, OnExisting::kResume);
      const std::string file = exported_file(path("exact"), path("exact_model"));

      given = of.states;
      train(other, OnExisting::kReplace);
      EXPECT_TRUE(train(other, OnExisting::kResume) == bits);
      EXPECT_TRUE(exported_file(path("other"), path("other_model")) == file);
      const CheckedStore checked = verify_store({path("other")}, {});
      EXPECT_EQ(checked.bad_extents, 0u);
      EXPECT_EQ(checked.step, 4u);
      EXPECT_EQ(inspect_store({path("other")}).fingerprint, make_plan(other, some_model()).identity.fingerprint);
      given = {};
    }
  }
}

std::string refusal(const std::function<void()>& work) {
  try {
    work();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Code::kUnsupported);
    return error.what();
  }
  return "accepted";
}

TEST(StateSections, AreRefusedByWhoeverDoesNotKnowThem) {
  const TempStore directory;
  const std::filesystem::path store = directory.path() / "store";
  const Config config = config_for(kCases[0], Placement::kNvme, store);
  given = kReversed;
  train(config, OnExisting::kReplace);
  given = kWithBytes;
  EXPECT_THAT(refusal([&] { verify_store({store}, {}); }), HasSubstr("keeps states of some parameters"));
  given = {};
  EXPECT_THAT(refusal([&] { verify_store({store}, {}); }), HasSubstr("use the version that made the store"));
  EXPECT_THAT(refusal([&] { export_store({store}, directory.path() / "model", {}); }),
              HasSubstr("keeps states of some parameters"));
  EXPECT_THAT(refusal([&] { train(config, OnExisting::kResume); }), HasSubstr("keeps states of some parameters"));
}

TEST(StateSections, AStoreOfExactStatesAloneTellsOfNoSections) {
  const Config config = config_for(kCases[0], Placement::kNvme, "/nowhere");
  const std::string exact = describe_store(config, some_model()).description;
  EXPECT_EQ(exact.find("sections"), std::string::npos);
  given = kReversed;
  const std::string other = describe_store(config, some_model()).description;
  EXPECT_TRUE(other.starts_with(exact.substr(0, exact.size() - 1)));
  EXPECT_EQ(parse_store_description(other, "store").fingerprint, describe_store(config, some_model()).fingerprint);
  given = {};
}

}  // namespace
}  // namespace spillway
