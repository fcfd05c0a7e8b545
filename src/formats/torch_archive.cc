#include "src/formats/torch_archive.h"

#include <fmt/format.h>
#include <zip.h>

#include <algorithm>
#include <bit>
#include <map>
#include <string>
#include <string_view>
#include <utility>

#include "spillway/error.h"
#include "spillway/units.h"
#include "src/formats/element_count.h"
#include "src/formats/plain_file.h"
#include "src/formats/refuse.h"
#include "src/formats/safetensors_header.h"
#include "src/formats/stored_elements.h"

namespace spillway {
namespace {

static_assert(std::endian::native == std::endian::little, "storages are little-endian");

using Kind = PickleValue::Kind;

constexpr std::uint64_t kMostPickleBytes = 256 * kMiB;
constexpr std::uint64_t kPieceBytes = 256 * kKiB;

struct CloseEntry {
  void operator()(zip_file_t* file) const { zip_fclose(file); }
};
struct CloseArchive {
  void operator()(zip_t* archive) const { zip_discard(archive); }
};

[[noreturn]] void corrupt(const std::filesystem::path& path, std::string happened) {
  throw Error(Code::kCorrupt, {path.string(), std::move(happened), 0, "check the drive; copy the checkpoint again"});
}

[[noreturn]] void wrong_checksum(const std::filesystem::path& path, const std::string& entry) {
  throw Error(Code::kCorrupt, path.string(), fmt::format("entry {} does not match its CRC-32", entry), 0,
              Remedy::kImportUnverified);
}

// What is no zip, said as precisely as its first bytes allow.
void check_start(const std::filesystem::path& path) {
  const PlainFile file = PlainFile::open_to_read(path);
  std::byte start[4] = {};
  file.read_at(0, std::span(start).first(std::min<std::uint64_t>(sizeof(start), file.size_bytes())));
  const std::string_view text(reinterpret_cast<const char*>(start), sizeof(start));
  if (text == "PK\x03\x04") return;
  if (text.starts_with('\x80')) {
    refuse(path.string(), "is in torch.save()'s format from before PyTorch 1.6, a bare pickle",
           "load it and save it again with _use_new_zipfile_serialization=True");
  }
  refuse(path.string(), "is no file of torch.save(): it does not begin as a zip", "copy it again");
}

std::optional<DType> storage_type(const PickleValue& global) {
  if (global.is_global("torch", "FloatStorage")) return DType::kFloat32;
  if (global.is_global("torch", "BFloat16Storage")) return DType::kBFloat16;
  if (global.is_global("torch", "HalfStorage")) return DType::kFloat16;
  return std::nullopt;
}

std::string name_of_global(const PickleValue& value) {
  if (!value.is(Kind::kGlobal)) return "something that is no class";
  return printable(fmt::format("{}.{}", value.items[0]->text, value.items[1]->text));
}

// The call that makes a tensor, out of those around it: of a parameter, of a tensor with attributes.
struct MadeTensor {
  const PickleValue* arguments = nullptr;
  const PickleValue* attributes = nullptr;
};

MadeTensor made_tensor(const PickleValue& value) {
  if (const PickleValue* a = value.arguments_of("torch._utils", "_rebuild_tensor_v2")) return {a, nullptr};
  for (const char* wrapper : {"_rebuild_parameter", "_rebuild_parameter_with_state"}) {
    const PickleValue* a = value.arguments_of("torch._utils", wrapper);
    if (a && !a->items.empty()) {
      const PickleValue* inner = a->items[0]->arguments_of("torch._utils", "_rebuild_tensor_v2");
      return {inner, a->items.size() > 3 && a->items[3]->is(Kind::kDict) ? a->items[3] : nullptr};
    }
  }
  // (function, type, its arguments, attributes)
  const PickleValue* a = value.arguments_of("torch._tensor", "_rebuild_from_type_v2");
  if (a && a->items.size() == 4 && a->items[0]->is_global("torch._utils", "_rebuild_tensor_v2"))
    return {a->items[2], a->items[3]->is(Kind::kDict) ? a->items[3] : nullptr};
  return {};
}

bool is_contiguous(const std::vector<std::uint64_t>& shape, const std::vector<std::uint64_t>& strides) {
  if (shape.size() != strides.size()) return false;
  std::uint64_t stride = 1;
  for (std::size_t i = shape.size(); i-- > 0; stride *= shape[i]) {
    if (shape[i] != 1 && strides[i] != stride) return false;
  }
  return true;
}

}  // namespace

std::vector<std::uint64_t> torch_shape(const PickleValue& value, const std::string& object) {
  const PickleValue* sizes = &value;
  if (const PickleValue* arguments = value.arguments_of("torch", "Size"); arguments && arguments->items.size() == 1)
    sizes = arguments->items[0];
  if (!sizes->is(Kind::kTuple) && !sizes->is(Kind::kList)) refuse(object, "has no shape", "save the checkpoint again");
  std::vector<std::uint64_t> shape;
  for (const PickleValue* size : sizes->items) {
    const auto extent = size->unsigned_integer();
    if (!extent) refuse(object, "has a shape that is none", "save the checkpoint again");
    shape.push_back(*extent);
  }
  return shape;
}

struct TorchArchive::File {
  struct Entry {
    std::uint64_t bytes = 0;
    std::unique_ptr<zip_file_t, CloseEntry> open;  // once it has been read
    std::uint64_t at = 0;                          // where the next read of it begins
  };

