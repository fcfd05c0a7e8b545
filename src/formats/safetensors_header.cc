#include "src/formats/safetensors_header.h"

#include <fmt/format.h>
#include <rapidjson/error/en.h>
#include <rapidjson/memorystream.h>
#include <rapidjson/reader.h>

#include <algorithm>
#include <array>
#include <numeric>
#include <optional>

#include "spillway/error.h"
#include "spillway/masked.h"
#include "src/formats/json_tree.h"
#include "src/formats/plain_file.h"
#include "src/formats/refuse.h"

namespace spillway {
namespace {

struct DTypeRow {
  std::string_view name;
  unsigned bits;
  std::optional<DType> type;
};

// All dtypes of safetensors 0.8 (`Dtype` in its tensor.rs). Those that cannot be read are known all the same: a model
// file may hold masks and counters beside its weights.
constexpr std::array<DTypeRow, 22> kTypesOfTheFormat = {{
    {"F32", 32, DType::kFloat32},
    {"BF16", 16, DType::kBFloat16},
    {"F16", 16, DType::kFloat16},
    {"F64", 64, {}},
    {"I64", 64, {}},
    {"I32", 32, {}},
    {"I16", 16, {}},
    {"I8", 8, {}},
    {"U64", 64, {}},
    {"U32", 32, {}},
    {"U16", 16, {}},
    {"U8", 8, {}},
    {"BOOL", 8, {}},
    {"C64", 64, {}},
    {"F8_E4M3", 8, {}},
    {"F8_E5M2", 8, {}},
    {"F8_E8M0", 8, {}},
    {"F8_E4M3FNUZ", 8, {}},
    {"F8_E5M2FNUZ", 8, {}},
    {"F6_E2M3", 6, {}},
    {"F6_E3M2", 6, {}},
    {"F4", 4, {}},
}};

constexpr std::size_t kMostDimensions = 64;

std::string tensor_text(std::string_view name) { return fmt::format("tensor \"{}\"", printable(name)); }

// Takes exactly the shape of a header and nothing else, so that what a hostile text can make it store is bounded by the
// text's length, and nesting by the format's own three levels.
class HeaderHandler : public rapidjson::BaseReaderHandler<rapidjson::UTF8<>, HeaderHandler> {
 public:
  explicit HeaderHandler(std::vector<TensorEntry>& tensors) : tensors_(tensors) {}

  bool Default() { return refuse(); }
  bool Uint(unsigned value) { return Uint64(value); }
  bool Uint64(std::uint64_t value) {
    if (state_ == State::kShape && tensor().shape.size() < kMostDimensions) {
      tensor().shape.push_back(value);
      return true;
    }
    if (state_ == State::kOffsets && offsets_ < 2) {
      (offsets_++ == 0 ? tensor().offset : tensor().bytes) = value;  // `bytes` holds the end until the check
      return true;
    }
    return refuse();
  }
  bool String(const char* data, rapidjson::SizeType size, bool) {
    if (state_ == State::kMetadataValue) return go(State::kMetadata);
    if (state_ != State::kDType) return refuse();
    tensor().dtype.assign(data, size);
    return go(State::kFields);
  }
  bool StartObject() {
    switch (state_) {
      case State::kStart: return go(State::kNames);
      case State::kEntry: return go(State::kFields);
      case State::kMetadataStart: return go(State::kMetadata);
      default: return refuse();
    }
  }
  bool Key(const char* data, rapidjson::SizeType size, bool) {
    const std::string_view name(data, size);
    if (state_ == State::kMetadata) return go(State::kMetadataValue);
    if (state_ == State::kNames && name == "__metadata__") {
      if (metadata_seen_) return refuse("__metadata__ occurs twice");
      metadata_seen_ = true;
      return go(State::kMetadataStart);
    }
    if (state_ == State::kNames) {
      tensors_.push_back({.name = std::string(name), .dtype = {}, .type = {}, .shape = {}});
      fields_ = offsets_ = 0;
      return go(State::kEntry);
    }
    if (state_ == State::kFields && name == "dtype") return field(1, State::kDType);
    if (state_ == State::kFields && name == "shape") return field(2, State::kShapeStart);
    if (state_ == State::kFields && name == "data_offsets") return field(4, State::kOffsetsStart);
    return refuse(fmt::format("{}: unknown field \"{}\"", tensor_text(tensor().name), printable(name)));
  }
  bool EndObject(rapidjson::SizeType) {
    if (state_ == State::kMetadata) return go(State::kNames);
    if (state_ == State::kNames) return go(State::kEnd);
    if (fields_ != 7) return refuse(tensor_text(tensor().name) + ": dtype, shape or data_offsets is missing");
    return go(State::kNames);
  }
  bool StartArray() {
    if (state_ == State::kShapeStart) return go(State::kShape);
    if (state_ == State::kOffsetsStart) return go(State::kOffsets);
    return refuse();
  }
  bool EndArray(rapidjson::SizeType) {
    if (state_ == State::kOffsets && offsets_ != 2) return refuse();
    return go(State::kFields);
  }

