// How fast a queue moves the bytes of one file, and what that costs in CPU. One JSON line per mode. The peer is fio
// with the same block, depth and engine on the same file: bench/aio_compare.py runs both in turns.
#include <fmt/format.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "spillway/error.h"
#include "spillway/io_file.h"
#include "spillway/io_queue.h"
#include "spillway/units.h"
#include "tools/drive/load.h"

namespace spillway {
namespace {

using Clock = std::chrono::steady_clock;

struct Settings {
  std::string path;  // empty: a file in the temporary directory, removed at the end
  std::string engine = "auto", mode = "all";
  std::uint64_t size = kGiB, block = kMiB, request = 4 * kMiB;
  std::uint32_t depth = 32, passes = 3;
  bool tiles = false, plain_buffers = false, tiny = false;
};

IoEngineKind kind_of(const std::string& name) {
  return static_cast<IoEngineKind>(std::ranges::find(kIoEngineNames, name) - kIoEngineNames.begin());
}

// Bytes of the n-th request: all the same, or those of a store's tiles, 8 to 48 MiB.
std::uint64_t bytes_of(const Settings& settings, std::uint64_t n) {
  return settings.tiles ? (n * 5 % 6 + 1) * settings.request / 6 : settings.request;
}

// Keeps requests of twice the depth's worth (at least two) under way until the file's size was moved `passes` times.
// share_written: of the requests, in percent, evenly spread.
void run(const Settings& settings, File& file, const std::string& mode, std::uint64_t share_written) {
  const std::uint64_t slots = std::max<std::uint64_t>(2, 2 * settings.depth * settings.block / settings.request);
  const drive::LoadMemory memory(slots * settings.request);
  const std::span<std::byte> regions[] = {memory.bytes()};
  File* const files[] = {&file};
  const IoQueueOptions options{
      .engine = kind_of(settings.engine), .block_bytes = settings.block, .depth = settings.depth};
  const auto queue =
      IoQueue::create(options, files, settings.plain_buffers ? std::span<const std::span<std::byte>>{} : regions);

  const std::uint64_t total = settings.size * settings.passes;
  std::vector<std::uint64_t> free_slots(slots);
  for (std::uint64_t i = 0; i < slots; ++i) free_slots[i] = i;
  std::vector<IoCompletion> done(slots);
  std::vector<IoOp> ops(slots);
  std::uint64_t submitted = 0, at = 0, asked = 0, outstanding = 0;
  const double cpu_before = drive::process_cpu_seconds();
  const auto started = Clock::now();
  while (asked < total || outstanding > 0) {
    for (; asked < total && !free_slots.empty(); ++submitted, ++outstanding) {
      const std::uint64_t bytes = bytes_of(settings, submitted);
      if (at + bytes > settings.size) at = 0;
      const std::uint64_t slot = free_slots.back();
      free_slots.pop_back();
      ops[slot] = (submitted + 1) * share_written / 100 != submitted * share_written / 100 ? IoOp::kWrite : IoOp::kRead;
      queue->submit({.op = ops[slot],
                     .offset = at,
                     .buffer = memory.bytes().data() + slot * settings.request,
                     .bytes = bytes,
                     .tag = slot});
      at += bytes;
      asked += bytes;
    }
    for (const IoCompletion& completion : queue->wait(done, -1)) {
      if (completion.error != 0) {
        throw transfer_error(ops[completion.tag], file, completion, "check the drive");
      }
      free_slots.push_back(completion.tag);
      --outstanding;
    }
  }
  const double seconds = std::chrono::duration<double>(Clock::now() - started).count();
  const double cpu = drive::process_cpu_seconds() - cpu_before;
  const IoStats stats = queue->stats();
  const auto bytes = static_cast<double>(stats.read_bytes + stats.write_bytes);
  fmt::print(
      "{{\"name\": \"aio_{}\", \"engine\": \"{}\", \"direct\": {}, \"block\": {}, \"depth\": {}, \"read_bytes\": {}, "
      "\"write_bytes\": {}, \"seconds\": {:.4f}, \"gb_per_s\": {:.3f}, \"cpu_s_per_gib\": {:.4f}}}\n",
      mode, queue->describe(), file.direct(), settings.block, settings.depth, stats.read_bytes, stats.write_bytes,
      seconds, bytes / seconds / 1e9, cpu / (bytes / static_cast<double>(kGiB)));
  std::fflush(stdout);
}

void bench(Settings settings) {
  if (settings.tiny) {
    settings.size = 4 * kMiB;
    settings.block = 256 * kKiB;
    settings.request = kMiB;
    settings.depth = 4;
    settings.passes = 1;
  }
  const bool temporary = settings.path.empty();
  if (temporary) {
    settings.path =
        (std::filesystem::temp_directory_path() / fmt::format("spillway-aio-bench-{}", ::getpid())).string();
  }
  struct Remover {
    std::string path;
    ~Remover() {
      std::error_code ignored;
      if (!path.empty()) std::filesystem::remove(path, ignored);
    }
  };
  const bool exists = std::filesystem::exists(settings.path);
  File file = File::open(settings.path, {.writable = true, .create = !exists});
  const Remover remover{temporary ? settings.path : ""};
  // Reading space that was never written measures nothing: a new file is written first.
  if (file.size_bytes() < settings.size) {
    file.preallocate(settings.size);
    Settings fill = settings;
    fill.passes = 1;
    run(fill, file, "fill", 100);
  }
  // An update of bf16 weights with exact states reads 14 bytes a parameter and writes 12.
  const std::map<std::string, std::uint64_t> modes = {{"read", 0}, {"write", 100}, {"mix", 46}};
  for (const std::string mode : {"read", "write", "mix"}) {
    if (settings.mode == "all" || settings.mode == mode) run(settings, file, mode, modes.at(mode));
  }
}

}  // namespace
}  // namespace spillway

int main(int argc, char** argv) {
  spillway::Settings settings;
  CLI::App app("Reads, writes and mixes one file through Spillway's I/O queue; prints JSON lines.");
  app.add_option("--file", settings.path, "file to use; its contents are overwritten (default: a temporary one)");
  app.add_option("--size", settings.size, "bytes of the file")->transform(CLI::AsSizeValue(false));
  app.add_option("--block", settings.block, "largest piece")->transform(CLI::AsSizeValue(false));
  app.add_option("--request", settings.request, "bytes per request")->transform(CLI::AsSizeValue(false));
  app.add_option("--depth", settings.depth, "pieces in flight");
  app.add_option("--passes", settings.passes, "times over the file");
  app.add_option("--engine", settings.engine)
      ->check(
          CLI::IsMember(std::vector<std::string>(spillway::kIoEngineNames.begin(), spillway::kIoEngineNames.end())));
  app.add_option("--mode", settings.mode)->check(CLI::IsMember({"all", "read", "write", "mix"}));
  app.add_flag("--tiles", settings.tiles, "requests of a sixth to the whole of --request, as tiles differ");
  app.add_flag("--plain-buffers", settings.plain_buffers, "do not register the buffers");
  app.add_flag("--tiny", settings.tiny, "one small iteration, as the test suite runs it");
  CLI11_PARSE(app, argc, argv);
  try {
    spillway::bench(settings);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "aio_bench: %s\n", error.what());
    return 1;
  }
}
