#include "src/checkpoint/deepspeed_layout.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <map>
#include <optional>
#include <string_view>
#include <utility>

#include "spillway/error.h"
#include "src/formats/new_directory.h"
#include "src/formats/plain_file.h"
#include "src/formats/refuse.h"
#include "src/formats/safetensors_header.h"

namespace spillway {
namespace {

constexpr std::string_view kModelEnding = "_model_states.pt", kStateEnding = "_optim_states.pt";

[[noreturn]] void missing(const std::filesystem::path& path, std::string happened, Hint hint) {
  throw Error(Code::kNotFound, path.string(), std::move(happened), 0, std::move(hint));
}

bool take(std::string_view& text, std::string_view start) {
  if (!text.starts_with(start)) return false;
  text.remove_prefix(start.size());
  return true;
}

std::optional<std::uint32_t> take_number(std::string_view& text) {
  std::uint32_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end == text.data()) return std::nullopt;
  text.remove_prefix(static_cast<std::size_t>(end - text.data()));
  return value;
}

struct FileName {
  bool bf16 = false;
  std::optional<std::uint32_t> rank;  // none: mp_rank_00_model_states.pt
  std::uint32_t model_rank = 0;
};

// [bf16_|fp16_][zero_pp_rank_R_]mp_rank_MM ENDING
std::optional<FileName> parse_name(std::string_view name, std::string_view ending) {
  FileName parsed;
  parsed.bf16 = take(name, "bf16_");
  if (!parsed.bf16) take(name, "fp16_");
  if (take(name, "zero_pp_rank_")) {
    parsed.rank = take_number(name);
    if (!parsed.rank || !take(name, "_")) return std::nullopt;
  }
  if (!take(name, "mp_rank_")) return std::nullopt;
  const auto model_rank = take_number(name);
  if (!model_rank || name != ending) return std::nullopt;
  parsed.model_rank = *model_rank;
  return parsed;
}

bool is_digit(char c) { return c >= '0' && c <= '9'; }

// Files that say that a checkpoint is of a kind that is not taken.
void refuse_other_kinds(const std::filesystem::path& directory, const std::vector<std::string>& names) {
  for (const std::string& name : names) {
    const std::filesystem::path path = directory / name;
    if (name.find("expert_") != std::string::npos || name.starts_with("expp_rank_"))
      refuse(path, "holds experts of a mixture", "only dense models are imported");
    if (name.starts_with("layer_") && name.size() > 6 && is_digit(name[6]))
      refuse(path, "is of a pipeline-parallel run", "only checkpoints of data-parallel runs are imported");
  }
  if (std::ranges::binary_search(names, "zero") &&
      !std::ranges::any_of(names, [](const std::string& name) { return name.ends_with(kStateEnding); })) {
    refuse(directory, "is a universal checkpoint", "import the one that it was made of");
  }
}

// Paths by rank, 0 to the last without a gap.
std::vector<std::filesystem::path> in_order(const std::map<std::uint32_t, std::filesystem::path>& found,
                                            const std::filesystem::path& directory, std::string_view ending) {
  std::vector<std::filesystem::path> paths;
  for (const auto& [rank, path] : found) {
    if (rank != paths.size()) {
      missing(directory, fmt::format("has a file of rank {}, but none of rank {} (…{})", rank, paths.size(), ending),
              "copy the files of all ranks into one directory");
    }
    paths.push_back(path);
  }
  return paths;
}

std::string latest_tag(const std::filesystem::path& directory) {
  const std::filesystem::path file = directory / "latest";
  std::string tag = read_text(file, 4096);
  while (!tag.empty() && (tag.back() == '\n' || tag.back() == '\r' || tag.back() == ' ')) tag.pop_back();
  if (is_plain_file_name(tag)) return tag;
  refuse(file, fmt::format("names \"{}\", which is no directory beside it", printable(tag)), Remedy::kNameTag);
}

bool holds_states(const std::filesystem::path& directory) {
  return std::ranges::any_of(names_in(directory), [](const std::string& name) { return name.ends_with(kStateEnding); });
}

}  // namespace

DeepSpeedLayout find_deepspeed_files(const std::filesystem::path& directory, const std::string& tag) {
  DeepSpeedLayout layout;
  std::error_code ignored;
  if (!tag.empty()) {
    if (!is_plain_file_name(tag))
      refuse(directory, fmt::format("has no tag \"{}\"", tag), "a tag is a directory's name");
    layout.tag = tag;
  } else if (std::filesystem::exists(directory / "latest", ignored)) {
    layout.tag = latest_tag(directory);
  } else if (!holds_states(directory)) {
    missing(directory, "is no DeepSpeed checkpoint: it has no file `latest`",
            "name the directory that save_checkpoint() was given, or a tag in it");
  }
  layout.directory = layout.tag.empty() ? directory : directory / layout.tag;
  if (layout.tag.empty()) layout.tag = std::filesystem::absolute(directory / "").parent_path().filename().string();
  if (!std::filesystem::is_directory(layout.directory, ignored)) {
    missing(layout.directory, tag.empty() ? "is not there, though `latest` names it" : "is not there",
            Remedy::kNameAnotherTag);
  }
  const std::vector<std::string> names = names_in(layout.directory);
  refuse_other_kinds(layout.directory, names);
  std::map<std::uint32_t, std::filesystem::path> models, states;
  for (const std::string& name : names) {
    for (const auto& [ending, found] : {std::pair(kModelEnding, &models), std::pair(kStateEnding, &states)}) {
      const std::optional<FileName> parsed = parse_name(name, ending);
      if (!parsed || (ending == kStateEnding && !parsed->rank)) continue;
      const std::filesystem::path path = layout.directory / name;
      if (parsed->model_rank != 0)
        refuse(path, "is of a tensor-parallel run", "only checkpoints of data-parallel runs are imported");
      if (!found->emplace(parsed->rank.value_or(0), path).second)
        refuse(path, fmt::format("is a second file of rank {}", parsed->rank.value_or(0)), "keep those of one run");
      layout.says_bf16 |= parsed->bf16;
    }
  }
  layout.model_files = in_order(models, layout.directory, kModelEnding);
  layout.state_files = in_order(states, layout.directory, kStateEnding);
  const char* hint = "name a checkpoint of ZeRO stage 1, 2 or 3 with its optimizer states";
  if (layout.model_files.empty()) missing(layout.directory, fmt::format("has no file *{}", kModelEnding), hint);
  if (layout.state_files.empty()) missing(layout.directory, fmt::format("has no file *{}", kStateEnding), hint);
  return layout;
}

}  // namespace spillway
