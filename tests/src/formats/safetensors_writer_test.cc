#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>

#include <numeric>
#include <vector>

#include "spillway/bf16.h"
#include "spillway/error.h"
#include "spillway/safetensors.h"
#include "tests/aio/refused_syscall.h"
#include "tests/src/model_directory.h"

namespace {

int wait_error = 0;  // what waiting for write-back tells; 0: what the kernel says

}  // namespace

extern "C" {
// NOLINTBEGIN: the names are the linker's
int __real_sync_file_range(int file, off_t offset, off_t bytes, unsigned flags);
int __wrap_sync_file_range(int file, off_t offset, off_t bytes, unsigned flags) {
  const bool waits = (flags & SYNC_FILE_RANGE_WAIT_AFTER) != 0;
  if (!waits || wait_error == 0) return __real_sync_file_range(file, offset, bytes, flags);
  errno = wait_error;
  return -1;
}
// NOLINTEND
}

namespace spillway {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::vector<float> ramp(std::size_t count, float start) {
  std::vector<float> values(count);
  for (std::size_t i = 0; i < count; ++i) values[i] = start + static_cast<float>(i) * 0.37f;
  return values;
}

class SafetensorsWriterTest : public ModelDirectory {
 protected:
  // Three tensors of 12, 8 and 40 bytes in fp32.
  std::vector<TensorSpec> specs() const { return {{"b", {3}}, {"a", {2, 1}}, {"c", {10}}}; }

  static void write_all(SafetensorsWriter& writer) {
    writer.write(0, 0, ramp(3, 0));
    writer.write(1, 0, ramp(2, 100));
    writer.write(2, 0, ramp(4, 200));
    writer.write(2, 4, ramp(6, 200 + 4 * 0.37f));
  }
  void write_model(SafetensorsWriterOptions options) const {
    auto writer = SafetensorsWriter::create(directory_, specs(), options);
    write_all(writer);
    writer.finish();
  }
  std::vector<float> values_of(const std::string& name) const {
    auto reader = SafetensorsReader::open(directory_);
    const TensorEntry* entry = reader.find(name);
    std::vector<float> values(entry->elements);
    reader.read(*entry, 0, values);
    return values;
  }
  template <typename F>
  static std::string refusal(F body, Code code) {
    try {
      body();
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), code) << error.what();
      return error.what();
    }
    return "accepted";
  }
};

TEST_F(SafetensorsWriterTest, TheFileIsByteForByteWhatTheFormatSays) {
  auto writer = SafetensorsWriter::create(directory_, {{"a", {2, 1}}, {"quote\"", {}}});
  writer.write(0, 0, std::vector<float>{1, -2});
  writer.write(1, 0, std::vector<float>{0.5});
  EXPECT_THAT(names(), ElementsAre(".model.safetensors.partial"));  // no model before finish
  writer.finish();
  EXPECT_THAT(names(), ElementsAre("model.safetensors"));
  std::string header = R"({"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[2,1],"data_offsets":[0,8]},)"
                       R"("quote\"":{"dtype":"F32","shape":[],"data_offsets":[8,12]}})";
  header.resize((header.size() + 7) / 8 * 8, ' ');
  const float data[] = {1, -2, 0.5};
  EXPECT_EQ(read_file("model.safetensors"),
            safetensors_file(header, 0) + std::string(reinterpret_cast<const char*>(data), sizeof(data)));
}

TEST_F(SafetensorsWriterTest, WhatIsWrittenIsReadBack) {
  write_model({});
  EXPECT_EQ(values_of("a"), ramp(2, 100));
  EXPECT_EQ(values_of("b"), ramp(3, 0));
}

