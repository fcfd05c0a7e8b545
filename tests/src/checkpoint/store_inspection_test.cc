#include "spillway/store.h"

#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <functional>

#include "kernels/checksum.h"
#include "spillway/error.h"
#include "spillway/export.h"
#include "src/plan/description.h"
#include "swap/tile_store.h"
#include "tests/error_of.h"
#include "tests/kernels/random.h"
#include "tests/src/toy_trainer.h"

namespace spillway {
namespace {

using testing::error_of;
using testing::TempStore;
using testing::toy_config;
using testing::ToyTrainer;

// Trains a toy in a store of two paths for `steps` steps.
class Inspection : public ::testing::Test {
 protected:
  Inspection() { config_.nvme_paths = paths_; }

  std::vector<std::uint32_t> train(int steps, OnExisting on_existing) const {
    auto engine = Engine::create(config_, model_, {.on_existing = on_existing});
    if (on_existing != OnExisting::kResume) engine->import_weights(testing::toy_weights());
    ToyTrainer trainer{*engine, model_, config_.weights, 1};
    for (int s = 0; s < steps; ++s) trainer.run_step();
    engine->flush();
    return testing::exported(*engine);
  }
  StoreInfo inspect_after(int steps) const {
    train(steps, OnExisting::kReplace);
    return inspect_store(paths_);
  }
  static void flip(const std::filesystem::path& path, std::uint64_t offset) {
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    file.seekg(static_cast<std::streamoff>(offset));
    const int old = file.get();
    file.seekp(static_cast<std::streamoff>(offset));
    file.put(static_cast<char>(old ^ 1));
  }
  // Every extent that is not as written, found by reading all.
  std::vector<BadExtent> bad() const {
    std::vector<BadExtent> found;
    const CheckedStore checked = verify_store(paths_, {.on_bad = [&](const BadExtent& one) { found.push_back(one); }});
    EXPECT_EQ(checked.bad_extents, found.size());
    return found;
  }

