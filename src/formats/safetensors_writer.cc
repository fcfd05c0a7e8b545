#include <fmt/format.h>
#include <rapidjson/prettywriter.h>
#include <rapidjson/stringbuffer.h>
#include <rapidjson/writer.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <future>
#include <iterator>
#include <new>
#include <set>
#include <utility>

#include "spillway/bf16.h"
#include "spillway/error.h"
#include "spillway/fp16.h"
#include "spillway/safetensors.h"
#include "spillway/units.h"
#include "src/formats/directory_lock.h"
#include "src/formats/element_count.h"
#include "src/formats/plain_file.h"
#include "src/formats/safetensors_header.h"

namespace spillway {
namespace {

constexpr std::uint64_t kBufferBytes = kMiB, kBufferAlignment = 64 * kKiB;
// Written pages are dropped in windows of this size: one is being written back while the next one fills.
constexpr std::uint64_t kWriteBackBytes = 16 * kMiB;

[[noreturn]] void refuse_as(Code code, std::string object, std::string happened, std::string hint) {
  throw Error(
      code, {.object = std::move(object), .happened = std::move(happened), .errno_value = 0, .hint = std::move(hint)});
}

struct FreeMemory {
  void operator()(std::byte* memory) const { std::free(memory); }
};
using Buffer = std::unique_ptr<std::byte, FreeMemory>;

Buffer make_buffer() {
  Buffer buffer(static_cast<std::byte*>(std::aligned_alloc(kBufferAlignment, kBufferBytes)));
  if (!buffer) throw std::bad_alloc();
  return buffer;
}

struct PlannedTensor {
  TensorSpec spec;
  DType type = DType::kFloat32;
  std::uint64_t elements = 0;
  std::size_t file = 0;

