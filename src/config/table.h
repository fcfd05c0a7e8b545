// The table of configuration keys. One row says where a key stands, what it may hold, what it means, where its value
// goes and what "auto" stands for; parser, messages, JSON Schema and reference all read these rows. A new key is a new
// row.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "spillway/config.h"
#include "src/formats/json_tree.h"

namespace spillway {

enum class KeyKind : std::uint8_t {
  kSection,  // an object whose keys have rows of their own
  kBool,
  kInteger,  // non-negative; 5e7 is one
  kNumber,
  kBytes,  // an integer, or a string such as "512MiB"
  kText,
  kChoice,    // one of the words in `allowed`
  kPair,      // an array of two numbers
  kNumbers,   // an array of numbers, each in the row's range
  kTexts,     // an array of strings
  kSections,  // an array of objects whose keys have rows of their own; `set` is called with flag true before all of
              // them, and with false before each
  kObject,    // known, not looked into
  kOnly,      // one value, in `allowed` as JSON: others would train something else
  kOff,       // an object in which every "enabled" is false, however deep: else it would train something else
};

// What the Hugging Face trainer trains with unless it is told otherwise.
inline constexpr double kTrainerRate = 5e-5;
inline constexpr std::uint64_t kTrainerMicroBatch = 8;

// A value that was found to be of its row's kind and in its range.
struct KeyValue {
  bool flag = false;
  std::uint64_t integer = 0;  // kInteger, kBytes; kChoice: index of the word in `allowed`
  double number = 0;          // kNumber; kPair: the first one
  double second = 0;
  std::string text;  // kText
  std::vector<double> numbers;
  std::vector<std::string> texts;
};

// The words of optimizer.type: of Adam there are two.
inline constexpr auto kOptimizerTypes = [] {
  std::array<std::string_view, kOptimizerKinds.size() + 1> types = {"AdamW"};
  for (std::size_t k = 0; k < kOptimizerKinds.size(); ++k) types[k + 1] = name_of(kOptimizerKinds[k]);
  return types;
}();

// What the rows fill: the configuration, and what several keys decide together (see check.h).
struct ConfigDraft {
  Config config;
  std::uint32_t ranks = 1;  // that share the batch; 0: nobody trains
  std::optional<std::uint64_t> train_batch, micro_batch, accumulation, stage;
  std::uint64_t optimizer_type = 0;  // of kOptimizerTypes
  bool adam_w_mode = true, torch_adam = false;
  std::optional<double> learning_rate, epsilon, weight_decay;  // whose defaults differ by type
  bool bf16 = false, fp16 = false;
  std::optional<DType> param_dtype;
  bool cpu_offload = false, cpu_offload_param = false;  // DeepSpeed's older words
  std::optional<std::uint64_t> sub_group_size;
  std::optional<std::string> states_path, parameters_path;
  std::optional<std::vector<std::string>> nvme_paths;
  std::optional<std::vector<double>> nvme_rates;
  std::optional<double> warmup_max_lr;
  std::set<std::string_view> nulls;  // keys that are null
  std::optional<std::uint64_t> warmup_steps, total_steps;
};

// Where a row's value goes, and how a configuration's value is read back, as JSON; an empty text: it is not set.
struct KeyPlace {
  void (*set)(ConfigDraft&, const KeyValue&) = nullptr;
  std::string (*show)(const Config&) = nullptr;  // null: what stands in the file is all there is
};

// What "auto" stands for in a key, as JSON; an empty text: as if the key were missing.
struct AutoRule {
  std::string (*value)(const AutoValues&) = nullptr;  // null: "auto" is not taken, or as if the key were missing
  std::string_view doc = {};
};

struct ConfigKey {
  std::string_view path;  // "optimizer.params.lr"
  KeyKind kind;
  std::string_view standard;       // the value when the key is missing, as JSON; empty: none, or it depends (see doc)
  std::string_view doc;            // of a key without effect: why it has none
  KeyPlace place = {};             // without a `set`: known to DeepSpeed, without effect here
  double least = 0, most = 1e18;   // numbers
  bool below_most = false;         // `most` itself is out of range
  std::uint64_t multiple_of = 1;   // integers
  std::string_view allowed = {};   // kChoice: words with '|' between them; kOnly: see there; kOff: what to do instead
  bool nullable = false;           // null means missing
  std::string_view only_for = {};  // optimizer or scheduler types that know it; empty: all
  AutoRule automatic = {};
  std::string_view refused = {};        // kChoice: words that DeepSpeed knows and that cannot be had here
  std::string_view not_with_zero = {};  // kChoice: those of them that DeepSpeed itself refuses with ZeRO
  std::string_view successor = {};      // of an older word, or of another name: the key that says the same
  std::string_view flag_of = {};        // kSection: the key of it that true and false in its place set to 1 and 0
  bool of_rank = false;                 // ranks of one run may have different values

