#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <iterator>
#include <map>
#include <new>

#include "spillway/error.h"
#include "spillway/io_queue.h"
#include "spillway/safetensors.h"
#include "spillway/units.h"
#include "src/formats/plain_file.h"
#include "src/formats/refuse.h"
#include "src/formats/safetensors_header.h"
#include "src/formats/stored_elements.h"

namespace spillway {
namespace {

static_assert(std::endian::native == std::endian::little, "safetensors files are little-endian");

constexpr std::uint64_t kWindowBytes = 4 * kMiB;
constexpr std::uint64_t kMostIndexBytes = 64 * kMiB;

std::vector<TensorEntry> read_header(const PlainFile& file, std::uint32_t index) {
  const std::uint64_t size = file.size_bytes();
  if (size < 8) refuse(file.path(), fmt::format("a file of {} bytes is no safetensors file", size), "copy it again");
  std::uint64_t length = 0;
  file.read_at(0, std::as_writable_bytes(std::span(&length, 1)));
  if (length > kMostHeaderBytes || length > size - 8) {
    refuse(file.path(), fmt::format("its header claims {} bytes of a file of {}", length, size),
           fmt::format("cut short, or not a safetensors file; a header has at most {} bytes", kMostHeaderBytes));
  }
  std::string header(length, '\0');
  file.read_at(8, std::as_writable_bytes(std::span(header)));
  return parse_safetensors_header(file.path().string(), header, index, 8 + length, size - 8 - length);
}

// The part of a file that is in memory. Tensors lie at any offset, direct reads at aligned ones: a window is the
// aligned range around what is asked for, and a tensor that is read from front to back finds most of itself in it.
class Window {
 public:
  Window() {
    if (!memory_) throw std::bad_alloc();
  }
  // The first bytes of [offset, offset + bytes) of `file`: a multiple of `unit`, at least one. Valid until the next
  // call.
  std::span<const std::byte> from(const File& file, std::uint64_t offset, std::uint64_t bytes, std::uint64_t unit) {
    if (&file != file_ || offset < begin_ || offset + unit > end_) {
      file_ = nullptr;  // until the read has succeeded
      const std::uint64_t size = file.size_bytes();
      if (offset + unit > size) {
        throw Error(
            Code::kCorrupt,
            {file.path().string(), fmt::format("the file ends at byte {}, {} bytes early", size, offset + bytes - size),
             0, "it was cut short; copy it again"});
      }
      const std::uint64_t ahead = std::min(kWindowBytes - 2 * file.alignment(), size - offset);
      const AlignedRange range = aligned_range(file, offset, std::max(unit, ahead));
      file.read_at(range.offset, {memory_.get(), range.bytes}, range.least_bytes);
      file_ = &file;
      begin_ = range.offset;
      end_ = range.offset + range.least_bytes;
    }
    return {memory_.get() + (offset - begin_), align_down(std::min(bytes, end_ - offset), unit)};
  }

 private:
  const File* file_ = nullptr;
  std::uint64_t begin_ = 0, end_ = 0;
  std::unique_ptr<std::byte, decltype(&std::free)> memory_{
      static_cast<std::byte*>(std::aligned_alloc(64 * kKiB, kWindowBytes)), &std::free};
};

}  // namespace

struct SafetensorsReader::Model {
  std::vector<std::unique_ptr<File>> files;
  std::vector<TensorEntry> tensors;  // sorted by name
  Window window;

  void add(const std::filesystem::path& path) {
    {
      const PlainFile file = PlainFile::open_to_read(path);
      auto more = read_header(file, static_cast<std::uint32_t>(files.size()));
      std::move(more.begin(), more.end(), std::back_inserter(tensors));
      file.drop_cached(0, 0);
    }
    // Models in a download cache are symbolic links.
    files.push_back(std::make_unique<File>(File::open(path, {.follow_links = true})));
  }
  void add_indexed(const std::filesystem::path& path) {
    const auto index = parse_safetensors_index(path.string(), read_text(path, kMostIndexBytes));
    std::map<std::string_view, std::uint32_t> numbers;  // of the files, in the order of their names
    for (const auto& [tensor, file] : index) numbers.emplace(file, 0);
    for (auto& [file, number] : numbers) {
      number = static_cast<std::uint32_t>(files.size());
      add(path.parent_path() / file);
    }
    std::sort(tensors.begin(), tensors.end(), [](const auto& a, const auto& b) { return a.name < b.name; });
    check_index(index, numbers);
  }

