#include "spillway/config_type.h"

#include <fmt/format.h>
#include <rapidjson/memorystream.h>
#include <rapidjson/reader.h>

#include <cstddef>
#include <utility>
#include <vector>

namespace spillway {
namespace {

// Finds the types that are others: from the end of the key to the end of the value.
class Types : public rapidjson::BaseReaderHandler<rapidjson::UTF8<>, Types> {
 public:
  Types(const rapidjson::MemoryStream& stream, std::string_view name) : stream_(stream), name_(name) {}

  bool Default() {
    from_ = 0;
    return true;
  }
  bool StartObject() {
    ++depth_;
    return Default();
  }
  bool StartArray() { return StartObject(); }
  bool EndObject(rapidjson::SizeType) { return depth_-- > 0; }
  bool EndArray(rapidjson::SizeType) { return depth_-- > 0; }
  bool Key(const char* data, rapidjson::SizeType size, bool) {
    const std::string_view key(data, size);
    from_ = depth_ == 1 && (key == "torch_dtype" || key == "dtype") ? stream_.Tell() : 0;
    return true;
  }
  bool String(const char* data, rapidjson::SizeType size, bool) {
    if (from_ > 0 && std::string_view(data, size) != name_) found_.emplace_back(from_, stream_.Tell());
    return Default();
  }

  const std::vector<std::pair<std::size_t, std::size_t>>& found() const { return found_; }

 private:
  const rapidjson::MemoryStream& stream_;
  const std::string_view name_;
  int depth_ = 0;
  std::size_t from_ = 0;  // where the key of a type ended; 0: this is no type
  std::vector<std::pair<std::size_t, std::size_t>> found_;
};

constexpr std::string_view torch_name(DType type) {
  switch (type) {
    case DType::kFloat32: return "float32";
    case DType::kBFloat16: return "bfloat16";
    case DType::kFloat16: return "float16";
  }
  return {};
}

}  // namespace

std::string with_type(std::string_view config, DType type) {
  rapidjson::MemoryStream stream(config.data(), config.size());
  Types types(stream, torch_name(type));
  const bool whole = !rapidjson::Reader()
                          .Parse<rapidjson::kParseIterativeFlag | rapidjson::kParseValidateEncodingFlag>(stream, types)
                          .IsError();
  std::string result;
  std::size_t done = 0;
  for (const auto& [from, end] : types.found()) {
    if (!whole) break;
    result += fmt::format("{}: \"{}\"", config.substr(done, from - done), torch_name(type));
    done = end;
  }
  return result += config.substr(done);
}

}  // namespace spillway