// As where some of a block's parameters lie elsewhere than they are named.
TEST_F(SafetensorsWriterTest, WholeTensorsMayComeInAnyOrderAndTheFilesAreTheSame) {
  const std::vector<TensorSpec> all = {
      {"a", {3'000}}, {"b", {500'000}}, {"c", {70'001}}, {"d", {1}}, {"e", {2'000'000}}};
  for (const std::uint64_t most : {std::uint64_t{50} << 20, std::uint64_t{2'100'000}}) {
    std::vector<std::vector<std::string>> written;
    for (const std::vector<std::size_t>& order :
         {std::vector<std::size_t>{0, 1, 2, 3, 4}, {1, 0, 2, 4, 3}, {4, 3, 2, 1, 0}, {2, 0, 4, 1, 3}}) {
      auto writer = SafetensorsWriter::create(directory_, all, {.max_file_bytes = most, .replace = true});
      for (const std::size_t tensor : order) {
        const std::vector<float> values = ramp(all[tensor].shape[0], static_cast<float>(tensor));
        const std::size_t half = values.size() / 2;
        writer.write(tensor, 0, std::span(values).first(half));
        if (half > 0) {
          EXPECT_THAT(refusal([&] { writer.write(tensor == 0 ? 1 : 0, 0, ramp(1, 0)); }, Code::kInvalidArgument),
                      HasSubstr("out of turn"));
        }
        writer.write(tensor, half, std::span(values).subspan(half));
        EXPECT_THAT(refusal([&] { writer.write(tensor, 0, ramp(1, 0)); }, Code::kInvalidArgument),
                    HasSubstr("out of turn"));
      }
      writer.finish();
      std::vector<std::string>& files = written.emplace_back();
      for (const std::string& name : names()) files.push_back(name + read_file(name));
    }
    for (const auto& files : written) EXPECT_TRUE(files == written.front());
  }
}

TEST_F(SafetensorsWriterTest, Bf16IsRoundedToNearestTiesToEven) {
  auto writer = SafetensorsWriter::create(directory_, {{"w", {4}}}, {.type = DType::kBFloat16});
  // Halfway between bf16 neighbours: 1 + 2^-8 goes down to the even 1, 1 + 3 × 2^-8 up to 1 + 2^-6.
  writer.write(0, 0, std::vector<float>{1 + 0x1p-8f, 1 + 0x3p-8f, 1 + 0x1.01p-8f, -INFINITY});
  writer.finish();
  EXPECT_EQ(values_of("w"), (std::vector<float>{1, 1 + 0x1p-6f, 1 + 0x1p-7f, -INFINITY}));
}

TEST_F(SafetensorsWriterTest, Fp16IsRoundedToNearestTiesToEvenAndWhatItDoesNotHoldIsRefused) {
  auto writer = SafetensorsWriter::create(directory_, {{"v", {5}}, {"w", {2}}}, {.type = DType::kFloat16});
  writer.write(0, 0, std::vector<float>{1 + 0x1p-11f, 1 + 0x3p-11f, 65519, -0x1p-25f, 0x1.8p-24f});
  const std::string said = refusal([&] { writer.write(1, 0, std::vector<float>{1, -65520}); }, Code::kInvalidArgument);
  EXPECT_THAT(said, HasSubstr("tensor \"w\" holds -65520, and fp16 ends at 65,504; write bf16 or fp32"));
  writer.write(1, 0, std::vector<float>{1, NAN});
  writer.finish();
  EXPECT_EQ(values_of("v"), (std::vector<float>{1, 1 + 0x1p-9f, 65504, -0.0f, 0x1p-23f}));
  EXPECT_THAT(read_file("model.safetensors"), HasSubstr(R"("v":{"dtype":"F16","shape":[5],"data_offsets":[0,10]})"));
}

TEST_F(SafetensorsWriterTest, PiecesOfAnySizeThroughManyBuffersGiveTheSameFile) {
  const std::size_t count = 5'000'000;  // 10 MB of bf16: ten buffers
  const std::vector<float> values = ramp(count, -7);
  auto writer = SafetensorsWriter::create(directory_, {{"small", {5}}, {"w", {count}}}, {.type = DType::kBFloat16});
  writer.write(0, 0, ramp(5, 1));
  for (std::size_t first = 0, piece = 1; first < count; piece = piece * 3 + 1) {
    const std::size_t now = std::min(piece, count - first);
    writer.write(1, first, std::span(values).subspan(first, now));
    first += now;
  }
  writer.finish();
  const std::vector<float> back = values_of("w");
  for (std::size_t i = 0; i < count; ++i) ASSERT_EQ(back[i], bf16_to_float(float_to_bf16(values[i]))) << i;
}

TEST_F(SafetensorsWriterTest, AModelAboveTheLimitIsShardedWithAnIndex) {
  write_model({.max_file_bytes = 20});
  EXPECT_THAT(names(), ElementsAre("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors",
                                   "model.safetensors.index.json"));
  EXPECT_EQ(read_file("model.safetensors.index.json"), R"({
  "metadata": {
    "total_size": 60
  },
  "weight_map": {
    "b": "model-00001-of-00002.safetensors",
    "a": "model-00001-of-00002.safetensors",
    "c": "model-00002-of-00002.safetensors"
  }
}
)");
  EXPECT_EQ(values_of("b"), ramp(3, 0));  // 12 + 8 bytes just fit the first file
  EXPECT_EQ(values_of("a"), ramp(2, 100));
  EXPECT_EQ(values_of("c").size(), 10u);  // larger than the limit, whole all the same
}

TEST_F(SafetensorsWriterTest, AModelThatIsThereIsRefusedUnlessReplaced) {
  write_model({});
  EXPECT_THAT(refusal([&] { write_model({.max_file_bytes = 20}); }, Code::kExists), HasSubstr("a model is there"));
  write_model({.max_file_bytes = 12, .replace = true});  // three shards
  EXPECT_EQ(names().size(), 4u);
  EXPECT_EQ(names().count("model.safetensors"), 0u);
  EXPECT_THAT(refusal([&] { write_model({}); }, Code::kExists), HasSubstr("a model is there"));
  write_model({.max_file_bytes = 20, .replace = true});
  EXPECT_EQ(names().size(), 3u);
  EXPECT_EQ(values_of("a"), ramp(2, 100));
  write_model({.replace = true});
  EXPECT_THAT(names(), ElementsAre("model.safetensors"));
}

TEST_F(SafetensorsWriterTest, AnUnfinishedModelLeavesTheOldOneAndNothingElse) {
  write_model({});
  const std::string before = read_file("model.safetensors");
  {
    auto writer = SafetensorsWriter::create(directory_, specs(), {.max_file_bytes = 20, .replace = true});
    writer.write(0, 0, ramp(3, 5));
    EXPECT_THAT(refusal([&] { writer.finish(); }, Code::kInvalidArgument), HasSubstr("value 0 of tensor \"a\""));
  }
  EXPECT_THAT(names(), ElementsAre("model.safetensors"));
  EXPECT_EQ(read_file("model.safetensors"), before);
}

// Temporary names are fixed, so a second one would write into the files of the first.
TEST_F(SafetensorsWriterTest, ADirectoryHasOneWriterAtATime) {
  const TempDirectory beside;
  std::filesystem::create_directory_symlink(directory_, beside / "link");
  {
    auto writer = SafetensorsWriter::create(directory_, specs(), {.replace = true});
    for (const std::filesystem::path& other : {directory_, beside / "link"}) {
      const auto create = [&] { SafetensorsWriter::create(other, specs(), {.replace = true}); };
      EXPECT_THAT(refusal(create, Code::kBusy), HasSubstr("a model is being written there"));
    }
    EXPECT_THAT(names(), ElementsAre(".model.safetensors.partial"));
    write_all(writer);
    writer.finish();
    write_model({.replace = true});  // a finished one holds it no more
  }
  { auto given_up = SafetensorsWriter::create(directory_, specs(), {.replace = true}); }
  write_model({.replace = true});
}

TEST_F(SafetensorsWriterTest, LeftoversOfAKilledRunAreOverwritten) {
  write_file(".model.safetensors.partial", std::string(100'000, 'x'));
  write_model({});
  EXPECT_THAT(names(), ElementsAre("model.safetensors"));
  EXPECT_EQ(values_of("a"), ramp(2, 100));
}

TEST_F(SafetensorsWriterTest, ShardsThatAKilledRunLeftGoWithTheNextModel) {
  write_file(".model-00002-of-00009.safetensors.partial", std::string(100'000, 'x'));
  write_file(".model-2-of-9.safetensors.partial", "not ours");
  write_file(".other-00002-of-00009.safetensors.partial", "of another stem");
  write_file(".model.safetensors.index.json.partial", "{");
  write_model({.replace = true});
  EXPECT_THAT(names(), ElementsAre(".model-2-of-9.safetensors.partial", ".other-00002-of-00009.safetensors.partial",
                                   "model.safetensors"));
}

TEST_F(SafetensorsWriterTest, ModelsOfSeveralStemsShareADirectory) {
  write_model({});
  write_model({.max_file_bytes = 20, .stem = "exp_avg"});
  EXPECT_THAT(names(), ElementsAre("exp_avg-00001-of-00002.safetensors", "exp_avg-00002-of-00002.safetensors",
                                   "exp_avg.safetensors.index.json", "model.safetensors"));
  write_model({.replace = true, .stem = "exp_avg"});
  EXPECT_THAT(names(), ElementsAre("exp_avg.safetensors", "model.safetensors"));
  EXPECT_EQ(SafetensorsReader::open(directory_, "exp_avg").tensors().size(), 3u);
  EXPECT_THAT(refusal([&] { SafetensorsReader::open(directory_, "exp_avg_sq"); }, Code::kNotFound),
              HasSubstr("neither exp_avg_sq.safetensors nor exp_avg_sq.safetensors.index.json"));
}

// A file size limit stands for a full disk: the kernel refuses the space in the same calls.
class FileSizeLimit {
 public:
  explicit FileSizeLimit(rlim_t bytes) {
    ::getrlimit(RLIMIT_FSIZE, &before_);
    rlimit limit = before_;
    limit.rlim_cur = bytes;
    ::setrlimit(RLIMIT_FSIZE, &limit);
    handler_ = ::signal(SIGXFSZ, SIG_IGN);
  }
  ~FileSizeLimit() {
    ::setrlimit(RLIMIT_FSIZE, &before_);
    ::signal(SIGXFSZ, handler_);
  }

 private:
  rlimit before_{};
  void (*handler_)(int) = nullptr;
};

TEST_F(SafetensorsWriterTest, NoSpaceIsFoundBeforeTheFirstValueAndLeavesNothing) {
  const FileSizeLimit limit(1 << 20);
  const auto create = [&] {
    SafetensorsWriter::create(directory_, {{"a", {1000}}, {"w", {1 << 20}}}, {.max_file_bytes = 1 << 19});
  };
  EXPECT_THAT(refusal(create, Code::kIo), HasSubstr("model-00002-of-00002.safetensors.partial: 4194"));
  EXPECT_TRUE(names().empty());
}

TEST_F(SafetensorsWriterTest, AWriteThatFailsLeavesNothing) {
  {
    auto writer = SafetensorsWriter::create(directory_, {{"w", {1 << 20}}});
    const FileSizeLimit limit(1 << 20);
    const std::vector<float> values(1 << 20);
    EXPECT_THAT(refusal([&] { writer.write(0, 0, values); }, Code::kIo),
                HasSubstr("at offset 1048576 failed (File too large)"));
  }
  EXPECT_TRUE(names().empty());
}

// The kernel tells each write-back error once, to whoever asks first: a sync after that succeeds. O_DIRECT is refused,
// so the pages are cached.
TEST_F(SafetensorsWriterTest, AFailedWriteBackLeavesNothing) {
  constexpr std::size_t kCount = 10 << 20;  // 40 MiB: the first of two windows is waited for before the last sync
  for (const int error : {EIO, ENOSYS}) {   // ENOSYS: a system without write-back by range, where sync() does it
    wait_error = error;
    const bool ran = testing::with_refused_call({SYS_fcntl, EINVAL, F_SETFL}, [&] {
      const auto write = [&] {
        auto writer = SafetensorsWriter::create(directory_, {{"w", {kCount}}});
        writer.write(0, 0, std::vector<float>(kCount));
        writer.finish();
      };
      const bool told = error == EIO;
      EXPECT_THAT(refusal(write, Code::kIo), HasSubstr(told ? "at offset 0 failed (Input/output error)" : "accepted"));
      EXPECT_EQ(names().empty(), told);
    });
    wait_error = 0;
    if (!ran) GTEST_SKIP() << "no system call filters here";
  }
}

TEST_F(SafetensorsWriterTest, AnIndexThatFindsNoPlaceIsFoundBeforeTheFirstValue) {
  write_model({});
  std::filesystem::create_directories(directory_ / ".model.safetensors.index.json.partial" / "in the way");
  const auto create = [&] { SafetensorsWriter::create(directory_, specs(), {.max_file_bytes = 20, .replace = true}); };
  EXPECT_THAT(refusal(create, Code::kIo), HasSubstr(".model.safetensors.index.json.partial: cannot be created"));
  EXPECT_THAT(names(), ElementsAre(".model.safetensors.index.json.partial", "model.safetensors"));
}

TEST_F(SafetensorsWriterTest, ADirectoryThatCannotBeIsAnError) {
  write_file("file", "x");
  const auto create = [&] { SafetensorsWriter::create(directory_ / "file" / "model", specs()); };
  EXPECT_THAT(refusal(create, Code::kIo), HasSubstr("file/model: cannot be made"));
}

TEST_F(SafetensorsWriterTest, ASymbolicLinkUnderATemporaryNameIsNotFollowed) {
  write_file("precious", "untouched");
  std::filesystem::create_symlink(directory_ / "precious", directory_ / ".model.safetensors.partial");
  write_model({});
  EXPECT_EQ(read_file("precious"), "untouched");
  EXPECT_FALSE(std::filesystem::is_symlink(directory_ / "model.safetensors"));
}

TEST_F(SafetensorsWriterTest, ValuesOutOfTurnAreRefused) {
  auto writer = SafetensorsWriter::create(directory_, specs());
  writer.write(0, 0, ramp(2, 0));
  const auto refused = [&](std::size_t tensor, std::uint64_t first, std::size_t count) {
    return refusal([&] { writer.write(tensor, first, ramp(count, 0)); }, Code::kInvalidArgument);
  };
  EXPECT_THAT(refused(0, 0, 1), HasSubstr("value 2 of tensor 0 is next"));
  EXPECT_THAT(refused(0, 2, 2), HasSubstr("out of turn"));  // beyond the end
  EXPECT_THAT(refused(1, 0, 1), HasSubstr("out of turn"));
  writer.write(0, 2, ramp(1, 0));
  writer.write(1, 0, ramp(2, 0));
  writer.write(2, 0, ramp(10, 0));
  EXPECT_THAT(refused(3, 0, 0), HasSubstr("out of turn"));
  writer.finish();
}

TEST_F(SafetensorsWriterTest, DescriptionsThatNoFileCanHoldAreRefused) {
  const auto refused = [&](std::vector<TensorSpec> tensors) {
    return refusal([&] { SafetensorsWriter::create(directory_, tensors); }, Code::kInvalidArgument);
  };
  EXPECT_THAT(refused({}), HasSubstr("at least one tensor"));
  EXPECT_THAT(refused({{"w", {1}}, {"w", {1}}}), HasSubstr("unique"));
  EXPECT_THAT(refused({{"", {1}}}), HasSubstr("unique"));
  EXPECT_THAT(refused({{"__metadata__", {1}}}), HasSubstr("__metadata__"));
  EXPECT_THAT(refused({{"w", {0}}}), HasSubstr("w: a dimension"));
  EXPECT_TRUE(names().empty());
}

}  // namespace
}  // namespace spillway