  // Index and files must say the same, tensor by tensor. Both are sorted by name.
  void check_index(const std::map<std::string, std::string>& index,
                   const std::map<std::string_view, std::uint32_t>& numbers) {
    const auto subject = [](std::string_view name) { return fmt::format("tensor \"{}\" ", printable(name)); };
    const std::string hint = "copy the model again";
    for (std::size_t i = 1; i < tensors.size(); ++i) {
      if (tensors[i].name != tensors[i - 1].name) continue;
      refuse(files[tensors[i].file]->path(), subject(tensors[i].name) + "is in another file of the model, too", hint);
    }
    auto entry = tensors.begin();
    for (const auto& [name, file] : index) {
      if (entry != tensors.end() && entry->name < name) break;
      const std::uint32_t number = numbers.at(file);
      if (entry == tensors.end() || entry->name != name || entry->file != number) {
        refuse(files[number]->path(), subject(name) + "is not in it, though the index says so", hint);
      }
      ++entry;
    }
    if (entry != tensors.end()) {
      refuse(files[entry->file]->path(), subject(entry->name) + "is in it, but not in the index", hint);
    }
  }
};

SafetensorsReader::SafetensorsReader(std::unique_ptr<Model> model) : model_(std::move(model)) {}
SafetensorsReader::SafetensorsReader(SafetensorsReader&&) noexcept = default;
SafetensorsReader& SafetensorsReader::operator=(SafetensorsReader&&) noexcept = default;
SafetensorsReader::~SafetensorsReader() = default;

SafetensorsReader SafetensorsReader::open(const std::filesystem::path& directory, const std::string& stem) {
  const std::string single = stem + ".safetensors", index = single + ".index.json";
  auto model = std::make_unique<Model>();
  // Both may be there; transformers takes the single file then, too.
  std::error_code ignored;
  if (std::filesystem::exists(directory / single, ignored)) {
    model->add(directory / single);
  } else if (std::filesystem::exists(directory / index, ignored)) {
    model->add_indexed(directory / index);
  } else {
    const bool pickled = std::filesystem::exists(directory / "pytorch_model.bin", ignored);
    throw Error(Code::kNotFound, {.object = directory.string(),
                                  .happened = fmt::format("it holds neither {} nor {}", single, index),
                                  .errno_value = 0,
                                  .hint = pickled ? "save pytorch_model.bin anew with safe_serialization=True"
                                                  : "name the directory of a Hugging Face model"});
  }
  return SafetensorsReader(std::move(model));
}

std::span<const TensorEntry> SafetensorsReader::tensors() const { return model_->tensors; }

const TensorEntry* SafetensorsReader::find(std::string_view name) const {
  const auto& tensors = model_->tensors;
  const auto at =
      std::lower_bound(tensors.begin(), tensors.end(), name,
                       [](const TensorEntry& entry, std::string_view wanted) { return entry.name < wanted; });
  return at != tensors.end() && at->name == name ? &*at : nullptr;
}

const std::filesystem::path& SafetensorsReader::file(const TensorEntry& entry) const {
  return model_->files.at(entry.file)->path();
}

void SafetensorsReader::read(const TensorEntry& entry, std::uint64_t first, std::span<float> out) {
  if (!entry.type) {
    refuse(file(entry), fmt::format("tensor \"{}\" is {}", printable(entry.name), entry.dtype),
           "only F32, BF16 and F16 can be read");
  }
  read_as(*entry.type, entry, first, out);
}

void SafetensorsReader::read_bits(const TensorEntry& entry, std::uint64_t first, std::span<float> out) {
  if (entry.dtype != "U16" && entry.dtype != "U32") {
    refuse(file(entry), fmt::format("tensor \"{}\" is {}", printable(entry.name), entry.dtype),
           "only U16 and U32 are bits");
  }
  read_as(entry.dtype == "U16" ? DType::kBFloat16 : DType::kFloat32, entry, first, out);  // which moves the bits
}

void SafetensorsReader::read_as(DType type, const TensorEntry& entry, std::uint64_t first, std::span<float> out) {
  const File& file = *model_->files.at(entry.file);
  if (first > entry.elements || out.size() > entry.elements - first) {
    refuse(file.path(), fmt::format("tensor \"{}\" has {} elements", printable(entry.name), entry.elements),
           fmt::format("{} from {} on were asked for", out.size(), first));
  }
  const std::uint64_t size = size_of(type);
  while (!out.empty()) {
    const auto values = model_->window.from(file, entry.offset + first * size, out.size() * size, size);
    const std::size_t count = values.size() / size;
    widen(values, type, out.first(count));
    first += count;
    out = out.subspan(count);
  }
}

}  // namespace spillway
