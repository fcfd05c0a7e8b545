// Bytes that wait on the drives come back as they were, from files without a name, and what is wrong is an error.
#include "src/engine/scratch_files.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <filesystem>
#include <random>
#include <span>
#include <vector>

#include "spillway/c_api.h"
#include "spillway/error.h"
#include "tests/temp_directory.h"

namespace spillway {
namespace {

using ::testing::HasSubstr;

constexpr std::size_t kBytes = 3 << 20;

class ScratchFilesTest : public ::testing::Test {
 protected:
  ScratchFilesTest() {
    config_.nvme_paths = {a_.path(), b_.path() / "made"};
    for (auto* memory : {&out_, &back_}) {
      memory->resize(kBytes + ScratchFiles::kAlignment);
    }
    std::minstd_rand random(7);
    for (std::byte& byte : out()) byte = static_cast<std::byte>(random());
  }

  static std::span<std::byte> aligned(std::vector<std::byte>& memory) {
    const auto address = reinterpret_cast<std::uintptr_t>(memory.data());
    const std::size_t skip = (ScratchFiles::kAlignment - address % ScratchFiles::kAlignment) % ScratchFiles::kAlignment;
    return std::span(memory).subspan(skip, kBytes);
  }
  std::span<std::byte> out() { return aligned(out_); }
  std::span<std::byte> back() { return aligned(back_); }

  TempDirectory a_, b_;
  Config config_;
  std::vector<std::byte> out_, back_;
};

TEST_F(ScratchFilesTest, BytesComeBackFromEachFile) {
  ScratchFiles files(config_);
  ASSERT_EQ(2U, files.count());
  const std::size_t half = kBytes / 2;
  std::vector<std::uint64_t> tickets;
  for (std::uint32_t file = 0; file < 2; ++file) {
    tickets.push_back(files.start(IoOp::kWrite, file, file * (32 << 20), out().subspan(file * half, half)));
  }
  for (const std::uint64_t ticket : tickets) files.wait(ticket);
  tickets.clear();
  for (std::uint32_t file = 0; file < 2; ++file) {
    tickets.push_back(files.start(IoOp::kRead, file, file * (32 << 20), back().subspan(file * half, half)));
  }
  for (const std::uint64_t ticket : tickets) files.wait(ticket);
  EXPECT_TRUE(std::ranges::equal(out(), back()));
  EXPECT_EQ(kBytes, files.stats().write_bytes);
  EXPECT_EQ(kBytes, files.stats().read_bytes);
}

TEST_F(ScratchFilesTest, TheFilesHaveNoNameAndEndWithTransfersUnderWay) {
  ScratchFiles files(config_);
  files.start(IoOp::kWrite, 0, 0, out());
  EXPECT_TRUE(std::filesystem::is_empty(a_.path()));
  EXPECT_TRUE(std::filesystem::is_empty(b_.path() / "made"));
}

TEST_F(ScratchFilesTest, WhatCannotBeMovedIsRefused) {
  ScratchFiles files(config_);
  const auto refused = [&](auto&& call, const char* why) {
    try {
      call();
      ADD_FAILURE() << "nothing was thrown, of " << why;
    } catch (const Error& error) {
      EXPECT_EQ(Code::kInvalidArgument, error.code());
      EXPECT_THAT(error.what(), HasSubstr(why));
    }
  };
  refused([&] { files.start(IoOp::kWrite, 2, 0, out()); }, "of file 2 cannot be moved");
  refused([&] { files.start(IoOp::kWrite, 0, 512, out()); }, "multiples of 4096");
  refused([&] { files.start(IoOp::kWrite, 0, 0, out().first(100)); }, "100 bytes");
  refused([&] { files.start(IoOp::kRead, 0, 0, back()); }, "read where nothing was written");
  refused([&] { files.wait(1); }, "1 is no ticket");
  config_.nvme_paths.clear();
  refused([&] { ScratchFiles none(config_); }, "spillway.nvme_paths: is missing");
}

TEST_F(ScratchFilesTest, TheApiForCMovesThem) {
  spillway_config* config = nullptr;
  const std::string json = R"({"train_batch_size": 1, "spillway": {"nvme_paths": [")" + a_.path().string() + R"("]}})";
  ASSERT_EQ(SPILLWAY_OK, spillway_config_parse(json.c_str(), "test", &config)) << spillway_error_message();
  spillway_scratch* scratch = nullptr;
  ASSERT_EQ(SPILLWAY_OK, spillway_scratch_create(config, &scratch)) << spillway_error_message();
  EXPECT_EQ(1U, spillway_scratch_files(scratch));
  std::uint64_t ticket = 0, read = 0, written = 0;
  EXPECT_EQ(SPILLWAY_OK, spillway_scratch_write(scratch, 0, 0, out().data(), kBytes, &ticket));
  EXPECT_EQ(SPILLWAY_OK, spillway_scratch_wait(scratch, ticket));
  EXPECT_EQ(SPILLWAY_INVALID_ARGUMENT, spillway_scratch_wait(scratch, ticket));
  EXPECT_EQ(SPILLWAY_OK, spillway_scratch_read(scratch, 0, 0, back().data(), kBytes, &ticket));
  EXPECT_EQ(SPILLWAY_OK, spillway_scratch_wait(scratch, ticket));
  EXPECT_TRUE(std::ranges::equal(out(), back()));
  EXPECT_EQ(SPILLWAY_OK, spillway_scratch_moved(scratch, &read, &written));
  EXPECT_EQ(kBytes, read);
  EXPECT_EQ(kBytes, written);
  EXPECT_EQ(SPILLWAY_OK, spillway_scratch_destroy(scratch));
  EXPECT_EQ(SPILLWAY_INVALID_ARGUMENT, spillway_scratch_destroy(scratch));
  spillway_config_destroy(config);
}

}  // namespace
}  // namespace spillway
