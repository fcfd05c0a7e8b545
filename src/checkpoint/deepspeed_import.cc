#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <optional>
#include <set>
#include <string_view>
#include <utility>

#include "spillway/bf16.h"
#include "spillway/error.h"
#include "spillway/fp16.h"
#include "spillway/import.h"
#include "src/checkpoint/deepspeed_checkpoint.h"
#include "src/checkpoint/snapshot_files.h"
#include "src/checkpoint/tile_values.h"
#include "src/config/loss_scaler.h"
#include "src/formats/element_count.h"
#include "src/formats/refuse.h"
#include "src/formats/safetensors_header.h"
#include "src/plan/partition.h"

namespace spillway {
namespace {

constexpr std::uint64_t kReadAtOnce = 64 * 1024;
constexpr const char* kBelong = "model and checkpoint must belong together";

// How the checkpoint's names differ from the model's: by what stands before them there, or here.
struct Prefixes {
  std::string there, here;
};

std::optional<std::string> name_there(std::string_view name, const Prefixes& prefixes) {
  if (!name.starts_with(prefixes.here)) return std::nullopt;
  return prefixes.there + std::string(name.substr(prefixes.here.size()));
}

const DeepSpeedParameter* find(const DeepSpeedCheckpoint& checkpoint, std::string_view name, const Prefixes& prefixes) {
  const auto there = name_there(name, prefixes);
  return there ? checkpoint.find(*there) : nullptr;
}

// Ends in `.end`, or is it: what stands before.
std::optional<std::string> before(std::string_view name, std::string_view end) {
  if (!name.ends_with(end)) return std::nullopt;
  name.remove_suffix(end.size());
  if (!name.empty() && name.back() != '.') return std::nullopt;
  return std::string(name);
}

// Those with which most of the model's parameters are found: a wrapper's prefix on one name is one on all.
Prefixes find_prefixes(const DeepSpeedCheckpoint& checkpoint, const std::vector<const Parameter*>& parameters) {
  Prefixes best;
  std::int64_t most = -1;
  const auto consider = [&](Prefixes prefixes) {
    const std::int64_t found = std::ranges::count_if(
        parameters, [&](const Parameter* parameter) { return find(checkpoint, parameter->name, prefixes) != nullptr; });
    if (found > most) best = std::move(prefixes);
    most = std::max(most, found);
  };
  consider({});
  const std::string& name = parameters.front()->name;
  for (const DeepSpeedParameter& there : checkpoint.parameters()) {
    if (most == static_cast<std::int64_t>(parameters.size())) break;
    if (const auto prefix = before(there.name, name)) consider({.there = *prefix, .here = {}});
    if (const auto prefix = before(name, there.name)) consider({.there = {}, .here = *prefix});
  }
  return best;
}

std::string shape_text(const std::vector<std::uint64_t>& shape) {
  std::string text = "[";
  for (const std::uint64_t extent : shape) text += (text.size() > 1 ? ", " : "") + std::to_string(extent);
  return text + "]";
}

// PyTorch's scalars have no extents; a model may describe them with one, as the Python package does.
bool is_scalar(const std::vector<std::uint64_t>& there, const std::vector<std::uint64_t>& here) {
  return there.empty() && here == std::vector<std::uint64_t>{1};
}

// [block][parameter] of the model; every parameter of both sides has exactly one on the other. Null: it is frozen, no
// such one is in the checkpoint, and the caller gives it.
std::vector<std::vector<const DeepSpeedParameter*>> match(DeepSpeedCheckpoint& checkpoint,
                                                          const ModelDescription& model, bool frozen_are_given) {
  const std::filesystem::path& directory = checkpoint.directory();
  std::vector<const Parameter*> all;
  for (const Block& block : model.blocks) {
    for (const Parameter& parameter : block.parameters) all.push_back(&parameter);
  }
  if (all.empty()) refuse(directory, "cannot be imported for a model without parameters", "describe some");
  const Prefixes prefixes = find_prefixes(checkpoint, all);
  for (const Parameter* parameter : all) {
    const auto there = parameter->trainable ? std::nullopt : name_there(parameter->name, prefixes);
    if (there) checkpoint.take_frozen(*there);
  }
  const bool has_frozen = std::ranges::any_of(checkpoint.parameters(), &DeepSpeedParameter::frozen);
  std::set<const DeepSpeedParameter*> used;
  std::vector<std::vector<const DeepSpeedParameter*>> matched;
  for (const Block& block : model.blocks) {
    auto& of_block = matched.emplace_back();
    for (const Parameter& parameter : block.parameters) {
      const DeepSpeedParameter* there = find(checkpoint, parameter.name, prefixes);
      if (!there && !parameter.trainable && !has_frozen) {
        if (!frozen_are_given) {
          refuse(directory, fmt::format("has no frozen parameters, and the model has {}", parameter.name),
                 "it was saved with exclude_frozen_parameters; give them to the import");
        }
        of_block.push_back(nullptr);
        continue;
      }
      if (!there) refuse(directory, fmt::format("has no parameter {}", parameter.name), kBelong);
      const std::string subject = fmt::format("parameter {} ", printable(there->name));
      if (there->shape != parameter.shape && !is_scalar(there->shape, parameter.shape)) {
        refuse(directory,
               fmt::format("{}has shape {}, the model asks for {}", subject, shape_text(there->shape),
                           shape_text(parameter.shape)),
               kBelong);
      }
      if (there->frozen == parameter.trainable)
        refuse(directory,
               subject + (there->frozen ? "is frozen there, and trained here" : "is trained there, and frozen here"),
               "a run goes on with what it trained");
      if (!used.insert(there).second) refuse(directory, subject + "is two parameters of the model", kBelong);
      of_block.push_back(there);
    }
  }
  for (const DeepSpeedParameter& there : checkpoint.parameters()) {
    if (!used.contains(&there))
      refuse(directory, fmt::format("parameter {} is no part of the model", printable(there.name)), kBelong);
  }
  return matched;
}

DType weight_type(const DeepSpeedCheckpoint& checkpoint, const ImportOptions& options) {
  const DeepSpeedInfo& facts = checkpoint.facts();
  const std::optional<DType> type = options.weights ? options.weights : facts.weights;
  if (type && (*type != DType::kFloat16 || facts.loss_scale)) return *type;
  refuse(checkpoint.directory(),
         type ? "cannot be imported for training in fp16: it has no loss scale to go on with"
              : "does not say in which type the weights were trained",
         "choose bf16 or fp32: the fp32 master weights are imported exactly in either");
}

// As the run has a frozen parameter's weights.
float frozen_weight(float value, DType type) {
  switch (type) {
    case DType::kFloat32: break;
    case DType::kFloat16: return fp16_to_float(float_to_fp16(value));
    case DType::kBFloat16: return bf16_to_float(float_to_bf16(value));
  }
  return value;
}

// What stands before the caller's blob, of which there is none.
std::vector<std::byte> record_of(const DeepSpeedInfo& facts) {
  if (facts.snapshot_weights != DType::kFloat16) return {};
  std::vector<std::byte> record(LossScalerState::kBytes);
  LossScalerState{.scale = facts.loss_scale->scale,
                  .clean = facts.loss_scale->clean,
                  .skipped = facts.skipped_steps,
                  .hysteresis = facts.loss_scale->hysteresis}
      .encode(std::span(record).first<LossScalerState::kBytes>());
  return record;
}

// As Manifest has them.
std::vector<std::uint64_t> update_counts(const DeepSpeedCheckpoint& checkpoint,
                                         const std::vector<std::vector<const DeepSpeedParameter*>>& matched) {
  std::vector<std::uint64_t> counts;
  bool uneven = false;
  for (const auto& of_block : matched) {
    for (const DeepSpeedParameter* there : of_block) {
      const bool trained = there && !there->frozen;
      counts.push_back(trained ? checkpoint.updates(*there) : 0);
      uneven = uneven || (trained && counts.back() != checkpoint.facts().optimizer_steps);
    }
  }
  return uneven ? counts : std::vector<std::uint64_t>();
}

class Copy {
 public:
  Copy(DeepSpeedCheckpoint& checkpoint, SnapshotFiles& files, const ModelDescription& model, DType weights,
       const WeightSource& frozen, const std::function<void(std::uint64_t)>& on_bytes)
      : checkpoint_(checkpoint),
        files_(files),
        model_(model),
        weights_(weights),
        frozen_(frozen),
        on_bytes_(on_bytes) {}

