// What a fine-tune prints: the memory ledger before step 1, a line per step, and the same as JSON lines.
#pragma once

#include <cstdint>
#include <string>

#include "spillway/engine.h"

namespace spillway::models::finetune {

struct StepFacts {
  StepReport report;
  double loss = 0;
  std::uint64_t tokens = 0;
};

// Every reservation, and per tier `TIER total N bytes of BUDGET, M left`.
std::string ledger_text(const Ledger& ledger);
std::string step_text(const StepFacts& step, std::uint64_t last_step);
// One line with a newline.
std::string step_json(const StepFacts& step);

}  // namespace spillway::models::finetune
