// What a queue gets when nothing is in its way, and what it does with it.
#include <sys/mman.h>

#include <cstring>
#include <fstream>
#include <set>

#include "loop_mount.h"
#include "queue_fixture.h"
#include "spillway/io_queue.h"
#include "tests/sanitizer.h"

namespace spillway::testing {
namespace {

constexpr std::uint64_t kUnit = 64 * kKiB;

// Memory that could be had without pushing anything out, as the kernel estimates it.
[[maybe_unused]] std::uint64_t available_bytes() {
  std::ifstream info("/proc/meminfo");
  for (std::string key; info >> key;) {
    std::uint64_t kib = 0;
    if (key == "MemAvailable:" && info >> kib) return kib * kKiB;
  }
  return 0;
}

class QueueEngineTest : public QueueFixture {
 protected:
  void SetUp() override { open_files(1, 4 * kUnit); }

  Memory memory_{4 * kUnit};
};

TEST_F(QueueEngineTest, AutoTakesIoUringAndRegistersFilesAndRegions) {
  if (const std::string refusal = refusal_of(IoEngineKind::kIoUring); !refusal.empty()) GTEST_SKIP() << refusal;
  CapturedLog log;
  const std::span<std::byte> regions[] = {memory_.span()};
  queue_ = IoQueue::create({.depth = 4}, pointers_, regions);
  EXPECT_EQ(queue_->describe().rfind("io_uring", 0), 0u) << queue_->describe();
  if (log.count("registered buffers") == 0) {
    EXPECT_NE(queue_->describe().find(" registered buffers"), std::string::npos) << queue_->describe();
  }
  if (log.count("registered files") == 0) {
    EXPECT_NE(queue_->describe().find(" registered files"), std::string::npos) << queue_->describe();
  }
  expect_transfers_work(memory_);
}

TEST_F(QueueEngineTest, AClosedQueueLetsGoOfItsFiles) {
  for (const IoEngineKind kind : kIoEngines) {
    if (!refusal_of(kind).empty()) continue;
    files_[0]->lock(0);
    queue_ = IoQueue::create({.engine = kind, .depth = 4}, pointers_, {});
    expect_transfers_work(memory_);
    queue_.reset();
    const std::filesystem::path path = files_[0]->path();
    files_[0].reset();  // the lock goes with the last reference to the open description, wherever that is
    files_[0] = std::make_unique<File>(File::open(path, {.writable = true}));
    pointers_[0] = files_[0].get();
    EXPECT_NO_THROW(files_[0]->lock(0)) << name_of(kind);
  }
}

TEST_F(QueueEngineTest, ASyncBringsToTheDriveWhatWasWrittenBefore) {
  const LoopMount mount({.bytes = 32 * kMiB});
  if (!mount.refusal().empty()) GTEST_SKIP() << mount.refusal();
  for (const IoEngineKind kind : kIoEngines) {
    if (!refusal_of(kind).empty()) continue;
    File direct = File::open(mount / std::string(name_of(kind)), kNewFile);
    File plain = File::open(direct.path(), {.writable = true, .direct = false});
    Memory bytes(kUnit), drive(32 * kMiB);
    bytes.fill_pattern(static_cast<std::uint64_t>(kind));
    plain.write_at(0, bytes.span());  // as far as the page cache
    File* const files[] = {&direct};
    queue_ = IoQueue::create({.engine = kind, .depth = 4}, files, {});
    EXPECT_EQ(transfer(IoOp::kSync, 0, {}).error, 0);
    queue_.reset();
    File::open(mount.image(), {.direct = false}).read_at(0, drive.span());
    EXPECT_NE(::memmem(drive.data(), 32 * kMiB, bytes.data(), 4096), nullptr) << name_of(kind);
  }
}

TEST_F(QueueEngineTest, AReapWithRoomForOneResultLosesNone) {
  for (const IoEngineKind kind : kIoEngines) {
    if (!refusal_of(kind).empty()) continue;
    const auto engine = make_engine(kind, {.depth = 4, .files = pointers_});
    std::vector<IoPiece> pieces;
    for (std::uint32_t slot = 0; slot < 4; ++slot) {
      pieces.push_back({.slot = slot, .offset = slot * kUnit, .buffer = memory_.data() + slot * kUnit, .bytes = kUnit});
    }
    ASSERT_EQ(engine->submit(pieces), 4u);
    std::set<std::uint32_t> slots;
    while (slots.size() < 4) {
      IoResult result[1];
      if (engine->reap(result, -1).count == 0) continue;
      EXPECT_EQ(result[0].moved, static_cast<std::int64_t>(kUnit));
      EXPECT_TRUE(slots.insert(result[0].slot).second) << name_of(kind);
    }
  }
}

TEST_F(QueueEngineTest, BuffersInsideOutsideAndAcrossRegionsWork) {
  if (const std::string refusal = refusal_of(IoEngineKind::kIoUring); !refusal.empty()) GTEST_SKIP() << refusal;
  // Two neighbouring regions given in the wrong order, and memory after them that belongs to none.
  const std::span<std::byte> regions[] = {memory_.span(2 * kUnit, kUnit), memory_.span(kUnit, kUnit)};
  Memory pattern(2 * kUnit);
  pattern.fill_pattern(1);
  files_[0]->write_at(0, pattern.span());
  queue_ = IoQueue::create({.engine = IoEngineKind::kIoUring, .depth = 4}, pointers_, regions);
  for (std::uint64_t at = 0; at <= 2 * kUnit; at += kUnit / 2) {
    memory_.fill(0);
    ASSERT_EQ(transfer(IoOp::kRead, 0, memory_.span(at, 2 * kUnit)).error, 0) << at;
    ASSERT_TRUE(same_bytes(memory_.span(at, 2 * kUnit), pattern.span())) << at;
  }
}

// Registered memory is pinned: the kernel reaches it when the process itself no longer may. So what is written from
// memory that was taken away went through a registered buffer.
class RegisteredMemoryTest : public QueueEngineTest {
 protected:
  void SetUp() override {
    QueueEngineTest::SetUp();
    if (const std::string refusal = refusal_of(IoEngineKind::kIoUring); !refusal.empty()) GTEST_SKIP() << refusal;
  }
  void TearDown() override {
    queue_.reset();
    if (data_ != nullptr) ::munmap(data_, bytes_);
  }