  void run(const std::vector<std::vector<const DeepSpeedParameter*>>& matched) {
    for (std::uint32_t b = 0; b < model_.blocks.size(); ++b) {
      const BlockPartition partition = partition_block(model_.blocks[b]);
      std::vector<std::uint32_t> order(matched[b].size());
      std::iota(order.begin(), order.end(), 0u);
      std::ranges::sort(order, {}, [&](std::uint32_t p) { return partition.parameters[p].first; });
      for (const std::uint32_t p : order) {
        const Parameter& parameter = model_.blocks[b].parameters[p];
        const std::uint64_t elements = count_elements(parameter.name, parameter.shape);
        for (std::uint64_t at = 0; at < elements; at += kReadAtOnce)
          copy(b, p, matched[b][p], at, std::span(values_).first(std::min(kReadAtOnce, elements - at)));
      }
    }
  }

 private:
  void copy(std::uint32_t block, std::uint32_t p, const DeepSpeedParameter* there, std::uint64_t first,
            std::span<float> values) {
    const bool frozen = !model_.blocks[block].parameters[p].trainable;
    for (std::size_t a = 0; a < files_.count(); ++a) {
      const SnapshotArray array = files_.array(a);
      if (frozen && array != SnapshotArray::kWeights) continue;
      if (there)
        checkpoint_.read(*there, source_of(array), first, values);
      else
        frozen_(block, p, first, values);
      if (array == SnapshotArray::kWeights) check_weights(model_.blocks[block].parameters[p], weights_, first, values);
      if (frozen && !model_.blocks[block].parameters[p].bytes)
        std::ranges::transform(values, values.begin(), [this](float v) { return frozen_weight(v, weights_); });
      files_.write(a, block, p, first, values);
      if (there) on_bytes_(values.size_bytes());
    }
  }

