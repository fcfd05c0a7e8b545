#include "src/formats/safetensors_index.h"

#include <fmt/format.h>

#include "spillway/error.h"
#include "src/formats/json_tree.h"
#include "src/formats/plain_file.h"
#include "src/formats/refuse.h"
#include "src/formats/safetensors_header.h"

namespace spillway {
namespace {}  // namespace

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
