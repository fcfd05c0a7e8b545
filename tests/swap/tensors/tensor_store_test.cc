// Named tensors in host memory and in files: what comes out is what was put, whatever leaves, crashes or breaks.
#include "spillway/tensor_store.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "spillway/error.h"
#include "spillway/units.h"
#include "swap/store_files.h"
#include "tests/error_of.h"
#include "tests/seed.h"
#include "tests/swap/store_fixture.h"
#include "tests/swap/tensors/tensor_store_fixture.h"
#include "tests/temp_directory.h"

namespace spillway {
namespace {

using namespace testing;
using ::testing::HasSubstr;

TEST_F(TensorStoreTest, TwentyTimesItsHostMemoryComesBack) {
  open();
  std::map<std::string, Bytes> all;
  std::mt19937_64 random(test_seed());
  for (int i = 0; i < 100; ++i) {
    const std::string name = "t" + std::to_string(i);
    all[name] = bytes_of(i, i == 7 ? 0 : 1 + random() % 600'000);
    put(name, all[name]);
    ASSERT_LE(store_->stats().host_bytes, store_->stats().host_capacity);
  }
  EXPECT_GT(store_->stats().evictions, 50u);
  for (int i = 0; i < 200; ++i) {
    const std::string name = "t" + std::to_string(random() % 100);
    ASSERT_EQ(all[name], get(name)) << name;
  }
  EXPECT_GT(store_->stats().hits, 0u);
  EXPECT_GT(store_->stats().misses, 50u);
}

TEST_F(TensorStoreTest, OneThatIsLargerThanHostMemoryGoesBy) {
  open();
  const Bytes large = bytes_of(1, 7 * kMiB + 12'345);
  put("large", large);
  EXPECT_EQ(large, get("large"));
  EXPECT_FALSE(in_host("large"));
  put("large", bytes_of(2, large.size()));
  store_->commit();
  open();
  EXPECT_EQ(bytes_of(2, large.size()), get("large"));
}

TEST_F(TensorStoreTest, IsWhatTheLastCommitHad) {
  open();
  put("a", bytes_of(1, 100'000));
  put("b", bytes_of(2, 5));
  EXPECT_FALSE(store_->info("a").committed);
  const std::uint64_t first = store_->commit();
  EXPECT_TRUE(store_->info("a").committed);
  put("a", bytes_of(3, 100'000));
  remove("b");
  put("c", bytes_of(4, 10));
  EXPECT_EQ(bytes_of(3, 100'000), get("a"));
  open();
  EXPECT_EQ(bytes_of(1, 100'000), get("a"));
  EXPECT_EQ(bytes_of(2, 5), get("b"));
  EXPECT_FALSE(store_->contains("c"));
  put("a", bytes_of(5, 100'000));
  EXPECT_EQ(first + 1, store_->commit());
  open();
  EXPECT_EQ(bytes_of(5, 100'000), get("a"));
  const TensorShape shape = store_->info("a").shape;
  EXPECT_EQ("uint8", shape.type);
  EXPECT_EQ(std::vector<std::uint64_t>{100'000}, shape.dims);
}

TEST_F(TensorStoreTest, ADamagedByteIsNamedAndNothingElseIsLost) {
  open();
  put("whole", bytes_of(1, 200'000));
  put("broken", bytes_of(2, 200'000));
  store_->commit();
  store_.reset();
  const Bytes broken = bytes_of(2, 200'000);
  damage({broken.begin() + 131'080, broken.begin() + 131'200});
  open();
  for (int i = 0; i < 2; ++i) {
    const Error error = error_of([&] { get("broken"); });
    EXPECT_EQ(Code::kCorrupt, error.code());
    EXPECT_THAT(error.what(), HasSubstr("broken: 65536 bytes from 131072 on are not those that were put"));
  }
  Bytes row(8);
  const std::uint64_t first = 0, bad = 131'080 / 8;
  store_->read_rows("broken", 8, {&first, 1}, row);
  EXPECT_EQ(Bytes(broken.begin(), broken.begin() + 8), row);
  EXPECT_EQ(Code::kCorrupt, error_of([&] { store_->read_rows("broken", 8, {&bad, 1}, row); }).code());
  EXPECT_EQ(bytes_of(1, 200'000), get("whole"));
  put("broken", broken);
  EXPECT_EQ(broken, get("broken"));
}

TEST_F(TensorStoreTest, TheLeastRecentlyUsedLeavesFirst) {
  open();
  const std::size_t size = store_->stats().host_capacity / 4 / 4096 * 4096;
  for (const char* name : {"a", "b", "c", "d"}) put(name, bytes_of(1, size));
  get("a");
  put("e", bytes_of(1, size));
  EXPECT_TRUE(in_host("a"));
  EXPECT_FALSE(in_host("b"));
  // Of those whose next use is known the one that is used last; others before them.
  store_->set_next_use("a", 10);
  store_->set_next_use("c", 30);
  store_->set_next_use("d", 20);
  put("f", bytes_of(1, size));
  EXPECT_FALSE(in_host("e"));
  store_->set_next_use("f", 5);
  put("g", bytes_of(1, size));
  EXPECT_FALSE(in_host("c"));
  EXPECT_TRUE(in_host("a") && in_host("d") && in_host("f"));
}

TEST_F(TensorStoreTest, WhatIsPinnedStays) {
  open();
  const std::size_t size = store_->stats().host_capacity / 4 / 4096 * 4096;
  put("a", bytes_of(1, size));
  store_->pin("a");
  for (int i = 0; i < 8; ++i) put(std::to_string(i), bytes_of(2, size));
  EXPECT_TRUE(in_host("a"));
  put("a", bytes_of(3, size));  // the name is pinned, whatever it stands for
  for (int i = 0; i < 8; ++i) get(std::to_string(i));
  EXPECT_TRUE(in_host("a"));
  for (int i = 0; i < 3; ++i) store_->pin(std::to_string(i));
  EXPECT_EQ(bytes_of(2, size), get("5")) << "which passes";
  const Error full = error_of([&] { store_->pin("5"); });
  EXPECT_EQ(Code::kDoesNotFit, full.code());
  EXPECT_THAT(full.what(), HasSubstr("unpin tensors, or raise host_bytes"));
  store_->unpin("a");
  store_->pin("5");
  EXPECT_FALSE(in_host("a"));
  EXPECT_EQ(Code::kInvalidArgument, error_of([&] { store_->unpin("a"); }).code());
}

TEST_F(TensorStoreTest, WhatIsPinnedAndOnItsWayKeepsNobodyWaiting) {
  open();
  const std::size_t size = store_->stats().host_capacity / 4 / 4096 * 4096;
  for (const char* name : {"a", "b", "c"}) {
    put(name, bytes_of(1, size));
    store_->pin(name);
  }
  EXPECT_EQ(Code::kDoesNotFit, error_of([&] { put("d", bytes_of(2, 2 * size)); }).code());
}

TEST_F(TensorStoreTest, AFullStoreCanBeEmptied) {
  TensorStoreOptions small = options();
  small.nvme_bytes = 2 * kMiB;
  open(small);
  const Error full = error_of([&] {
    for (int i = 0;; ++i) {
      put(std::to_string(i), bytes_of(i, 4096));
      if (i % 50 == 0) store_->commit();
    }
  });
  EXPECT_EQ(Code::kDoesNotFit, full.code());
  for (const TensorInfo& info : store_->list()) remove(info.name);
  store_->commit();
  for (int i = 0; i < 100; ++i) put("again " + std::to_string(i), bytes_of(i, 4096));
  store_->commit();
  open(small);
  EXPECT_EQ(100u, store_->list().size());
}

// What a commit says of them takes room as well: long names, many small ones.
TEST_F(TensorStoreTest, WhatWasPutCanBeCommitted) {
  TensorStoreOptions small = options();
  small.nvme_bytes = 4 * kMiB;
  small.host_bytes = kMiB;
  open(small);
  const std::string tail(2000, 'n');
  std::map<std::string, Bytes> all;
  std::uint64_t next = 0;
  const auto fill = [&](std::size_t size) {
    const Error full = error_of([&] {
      for (;; ++next) {
        const std::string name = std::to_string(next) + tail;
        put(name, bytes_of(next, size));
        all[name] = bytes_of(next, size);
      }
    });
    EXPECT_EQ(full.code(), Code::kDoesNotFit);
  };
  // What host memory alone has when NVMe is full need not fit there.
  const auto drop_what_is_in_host_memory_alone = [&] {
    for (const TensorInfo& info : store_->list()) {
      if (!info.on_nvme) remove(info.name), all.erase(info.name);
    }
  };
  fill(4096);
  drop_what_is_in_host_memory_alone();
  store_->commit();
  EXPECT_GT(all.size(), 500u);
  // In pieces: what is free is between tensors.
  std::erase_if(all, [&, odd = false](const auto& one) mutable {
    odd = !odd;
    if (odd) remove(one.first);
    return odd;
  });
  store_->commit();
  fill(8192);
  drop_what_is_in_host_memory_alone();
  store_->commit();
  open(small);
  ASSERT_EQ(store_->list().size(), all.size());
  for (const auto& [name, bytes] : all) ASSERT_EQ(get(name), bytes);
}

TEST_F(TensorStoreTest, WhatIsFetchedAheadIsThere) {
  open();
  const std::size_t size = store_->stats().host_capacity / 4 / 4096 * 4096;
  std::vector<std::string> names;
  for (int i = 0; i < 8; ++i) {
    names.push_back(std::to_string(i));
    put(names.back(), bytes_of(i, size));
  }
  store_->commit();  // so that all of them may leave at once
  EXPECT_EQ(4u, store_->prefetch(names)) << "the others would drive them out";
  const std::uint64_t misses = store_->stats().misses;
  for (int i = 0; i < 4; ++i) EXPECT_EQ(bytes_of(i, size), get(names[i]));
  EXPECT_EQ(misses, store_->stats().misses);
  // Several at a time, more of them than host memory holds.
  std::vector<Bytes> outs(names.size(), Bytes(size));
  std::vector<TensorToGet> all;
  for (std::size_t i = 0; i < names.size(); ++i) all.push_back({names[i], outs[i]});
  store_->get(all);
  for (std::size_t i = 0; i < names.size(); ++i) EXPECT_EQ(bytes_of(i, size), outs[i]) << i;
}

TEST_F(TensorStoreTest, OneThatMustBeWrittenIsWhileItIsCopied) {
  TensorStoreOptions wanted = options();
  wanted.host_bytes = 16 * kMiB;
  open(wanted);
  const std::size_t size = 9 * kMiB - 100;  // in more than one piece, and more than may wait to be written
  std::map<std::string, Bytes> values;
  for (const std::uint64_t block : {12 * kKiB, 64 * kKiB, kMiB}) {
    const std::string name = std::to_string(block);
    put(name, values.emplace(name, bytes_of(block, size)).first->second, block);
  }
  for (const auto& [name, bytes] : values) EXPECT_EQ(get(name), bytes);
  store_->commit();
  EXPECT_EQ(store_->stats().io.write_bytes, 3 * 9 * kMiB);  // once each
  const std::string again = values.begin()->first;
  put(again, values[again] = bytes_of(7, size), 12 * kKiB);
  put(again, values[again] = bytes_of(8, size), 12 * kKiB);  // while the one before is on its way
  for (const auto& [name, bytes] : values) EXPECT_EQ(get(name), bytes);
  store_->commit();
  open(wanted);
  for (const auto& [name, bytes] : values) EXPECT_EQ(get(name), bytes);
}

TEST_F(TensorStoreTest, SeveralComeBehindOneAnother) {
  open();
  const std::size_t size = 300 * kKiB + 5;
  std::vector<Bytes> values;
  for (std::uint64_t i = 0; i < 12; ++i) put(std::to_string(i), values.emplace_back(bytes_of(i, size)));
  store_->commit();
  std::vector<Bytes> outs(values.size(), Bytes(size));
  std::vector<TensorToGet> wanted;
  for (std::size_t i = 0; i < values.size(); ++i) wanted.push_back({std::to_string(i), outs[i]});
  store_->get(wanted);
  EXPECT_EQ(outs, values);

  store_.reset();
  damage(Bytes(values[7].end() - 32, values[7].end()));
  open();
  outs.assign(values.size(), Bytes(size));
  for (std::size_t i = 0; i < values.size(); ++i) wanted[i].out = outs[i];
  try {
    store_->get(wanted);
    FAIL() << "a damaged byte was not seen";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Code::kCorrupt);
    EXPECT_EQ(error.parts().object, "7");
  }
  EXPECT_TRUE(std::equal(values.begin(), values.begin() + 7, outs.begin()));  // those before it are done
  for (std::size_t i = 8; i < values.size(); ++i) EXPECT_EQ(get(std::to_string(i)), values[i]);
}

TEST_F(TensorStoreTest, RowsComeByThemselves) {
  open();
  constexpr std::uint64_t kRow = 1000, kRows = 5000;  // across blocks
  const Bytes table = bytes_of(9, kRow * kRows);
  put("table", table, 4096);
  store_->commit();
  open();
  std::mt19937_64 random(test_seed());
  std::vector<std::uint64_t> rows = {0, kRows - 1, 0};
  while (rows.size() < 3000) rows.push_back(random() % kRows);
  Bytes out(rows.size() * kRow);
  store_->read_rows("table", kRow, rows, out);
  for (std::size_t i = 0; i < rows.size(); ++i) {
    ASSERT_EQ(0, std::memcmp(out.data() + i * kRow, table.data() + rows[i] * kRow, kRow)) << i;
  }
  EXPECT_LT(store_->stats().io.read_bytes, 3000 * 8192u);
  EXPECT_EQ(0u, store_->stats().host_bytes);
  put("small", bytes_of(1, 3000));
  Bytes row(1000);
  const std::uint64_t two = 2;
  store_->read_rows("small", 1000, {&two, 1}, row);  // from host memory
  const Bytes small = bytes_of(1, 3000);
  EXPECT_EQ(Bytes(small.begin() + 2000, small.end()), row);
}

TEST_F(TensorStoreTest, AFullDriveIsSaidAndNothingIsLost) {
  TensorStoreOptions small = options();
  small.nvme_bytes = 4 * kMiB;
  open(small);
  std::vector<std::string> names;
  const auto fill = [&] {
    for (int i = 0; i < 40; ++i) {
      put(std::to_string(i), bytes_of(i, 300'000));
      names.push_back(std::to_string(i));
    }
  };
  const Error full = error_of(fill);
  EXPECT_EQ(Code::kDoesNotFit, full.code());
  EXPECT_THAT(full.what(), HasSubstr("are free in nvme_bytes; remove tensors, or make the store larger"));
  ASSERT_GT(names.size(), 14u);
  for (std::size_t i = 0; i < names.size(); ++i) EXPECT_EQ(bytes_of(i, 300'000), get(names[i]));
  for (int i = 0; i < 10; ++i) remove(std::to_string(i));
  put("more", bytes_of(100, 300'000));
  store_->commit();
  // What the last commit names stays until the next one.
  for (int i = 10; i < 13; ++i) put(std::to_string(i), bytes_of(i + 50, 300'000));
  store_->commit();
  open(small);
  EXPECT_EQ(bytes_of(62, 300'000), get("12"));
}

TEST_F(TensorStoreTest, WhatCannotBeMeantIsRefusedByName) {
  open();
  put("a", bytes_of(1, 100));
  const auto refused = [&](const std::function<void()>& what, Code code, const char* why) {
    const Error error = error_of(what);
    EXPECT_EQ(code, error.code()) << error.what();
    EXPECT_THAT(error.what(), HasSubstr(why));
  };
  Bytes out(100);
  const Bytes data = bytes_of(2, 100);
  const std::string a = "a", nobody = "nobody";
  refused([&] { get("nobody", out); }, Code::kNotFound, "nobody: is not in the store");
  refused([&] { get("a", std::span(out).first(99)); }, Code::kInvalidArgument, "a: has 100 bytes");
  refused([&] { put("a", bytes_of(1, 101)); }, Code::kInvalidArgument, "a: is uint8 [100] of 100 bytes here");
  const TensorToPut floats{"a", {"float32", {25}}, data};
  refused([&] { store_->put({&floats, 1}); }, Code::kInvalidArgument, "float32 [25] of 100 bytes was given");
  const TensorToPut twice[] = {{"b", {"uint8", {100}}, data}, {"b", {"uint8", {100}}, data}};
  refused([&] { store_->put(twice); }, Code::kInvalidArgument, "b: is named twice in one call");
  EXPECT_FALSE(store_->contains("b"));
  const std::string both[] = {"a", "nobody"};
  refused([&] { store_->remove(both); }, Code::kNotFound, "nobody");
  EXPECT_TRUE(store_->contains("a"));
  const std::uint64_t row = 10;
  refused(
      [&] {
        store_->read_rows("a", 10, {&row, 1}, std::span(out).first(10));
      },
      Code::kInvalidArgument, "a: has 10 rows, and no row 10");
  refused([&] { store_->read_rows("a", 7, {&row, 1}, out); }, Code::kInvalidArgument, "has no rows of 7 bytes");
  refused([&] { store_->pin("nobody"); }, Code::kNotFound, "nobody");
  EXPECT_EQ(bytes_of(1, 100), get("a"));
  refused([&] { TensorStore::open(options()); }, Code::kBusy, "spillway.store");
  store_.reset();
  refused([&] { TensorStore::open(options(OnExisting::kRefuse)); }, Code::kExists, "a store exists");
  open(options(OnExisting::kReplace));
  EXPECT_TRUE(store_->list().empty());
  refused([&] { TensorStore::open({.host_bytes = 100}); }, Code::kInvalidArgument, "host_bytes: is 100");
}

TEST_F(TensorStoreTest, AStoreOfATrainingRunIsLeftAlone) {
  const TempDirectory directory;
  const StoreShape shape = three_tiles();
  TensorStoreOptions wanted = options();
  wanted.paths = {directory.path()};
  {
    const auto tiles = TileStore::create(directory.path(), shape, false);
    StoreThread thread({.stripes = &tiles->files().stripes()}, tiles->files().pointers(), {});
    AlignedBuffer buffer(tiles->commit_buffer_bytes());
    tiles->commit(0, {}, thread, buffer.bytes(), {});
  }
  for (const OnExisting how : {OnExisting::kResume, OnExisting::kReplace}) {
    wanted.on_existing = how;
    EXPECT_THAT(error_of([&] { TensorStore::open(wanted); }).what(), HasSubstr("is the store of a training run"));
  }
  open();
  store_.reset();
  EXPECT_THAT(error_of([&] {
                TileStore::open(std::vector{one_.path(), other_.path()}, shape);
              }).what(),
              HasSubstr("is a store of named tensors"));
}

TEST_F(TensorStoreTest, WithoutFilesItIsHostMemory) {
  open({.host_bytes = 2 * kMiB});
  put("a", bytes_of(1, 1'000'000));
  EXPECT_EQ(bytes_of(1, 1'000'000), get("a"));
  const Error full = error_of([&] { put("b", bytes_of(1, 1'000'000)); });
  EXPECT_EQ(Code::kDoesNotFit, full.code());
  EXPECT_THAT(full.what(), HasSubstr("b: takes 1003520 bytes"));
  EXPECT_EQ(Code::kUnsupported, error_of([&] { store_->commit(); }).code());
  remove("a");
  put("b", bytes_of(2, 1'000'000));
  EXPECT_EQ(bytes_of(2, 1'000'000), get("b"));
}

TEST_F(TensorStoreTest, AForkedProcessIsRefused) {
  open();
  put("a", bytes_of(1, 100));
  const ::pid_t child = ::fork();
  if (child == 0) {
    int result = 1;
    try {
      get("a");
    } catch (const Error& error) {
      result = std::string(error.what()).find("which forked this one") != std::string::npos ? 0 : 2;
    }
    store_.reset();
    ::_exit(result);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  EXPECT_EQ(0, WEXITSTATUS(status));
  EXPECT_EQ(Code::kBusy, error_of([&] { TensorStore::open(options()); }).code()) << "the child has let go of the lock";
  EXPECT_EQ(bytes_of(1, 100), get("a"));
  store_->commit();
}

// Calls in any order, one after the other, against a map; now and then the store is opened again.
TEST_F(TensorStoreTest, IsAMapWhateverIsCalled) {
  std::mt19937_64 random(test_seed());
  open();
  std::map<std::string, Bytes> now, committed;
  std::uint64_t version = 0;
  for (int step = 0; step < 3000; ++step) {
    const std::string name = std::to_string(random() % 24);
    const auto found = now.find(name);
    switch (random() % 10) {
      case 0:
      case 1:
      case 2: {
        const std::size_t size = found != now.end()  ? found->second.size()
                                 : random() % 8 == 0 ? 1'600'000 + random() % 800'000
                                                     : random() % 400'000;
        now[name] = bytes_of(++version, size);
        put(name, now[name], random() % 2 * 4096);
        break;
      }
      case 3:
        if (found != now.end() && random() % 2 == 0) remove(name), now.erase(found);
        break;
      case 4:
        if (found != now.end()) store_->prefetch({&name, 1});
        break;
      case 5:
        if (found != now.end()) store_->set_next_use(name, random() % 100);
        break;
      case 6:
        if (found != now.end() && found->second.size() > 4) {
          const std::uint64_t rows[] = {random() % found->second.size(), found->second.size() - 1};
          Bytes out(2);
          store_->read_rows(name, 1, rows, out);
          ASSERT_EQ(found->second[rows[0]], out[0]);
          ASSERT_EQ(found->second[rows[1]], out[1]);
        }
        break;
      case 7:
        if (random() % 8 == 0) store_->commit(), committed = now;
        break;
      case 8:
        if (random() % 100 == 0) open(), now = committed;
        break;
      default:
        if (found == now.end()) break;
        ASSERT_EQ(found->second, get(name)) << name;
        break;
    }
    ASSERT_LE(store_->stats().host_bytes, store_->stats().host_capacity);
  }
  ASSERT_EQ(now.size(), store_->list().size());
  for (const auto& [name, bytes] : now) ASSERT_EQ(bytes, get(name)) << name;
}

}  // namespace
}  // namespace spillway
