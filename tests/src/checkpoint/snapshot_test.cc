// What a run saves is all that it is: another one goes on from it with the same bits, wherever that one keeps its
// tiles.
#include "spillway/snapshot.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cstdarg>
#include <fstream>
#include <functional>
#include <map>
#include <span>
#include <string_view>
#include <utility>

#include "kernels/checksum.h"
#include "spillway/error.h"
#include "spillway/export.h"
#include "spillway/safetensors.h"
#include "src/checkpoint/snapshot_record.h"
#include "tests/error_of.h"
#include "tests/src/model_directory.h"
#include "tests/src/toy_trainer.h"

namespace {

using spillway::testing::error_of;

std::function<void()> before_weights;  // once: what another process does before they are opened

}  // namespace

extern "C" {
// NOLINTBEGIN: the names are the linker's
int __real_open64(const char* path, int flags, ...);
int __wrap_open64(const char* path, int flags, ...) {
  va_list more;
  va_start(more, flags);
  const mode_t mode = (flags & O_CREAT) != 0 ? va_arg(more, mode_t) : 0;
  va_end(more);
  if (std::string_view(path).ends_with("/saved/model.safetensors") && before_weights)
    std::exchange(before_weights, nullptr)();
  return __real_open64(path, flags, mode);
}
// NOLINTEND
}

namespace spillway {
namespace {

using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

constexpr std::uint32_t kMicroBatches = 2;
constexpr int kSavedStep = 3, kLastStep = 5;
// Of weights and states.
constexpr std::pair<Placement, Placement> kPlacements[] = {
    {Placement::kHbm, Placement::kHbm},  {Placement::kHbm, Placement::kHost},  {Placement::kHost, Placement::kHost},
    {Placement::kHbm, Placement::kNvme}, {Placement::kNvme, Placement::kHost}, {Placement::kHost, Placement::kNvme},
    {Placement::kNvme, Placement::kNvme}};

ModelDescription model_with_config() {
  ModelDescription model = testing::toy_model(3, 2000, kMicroBatches);
  model.blocks[2].parameters[0].trainable = false;
  model.attachments = {{"config.json", "{\"layers\": 3}\n"}};
  return model;
}

class Snapshot : public ModelDirectory {
 protected:
  struct Run {
    Run(const Config& config, const ModelDescription& model, EngineOptions options)
        : engine(Engine::create(config, model, options)), trainer{*engine, model, config.weights, kMicroBatches} {
      if (options.snapshot.empty()) engine->import_weights(testing::toy_weights());
    }
    void until(std::uint64_t step) {
      while (engine->current_step() < step) trainer.run_step();
    }
    std::unique_ptr<Engine> engine;
    testing::ToyTrainer trainer;
  };

  std::filesystem::path at(const std::string& name) const { return directory_ / name; }
  Config config(Placement parameters, Placement states, DType type = DType::kBFloat16) const {
    return testing::toy_config(parameters, states, type, at("store"));
  }
  Config nvme(DType type = DType::kBFloat16) const { return config(Placement::kNvme, Placement::kNvme, type); }
  Run start(const Config& config, EngineOptions options = {.on_existing = OnExisting::kReplace}) const {
    return Run(config, model_, options);
  }
  Run begin(const Config& config, const std::string& snapshot) const {
    return start(config, {.on_existing = OnExisting::kReplace, .snapshot = at(snapshot)});
  }
  // Snapshots of two steps of a run that nothing happens to.
  void save_both(const Config& config) const {
    Run run = start(config);
    run.until(kSavedStep);
    run.engine->save(at("saved"));
    run.until(kLastStep);
    run.engine->save(at("last"));
  }
  void expect_equal(const std::string& a, const std::string& b) const {
    ASSERT_EQ(names(a), names(b));
    for (const std::string& file : names(a))
      EXPECT_TRUE(read_file(a + "/" + file) == read_file(b + "/" + file)) << file;
  }
  void flip_bit(const std::string& name, std::uint64_t offset) const {
    std::string bytes = read_file(name);
    bytes.at(offset) = static_cast<char>(bytes.at(offset) ^ 1);
    write_file(name, bytes);
  }

