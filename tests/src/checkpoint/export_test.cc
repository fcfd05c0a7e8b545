#include "spillway/export.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <map>

#include "spillway/error.h"
#include "spillway/fp16.h"
#include "spillway/safetensors.h"
#include "src/plan/plan.h"
#include "swap/tile_store.h"
#include "tests/src/model_directory.h"
#include "tests/src/toy_trainer.h"

namespace spillway {
namespace {

using ::testing::ElementsAre;

constexpr std::uint32_t kMicroBatches = 2;
constexpr std::uint64_t kSteps = 3;

ModelDescription model_with_config() {
  ModelDescription model = testing::toy_model(3, 2000, kMicroBatches);
  model.blocks[2].parameters[0].trainable = false;
  model.attachments = {{"config.json", "{\"layers\": 3}\n"}, {"notes.txt", ""}};
  return model;
}

class Export : public ModelDirectory {
 protected:
  Config config(DType type) const {
    return testing::toy_config(Placement::kNvme, Placement::kNvme, type, directory_ / "store");
  }
  std::filesystem::path out(const std::string& name) const { return directory_ / name; }
  static Code code_of(const std::function<void()>& work) {
    try {
      work();
    } catch (const Error& error) {
      return error.code();
    }
    ADD_FAILURE() << "nothing was refused";
    return Code::kUnsupported;
  }
  // Some steps, of which in fp16 not all are skipped, and then what `with` does to the engine.
  void train(
      DType type, const std::function<void(Engine&)>& with = [](Engine&) {}) const {
    auto engine = Engine::create(config(type), model_, {.on_existing = OnExisting::kReplace});
    engine->import_weights(testing::toy_weights());
    testing::ToyTrainer trainer{*engine, model_, type, kMicroBatches};
    for (std::uint64_t step = 0; step < kSteps; ++step) trainer.run_step();
    with(*engine);
  }
  void expect_equal_files(const std::string& a, const std::string& b) const {
    std::set<std::string> files, same;
    for (const auto& entry : std::filesystem::directory_iterator(out(a))) files.insert(entry.path().filename());
    for (const auto& entry : std::filesystem::directory_iterator(out(b))) same.insert(entry.path().filename());
    EXPECT_EQ(files, same);
    EXPECT_TRUE(files.contains("model.safetensors") && files.contains("config.json") && files.contains("notes.txt"));
    for (const std::string& file : files) EXPECT_TRUE(read_file(a + "/" + file) == read_file(b + "/" + file)) << file;
  }

