// Memory for direct I/O is where it was asked for, whole pages, and says the truth about its lock.
#include "spillway/io_memory.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <utility>

#include "spillway/error.h"
#include "spillway/units.h"
#include "tests/error_of.h"
#include "tests/sanitizer.h"

namespace spillway {
namespace {

using testing::error_of;
using ::testing::HasSubstr;

// Of this process, as the kernel counts it.
std::uint64_t locked_bytes() {
  std::ifstream status("/proc/self/status");
  for (std::string key; status >> key;) {
    std::uint64_t kib = 0;
    if (key == "VmLck:" && status >> kib) return kib * kKiB;
  }
  return 0;
}

TEST(IoMemory, LiesAtEveryAlignmentAndHoldsZeros) {
  for (std::uint64_t alignment = 1; alignment <= 4 * kMiB; alignment *= 4) {
    const IoMemory memory = IoMemory::allocate(3 * kMiB + 5, alignment, false);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(memory.bytes().data()) % std::max<std::uint64_t>(alignment, 4096), 0u);
    EXPECT_EQ(memory.bytes().size(), 3 * kMiB + 5);
    EXPECT_TRUE(std::ranges::all_of(memory.bytes(), [](std::byte each) { return each == std::byte{0}; }));
    std::ranges::fill(memory.bytes(), std::byte{1});
    EXPECT_EQ(std::pair(memory.locked(), memory.lock_error()), std::pair(false, 0));
  }
}

TEST(IoMemory, IsLockedAsItSays) {
#if defined(SPILLWAY_ADDRESS_SANITIZER) || defined(SPILLWAY_THREAD_SANITIZER)
  GTEST_SKIP() << "a sanitizer's mlock() does nothing";
#endif
  const std::uint64_t before = locked_bytes();
  {
    const IoMemory memory = IoMemory::allocate(64 * kKiB);
    EXPECT_EQ(locked_bytes() - before, memory.locked() ? 64 * kKiB : 0);
    EXPECT_EQ(memory.locked(), memory.lock_error() == 0);
  }
  EXPECT_EQ(locked_bytes(), before);
}

// Whether the kernel was asked for huge pages there: `hg` in the flags of /proc/self/smaps.
bool asks_for_huge_pages(const void* memory) {
  const auto address = reinterpret_cast<std::uintptr_t>(memory);
  std::ifstream smaps("/proc/self/smaps");
  bool here = false;
  for (std::string line; std::getline(smaps, line);) {
    std::uintptr_t begin = 0, end = 0;
    char dash = 0;
    std::istringstream words(line);
    if (words >> std::hex >> begin >> dash >> end && dash == '-') here = begin <= address && address < end;
    if (here && line.starts_with("VmFlags:")) return (line + ' ').find(" hg ") != std::string::npos;
  }
  return false;
}

TEST(IoMemory, AsksForHugePagesWhereItFillsSome) {
  if (!std::filesystem::exists("/sys/kernel/mm/transparent_hugepage")) GTEST_SKIP() << "a kernel without huge pages";
  EXPECT_TRUE(asks_for_huge_pages(IoMemory::allocate(2 * kMiB).bytes().data()));
  EXPECT_FALSE(asks_for_huge_pages(IoMemory::allocate(kMiB).bytes().data()));
}

[[noreturn]] void allocate_without_the_right_to_lock() {
  const rlimit none = {0, 0};
  if (setrlimit(RLIMIT_MEMLOCK, &none) != 0 || (getuid() == 0 && setuid(65534) != 0)) _exit(3);
  const IoMemory memory = IoMemory::allocate(kMiB);
  std::ranges::fill(memory.bytes(), std::byte{1});  // it is memory all the same
  _exit(!memory.locked() && (memory.lock_error() == EPERM || memory.lock_error() == ENOMEM) ? 0 : 1);
}

TEST(IoMemoryDeathTest, WithoutTheRightToLockItSaysWhy) {
#if defined(SPILLWAY_ADDRESS_SANITIZER) || defined(SPILLWAY_THREAD_SANITIZER)
  GTEST_SKIP() << "a sanitizer's mlock() does nothing";
#endif
  EXPECT_EXIT(allocate_without_the_right_to_lock(), ::testing::ExitedWithCode(0), "");
}

TEST(IoMemory, WhatCannotBeIsRefused) {
  EXPECT_THAT(error_of([] { IoMemory::allocate(0); }).what(), HasSubstr("memory for I/O: its size is 0 bytes"));
  for (const std::uint64_t alignment : {std::uint64_t{0}, std::uint64_t{48}, 2 * kGiB})
    EXPECT_THAT(error_of([=] { IoMemory::allocate(1, alignment); }).what(), HasSubstr("choose a power of two"));
  for (const std::uint64_t bytes : {std::uint64_t{1} << 50, ~std::uint64_t{0}})
    EXPECT_EQ(error_of([=] { IoMemory::allocate(bytes); }).code(), Code::kDoesNotFit);
}

}  // namespace
}  // namespace spillway
