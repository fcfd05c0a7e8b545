#include "src/engine/scratch_files.h"

#include <fmt/format.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <system_error>
#include <utility>

#include "spillway/error.h"
#include "spillway/units.h"
#include "src/engine/store_place.h"

namespace spillway {
namespace {

constexpr std::uint64_t kGrowth = 16 * kMiB;  // a file's, so that reserving is rare

// Its name is gone before anything is in it.
File without_name(const std::filesystem::path& directory) {
  static std::atomic<std::uint64_t> made = 0;
  std::error_code failure;
  std::filesystem::create_directories(directory, failure);  // opening says what is wrong
  const auto path = directory / fmt::format("spillway.scratch.{}.{}", getpid(), made.fetch_add(1));
  File file = File::open(path, {.writable = true, .create = true});
  std::filesystem::remove(path, failure);
  return file;
}

}  // namespace

ScratchFiles::ScratchFiles(const Config& config) {
  if (config.nvme_paths.empty()) {
    throw Error(Code::kInvalidArgument, {"spillway.nvme_paths", "is missing, and block inputs are to wait on nvme", 0,
                                         "name a directory on the drive, or set spillway.block_inputs to cpu"});
  }
  std::vector<File*> pointers;
  for (const auto& directory : config.nvme_paths) files_.push_back(without_name(directory));
  for (File& file : files_) pointers.push_back(&file);
  reserved_.resize(files_.size());
  thread_ = std::make_unique<StoreThread>(queue_options(config), pointers, std::vector<std::span<std::byte>>{});
}

ScratchFiles::~ScratchFiles() = default;

void ScratchFiles::reserve(std::uint32_t file, std::uint64_t bytes) {
  if (bytes <= reserved_[file]) return;
  const std::uint64_t wanted = align_up(bytes, kGrowth);
  // A full disk is an error here, where the caller can still do something else, and never of a write under way.
  files_[file].preallocate(wanted);
  reserved_[file] = wanted;
}

std::uint64_t ScratchFiles::start(IoOp op, std::uint32_t file, std::uint64_t offset, std::span<std::byte> memory) {
  const auto aligned = [](std::uint64_t number) { return number % kAlignment == 0; };
  if (op == IoOp::kSync || file >= files_.size() || memory.empty() || !aligned(offset) || !aligned(memory.size()) ||
      !aligned(reinterpret_cast<std::uintptr_t>(memory.data()))) {
    throw Error(
        Code::kInvalidArgument,
        {"scratch", fmt::format("{} bytes at offset {} of file {} cannot be moved", memory.size(), offset, file), 0,
         fmt::format("address, offset and bytes are multiples of {}", kAlignment)});
  }
  if (op == IoOp::kWrite) reserve(file, offset + memory.size());
  if (offset + memory.size() > reserved_[file]) {
    throw Error(Code::kInvalidArgument, {"scratch", "is read where nothing was written", 0, "write there before"});
  }
  auto batch = std::make_unique<IoBatch>(*thread_);
  batch->add({.op = op, .file = file, .offset = offset, .buffer = memory.data(), .bytes = memory.size()});
  under_way_.emplace(next_ticket_, std::move(batch));
  return next_ticket_++;
}

void ScratchFiles::wait(std::uint64_t ticket) {
  // Taken out first, so that a failed transfer, too, is waited for once.
  auto found = under_way_.extract(ticket);
  if (found.empty()) {
    throw Error(Code::kInvalidArgument, {"scratch", fmt::format("{} is no ticket that was not waited for", ticket), 0,
                                         "wait once for each transfer"});
  }
  found.mapped()->wait();
}

}  // namespace spillway
