// Tensors of a safetensors file start and end anywhere. A direct read takes the aligned range around one, which may
// pass the end of the file, and the tensor lies inside the buffer.
#include <unistd.h>

#include <cstring>
#include <sstream>
#include <string>

#include "loop_mount.h"
#include "queue_fixture.h"

namespace spillway::testing {
namespace {

struct Tensor {
  std::uint64_t offset = 0, bytes = 0;  // in the file
};

struct Layout {
  std::vector<std::byte> content;
  std::vector<Tensor> tensors;
};

// A file as other programs write it: 8 bytes of header length, the JSON header, the tensors one after the other. Sizes
// and the header's length are odd, and so is every offset but by chance.
Layout safetensors() {
  const std::uint64_t sizes[] = {3, 1021, 4096, 70001, 512, 4095, 131, 13339};
  std::ostringstream json;
  std::uint64_t at = 0;
  for (const std::uint64_t bytes : sizes) {
    json << (at ? ",\"" : "{\"") << "tensor" << at << R"(":{"dtype":"U8","shape":[)" << bytes << R"(],"data_offsets":[)"
         << at << ',' << at + bytes << "]}";
    at += bytes;
  }
  json << (json.str().size() % 2 ? "} " : "}");
  const std::string header = json.str();
  const std::uint64_t header_bytes = header.size(), begin = sizeof header_bytes + header_bytes;
  Layout layout;
  layout.content.resize(begin + at);
  fill_pattern(layout.content, 1);
  std::memcpy(layout.content.data(), &header_bytes, sizeof header_bytes);
  std::memcpy(layout.content.data() + sizeof header_bytes, header.data(), header.size());
  at = begin;
  for (const std::uint64_t bytes : sizes) {
    layout.tensors.push_back({at, bytes});
    at += bytes;
  }
  return layout;
}

// 0: whatever the directory for temporary files is on.
struct On {
  std::uint32_t sector_bytes;
  IoEngineKind kind;
};

class AlignedRangeTest : public QueueFixture, public ::testing::WithParamInterface<On> {
 protected:
  void SetUp() override {
    if (const std::string refusal = refusal_of(GetParam().kind); !refusal.empty()) GTEST_SKIP() << refusal;
    path_ = dir_ / "model.safetensors";
    if (GetParam().sector_bytes != 0) {
      mount_.emplace(MountOptions{.bytes = 32 * kMiB, .sector_bytes = GetParam().sector_bytes});
      if (!mount_->refusal().empty()) GTEST_SKIP() << mount_->refusal();
      path_ = *mount_ / "model.safetensors";
    }
    File writer = File::open(path_, {.writable = true, .create = true, .direct = false});
    writer.write_at(0, layout_.content);
    writer.sync();
    ASSERT_EQ(writer.size_bytes() % 2, 1u) << "the end of the file is no boundary of anything";
  }
  void TearDown() override {
    queue_.reset();
    files_.clear();
  }

  void open(std::uint64_t block_bytes) {
    files_.push_back(std::make_unique<File>(File::open(path_, {})));
    if (!files_[0]->direct()) GTEST_SKIP() << "no direct I/O on " << path_;
    if (GetParam().sector_bytes != 0) {
      ASSERT_EQ(files_[0]->alignment(), GetParam().sector_bytes);
    }
    pointers_ = {files_[0].get()};
    open_queue(GetParam().kind, {.block_bytes = block_bytes, .depth = 4}, {});
  }

  // Reads the range with `more` bytes after it, into memory_.
  IoCompletion read(const AlignedRange& range, std::uint64_t more = 0) {
    memory_.fill(0xee);
    queue_->submit({.offset = range.offset,
                    .buffer = memory_.data(),
                    .bytes = range.bytes + more,
                    .least_bytes = range.least_bytes});
    return collect(1).front();
  }

  const Layout layout_ = safetensors();
  std::optional<LoopMount> mount_;
  std::filesystem::path path_;
  Memory memory_{256 * kKiB};
};

TEST_P(AlignedRangeTest, EveryTensorIsReadDirectly) {
  for (const std::uint64_t block : {4 * kKiB, 64 * kKiB}) {
    open(block);
    if (IsSkipped() || HasFatalFailure()) return;
    const std::uint64_t unit = files_[0]->alignment();
    for (const Tensor& tensor : layout_.tensors) {
      const AlignedRange range = aligned_range(*files_[0], tensor.offset, tensor.bytes);
      EXPECT_EQ((range.offset | range.bytes) % unit, 0u);
      EXPECT_LT(range.skip, unit);
      EXPECT_LT(range.bytes, range.skip + tensor.bytes + unit) << "the smallest";
      ASSERT_EQ(read(range).error, 0) << tensor.offset;
      ASSERT_TRUE(same_bytes(memory_.span(range.skip, tensor.bytes),
                             std::span(layout_.content).subspan(tensor.offset, tensor.bytes)))
          << tensor.offset;
    }
    const Tensor& last = layout_.tensors.back();
    const AlignedRange range = aligned_range(*files_[0], last.offset, last.bytes);
    EXPECT_GT(range.offset + range.bytes, layout_.content.size()) << "the last one's passes the end of the file";
    TearDown();
  }
}

TEST_P(AlignedRangeTest, WholePiecesBehindTheEndOfTheFileAreNoError) {
  open(4 * kKiB);
  if (IsSkipped() || HasFatalFailure()) return;
  const Tensor& last = layout_.tensors.back();
  const AlignedRange range = aligned_range(*files_[0], last.offset, last.bytes);
  ASSERT_EQ(read(range, 10 * 4096).error, 0);
  EXPECT_TRUE(
      same_bytes(memory_.span(range.skip, last.bytes), std::span(layout_.content).subspan(last.offset, last.bytes)));
  EXPECT_EQ(memory_.data()[range.bytes + 10 * 4096], std::byte{0xee}) << "nothing is written beyond the request";
}

TEST_P(AlignedRangeTest, OneByteTooFewIsNodata) {
  for (const std::uint64_t block : {4 * kKiB, 64 * kKiB}) {
    open(block);
    if (IsSkipped() || HasFatalFailure()) return;
    const Tensor& last = layout_.tensors.back();
    const AlignedRange range = aligned_range(*files_[0], last.offset, last.bytes);
    ASSERT_EQ(::truncate(path_.c_str(), static_cast<off_t>(layout_.content.size() - 1)), 0);
    const IoCompletion completion = read(range);
    EXPECT_EQ(completion.error, ENODATA);
    EXPECT_GE(completion.error_offset, range.offset);
    EXPECT_LE(completion.error_offset + completion.error_bytes, range.offset + range.bytes);
    EXPECT_GE(completion.error_offset + completion.error_bytes, layout_.content.size());
    EXPECT_EQ(read(aligned_range(*files_[0], last.offset, last.bytes - 1)).error, 0) << "what is there is had";
    ASSERT_EQ(::truncate(path_.c_str(), static_cast<off_t>(layout_.content.size())), 0);
    TearDown();
  }
}

TEST_P(AlignedRangeTest, AFileShorterThanTheWholeRangeIsNodata) {
  open(4 * kKiB);
  if (IsSkipped() || HasFatalFailure()) return;
  const Tensor& large = layout_.tensors[3];
  const AlignedRange range = aligned_range(*files_[0], large.offset, large.bytes);
  ASSERT_EQ(::truncate(path_.c_str(), static_cast<off_t>(range.offset)), 0);
  EXPECT_EQ(read(range).error, ENODATA);
}

std::vector<On> all_on() {
  std::vector<On> all;
  for (const std::uint32_t sector : {0u, 512u, 4096u}) {
    for (const IoEngineKind kind : kIoEngines) all.push_back({sector, kind});
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(Sectors, AlignedRangeTest, ::testing::ValuesIn(all_on()), [](const auto& info) {
  const std::uint32_t sector = info.param.sector_bytes;
  return std::string(name_of(info.param.kind)) + (sector ? "_on_" + std::to_string(sector) : "_here");
});

// What a plan puts side by side in memory lies on pages, which are smaller than the sectors of some drives.
class LargeSectorTest : public QueueFixture, public ::testing::WithParamInterface<IoEngineKind> {};

TEST_P(LargeSectorTest, BuffersMayLieOnAnyPage) {
  if (const std::string refusal = refusal_of(GetParam()); !refusal.empty()) GTEST_SKIP() << refusal;
  const LoopMount mount({.kind = "xfs", .sector_bytes = 16384});
  if (!mount.refusal().empty()) GTEST_SKIP() << mount.refusal();
  files_.push_back(std::make_unique<File>(File::open(mount / "store", kNewFile)));
  pointers_ = {files_[0].get()};
  ASSERT_EQ(files_[0]->alignment(), 16384u);
  Memory out(kMiB), in(kMiB);
  out.fill_pattern(1);
  const std::span<std::byte> regions[] = {out.span(), in.span()};
  open_queue(GetParam(), {.block_bytes = 64 * kKiB, .depth = 4}, {}, regions);
  EXPECT_EQ(transfer(IoOp::kWrite, 65536, out.span(4096, 512 * kKiB)).error, 0);
  EXPECT_EQ(transfer(IoOp::kRead, 65536, in.span(12288, 512 * kKiB)).error, 0);
  EXPECT_TRUE(same_bytes(in.span(12288, 512 * kKiB), out.span(4096, 512 * kKiB)));
  queue_.reset();  // before the file system goes
  files_.clear();
}

INSTANTIATE_TEST_SUITE_P(Engines, LargeSectorTest, ::testing::ValuesIn(kIoEngines),
                         [](const auto& info) { return std::string(name_of(info.param)); });

}  // namespace
}  // namespace spillway::testing