  // The key with this said of it, too.
  constexpr ConfigKey below(double end) const {
    ConfigKey key = *this;
    key.most = end, key.below_most = true;
    return key;
  }
  constexpr ConfigKey multiples_of(std::uint64_t unit) const {
    ConfigKey key = *this;
    key.multiple_of = unit;
    return key;
  }
  constexpr ConfigKey allows(std::string_view words, std::string_view not_here = {},
                             std::string_view nor_with_zero = {}) const {
    ConfigKey key = *this;
    key.allowed = words, key.refused = not_here, key.not_with_zero = nor_with_zero;
    return key;
  }
  constexpr ConfigKey or_null() const {
    ConfigKey key = *this;
    key.nullable = true;
    return key;
  }
  constexpr ConfigKey only_of(std::string_view types) const {
    ConfigKey key = *this;
    key.only_for = types;
    return key;
  }
  constexpr ConfigKey filled(const AutoRule& rule) const {
    ConfigKey key = *this;
    key.automatic = rule;
    return key;
  }
  constexpr ConfigKey now(std::string_view same) const {
    ConfigKey key = *this;
    key.successor = same;
    return key;
  }
  constexpr ConfigKey of_each_rank() const {
    ConfigKey key = *this;
    key.of_rank = true;
    return key;
  }
  constexpr ConfigKey or_flag(std::string_view sets) const {
    ConfigKey key = *this;
    key.flag_of = sets;
    return key;
  }
};

// Of the keys that decide something: each section's in a file of its own, src/config/sections, and all of them.
std::span<const ConfigKey> batch_keys();  // of no section
std::span<const ConfigKey> optimizer_keys();
std::span<const ConfigKey> scheduler_keys();
std::span<const ConfigKey> precision_keys();  // bf16, fp16, data_types
std::span<const ConfigKey> zero_optimization_keys();
std::span<const ConfigKey> aio_keys();  // and activation_checkpointing
std::span<const ConfigKey> spillway_keys();
std::span<const ConfigKey> config_keys();
// Those that DeepSpeed knows and that have no effect here.
std::span<const ConfigKey> config_keys_without_effect();
// The row of a path, from either table; null when there is none.
const ConfigKey* find_config_key(std::string_view path);

bool has_effect(const ConfigKey& key);
// Not a section, not another name, not of a group of parameters, and known to the types that are chosen.
bool is_listed(const ConfigKey& key, const Config& config);
// The values of all rows that are not of_each_rank(), a line each: the same text on all ranks of a run. A row whose
// place shows nothing is not in it.
std::string values_of_all_ranks(const Config& config);
// DeepSpeed reads "auto" as missing in the sections that it checks itself, so it is taken there in every key.
bool takes_auto(const ConfigKey& key);

std::string_view parent_of(std::string_view path);  // "optimizer.params"
std::string_view leaf_of(std::string_view path);    // "lr"

// The words of `allowed`, and words as a list for a message.
std::vector<std::string_view> choices_of(std::string_view allowed);
std::string list_of(std::span<const std::string_view> words);
std::string json_string(std::string_view text);          // with its quotes
bool same_word(std::string_view a, std::string_view b);  // in any case of letters

// Reads a value as its row wants it; otherwise says what is wrong and what would be right.
struct ValueProblem {
  std::string what, hint;
};
std::optional<ValueProblem> read_value(const ConfigKey& key, const JsonValue& value, KeyValue& out);

}  // namespace spillway