  const std::string& problem() const { return problem_; }

 private:
  enum class State {
    kStart,
    kNames,
    kEntry,
    kFields,
    kDType,
    kShapeStart,
    kShape,
    kOffsetsStart,
    kOffsets,
    kMetadataStart,
    kMetadata,
    kMetadataValue,
    kEnd
  };

  TensorEntry& tensor() { return tensors_.back(); }
  bool go(State next) {
    state_ = next;
    return true;
  }
  bool field(unsigned bit, State next) {
    if ((fields_ & bit) != 0) return refuse(tensor_text(tensor().name) + ": a field occurs twice");
    fields_ |= bit;
    return go(next);
  }
  bool refuse(std::string problem) {
    problem_ = std::move(problem);
    return false;
  }
  bool refuse() {
    const bool in_tensor = !tensors_.empty() && state_ >= State::kEntry && state_ <= State::kOffsets;
    return refuse(in_tensor ? tensor_text(tensor().name) +
                                  ": not {\"dtype\": …, \"shape\": […], \"data_offsets\": [begin, end]}"
                            : "its header is not an object of tensors");
  }

  std::vector<TensorEntry>& tensors_;
  State state_ = State::kStart;
  unsigned fields_ = 0, offsets_ = 0;
  bool metadata_seen_ = false;
  std::string problem_;
};

// Null when all is well.
std::optional<std::string> check_tensor(TensorEntry& tensor, std::uint64_t data_bytes) {
  const std::uint64_t begin = tensor.offset, end = tensor.bytes;
  const auto row = std::find_if(kTypesOfTheFormat.begin(), kTypesOfTheFormat.end(),
                                [&](const DTypeRow& r) { return r.name == tensor.dtype; });
  if (row == kTypesOfTheFormat.end()) return fmt::format("unknown dtype \"{}\"", printable(tensor.dtype));
  tensor.type = row->type;
  tensor.elements = 1;
  std::uint64_t bits = 0;
  for (const std::uint64_t dimension : tensor.shape) {
    if (__builtin_mul_overflow(tensor.elements, dimension, &tensor.elements)) return "its shape overflows 64 bits";
  }
  if (__builtin_mul_overflow(tensor.elements, std::uint64_t{row->bits}, &bits)) return "its size overflows 64 bits";
  if (begin > end || end > data_bytes) {
    return fmt::format("its data [{}, {}) lies outside the file's {} bytes of data", begin, end, data_bytes);
  }
  if (bits % 8 != 0 || bits / 8 != end - begin) {
    return fmt::format("{} elements of {} do not take {} bytes", tensor.elements, tensor.dtype, end - begin);
  }
  tensor.bytes = end - begin;
  return std::nullopt;
}

// The first gap or overlap; null when the tensors cover the data exactly.
std::optional<std::string> check_cover(const std::vector<TensorEntry>& tensors, std::uint64_t data_bytes) {
  std::vector<std::size_t> order(tensors.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return std::pair(tensors[a].offset, tensors[a].bytes) < std::pair(tensors[b].offset, tensors[b].bytes);
  });
  std::uint64_t covered = 0;
  for (const std::size_t i : order) {
    const TensorEntry& tensor = tensors[i];
    if (tensor.offset != covered) {
      return fmt::format("{}: its data starts at {}, {} the end of the tensor before it, {}", tensor_text(tensor.name),
                         tensor.offset, tensor.offset < covered ? "before" : "after", covered);
    }
    covered += tensor.bytes;
  }
  if (covered != data_bytes) return fmt::format("{} bytes of data belong to no tensor", data_bytes - covered);
  return std::nullopt;
}

}  // namespace

