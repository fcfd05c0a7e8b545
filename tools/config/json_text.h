// JSON out of texts that are JSON already, as the rows of the table give their values.
#pragma once

#include <rapidjson/prettywriter.h>
#include <rapidjson/stringbuffer.h>

#include <string_view>

namespace spillway::config {

using Json = rapidjson::PrettyWriter<rapidjson::StringBuffer>;

inline void add_key(Json& json, std::string_view key) {
  json.Key(key.data(), static_cast<rapidjson::SizeType>(key.size()));
}

inline void text(Json& json, std::string_view key, std::string_view value) {
  add_key(json, key);
  json.String(value.data(), static_cast<rapidjson::SizeType>(value.size()));
}

// `value` is JSON.
inline void raw(Json& json, std::string_view key, std::string_view value) {
  add_key(json, key);
  json.RawValue(value.data(), value.size(), rapidjson::kObjectType);
}

}  // namespace spillway::config
