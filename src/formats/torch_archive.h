// A file as torch.save() writes it since PyTorch 1.6: a zip of stored entries.
//
//   NAME/data.pkl    the value, a pickle; a tensor in it names a storage
//   NAME/data/0 …    the storages, raw little-endian elements
//   NAME/byteorder   "little" (since 2.1)
//
// Nothing is unpickled into objects (src/formats/pickle_reader.h), no file but this one is opened, and tensors are read
// piece by piece. Thread: one. Errors: kInvalidArgument for what the file holds, kCorrupt for bytes that are not those
// that were written, kNotFound, kIo.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "spillway/dtype.h"
#include "src/formats/pickle_reader.h"

namespace spillway {

struct TorchTensor {
  DType type = DType::kFloat32;
  std::vector<std::uint64_t> shape;
  std::uint64_t elements = 0;
  std::uint64_t entry = 0;                  // of the archive
  std::uint64_t first = 0;                  // its first element in the storage
  const PickleValue* attributes = nullptr;  // a dict of what Python code hung onto it; null: nothing
};

// A torch.Size, a tuple or a list of sizes; throws kInvalidArgument for anything else.
std::vector<std::uint64_t> torch_shape(const PickleValue& value, const std::string& object);

class TorchArchive {
 public:
  // `checked`: the pickle must match its CRC-32; torch.serialization.set_crc32_options(False) leaves wrong ones.
  static TorchArchive open(const std::filesystem::path& path, bool checked);
  TorchArchive(TorchArchive&&) noexcept;
  TorchArchive& operator=(TorchArchive&&) noexcept;
  ~TorchArchive();

  const std::filesystem::path& path() const;
  const PickleValue& root() const;

  // Nothing when the value is no tensor. A tensor must be contiguous, of fp32, bf16 or fp16, and lie in its storage:
  // the errors name it as `name`.
  std::optional<TorchTensor> tensor(const PickleValue& value, const std::string& name) const;
  // Elements [first, first + out.size()), row-major, widened to fp32 (exact).
  void read(const TorchTensor& tensor, std::uint64_t first, std::span<float> out);

  std::uint64_t entry_bytes(const TorchTensor& tensor) const;  // of all of the entry that the tensor lies in
  // Reads all of the entry that the tensor lies in and compares it with its CRC-32. `on_bytes` hears of every piece.
  void verify(const TorchTensor& tensor, const std::function<void(std::uint64_t)>& on_bytes);

 private:
  struct File;
  explicit TorchArchive(std::unique_ptr<File> file);
  std::unique_ptr<File> file_;
};

}  // namespace spillway
