// A store of named tensors over two directories, with HBM and without, and bytes to put into it.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <iterator>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "spillway/tensor_store.h"
#include "spillway/units.h"
#include "swap/store_files.h"
#include "tests/temp_directory.h"

namespace spillway::testing {

using Bytes = std::vector<std::byte>;

inline Bytes bytes_of(std::uint64_t seed, std::size_t size) {
  std::mt19937_64 random(seed);
  Bytes bytes(size);
  for (std::size_t i = 0; i < size; i += 8) {
    const std::uint64_t word = random();
    std::memcpy(bytes.data() + i, &word, std::min<std::size_t>(8, size - i));
  }
  return bytes;
}

class TensorStoreTest : public ::testing::Test {
 protected:
  TensorStoreOptions options(OnExisting on_existing = OnExisting::kResume) const {
    return {.paths = {one_.path(), other_.path()},
            .nvme_bytes = 96 * kMiB,
            .host_bytes = 2 * kMiB,
            .on_existing = on_existing};
  }
  void open(const TensorStoreOptions& wanted) {
    store_.reset();
    store_ = TensorStore::open(wanted);
  }
  void open() { open(options()); }
  void put(const std::string& name, const Bytes& bytes, std::uint64_t block_bytes = 0) {
    const TensorToPut tensor{name, {"uint8", {bytes.size()}}, bytes, block_bytes};
    store_->put({&tensor, 1});
  }
  Bytes get(const std::string& name) {
    Bytes out(store_->info(name).bytes);
    get(name, out);
    return out;
  }
  void get(const std::string& name, std::span<std::byte> out) {
    const TensorToGet tensor{name, out};
    store_->get({&tensor, 1});
  }
  void remove(const std::string& name) { store_->remove({&name, 1}); }
  bool in_host(const std::string& name) const { return store_->info(name).in_host; }
  // Every byte of a file's space of tensors is another one from now on.
  void damage(const Bytes& at) const {
    for (const auto& directory : {one_.path(), other_.path()}) {
      std::fstream file(directory / kStoreFileName, std::ios::in | std::ios::out | std::ios::binary);
      std::string all((std::istreambuf_iterator<char>(file)), {});
      const std::string wanted(reinterpret_cast<const char*>(at.data()), at.size());
      const std::size_t found = all.find(wanted);
      if (found == std::string::npos) continue;
      file.clear();
      file.seekp(static_cast<std::streamoff>(found));
      file.put(static_cast<char>(all[found] ^ 1));
      return;
    }
    FAIL() << "the bytes are in no file";
  }

  TempDirectory one_, other_;
  std::unique_ptr<TensorStore> store_;
};

// With the `host` device, where RAM stands for HBM and for device memory of the caller's.
class TensorStoreHbmTest : public TensorStoreTest {
 protected:
  static constexpr std::uint64_t kMargin = 64;

  TensorStoreOptions with_hbm(std::uint64_t host_bytes = 4 * kMiB, bool files = true) const {
    TensorStoreOptions wanted = options();
    if (!files) wanted.paths.clear();
    wanted.host_bytes = host_bytes;
    wanted.hbm_bytes = 2 * kMiB;
    wanted.device = DeviceKind::kHost;
    return wanted;
  }
  void put_up(const std::string& name, const Bytes& bytes, std::uint64_t block_bytes = 0) {
    const TensorToPut tensor{.name = name,
                             .shape = {"uint8", {bytes.size()}},
                             .data = bytes,
                             .block_bytes = block_bytes,
                             .memory = Placement::kHbm};
    store_->put({&tensor, 1});
  }
  // Nothing is written beside what it is to fill.
  Bytes get_up(const std::string& name) {
    Bytes out(store_->info(name).bytes + 2 * kMargin, std::byte{0x5a});
    const TensorToGet tensor{
        .name = name, .out = std::span(out).subspan(kMargin, out.size() - 2 * kMargin), .memory = Placement::kHbm};
    store_->get({&tensor, 1});
    const auto is_untouched = [](std::byte byte) { return byte == std::byte{0x5a}; };
    EXPECT_TRUE(std::all_of(out.begin(), out.begin() + kMargin, is_untouched));
    EXPECT_TRUE(std::all_of(out.end() - kMargin, out.end(), is_untouched));
    return {out.begin() + kMargin, out.end() - kMargin};
  }
  bool in_hbm(const std::string& name) const { return store_->info(name).in_hbm; }
  std::size_t prefetch_up(const std::string& name) { return store_->prefetch({&name, 1}, Placement::kHbm); }
  // What was prefetched is moved by another thread.
  void wait_until_in_hbm(const std::string& name) const {
    for (int i = 0; i < 5000 && !in_hbm(name); ++i) ::usleep(1000);
    ASSERT_TRUE(in_hbm(name)) << name;
  }
  void expect_budgets() const {
    const TensorStoreStats now = store_->stats();
    EXPECT_LE(now.hbm_bytes, now.hbm_capacity);
    EXPECT_LE(now.host_bytes, now.host_capacity);
    EXPECT_LE(now.nvme_bytes, now.nvme_capacity);
  }
};

}  // namespace spillway::testing