  std::uint64_t bytes() const { return elements * size_of(type); }
};

const char* dtype_of(const PlannedTensor& tensor) {
  if (tensor.spec.bits) return size_of(tensor.type) == 4 ? "U32" : "U16";
  return tensor.type == DType::kFloat32 ? "F32" : tensor.type == DType::kBFloat16 ? "BF16" : "F16";
}

struct PlannedFile {
  std::string name;
  std::size_t first = 0, count = 0;  // its tensors
  bool begun = false;                // its header was given out to be written
  std::uint64_t data_bytes = 0, header_bytes = 0;
};

using JsonText = rapidjson::StringBuffer;

// Length, JSON, and spaces so that the data starts at a multiple of 8, as the format's own library writes it.
std::string header_of(std::span<const PlannedTensor> tensors) {
  JsonText text;
  rapidjson::Writer<JsonText> writer(text);
  writer.StartObject();
  writer.String("__metadata__");
  writer.StartObject();
  writer.String("format");  // without it transformers does not take the file
  writer.String("pt");
  writer.EndObject();
  std::uint64_t offset = 0;
  for (const PlannedTensor& tensor : tensors) {
    writer.String(tensor.spec.name);
    writer.StartObject();
    writer.String("dtype");
    writer.String(dtype_of(tensor));
    writer.String("shape");
    writer.StartArray();
    for (const std::uint64_t dimension : tensor.spec.shape) writer.Uint64(dimension);
    writer.EndArray();
    writer.String("data_offsets");
    writer.StartArray();
    writer.Uint64(offset);
    writer.Uint64(offset += tensor.bytes());
    writer.EndArray();
    writer.EndObject();
  }
  writer.EndObject();
  const std::uint64_t length = align_up<std::uint64_t>(text.GetSize(), 8);
  std::string header(8 + length, ' ');
  std::memcpy(header.data(), &length, 8);
  std::memcpy(header.data() + 8, text.GetString(), text.GetSize());
  return header;
}

std::string index_of(std::span<const PlannedTensor> tensors, std::span<const PlannedFile> files) {
  std::uint64_t total = 0;
  for (const PlannedFile& file : files) total += file.data_bytes;
  JsonText text;
  rapidjson::PrettyWriter<JsonText> writer(text);
  writer.SetIndent(' ', 2);
  writer.StartObject();
  writer.String("metadata");
  writer.StartObject();
  writer.String("total_size");
  writer.Uint64(total);
  writer.EndObject();
  writer.String("weight_map");
  writer.StartObject();
  for (const PlannedTensor& tensor : tensors) {
    writer.String(tensor.spec.name);
    writer.String(files[tensor.file].name);
  }
  writer.EndObject();
  writer.EndObject();
  return std::string(text.GetString(), text.GetSize()) + "\n";
}

// Tensors in the order given, a new file when the next one would not fit; a tensor is never cut.
std::vector<PlannedFile> plan_files(std::vector<PlannedTensor>& tensors, const SafetensorsWriterOptions& options) {
  std::vector<PlannedFile> files(1);
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const std::uint64_t bytes = tensors[i].bytes();
    const bool fits = files.back().count == 0 ||
                      bytes <= options.max_file_bytes - std::min(options.max_file_bytes, files.back().data_bytes);
    if (!fits) files.push_back({.name = {}, .first = i});
    files.back().count += 1;
    files.back().data_bytes += bytes;
    tensors[i].file = files.size() - 1;
  }
  for (std::size_t i = 0; i < files.size(); ++i) {
    files[i].name = files.size() == 1 ? options.stem + ".safetensors"
                                      : fmt::format("{}-{:05}-of-{:05}.safetensors", options.stem, i + 1, files.size());
  }
  return files;
}

// model-00001-of-00002.safetensors and the like, ours or another writer's.
bool is_shard_name(std::string_view name, const std::string& stem) {
  if (!name.starts_with(stem)) return false;
  name.remove_prefix(stem.size());
  constexpr std::string_view kPattern = "-00000-of-00000.safetensors";
  const auto same = [](char pattern, char c) { return pattern == '0' ? c >= '0' && c <= '9' : pattern == c; };
  return std::equal(kPattern.begin(), kPattern.end(), name.begin(), name.end(), same);
}

// The same under its temporary name, left by a killed run that cut the model otherwise.
bool is_partial_shard(std::string_view name, const std::string& stem) {
  if (!name.starts_with('.') || !name.ends_with(".partial")) return false;
  return is_shard_name(name.substr(1, name.size() - 1 - std::string_view(".partial").size()), stem);
}

}  // namespace

struct SafetensorsWriter::Output {
  std::filesystem::path directory;
  SafetensorsWriterOptions options;
  DirectoryLock lock;  // where the names of files, temporary ones too, are those of any writer
  std::vector<PlannedTensor> tensors;
  std::vector<PlannedFile> files;
  // One fills while the other one is written.
  Buffer buffers[2] = {make_buffer(), make_buffer()};
  std::byte* buffer = buffers[0].get();
  std::future<void> writing;

  PlainFile file;            // the one being written
  std::size_t opened = 0;    // which that is
  std::uint64_t direct = 0;  // what its transfers must be multiples of; 0: they go through the page cache
  std::size_t tensor = 0;    // the next value's place
  std::uint64_t element = 0;
  bool placed = true;              // what is written next belongs there
  std::vector<std::uint8_t> done;  // by tensor: all of it was given
  std::size_t left = 0;            // tensors that are not
  std::size_t buffered = 0;        // bytes in `buffer`
  std::uint64_t written = 0;       // bytes of `file`, header included, that were given out to be written
  std::uint64_t window = 0;        // where the window that fills starts
  std::size_t named = 0;           // files that have their final names
  bool finished = false;

  std::string single() const { return options.stem + ".safetensors"; }
  std::string index() const { return single() + ".index.json"; }
  std::filesystem::path final_path(std::string_view name) const { return directory / name; }
  // A fixed name: what a killed run left is overwritten by the next one.
  std::filesystem::path temporary_path(std::string_view name) const {
    return directory / fmt::format(".{}.partial", name);
  }

