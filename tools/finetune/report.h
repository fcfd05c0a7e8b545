// What a fine-tune prints: the memory ledger before step 1, a line per step and evaluation, and the same as JSON lines.
#pragma once

#include <cstdint>
#include <string>

#include "spillway/engine.h"

namespace spillway::models::finetune {

struct StepInfo {
  StepReport report;
  double loss = 0;
  std::uint64_t tokens = 0;
};

struct EvaluationInfo {
  std::uint64_t step = 0;  // after which
  double loss = 0;         // mean of `tokens`, all of the held-out rows that are learned
  std::uint64_t tokens = 0;
  double seconds = 0;
  bool best = false;  // the lowest loss so far
};

// Every reservation, and per tier `TIER total N bytes of BUDGET, M left`.
std::string ledger_text(const Ledger& ledger);
std::string step_text(const StepInfo& step, std::uint64_t last_step);
// One line with a newline.
std::string step_json(const StepInfo& step);
std::string evaluation_text(const EvaluationInfo& evaluation, std::uint64_t last_step);
// Its loss with every digit, for its bits are the same in every layout.
std::string evaluation_json(const EvaluationInfo& evaluation);

}  // namespace spillway::models::finetune