  static DeepSpeedArray source_of(SnapshotArray array) {
    switch (array) {
      case SnapshotArray::kWeights: return DeepSpeedArray::kMaster;
      case SnapshotArray::kExpAvg: return DeepSpeedArray::kExpAvg;
      case SnapshotArray::kExpAvgSq: return DeepSpeedArray::kExpAvgSq;
    }
    return DeepSpeedArray::kMaster;
  }

  DeepSpeedCheckpoint& checkpoint_;
  SnapshotFiles& files_;
  const ModelDescription& model_;
  const DType weights_;
  const WeightSource& frozen_;
  const std::function<void(std::uint64_t)>& on_bytes_;
  std::vector<float> values_ = std::vector<float>(kReadAtOnce);
};

}  // namespace

DeepSpeedInfo import_deepspeed(const std::filesystem::path& directory, const ModelDescription& model,
                               const std::filesystem::path& snapshot, const ImportOptions& options) {
  DeepSpeedCheckpoint checkpoint(directory, options.tag, options.verify);
  Config config;
  config.weights = weight_type(checkpoint, options);
  config.optimizer.kind = OptimizerKind::kAdam;
  const auto matched = match(checkpoint, model, static_cast<bool>(options.frozen));
  SnapshotFiles files(config, model, snapshot, {.max_file_bytes = options.max_file_bytes});

  std::uint64_t done = 0, bytes = options.verify ? checkpoint.stored_bytes() : 0;
  for (const DeepSpeedParameter& parameter : checkpoint.parameters())
    bytes += parameter.elements * sizeof(float) * (parameter.frozen ? 1 : files.count());
  const std::function<void(std::uint64_t)> on_bytes = [&](std::uint64_t more) {
    done += more;
    if (options.progress) options.progress(done, bytes);
  };
  if (options.verify) checkpoint.verify(on_bytes);
  Copy(checkpoint, files, model, config.weights, options.frozen, on_bytes).run(matched);
  DeepSpeedInfo facts = checkpoint.facts();
  facts.snapshot_weights = config.weights;
  facts.step = facts.optimizer_steps + (config.weights == DType::kFloat16 ? facts.skipped_steps : 0);
  files.finish(facts.step, record_of(facts), update_counts(checkpoint, matched));
  for (const auto& of_block : matched)
    facts.frozen_given += static_cast<std::uint64_t>(std::ranges::count(of_block, nullptr));
  return facts;
}

}  // namespace spillway
