#include "src/config/hint.h"

#include <algorithm>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "src/config/closest_key.h"
#include "src/config/table.h"

namespace spillway {
namespace {

// Words of trainers and of other engines for what a key here says, where the spelling does not lead to it.
constexpr std::pair<std::string_view, std::string_view> kOtherWords[] = {
    {"learning_rate", "optimizer.params.lr"},
    {"adam_beta1", "optimizer.params.betas"},
    {"adam_beta2", "optimizer.params.betas"},
    {"beta1", "optimizer.params.betas"},
    {"beta2", "optimizer.params.betas"},
    {"adam_epsilon", "optimizer.params.eps"},
    {"epsilon", "optimizer.params.eps"},
    {"batch_size", "train_batch_size"},
    {"per_device_train_batch_size", "train_micro_batch_size_per_gpu"},
    {"micro_batch_size", "train_micro_batch_size_per_gpu"},
    {"gas", "gradient_accumulation_steps"},
    {"max_grad_norm", "gradient_clipping"},
    {"clip_grad", "gradient_clipping"},
    {"warmup_steps", "scheduler.params.warmup_num_steps"},
    {"max_steps", "scheduler.params.total_num_steps"},
    {"total_steps", "scheduler.params.total_num_steps"},
    {"lr_scheduler", "scheduler"},
    {"zero_stage", "zero_optimization.stage"},
    {"zero", "zero_optimization"},
    {"offload_optimizer_device", "zero_optimization.offload_optimizer.device"},
    {"offload_param_device", "zero_optimization.offload_param.device"},
    {"offload_optimizer_nvme_path", "zero_optimization.offload_optimizer.nvme_path"},
    {"offload_param_nvme_path", "zero_optimization.offload_param.nvme_path"},
    {"io_depth", "aio.queue_depth"},
    {"iodepth", "aio.queue_depth"},
    {"mixed_precision", "bf16"},
};

std::string_view key_of_other_word(std::string_view leaf) {
  std::string word(leaf);
  std::replace(word.begin(), word.end(), '-', '_');  // as on a command line
  for (const auto& [other, path] : kOtherWords) {
    if (same_word(other, word)) return path;
  }
  return {};
}

// The keys of a section, those that decide something first, and names that are called older words last.
std::vector<std::string_view> leaves_of(std::string_view section, bool all) {
  std::vector<std::string_view> leaves, older;
  for (const auto& table : {config_keys(), config_keys_without_effect()}) {
    for (const ConfigKey& key : table) {
      if (parent_of(key.path) == section) (key.successor.empty() ? leaves : older).push_back(leaf_of(key.path));
    }
    if (!all) return leaves;
  }
  leaves.insert(leaves.end(), older.begin(), older.end());
  return leaves;
}

std::size_t common_start(std::string_view a, std::string_view b) {
  return static_cast<std::size_t>(std::mismatch(a.begin(), a.end(), b.begin(), b.end()).first - a.begin());
}

// Rows whose path ends in `leaf`, those in a section nearest to `section` first; older words where there are no others.
std::vector<std::string_view> elsewhere(std::string_view section, std::string_view leaf) {
  std::vector<std::string_view> paths, older;
  for (const auto& table : {config_keys(), config_keys_without_effect()}) {
    for (const ConfigKey& key : table) {
      if (same_word(leaf_of(key.path), leaf)) (key.successor.empty() ? paths : older).push_back(key.path);
    }
  }
  if (paths.empty()) paths = std::move(older);
  std::stable_sort(paths.begin(), paths.end(), [&](std::string_view a, std::string_view b) {
    return common_start(a, section) > common_start(b, section);
  });
  return paths;
}

std::string named(std::string_view path) {
  return path.find('.') == std::string_view::npos ? fmt::format("{}, at the top", path) : std::string(path);
}

std::string closest_key(const std::vector<std::string_view>& paths) {
  std::string list = "closest key: " + named(paths.front());
  for (std::size_t i = 1; i < std::min<std::size_t>(paths.size(), 3); ++i) list += fmt::format(", or {}", paths[i]);
  return list;
}

}  // namespace

std::string hint_for_unknown(std::string_view section, std::string_view leaf) {
  const std::vector<std::string_view> leaves = leaves_of(section, true);
  for (const std::string_view known : leaves) {
    if (same_word(known, leaf)) return fmt::format("closest key: {}", known);
  }
  if (const auto path = key_of_other_word(leaf); !path.empty()) return closest_key({path});
  if (const auto paths = elsewhere(section, leaf); !paths.empty()) return closest_key(paths);
  if (const auto near = closest(leaf, leaves); !near.empty()) return fmt::format("closest key: {}", near);
  if (const auto path = closest_path(leaf); !path.empty()) return "closest key: " + named(path);
  return "known keys: " + list_of(leaves_of(section, false));
}

std::string closest_path(std::string_view path) {
  std::vector<std::string_view> paths, leaves;
  for (const auto& table : {config_keys(), config_keys_without_effect()}) {
    for (const ConfigKey& key : table) {
      paths.push_back(key.path);
      leaves.push_back(leaf_of(key.path));
    }
  }
  const auto ends = std::find_if(paths.begin(), paths.end(), [&](std::string_view known) {
    return known.size() > path.size() && known.ends_with(path) && known[known.size() - path.size() - 1] == '.';
  });
  if (ends != paths.end()) return std::string(*ends);
  if (const auto known = key_of_other_word(path); !known.empty()) return std::string(known);
  if (const auto near = closest(path, paths); !near.empty()) return std::string(near);
  // Across all sections something is always near a short word.
  const std::string_view leaf = leaf_of(path);
  const auto near = closest(leaf, leaves);
  if (near.empty() || edit_distance(leaf, near) * 4 > leaf.size()) return {};
  return std::string(paths[static_cast<std::size_t>(std::find(leaves.begin(), leaves.end(), near) - leaves.begin())]);
}

}  // namespace spillway
