// Named tensors in HBM: what comes out is what was put, whoever leaves which tier, and no budget is ever exceeded. With
// the `host` device, where RAM stands for HBM and for device memory of the caller's.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "kernels/cuda/loader.h"
#include "spillway/error.h"
#include "spillway/units.h"
#include "tests/error_of.h"
#include "tests/seed.h"
#include "tests/swap/tensors/tensor_store_fixture.h"

namespace spillway {
namespace {

using namespace testing;
using ::testing::HasSubstr;

TEST_F(TensorStoreHbmTest, WithoutHbmThereIsNoDevice) {
  open();
  EXPECT_EQ(store_->device(), std::nullopt);
  EXPECT_EQ(store_->stats().hbm_capacity, 0u);
  put("a", bytes_of(1, 100));
  const Error refused = error_of([&] { prefetch_up("a"); });
  EXPECT_EQ(refused.code(), Code::kUnsupported);
  EXPECT_THAT(refused.what(), HasSubstr("has no HBM; give hbm_bytes"));
  EXPECT_EQ(Code::kUnsupported, error_of([&] { put_up("b", bytes_of(1, 100)); }).code());
  EXPECT_EQ(Code::kUnsupported, error_of([&] { get_up("a"); }).code());
  EXPECT_EQ(Code::kUnsupported, error_of([&] { store_->pin("a", Placement::kHbm); }).code());
  EXPECT_FALSE(store_->contains("b"));
}

TEST_F(TensorStoreHbmTest, HasExactlyItsBytes) {
  TensorStoreOptions wanted = with_hbm();
  wanted.hbm_bytes = kMiB + 5000;
  open(wanted);
  EXPECT_EQ(store_->device(), DeviceKind::kHost);
  EXPECT_EQ(store_->stats().hbm_capacity, kMiB + 4096);  // whole pages of it
  put_up("all", bytes_of(1, kMiB + 4096));
  EXPECT_EQ(store_->stats().hbm_bytes, kMiB + 4096);
  EXPECT_TRUE(in_hbm("all"));
  wanted.hbm_bytes = 1000;
  wanted.paths.clear();
  const Error small = error_of([&] { TensorStore::open(wanted); });
  EXPECT_EQ(small.code(), Code::kInvalidArgument);
  EXPECT_THAT(small.what(), HasSubstr("hbm_bytes: is 1000"));
}

// Twenty times HBM, eight times all memory: HBM → host → NVMe, and all the way back.
TEST_F(TensorStoreHbmTest, TwentyTimesItsHbmComesBack) {
  open(with_hbm());
  std::map<std::string, Bytes> all;
  std::mt19937_64 random(test_seed());
  for (int i = 0; i < 120; ++i) {
    const std::string name = "t" + std::to_string(i);
    all[name] = bytes_of(i, i == 7 ? 0 : 1 + random() % 600'000);
    put_up(name, all[name]);
    ASSERT_TRUE(in_hbm(name));
    expect_budgets();
  }
  EXPECT_GT(store_->stats().hbm_evictions, 80u);
  EXPECT_GT(store_->stats().evictions, 60u);
  for (int i = 0; i < 300; ++i) {
    const std::string name = "t" + std::to_string(random() % 120);
    ASSERT_EQ(all[name], random() % 2 == 0 ? get(name) : get_up(name)) << name;
    expect_budgets();
  }
  EXPECT_GT(store_->stats().hbm_hits, 0u);
  EXPECT_GT(store_->stats().hits, 0u);
  EXPECT_GT(store_->stats().misses, 0u);
}

TEST_F(TensorStoreHbmTest, WithoutFilesItIsHbmAndHostMemory) {
  open(with_hbm(4 * kMiB, false));
  std::map<std::string, Bytes> all;
  for (int i = 0; i < 10; ++i) {  // as much as both have
    const std::string name = std::to_string(i);
    put_up(name, all[name] = bytes_of(i, 500'000));
  }
  for (int round = 0; round < 3; ++round) {
    for (const auto& [name, bytes] : all) ASSERT_EQ(round == 1 ? get_up(name) : get(name), bytes) << name;
  }
  const Error full = error_of([&] { put_up("more", bytes_of(99, 500'000)); });
  EXPECT_EQ(full.code(), Code::kDoesNotFit);
  EXPECT_THAT(full.what(), HasSubstr("more: takes 503808 bytes"));
  for (const auto& [name, bytes] : all) EXPECT_EQ(get(name), bytes) << name;
  remove("3");
  put_up("more", bytes_of(99, 500'000));
  EXPECT_EQ(get("more"), bytes_of(99, 500'000));
}

TEST_F(TensorStoreHbmTest, TheLeastRecentlyUsedLeavesFirst) {
  open(with_hbm());
  const std::size_t size = store_->stats().hbm_capacity / 4;
  for (const char* name : {"a", "b", "c", "d"}) put_up(name, bytes_of(1, size));
  get_up("a");
  put_up("e", bytes_of(1, size));
  EXPECT_TRUE(in_hbm("a"));
  EXPECT_FALSE(in_hbm("b"));
  EXPECT_TRUE(in_host("b"));
  store_->set_next_use("a", 10);
  store_->set_next_use("c", 30);
  store_->set_next_use("d", 20);
  put_up("f", bytes_of(1, size));
  EXPECT_FALSE(in_hbm("e"));
  store_->set_next_use("f", 5);
  put_up("g", bytes_of(1, size));
  EXPECT_FALSE(in_hbm("c"));
  EXPECT_TRUE(in_hbm("a") && in_hbm("d") && in_hbm("f"));
}

TEST_F(TensorStoreHbmTest, OneThatIsLargerThanATierPasses) {
  open(with_hbm(kMiB));  // HBM is larger than host memory
  const Bytes middle = bytes_of(1, 1'500'000), large = bytes_of(2, 5 * kMiB + 123);
  put_up("middle", middle, 12 * kKiB);  // larger than host memory
  EXPECT_TRUE(in_hbm("middle"));
  put_up("large", large);  // than HBM, too
  EXPECT_FALSE(in_hbm("large") || in_host("large"));
  EXPECT_EQ(get("middle"), middle);
  EXPECT_EQ(get_up("large"), large);
  EXPECT_EQ(get("large"), large);
  put_up("other", bytes_of(3, 1'500'000));  // drives it out, past host memory
  EXPECT_FALSE(in_hbm("middle"));
  EXPECT_TRUE(store_->info("middle").on_nvme);
  EXPECT_EQ(get("middle"), middle);
  EXPECT_EQ(get_up("middle"), middle);
  EXPECT_TRUE(in_hbm("middle"));
  EXPECT_EQ(get_up("other"), bytes_of(3, 1'500'000));
  store_->commit();
  open(with_hbm(kMiB));
  EXPECT_EQ(get_up("middle"), middle);
  EXPECT_EQ(get_up("large"), large);
  const Error small = error_of([&] { store_->pin("large", Placement::kHbm); });
  EXPECT_EQ(small.code(), Code::kDoesNotFit);
  EXPECT_THAT(small.what(), HasSubstr("large: is larger than HBM; raise hbm_bytes"));
  // Without files there is no way out for it.
  open(with_hbm(kMiB, false));
  put_up("middle", middle);
  EXPECT_EQ(Code::kDoesNotFit, error_of([&] { put_up("other", bytes_of(3, 1'500'000)); }).code());
  EXPECT_EQ(get_up("middle"), middle);
}

TEST_F(TensorStoreHbmTest, WhatIsPrefetchedIsThereOrOnItsWay) {
  open(with_hbm());
  const std::size_t size = store_->stats().hbm_capacity / 4;
  std::vector<std::string> names;
  for (int i = 0; i < 12; ++i) put(names.emplace_back(std::to_string(i)), bytes_of(i, size));
  store_->commit();
  open(with_hbm());
  EXPECT_EQ(4u, store_->prefetch(names, Placement::kHbm)) << "the others would drive them out";
  for (int i = 0; i < 4; ++i) wait_until_in_hbm(names[i]);
  EXPECT_EQ(4u, store_->prefetch(names, Placement::kHbm));
  const TensorStoreStats before = store_->stats();
  for (int i = 0; i < 4; ++i) EXPECT_EQ(bytes_of(i, size), get_up(names[i]));
  EXPECT_EQ(store_->stats().hbm_hits, before.hbm_hits + 4);
  EXPECT_EQ(store_->stats().misses, before.misses);
  EXPECT_EQ(store_->stats().io.read_bytes, before.io.read_bytes);
  // A use waits for what is on its way.
  for (int round = 0; round < 20; ++round) {
    for (int i = 4; i < 12; ++i) {
      const std::string& name = names[static_cast<std::size_t>(i)];
      prefetch_up(name);
      ASSERT_EQ(bytes_of(i, size), round % 2 == 0 ? get_up(name) : get(name));
    }
  }
}

// So that a prefetch finds room: what HBM alone has is copied to host memory while nobody waits for that.
TEST_F(TensorStoreHbmTest, HalfOfHbmIsCopiedDownBehind) {
  open(with_hbm());
  const std::size_t size = store_->stats().hbm_capacity / 8;
  put("next", bytes_of(99, size));
  for (int i = 0; i < 8; ++i) put_up(std::to_string(i), bytes_of(i, size));
  const auto both = [&] {
    return std::ranges::count_if(store_->list(), [](const auto& info) { return info.in_hbm && info.in_host; });
  };
  for (int i = 0; i < 5000 && both() < 4; ++i) ::usleep(1000);
  EXPECT_EQ(both(), 4);
  EXPECT_EQ(1u, prefetch_up("next"));
  wait_until_in_hbm("next");
  EXPECT_FALSE(in_hbm("0"));
  for (int i = 0; i < 8; ++i) EXPECT_EQ(get(std::to_string(i)), bytes_of(i, size));
}

TEST_F(TensorStoreHbmTest, WhatIsPinnedCanBeLookedAt) {
  open(with_hbm());
  const std::size_t size = store_->stats().hbm_capacity / 4;
  put("a", bytes_of(1, size - 100));
  const auto there = store_->pin("a", Placement::kHbm);
  EXPECT_TRUE(store_->info("a").pinned_in_hbm);
  EXPECT_FALSE(store_->info("a").pinned);
  for (int i = 0; i < 8; ++i) put_up(std::to_string(i), bytes_of(i, size));
  EXPECT_TRUE(in_hbm("a"));
  EXPECT_EQ(Bytes(there.begin(), there.end()), bytes_of(1, size - 100));
  for (const auto& refused :
       {error_of([&] { put("a", bytes_of(2, size - 100)); }), error_of([&] { put_up("a", bytes_of(2, size - 100)); }),
        error_of([&] { remove("a"); })}) {
    EXPECT_EQ(refused.code(), Code::kInvalidArgument);
    EXPECT_THAT(refused.what(), HasSubstr("a: is pinned in HBM, whose memory is in use; unpin it first"));
  }
  for (int i = 0; i < 3; ++i) store_->pin(std::to_string(i), Placement::kHbm);
  EXPECT_EQ(get_up("5"), bytes_of(5, size)) << "which passes";
  put_up("6", bytes_of(7, size));
  EXPECT_TRUE(in_host("6")) << "HBM has no room";
  const Error full = error_of([&] { store_->pin("5", Placement::kHbm); });
  EXPECT_EQ(full.code(), Code::kDoesNotFit);
  EXPECT_THAT(full.what(), HasSubstr("are free in hbm_bytes, 2097152 are pinned; unpin tensors there, or raise"));
  EXPECT_EQ(0u, prefetch_up("5"));
  store_->pin("a", Placement::kHbm);
  store_->unpin("a", Placement::kHbm);
  EXPECT_EQ(Code::kInvalidArgument, error_of([&] { remove("a"); }).code()) << "twice pinned, once unpinned";
  store_->unpin("a", Placement::kHbm);
  store_->pin("5", Placement::kHbm);
  EXPECT_FALSE(in_hbm("a"));
  EXPECT_EQ(Code::kInvalidArgument, error_of([&] { store_->unpin("a", Placement::kHbm); }).code());
  put("a", bytes_of(3, size - 100));
  const auto in_host_memory = store_->pin("a");
  EXPECT_EQ(Bytes(in_host_memory.begin(), in_host_memory.end()), bytes_of(3, size - 100));
  put_up("a", bytes_of(4, size - 100));
  EXPECT_TRUE(in_host("a")) << "the name is pinned, whatever it stands for";
  EXPECT_EQ(get("a"), bytes_of(4, size - 100));
}

TEST_F(TensorStoreHbmTest, ACommitHasWhatHbmAloneHas) {
  open(with_hbm());
  put_up("up", bytes_of(1, 700'001));
  put_up("odd", bytes_of(2, 5));
  put("down", bytes_of(3, 100'000));
  const std::uint64_t before = store_->stats().evictions;
  store_->commit();
  EXPECT_TRUE(store_->info("up").committed);
  EXPECT_FALSE(in_host("up")) << "it passes host memory";
  EXPECT_EQ(store_->stats().evictions, before);
  put_up("up", bytes_of(4, 700'001));
  EXPECT_FALSE(store_->info("up").committed);
  EXPECT_EQ(get_up("up"), bytes_of(4, 700'001));
  open(with_hbm());
  EXPECT_EQ(get("up"), bytes_of(1, 700'001));
  EXPECT_EQ(get_up("odd"), bytes_of(2, 5));
  EXPECT_EQ(get("down"), bytes_of(3, 100'000));
}

TEST_F(TensorStoreHbmTest, ADamagedByteDoesNotComeToHbm) {
  open(with_hbm());
  const Bytes broken = bytes_of(2, 200'000);
  put_up("whole", bytes_of(1, 200'000));
  put_up("broken", broken);
  store_->commit();
  store_.reset();
  damage({broken.begin() + 131'080, broken.begin() + 131'200});
  open(with_hbm());
  prefetch_up("broken");
  for (const auto& failed :
       {error_of([&] { get_up("broken"); }), error_of([&] { store_->pin("broken", Placement::kHbm); })}) {
    EXPECT_EQ(failed.code(), Code::kCorrupt);
    EXPECT_THAT(failed.what(), HasSubstr("broken: 65536 bytes from 131072 on are not those that were put"));
  }
  EXPECT_FALSE(in_hbm("broken"));
  EXPECT_EQ(get_up("whole"), bytes_of(1, 200'000));
  put_up("broken", broken);
  EXPECT_EQ(get_up("broken"), broken);
}

TEST_F(TensorStoreHbmTest, RowsComeFromThere) {
  open(with_hbm());
  constexpr std::uint64_t kRow = 1000, kRows = 1000;  // less than half of HBM: no copy below it
  const Bytes table = bytes_of(9, kRow * kRows);
  put_up("table", table);
  std::mt19937_64 random(test_seed());
  std::vector<std::uint64_t> rows = {0, kRows - 1, 0};
  while (rows.size() < 3000) rows.push_back(random() % kRows);
  Bytes out(rows.size() * kRow);
  store_->read_rows("table", kRow, rows, out);
  for (std::size_t i = 0; i < rows.size(); ++i) {
    ASSERT_EQ(0, std::memcmp(out.data() + i * kRow, table.data() + rows[i] * kRow, kRow)) << i;
  }
  EXPECT_EQ(store_->stats().host_bytes, 0u);
}

// Calls in any order, one after the other, against a map; now and then the store is opened again.
TEST_F(TensorStoreHbmTest, IsAMapWhateverIsCalled) {
  for (const bool files : {true, false}) {
    std::mt19937_64 random(test_seed());
    const TensorStoreOptions wanted = with_hbm(files ? 2 * kMiB : 64 * kMiB, files);
    open(wanted);
    std::map<std::string, Bytes> now, committed;
    std::map<std::string, std::span<const std::byte>> pinned;
    std::uint64_t version = 0;
    for (int step = 0; step < 3000; ++step) {
      const std::string name = std::to_string(random() % 24);
      const auto found = now.find(name);
      const bool is_there = found != now.end(), is_pinned = pinned.contains(name);
      switch (random() % 12) {
        case 0:
        case 1:
        case 2: {
          if (is_pinned) break;
          const std::size_t size = is_there            ? found->second.size()
                                   : random() % 8 == 0 ? 1'400'000 + random() % 1'200'000
                                                       : random() % 300'000;
          now[name] = bytes_of(++version, size);
          const std::uint64_t block = random() % 2 * 4096;
          random() % 2 == 0 ? put(name, now[name], block) : put_up(name, now[name], block);
          break;
        }
        case 3:
          if (is_there && !is_pinned && random() % 2 == 0) remove(name), now.erase(found);
          break;
        case 4:
          if (is_there) store_->prefetch({&name, 1}, random() % 2 == 0 ? Placement::kHbm : Placement::kHost);
          break;
        case 5:
          if (is_there) store_->set_next_use(name, random() % 100);
          break;
        case 6:
          if (is_there && found->second.size() > 4) {
            const std::uint64_t rows[] = {random() % found->second.size(), found->second.size() - 1};
            Bytes out(2);
            store_->read_rows(name, 1, rows, out);
            ASSERT_EQ(found->second[rows[0]], out[0]);
            ASSERT_EQ(found->second[rows[1]], out[1]);
          }
          break;
        case 7:
          if (files && random() % 8 == 0) store_->commit(), committed = now;
          break;
        case 8:
          if (files && random() % 100 == 0) {
            pinned.clear();
            open(wanted), now = committed;
          }
          break;
        case 9:
          if (is_pinned) {
            ASSERT_TRUE(std::ranges::equal(found->second, pinned[name])) << name;
            store_->unpin(name, Placement::kHbm);
            pinned.erase(name);
          } else if (is_there && pinned.size() < 3 && found->second.size() < 300'000) {
            pinned[name] = store_->pin(name, Placement::kHbm);
          }
          break;
        case 10:
          if (!is_there) break;
          ASSERT_EQ(found->second, get_up(name)) << name;
          break;
        default:
          if (!is_there) break;
          ASSERT_EQ(found->second, get(name)) << name;
          break;
      }
      expect_budgets();
    }
    ASSERT_EQ(now.size(), store_->list().size());
    for (const auto& [name, bytes] : now) {
      ASSERT_EQ(bytes, get(name)) << name;
      ASSERT_EQ(bytes, get_up(name)) << name;
    }
    for (const auto& [name, memory] : pinned) ASSERT_TRUE(std::ranges::equal(now[name], memory)) << name;
  }
}

TEST_F(TensorStoreHbmTest, AForkedProcessIsRefused) {
  open(with_hbm());
  put_up("a", bytes_of(1, 100));
  const ::pid_t child = ::fork();
  if (child == 0) {
    const Error error = error_of([&] { get("a"); });
    store_.reset();
    ::_exit(std::string(error.what()).find("which forked this one") != std::string::npos ? 0 : 1);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  EXPECT_EQ(get_up("a"), bytes_of(1, 100));
}

TEST_F(TensorStoreHbmTest, WithoutAGpuItSaysSo) {
  TensorStoreOptions wanted = with_hbm();
  wanted.device = std::nullopt;
  open(wanted);
  const bool gpu = cuda_unavailable().empty();
  EXPECT_EQ(store_->device(), gpu ? DeviceKind::kCuda : DeviceKind::kHost);
  store_.reset();
  if (gpu) return;
  wanted.device = DeviceKind::kCuda;
  wanted.on_existing = OnExisting::kReplace;
  const Error none = error_of([&] { open(wanted); });
  EXPECT_EQ(none.code(), Code::kUnsupported);
  EXPECT_THAT(none.what(), HasSubstr(cuda_unavailable()));
  open(options(OnExisting::kResume));  // the store is as it was
}

}  // namespace
}  // namespace spillway
