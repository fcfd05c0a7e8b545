// What a fine-tune is given, looked at before anything is written.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "spillway/config.h"
#include "tools/finetune/evaluation.h"
#include "tools/finetune/finetune.h"
#include "tools/finetune/ranks.h"
#include "tools/models/trained_model.h"

namespace spillway::models::finetune {

// What "auto" stands for in the configuration. That is read before the model is, so that it is not the model's errors
// that come first; a model that cannot be read is said so in its turn.
AutoValues automatic(const FinetuneOptions& options);

// Where the data stands; travels with every commit as `row N of sequence T of data of MARK`, the data's, and with
// evaluations `; best evaluation` and its text. Older versions wrote no mark.
struct Position {
  std::uint64_t row = 0;
  std::string data;
  std::optional<BestEvaluation> best;

  std::string text(std::uint32_t sequence) const;
  static Position parse(std::span<const std::byte> blob, const FinetuneOptions& options);
};

void check_options(const FinetuneOptions& options, const Config& config, const TrainedModel& model);

// The paths of a configuration's store as this rank uses them.
std::vector<std::filesystem::path> store_of_rank(const std::vector<std::filesystem::path>& paths, const Ranks& ranks);

// What tells of the model that is trained on in a resumed run: this rank's own store, where it has one, else that of a
// rank of the run that lies there.
std::vector<std::filesystem::path> store_to_resume(const std::vector<std::filesystem::path>& paths,
                                                   const std::vector<std::filesystem::path>& own);

// The config.json that a store or a snapshot was made with; nothing where it has none, or is none.
std::optional<TrainedModel> model_of(const std::vector<std::filesystem::path>& store,
                                     const std::filesystem::path& snapshot, std::uint32_t sequence);

// What the engine cannot know: models of the same tensors that compute other things with them.
void check_same_model(const TrainedModel& there, const TrainedModel& here, const std::string& where);

// What all ranks must have been given alike. `data`, `held_out`: what tells it from other data.
std::vector<Subject> subjects_of(const FinetuneOptions& options, const std::string& data, const std::string& held_out);

}  // namespace spillway::models::finetune