  std::filesystem::path path;
  bool checked = true;
  std::unique_ptr<zip_t, CloseArchive> archive;
  std::string folder;                                         // NAME/
  std::map<std::string, std::uint64_t, std::less<>> numbers;  // of entries below it
  std::map<std::uint64_t, Entry> entries;                     // those that have been asked for
  std::optional<Pickle> pickle;
  std::vector<std::byte> piece;

  void list();
  // The number of an entry below the folder, checked; nothing when there is none.
  std::optional<std::uint64_t> find(std::string_view name);
  void read(std::uint64_t number, std::uint64_t offset, std::span<std::byte> out);
  std::vector<std::byte> read_all(std::uint64_t number, std::uint64_t most);
  std::string name(std::uint64_t number) const {
    const char* raw = zip_get_name(archive.get(), number, ZIP_FL_ENC_RAW);
    return printable(raw ? raw : "");
  }
};

void TorchArchive::File::list() {
  const zip_int64_t count = zip_get_num_entries(archive.get(), 0);
  std::vector<std::string> pickles;
  for (zip_int64_t i = 0; i < count; ++i) {
    const char* raw = zip_get_name(archive.get(), static_cast<zip_uint64_t>(i), ZIP_FL_ENC_RAW);
    const std::string name = raw ? raw : "";
    constexpr std::string_view kPickle = "/data.pkl";
    if (name.ends_with(kPickle) && name.find('/') == name.size() - kPickle.size()) pickles.push_back(name);
    if (!numbers.emplace(name, static_cast<std::uint64_t>(i)).second)
      refuse(path.string(), fmt::format("has two entries {}", printable(name)), "copy it again");
  }
  if (pickles.size() != 1) {
    refuse(path.string(), fmt::format("has {} entries NAME/data.pkl, not one", pickles.size()),
           "name a checkpoint that torch.save() wrote");
  }
  folder = pickles[0].substr(0, pickles[0].find('/') + 1);
}

std::optional<std::uint64_t> TorchArchive::File::find(std::string_view name) {
  const auto found = numbers.find(folder + std::string(name));
  if (found == numbers.end()) return std::nullopt;
  const std::uint64_t number = found->second;
  if (entries.contains(number)) return number;
  zip_stat_t status;
  zip_stat_init(&status);
  if (zip_stat_index(archive.get(), number, 0, &status) != 0) corrupt(path, zip_strerror(archive.get()));
  if (status.comp_method != ZIP_CM_STORE || status.encryption_method != ZIP_EM_NONE ||
      status.size != status.comp_size) {
    refuse(path.string(), fmt::format("entry {} is compressed or encrypted", this->name(number)),
           "torch.save() stores as it is; unpack it and save it again");
  }
  entries[number].bytes = status.size;
  return number;
}

void TorchArchive::File::read(std::uint64_t number, std::uint64_t offset, std::span<std::byte> out) {
  Entry& entry = entries.at(number);
  if (!entry.open) entry.open.reset(zip_fopen_index(archive.get(), number, 0));
  if (!entry.open)
    corrupt(path, fmt::format("entry {} cannot be opened: {}", name(number), zip_strerror(archive.get())));
  const auto fail = [&](const char* what) {
    corrupt(path, fmt::format("entry {}, {} bytes from {}: {}", name(number), out.size(), offset, what));
  };
  if (entry.at != offset && zip_fseek(entry.open.get(), static_cast<zip_int64_t>(offset), SEEK_SET) != 0)
    fail(zip_file_strerror(entry.open.get()));
  entry.at = offset + out.size();
  while (!out.empty()) {
    const zip_int64_t got = zip_fread(entry.open.get(), out.data(), out.size());
    if (got < 0) fail(zip_file_strerror(entry.open.get()));
    if (got == 0) fail("it ends early");
    out = out.subspan(static_cast<std::size_t>(got));
  }
}

std::vector<std::byte> TorchArchive::File::read_all(std::uint64_t number, std::uint64_t most) {
  const std::uint64_t bytes = entries.at(number).bytes;
  std::error_code ignored;
  if (bytes > most || bytes > std::filesystem::file_size(path, ignored)) {
    refuse(path.string(), fmt::format("entry {} claims {} bytes", name(number), bytes),
           fmt::format("at most {} are read, and no more than the file has", most));
  }
  std::vector<std::byte> all(bytes);
  read(number, 0, all);
  // The end of an entry is where libzip compares its CRC-32.
  std::byte beyond;
  if (checked && zip_fread(entries.at(number).open.get(), &beyond, 1) != 0) wrong_checksum(path, name(number));
  return all;
}

TorchArchive::TorchArchive(std::unique_ptr<File> file) : file_(std::move(file)) {}
TorchArchive::TorchArchive(TorchArchive&&) noexcept = default;
TorchArchive& TorchArchive::operator=(TorchArchive&&) noexcept = default;
TorchArchive::~TorchArchive() = default;

TorchArchive TorchArchive::open(const std::filesystem::path& path, bool checked) {
  check_start(path);
  auto file = std::make_unique<File>();
  file->path = path;
  file->checked = checked;
  int code = 0;
  file->archive.reset(zip_open(path.c_str(), ZIP_RDONLY, &code));
  if (!file->archive) {
    zip_error_t error;
    zip_error_init_with_code(&error, code);
    const std::string what = zip_error_strerror(&error);
    const int of_system = zip_error_code_system(&error);
    zip_error_fini(&error);
    if (code == ZIP_ER_OPEN || code == ZIP_ER_READ || code == ZIP_ER_SEEK)
      fail_file(path, "cannot be opened or read", of_system);
    refuse(path.string(), fmt::format("cannot be read as a zip: {}", what), "cut short, perhaps; copy it again");
  }
  file->list();
  if (const auto order = file->find("byteorder")) {
    const std::vector<std::byte> text = file->read_all(*order, 16);
    if (std::string_view(reinterpret_cast<const char*>(text.data()), text.size()) != "little")
      refuse(path.string(), "was written on a big-endian machine", "save it again on a little-endian one");
  }
  file->pickle = Pickle::parse(file->read_all(*file->find("data.pkl"), kMostPickleBytes), path.string());
  return TorchArchive(std::move(file));
}

const std::filesystem::path& TorchArchive::path() const { return file_->path; }
const PickleValue& TorchArchive::root() const { return file_->pickle->root(); }

std::optional<TorchTensor> TorchArchive::tensor(const PickleValue& value, const std::string& name) const {
  const MadeTensor made = made_tensor(value);
  if (!made.arguments) return std::nullopt;
  const std::string object = fmt::format("{}: {}", path().string(), printable(name));
  const auto malformed = [&] { refuse(object, "is no tensor as torch.save() writes it", "save the checkpoint again"); };
  // (storage, first element, sizes, strides, requires_grad, hooks, …); the storage: ("storage", class, key, device, n)
  const auto& arguments = made.arguments->items;
  if (!made.arguments->is(Kind::kTuple) || arguments.size() < 4 || !arguments[0]->is(Kind::kPersistent)) malformed();
  const PickleValue& id = *arguments[0]->items[0];
  if (!id.is(Kind::kTuple) || id.items.size() != 5 || !id.items[2]->is(Kind::kText)) malformed();
  const std::optional<DType> type = storage_type(*id.items[1]);
  if (!type) {
    refuse(object, fmt::format("is kept in {}", name_of_global(*id.items[1])),
           "tensors of fp32, bf16 and fp16 (torch.FloatStorage, BFloat16Storage, HalfStorage) are read");
  }
  TorchTensor tensor{.type = *type, .shape = torch_shape(*arguments[2], object), .attributes = made.attributes};
  const bool empty = std::ranges::find(tensor.shape, 0u) != tensor.shape.end();
  tensor.elements = empty ? 0 : count_elements(object, tensor.shape);
  const auto first = arguments[1]->unsigned_integer(), stored = id.items[4]->unsigned_integer();
  if (!first || !stored) malformed();
  tensor.first = *first;
  if (!is_contiguous(tensor.shape, torch_shape(*arguments[3], object)) && tensor.elements > 0)
    refuse(object, "is not contiguous", "call contiguous() on it before it is saved");
  const auto entry = file_->find(fmt::format("data/{}", id.items[2]->text));
  const std::uint64_t there = entry ? file_->entries.at(*entry).bytes / size_of(*type) : 0;
  if (!entry || *stored > there || tensor.first > *stored || tensor.elements > *stored - tensor.first) {
    refuse(object,
           fmt::format("has {} elements from {} on in a storage of {}, and the file has {}", tensor.elements,
                       tensor.first, *stored, there),
           "cut short, perhaps; copy it again");
  }
  tensor.entry = *entry;
  return tensor;
}

void TorchArchive::read(const TorchTensor& tensor, std::uint64_t first, std::span<float> out) {
  SPILLWAY_CHECK(first <= tensor.elements && out.size() <= tensor.elements - first, "a read lies in its tensor");
  const std::uint64_t size = size_of(tensor.type);
  file_->piece.resize(kPieceBytes);
  while (!out.empty()) {
    const std::span<float> part = out.first(std::min<std::size_t>(out.size(), kPieceBytes / size));
    const std::span<std::byte> bytes = std::span(file_->piece).first(part.size() * size);
    file_->read(tensor.entry, (tensor.first + first) * size, bytes);
    widen(bytes, tensor.type, part);
    first += part.size();
    out = out.subspan(part.size());
  }
}

std::uint64_t TorchArchive::entry_bytes(const TorchTensor& tensor) const {
  return file_->entries.at(tensor.entry).bytes;
}

void TorchArchive::verify(const TorchTensor& tensor, const std::function<void(std::uint64_t)>& on_bytes) {
  const std::unique_ptr<zip_file_t, CloseEntry> entry(zip_fopen_index(file_->archive.get(), tensor.entry, 0));
  if (!entry)
    corrupt(path(), fmt::format("entry {} cannot be opened: {}", file_->name(tensor.entry),
                                zip_strerror(file_->archive.get())));
  file_->piece.resize(kPieceBytes);
  std::uint64_t left = file_->entries.at(tensor.entry).bytes;
  for (zip_int64_t got = 1; got != 0; left -= static_cast<std::uint64_t>(got)) {
    got = zip_fread(entry.get(), file_->piece.data(), file_->piece.size());
    if (got < 0 && zip_error_code_zip(zip_file_get_error(entry.get())) == ZIP_ER_CRC)
      wrong_checksum(path(), file_->name(tensor.entry));
    if (got < 0) {
      corrupt(path(),
              fmt::format("entry {} cannot be read: {}", file_->name(tensor.entry), zip_file_strerror(entry.get())));
    }
    on_bytes(static_cast<std::uint64_t>(got));
  }
  if (left != 0) corrupt(path(), fmt::format("entry {} ends {} bytes early", file_->name(tensor.entry), left));
}

}  // namespace spillway
