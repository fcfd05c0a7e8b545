#include "src/checkpoint/file_names.h"

#include <gtest/gtest.h>

#include <functional>
#include <numeric>
#include <string>
#include <vector>

#include "spillway/error.h"
#include "spillway/export.h"
#include "spillway/safetensors.h"
#include "spillway/snapshot.h"
#include "tests/error_of.h"
#include "tests/src/model_directory.h"
#include "tests/src/toy_trainer.h"

namespace spillway {
namespace {

using testing::error_of;

constexpr std::uint32_t kMicroBatches = 2;

ModelDescription with_names(ModelDescription model, const std::string& text) {
  model.attachments.push_back({kFileNames, text});
  return model;
}

ModelDescription two_blocks() {
  ModelDescription model;
  model.blocks = {{"a", {{"up", {2, 4, 3}}, {"kept", {5}}}}, {"b", {{"down", {6}}}}};
  return model;
}

TEST(FileNames, WithoutAnAttachmentAllNamesAreThoseInMemory) {
  const ModelDescription model = two_blocks();
  const FileNames names(model);
  ASSERT_EQ(names.model().blocks.size(), 2u);
  EXPECT_EQ(names.model().blocks[0].parameters[1].name, "kept");
}

// up is two experts' [2, 3] gate and [2, 3] up, one after the other; pieces come as they like.
TEST(FileNames, ATensorBecomesItsPiecesInTheOrderOfItsValues) {
  const FileNames names(with_names(two_blocks(), R"({"unsaid": [], "tensors": [
      ["0.gate", "up", 0, 2, 3], ["1.gate", "up", 12, 2, 3], ["0.up", "up", 6, 6], ["1.up", "up", 18, 2, 3],
      ["other", "down", 0, 3, 2]]})"));
  EXPECT_TRUE(names.model().attachments.empty());
  const auto& parameters = names.model().blocks[0].parameters;
  ASSERT_EQ(parameters.size(), 5u);
  EXPECT_EQ(parameters[1].name, "0.up");
  EXPECT_EQ(parameters[1].shape, std::vector<std::uint64_t>({6}));
  EXPECT_EQ(parameters[4].name, "kept");
  EXPECT_EQ(names.model().blocks[1].parameters[0].name, "other");

  std::vector<float> values(24);
  std::iota(values.begin(), values.end(), 0.0f);
  for (const std::size_t step : {1u, 5u, 24u}) {
    std::vector<std::vector<float>> written(4);
    for (std::size_t at = 0; at < values.size(); at += step) {
      const std::span<const float> some = std::span(values).subspan(at, std::min(step, values.size() - at));
      names.write(0, 0, at, some, [&](std::uint32_t block, std::uint32_t p, std::uint64_t first, auto part) {
        EXPECT_EQ(block, 0u);
        EXPECT_EQ(first, written[p].size());
        written[p].insert(written[p].end(), part.begin(), part.end());
      });
    }
    for (std::size_t p = 0; p < 4; ++p) {
      ASSERT_EQ(written[p].size(), 6u);
      EXPECT_EQ(written[p].front(), 6.0f * static_cast<float>(p));
    }
  }
  names.write(0, 1, 2, std::span(values).first(1), [](std::uint32_t, std::uint32_t p, std::uint64_t first, auto) {
    EXPECT_EQ(p, 4u);
    EXPECT_EQ(first, 2u);
  });
}

TEST(FileNames, WhatIsNoSuchListIsRefused) {
  for (const char* text :
       {"", "[]", R"({"tensors": []})", R"({"tensors": 1, "unsaid": []})", R"({"tensors": [["a"]], "unsaid": []})",
        R"({"tensors": [["a", "down", 1, 6]], "unsaid": []})", R"({"tensors": [["a", "down", 0, 5]], "unsaid": []})",
        R"({"tensors": [["a", "down", 0, 7]], "unsaid": []})",
        R"({"tensors": [["a", "down", 0, 4], ["b", "down", 3, 3]], "unsaid": []})",
        R"({"tensors": [["a", "none", 0, 6]], "unsaid": []})", R"({"tensors": [["a", "down", 0.5, 6]], "unsaid": []})",
        R"({"tensors": [[7, "down", 0, 6]], "unsaid": []})"}) {
    const Error error = error_of([&] { FileNames(with_names(two_blocks(), text)); });
    EXPECT_EQ(error.code(), Code::kCorrupt) << text;
    EXPECT_EQ(error.parts().object, kFileNames);
  }
  for (const char* text : {R"({"tensors": [["a", "down", 0, 4294967296, 4294967296]], "unsaid": []})",
                           R"({"tensors": [["a", "down", 0, 6], ["b", "down", 6, 0]], "unsaid": []})"}) {
    EXPECT_EQ(error_of([&] { FileNames(with_names(two_blocks(), text)); }).code(), Code::kInvalidArgument);
  }
}

TEST(FileNames, WhatAnExportCannotMakeIsNamed) {
  const Error error = error_of([] { FileNames(with_names(two_blocks(), R"({"tensors": [], "unsaid": ["down"]})")); });
  EXPECT_EQ(error.code(), Code::kUnsupported);
  EXPECT_EQ(error.parts().object, "down");
}

class NamedExport : public ModelDirectory {
 protected:
  std::vector<float> read(const std::string& directory, const std::string& tensor) const {
    auto reader = SafetensorsReader::open(directory_ / directory);
    const TensorEntry* entry = reader.find(tensor);
    if (!entry) return {};
    std::vector<float> values(entry->elements);
    reader.read(*entry, 0, values);
    return values;
  }
};

TEST_F(NamedExport, EngineStoreAndSnapshotExportTheNamesOfFiles) {
  ModelDescription model = testing::toy_model(3, 2000, kMicroBatches);
  const Parameter weight = model.blocks[1].parameters[0];
  std::uint64_t elements = 1;
  for (const std::uint64_t dimension : weight.shape) elements *= dimension;
  model = with_names(model, R"({"unsaid": [], "tensors": [["front", ")" + weight.name + R"(", 0, 3], ["back", ")" +
                                weight.name + "\", 3, " + std::to_string(elements - 3) + "]]}");
  model.attachments.push_back({"config.json", "{}"});
  const Config config = testing::toy_config(Placement::kNvme, Placement::kNvme, DType::kBFloat16, directory_ / "store");
  {
    auto engine = Engine::create(config, model);
    engine->import_weights(testing::toy_weights());
    testing::ToyTrainer{*engine, model, DType::kBFloat16, kMicroBatches}.run_step();
    engine->save(directory_ / "snapshot");
    export_model(*engine, model, directory_ / "engine", {});
  }
  export_store({directory_ / "store"}, directory_ / "from_store", {});
  export_snapshot(directory_ / "snapshot", directory_ / "from_snapshot", {});
  const std::vector<float> whole = read("snapshot", weight.name);  // a run begins with the names in memory
  ASSERT_EQ(whole.size(), elements);
  for (const char* directory : {"engine", "from_store", "from_snapshot"}) {
    EXPECT_EQ(read(directory, "front"), std::vector<float>(whole.begin(), whole.begin() + 3)) << directory;
    EXPECT_EQ(read(directory, "back"), std::vector<float>(whole.begin() + 3, whole.end())) << directory;
    EXPECT_TRUE(read(directory, weight.name).empty()) << directory;
    EXPECT_TRUE(std::filesystem::exists(directory_ / directory / "config.json")) << directory;
    EXPECT_FALSE(std::filesystem::exists(directory_ / directory / kFileNames)) << directory;
  }
}

}  // namespace
}  // namespace spillway
