#include "src/config/hidden_size.h"

#include <algorithm>

#include "spillway/error.h"
#include "src/formats/json_tree.h"
#include "src/formats/plain_file.h"

namespace spillway {
namespace {

constexpr std::uint64_t kWidest = 1 << 24;  // its square is far from the end of 64 bits

std::optional<std::uint64_t> width_of(const JsonValue& model) {
  for (const char* name : {"hidden_size", "n_embd", "d_model"}) {
    const JsonValue* width = model.member(name);
    if (width != nullptr && width->integer && *width->integer > 0 && *width->integer <= kWidest) return width->integer;
  }
  std::uint64_t widest = 0;
  if (const JsonValue* all = model.member("hidden_sizes"); all != nullptr) {
    for (const JsonValue& width : all->items) widest = std::max(widest, width.integer.value_or(0));
  }
  if (widest > 0 && widest <= kWidest) return widest;
  return std::nullopt;
}

}  // namespace

std::optional<std::uint64_t> hidden_size_of(std::string_view config_json) {
  JsonValue model;
  if (parse_json(config_json, {}, model)) return std::nullopt;
  if (const auto width = width_of(model)) return width;
  const JsonValue* text = model.member("text_config");
  return text == nullptr ? std::nullopt : width_of(*text);
}

std::optional<std::uint64_t> hidden_size_in(const std::filesystem::path& directory) {
  try {
    return hidden_size_of(read_text(directory / "config.json", 16 << 20));
  } catch (const Error&) {
    return std::nullopt;
  }
}

}  // namespace spillway
