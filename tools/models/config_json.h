// Hugging Face's config.json: looked over before it is taken for one, then asked for its keys. null stands for missing,
// as in transformers. What is wrong is refused (kInvalidArgument) in the file's name. It remembers what it was asked
// for, so that a reader can refuse the rest.
#pragma once

#include <rapidjson/document.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <new>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace spillway::models {

inline constexpr std::uint32_t kLargestSize = 1u << 24;  // in the file; keeps products of two far inside 64 bits
inline constexpr const char* kNoLarger = "Spillway takes no larger model";  // the hint for what is beyond a limit

// RapidJSON's own writes to where there is no memory left.
class JsonMemory {
 public:
  static constexpr bool kNeedFree = true;
  void* Malloc(std::size_t bytes) { return bytes == 0 ? nullptr : checked(std::malloc(bytes)); }
  void* Realloc(void* old, std::size_t, std::size_t bytes) {
    if (bytes > 0) return checked(std::realloc(old, bytes));
    std::free(old);
    return nullptr;
  }
  static void Free(void* memory) { std::free(memory); }

 private:
  static void* checked(void* memory) { return memory != nullptr ? memory : throw std::bad_alloc(); }
};

class ConfigJson {
 public:
  // `whole`: the hint where a key is missing or wrong.
  ConfigJson(std::string_view text, std::string name, std::string whole = "take the file as the model came with it");
  // The one in a model's directory. Refuses what cannot be read or is far too large to be one.
  static ConfigJson load(const std::filesystem::path& directory);
  // Such a file; the hints where it is none, and where it is not there.
  static ConfigJson read(const std::filesystem::path& file, const char* wanted, const char* absent);

  const std::string& text() const { return text_; }
  const std::string& name() const { return name_; }

  bool has(const char* key) const { return find(key) != nullptr; }
  bool is_list(const char* key) const;
  bool is_text(const char* key) const;
  // From 1 on. Without `otherwise` the key must be there.
  std::uint32_t size(const char* key, std::optional<std::uint32_t> otherwise = {},
                     std::uint32_t most = kLargestSize) const;
  double number(const char* key, double otherwise) const;
  bool flag(const char* key, bool otherwise) const;
  std::string text(const char* key, std::string_view otherwise) const;
  // Lists; empty where missing.
  std::vector<std::string> texts(const char* key) const;
  std::vector<double> numbers(const char* key) const;
  // An object inside; one without keys where missing.
  ConfigJson section(const char* key) const;
  // For the few keys whose absence and null differ.
  bool is_null(const char* key) const;
  // Keys that nothing asked for so far, in the file's order, but those with null.
  std::vector<std::string> unread() const;
  // Such a key is refused, unless it is one of `harmless` or of those that any config.json of transformers' may have
  // and that change nothing of what is trained.
  void refuse_unread(std::span<const std::string_view> harmless) const;
  // null, false, or an empty list or object.
  bool is_off(const char* key) const;
  [[noreturn]] void refuse(std::string happened) const { refuse(std::move(happened), whole_); }
  [[noreturn]] void refuse(std::string happened, std::string hint) const;

 private:
  using Text = rapidjson::UTF8<>;
  using Pool = rapidjson::MemoryPoolAllocator<JsonMemory>;
  using Value = rapidjson::GenericValue<Text, Pool>;

  const Value* find(const char* key) const;
  const Value* find_list(const char* key) const;

  std::string name_, whole_, text_;
  mutable std::set<std::string, std::less<>> asked_;
  rapidjson::GenericDocument<Text, Pool, JsonMemory> document_;
};

}  // namespace spillway::models
