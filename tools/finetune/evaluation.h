// The held-out rows of a run, and what the model makes of them.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>

#include "tools/finetune/report.h"
#include "tools/finetune/rows.h"
#include "tools/finetune/step_rows.h"
#include "tools/models/trainer.h"
#include "tools/terminal/progress.h"

namespace spillway::models::finetune {

struct EvaluationOptions {
  std::uint64_t every = 0;     // steps; 0: never
  std::filesystem::path data;  // empty: the held-out part of the run's
  std::filesystem::path best;  // where the model of the lowest loss goes; empty: nowhere
};

// The lowest loss so far. Travels with every commit, in finetune's position.
struct BestEvaluation {
  double loss = 0;
  std::uint64_t step = 0;
  std::string data;  // what tells the held-out rows from others

  std::string text() const;
  // Nothing for what text() did not write.
  static std::optional<BestEvaluation> parse(const std::string& text);
};

class Evaluation {
 public:
  // Throws as Rows, and kInvalidArgument where there is no held-out part, or one of other rows than `training`'s.
  Evaluation(const EvaluationOptions& options, const std::filesystem::path& training_data, const Rows& training,
             std::uint32_t sequence, std::uint32_t vocabulary);

  bool due(std::uint64_t step, std::uint64_t last_step) const { return step % every_ == 0 || step == last_step; }
  const std::filesystem::path& data() const { return data_; }
  bool packed() const { return rows_.packed(); }
  void check_tokenizer(const std::filesystem::path& model) const { rows_.check_tokenizer(model); }
  std::string mark() { return rows_.mark(); }
  std::string describe() const;

  // Reads the rows of a pass, unless the run is to end: true then.
  using Stops = std::function<bool(const std::function<void()>& read)>;
  // All rows once, between two steps. Nothing: the run is to end. All ranks call it, and get the same.
  std::optional<EvaluationInfo> run(Trainer& trainer, RowShare share, const Stops& stops, terminal::Progress& progress);

 private:
  std::uint64_t every_;
  std::filesystem::path data_;
  std::uint32_t sequence_;
  Rows rows_;
};

}  // namespace spillway::models::finetune
