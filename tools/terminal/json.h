// JSON for other programs, member by member: json.put("step", 3), json.put("drive", [&] { json.put("bytes", 4096); }).
#pragma once

#include <rapidjson/memorystream.h>
#include <rapidjson/prettywriter.h>
#include <rapidjson/stringbuffer.h>

#include <cmath>
#include <ranges>
#include <string>
#include <string_view>
#include <type_traits>

namespace spillway::terminal {

// An object, until text() ends it.
class Json {
 public:
  explicit Json(unsigned indent = 2) {
    writer_.SetIndent(' ', indent);
    writer_.StartObject();
  }

  template <typename Value>
  void put(std::string_view key, const Value& value) {
    put_key(key);
    item(value);
  }
  // `items` calls item() for each, or list() for one that is a list itself.
  template <typename Items>
  void list(std::string_view key, const Items& items) {
    put_key(key);
    list(items);
  }
  template <typename Items>
  void list(const Items& items) {
    writer_.StartArray();
    items();
    writer_.EndArray();
  }
  // Of a list. A function puts the members of an object; null is an empty optional, and what is not finite: JSON has no
  // word for that.
  template <typename Value>
  void item(const Value& value) {
    if constexpr (std::is_invocable_v<const Value&>) {
      writer_.StartObject();
      value();
      writer_.EndObject();
    } else if constexpr (std::is_same_v<Value, bool>) {
      writer_.Bool(value);
    } else if constexpr (std::is_floating_point_v<Value>) {
      std::isfinite(value) ? writer_.Double(value) : writer_.Null();
    } else if constexpr (std::is_unsigned_v<Value>) {
      writer_.Uint64(value);
    } else if constexpr (std::is_integral_v<Value>) {
      writer_.Int64(value);
    } else if constexpr (std::is_convertible_v<const Value&, std::string_view>) {
      writer_.String(utf8(value));
    } else if constexpr (requires { value.native(); }) {  // a path, which is a range of paths, too
      item(value.native());
    } else if constexpr (std::ranges::range<const Value>) {
      writer_.StartArray();
      for (const auto& one : value) item(one);
      writer_.EndArray();
    } else if (value) {
      item(*value);
    } else {
      writer_.Null();
    }
  }
  // What is JSON already.
  void put_raw(std::string_view key, std::string_view json) {
    put_key(key);
    writer_.RawValue(json.data(), json.size(), rapidjson::kObjectType);
  }

  std::string text() {
    if (!writer_.IsComplete()) writer_.EndObject();
    return without_controls({buffer_.GetString(), buffer_.GetSize()});
  }

  // JSON is UTF-8, and a path may be anything: `?` for each byte that is none.
  static std::string utf8(std::string_view text) {
    std::string valid;
    rapidjson::MemoryStream in(text.data(), text.size());
    while (in.Tell() < text.size()) {
      const std::size_t at = in.Tell();
      unsigned character = 0;
      if (rapidjson::UTF8<>::Decode(in, &character)) {
        valid += text.substr(at, in.Tell() - at);
      } else {
        valid += '?';
        in.src_ = in.begin_ + at + 1;
      }
    }
    return valid;
  }

 private:
  // RapidJSON escapes the control characters below U+0020 alone. Others are part of strings, and tell() would mask
  // them.
  static std::string without_controls(std::string_view json) {
    std::string shown;
    for (std::size_t i = 0; i < json.size(); ++i) {
      const auto byte = static_cast<unsigned char>(json[i]);
      const auto next = static_cast<unsigned char>(i + 1 < json.size() ? json[i + 1] : 0);
      if (byte == 0x7f) {
        shown += "\\u007f";
      } else if (byte == 0xc2 && next < 0xa0) {
        shown += next < 0x90 ? "\\u008" : "\\u009";
        shown += "0123456789abcdef"[next & 0xf];
        ++i;
      } else {
        shown += json[i];
      }
    }
    return shown;
  }

  void put_key(std::string_view key) { writer_.Key(key.data(), static_cast<rapidjson::SizeType>(key.size())); }

  rapidjson::StringBuffer buffer_;
  rapidjson::PrettyWriter<rapidjson::StringBuffer> writer_{buffer_};
};

}  // namespace spillway::terminal