  TempStore first_, second_;
  std::vector<std::filesystem::path> paths_{first_.path() / "a", second_.path() / "b"};
  ModelDescription model_ = testing::toy_model(3, 3000, 1);
  Config config_ = toy_config(Placement::kNvme, Placement::kNvme, DType::kBFloat16, "");
};

TEST_F(Inspection, ShowsWhatTheStoreWasMadeWithAndWhereItStands) {
  config_.nvme_rates = {1, 1};
  model_.attachments = {{"config.json", "{}"}};
  train(3, OnExisting::kRefuse);
  const StoreInfo info = inspect_store(paths_);
  EXPECT_EQ(info.step, 3u);
  EXPECT_EQ(info.older_step, 2u);
  EXPECT_FALSE(info.newest_lost);
  EXPECT_FALSE(info.in_use);
  EXPECT_EQ(info.slots, 2u);
  EXPECT_EQ(info.weights, DType::kBFloat16);
  EXPECT_EQ(info.optimizer, OptimizerKind::kAdam);
  EXPECT_EQ(info.tile_elements, 4096u);
  ASSERT_EQ(info.model.blocks.size(), 4u);
  EXPECT_EQ(info.model.blocks[1].parameters[0].name, "h.1.weight");
  ASSERT_EQ(info.model.attachments.size(), 1u);
  EXPECT_EQ(info.model.attachments[0].name, "config.json");
  std::uint64_t elements = 0;
  for (const Block& block : model_.blocks) {
    for (const Parameter& parameter : block.parameters) elements += testing::count_of(parameter);
  }
  EXPECT_EQ(info.parameters, elements);
  EXPECT_EQ(info.trainable, elements);
  EXPECT_GE(info.weight_bytes, 2 * elements);
  EXPECT_GE(info.state_bytes, 10 * elements);
  ASSERT_EQ(info.files.size(), 2u);
  for (std::size_t i = 0; i < 2; ++i) {
    EXPECT_EQ(info.files[i].path, paths_[i] / kStoreFileName);
    EXPECT_EQ(info.files[i].share, 1u);
    EXPECT_EQ(info.files[i].bytes, std::filesystem::file_size(info.files[i].path));
  }
  ASSERT_EQ(info.blob.size(), 8u);
  EXPECT_EQ(std::to_integer<int>(info.blob[0]), 3);
  int newest = 0;
  for (const auto& record : info.records) {
    EXPECT_EQ(record[0].sequence, record[1].sequence);
    newest += record[0].step == 3;
  }
  EXPECT_EQ(newest, 1);
}

TEST_F(Inspection, ShowsTheLossScaleApartFromTheCallersBlob) {
  EXPECT_FALSE(inspect_after(1).loss_scale.has_value()) << "bf16";
  config_.weights = DType::kFloat16;
  config_.loss_scale = {.initial_power = 23, .window = 1000, .hysteresis = 1};
  const StoreInfo info = inspect_after(3);  // a gradient is about 0.02, and the first two overflow at least
  EXPECT_EQ(info.weights, DType::kFloat16);
  EXPECT_GE(info.skipped_steps, 2u);
  EXPECT_EQ(info.loss_scale, std::ldexp(1.0, 23 - static_cast<int>(info.skipped_steps)));
  ASSERT_EQ(info.blob.size(), 8u);
  EXPECT_EQ(std::to_integer<int>(info.blob[0]), 3);
  roll_back_store(paths_);
  const StoreInfo back = inspect_store(paths_);
  EXPECT_EQ(back.step, 2u);
  EXPECT_EQ(back.skipped_steps, 2u);
  EXPECT_EQ(back.loss_scale, 0x1p21);
}

TEST_F(Inspection, VerifiesEveryByteAndNamesTheTensor) {
  train(2, OnExisting::kRefuse);
  EXPECT_TRUE(bad().empty());
  std::uint64_t done = 0, of = 0;
  const CheckedStore checked = verify_store(paths_, {.progress = [&](std::uint64_t d, std::uint64_t all) {
                                              done = d;
                                              of = all;
                                            }});
  EXPECT_EQ(checked.step, 2u);
  EXPECT_EQ(done, of);
  EXPECT_EQ(checked.bytes, of);
  const StoreInfo info = inspect_store(paths_);
  EXPECT_EQ(checked.bytes, info.weight_bytes + info.state_bytes);
  // Some bytes of both files: half of the slots are committed ones.
  std::uint64_t found = 0, tried = 0;
  for (const auto& path : paths_) {
    const auto file = path / kStoreFileName;
    for (std::uint64_t at = std::filesystem::file_size(file) / 3; at < std::filesystem::file_size(file);
         at += 200'000) {
      flip(file, at);
      const auto extents = bad();
      flip(file, at);
      ++tried;
      if (extents.empty()) continue;
      ++found;
      ASSERT_EQ(extents.size(), 1u);
      const BadExtent& one = extents[0];
      EXPECT_EQ(one.error, 0);
      EXPECT_TRUE(one.name.starts_with("states of tile ") || one.name.starts_with("weights of tile ")) << one.name;
      EXPECT_NE(one.name.find(" of block "), std::string::npos) << one.name;
    }
  }
  EXPECT_GT(found, 0u);
  EXPECT_LT(found, tried);
}

TEST_F(Inspection, AStoreInUseIsShownAndNotVerified) {
  train(1, OnExisting::kRefuse);
  const auto engine = Engine::create(config_, model_, {.on_existing = OnExisting::kResume});
  const StoreInfo info = inspect_store(paths_);
  EXPECT_TRUE(info.in_use);
  EXPECT_EQ(info.step, 1u);
  EXPECT_EQ(error_of([&] { verify_store(paths_); }).code(), Code::kBusy);
}

TEST_F(Inspection, AStoreOfOneSlotHasNoStep) {
  config_.commit_every = 0;
  train(2, OnExisting::kRefuse);
  const StoreInfo info = inspect_store(paths_);
  EXPECT_EQ(info.slots, 1u);
  EXPECT_FALSE(info.step.has_value());
  EXPECT_EQ(error_of([&] { verify_store(paths_); }).code(), Code::kUnsupported);
  EXPECT_EQ(error_of([&] { roll_back_store(paths_); }).code(), Code::kUnsupported);
}

TEST_F(Inspection, AMissingOrSwappedPathIsNamed) {
  train(1, OnExisting::kRefuse);
  EXPECT_EQ(error_of([&] { inspect_store({paths_[0]}); }).code(), Code::kInvalidArgument);
  EXPECT_NE(std::string(error_of([&] {
                          inspect_store({paths_[1], paths_[0]});
                        }).what())
                .find("named as part 1"),
            std::string::npos);
  EXPECT_EQ(error_of([&] { inspect_store({paths_[0], first_.path()}); }).code(), Code::kNotFound);
}

// A bit flips in the committed step of a store at rest: the step before is whole, and the bits are those of a run that
// nothing happened to.
TEST_F(Inspection, NoPathAtAllIsRefused) {
  const auto export_nothing = [] { export_store({}, "never made", {}); };
  for (const std::function<void()>& work :
       {std::function<void()>([] { inspect_store({}); }), std::function<void()>([] { verify_store({}); }),
        std::function<void()>([] { roll_back_store({}); }), std::function<void()>(export_nothing)}) {
    EXPECT_EQ(error_of(work).code(), Code::kInvalidArgument);
  }
}

TEST_F(Inspection, RolledBackAStoreTrainsTheSameBits) {
  const auto wanted = train(5, OnExisting::kRefuse);
  train(3, OnExisting::kReplace);
  const auto file = paths_[0] / kStoreFileName;
  std::uint64_t at = std::filesystem::file_size(file) / 3;
  for (flip(file, at); bad().empty(); flip(file, at)) {
    flip(file, at);
    at += 50'000;
  }
  EXPECT_EQ(roll_back_store(paths_), 2u);
  EXPECT_EQ(inspect_store(paths_).step, 2u);
  EXPECT_TRUE(bad().empty());
  EXPECT_EQ(train(3, OnExisting::kResume), wanted);
}

// A step that was under way has overwritten the older one, which is said, and nothing changes.
TEST_F(Inspection, AnOverwrittenStepIsNotGoneBackTo) {
  train(3, OnExisting::kRefuse);
  {
    auto engine = Engine::create(config_, model_, {.on_existing = OnExisting::kResume});
    ToyTrainer trainer{*engine, model_, DType::kBFloat16, 1};
    trainer.run_step();
    for (std::uint32_t b = 0; b < 3; ++b) engine->acquire(b, Pass::kForward, engine->stream());  // updates them
    std::filesystem::create_directories(first_.path() / "copy/a");
    std::filesystem::create_directories(first_.path() / "copy/b");
    std::filesystem::copy(paths_[0] / kStoreFileName, first_.path() / "copy/a");
    std::filesystem::copy(paths_[1] / kStoreFileName, first_.path() / "copy/b");
  }
  paths_ = {first_.path() / "copy/a", first_.path() / "copy/b"};
  EXPECT_EQ(inspect_store(paths_).step, 3u);
  const Error error = error_of([&] { roll_back_store(paths_); });
  EXPECT_EQ(error.code(), Code::kCorrupt);
  EXPECT_NE(error.parts().happened.find(" of block "), std::string::npos) << error.what();
  EXPECT_NE(error.parts().hint.find("step 2 is overwritten or damaged and nothing was changed"), std::string::npos);
  EXPECT_EQ(inspect_store(paths_).step, 3u);
  EXPECT_TRUE(bad().empty());
}

// A store that somebody else made: its checksums are right, whatever it says.
class ForgedStore : public Inspection {
 protected:
  ForgedStore() {
    config_.nvme_paths = {paths_[0]};
    train(1, OnExisting::kRefuse);
    StoreFiles files = StoreFiles::open_read_only(std::span(paths_).first(1));
    block_ = files.superblock();
    description_ = TileStore::read_description(files);
  }
  void forge(Superblock block, const std::string& text) const {
    block.description_checksum = granule_checksum(std::as_bytes(std::span(text)));
    seal_superblock(block);
    std::fstream file(paths_[0] / kStoreFileName, std::ios::in | std::ios::out | std::ios::binary);
    file.write(reinterpret_cast<const char*>(&block), sizeof block);
    file.seekp(kExtentAlignment);
    file.write(text.data(), static_cast<std::streamsize>(text.size()));
  }
  std::string with(const std::string& from, const std::string& to) const {
    std::string text = description_;
    const std::size_t at = text.find(from);
    EXPECT_NE(at, std::string::npos);
    return text.replace(at, from.size(), to);
  }