  ~Output() {
    writing = {};  // waits
    if (finished || files.empty()) return;
    file = PlainFile();
    for (std::size_t i = 0; i < files.size(); ++i) {
      // Shards that got their names before the index failed to are no model.
      remove_file(i < named ? final_path(files[i].name) : temporary_path(files[i].name));
    }
    remove_file(temporary_path(index()));
  }

  void reserve_all();
  void append(std::span<const std::byte> bytes);
  void flush();
  void put(std::uint64_t offset, std::span<const std::byte> bytes);
  void open_file(std::size_t index);
  void close_file();
  void go_to(std::size_t index);
  void end_tensor();
  void name_files();
  void remove_old(bool sharded);
};

void SafetensorsWriter::Output::reserve_all() {
  for (PlannedFile& planned : files) {
    const std::string header = header_of(std::span(tensors).subspan(planned.first, planned.count));
    if (header.size() - 8 > kMostHeaderBytes) {
      refuse_as(Code::kInvalidArgument, final_path(planned.name).string(),
                "its header would be larger than the format allows", "choose a smaller max_file_bytes");
    }
    planned.header_bytes = header.size();
    PlainFile created = PlainFile::create(temporary_path(planned.name));
    created.reserve(planned.header_bytes + planned.data_bytes);
    created.close();
  }
  if (files.size() > 1) write_text(temporary_path(index()), index_of(tensors, files));
}

// The header comes through the buffers as well, so that all of them start at multiples of their size.
void SafetensorsWriter::Output::open_file(std::size_t index) {
  file = PlainFile::open_to_write(temporary_path(files[index].name));
  direct = file.begin_direct();
  if (direct > kBufferAlignment) {
    file.end_direct();
    direct = 0;
  }
  written = window = 0;
  opened = index;
  files[index].begun = true;
  const std::string header = header_of(std::span(tensors).subspan(files[index].first, files[index].count));
  append(std::as_bytes(std::span(header)));
}

void SafetensorsWriter::Output::append(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    if (buffered == kBufferBytes) flush();
    const auto part = bytes.first(std::min<std::size_t>(bytes.size(), kBufferBytes - buffered));
    std::memcpy(buffer + buffered, part.data(), part.size());
    buffered += part.size();
    bytes = bytes.subspan(part.size());
  }
}

// A full buffer goes out on a thread of its own (where there can be none, when it is waited for): what it costs to fill
// the next one and to write this one is paid at the same time, and where several models are written side by side the
// drive sees several requests.
void SafetensorsWriter::Output::flush() {
  if (writing.valid()) writing.get();
  writing = std::async(
      [this, offset = written, bytes = std::span<const std::byte>(buffer, buffered)] { put(offset, bytes); });
  written += buffered;
  buffered = 0;
  buffer = buffer == buffers[0].get() ? buffers[1].get() : buffers[0].get();
}

void SafetensorsWriter::Output::put(std::uint64_t offset, std::span<const std::byte> bytes) {
  file.write_at(offset, bytes);
  if (direct != 0 || offset + bytes.size() < window + kWriteBackBytes) return;
  file.write_back(window, kWriteBackBytes, false);
  if (window != 0) {
    file.write_back(window - kWriteBackBytes, kWriteBackBytes, true);
    file.drop_cached(window - kWriteBackBytes, kWriteBackBytes);
  }
  window += kWriteBackBytes;
}

void SafetensorsWriter::Output::close_file() {
  if (writing.valid()) writing.get();
  std::span<const std::byte> rest(buffer, buffered);
  if (direct != 0) {
    const auto whole = rest.first(align_down<std::uint64_t>(rest.size(), direct));
    file.write_at(written, whole);
    rest = rest.subspan(whole.size());
    written += whole.size();
    file.end_direct();
    direct = 0;
  }
  file.write_at(written, rest);
  written += rest.size();
  buffered = 0;
  file.sync();
  file.drop_cached(0, files[opened].header_bytes + files[opened].data_bytes);
  file.close();
}

