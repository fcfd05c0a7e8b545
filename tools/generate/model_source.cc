#include "tools/generate/model_source.h"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <span>
#include <system_error>
#include <utility>

#include "spillway/error.h"
#include "spillway/safetensors.h"
#include "spillway/store.h"
#include "tools/models/lora.h"

namespace spillway::models::generate {
namespace {

constexpr const char* kAbsent =
    "--model wants a directory with config.json and model.safetensors, or the store of a fine-tune";

// A key that has a number, a list of them, or nothing.
std::vector<std::uint32_t> tokens_of(const ConfigJson& json, const char* key) {
  std::vector<double> values;
  if (json.is_list(key))
    values = json.numbers(key);
  else if (json.has(key))
    values = {json.number(key, 0)};
  std::vector<std::uint32_t> tokens;
  for (const double value : values) {
    if (!(value >= 0 && value < kLargestSize)) json.refuse(fmt::format("\"{}\" is no token", key));
    tokens.push_back(static_cast<std::uint32_t>(value));
  }
  return tokens;
}

const Attachment* find_file(const ModelDescription& model, const char* name) {
  const auto found = std::ranges::find(model.attachments, name, &Attachment::name);
  return found == model.attachments.end() ? nullptr : &*found;
}

}  // namespace

TemporaryDirectory::TemporaryDirectory(const std::filesystem::path& place, const char* what) {
  std::error_code error;
  std::filesystem::create_directories(place, error);
  std::string name = (place / "spillway-generate-XXXXXX").string();
  if (!error && ::mkdtemp(name.data()) == nullptr) error = {errno, std::generic_category()};
  if (error) {
    throw Error(Code::kIo, {.object = place.string(),
                            .happened = "no directory can be made in it",
                            .errno_value = error.value(),
                            .hint = fmt::format("name another one in {}", what)});
  }
  path_ = name;
}

TemporaryDirectory::~TemporaryDirectory() {
  std::error_code ignored;
  if (!path_.empty()) std::filesystem::remove_all(path_, ignored);
}

ModelSource::ModelSource(std::filesystem::path model, std::vector<std::filesystem::path> others,
                         std::filesystem::path adapter)
    : model_(std::move(model)), paths_{model_}, adapter_(std::move(adapter)) {
  paths_.insert(paths_.end(), others.begin(), others.end());
  std::error_code ignored;
  const bool is_directory = std::filesystem::exists(model_ / "config.json", ignored);
  store_ =
      std::filesystem::exists(model_ / "spillway.store", ignored) || (!is_directory && !find_ranks(paths_).empty());
  if (store_)
    open_store();
  else
    open_directory();
  if (adapter_.empty()) return;
  if (lora_.given()) {
    throw Error(Code::kInvalidArgument, {.object = "--adapter",
                                         .happened = fmt::format("is given, and {} has adapters", model_.string()),
                                         .errno_value = 0,
                                         .hint = "leave it out, or name their base by --model"});
  }
  constexpr const char* kWanted = "name a directory that peft's save_pretrained() has written";
  set_lora(ConfigJson::read(adapter_ / kAdapterConfig, kWanted, kWanted));
}

void ModelSource::set_lora(ConfigJson json) {
  lora_ = read_lora(json);
  lora_json_.emplace(std::move(json));
}

// A snapshot has the adapters' tensors beside the others; peft a file of theirs.
void ModelSource::open_directory() {
  std::error_code ignored;
  const bool has_adapters = std::filesystem::exists(model_ / kAdapterConfig, ignored);
  if (has_adapters && !std::filesystem::exists(model_ / "config.json", ignored)) {
    throw Error(Code::kInvalidArgument, {.object = model_.string(),
                                         .happened = "holds an adapter without its base",
                                         .errno_value = 0,
                                         .hint = "name the base by --model, and this by --adapter"});
  }
  config_ = ConfigJson::read(model_ / "config.json", kAbsent, kAbsent);
  const SafetensorsReader reader = SafetensorsReader::open(model_);
  const auto of_base = [](const TensorEntry& entry) { return entry.type && !entry.name.starts_with(kAdapterPrefix); };
  const auto typed = std::ranges::find_if(reader.tensors(), of_base);
  if (typed != reader.tensors().end()) type_ = *typed->type;
  if (!has_adapters) return;
  const auto is_adapter = [](const TensorEntry& entry) { return entry.name.starts_with(kAdapterPrefix); };
  if (std::ranges::any_of(reader.tensors(), is_adapter))
    set_lora(ConfigJson::read(model_ / kAdapterConfig, kAbsent, kAbsent));
  else if (adapter_.empty())
    adapter_ = model_;
}

void ModelSource::open_store() {
  const RunPaths ranks = find_ranks(paths_);
  const StoreInfo info = ranks.empty() ? inspect_store(paths_) : inspect_run(ranks).ranks.at(0);
  type_ = info.weights;
  const Attachment* const config = find_file(info.model, "config.json");
  if (config == nullptr) {
    throw Error(Code::kUnsupported, {.object = model_.string(),
                                     .happened = "holds a store without a config.json",
                                     .errno_value = 0,
                                     .hint = "export what was trained, and put the model's config.json beside it"});
  }
  config_.emplace(config->text, (model_ / "config.json").string());
  const Attachment* const lora = find_file(info.model, kAdapterConfig);
  if (lora != nullptr) set_lora(ConfigJson(lora->text, (model_ / kAdapterConfig).string()));
}

TrainedModel ModelSource::model(std::uint32_t sequence) const {
  TrainedModel model = trained_model(*config_, sequence);
  if (lora_.given()) add_adapters(model, lora_, lora_json_->name());
  return model;
}

std::vector<std::uint32_t> ModelSource::ends(const std::vector<std::filesystem::path>& directories) const {
  constexpr const char* kName = "generation_config.json";
  std::error_code ignored;
  for (const std::filesystem::path& directory : directories) {
    if (!std::filesystem::exists(directory / kName, ignored)) continue;
    constexpr const char* kWanted = "take the file as the model came with it";
    const auto ends = tokens_of(ConfigJson::read(directory / kName, kWanted, kWanted), "eos_token_id");
    if (!ends.empty()) return ends;
  }
  return tokens_of(*config_, "eos_token_id");
}

// Names, sizes and times of the files.
std::string ModelSource::mark() const {
  std::vector<std::string> lines;
  std::error_code ignored;
  const auto add = [&](const std::filesystem::path& directory, const char* of) {
    for (const auto& entry : std::filesystem::directory_iterator(directory, ignored)) {
      const std::filesystem::path name = entry.path().filename();
      if (name.extension() != ".safetensors" && name != "config.json" && name != kAdapterConfig) continue;
      lines.push_back(fmt::format("{}{} {} {}\n", of, name.string(), entry.file_size(ignored),
                                  entry.last_write_time(ignored).time_since_epoch().count()));
    }
  };
  add(model_, "");
  if (!adapter_.empty() && adapter_ != model_) add(adapter_, "adapter ");
  std::ranges::sort(lines);
  std::string text;
  for (const std::string& line : lines) text += line;
  return text;
}

std::filesystem::path ModelSource::export_to(const std::filesystem::path& place, const ExportOptions& options) const {
  const RunPaths ranks = find_ranks(paths_);
  if (ranks.empty())
    export_store(paths_, place, options);
  else
    export_run(ranks, place, options);
  return place;
}

void ModelSource::open(const TrainedModel& model, DType type, const std::filesystem::path& place,
                       const std::function<void(std::uint64_t, std::uint64_t)>& progress) {
  std::filesystem::path files = model_;
  if (store_) {
    copy_.emplace(place, "nvme_path");
    files = export_to(copy_->path(), {.type = type, .replace = true, .whole = true, .progress = progress});
  }
  weights_.emplace(files, adapter_.empty() ? model.description : base_of(model));
  weights_->check_tied_head();
  if (adapter_.empty()) return;
  adapters_.emplace(model, lora_, adapter_, "its target_modules");
  adapter_block_ = model.adapters->block;
}

WeightSource ModelSource::weights() {
  if (!adapters_) return weights_->source();
  return [this, of_base = weights_->source()](std::uint32_t block, std::uint32_t parameter, std::uint64_t first,
                                              std::span<float> out) {
    if (block == adapter_block_)
      adapters_->read(parameter, first, out);
    else
      of_base(block, parameter, first, out);
  };
}

}  // namespace spillway::models::generate
