// How fast memory is hashed and copied, from memory and not from a cache: what moving bytes costs the cores on the
// `host` device. bench/step_bench.py asks for these rates in the run that it judges.
//
//   link_rates [--bytes SIZE] [--rounds N] [--tiny]
//
// One JSON line. `one` is the rate of a core that works alone, `all` that of all of them together, each on a range of
// its own; the best of the rounds. Hashed are granules of 256 KiB, as the store does, copied are pieces of 512 KiB
// between two arenas, as the `host` device does. Each arena must be larger than the last cache.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <span>

#include "kernels/checksum.h"
#include "kernels/host_memory.h"
#include "kernels/workers.h"
#include "spillway/units.h"

namespace spillway {
namespace {

constexpr std::uint64_t kPieceBytes = 512 * kKiB;
static_assert(kPieceBytes % kGranuleBytes == 0);

struct Settings {
  std::uint64_t bytes = 1 * kGiB;  // of each arena
  unsigned rounds = 5;
  bool tiny = false;
};

// Bytes per second of `work(piece)` over all pieces of an arena.
double best_rate(const Settings& settings, HostWorkers& workers, auto&& work) {
  const std::uint64_t pieces = settings.bytes / kPieceBytes;
  double best = 0;
  for (unsigned round = 0; round < settings.rounds; ++round) {
    const auto start = std::chrono::steady_clock::now();
    workers.parallel_for(pieces, work);
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    best = std::max(best, static_cast<double>(pieces * kPieceBytes) / seconds.count());
  }
  return best;
}

void bench(const Settings& settings) {
  const HostArena from(settings.bytes, kPinnedArena), to(settings.bytes, kHbmArena);
  // Pages that were never written are all one page, which any cache holds.
  std::memset(from.memory().data(), 1, settings.bytes);
  std::memset(to.memory().data(), 2, settings.bytes);
  const auto piece_of = [](const HostArena& arena, std::size_t piece) {
    return arena.memory().subspan(piece * kPieceBytes, kPieceBytes);
  };
  std::atomic<std::uint64_t> sum = 0;  // a result that nobody wants need not be computed
  const auto hash = [&](std::size_t piece) {
    for (std::uint64_t at = 0; at < kPieceBytes; at += kGranuleBytes) {
      sum ^= granule_checksum(piece_of(from, piece).subspan(at, kGranuleBytes));
    }
  };
  const auto copy = [&](std::size_t piece) {
    std::memcpy(piece_of(to, piece).data(), piece_of(from, piece).data(), kPieceBytes);
  };
  const auto one = create_workers(1), all = create_workers(0);
  fmt::print(
      "{{\"name\": \"link_rates\", \"arena_bytes\": {}, \"huge_pages\": {}, \"cores\": {}, \"hash_one_gb_per_s\": "
      "{:.3f}, "
      "\"hash_all_gb_per_s\": {:.3f}, \"copy_one_gb_per_s\": {:.3f}, \"copy_all_gb_per_s\": {:.3f}}}\n",
      settings.bytes, from.huge_pages() && to.huge_pages(), all->threads(), best_rate(settings, *one, hash) / 1e9,
      best_rate(settings, *all, hash) / 1e9, best_rate(settings, *one, copy) / 1e9,
      best_rate(settings, *all, copy) / 1e9);
}

}  // namespace
}  // namespace spillway

int main(int argc, char** argv) {
  spillway::Settings settings;
  CLI::App app("Hashes and copies memory; prints the rates as a JSON line.");
  app.add_option("--bytes", settings.bytes, "bytes of each of two arenas")->transform(CLI::AsSizeValue(false));
  app.add_option("--rounds", settings.rounds, "passes over them; the best one counts")->check(CLI::Range(1u, 1000u));
  app.add_flag("--tiny", settings.tiny, "one small iteration, as the test suite runs it");
  CLI11_PARSE(app, argc, argv);
  if (settings.tiny) settings = {.bytes = 4 * spillway::kMiB, .rounds = 1, .tiny = true};
  try {
    spillway::bench(settings);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "link_rates: %s\n", error.what());
    return 1;
  }
}