  ModelDescription model_ = model_with_config();
};

TEST_F(Export, AStoreGivesTheSameFilesAsItsEngine) {
  for (DType type : {DType::kBFloat16, DType::kFloat32, DType::kFloat16}) {
    for (const DType of : kDTypes) {
      const std::string model = "model-" + std::string(name_of(of)), store = "store-" + std::string(name_of(of));
      train(type, [&](Engine& engine) { export_model(engine, model_, out(model), {.type = of, .replace = true}); });
      const ExportedStore exported = export_store({out("store")}, out(store), {.type = of, .replace = true});
      EXPECT_EQ(exported.step, kSteps);
      EXPECT_EQ(exported.weights, type);
      expect_equal_files(model, store);
    }
    EXPECT_EQ(read_file("model-fp32/config.json"), "{\"layers\": 3}\n");
  }
}

// fp32: what Adam works on; bf16: what forward and backward saw.
TEST_F(Export, TheTypeChoosesMasterOrWeight) {
  std::vector<std::uint32_t> master, weight;
  train(DType::kBFloat16, [&](Engine& engine) {
    master = testing::exported(engine);
    engine.export_weights(false, [&](auto, auto, auto, std::span<const float> values) {
      for (float value : values) weight.push_back(std::bit_cast<std::uint32_t>(value));
    });
  });
  ASSERT_EQ(master.size(), weight.size());
  std::size_t differ = 0;
  for (std::size_t i = 0; i < master.size(); ++i) {
    ASSERT_EQ(split_master(std::bit_cast<float>(master[i])).weight, weight[i] >> 16) << i;
    differ += master[i] != weight[i];
  }
  EXPECT_GT(differ, master.size() / 2);
}

// In fp16 the weight is the exact one rounded to nearest.
TEST_F(Export, AnFp16StoreGivesItsWeightsAndItsMaster) {
  train(DType::kFloat16);
  export_store({out("store")}, out("exact"), {});
  export_store({out("store")}, out("half"), {.type = DType::kFloat16});
  auto exact = SafetensorsReader::open(out("exact")), half = SafetensorsReader::open(out("half"));
  std::size_t differ = 0, elements = 0;
  for (const TensorEntry& entry : half.tensors()) {
    EXPECT_EQ(entry.dtype, "F16");
    std::vector<float> values(entry.elements), master(entry.elements);
    half.read(entry, 0, values);
    exact.read(*exact.find(entry.name), 0, master);
    for (std::size_t i = 0; i < values.size(); ++i) {
      ASSERT_EQ(values[i], fp16_to_float(float_to_fp16(master[i]))) << entry.name << " " << i;
      differ += values[i] != master[i];
    }
    elements += values.size();
  }
  EXPECT_GT(differ, elements / 2);
}

// A weight of 100,000 fits bf16 and fp32; the export as fp16 names it and leaves nothing.
TEST_F(Export, AWeightThatFp16DoesNotHoldIsRefusedByName) {
  auto engine = Engine::create(config(DType::kBFloat16), model_);
  engine->import_weights([](std::uint32_t block, std::uint32_t parameter, std::uint64_t, std::span<float> out) {
    std::ranges::fill(out, block == 1 && parameter == 1 ? 100'000.f : 1.f);
  });
  engine.reset();
  try {
    export_store({out("store")}, out("half"), {.type = DType::kFloat16});
    ADD_FAILURE() << "it was exported";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Code::kInvalidArgument);
    EXPECT_NE(std::string(error.what()).find("tensor \"h.1.bias\" holds 99840, and fp16 ends at 65,504"),
              std::string::npos)
        << error.what();
  }
  EXPECT_THAT(names(), ElementsAre("store"));
}

TEST_F(Export, ADirectoryThatHoldsAModelIsLeftAloneUnlessItMayBeReplaced) {
  train(DType::kBFloat16);
  std::filesystem::create_directory(out("taken"));
  write_file("taken/model.safetensors", "an older model");
  EXPECT_EQ(code_of([&] { export_store({out("store")}, out("taken"), {}); }), Code::kExists);
  EXPECT_EQ(read_file("taken/model.safetensors"), "an older model");
  EXPECT_FALSE(std::filesystem::exists(out("taken") / "config.json"));
  export_store({out("store")}, out("taken"), {.replace = true});
  EXPECT_GT(std::filesystem::file_size(out("taken") / "model.safetensors"), 10'000u);
}

TEST_F(Export, ASnapshotIsNoPlaceForAModel) {
  train(DType::kBFloat16, [&](Engine& engine) {
    engine.save(out("snapshot"));
    EXPECT_EQ(code_of([&] { export_model(engine, model_, out("snapshot"), {.replace = true}); }), Code::kExists);
  });
  const std::string weights = read_file("snapshot/model.safetensors");
  EXPECT_EQ(code_of([&] { export_snapshot(out("snapshot"), out("snapshot"), {.replace = true}); }), Code::kExists);
  EXPECT_EQ(code_of([&] { export_store({out("store")}, out("snapshot"), {.replace = true}); }), Code::kExists);
  EXPECT_TRUE(read_file("snapshot/model.safetensors") == weights);
}

TEST_F(Export, ADamagedTileIsRefusedAndLeavesNothing) {
  train(DType::kBFloat16);
  const Plan plan = make_plan(config(DType::kBFloat16), model_);
  Extent extents[kParts];
  {
    const auto store = TileStore::open(out("store"), store_shape(plan));
    const TileStore::Slot slot = store->readable(static_cast<std::uint32_t>(plan.tiles.size() - 1));
    std::copy_n(slot.extent, kParts, extents);
  }
  std::filesystem::create_directory(out("old"));
  write_file("old/model.safetensors", "an older model");
  for (const Extent& extent : extents) {
    const auto flip = [&] {
      std::fstream file(out("store") / kStoreFileName, std::ios::in | std::ios::out | std::ios::binary);
      file.seekg(static_cast<std::streamoff>(extent.offset + 77));
      const int byte = file.get() ^ 1;
      file.seekp(static_cast<std::streamoff>(extent.offset + 77));
      file.put(static_cast<char>(byte));
    };
    flip();
    for (DType type : {DType::kFloat32, DType::kBFloat16}) {
      EXPECT_EQ(code_of([&] { export_store({out("store")}, out("new"), {.type = type}); }), Code::kCorrupt);
      EXPECT_FALSE(std::filesystem::exists(out("new")));
      EXPECT_EQ(code_of([&] { export_store({out("store")}, out("old"), {.type = type, .replace = true}); }),
                Code::kCorrupt);
      EXPECT_EQ(read_file("old/model.safetensors"), "an older model");
      EXPECT_FALSE(std::filesystem::exists(out("old") / "config.json"));
    }
    flip();
  }
  EXPECT_EQ(export_store({out("store")}, out("new"), {}).step, kSteps);
}

TEST_F(Export, ADirectoryWithoutAStoreHoldsNothingToExport) {
  std::filesystem::create_directory(out("store"));
  EXPECT_EQ(code_of([&] { export_store({out("store")}, out("new"), {}); }), Code::kNotFound);
  EXPECT_EQ(code_of([&] { export_store({out("nowhere")}, out("new"), {}); }), Code::kNotFound);
  EXPECT_FALSE(std::filesystem::exists(out("new")));
  EXPECT_FALSE(std::filesystem::exists(out("nowhere")));
}

TEST_F(Export, AStoreThatKeepsOneSlotOnlyIsNotExported) {
  Config one_slot = config(DType::kBFloat16);
  one_slot.commit_every = 0;
  Engine::create(one_slot, model_)->import_weights(testing::toy_weights());
  EXPECT_EQ(code_of([&] { export_store({out("store")}, out("new"), {}); }), Code::kUnsupported);
}

// When an attachment cannot be written there is no model either; one that has its name keeps it.
TEST_F(Export, AnAttachmentThatCannotBeWrittenLeavesNoModel) {
  train(DType::kBFloat16, [&](Engine& engine) {
    std::filesystem::create_directories(out("new") / "notes.txt");  // in the way
    EXPECT_EQ(code_of([&] { export_model(engine, model_, out("new"), {}); }), Code::kIo);
    EXPECT_THAT(names("new"), ElementsAre("config.json", "notes.txt"));
  });
}

// A failure before the first file gets its name leaves the older model as it was, one afterwards takes nothing from it.
TEST_F(Export, AFailedExportTakesNothingFromAnOlderModel) {
  train(DType::kBFloat16);
  std::filesystem::create_directory(out("old"));
  write_file("old/config.json", "an older model's");
  write_file("old/model.safetensors", "an older model");
  const auto failed = [&](const char* in_the_way, std::uint64_t max_file_bytes) {
    std::filesystem::create_directories(out("old") / in_the_way / "mine");
    EXPECT_EQ(
        code_of([&] { export_store({out("store")}, out("old"), {.max_file_bytes = max_file_bytes, .replace = true}); }),
        Code::kIo);
    std::filesystem::remove_all(out("old") / in_the_way);
  };
  failed(".model.safetensors.index.json.partial", 60'000);
  EXPECT_THAT(names("old"), ElementsAre("config.json", "model.safetensors"));
  EXPECT_EQ(read_file("old/config.json"), "an older model's");
  failed("model-00002-of-00003.safetensors", 60'000);
  EXPECT_THAT(names("old"), ElementsAre("config.json", "model.safetensors", "notes.txt"));
  EXPECT_EQ(read_file("old/model.safetensors"), "an older model");
}

TEST_F(Export, ASnapshotGivesTheSameValuesAsItsEngine) {
  for (DType type : kDTypes) {
    train(type, [&](Engine& engine) {
      engine.save(out("snapshot"));
      for (const DType of : kDTypes)
        export_model(engine, model_, out("model-" + std::string(name_of(of))), {.type = of});
    });
    for (const DType of : kDTypes) {
      const std::string name = "model-" + std::string(name_of(of));
      const ExportedStore exported = export_snapshot(out("snapshot"), out("exported"), {.type = of});
      EXPECT_EQ(exported.step, kSteps);
      EXPECT_EQ(exported.weights, type);
      EXPECT_EQ(names("exported"), names(name));
      auto expected = SafetensorsReader::open(out(name)), got = SafetensorsReader::open(out("exported"));
      ASSERT_EQ(expected.tensors().size(), got.tensors().size());
      for (const TensorEntry& entry : got.tensors()) {
        std::vector<float> a(entry.elements), b(entry.elements);
        expected.read(*expected.find(entry.name), 0, a);
        got.read(entry, 0, b);
        EXPECT_TRUE(a == b) << entry.name;
      }
      std::filesystem::remove_all(out("exported"));
      std::filesystem::remove_all(out(name));
    }
    remove_snapshot(out("snapshot"));
  }
}

TEST_F(Export, ADamagedSnapshotIsRefusedAndLeavesNothing) {
  train(DType::kBFloat16, [&](Engine& engine) { engine.save(out("snapshot")); });
  for (const char* file : {"snapshot/model.safetensors", "snapshot/spillway.json"}) {
    const std::string before = read_file(file);
    std::string changed = before;
    changed[changed.size() - 10] = static_cast<char>(changed[changed.size() - 10] ^ 1);
    write_file(file, changed);
    EXPECT_EQ(code_of([&] { export_snapshot(out("snapshot"), out("new"), {}); }), Code::kCorrupt) << file;
    EXPECT_FALSE(std::filesystem::exists(out("new")));
    write_file(file, before);
  }
  EXPECT_EQ(export_snapshot(out("snapshot"), out("new"), {}).step, kSteps);
}

TEST_F(Export, WhatItsProgressThrowsEndsItAndLeavesNothing) {
  train(DType::kBFloat16, [&](Engine& engine) { engine.save(out("snapshot")); });
  struct Stopped {};
  std::uint64_t last = 0, all = 0;
  const auto count = [&](std::uint64_t done, std::uint64_t bytes) {
    EXPECT_GT(done, last);
    last = done;
    all = bytes;
  };
  export_store({out("store")}, out("whole"), {.progress = count});
  EXPECT_EQ(last, all);
  EXPECT_GT(all, 0u);
  const auto before = names();
  const ExportOptions stopped{.progress = [&](std::uint64_t done, std::uint64_t) {
    if (done > all / 2) throw Stopped();
  }};
  EXPECT_THROW(export_store({out("store")}, out("new"), stopped), Stopped);
  EXPECT_THROW(export_snapshot(out("snapshot"), out("new"), stopped), Stopped);
  EXPECT_EQ(names(), before);
}

// A snapshot may have come from anywhere: what a link in it leads to must not end up in a model that is passed on.
TEST_F(Export, ALinkInPlaceOfASnapshotsAttachmentIsNotFollowed) {
  train(DType::kBFloat16, [&](Engine& engine) { engine.save(out("snapshot")); });
  write_file("private", "not for others");
  std::filesystem::remove(out("snapshot/notes.txt"));
  std::filesystem::create_symlink(out("private"), out("snapshot/notes.txt"));
  EXPECT_EQ(code_of([&] { export_snapshot(out("snapshot"), out("new"), {}); }), Code::kIo);
  EXPECT_FALSE(std::filesystem::exists(out("new")));
}

// A path with a slash after it and one below directories that are not there yet: whole, and nothing beside it.
TEST_F(Export, ANewDirectoryComesWithEverythingInIt) {
  train(DType::kBFloat16);
  export_store({out("store")}, out("a") / "b/", {});
  EXPECT_THAT(names(), ElementsAre("a", "store"));
  EXPECT_THAT(names("a"), ElementsAre("b"));
  EXPECT_THAT(names("a/b"), ElementsAre("config.json", "model.safetensors", "notes.txt"));
}

TEST_F(Export, AModelIsCutIntoFilesOfTheSizeAskedFor) {
  train(DType::kBFloat16);
  export_store({out("store")}, out("whole"), {});
  export_store({out("store")}, out("cut"), {.max_file_bytes = 60'000});
  auto whole = SafetensorsReader::open(out("whole")), cut = SafetensorsReader::open(out("cut"));
  EXPECT_GT(names("cut").size(), 4u);
  EXPECT_TRUE(names("cut").contains("model.safetensors.index.json"));
  ASSERT_EQ(whole.tensors().size(), cut.tensors().size());
  std::map<std::filesystem::path, std::uint64_t> bytes, tensors;
  for (const TensorEntry& entry : cut.tensors()) {
    std::vector<float> expected(entry.elements), values(entry.elements);
    whole.read(*whole.find(entry.name), 0, expected);
    cut.read(entry, 0, values);
    EXPECT_TRUE(expected == values) << entry.name;
    bytes[cut.file(entry)] += entry.bytes;
    tensors[cut.file(entry)] += 1;
  }
  for (const auto& [file, sum] : bytes) EXPECT_TRUE(sum <= 60'000 || tensors[file] == 1) << file << ": " << sum;
}

}  // namespace
}  // namespace spillway
