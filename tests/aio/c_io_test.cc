// What a caller of the API for C of files and queues can get wrong, and what it is told; over each engine, what it
// does. A whole program is c_io_example.c.
#include "spillway/c_io.h"

#include <gmock/gmock.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "queue_fixture.h"
#include "tests/sanitizer.h"
#include "tests/sized.h"

namespace spillway::testing {
namespace {

using ::spillway::testing::sized;
using ::testing::HasSubstr;

constexpr std::uint64_t kUnit = 64 * kKiB;

#define EXPECT_OK(call) EXPECT_EQ(SPILLWAY_OK, call) << spillway_error_message()
#define EXPECT_STATUS(status, call, message) \
  EXPECT_EQ(status, call);                   \
  EXPECT_THAT(spillway_error_message(), HasSubstr(message))
#define EXPECT_REFUSED(call, message) EXPECT_STATUS(SPILLWAY_INVALID_ARGUMENT, call, message)

struct CIo : ::testing::Test {
  CIo() {
    EXPECT_OK(spillway_io_memory_allocate(16 * kUnit, 0, &memory_, nullptr));
    data_ = static_cast<std::byte*>(memory_);
    file_ = open("file");
  }
  ~CIo() override {
    EXPECT_OK(spillway_io_queue_destroy(queue_));
    EXPECT_OK(spillway_io_file_close(file_));
    EXPECT_OK(spillway_io_memory_free(memory_));
  }

  spillway_io_file* open(const std::string& name) {
    auto options = sized<spillway_io_file_options>();
    options.writable = options.create = 1;
    spillway_io_file* file = nullptr;
    EXPECT_OK(spillway_io_file_open((dir_ / name).c_str(), &options, &file));
    EXPECT_OK(spillway_io_file_preallocate(file, 16 * kUnit));
    return file;
  }
  void create(spillway_io_queue_options options = sized<spillway_io_queue_options>()) {
    options.files = &file_;
    options.file_count = 1;
    ASSERT_OK(options);
  }
  void ASSERT_OK(const spillway_io_queue_options& options) {
    ASSERT_EQ(SPILLWAY_OK, spillway_io_queue_create(&options, &queue_)) << spillway_error_message();
  }
  spillway_io_request request(spillway_io_op op, std::uint64_t offset, std::uint64_t bytes, std::uint32_t file = 0) {
    spillway_io_request made = {};
    made.op = op;
    made.file = file;
    made.offset = offset;
    made.buffer = op == SPILLWAY_IO_SYNC ? nullptr : data_ + offset;
    made.bytes = bytes;
    return made;
  }
  spillway_status submit(const spillway_io_request& request) {
    return spillway_io_queue_submit(queue_, &request, 1, nullptr);
  }
  // The error of each of so many completions.
  std::vector<int> errors(std::size_t count) {
    std::vector<int> all;
    while (all.size() < count) {
      spillway_io_completion some[4];
      std::size_t taken = 0;
      EXPECT_OK(spillway_io_queue_wait(queue_, some, 4, 10, &taken));
      for (std::size_t i = 0; i < taken; ++i) all.push_back(some[i].error);
    }
    return all;
  }