  ModelDescription model_ = model_with_config();
};

TEST_F(Snapshot, AnotherLayoutGoesOnWithTheSameBits) {
  // In fp16 the last step overflows and the first ones did, before and after the one that was saved.
  for (const DType type : {DType::kBFloat16, DType::kFloat32, DType::kFloat16}) {
    save_both(nvme(type));
    for (const auto& [parameters, states] : kPlacements) {
      if (type != DType::kBFloat16 && parameters != states) continue;
      Config other = config(parameters, states, type);
      other.tile_elements = states == Placement::kHost ? 1024 : 8192;
      other.threads = 1;
      if (states == Placement::kHost) other.commit_every = 2;
      Run run = begin(other, "saved");
      ASSERT_EQ(run.engine->current_step(), kSavedStep);
      EXPECT_EQ(run.engine->blob().size(), sizeof(std::uint64_t));
      if (type == DType::kFloat16) {
        EXPECT_EQ(run.engine->loss_scale(), 0x1p19) << "two steps were skipped";
      }
      run.until(kLastStep);
      run.engine->save(at("again"));
      expect_equal("last", "again");  // weights, exact master, moments, step, blob and loss scale
      std::filesystem::remove_all(at("again"));
    }
    std::filesystem::remove_all(at("saved"));
    std::filesystem::remove_all(at("last"));
  }
}

// A run that left parameters out of some steps goes on as if nothing had happened, its bias corrections, too.
TEST_F(Snapshot, HasHowManyUpdatesEachParameterHasHad) {
  const auto unevenly = [](const testing::ToyPush& push) {
    const bool out = push.block == 1 ? push.step < kSavedStep : push.block == 3 && push.step == kSavedStep;
    return out && push.parameter == push.step % 2 ? testing::Brings::kNothing : testing::Brings::kGradient;
  };
  for (const DType type : {DType::kBFloat16, DType::kFloat16}) {
    {
      Run run = start(nvme(type));
      run.trainer.brings = unevenly;
      run.until(kSavedStep);
      run.engine->save(at("saved"));
      run.until(kLastStep);
      run.engine->save(at("last"));
    }
    if (type == DType::kBFloat16) {
      const std::map<std::string, std::uint64_t> expected = {{"wte", 3},      {"norm", 3},     {"h.1.weight", 2},
                                                             {"h.1.bias", 2}, {"h.2.bias", 3}, {"h.3.weight", 3},
                                                             {"h.3.bias", 2}};
      EXPECT_EQ(read_snapshot(at("saved")).update_counts, expected);
    }
    EXPECT_THAT(read_file("saved/spillway.json"), HasSubstr("\"format\": 3"));
    for (const auto& [parameters, states] : kPlacements) {
      Run again = begin(config(parameters, states, type), "saved");
      again.trainer.brings = unevenly;
      again.until(kLastStep);
      again.engine->save(at("again"));
      expect_equal("last", "again");
      remove_snapshot(at("again"));
    }
    for (const char* name : {"saved", "last"}) remove_snapshot(at(name));
  }
}

// An older version would take them for equal, so that it must not read one with them; all others it may.
TEST_F(Snapshot, IsOfTheFormerFormatWhileAllParametersHaveHadAllUpdates) {
  Run run = start(nvme());
  run.until(kSavedStep);
  run.engine->save(at("saved"));
  EXPECT_THAT(read_file("saved/spillway.json"), HasSubstr("\"format\": 2"));
  EXPECT_THAT(read_file("saved/spillway.json"), Not(HasSubstr("update_counts")));
}

TEST_F(Snapshot, CountsThatCannotBeAreRefused) {
  save_both(nvme());
  SnapshotRecord record = read_snapshot(at("saved"));
  const auto rewritten = [&](std::map<std::string, std::uint64_t> counts) {
    record.update_counts = std::move(counts);
    write_file("saved/spillway.json", snapshot_text(record));
    return error_of([&] { begin(nvme(), "saved"); });
  };
  EXPECT_EQ(rewritten({{"wte", kSavedStep + 1}}).code(), Code::kCorrupt);
  const std::string missing = rewritten({{"wte", 1}, {"h.2.weight", 1}}).what();
  EXPECT_THAT(missing, HasSubstr("saved/spillway.json: has no count of the updates of norm"));
  EXPECT_EQ(Engine::create(nvme(), model_, {.on_existing = OnExisting::kResume})->current_step(), kLastStep);
}

TEST_F(Snapshot, SavesFromEveryTier) {
  save_both(nvme());
  for (const auto& [parameters, states] : kPlacements) {
    Run run = start(config(parameters, states));
    for (const auto& [step, expected] : {std::pair(kSavedStep, "saved"), std::pair(kLastStep, "last")}) {
      run.until(static_cast<std::uint64_t>(step));
      run.engine->save(at("again"));  // which changes nothing of the steps after it
      expect_equal(expected, "again");
      remove_snapshot(at("again"));
    }
  }
}

TEST_F(Snapshot, EveryOptimizersStatesAreInIt) {
  const std::set<std::string> common = {"config.json", "model.safetensors", "spillway.json"};
  for (const OptimizerKind kind : kOptimizerKinds) {
    Config config = nvme();
    config.optimizer.kind = kind;
    config.optimizer.momentum = 0.9;
    save_both(config);
    std::set<std::string> files = common;
    if (has_exp_avg(kind)) files.insert("exp_avg.safetensors");
    if (has_exp_avg_sq(kind)) files.insert("exp_avg_sq.safetensors");
    EXPECT_EQ(names("saved"), files) << name_of(kind);
    Run run = begin(config, "saved");
    run.until(kLastStep);
    run.engine->save(at("again"));
    expect_equal("last", "again");
    for (const char* name : {"saved", "last", "again"}) remove_snapshot(at(name));
  }
}

TEST_F(Snapshot, HasExactWeightsAndStatesUnderTheParametersName) {
  Config memory = config(Placement::kHbm, Placement::kHbm);
  Run run = start(memory);
  run.until(2);
  run.engine->save(at("saved"), {.max_file_bytes = 60'000});
  EXPECT_THAT(names("saved"), Contains("model-00001-of-00003.safetensors"));
  EXPECT_THAT(names("saved"), Contains("exp_avg_sq.safetensors.index.json"));
  auto weights = SafetensorsReader::open(at("saved")), exp_avg = SafetensorsReader::open(at("saved"), "exp_avg");
  EXPECT_EQ(weights.tensors().size(), 8u);
  EXPECT_EQ(exp_avg.tensors().size(), 7u);
  EXPECT_EQ(exp_avg.find("h.2.weight.exp_avg"), nullptr);  // frozen
  ASSERT_NE(exp_avg.find("h.2.bias.exp_avg"), nullptr);
  const auto value_of = [](SafetensorsReader& reader, const TensorEntry& entry, std::uint64_t index) {
    float value = 0;
    reader.read(entry, index, std::span(&value, 1));
    return value;
  };
  run.engine->export_weights(true, [&](auto block, auto parameter, std::uint64_t first, auto values) {
    const Parameter& of = model_.blocks[block].parameters[parameter];
    const TensorEntry& entry = *weights.find(of.name);
    EXPECT_EQ(entry.dtype, of.trainable ? "F32" : "BF16");
    EXPECT_EQ(entry.shape, of.shape);
    EXPECT_EQ(value_of(weights, entry, first), values[0]);
  });
  run.until(kLastStep);
  run.engine->save(at("last"));
  Run again = begin(nvme(), "saved");  // sharded ones, too
  again.until(kLastStep);
  again.engine->save(at("again"));
  expect_equal("last", "again");
}

TEST_F(Snapshot, AFlippedBitIsNamedAndNeverTrainedOn) {
  save_both(nvme());
  constexpr std::pair<const char*, const char*> kFiles[] = {
      {"model", "wte"}, {"exp_avg", "wte.exp_avg"}, {"exp_avg_sq", "wte.exp_avg_sq"}};
  for (const auto& [stem, tensor] : kFiles) {
    const std::string name = std::string("saved/") + stem + ".safetensors";
    std::uint64_t length = 0;
    std::memcpy(&length, read_file(name).data(), 8);
    flip_bit(name, 8 + length + 4);
    const Error error = error_of([&] { begin(nvme(), "saved"); });
    EXPECT_EQ(error.code(), Code::kCorrupt);
    EXPECT_EQ(error.parts().object, at(name).string());
    EXPECT_EQ(error.parts().happened, std::string("tensor ") + tensor + " does not match its checksum");
    // There is no store of such values, and the one that was to be replaced is as it was.
    EXPECT_EQ(Engine::create(nvme(), model_, {.on_existing = OnExisting::kResume})->current_step(), kLastStep);
    flip_bit(name, 8 + length + 4);
  }
  EXPECT_EQ(begin(nvme(), "saved").engine->current_step(), kSavedStep);
}

TEST_F(Snapshot, AFlippedBitOfAnAttachmentIsNamed) {
  save_both(nvme());
  const std::string name = "saved/config.json", text = read_file(name);
  for (std::size_t byte = 0; byte < text.size(); ++byte) {
    flip_bit(name, byte);
    std::string why;
    EXPECT_EQ(find_snapshot(at("saved"), &why), std::nullopt);
    EXPECT_EQ(why, at(name).string() + ": does not match its checksum in the snapshot");
    EXPECT_EQ(error_of([&] { begin(nvme(), "saved"); }).parts().object, at(name).string());
    const Error error = error_of([&] { export_snapshot(at("saved"), at("out"), {}); });
    EXPECT_EQ(error.code(), Code::kCorrupt);
    EXPECT_EQ(error.parts().object, at(name).string());
    EXPECT_FALSE(std::filesystem::exists(at("out")));
    flip_bit(name, byte);
  }
  EXPECT_EQ(begin(nvme(), "saved").engine->current_step(), kSavedStep);
}

// Its record has no checksums of attachments.
TEST_F(Snapshot, OneOfAnOlderVersionIsRead) {
  save_both(nvme());
  SnapshotRecord record = read_snapshot(at("saved"));
  record.attachments.clear();
  std::string text = snapshot_text(record);
  const std::string member = "  \"attachments\": {},\n", checksum = "  \"checksum\": \"";
  ASSERT_NE(text.find(member), text.npos);
  text.erase(text.find(member), member.size());
  text.erase(text.find(checksum));
  write_file("saved/spillway.json",
             text + fmt::format("{}{:016x}\"\n}}\n", checksum, granule_checksum(std::as_bytes(std::span(text)))));
  EXPECT_EQ(find_snapshot(at("saved"))->step, kSavedStep);
  EXPECT_EQ(export_snapshot(at("saved"), at("out"), {}).step, kSavedStep);
  EXPECT_EQ(begin(nvme(), "saved").engine->current_step(), kSavedStep);
}

TEST_F(Snapshot, OneThatIsReplacedWhileItIsOpenedIsReadAnew) {
  save_both(nvme());
  const auto exchange = [&] {
    std::filesystem::rename(at("saved"), at("between"));
    std::filesystem::rename(at("last"), at("saved"));
    std::filesystem::rename(at("between"), at("last"));
  };
  before_weights = exchange;
  EXPECT_EQ(export_snapshot(at("saved"), at("out"), {}).step, kLastStep);
  EXPECT_FALSE(before_weights);
  before_weights = exchange;
  Run run = begin(nvme(), "saved");
  EXPECT_EQ(run.engine->current_step(), kSavedStep);
  run.until(kLastStep);
  run.engine->save(at("again"));
  expect_equal("last", "again");
  EXPECT_FALSE(before_weights);
}

TEST_F(Snapshot, AnotherModelOrOptimizerIsRefusedBeforeTheStoreIsTouched) {
  save_both(nvme());
  const auto refused = [&](const Config& config, const ModelDescription& model, OnExisting existing) {
    const Error error =
        error_of([&] { Engine::create(config, model, {.on_existing = existing, .snapshot = at("saved")}); });
    EXPECT_EQ(error.code(), Code::kInvalidArgument) << error.what();
    return std::string(error.what());
  };
  Config adagrad = nvme();
  adagrad.optimizer.kind = OptimizerKind::kAdagrad;
  EXPECT_THAT(refused(adagrad, model_, OnExisting::kReplace), HasSubstr("the optimizer Adam, this one has Adagrad"));
  EXPECT_THAT(refused(nvme(DType::kFloat32), model_, OnExisting::kReplace),
              HasSubstr("weights in bf16, this one has fp32"));
  ModelDescription other = model_;
  other.blocks[1].parameters[1].shape[0] += 1;
  EXPECT_THAT(refused(nvme(), other, OnExisting::kReplace), HasSubstr("tensor h.1.bias has another shape"));
  other = model_;
  other.blocks[2].parameters[0].trainable = true;
  EXPECT_THAT(refused(nvme(), other, OnExisting::kReplace),
              HasSubstr("parameter h.2.weight was frozen there, here it is trained"));
  other = model_;
  other.blocks[1].parameters[0].trainable = false;
  EXPECT_THAT(refused(nvme(), other, OnExisting::kReplace),
              HasSubstr("parameter h.1.weight was trained there, here it is frozen"));
  other = model_;
  other.blocks.pop_back();
  other.visits.clear();
  EXPECT_THAT(refused(nvme(), other, OnExisting::kReplace), HasSubstr("2 tensors of model are no part of this model"));
  EXPECT_THAT(refused(nvme(), model_, OnExisting::kResume), HasSubstr("a store that is resumed"));
  EXPECT_EQ(error_of([&] { begin(nvme(), "nowhere"); }).code(), Code::kNotFound);
  EXPECT_EQ(Engine::create(nvme(), model_, {.on_existing = OnExisting::kResume})->current_step(), kLastStep);
}

TEST_F(Snapshot, OneThatCannotBeWrittenChangesNothing) {
  save_both(nvme());
  write_file("file", "in the way");
  Run run = start(nvme());
  run.until(kSavedStep);
  EXPECT_EQ(error_of([&] { run.engine->save(at("last")); }).code(), Code::kExists);
  EXPECT_EQ(error_of([&] { run.engine->save(at("file") / "saved"); }).code(), Code::kNotFound);
  EXPECT_EQ(error_of([&] { run.engine->save(at("file"), {.replace = true}); }).code(), Code::kNotFound);
  std::filesystem::create_directory(at("mine"));
  write_file("mine/work", "of years");
  EXPECT_EQ(error_of([&] { run.engine->save(at("mine"), {.replace = true}); }).code(), Code::kNotFound);
  EXPECT_EQ(read_file("mine/work"), "of years");
  ModelDescription other = model_;
  other.blocks[1].name = "another";
  {
    Config memory = config(Placement::kHbm, Placement::kHbm);
    Run(memory, other, {}).engine->save(at("other"));
  }
  EXPECT_EQ(error_of([&] { run.engine->save(at("other"), {.replace = true}); }).code(), Code::kExists);
  remove_snapshot(at("other"));
  run.until(kLastStep);
  run.engine->save(at("saved"), {.replace = true});
  expect_equal("last", "saved");
  EXPECT_THAT(names(), ElementsAre("file", "last", "mine", "saved", "store"));
}

TEST_F(Snapshot, AnEngineWithoutWeightsHasNothingToSave) {
  const auto engine = Engine::create(nvme(), model_);
  EXPECT_EQ(error_of([&] { engine->save(at("saved")); }).code(), Code::kInvalidArgument);
  EXPECT_THAT(names(), ElementsAre("store"));
}

TEST_F(Snapshot, IsRemovedOnlyWhenNothingElseIsInIt) {
  save_both(nvme());
  EXPECT_EQ(find_snapshot(at("saved"))->step, kSavedStep);
  EXPECT_EQ(find_snapshot(at("saved"))->model, find_snapshot(at("last"))->model);
  write_file("saved/notes", "mine");
  EXPECT_THAT(error_of([&] { remove_snapshot(at("saved")); }).what(), HasSubstr("saved/notes: was not saved with"));
  Run run = start(nvme());
  EXPECT_EQ(error_of([&] { run.engine->save(at("saved"), {.replace = true}); }).code(), Code::kInvalidArgument);
  EXPECT_EQ(find_snapshot(at("saved"))->step, kSavedStep);
  std::filesystem::remove(at("saved/notes"));
  remove_snapshot(at("saved"));
  EXPECT_THAT(names(), ElementsAre("last", "store"));
  std::filesystem::remove(at("last/exp_avg.safetensors"));  // not whole any more
  EXPECT_EQ(find_snapshot(at("last")), std::nullopt);
  EXPECT_EQ(find_snapshot(at("store")), std::nullopt);
  EXPECT_EQ(error_of([&] { remove_snapshot(at("store")); }).code(), Code::kNotFound);
}

TEST_F(Snapshot, ARecordIsReadBackAndAnyOtherByteInItIsRefused) {
  SnapshotRecord record;
  record.facts = {.step = 1ull << 60, .model = 5, .weights = DType::kBFloat16, .optimizer = OptimizerKind::kLion};
  record.blob = {std::byte{0}, std::byte{255}, std::byte{16}};
  record.files = {"config.json", "model.safetensors"};
  record.checksums = {{"h.1 \"weight\"\n", ~0ull}, {"wte", 0}};
  record.update_counts = {{"h.1 \"weight\"\n", 1ull << 60}, {"wte", 0}};
  record.attachments = {{"config.json", 0x12345678}};
  const std::string text = snapshot_text(record);
  const SnapshotRecord back = parse_snapshot(text, "spillway.json");
  EXPECT_EQ(back.facts.step, record.facts.step);
  EXPECT_EQ(back.facts.model, record.facts.model);
  EXPECT_EQ(back.facts.weights, record.facts.weights);
  EXPECT_EQ(back.facts.optimizer, record.facts.optimizer);
  EXPECT_EQ(back.blob, record.blob);
  EXPECT_EQ(back.files, record.files);
  EXPECT_EQ(back.checksums, record.checksums);
  EXPECT_EQ(back.update_counts, record.update_counts);
  EXPECT_EQ(back.attachments, record.attachments);
  for (std::size_t i = 0; i <= text.size(); ++i) {
    std::string changed = text;
    if (i < text.size()) changed[i] = static_cast<char>(changed[i] ^ 1);
    if (i == text.size()) changed += ' ';
    EXPECT_EQ(error_of([&] { parse_snapshot(changed, "spillway.json"); }).code(), Code::kCorrupt) << i;
    EXPECT_EQ(error_of([&] { parse_snapshot(text.substr(0, i == text.size() ? 0 : i), ""); }).code(), Code::kCorrupt);
  }
}

}  // namespace
}  // namespace spillway
