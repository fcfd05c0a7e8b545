// What is true of a store of named tensors whoever calls at the same time, and whenever its process ends.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <map>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "spillway/error.h"
#include "tests/seed.h"
#include "tests/swap/tensors/tensor_store_fixture.h"

namespace spillway {
namespace {

using namespace testing;

// Threads with names of their own, and one that commits: what is read is what was put.
TEST_F(TensorStoreTest, ThreadsDoNotSeeEachOther) {
  open();
  std::vector<std::thread> threads;
  std::atomic<bool> over = false;
  for (int thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&, thread] {
      std::mt19937_64 random(thread);
      std::map<std::string, Bytes> own;
      for (int step = 0; step < 150; ++step) {
        const std::string name = std::to_string(thread) + "." + std::to_string(random() % 5);
        const auto found = own.find(name);
        if (found == own.end() || random() % 3 == 0) {
          own[name] = bytes_of(random(), found == own.end() ? 1 + random() % 300'000 : found->second.size());
          put(name, own[name]);
        } else if (random() % 8 == 0) {
          remove(name);
          own.erase(found);
        } else if (random() % 4 == 0) {
          store_->prefetch({&name, 1});
        } else {
          ASSERT_EQ(found->second, get(name));
        }
      }
    });
  }
  std::thread committer([&] {
    while (!over) store_->commit();
  });
  // What is shared changes as a whole.
  threads.emplace_back([&] {
    for (int i = 0; i < 100; ++i) put("shared", Bytes(500'000, static_cast<std::byte>(i)));
  });
  threads.emplace_back([&] {
    for (int i = 0; i < 100; ++i) {
      if (!store_->contains("shared")) continue;
      const Bytes bytes = get("shared");
      ASSERT_EQ(bytes.size(), static_cast<std::size_t>(std::ranges::count(bytes, bytes[0])));
    }
  });
  for (std::thread& thread : threads) thread.join();
  over = true;
  committer.join();
}

// A process that is killed at any moment leaves one of the two newest commits that it knew of, whole.
TEST_F(TensorStoreTest, AKillLeavesACommit) {
  const char* given = std::getenv("SPILLWAY_KILLS");
  const int kills = given != nullptr ? std::atoi(given) : 20;
  std::mt19937_64 random(test_seed());
  std::uint64_t known = 0;
  for (int kill = 0; kill < kills; ++kill) {
    int pipe[2];
    ASSERT_EQ(0, ::pipe(pipe));
    const ::pid_t child = ::fork();
    if (child == 0) {
      open();
      for (std::uint64_t version = known + 1;; ++version) {
        for (int i = 0; i < 8; ++i) put(std::to_string(i), bytes_of(version * 8 + i, 200'000 + i));
        put("version", bytes_of(version, 16));
        store_->commit();
        if (::write(pipe[1], &version, sizeof version) != sizeof version) ::_exit(1);
      }
    }
    ::close(pipe[1]);
    std::uint64_t version = 0;
    // Half of them come to a commit at least.
    if (kill % 2 == 1 && ::read(pipe[0], &version, sizeof version) == sizeof version) known = version;
    ::usleep(static_cast<useconds_t>(random() % 60'000 + 20'000));
    ::kill(child, SIGKILL);
    ::waitpid(child, nullptr, 0);
    while (::read(pipe[0], &version, sizeof version) == sizeof version) known = version;
    ::close(pipe[0]);
    open();
    if (!store_->contains("version")) {
      ASSERT_EQ(0u, known);
      store_.reset();
      continue;
    }
    const Bytes marker = get("version");
    if (marker == bytes_of(known + 1, 16)) ++known;
    ASSERT_EQ(bytes_of(known, 16), marker);
    for (int i = 0; i < 8; ++i) ASSERT_EQ(bytes_of(known * 8 + i, 200'000 + i), get(std::to_string(i)));
    store_.reset();
  }
  EXPECT_GT(known, 0u);
}

// Threads with names of their own, in all tiers, and one that commits: what is read is what was put.
TEST_F(TensorStoreHbmTest, ThreadsDoNotSeeEachOther) {
  open(with_hbm());
  std::vector<std::thread> threads;
  std::atomic<bool> over = false;
  for (int thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&, thread] {
      std::mt19937_64 random(thread);
      std::map<std::string, Bytes> own;
      for (int step = 0; step < 200; ++step) {
        const std::string name = std::to_string(thread) + "." + std::to_string(random() % 5);
        const auto found = own.find(name);
        const bool up = random() % 2 == 0;
        if (found == own.end() || random() % 3 == 0) {
          own[name] = bytes_of(random(), found == own.end() ? 1 + random() % 300'000 : found->second.size());
          up ? put_up(name, own[name]) : put(name, own[name]);
        } else if (random() % 8 == 0) {
          remove(name);
          own.erase(found);
        } else if (random() % 4 == 0) {
          store_->prefetch({&name, 1}, up ? Placement::kHbm : Placement::kHost);
        } else if (thread == 0 && random() % 4 == 0) {
          const auto memory = store_->pin(name, Placement::kHbm);
          ASSERT_TRUE(std::ranges::equal(found->second, memory));
          store_->unpin(name, Placement::kHbm);
        } else {
          ASSERT_EQ(found->second, up ? get_up(name) : get(name));
        }
      }
    });
  }
  std::thread committer([&] {
    while (!over) {
      store_->commit();
      expect_budgets();
    }
  });
  // What is shared changes as a whole.
  threads.emplace_back([&] {
    for (int i = 0; i < 100; ++i) {
      const Bytes bytes(500'000, static_cast<std::byte>(i));
      i % 2 == 0 ? put_up("shared", bytes) : put("shared", bytes);
    }
  });
  threads.emplace_back([&] {
    for (int i = 0; i < 100; ++i) {
      if (!store_->contains("shared")) continue;
      const Bytes bytes = i % 2 == 0 ? get_up("shared") : get("shared");
      ASSERT_EQ(bytes.size(), static_cast<std::size_t>(std::ranges::count(bytes, bytes[0])));
    }
  });
  for (std::thread& thread : threads) thread.join();
  over = true;
  committer.join();
}

// One of several that is put anew in another size while those before it are copied is refused, and nothing is changed.
TEST_F(TensorStoreHbmTest, AnotherSizeMeanwhileIsSeen) {
  for (const Placement memory : {Placement::kHost, Placement::kHbm}) {
    open(with_hbm());
    const auto allowed = [](const auto& call) {
      try {
        call();
      } catch (const Error& error) {
        EXPECT_TRUE(error.code() == Code::kInvalidArgument || error.code() == Code::kNotFound) << error.what();
      }
    };
    const auto put_all = [&](const std::map<std::string, Bytes>& values) {
      std::vector<TensorToPut> all;
      for (const auto& [name, bytes] : values)
        all.push_back({.name = name, .shape = {"uint8", {bytes.size()}}, .data = bytes, .memory = memory});
      store_->put(all);
    };
    const auto expect_whole = [&] {
      const Bytes bytes = get("y");
      EXPECT_EQ(bytes.size(), static_cast<std::size_t>(std::ranges::count(bytes, bytes[0])));
    };
    std::thread other([&] {
      for (int i = 0; i < 300; ++i) {
        const auto value = static_cast<std::byte>(i);
        allowed([&] { put_all({{"x", Bytes(900'000, value)}, {"y", Bytes(100'000, value)}}); });
        allowed(expect_whole);
      }
    });
    for (int i = 0; i < 300; ++i) {
      allowed([&] { remove("y"); });
      ::usleep(static_cast<useconds_t>(i % 7 * 50));
      allowed([&] { put_all({{"y", Bytes(1, static_cast<std::byte>(i))}}); });
      ::usleep(static_cast<useconds_t>(i % 5 * 50));
      allowed(expect_whole);
      expect_budgets();
    }
    other.join();
    for (const TensorInfo& info : store_->list()) remove(info.name);
    EXPECT_EQ(store_->stats().host_bytes + store_->stats().hbm_bytes, 0u);
  }
}

// A process that is killed at any moment leaves one of the two newest commits that it knew of, also of what only its
// HBM had.
TEST_F(TensorStoreHbmTest, AKillLeavesACommit) {
  std::mt19937_64 random(test_seed());
  open(with_hbm());  // whose making is not what is killed
  store_.reset();
  std::uint64_t known = 0;
  for (int kill = 0; kill < 10; ++kill) {
    int pipe[2];
    ASSERT_EQ(0, ::pipe(pipe));
    const ::pid_t child = ::fork();
    if (child == 0) {
      open(with_hbm());
      for (std::uint64_t version = known + 1;; ++version) {
        for (int i = 0; i < 8; ++i) put_up(std::to_string(i), bytes_of(version * 8 + i, 200'000 + i));
        store_->commit();
        if (::write(pipe[1], &version, sizeof version) != sizeof version) ::_exit(1);
      }
    }
    ::close(pipe[1]);
    std::uint64_t version = 0;
    if (kill % 2 == 1 && ::read(pipe[0], &version, sizeof version) == sizeof version) known = version;
    ::usleep(static_cast<useconds_t>(random() % 60'000 + 20'000));
    ::kill(child, SIGKILL);
    ::waitpid(child, nullptr, 0);
    while (::read(pipe[0], &version, sizeof version) == sizeof version) known = version;
    ::close(pipe[0]);
    open(with_hbm());
    if (!store_->contains("0")) {
      ASSERT_EQ(0u, known);
    } else {
      if (get("0") == bytes_of((known + 1) * 8, 200'000)) ++known;
      for (int i = 0; i < 8; ++i) ASSERT_EQ(bytes_of(known * 8 + i, 200'000 + i), get_up(std::to_string(i)));
    }
    store_.reset();
  }
  EXPECT_GT(known, 0u);
}

}  // namespace
}  // namespace spillway