  TempDir dir_;
  void* memory_ = nullptr;
  std::byte* data_ = nullptr;
  spillway_io_file* file_ = nullptr;
  spillway_io_queue* queue_ = nullptr;
};

class CIoEngine : public CIo, public ::testing::WithParamInterface<IoEngineKind> {
 protected:
  void SetUp() override {
    if (const std::string refusal = refusal_of(GetParam()); !refusal.empty()) GTEST_SKIP() << refusal;
    auto options = sized<spillway_io_queue_options>();
    options.engine = static_cast<spillway_io_engine>(GetParam());
    options.max_requests = 64;
    options.block_bytes = kUnit;
    options.depth = 4;
    create(options);
  }
};

TEST_P(CIoEngine, FilesAndMemoryComeLaterAndThreadsShareTheQueue) {
  spillway_io_file* const later = open("later");
  std::uint32_t index = 0;
  EXPECT_OK(spillway_io_queue_add_file(queue_, later, &index));
  EXPECT_EQ(index, 1u);
  std::int32_t registered = -1;
  EXPECT_OK(spillway_io_queue_add_region(queue_, data_, 16 * kUnit, &registered));
  EXPECT_TRUE(registered == 0 || registered == 1);
  EXPECT_TRUE(registered == 0 || GetParam() == IoEngineKind::kIoUring);
  fill_pattern({data_, 16 * kUnit}, 1);
  Memory expected(16 * kUnit);
  std::memcpy(expected.data(), data_, 16 * kUnit);
  for (const spillway_io_op op : {SPILLWAY_IO_WRITE, SPILLWAY_IO_READ}) {
    std::vector<std::thread> threads;
    for (std::uint64_t t = 0; t < 4; ++t) {
      threads.emplace_back([&, t] {
        for (std::uint64_t i = 4 * t; i < 4 * t + 4; ++i) EXPECT_OK(submit(request(op, i * kUnit, kUnit, i % 2)));
      });
    }
    for (auto& thread : threads) thread.join();
    EXPECT_EQ(errors(16), std::vector<int>(16, 0));
    if (op == SPILLWAY_IO_WRITE) std::memset(data_, 0, 16 * kUnit);
  }
  EXPECT_TRUE(same_bytes(expected.span(), {data_, 16 * kUnit}));
  auto stats = sized<spillway_io_stats>();
  EXPECT_OK(spillway_io_queue_stats(queue_, &stats));
  EXPECT_EQ(stats.read_bytes, 16 * kUnit);
  EXPECT_EQ(stats.pending, 0u);
  std::string described;
  EXPECT_OK(spillway_io_queue_describe(
      queue_, [](void* to, const char* text) { *static_cast<std::string*>(to) = text; }, &described));
  EXPECT_EQ(described.rfind(name_of(GetParam()), 0), 0u) << described;
  EXPECT_STATUS(SPILLWAY_BUSY, spillway_io_file_close(later), "later: is in an I/O queue; remove it there");
  EXPECT_STATUS(SPILLWAY_BUSY, spillway_io_file_rename(later, (dir_ / "x").c_str()), "is in an I/O queue");
  EXPECT_STATUS(SPILLWAY_BUSY, spillway_io_memory_free(memory_), "memory: is a region of a queue");
  EXPECT_OK(spillway_io_queue_remove_region(queue_, data_));
  EXPECT_OK(spillway_io_queue_remove_file(queue_, 1));
  EXPECT_OK(spillway_io_file_close(later));
  EXPECT_REFUSED(submit(request(SPILLWAY_IO_READ, 0, kUnit, 1)), "request of file 1: no such file in this queue");
}

TEST_P(CIoEngine, ClosedWithWorkUnderWayItEndsEveryRequest) {
  spillway_io_request all[64];
  for (std::uint64_t i = 0; i < 64; ++i) all[i] = request(SPILLWAY_IO_WRITE, 0, 16 * kUnit);
  std::size_t taken = 0;
  EXPECT_OK(spillway_io_queue_submit(queue_, all, 64, &taken));
  EXPECT_EQ(taken, 64u);
  EXPECT_STATUS(SPILLWAY_BUSY, spillway_io_queue_submit(queue_, all, 1, &taken), "holds 64 requests");
  EXPECT_EQ(taken, 0u);
  EXPECT_OK(spillway_io_queue_close(queue_));
  EXPECT_REFUSED(submit(all[0]), "I/O queue: is closed");
  const std::vector<int> ended = errors(64);
  EXPECT_TRUE(std::ranges::all_of(ended, [](int error) { return error == 0 || error == ECANCELED; }));
  EXPECT_GT(std::ranges::count(ended, ECANCELED), 0);
  spillway_io_completion cancelled = {};
  cancelled.error = ECANCELED;
  cancelled.error_bytes = 512;
  EXPECT_STATUS(SPILLWAY_IO, spillway_io_queue_check(queue_, SPILLWAY_IO_WRITE, &cancelled),
                "file: write of 512 bytes at offset 0 failed (Operation canceled); the queue was closed before");
}

TEST_P(CIoEngine, DestroyedWhileAThreadWaitsThatComesBack) {
  std::atomic<bool> waits = false;
  spillway_io_queue* const queue = queue_;
  std::thread waiter([&] {
    spillway_io_completion out;
    std::size_t count = 1;
    waits = true;
    const spillway_status status = spillway_io_queue_wait(queue, &out, 1, -INFINITY, &count);
    EXPECT_TRUE((status == SPILLWAY_OK && count == 0) || status == SPILLWAY_INVALID_ARGUMENT) << status;
  });
  while (!waits) std::this_thread::yield();
  EXPECT_OK(spillway_io_queue_destroy(queue_));
  waiter.join();
  EXPECT_REFUSED(spillway_io_queue_wake(queue_), "spillway_io_queue: is no handle that lives");
  queue_ = nullptr;
}

TEST_P(CIoEngine, AForkedProcessIsRefusedByName) {
#ifdef SPILLWAY_THREAD_SANITIZER
  GTEST_SKIP() << "it does not follow a fork of several threads";
#endif
  const pid_t child = ::fork();
  if (child == 0) {
    spillway_io_completion out;
    spillway_io_stats stats = sized<spillway_io_stats>();
    std::size_t count = 0;
    const spillway_status said[] = {submit(request(SPILLWAY_IO_SYNC, 0, 0)),
                                    spillway_io_queue_wait(queue_, &out, 1, -1, &count), spillway_io_queue_wake(queue_),
                                    spillway_io_queue_stats(queue_, &stats), spillway_io_queue_destroy(queue_)};
    const bool named = std::strstr(spillway_error_message(), "I/O queue: belongs to process ") != nullptr;
    const bool all = std::ranges::all_of(said, [](auto status) { return status == SPILLWAY_UNSUPPORTED; });
    ::_exit(named && all ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_OK(submit(request(SPILLWAY_IO_SYNC, 0, 0)));
  EXPECT_EQ(errors(1), std::vector<int>{0});
}

INSTANTIATE_TEST_SUITE_P(Engines, CIoEngine, ::testing::ValuesIn(kIoEngines),
                         [](const auto& info) { return std::string(name_of(info.param)); });

TEST_F(CIo, FilesSayWhatTheyAre) {
  auto facts = sized<spillway_io_file_info>();
  EXPECT_OK(spillway_io_file_describe(file_, &facts));
  EXPECT_EQ(facts.size_bytes, 16 * kUnit);
  EXPECT_EQ(facts.at_its_path, 1);
  EXPECT_EQ(facts.sync_error, 0);
  std::memset(data_, 7, kUnit);
  EXPECT_OK(spillway_io_file_write(file_, kUnit, data_, kUnit));
  EXPECT_OK(spillway_io_file_sync(file_));
  EXPECT_OK(spillway_io_file_read(file_, kUnit, data_ + kUnit, kUnit, 0));
  EXPECT_EQ(std::memcmp(data_, data_ + kUnit, kUnit), 0);
  EXPECT_STATUS(SPILLWAY_IO, spillway_io_file_read(file_, 16 * kUnit, data_, kUnit, 0), "No data available");
  std::int32_t said = -1;
  EXPECT_OK(spillway_io_file_lock(file_, 0));
  spillway_io_file* again = nullptr;
  EXPECT_OK(spillway_io_file_open((dir_ / "file").c_str(), nullptr, &again));
  EXPECT_OK(spillway_io_file_lock_shared(again, &said));
  EXPECT_EQ(said, 0);
  auto range = sized<spillway_io_range>();
  EXPECT_OK(spillway_io_file_aligned_range(again, facts.alignment + 1, 5, &range));
  EXPECT_EQ(range.offset + range.skip, facts.alignment + 1);
  EXPECT_EQ(range.least_bytes, range.skip + 5);
  EXPECT_OK(spillway_io_file_close(again));
  EXPECT_OK(spillway_io_file_rename(file_, (dir_ / "renamed").c_str()));
  EXPECT_TRUE(std::filesystem::exists(dir_ / "renamed"));
}

TEST_F(CIo, WhatNoFileCanDoIsRefused) {
  auto options = sized<spillway_io_file_options>();
  options.create = 1;
  spillway_io_file* other = nullptr;
  EXPECT_REFUSED(spillway_io_file_open("x", &options, &other), "x: is created, and not to be written");
  EXPECT_STATUS(SPILLWAY_NOT_FOUND, spillway_io_file_open((dir_ / "none").c_str(), nullptr, &other), "none");
  options.writable = 1;
  EXPECT_STATUS(SPILLWAY_EXISTS, spillway_io_file_open((dir_ / "file").c_str(), &options, &other), "file");
  options.struct_size = 0;
  EXPECT_REFUSED(spillway_io_file_open("x", &options, &other), "its struct_size is 0");
  EXPECT_REFUSED(spillway_io_file_open(nullptr, nullptr, &other), "path: is null");
  auto facts = sized<spillway_io_file_info>();
  EXPECT_OK(spillway_io_file_describe(file_, &facts));
  if (facts.alignment > 1) {
    EXPECT_REFUSED(spillway_io_file_read(file_, 1, data_, kUnit, 0), "offset and length are no multiples");
  }
  if (facts.memory_alignment > 1) {
    EXPECT_REFUSED(spillway_io_file_write(file_, 0, data_ + 1, kUnit), "the address is no multiple");
  }
  EXPECT_REFUSED(spillway_io_file_read(file_, ~0ull - kUnit + 1, data_, kUnit, 0), "offset out of range");
  EXPECT_REFUSED(spillway_io_file_read(file_, 0, nullptr, kUnit, 0), "data: is null");
  EXPECT_REFUSED(spillway_io_file_read(file_, 0, data_, kUnit, kUnit + 1), "least_bytes");
  EXPECT_REFUSED(spillway_io_file_lock(file_, NAN), "patience_seconds");
  EXPECT_REFUSED(spillway_io_file_preallocate(file_, ~0ull), "no file has 18446744073709551615 bytes");
  spillway_io_file* const gone = open("gone");
  EXPECT_OK(spillway_io_file_close(gone));
  EXPECT_REFUSED(spillway_io_file_close(gone), "spillway_io_file: is no handle that lives");
  EXPECT_REFUSED(spillway_io_file_sync(reinterpret_cast<spillway_io_file*>(memory_)), "is no handle that lives");
  EXPECT_REFUSED(spillway_io_file_sync(nullptr), "spillway_io_file: is null");
  create();
  std::uint32_t index = 0;
  EXPECT_REFUSED(spillway_io_queue_add_file(queue_, gone, &index), "spillway_io_file: is no handle that lives");
}

TEST_F(CIo, MemorySaysWhatWasGranted) {
  auto granted = sized<spillway_io_memory_info>();
  void* memory = nullptr;
  EXPECT_OK(spillway_io_memory_allocate(5, kMiB, &memory, &granted));
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(memory) % kMiB, 0u);
  EXPECT_EQ(granted.alignment, kMiB);
  EXPECT_EQ(granted.locked == 1, granted.lock_error == 0);
  EXPECT_REFUSED(spillway_io_memory_free(static_cast<std::byte*>(memory) + 1), "was not allocated here");
  EXPECT_OK(spillway_io_memory_free(memory));
  EXPECT_REFUSED(spillway_io_memory_free(memory), "memory: was not allocated here, or was freed");
  EXPECT_REFUSED(spillway_io_memory_allocate(0, 0, &memory, nullptr), "its size is 0 bytes");
  EXPECT_REFUSED(spillway_io_memory_allocate(1, 3, &memory, nullptr), "choose a power of two");
}

TEST_F(CIo, WhatNoQueueTakesIsRefused) {
  const auto refused = [&](auto change, const char* why) {
    auto options = sized<spillway_io_queue_options>();
    change(options);
    spillway_io_queue* queue = nullptr;
    EXPECT_REFUSED(spillway_io_queue_create(&options, &queue), why);
  };
  refused([](auto& o) { o.engine = 9; }, "spillway_io_engine: no such value: 9");
  refused([](auto& o) { o.depth = 5000; }, "is 5000 for each of 16 files");
  refused([](auto& o) { o.block_bytes = 2 * kGiB; }, "is 2147483648");
  refused([](auto& o) { o.max_requests = UINT32_MAX; }, "max_requests");
  refused([](auto& o) { o.stall_report_seconds = NAN; }, "stall_report_seconds");
  refused([](auto& o) { o.file_count = 1; }, "files: is null");
  const std::uint32_t shares[] = {1, 1};
  spillway_stripe_map* stripes = nullptr;
  EXPECT_OK(spillway_stripe_map_create(shares, 2, kUnit, 0, &stripes));
  refused([&](auto& o) { o.stripes = stripes; }, "has shares of 2 files, and the queue 0");
  create();
  const auto wrong = [&](auto change, const char* why) {
    spillway_io_request bad = request(SPILLWAY_IO_WRITE, 0, kUnit);
    change(bad);
    EXPECT_REFUSED(submit(bad), why);
  };
  wrong([](auto& r) { r.op = 3; }, "spillway_io_op: no such value: 3");
  wrong([](auto& r) { r.priority = -1; }, "spillway_io_priority: no such value: -1");
  wrong([](auto& r) { r.unused = 1; }, "`unused` is not 0");
  wrong([](auto& r) { r.bytes = 0; }, "a transfer needs bytes and a buffer");
  wrong([](auto& r) { r.file = SPILLWAY_IO_STRIPED; }, "request of the striped space: no such file");
  EXPECT_OK(spillway_io_queue_add_region(queue_, data_, kUnit, nullptr));
  EXPECT_REFUSED(spillway_io_queue_add_region(queue_, data_, kUnit, nullptr), "overlaps a region");
  EXPECT_REFUSED(spillway_io_queue_add_region(queue_, data_, ~0ull, nullptr), "is longer than memory");
  EXPECT_REFUSED(spillway_io_queue_remove_region(queue_, data_ + kUnit), "is none of the I/O queue's");
  EXPECT_REFUSED(spillway_io_queue_remove_file(queue_, 5), "file 5: is none of the I/O queue's");
  std::size_t count = 0;
  spillway_io_completion out;
  EXPECT_REFUSED(spillway_io_queue_wait(queue_, &out, 0, 0, &count), "no room for a completion");
  EXPECT_REFUSED(spillway_io_queue_wait(queue_, &out, 1, NAN, &count), "timeout_seconds");
  EXPECT_REFUSED(spillway_io_queue_wait(queue_, nullptr, 1, 0, &count), "completions: is null");
  EXPECT_OK(spillway_stripe_map_destroy(stripes));
  EXPECT_REFUSED(spillway_stripe_map_destroy(stripes), "spillway_stripe_map: is no handle that lives");
}

TEST_F(CIo, StripesSpreadASpaceOverFiles) {
  spillway_io_file* const other = open("other");
  const double rates[] = {2, 1};
  const std::uint64_t room[] = {kGiB, kGiB};
  std::uint32_t shares[2] = {};
  EXPECT_OK(spillway_stripe_shares(rates, room, 2, kGiB, 3, shares));
  EXPECT_EQ(std::pair(shares[0], shares[1]), std::pair(2u, 1u));
  EXPECT_STATUS(SPILLWAY_DOES_NOT_FIT, spillway_stripe_shares(rates, room, 2, 3 * kGiB, 3, shares), "have no room");
  const double none[] = {0, 1};
  EXPECT_REFUSED(spillway_stripe_shares(none, room, 2, kGiB, 3, shares), "rates: one is not above 0");
  spillway_stripe_map* map = nullptr;
  EXPECT_REFUSED(spillway_stripe_map_create(shares, 0, kUnit, 0, &map), "stripe shares");
  shares[0] = 2, shares[1] = 1;
  EXPECT_OK(spillway_stripe_map_create(shares, 2, kUnit, kUnit, &map));
  EXPECT_EQ(spillway_stripe_map_file_of(map, kUnit), 0u);
  EXPECT_EQ(spillway_stripe_map_file_of(map, 0), UINT32_MAX);  // a header
  EXPECT_EQ(spillway_stripe_map_file_bytes(map, 1, 4 * kUnit), 2 * kUnit);
  auto run = sized<spillway_stripe_run>();
  EXPECT_OK(spillway_stripe_map_next_on(map, 1, kUnit, &run));
  EXPECT_EQ(run.file_offset, kUnit);
  EXPECT_EQ(run.bytes, kUnit);
  EXPECT_REFUSED(spillway_stripe_map_next_on(map, 2, kUnit, &run), "there is no file 2");
  spillway_io_file* const files[] = {file_, other};
  auto options = sized<spillway_io_queue_options>();
  options.files = files;
  options.file_count = 2;
  options.stripes = map;
  ASSERT_OK(options);
  fill_pattern({data_, 4 * kUnit}, 4);
  spillway_io_request write = request(SPILLWAY_IO_WRITE, kUnit, 3 * kUnit, SPILLWAY_IO_STRIPED);
  EXPECT_OK(submit(write));
  EXPECT_EQ(errors(1), std::vector<int>{0});
  EXPECT_OK(spillway_io_file_read(other, kUnit, data_ + 8 * kUnit, kUnit, 0));
  EXPECT_EQ(std::memcmp(data_ + run.space_offset, data_ + 8 * kUnit, kUnit), 0);
  EXPECT_REFUSED(spillway_io_queue_remove_file(queue_, 1), "other: is a part of the striped space");
  EXPECT_OK(spillway_stripe_map_destroy(map));
  EXPECT_OK(spillway_io_queue_destroy(queue_));
  queue_ = nullptr;
  EXPECT_OK(spillway_io_file_close(other));
}

TEST_F(CIo, ADriveHasARate) {
  double rate = 0;
  EXPECT_OK(spillway_io_probe_rate(dir_.path().c_str(), nullptr, &rate));
  EXPECT_GT(rate, 0);
  EXPECT_STATUS(SPILLWAY_NOT_FOUND, spillway_io_probe_rate((dir_ / "none").c_str(), nullptr, &rate), "none");
  EXPECT_REFUSED(spillway_io_probe_rate(nullptr, nullptr, &rate), "directory: is null");
}

}  // namespace
}  // namespace spillway::testing
