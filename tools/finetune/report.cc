#include "tools/finetune/report.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <iterator>
#include <numeric>
#include <span>
#include <utility>

#include "tools/terminal/amount.h"

namespace spillway::models::finetune {

using terminal::fixed_text_of_size;

std::string ledger_text(const Ledger& ledger) {
  const auto total = [&](Placement tier) {
    std::uint64_t sum = 0;
    for (const auto& r : ledger.reservations) sum += r.tier == tier ? r.bytes : 0;
    return sum;
  };
  struct Tier {
    Placement placement;
    const char* name;
    std::uint64_t budget;
  };
  std::string text;
  auto out = std::back_inserter(text);
  for (const Tier& tier :
       {Tier{Placement::kHbm, "hbm", ledger.hbm_budget}, Tier{Placement::kHost, "host", ledger.host_budget},
        Tier{Placement::kNvme, "nvme", ledger.nvme_budget}}) {
    for (const auto& r : ledger.reservations) {
      if (r.tier != tier.placement) continue;
      fmt::format_to(out, "  {:<5} {:<44} {:>15} bytes\n", tier.name, r.purpose, r.bytes);
    }
    const std::uint64_t sum = total(tier.placement);
    if (sum == 0 && tier.budget == 0) continue;
    fmt::format_to(out, "  {:<5} {:<44} {:>15} bytes of {}, {} left\n", tier.name, "total", sum, tier.budget,
                   tier.budget - std::min(sum, tier.budget));
  }
  return text;
}

namespace {

// `, stalled 2.20 s: read 1.62, update 0.41`: the causes that make up most of it. Nothing for less than a hundredth of
// the step.
std::string stall_text(const StepReport& r) {
  if (r.stall_seconds < std::max(0.01 * r.seconds, 0.005)) return "";
  std::array<std::size_t, kStallNames.size()> order;
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::ranges::stable_sort(order, std::greater{}, [&](std::size_t cause) { return r.stalls.of[cause]; });
  std::string text = fmt::format(", stalled {:.2f} s", r.stall_seconds);
  const char* before = ": ";
  for (std::size_t cause : std::span(order).first<3>()) {
    if (r.stalls.of[cause] < std::max(0.1 * r.stall_seconds, 0.005)) break;
    text += fmt::format("{}{} {:.2f}", std::exchange(before, ", "), kStallNames[cause], r.stalls.of[cause]);
  }
  return text;
}

// JSON has no word for what is not finite.
std::string json_number(double value) { return std::isfinite(value) ? fmt::format("{:.9g}", value) : "null"; }

}  // namespace

std::string step_text(const StepInfo& step, std::uint64_t last_step) {
  const StepReport& r = step.report;
  const std::string norm = r.skipped ? "overflowed, skipped" : fmt::format("{:.3f}", r.gradient_norm);
  const std::string scale = r.loss_scale ? fmt::format("  loss scale {}", *r.loss_scale) : "";
  const double rate = r.seconds > 0 ? static_cast<double>(step.tokens) / r.seconds : 0;
  return fmt::format(
      "step {}/{}  loss {:.4f}  norm {}{}  lr {:.3g}  {:.2f} s  {:.0f} tokens/s  read {}  written {}  {} at {:.0f} "
      "%{}",
      r.step, last_step, step.loss, norm, scale, r.learning_rate, r.seconds, rate,
      fixed_text_of_size(r.nvme_read_bytes), fixed_text_of_size(r.nvme_write_bytes), r.link, r.link_percent,
      stall_text(r));
}

std::string step_json(const StepInfo& step) {
  const StepReport& r = step.report;
  const std::string scale =
      r.loss_scale ? fmt::format(R"(,"loss_scale":{:.9g},"skipped":{})", *r.loss_scale, r.skipped) : "";
  std::string stalls;
  for (std::size_t cause = 0; cause < kStallNames.size(); ++cause) {
    stalls += fmt::format(R"({}"{}":{:.6f})", cause > 0 ? "," : "", kStallNames[cause], r.stalls.of[cause]);
  }
  return fmt::format(
      R"({{"step":{},"loss":{},"grad_norm":{},"lr":{:.9g},"seconds":{:.6f},"tokens":{},"nvme_read_bytes":{},)"
      R"("nvme_write_bytes":{},"h2d_bytes":{},"d2h_bytes":{},"link":"{}","link_percent":{:.2f},)"
      R"("stall_seconds":{:.6f},"stalls":{{{}}},"adam_seconds":{:.6f},"durable_step":{},)"
      R"("visits":{},"visit_hits":{},"tile_bytes":{},"tile_hit_bytes":{},"speculative_blocks":{},"taken_back":{}{}}})"
      "\n",
      r.step, json_number(step.loss), json_number(r.gradient_norm), r.learning_rate, r.seconds, step.tokens,
      r.nvme_read_bytes, r.nvme_write_bytes, r.h2d_bytes, r.d2h_bytes, r.link, r.link_percent, r.stall_seconds, stalls,
      r.adam_seconds, r.durable_step, r.visits, r.visit_hits, r.tile_bytes, r.tile_hit_bytes, r.speculative_blocks,
      r.taken_back, scale);
}

std::string evaluation_text(const EvaluationInfo& evaluation, std::uint64_t last_step) {
  const auto& [step, loss, tokens, seconds, best] = evaluation;
  return fmt::format("evaluation at step {}/{}  loss {:.4f}  perplexity {:.4g}  {:.2f} s  {} tokens{}", step, last_step,
                     loss, std::exp(loss), seconds, tokens, best ? "  best so far" : "");
}

std::string evaluation_json(const EvaluationInfo& evaluation) {
  const auto& [step, loss, tokens, seconds, best] = evaluation;
  return fmt::format(R"({{"step":{},"eval_loss":{},"perplexity":{},"eval_tokens":{},"eval_seconds":{:.6f},"best":{}}})"
                     "\n",
                     step, std::isfinite(loss) ? fmt::format("{}", loss) : "null", json_number(std::exp(loss)), tokens,
                     seconds, best);
}

}  // namespace spillway::models::finetune
