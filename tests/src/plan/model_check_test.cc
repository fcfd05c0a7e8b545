// What no plan is made for.
#include <gtest/gtest.h>

#include <functional>
#include <string>

#include "spillway/error.h"
#include "spillway/units.h"
#include "src/plan/plan.h"
#include "tests/src/named_budget.h"
#include "tests/src/random_model.h"

namespace spillway {
namespace {

ModelDescription flat_model(std::uint32_t blocks) {
  ModelDescription model;
  for (std::uint32_t b = 0; b < blocks; ++b) {
    const std::string name = "h." + std::to_string(b);
    model.blocks.push_back(
        {name, {{.name = name + ".weight", .shape = {100, 100}}, {.name = name + ".bias", .shape = {100}}}});
  }
  return model;
}

using testing::config_for;
using testing::refused_plan;

TEST(ModelCheck, ADescriptionThatContradictsItselfIsRefusedByName) {
  const Config config = config_for(Placement::kHbm, Placement::kHbm);
  EXPECT_EQ(refused_plan(config, {}).code(), Code::kInvalidArgument);
  ModelDescription model = flat_model(2);
  model.blocks[1].parameters[0].name = "h.0.bias";
  EXPECT_NE(std::string(refused_plan(config, model).what()).find("h.0.bias: is described twice"), std::string::npos);
  model = flat_model(2);
  model.blocks[1].parameters[0].pushes = 0;
  EXPECT_NE(std::string(refused_plan(config, model).what()).find("h.1.weight: is trainable but"), std::string::npos);
  model = flat_model(2);
  model.visits = {{0, Pass::kForward}, {2, Pass::kForward}};
  EXPECT_EQ(refused_plan(config, model).code(), Code::kInvalidArgument);
  for (const char* name : {"", ".", "..", "a/b", "/etc/passwd", "../model", "model.safetensors",
                           "exp_avg.safetensors.index.json", "spillway.json"}) {
    model = flat_model(2);
    model.attachments = {{name, "text"}};
    EXPECT_EQ(refused_plan(config, model).code(), Code::kInvalidArgument) << name;
  }
  model.attachments = {{"config.json", "a"}, {"config.json", "b"}};
  EXPECT_NE(std::string(refused_plan(config, model).what()).find("is given twice"), std::string::npos);
  model = flat_model(2);
  for (const char* name : {"", "__metadata__"}) {
    model.blocks[1].parameters[0].name = name;
    EXPECT_NE(std::string(refused_plan(config, model).what()).find("has a name that files of"), std::string::npos);
  }
  model.blocks[1].parameters[0].name = "h.\xff";
  EXPECT_NE(std::string(refused_plan(config, model).what()).find("has a name that is not UTF-8"), std::string::npos);
}

TEST(ModelCheck, AWeightTypeThatTheProgramDoesNotHandleIsRefused) {
  Config config = config_for(Placement::kHbm, Placement::kHbm);
  ModelDescription model = flat_model(2);
  model.weight_types = {DType::kFloat32};
  config.weights = DType::kBFloat16;
  const Error error = refused_plan(config, model);
  EXPECT_EQ(error.code(), Code::kUnsupported);
  EXPECT_STREQ(error.what(),
               "bf16.enabled: weights are bf16 as it stands, and the program handles fp32 alone; leave it out");
  config.weights = DType::kFloat32;
  EXPECT_NO_THROW(make_plan(config, model));
  model.weight_types = {DType::kFloat16, DType::kBFloat16};
  EXPECT_STREQ(
      refused_plan(config, model).what(),
      "fp16.enabled: weights are fp32 as it stands, and the program handles fp16, bf16 alone; set fp16.enabled "
      "to true, and no other type");
  for (const DType type : model.weight_types) {
    config.weights = type;
    EXPECT_NO_THROW(make_plan(config, model));
  }
}

TEST(ModelCheck, SizesThatWouldOverflowAreRefused) {
  const Config config = config_for(Placement::kHbm, Placement::kHbm);
  const std::function<void(ModelDescription&)> too_large[] = {
      [](ModelDescription& model) { model.workspace_bytes = UINT64_MAX; },
      [](ModelDescription& model) { model.workspace_bytes = UINT64_MAX - kMiB; },
      [](ModelDescription& model) { model.activations = {{.bytes = UINT64_MAX / 2}}; },
      [](ModelDescription& model) {
        model.micro_batches = 1 << 20;
        model.blocks[0].inside_bytes = std::uint64_t{1} << 44;
      },
  };
  for (const auto& change : too_large) {
    ModelDescription model = flat_model(2);
    change(model);
    EXPECT_EQ(refused_plan(config, model).code(), Code::kDoesNotFit) << &change - too_large;
  }
}

}  // namespace
}  // namespace spillway
