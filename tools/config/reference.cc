#include <fmt/format.h>

#include <cctype>
#include <iterator>
#include <map>

#include "tools/config/describe.h"

namespace spillway::config {
namespace {

constexpr std::string_view kHead =
    R"(<!-- Made by `spillway config --reference` from src/config/sections; a test compares the two. -->
# Configuration reference

The file is a DeepSpeed-style `ds_config.json`. Every key that DeepSpeed 0.19 reads for ZeRO training of a dense model
is known: it means here what it means there, or it has no effect or one value alone, for the reason given below.
Anything else is an error, and all errors of a file come in one run. `//` and `/* */` comments and trailing commas are
taken. Numbers may be written as `5e8`.

`spillway config FILE` prints what a file says, and where each value came from; `spillway config --explain KEY` is this
page for one key; `spillway config --schema` is the same for editors, a JSON Schema.

"auto" stands for what the Hugging Face trainer would fill in, where its row says so; in the sections
`zero_optimization`, `bf16` and `fp16` any other key that is "auto" counts as missing, as in DeepSpeed. `--model` says
how wide the model is, `--steps` how many steps the run has.
)";

std::string cell(std::string_view text) {
  std::string escaped;
  for (const char c : text) escaped += c == '|' ? std::string("\\|") : std::string(1, c);
  return escaped;
}

std::string code(std::string_view text) { return text.empty() ? "" : fmt::format("`{}`", text); }

std::string meaning(const ConfigKey& key) {
  std::string text = cell(key.doc);
  if (!key.only_for.empty()) text += fmt::format("; only for {}", list_of(choices_of(key.only_for)));
  if (key.automatic.value != nullptr) text += fmt::format("; \"auto\": {}", key.automatic.doc);
  if (!key.successor.empty()) text += fmt::format("; the key is now `{}`", key.successor);
  return text;
}

void section_text(std::string& text, std::string_view section) {
  auto out = std::back_inserter(text);
  const ConfigKey* row = find_config_key(section);
  std::string rows;
  std::map<std::string_view, std::string> idle;  // by reason
  for (const ConfigKey* key : keys_of(section)) {
    const bool nested = key->kind == KeyKind::kSection || key->kind == KeyKind::kSections;
    if (nested || has_effect(*key)) {
      fmt::format_to(std::back_inserter(rows), "| `{}` | {} | {} | {} |\n", leaf_of(key->path), cell(kind_text(*key)),
                     code(key->standard), meaning(*key));
      continue;
    }
    std::string& names = idle[key->doc];
    names += fmt::format("{}`{}`", names.empty() ? "" : ", ", leaf_of(key->path));
    if (!key->successor.empty()) names += fmt::format(" (now `{}`)", leaf_of(key->successor));
    if (key->automatic.value != nullptr) names += fmt::format(" (\"auto\": {})", key->automatic.doc);
  }
  fmt::format_to(out, "\n## {}\n", section.empty() ? "Top" : code(section));
  if (row != nullptr) {
    std::string doc(row->doc);
    doc[0] = static_cast<char>(std::toupper(static_cast<unsigned char>(doc[0])));
    fmt::format_to(out, "\n{}.\n", doc);
  }
  if (!rows.empty()) fmt::format_to(out, "\n| key | value | default | meaning |\n|---|---|---|---|\n{}", rows);
  if (!idle.empty()) fmt::format_to(out, "\n| no effect here | because |\n|---|---|\n");
  for (const auto& [why, names] : idle) fmt::format_to(out, "| {} | {} |\n", names, why);
}

}  // namespace

std::string reference() {
  std::string text(kHead);
  for (const std::string_view section : sections()) section_text(text, section);
  return text;
}

}  // namespace spillway::config
