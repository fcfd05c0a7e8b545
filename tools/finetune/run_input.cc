#include "tools/finetune/run_input.h"

#include <fmt/format.h>
#include <xxhash.h>

#include <algorithm>
#include <charconv>
#include <fstream>
#include <system_error>
#include <utility>

#include "spillway/error.h"
#include "spillway/snapshot.h"
#include "spillway/store.h"
#include "tools/finetune/run_output.h"
#include "tools/models/config_json.h"

namespace spillway::models::finetune {
namespace {

constexpr std::string_view kOfData = " of data of ", kStoreFile = "spillway.store";

[[noreturn]] void refuse(std::string object, std::string happened, std::string hint) {
  throw Error(
      Code::kInvalidArgument,
      {.object = std::move(object), .happened = std::move(happened), .errno_value = 0, .hint = std::move(hint)});
}

// What tells files from others without reading all of them: their lengths, and a hash of both ends of each.
std::string mark_of(const std::vector<std::filesystem::path>& files) {
  constexpr std::uint64_t kEnd = 64 << 10;
  std::uint64_t all_bytes = 0;
  std::string ends;
  for (const std::filesystem::path& file : files) {
    std::error_code ignored;
    const std::uint64_t bytes = std::filesystem::file_size(file, ignored);
    std::ifstream stream(file, std::ios::binary);
    for (const std::uint64_t from : {std::uint64_t{0}, bytes - std::min(bytes, kEnd)}) {
      std::string end(std::min(bytes, kEnd), '\0');
      stream.seekg(static_cast<std::streamoff>(from)).read(end.data(), static_cast<std::streamsize>(end.size()));
      ends += end;
    }
    all_bytes += bytes;
  }
  return fmt::format("{} bytes, {:016x}", all_bytes, XXH3_64bits(ends.data(), ends.size()));
}

std::vector<std::filesystem::path> model_files(const std::filesystem::path& directory) {
  std::vector<std::filesystem::path> files{directory / "config.json"};
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator(directory, ignored)) {
    if (entry.path().extension() == ".safetensors") files.push_back(entry.path());
  }
  std::ranges::sort(files);
  return files;
}

}  // namespace

AutoValues automatic(const FinetuneOptions& options) {
  AutoValues values;
  values.total_steps = options.steps;
  try {
    values.hidden_size = load_trained_model(options.model, options.sequence).width;
  } catch (const Error&) {
    values.hidden_size.reset();
  }
  return values;
}

std::string Position::text(std::uint32_t sequence) const {
  return fmt::format("row {} of sequence {}{}{}", row, sequence, data.empty() ? "" : kOfData, data);
}

Position Position::parse(std::span<const std::byte> blob, const FinetuneOptions& options) {
  const std::string text(reinterpret_cast<const char*>(blob.data()), blob.size());
  Position position;
  if (text.empty()) return position;  // stopped before a step was committed
  const std::string_view start = "row ";
  const char* begin = text.data() + std::min(start.size(), text.size());
  std::from_chars(begin, text.data() + text.size(), position.row);
  if (const auto of = text.find(kOfData); of != text.npos) position.data = text.substr(of + kOfData.size());
  if (position.text(options.sequence) != text) {
    refuse("--seq", fmt::format("the run was begun with another row length: \"{}\"", text),
           "go on with the same --seq");
  }
  return position;
}

void check_options(const FinetuneOptions& options, const Config& config, const TrainedModel& model) {
  if (model.positions > 0 && options.sequence > model.positions) {
    refuse("--seq", fmt::format("{} tokens are more than the model's {} positions", options.sequence, model.positions),
           fmt::format("use --seq {} or less", model.positions));
  }
  if (options.resume && config.nvme_paths.empty()) {
    refuse("--resume", "the configuration has no nvme_path, so there is no store", "start without --resume");
  }
  std::error_code ignored;
  if (!options.out.empty() && std::filesystem::equivalent(options.out, options.model, ignored)) {
    refuse("--out", "is the model that is trained", "name another directory");
  }
  const bool link = !options.out.empty() && std::filesystem::is_symlink(plain(options.out), ignored);
  if (link && !std::filesystem::exists(options.out, ignored))
    refuse("--out", "is a link to what is not there", "make that directory, or name another");
  if (!options.out.empty() && std::filesystem::exists(options.out / "spillway.json", ignored)) {
    refuse("--out", "is a snapshot, whose exact weights would be replaced", "name another directory");
  }
  const auto place = [&](const std::filesystem::path& file) {
    return std::filesystem::weakly_canonical(file, ignored);
  };
  if (!options.log.empty() && place(options.log) == place(options.trace))
    refuse("--trace", "is the file of --log", "name another file");
}

