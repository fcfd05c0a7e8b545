// The stores of several ranks below one directory, rank0 and so on, with known bytes in them; and ranks, threads of
// this process, that open them together.
#pragma once

#include <gtest/gtest.h>

#include <filesystem>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "spillway/error.h"
#include "src/engine/rank_stores.h"
#include "tests/src/comm/thread_ranks.h"
#include "tests/swap/store_fixture.h"

namespace spillway::testing {

inline std::filesystem::path rank_directory(const std::filesystem::path& root, std::uint32_t rank) {
  return root / ("rank" + std::to_string(rank));
}

// Small ones, for tests that open many.
inline StoreShape shape_of_rank(Rank rank) {
  StoreShape shape;
  shape.tiles = {{.count = 2048, .type = DType::kBFloat16, .trainable = true},
                 {.count = 1024, .type = DType::kBFloat16, .trainable = false},
                 {.count = 1024, .type = DType::kBFloat16, .trainable = true}};
  shape.parameters = 2;
  shape.scratch_bytes = 65536;
  shape.identity = {.description = "tiles of ranks", .fingerprint = 7, .rank = rank};
  return shape;
}

// One rank's store and what moves bytes of it; its I/O is what a simulated disk sees.
class RankAtWork {
 public:
  RankAtWork(std::unique_ptr<TileStore> store, Rank rank)
      : shape_(shape_of_rank(rank)), store_(std::move(store)), arena_(std::uint64_t{1} << 20, kPinnedArena) {
    IoQueueOptions options{.engine = IoEngineKind::kThreads, .depth = 2};
    options.stripes = &store_->files().stripes();
    thread_ = std::make_unique<StoreThread>(options, store_->files().pointers(),
                                            std::vector<std::span<std::byte>>{arena_.memory()});
  }

  // Of that step, with bytes of the run's own.
  void write(std::uint64_t run, std::uint64_t step, bool all = false) {
    write_tiles(*store_, shape_, *thread_, arena_, seed_of(run, step), all);
  }
  void commit(std::uint64_t run, std::uint64_t step) {
    write(run, step, step == 0);
    store_->commit(step, std::as_bytes(std::span(&run, 1)), *thread_, arena_.memory());
  }
  TileStore& store() { return *store_; }

  // Which run's bytes of which step it is at; all of them are looked at.
  std::pair<std::uint64_t, std::uint64_t> stands_at() {
    const Manifest& committed = store_->committed();
    std::uint64_t run = 0;
    EXPECT_EQ(committed.blob.size(), sizeof run);
    std::memcpy(&run, committed.blob.data(), sizeof run);
    expect_tiles(*store_, shape_, arena_, seed_of(run, committed.step));
    return {run, committed.step};
  }

 private:
  static std::uint64_t seed_of(std::uint64_t run, std::uint64_t step) { return 1000 * run + step + 1; }

  const StoreShape shape_;
  std::unique_ptr<TileStore> store_;
  HostArena arena_;
  std::unique_ptr<StoreThread> thread_;
};

// Makes a new store of a rank, or takes an old one's place.
inline std::unique_ptr<RankAtWork> new_store(const std::filesystem::path& root, Rank rank, const RunId& run) {
  const StorePaths paths(rank_directory(root, rank.index));
  std::filesystem::create_directories(paths.directories[0]);
  auto store = TileStore::reserve_new(paths, shape_of_rank(rank), TileStore::Existing::kMakesRoom);
  store->make(shape_of_rank(rank), run);
  return std::make_unique<RankAtWork>(std::move(store), rank);
}

// A whole run, committed from step 0 to that one.
inline void make_run(const std::filesystem::path& root, std::uint32_t ranks, std::uint64_t run, std::uint64_t steps) {
  std::vector<std::unique_ptr<RankAtWork>> at_work;
  for (std::uint32_t rank = 0; rank < ranks; ++rank) at_work.push_back(new_store(root, {rank, ranks}, {{run, run}}));
  for (std::uint64_t step = 0; step <= steps; ++step) {
    for (auto& rank : at_work) rank->commit(run, step);
    for (auto& rank : at_work) rank->store().note_all_committed();
  }
}

// Opened again by all: where they stand, which must be the same; or why they refuse, which must be the same as well.
struct Reopened {
  std::optional<std::pair<std::uint64_t, std::uint64_t>> at;
  std::string refused;
  std::optional<Code> code;
};
inline Reopened reopen(const std::filesystem::path& root, std::uint32_t ranks,
                       const std::function<void(RankAtWork&)>& then = {}) {
  std::vector<Reopened> of(ranks);
  run_ranks(ranks, [&](Communicator& communicator) {
    Agreement agreement(&communicator);
    const Rank rank = agreement.rank();
    Reopened& own = of[rank.index];
    try {
      RankAtWork at_work(open_together(rank_directory(root, rank.index), shape_of_rank(rank), agreement), rank);
      own.at = at_work.stands_at();
      if (then) then(at_work);
    } catch (const Error& error) {
      own.refused = error.what();
      own.code = error.code();
    }
  });
  for (const Reopened& one : of) {
    EXPECT_EQ(one.at, of[0].at);
    EXPECT_EQ(one.refused, of[0].refused);
  }
  return of[0];
}

}  // namespace spillway::testing
