// What the tests of this room share: a directory that goes away, aligned memory, patterns, captured log lines, the
// seed.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <mutex>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "spillway/io_file.h"
#include "spillway/log.h"
#include "tests/temp_directory.h"

namespace spillway::testing {

using TempDir = TempDirectory;

// Different at every offset and for every seed, so that bytes from the wrong place are noticed.
inline void fill_pattern(std::span<std::byte> bytes, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  for (std::size_t i = 0; i < bytes.size(); i += 8) {
    const std::uint64_t word = random();
    std::memcpy(bytes.data() + i, &word, std::min<std::size_t>(8, bytes.size() - i));
  }
}

// Memory aligned to 64 KiB, as arenas are.
class Memory {
 public:
  explicit Memory(std::size_t bytes)
      : bytes_(bytes), data_(static_cast<std::byte*>(std::aligned_alloc(65536, (bytes + 65535) / 65536 * 65536))) {
    fill(0);
  }

  std::byte* data() { return data_.get(); }
  std::span<std::byte> span() { return {data_.get(), bytes_}; }
  std::span<std::byte> span(std::size_t offset, std::size_t bytes) { return span().subspan(offset, bytes); }
  void fill(unsigned char value) { std::fill_n(data_.get(), bytes_, std::byte{value}); }
  void fill_pattern(std::uint64_t seed) { testing::fill_pattern(span(), seed); }

 private:
  struct Free {
    void operator()(std::byte* memory) const { std::free(memory); }
  };
  std::size_t bytes_;
  std::unique_ptr<std::byte, Free> data_;
};

inline bool same_bytes(std::span<const std::byte> a, std::span<const std::byte> b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size()) == 0;
}

// Collects Spillway's messages for as long as it lives.
class CapturedLog {
 public:
  CapturedLog() {
    set_log_sink([this](LogLevel, std::string_view message) {
      std::lock_guard lock(mutex_);
      lines_.emplace_back(message);
    });
  }
  ~CapturedLog() {
    set_log_sink([](LogLevel, std::string_view message) {
      std::fprintf(stderr, "spillway: %.*s\n", static_cast<int>(message.size()), message.data());
    });
  }

  std::size_t count(const std::string& part) const {
    std::lock_guard lock(mutex_);
    std::size_t found = 0;
    for (const auto& line : lines_) found += line.find(part) != std::string::npos;
    return found;
  }
  std::string all() const {
    std::lock_guard lock(mutex_);
    std::string text;
    for (const auto& line : lines_) text += line + "\n";
    return text;
  }

 private:
  mutable std::mutex mutex_;
  std::vector<std::string> lines_;
};

}  // namespace spillway::testing
