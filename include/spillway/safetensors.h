// Models as Hugging Face stores them: a directory with model.safetensors, or with shards and
// model.safetensors.index.json.
//
// Both directions stream: values pass through a few MiB of memory, whatever a tensor's size. They bypass the page cache
// where the file system allows it; else their pages are dropped from it afterwards. Files are not trusted: every header
// is checked whole before a value is read, and nothing outside the directory is opened. Ownership: reader and writer
// own their files and buffers. Threads: one at a time each. Errors: spillway::Error that names file and tensor;
// kInvalidArgument for what the files hold, kNotFound, kExists, kBusy, kIo. Format:
// https://huggingface.co/docs/safetensors
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "spillway/dtype.h"

namespace spillway {

// A tensor of the catalogue.
struct TensorEntry {
  std::string name;
  std::string dtype;          // as the file says: "F32", "BF16", "I64", …
  std::optional<DType> type;  // what read() takes: F32, BF16, F16; empty for the others
  std::vector<std::uint64_t> shape;
  std::uint64_t elements = 0;
  std::uint32_t file = 0;    // index, see SafetensorsReader::file()
  std::uint64_t offset = 0;  // of its first byte in the file
  std::uint64_t bytes = 0;
};

class SafetensorsReader {
 public:
  // Opens every file of the model and checks all headers: tensors must lie in their file, cover its data without gap or
  // overlap, and have sizes that agree with dtype and shape; an index must name all of them, and plain file names only.
  // `stem`: how file names begin; others than "model" hold what belongs to a model, its moments for example.
  static SafetensorsReader open(const std::filesystem::path& directory, const std::string& stem = "model");

  SafetensorsReader(SafetensorsReader&&) noexcept;
  SafetensorsReader& operator=(SafetensorsReader&&) noexcept;
  ~SafetensorsReader();

  // All tensors, sorted by name; addresses stay valid as long as the reader.
  std::span<const TensorEntry> tensors() const;
  const TensorEntry* find(std::string_view name) const;  // null when there is none
  const std::filesystem::path& file(const TensorEntry& entry) const;

  // Reads the elements [first, first + out.size()) of a tensor, row-major, widened to fp32 (exact).
  void read(const TensorEntry& entry, std::uint64_t first, std::span<float> out);
  // The same of U16 and U32: the bits, those of U16 in the upper half.
  void read_bits(const TensorEntry& entry, std::uint64_t first, std::span<float> out);

 private:
  void read_as(DType type, const TensorEntry& entry, std::uint64_t first, std::span<float> out);
  struct Model;
  explicit SafetensorsReader(std::unique_ptr<Model> model);
  std::unique_ptr<Model> model_;
};

struct TensorSpec {
  std::string name;
  std::vector<std::uint64_t> shape;
  std::optional<DType> type = {};  // else that of the options
  bool bits = false;               // raw bits of that size, named U16 or U32, as of Parameter::bytes
};

inline constexpr std::uint64_t kMaxFileBytes = 50'000'000'000;

struct SafetensorsWriterOptions {
  DType type = DType::kFloat32;                  // rounded to nearest, ties to even
  std::uint64_t max_file_bytes = kMaxFileBytes;  // of tensor data; above it the model is sharded
  bool replace = false;                          // a model in the directory: refused (kExists), or replaced
  std::string stem = "model";                    // of the file names; plain
  bool alone = true;                             // in its directory (kBusy); false: the caller sees to that
};

// Writes a model atomically. create() makes the directory if need be, reserves the space of all files under temporary
// names and writes the index, so that a full disk is found before the first value; finish() gives them their names, the
// index last. When anything fails, no part of the new model is left behind; an older one stays as it is until
// finish() starts to give names. Until then the directory has no other writer, of this process or another.
class SafetensorsWriter {
 public:
  static SafetensorsWriter create(const std::filesystem::path& directory, std::vector<TensorSpec> tensors,
                                  SafetensorsWriterOptions options = {});

  SafetensorsWriter(SafetensorsWriter&&) noexcept;
  SafetensorsWriter& operator=(SafetensorsWriter&&) noexcept;
  ~SafetensorsWriter();  // without finish(): removes what was written

  // The values [first, first + values.size()) of tensors[tensor], row-major. Tensors come one after the other, fastest
  // in the order given to create(), values in increasing order without gaps. A value that fp16 rounds to infinity is
  // refused (kInvalidArgument).
  void write(std::size_t tensor, std::uint64_t first, std::span<const float> values);
  void finish();

 private:
  struct Output;
  explicit SafetensorsWriter(std::unique_ptr<Output> output);
  std::unique_ptr<Output> output_;
};

}  // namespace spillway
