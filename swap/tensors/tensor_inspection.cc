// What a store of named tensors holds, and whether it is whole, for a program that looks at it from outside. It changes
// nothing.
#include <algorithm>
#include <cerrno>

#include "kernels/checksum.h"
#include "spillway/error.h"
#include "spillway/tensor_store.h"
#include "swap/tensors/tensor_files.h"

namespace spillway {
namespace {

constexpr std::uint64_t kLookBytes = 16 * kMiB;

TensorInfo info_of(const ReadRecord& read) {
  return {.name = read.name,
          .shape = read.record.shape,
          .bytes = read.record.bytes,
          .in_host = false,
          .on_nvme = true,
          .committed = true,
          .pinned = false};
}

// Bytes of a tensor from `begin` on; the errno that it ends with, 0 where all is read.
int read_of_tensor(const TensorFiles& files, const TensorRecord& record, std::uint64_t begin, std::span<std::byte> to) {
  try {
    for_each_run(record.parts, begin, to,
                 [&](std::uint64_t offset, std::span<std::byte> run) { files.files().read_at(offset, run); });
    return 0;
  } catch (const Error& failure) {
    return failure.parts().errno_value != 0 ? failure.parts().errno_value : EIO;
  }
}

}  // namespace

bool holds_tensors(const std::vector<std::filesystem::path>& paths) {
  if (paths.empty() || !StoreFiles::exist(std::span(paths).first(1))) return false;
  try {
    const File file = File::open(paths.front() / kStoreFileName, {.direct = false});
    return StoreFiles::superblock_of(file).slots == kSlotsOfTensors;
  } catch (const Error&) {  // what is wrong is said of what it is taken for
    return false;
  }
}

StoredTensors inspect_tensors(const std::vector<std::filesystem::path>& paths) {
  const auto files = TensorFiles::open_read_only(paths);
  StoredTensors found;
  for (const ReadRecord& read : files->take_tensors()) found.tensors.push_back(info_of(read));
  std::ranges::sort(found.tensors, {}, &TensorInfo::name);
  found.commits = files->commits();
  found.nvme_capacity = files->capacity();
  found.nvme_bytes = files->capacity() - files->free().free_bytes();
  found.in_use = files->files().in_use();
  found.damaged = files->damaged_root();
  for (std::size_t i = 0; i < paths.size(); ++i) found.damaged |= files->files().superblock_damaged(i);
  return found;
}

std::uint64_t verify_tensors(const std::vector<std::filesystem::path>& paths,
                             const std::function<void(const BadTensor&)>& on_bad,
                             const std::function<void(std::uint64_t, std::uint64_t)>& progress) {
  const auto files = TensorFiles::open_read_only(paths);
  if (files->files().in_use())
    throw Error(Code::kBusy, {paths.front().string(), "a process has the store open, and may be writing", 0,
                              "verify it once that has ended"});
  const std::vector<ReadRecord> tensors = files->take_tensors();
  std::uint64_t bytes = 0, done = 0;
  for (const ReadRecord& tensor : tensors) bytes += tensor.record.padded_bytes();
  const AlignedBuffer buffer(kLookBytes);
  for (const auto& [name, record] : tensors) {
    const std::uint64_t step = std::max<std::uint64_t>(1, kLookBytes / record.block_bytes) * record.block_bytes;
    for (std::uint64_t begin = 0; begin < record.padded_bytes(); begin += step) {
      const auto piece = buffer.bytes().first(std::min({step, record.padded_bytes() - begin, kLookBytes}));
      const bool together = read_of_tensor(*files, record, begin, piece) == 0;
      for (std::uint64_t at = 0; at < piece.size(); at += record.block_bytes) {
        const auto block = piece.subspan(at, std::min<std::uint64_t>(record.block_bytes, piece.size() - at));
        // One sector fails all that is read with it.
        const int error = together ? 0 : read_of_tensor(*files, record, begin + at, block);
        const bool whole = error == 0 && granule_checksum(block) == record.checksums[(begin + at) / record.block_bytes];
        // Said, and gone on: one bad block says nothing of the others.
        if (!whole) on_bad({name, begin + at, block.size(), error});
      }
      done += piece.size();
      if (progress) progress(done, bytes);
    }
  }
  return bytes;
}

}  // namespace spillway