  void map(std::uint64_t bytes) {
    void* const memory =
        ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    ASSERT_NE(memory, MAP_FAILED);
    ::madvise(memory, bytes, MADV_HUGEPAGE);
    data_ = static_cast<std::byte*>(memory);
    bytes_ = bytes;
  }
  void open(std::uint64_t block_bytes, std::span<const std::span<std::byte>> regions) {
    queue_ =
        IoQueue::create({.engine = IoEngineKind::kIoUring, .block_bytes = block_bytes, .depth = 4}, pointers_, regions);
    if (queue_->describe().find(" registered buffers") == std::string::npos) GTEST_SKIP() << queue_->describe();
    ASSERT_EQ(::mprotect(data_, bytes_, PROT_NONE), 0);
  }
  // 0, or EFAULT when the piece did not go through a registered buffer.
  int write_from(std::uint64_t at, std::uint64_t bytes) {
    queue_->submit({.op = IoOp::kWrite, .buffer = data_ + at, .bytes = bytes});
    return collect(1).front().error;
  }

  std::byte* data_ = nullptr;
  std::uint64_t bytes_ = 0;
};

TEST_F(RegisteredMemoryTest, WhatLiesInARegionGoesThroughItsBufferAndNothingElseDoes) {
  map(5 * kUnit);
  // Given in the wrong order; between the two and around them lies memory of neither.
  const std::span<std::byte> regions[] = {{data_ + 3 * kUnit, kUnit}, {data_ + kUnit, kUnit}};
  open(kUnit, regions);
  if (IsSkipped()) return;
  EXPECT_EQ(write_from(kUnit, kUnit), 0);
  EXPECT_EQ(write_from(3 * kUnit, kUnit), 0);
  EXPECT_EQ(write_from(3 * kUnit + 4096, kUnit - 4096), 0);
  for (const std::uint64_t at :
       {0 * kUnit, kUnit / 2, kUnit + kUnit / 2, 2 * kUnit, 3 * kUnit + kUnit / 2, 4 * kUnit}) {
    EXPECT_EQ(write_from(at, kUnit), EFAULT) << at;
  }
}

// The kernel takes at most 1 GiB at once; no piece may fall between two.
TEST_F(RegisteredMemoryTest, APieceAtAnyPlaceOfALargeArenaGoesThroughOneBuffer) {
#if defined(SPILLWAY_ADDRESS_SANITIZER) || defined(SPILLWAY_THREAD_SANITIZER)
  GTEST_SKIP() << "pins more memory than a sanitizer's machine may have";
#endif
  if (available_bytes() < 4 * kGiB) GTEST_SKIP() << "less than 4 GiB of memory are free";
  map(kGiB + 200 * kMiB);
  const std::span<std::byte> arena[] = {{data_, bytes_}};
  open(kUnit, arena);
  if (IsSkipped()) return;
  for (const std::uint64_t around : {kGiB, kGiB - kUnit, bytes_ - kUnit}) {
    for (std::uint64_t at = around - kUnit; at <= around + kUnit && at + kUnit <= bytes_; at += 4096) {
      ASSERT_EQ(write_from(at, kUnit), 0) << at;
    }
  }
  EXPECT_EQ(write_from(0, 4 * kUnit), 0);
}

TEST_F(QueueEngineTest, OptionsThatCannotBeAreErrorsThatNameTheSetting) {
  const auto object_of = [&](IoQueueOptions options) -> std::string {
    try {
      IoQueue::create(options, pointers_, {});
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), Code::kInvalidArgument);
      return error.parts().object;
    }
    return "no error";
  };
  EXPECT_EQ(object_of({.depth = 0}), "aio.queue_depth");
  EXPECT_EQ(object_of({.depth = 1u << 20}), "aio.queue_depth");
  EXPECT_EQ(object_of({.block_bytes = 0}), "aio.block_size");
  EXPECT_EQ(object_of({.block_bytes = 2 * kGiB}), "aio.block_size");
  if (files_[0]->alignment() > 1) {
    EXPECT_EQ(object_of({.block_bytes = kMiB + 1}), "aio.block_size");
  }
}

}  // namespace
}  // namespace spillway::testing
