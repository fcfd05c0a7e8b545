// Where a model comes from: its directory, or a store that it was trained in.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "spillway/config.h"
#include "spillway/dtype.h"
#include "spillway/engine.h"
#include "spillway/export.h"
#include "tools/models/adapter_weights.h"
#include "tools/models/config_json.h"
#include "tools/models/trained_model.h"
#include "tools/models/weights.h"

namespace spillway::models::generate {

// Removed with what is in it at the end.
class TemporaryDirectory {
 public:
  // A new one below `place`, which is made where it is not there; `what` is the option or key that names it.
  TemporaryDirectory(const std::filesystem::path& place, const char* what);
  TemporaryDirectory(TemporaryDirectory&& other) noexcept : path_(std::exchange(other.path_, {})) {}
  TemporaryDirectory& operator=(TemporaryDirectory&&) = delete;
  ~TemporaryDirectory();
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

class ModelSource {
 public:
  // `others`: the store's other directories. `adapter`: a directory that peft saved, of adapters of the model; empty:
  // none, but those that the model's own directory has.
  ModelSource(std::filesystem::path model, std::vector<std::filesystem::path> others, std::filesystem::path adapter);

  const std::filesystem::path& path() const { return model_; }
  bool is_store() const { return store_; }
  const ConfigJson& config() const { return *config_; }
  // With its adapters, where there are some; for rows of `sequence` tokens.
  TrainedModel model(std::uint32_t sequence) const;
  // Of the weights as they lie there.
  DType type() const { return type_; }
  // What ends a text, by generation_config.json in one of the directories, else by config.json.
  std::vector<std::uint32_t> ends(const std::vector<std::filesystem::path>& directories) const;
  // What tells its weights from others without reading them.
  std::string mark() const;

  // Opens the weights, checked against model(). A store's are written to a directory below `place`, 2 bytes a parameter
  // in 16 bits, and verified; so a store is read and never changed. What `progress` throws ends it.
  void open(const TrainedModel& model, DType type, const std::filesystem::path& place,
            const std::function<void(std::uint64_t, std::uint64_t)>& progress);
  // Of the opened ones, which refers to this object.
  WeightSource weights();

 private:
  void open_directory();
  void open_store();
  void set_lora(ConfigJson json);
  std::filesystem::path export_to(const std::filesystem::path& place, const ExportOptions& options) const;

  std::filesystem::path model_;
  std::vector<std::filesystem::path> paths_;  // of a store
  std::filesystem::path adapter_;             // empty: the model's tensors are among its own, where it has some
  bool store_ = false;
  std::optional<ConfigJson> config_, lora_json_;
  LoraConfig lora_;  // not given: no adapters
  DType type_ = DType::kFloat32;
  std::optional<TemporaryDirectory> copy_;
  std::optional<ModelWeights> weights_;
  std::optional<AdapterWeights> adapters_;
  std::uint32_t adapter_block_ = 0;
};

}  // namespace spillway::models::generate
