#include "tools/finetune/evaluation.h"

#include <fmt/format.h>

#include <charconv>
#include <chrono>
#include <string_view>
#include <system_error>
#include <utility>

#include "spillway/error.h"

namespace spillway::models::finetune {
namespace {

constexpr const char* kHeldOut = "eval";  // in a directory of prepared data
constexpr double kRedrawSeconds = 0.2;    // a pass may take a millisecond

[[noreturn]] void refuse_evaluation(std::string object, std::string happened, std::string hint) {
  throw Error(
      Code::kInvalidArgument,
      {.object = std::move(object), .happened = std::move(happened), .errno_value = 0, .hint = std::move(hint)});
}

std::filesystem::path held_out(const EvaluationOptions& options, const std::filesystem::path& training) {
  if (!options.data.empty()) return options.data;
  std::error_code ignored;
  if (!std::filesystem::is_directory(training, ignored)) {
    refuse_evaluation("--eval", fmt::format("{} is a file, which has no held-out part", training.string()),
                      "name held-out rows in --eval-data");
  }
  if (!std::filesystem::exists(training / kHeldOut, ignored)) {
    refuse_evaluation("--eval", fmt::format("{} has no held-out part", training.string()),
                      "prepare the data with --holdout, or name held-out rows in --eval-data");
  }
  return training / kHeldOut;
}

std::filesystem::path with_rows_of(const std::filesystem::path& data, std::uint32_t sequence) {
  const auto length = row_length_of(data);
  if (!length || *length == sequence) return data;
  refuse_evaluation(data.string(), fmt::format("has rows of {} tokens, and the run has rows of {}", *length, sequence),
                    "prepare both parts with the same --seq, or in one, with --holdout");
}

}  // namespace

std::string BestEvaluation::text() const { return fmt::format("{} at step {} of {}", loss, step, data); }

std::optional<BestEvaluation> BestEvaluation::parse(const std::string& text) {
  BestEvaluation best;
  const char* const end = text.data() + text.size();
  const auto number = std::from_chars(text.data(), end, best.loss);
  constexpr std::string_view kAt = " at step ", kOf = " of ";
  const std::string_view rest(number.ptr, static_cast<std::size_t>(end - number.ptr));
  if (number.ec != std::errc{} || !rest.starts_with(kAt)) return std::nullopt;
  const auto step = std::from_chars(number.ptr + kAt.size(), end, best.step);
  if (step.ec != std::errc{} || !std::string_view(step.ptr, end).starts_with(kOf)) return std::nullopt;
  best.data.assign(step.ptr + kOf.size(), end);
  return best;
}

Evaluation::Evaluation(const EvaluationOptions& options, const std::filesystem::path& training_data,
                       const Rows& training, std::uint32_t sequence, std::uint32_t vocabulary)
    : every_(options.every),
      data_(held_out(options, training_data)),
      sequence_(sequence),
      rows_(with_rows_of(data_, sequence), sequence, vocabulary) {
  const auto own = rows_.vocabularies(), theirs = training.vocabularies();
  if (!own.empty() && !theirs.empty() && own != theirs) {
    refuse_evaluation(data_.string(),
                      fmt::format("was prepared with another tokenizer than {}", training_data.string()),
                      "prepare both parts with the model's own tokenizer");
  }
}

std::string Evaluation::describe() const {
  return fmt::format("{}, before the first step, every {} steps and after the last", rows_.describe(), every_);
}

std::optional<EvaluationInfo> Evaluation::run(Trainer& trainer, RowShare share, const Stops& stops,
                                              terminal::Progress& progress) {
  using Clock = std::chrono::steady_clock;
  const Clock::time_point begin = Clock::now();
  const auto seconds = [&] { return std::chrono::duration<double>(Clock::now() - begin).count(); };
  StepRowReader reader(rows_, sequence_, share);
  EvaluationInfo facts;
  std::uint64_t first = 0;
  bool stopped = false;
  double drawn = -kRedrawSeconds;
  const auto next = [&]() -> std::optional<StepRows> {
    const std::uint64_t count = rows_.count();
    if (first >= count) return std::nullopt;
    const double done = static_cast<double>(first) / static_cast<double>(count), now = seconds();
    if (now - drawn >= kRedrawSeconds) {
      progress.at(done, first == 0 ? -1 : now * (1 / done - 1), "evaluating");
      drawn = now;
    }
    StepRows rows;
    stopped = stops([&] { rows = reader.read(first, count); });
    if (stopped) return std::nullopt;
    first += share.all();
    facts.tokens += rows.target_count;
    return rows;
  };
  facts.loss = trainer.evaluate(next);
  if (stopped) return std::nullopt;
  if (facts.tokens == 0) {
    throw Error(Code::kCorrupt, {.object = data_.string(),
                                 .happened = "no token of it is to be predicted, and header.json says otherwise",
                                 .errno_value = 0,
                                 .hint = "prepare the data again, with `python -m spillway.prepare`"});
  }
  facts.seconds = seconds();
  return facts;
}

}  // namespace spillway::models::finetune
