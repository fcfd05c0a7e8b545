// A queue over one of the engines, with or without faults below it, and a direct file to work on.
#pragma once

#include <gtest/gtest.h>

#include <cerrno>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "aio/io_engine.h"
#include "faulty_engine.h"
#include "spillway/error.h"
#include "spillway/units.h"
#include "temp_files.h"

namespace spillway::testing {

// The engine's own words when it cannot be had here, even without files; empty when it can.
inline std::string refusal_of(IoEngineKind kind) {
  try {
    make_engine(kind, {.depth = 1});
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

class QueueFixture : public ::testing::Test {
 protected:
  // Opens `count` direct files of `bytes` each, all space reserved.
  void open_files(std::size_t count, std::uint64_t bytes) {
    for (std::size_t i = 0; i < count; ++i) {
      files_.push_back(std::make_unique<File>(File::open(dir_ / ("file" + std::to_string(files_.size())), kNewFile)));
      files_.back()->preallocate(bytes);
      pointers_.push_back(files_.back().get());
    }
  }

  // An engine with this plan's faults, under a queue.
  void open_queue(IoEngineKind kind, IoQueueOptions options, FaultPlan plan,
                  std::span<const std::span<std::byte>> regions = {}) {
    plan.trace = &trace_;
    plan.files = pointers_;
    auto engine = make_engine(kind, {.depth = total_depth(options, pointers_.size()),
                                     .block_bytes = options.block_bytes,
                                     .files = pointers_,
                                     .regions = regions,
                                     .max_files = file_places(options, pointers_.size()),
                                     .max_regions = options.max_regions});
    queue_ = make_queue(options, pointers_, make_faulty_engine(std::move(engine), std::move(plan)), regions);
  }

  // Waits for the next `count` completions.
  std::vector<IoCompletion> collect(std::size_t count) {
    std::vector<IoCompletion> all;
    while (all.size() < count) {
      IoCompletion some[7];
      for (const IoCompletion& one :
           queue_->wait(std::span(some).first(std::min<std::size_t>(7, count - all.size())), -1)) {
        all.push_back(one);
      }
    }
    return all;
  }

  // Submits one request, waits for it, returns its completion.
  IoCompletion transfer(IoOp op, std::uint64_t offset, std::span<std::byte> bytes, std::uint32_t file = 0) {
    queue_->submit(
        {.op = op, .file = file, .offset = offset, .buffer = bytes.data(), .bytes = bytes.size(), .tag = 77});
    return collect(1).front();
  }

  // Writes, syncs and reads back as much as `memory` holds.
  void expect_transfers_work(Memory& memory) {
    Memory out(memory.span().size());
    out.fill_pattern(1);
    EXPECT_EQ(transfer(IoOp::kWrite, 0, out.span()).error, 0);
    EXPECT_EQ(transfer(IoOp::kSync, 0, {}).error, 0);
    EXPECT_EQ(transfer(IoOp::kRead, 0, memory.span()).error, 0);
    EXPECT_TRUE(same_bytes(memory.span(), out.span()));
  }

  static constexpr FileOptions kNewFile{.writable = true, .create = true, .direct = true};

  TempDir dir_;
  std::vector<std::unique_ptr<File>> files_;
  std::vector<File*> pointers_;
  EngineTrace trace_;
  std::unique_ptr<IoQueue> queue_;  // goes first: files and trace outlive it
};

}  // namespace spillway::testing