// The values of another tensor come next than the one that follows in the files. Its place is no multiple of what
// direct transfers need.
void SafetensorsWriter::Output::go_to(std::size_t index) {
  const std::size_t in = tensors[index].file;
  if (in != opened || direct != 0) {
    close_file();
    if (!files[in].begun && files[in].first == index) {
      open_file(in);
      return;
    }
    file = PlainFile::open_to_write(temporary_path(files[in].name));
    opened = in;
  } else {
    if (writing.valid()) writing.get();
    file.write_at(written, {buffer, buffered});
    buffered = 0;
  }
  if (!std::exchange(files[in].begun, true)) {
    const std::string header = header_of(std::span(tensors).subspan(files[in].first, files[in].count));
    file.write_at(0, std::as_bytes(std::span(header)));
  }
  written = files[in].header_bytes;
  for (std::size_t before = files[in].first; before < index; ++before) written += tensors[before].bytes();
  window = align_down(written, kWriteBackBytes);
}

// Places are kept by the values that follow; where they do not, the next tensor is gone to.
void SafetensorsWriter::Output::end_tensor() {
  element = 0;
  done[tensor] = 1;
  left -= 1;
  if (left == 0) return close_file();
  const std::size_t next = tensor + 1;
  placed = next < tensors.size() && done[next] == 0 && tensors[next].file == opened;
  tensor = placed ? next : static_cast<std::size_t>(std::ranges::find(done, 0) - done.begin());
}

void SafetensorsWriter::Output::name_files() {
  const bool sharded = files.size() > 1;
  if (sharded) {
    // From here to the new index an older sharded model is incomplete, and its missing index says so; the two are never
    // mixed.
    remove_file(final_path(index()));
    sync_directory(directory);
  }
  for (; named < files.size(); ++named) rename_file(temporary_path(files[named].name), final_path(files[named].name));
  if (sharded) rename_file(temporary_path(index()), final_path(index()));
  finished = true;
  if (options.replace) remove_old(sharded);
  sync_directory(directory);
  lock = {};
}

// What an older model of another form leaves: readers would prefer, or mistake, it. The new model is complete by now,
// so a file that cannot be removed is no reason to call it failed.
void SafetensorsWriter::Output::remove_old(bool sharded) {
  const std::string other = sharded ? single() : index();
  remove_file(final_path(other));
  remove_file(temporary_path(other));
  std::set<std::string> ours;
  for (const PlannedFile& planned : files) ours.insert(planned.name);
  std::vector<std::filesystem::path> old;
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator(directory, ignored)) {
    const std::string name = entry.path().filename().string();
    const bool old_shard = is_shard_name(name, options.stem) && !ours.contains(name);
    if (old_shard || is_partial_shard(name, options.stem)) old.push_back(entry.path());
  }
  for (const auto& path : old) remove_file(path);
}

SafetensorsWriter::SafetensorsWriter(std::unique_ptr<Output> output) : output_(std::move(output)) {}
SafetensorsWriter::SafetensorsWriter(SafetensorsWriter&&) noexcept = default;
SafetensorsWriter& SafetensorsWriter::operator=(SafetensorsWriter&&) noexcept = default;
SafetensorsWriter::~SafetensorsWriter() = default;