std::vector<std::filesystem::path> store_of_rank(const std::vector<std::filesystem::path>& paths, const Ranks& ranks) {
  std::vector<std::filesystem::path> own;
  std::error_code ignored;
  for (const std::filesystem::path& path : paths) {
    const auto holds_rank = [&](std::uint32_t rank) {
      return std::filesystem::exists(path_of_rank(path, rank, rank + 2) / kStoreFile, ignored);
    };
    const bool alone = std::filesystem::exists(path / kStoreFile, ignored);
    if (ranks.alone() && !alone && holds_rank(0)) {
      refuse(path.string(), "holds a store of several ranks, and this is one process alone",
             "start as many with mpirun as it was made by, or name another nvme_path");
    }
    if (!ranks.alone() && (alone || holds_rank(ranks.count()))) {
      refuse(path.string(),
             fmt::format("holds a store of {}, and {} are training", alone ? "one process alone" : "more ranks",
                         ranks.count()),
             "start as many as it was made by, or name another nvme_path");
    }
    own.push_back(path_of_rank(path, ranks.rank(), ranks.count()));
  }
  return own;
}

std::optional<TrainedModel> model_of(const std::vector<std::filesystem::path>& store,
                                     const std::filesystem::path& snapshot, std::uint32_t sequence) {
  try {
    if (!snapshot.empty() && !find_snapshot(snapshot)) return std::nullopt;
    if (!snapshot.empty()) return load_trained_model(snapshot, sequence);
    for (const Attachment& attachment : inspect_store(store).model.attachments) {
      if (attachment.name != "config.json") continue;
      return trained_model(ConfigJson(attachment.text, attachment.name), sequence);
    }
  } catch (const Error&) {  // what is wrong with it the engine says
  }
  return std::nullopt;
}

void check_same_model(const TrainedModel& there, const TrainedModel& here, const std::string& where) {
  constexpr const char* kHint = "go on with the model that it was made with";
  if (there.family != here.family) {
    refuse("--model", fmt::format("is a {}, that in {} a {}", here.family, where, there.family), kHint);
  }
  for (std::size_t i = 0; i < std::min(here.facts.size(), there.facts.size()); ++i) {
    const auto& [key, wanted] = here.facts[i];
    if (there.facts[i] == here.facts[i]) continue;
    refuse("--model", fmt::format("has {} {}, that in {} has {}", key, wanted, where, there.facts[i].second), kHint);
  }
}

std::vector<Subject> subjects_of(const FinetuneOptions& options, const std::string& data) {
  const auto given = [](bool is) { return std::string(is ? "given" : "not given"); };
  const SnapshotOptions& snapshots = options.snapshots;
  return {
      {"--config", mark_of({options.config})},
      {"--aio", options.aio.empty() ? "none" : mark_of({options.aio})},
      {"--model", mark_of(model_files(options.model))},
      {"--data", data},
      {"--steps", fmt::format("{}", options.steps)},
      {"--seq", fmt::format("{}", options.sequence)},
      {"--fuse", fmt::format("{}", static_cast<int>(options.fusion))},
      {"--resume", given(options.resume)},
      {"--fresh", given(options.fresh)},
      {"--load", given(!options.load.empty())},
      {"--out", given(!options.out.empty())},
      {"--save", given(!snapshots.directory.empty())},
      {"--save-every", fmt::format("{}", snapshots.every)},
      {"--keep", fmt::format("{}", snapshots.keep)},
  };
}

}  // namespace spillway::models::finetune