std::string printable(std::string_view name) {
  constexpr std::size_t kLongest = 120;
  std::string text;
  while (!name.empty() && text.size() < kLongest) {
    rapidjson::MemoryStream stream(name.data(), name.size());
    unsigned code = 0;
    const bool whole = rapidjson::UTF8<>::Decode(stream, &code);
    const std::string_view character = name.substr(0, whole ? stream.Tell() : 1);
    text += whole && !is_control(character) ? character : "?";
    name.remove_prefix(character.size());
  }
  return name.empty() ? text : text + "…";
}

std::vector<TensorEntry> parse_safetensors_header(const std::string& path, std::string_view header, std::uint32_t file,
                                                  std::uint64_t data_start, std::uint64_t data_bytes) {
  const auto refuse = [&](const std::string& happened) {
    throw Error(Code::kInvalidArgument, {.object = path,
                                         .happened = happened,
                                         .errno_value = 0,
                                         .hint = "not a well-formed safetensors file; copy or export it again"});
  };
  std::vector<TensorEntry> tensors;
  // RapidJSON takes a zero byte for the end of the text.
  if (header.find('\0') != std::string_view::npos) refuse("its header holds a zero byte");
  rapidjson::MemoryStream stream(header.data(), header.size());
  HeaderHandler handler(tensors);
  rapidjson::Reader reader;
  const auto result =
      reader.Parse<rapidjson::kParseIterativeFlag | rapidjson::kParseValidateEncodingFlag>(stream, handler);
  if (!handler.problem().empty()) refuse(handler.problem());
  if (result.IsError()) {
    refuse(fmt::format("its header is not JSON: {} (byte {})", rapidjson::GetParseError_En(result.Code()),
                       result.Offset()));
  }
  for (TensorEntry& tensor : tensors) {
    if (const auto problem = check_tensor(tensor, data_bytes)) refuse(tensor_text(tensor.name) + ": " + *problem);
  }
  if (const auto problem = check_cover(tensors, data_bytes)) refuse(*problem);
  std::sort(tensors.begin(), tensors.end(), [](const auto& a, const auto& b) { return a.name < b.name; });
  const auto twice =
      std::adjacent_find(tensors.begin(), tensors.end(), [](const auto& a, const auto& b) { return a.name == b.name; });
  if (twice != tensors.end()) refuse(tensor_text(twice->name) + ": it occurs twice");
  for (TensorEntry& tensor : tensors) {
    tensor.file = file;
    tensor.offset += data_start;
  }
  return tensors;
}

std::map<std::string, std::string> parse_safetensors_index(const std::string& path, std::string_view text) {
  JsonValue root;
  if (const auto problem = parse_json(text, {.depth = 8, .values = 4'000'000}, root)) {
    const TextPosition at = position_of(text, problem->offset);
    refuse(fmt::format("{}:{}:{}", path, at.line, at.column), problem->what, "copy it again");
  }
  const JsonValue* names = root.member("weight_map");
  if (names == nullptr || names->kind != JsonValue::Kind::kObject || names->items.empty()) {
    refuse(path, "it has no weight_map with tensors in it", "an index maps tensor names to files");
  }
  std::map<std::string, std::string> index;
  for (std::size_t i = 0; i < names->items.size(); ++i) {
    const std::string& tensor = names->keys[i].name;
    const JsonValue& file = names->items[i];
    const std::string subject = fmt::format("tensor \"{}\": ", printable(tensor));
    if (file.kind != JsonValue::Kind::kString || !is_plain_file_name(file.text)) {
      refuse(path, fmt::format("{}its file is \"{}\"", subject, printable(file.text)),
             "an index may only name files in its own directory");
    }
    if (!index.emplace(tensor, file.text).second) refuse(path, subject + "it occurs twice", "copy it again");
  }
  return index;
}

}  // namespace spillway