SafetensorsWriter SafetensorsWriter::create(const std::filesystem::path& directory, std::vector<TensorSpec> tensors,
                                            SafetensorsWriterOptions options) {
  const std::string object = directory.string();
  if (tensors.empty()) refuse_as(Code::kInvalidArgument, object, "a model has at least one tensor", "name its tensors");
  auto output = std::make_unique<Output>();
  output->directory = directory;
  output->options = options;
  std::set<std::string> names;
  for (TensorSpec& spec : tensors) {
    const std::uint64_t elements = count_elements(spec.name, spec.shape);
    const bool usable = !spec.name.empty() && spec.name != "__metadata__" && names.insert(spec.name).second;
    if (!usable)
      refuse_as(Code::kInvalidArgument, object, fmt::format("a tensor is named \"{}\"", printable(spec.name)),
                "names must be unique, and not __metadata__");
    const DType type = spec.type.value_or(options.type);
    output->tensors.push_back({.spec = std::move(spec), .type = type, .elements = elements});
  }

  if (const std::error_code error = make_directories(directory)) {
    throw Error(Code::kIo, {.object = object,
                            .happened = "cannot be made",
                            .errno_value = error.value(),
                            .hint = "name a directory that this user may write to"});
  }
  if (options.alone) {
    output->lock = DirectoryLock::take(directory, Links::kFollow);
    if (!output->lock && errno == EWOULDBLOCK)
      refuse_as(Code::kBusy, object, "a model is being written there", "wait for its end, or name another directory");
    if (!output->lock) fail_file(directory, "cannot be opened", errno);
  }
  std::error_code ignored;
  const bool occupied = std::filesystem::exists(output->final_path(output->single()), ignored) ||
                        std::filesystem::exists(output->final_path(output->index()), ignored);
  if (occupied && !options.replace)
    refuse_as(Code::kExists, object, "a model is there", "name another directory, or remove it");
  output->files = plan_files(output->tensors, options);  // which are this writer's from here on
  output->reserve_all();
  output->done.assign(output->tensors.size(), 0);
  output->left = output->tensors.size();
  output->open_file(0);
  return SafetensorsWriter(std::move(output));
}

void SafetensorsWriter::write(std::size_t tensor, std::uint64_t first, std::span<const float> values) {
  Output& out = *output_;
  const bool known = tensor < out.tensors.size() && out.done[tensor] == 0;
  const bool follows = known && tensor == out.tensor && first == out.element;
  const bool begins = known && first == 0 && out.element == 0;
  if (!(follows || begins) || values.size() > out.tensors[tensor].elements - first) {
    refuse_as(Code::kInvalidArgument, out.directory.string(),
              fmt::format("values {} to {} of tensor {} were given out of turn", first, first + values.size(), tensor),
              fmt::format("value {} of tensor {} is next", out.element, out.tensor));
  }
  if (tensor != out.tensor || !out.placed) {
    out.go_to(tensor);
    out.tensor = tensor;
    out.placed = true;
  }
  const DType type = out.tensors[tensor].type;
  const bool bits = out.tensors[tensor].spec.bits, half = type == DType::kFloat16 && !bits;
  const auto beyond = half ? std::ranges::find_if_not(values, fits_fp16) : values.end();
  if (beyond != values.end()) {
    refuse_as(Code::kInvalidArgument, out.directory.string(),
              fmt::format("tensor \"{}\" holds {}, and fp16 ends at 65,504", printable(out.tensors[tensor].spec.name),
                          *beyond),
              "write bf16 or fp32");
  }
  out.element += values.size();
  if (type == DType::kFloat32) {
    out.append(std::as_bytes(values));
  } else {
    std::uint16_t narrow[1024];
    while (!values.empty()) {
      const std::size_t count = std::min(values.size(), std::size(narrow));
      std::ranges::transform(values.first(count), narrow, bits ? upper_half : half ? float_to_fp16 : float_to_bf16);
      out.append(std::as_bytes(std::span(narrow).first(count)));
      values = values.subspan(count);
    }
  }
  if (out.element == out.tensors[tensor].elements) out.end_tensor();
}

void SafetensorsWriter::finish() {
  Output& out = *output_;
  if (out.left > 0) {
    refuse_as(Code::kInvalidArgument, out.directory.string(),
              fmt::format("the model is finished at value {} of tensor \"{}\"", out.element,
                          printable(out.tensors[out.tensor].spec.name)),
              "write all values first");
  }
  if (!out.finished) out.name_files();
}

}  // namespace spillway