  Superblock block_{};
  std::string description_;
};

TEST_F(ForgedStore, AModelLargerThanItsStoreIsRefusedBeforeItIsPlanned) {
  forge(block_, description_);
  EXPECT_EQ(inspect_store({paths_[0]}).step, 1u);
  Superblock block = block_;
  for (const char* shape : {"[\"wte\",true,9007199254740992]", "[\"wte\",true,3000,7000]"}) {
    const std::string text = with("[\"wte\",true,3000,7]", shape);
    block.description_bytes = text.size();
    forge(block, text);
    const Error error = error_of([&] { inspect_store({paths_[0]}); });
    EXPECT_EQ(error.code(), Code::kCorrupt) << error.what();
    EXPECT_NE(std::string(error.what()).find("larger than the store"), std::string::npos) << error.what();
    EXPECT_EQ(error_of([&] { roll_back_store({paths_[0]}); }).code(), Code::kCorrupt);
  }
}

TEST_F(ForgedStore, WhateverItSaysItIsShownOrRefused) {
  std::mt19937_64 random = seeded_generator();
  int refused = 0;
  constexpr int kCases = 400;
  for (int i = 0; i < kCases; ++i) {
    Superblock block = block_;
    std::string text = description_;
    for (std::uint64_t changes = 1 + random() % 3; changes > 0; --changes) {
      const std::size_t at = random() % text.size();
      switch (random() % 4) {
        case 0: text[at] = static_cast<char>('0' + random() % 10); break;
        case 1: text.erase(at, 1 + random() % 20); break;
        case 2: text.insert(at, text.substr(random() % text.size(), random() % 30)); break;
        default: text[at] = ',';  // lengthens a shape
      }
    }
    block.description_bytes = text.size();
    // What the fingerprint covers may be something else by now; a forger computes it.
    try {
      block.fingerprint = parse_store_description(text, "").fingerprint;
    } catch (const Error&) {
    }
    if (random() % 2 == 0) {
      std::uint64_t* const fields[] = {&block.tiles,         &block.description_bytes, &block.total_bytes,
                                       &block.scratch_bytes, &block.unit_bytes,        &block.fingerprint};
      std::uint64_t& field = *fields[random() % std::size(fields)];
      field = random() % 2 == 0 ? field ^ std::uint64_t{1} << random() % 64 : random() >> random() % 64;
      if (random() % 8 == 0) block.slots = static_cast<std::uint32_t>(random() % 4);
    }
    forge(block, text);
    for (const auto& look : std::initializer_list<std::function<void()>>{[&] { inspect_store({paths_[0]}); },
                                                                         [&] { verify_store({paths_[0]}); }}) {
      try {
        look();
      } catch (const Error&) {
        ++refused;
      }
    }
  }
  EXPECT_GT(refused, kCases / 2);
  EXPECT_LT(refused, 2 * kCases);
}

}  // namespace
}  // namespace spillway
