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
#include "tools/models/lora.h"

namespace spillway::models::finetune {
namespace {

constexpr std::string_view kOfData = " of data of ", kBest = "; best evaluation ", kStoreFile = "spillway.store";

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
  std::vector<std::filesystem::path> files;
  std::error_code ignored;
  for (const char* config : {"config.json", kAdapterConfig}) {
    if (std::filesystem::exists(directory / config, ignored)) files.push_back(directory / config);
  }
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
  return fmt::format("row {} of sequence {}{}{}{}{}", row, sequence, data.empty() ? "" : kOfData, data,
                     best ? kBest : "", best ? best->text() : "");
}

Position Position::parse(std::span<const std::byte> blob, const FinetuneOptions& options) {
  const std::string text(reinterpret_cast<const char*>(blob.data()), blob.size());
  Position position;
  if (text.empty()) return position;  // stopped before a step was committed
  const std::string_view start = "row ";
  const char* begin = text.data() + std::min(start.size(), text.size());
  std::from_chars(begin, text.data() + text.size(), position.row);
  const auto best = std::min(text.find(kBest), text.size());
  if (best < text.size()) position.best = BestEvaluation::parse(text.substr(best + kBest.size()));
  if (const auto of = text.find(kOfData); of < best) {
    position.data = text.substr(of + kOfData.size(), best - of - kOfData.size());
  }
  if (position.text(options.sequence) != text) {
    refuse("--seq", fmt::format("the run was begun with another row length: \"{}\"", text),
           "go on with the same --seq");
  }
  return position;
}

void check_options(const FinetuneOptions& options, const Config& config, const TrainedModel& model) {
  check_row(model, options.sequence);
  if (!options.adapter.empty() && !config.lora.given()) {
    refuse("--adapter", "is given, and the configuration has no spillway.lora",
           "add one with the adapter's rank, alpha and targets");
  }
  if (options.resume && config.nvme_paths.empty()) {
    refuse("--resume", "the configuration has no nvme_path, so there is no store", "start without --resume");
  }
  std::error_code ignored;
  for (const auto& [option, out] : {std::pair("--out", options.out), std::pair("--best", options.evaluation.best)}) {
    if (out.empty()) continue;
    if (std::filesystem::equivalent(out, options.model, ignored)) {
      refuse(option, "is the model that is trained", "name another directory");
    }
    const bool link = std::filesystem::is_symlink(plain(out), ignored);
    if (link && !std::filesystem::exists(out, ignored))
      refuse(option, "is a link to what is not there", "make that directory, or name another");
    if (std::filesystem::exists(out / "spillway.json", ignored)) {
      refuse(option, "is a snapshot, whose exact weights would be replaced", "name another directory");
    }
  }
  const auto place = [&](const std::filesystem::path& file) {
    return std::filesystem::weakly_canonical(file, ignored);
  };
  if (!options.out.empty() && place(plain(options.out)) == place(plain(options.evaluation.best)))
    refuse("--best", "is the directory of --out", "name another, for the last model is another than the best");
  if (!options.log.empty() && place(options.log) == place(options.trace))
    refuse("--trace", "is the file of --log", "name another file");
}

std::vector<std::filesystem::path> store_of_rank(const std::vector<std::filesystem::path>& paths, const Ranks& ranks) {
  std::vector<std::filesystem::path> own;
  for (const std::filesystem::path& path : paths) own.push_back(path_of_rank(path, ranks.rank(), ranks.count()));
  return own;
}

std::vector<std::filesystem::path> store_to_resume(const std::vector<std::filesystem::path>& paths,
                                                   const std::vector<std::filesystem::path>& own) {
  std::error_code ignored;
  if (own.empty() || std::filesystem::exists(own.front() / kStoreFile, ignored)) return own;
  try {
    const RunPaths ranks = find_ranks(paths);
    return ranks.empty() ? paths : ranks.front();
  } catch (const Error&) {  // what is wrong with them the engine says
    return own;
  }
}

std::optional<TrainedModel> model_of(const std::vector<std::filesystem::path>& store,
                                     const std::filesystem::path& snapshot, std::uint32_t sequence) {
  try {
    if (!snapshot.empty() && !find_snapshot(snapshot)) return std::nullopt;
    std::optional<TrainedModel> model;
    const auto with_adapters = [&model](const ConfigJson& json) {
      for (auto& fact : adapter_summary(json)) model->facts.push_back(std::move(fact));
    };
    if (!snapshot.empty()) {
      model = load_trained_model(snapshot, sequence);
      std::error_code ignored;
      const std::filesystem::path adapters = snapshot / kAdapterConfig;
      if (std::filesystem::exists(adapters, ignored)) with_adapters(ConfigJson::read(adapters, "", ""));
      return model;
    }
    const std::vector<Attachment> attachments = inspect_store(store).model.attachments;
    for (const Attachment& attachment : attachments) {
      if (attachment.name == "config.json")
        model = trained_model(ConfigJson(attachment.text, attachment.name), sequence);
    }
    for (const Attachment& attachment : attachments) {
      if (model && attachment.name == kAdapterConfig) with_adapters(ConfigJson(attachment.text, attachment.name));
    }
    return model;
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
  if (here.facts.size() != there.facts.size()) {
    const bool more = here.facts.size() > there.facts.size();
    refuse("spillway.lora",
           more ? fmt::format("is set, and {} was made without", where)
                : fmt::format("is not set, and {} was made with it", where),
           "go on with the configuration that it was made with, or make a new store");
  }
}

std::vector<Subject> subjects_of(const FinetuneOptions& options, const std::string& data, const std::string& held_out) {
  const auto given = [](bool is) { return std::string(is ? "given" : "not given"); };
  const SnapshotOptions& snapshots = options.snapshots;
  return {
      {"--config", mark_of({options.config})},
      {"--aio", options.aio.empty() ? "none" : mark_of({options.aio})},
      {"--model", mark_of(model_files(options.model))},
      {"--adapter", options.adapter.empty() ? "none" : mark_of(model_files(options.adapter))},
      {"--data", data},
      {"--eval", fmt::format("{}", options.evaluation.every)},
      {"--eval-data", held_out.empty() ? "none" : held_out},
      {"--best", given(!options.evaluation.best.empty())},
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
