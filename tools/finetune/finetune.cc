#include "tools/finetune/finetune.h"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <fstream>
#include <functional>
#include <optional>
#include <string>
#include <utility>

#include "spillway/config.h"
#include "spillway/engine.h"
#include "spillway/error.h"
#include "spillway/log.h"
#include "tools/finetune/evaluation.h"
#include "tools/finetune/rank_voice.h"
#include "tools/finetune/ranks.h"
#include "tools/finetune/report.h"
#include "tools/finetune/rows.h"
#include "tools/finetune/run_input.h"
#include "tools/finetune/run_output.h"
#include "tools/finetune/run_weights.h"
#include "tools/finetune/step_rows.h"
#include "tools/models/lora.h"
#include "tools/models/trainer.h"
#include "tools/terminal/interrupt.h"
#include "tools/terminal/progress.h"
#include "tools/terminal/remedies.h"
#include "tools/terminal/tell.h"

namespace spillway::models::finetune {
namespace {

std::string word(const std::filesystem::path& path) { return terminal::shell_word(path.string()); }

class Run {
 public:
  Run(const FinetuneOptions& options, Ranks& ranks, RankVoice& voice, const terminal::Interrupt& interrupt)
      : options_(options),
        ranks_(ranks),
        voice_(voice),
        interrupt_(interrupt),
        snapshots_(options.snapshots, ranks.first()) {
    std::vector<Subject> subjects;
    ranks_.together([&] {
      read_input();
      if (!ranks_.alone()) subjects = subjects_of(options_, data_->mark(), evaluation_ ? evaluation_->mark() : "");
    });
    ranks_.agree(subjects);
    if (!ranks_.alone()) host_share_ = share_host(ranks_.communicator());
    agree_on_device(config_, ranks_);
    config_.threads = compute_threads(config_);
    const auto threads = static_cast<unsigned>(ranks_.together([] {}, config_.threads));
    ranks_.together([&] { make_trainer(threads); });
    ranks_.together([this] {
      if (ranks_.first()) prepare_output();
    });
    create_engine();
    ranks_.together([this] { check_room_beside_store(); });
    voice_.compare(ranks_);
    reader_.emplace(*data_, options_.sequence, share());
  }

  int train() {
    describe();
    if (ranks_.first() && !kept_in_store() && options_.out.empty() && options_.snapshots.directory.empty()) {
      log(LogLevel::kWarning,
          fmt::format("finetune: the trained model will be lost, for {}; give --out or --save", no_store()));
    }
    trainer_->attach(*engine_);
    if (weights_) {
      engine_->import_weights(weights_->source());
      weights_.reset();
    } else {
      position_ = Position::parse(engine_->blob(), options_);
    }
    note_data();
    note_best();
    // mpirun gives its processes a terminal, and what they write there to whoever reads mpirun.
    terminal::Progress progress(engine_->current_step(), std::max(options_.steps, engine_->current_step()), stdout,
                                ranks_.alone());
    try {
      if (evaluation_) evaluate(progress);
      while (engine_->current_step() < options_.steps && !stops([this] { read_step(); })) step(progress);
      finish_snapshot(progress);
    } catch (const Error& error) {
      if (error.code() == Code::kNonFinite || nothing_to_learn_) keep_last_good_step(progress);
      throw;
    }
    const bool stopped = engine_->current_step() < options_.steps;
    flush();
    const std::string kept = !stopped ? "" : kept_in_store() ? "--resume continues" : keep_step(progress);
    progress.clear();
    voice_.check_reader();
    if (stopped) {
      tell_best();
      terminal::tell("stopped after step {}; {}\n", engine_->current_step(), kept);
      return 128 + stopped_by_;
    }
    finish();
    return stopped_by_ == 0 ? 0 : 128 + stopped_by_;  // in the last evaluation
  }

 private:
  // Everything about the input is checked before a store is made.
  void read_input() {
    config_ = load_config(options_.config, options_.aio, automatic(options_), ranks_.count());
    model_ = load_trained_model(options_.model, options_.sequence);
    if (config_.lora.given()) add_adapters(model_, config_.lora);
    check_options(options_, config_, model_);
    data_.emplace(options_.data, options_.sequence, model_.vocabulary, options_.shuffle);
    data_->check_tokenizer(options_.model);
    if (data_->packed()) refuse_learned_positions(options_.data);
    if (options_.evaluation.every > 0) {
      evaluation_.emplace(options_.evaluation, options_.data, *data_, options_.sequence, model_.vocabulary);
      evaluation_->check_tokenizer(options_.model);
      if (evaluation_->packed()) refuse_learned_positions(evaluation_->data());
    }
    store_ = config_.nvme_paths;
    config_.nvme_paths = store_of_rank(store_, ranks_);
    if (!options_.load.empty()) snapshot_ = newest_snapshot(options_.load);
    if (options_.resume || !snapshot_.empty()) {
      const std::string where = snapshot_.empty() ? "the store" : snapshot_.string();
      const auto there = model_of(store_to_resume(store_, config_.nvme_paths), snapshot_, options_.sequence);
      if (there) check_same_model(*there, model_, where);
    }
    if (options_.resume || !snapshot_.empty()) return;
    weights_.emplace(model_, options_.model, options_.adapter, config_);
  }

  void refuse_learned_positions(const std::filesystem::path& packed) const {
    if (!model_.position_weight) return;
    throw Error(Code::kUnsupported,
                {.object = packed.string(),
                 .happened = "has several documents in a row, and this model's positions count from the row's begin",
                 .errno_value = 0,
                 .hint = "prepare the data with --no-packing"});
  }

  // `threads`: of the rank that has the most, so that working memory, and with it the plan of HBM, is the same on all.
  void make_trainer(unsigned threads) {
    TrainerOptions how = trainer_options(config_, resolve_device(config_), options_.sequence, communicator());
    how.threads = threads;
    how.fusion = options_.fusion;
    trainer_.emplace(model_, how);
    description_ = trainer_->description();
    output_ = output_of(model_);
  }

  void prepare_output() {
    log_ = open_log(options_.log);
    prepare_directories(options_);
    check_room(options_, output_);
  }

  void create_engine() {
    EngineOptions how{.on_existing = options_.resume  ? OnExisting::kResume
                                     : options_.fresh ? OnExisting::kReplace
                                                      : OnExisting::kRefuse,
                      .snapshot = snapshot_,
                      .communicator = communicator()};
    if (ranks_.first()) how.trace = options_.trace;
    engine_ = Engine::create(config_, description_, how);
  }

  Communicator* communicator() { return ranks_.alone() ? nullptr : &ranks_.communicator(); }

  // Other data than before is no error: some go on with more of it on purpose.
  void note_data() {
    const std::string mark = data_->mark();
    if (ranks_.first() && !position_.data.empty() && position_.data != mark) {
      log(LogLevel::kWarning,
          fmt::format("{}: is other data than before ({}; it was {}); training goes on with its row {}",
                      options_.data.string(), mark, position_.data, position_.row % data_->count()));
    }
    position_.data = mark;
    if (ranks_.first() && evaluation_ && mark.starts_with(evaluation_->mark())) {
      log(LogLevel::kWarning,
          fmt::format("{}: is the training data: nothing is held out", evaluation_->data().string()));
    }
  }

  // With what the store leaves. A run that is kept in it need not be refused: an export can go elsewhere.
  void check_room_beside_store() const {
    if (!ranks_.first()) return;
    try {
      check_room(options_, output_);
    } catch (const Error& error) {
      if (!kept_in_store()) throw;
      log(LogLevel::kWarning, terminal::message_of(error));
    }
  }

  // Whether --resume and `spillway export` find what was trained.
  bool kept_in_store() const { return !config_.nvme_paths.empty() && config_.commit_every != 0u && !store_missing_; }
  const char* no_store() const {
    if (store_missing_) return "the store was removed, moved or cut short";
    return config_.nvme_paths.empty() ? "there is no store" : "the store keeps no step (commit_every 0)";
  }

  // What is in memory is kept elsewhere, if there is an elsewhere.
  void flush() {
    try {
      engine_->flush();
    } catch (const Error& error) {
      if (error.code() != Code::kNotFound) throw;
      store_missing_ = true;
    }
    store_missing_ = ranks_.together([] {}, store_missing_) != 0;
  }

  // Rows of a step: of this rank, and of all of them.
  std::size_t rows_per_step() const { return std::size_t{config_.micro_batch} * config_.gradient_accumulation; }
  std::size_t all_rows_per_step() const { return rows_per_step() * ranks_.count(); }
  RowShare share() const { return {.rows = rows_per_step(), .rank = ranks_.rank(), .ranks = ranks_.count()}; }

  void describe() const {
    if (model_.has_dropout) terminal::tell("dropout is off: config.json asks for some, and none is applied\n");
    if (model_.positions > 0 && options_.sequence > model_.positions) {
      terminal::tell("rows of {} tokens are longer than the {} positions of config.json\n", options_.sequence,
                     model_.positions);
    }
    for (const auto& line : engine_->describe()) terminal::tell("{}\n", line);
    for (const auto& line : trainer_->describe()) terminal::tell("{}\n", line);
    terminal::tell("data: {}, {} rows a step\n", data_->describe(), all_rows_per_step());
    if (evaluation_) terminal::tell("evaluation: {}\n", evaluation_->describe());
    if (!ranks_.alone()) {
      terminal::tell(
          "ranks: {} do {} of a step's {} micro-batches each; this is {}; {} on its machine, {} core{} for it\n",
          ranks_.count(), config_.gradient_accumulation, config_.gradient_accumulation * ranks_.count(),
          ranks_.communicator().describe(), host_share_.ranks, host_share_.cores, host_share_.cores == 1 ? "" : "s");
    }
    terminal::tell("memory ledger:\n{}", ledger_text(engine_->ledger()));
    if (!snapshot_.empty()) terminal::tell("begun with {}, step {}\n", snapshot_.string(), engine_->current_step());
    std::fflush(stdout);
  }

  // Whether a signal ends the run here: at the same place on all ranks, whichever of them it came to, and when. Else
  // `read` brings the rows that come next, which is what else ranks do each for itself.
  bool stops(const std::function<void()>& read) {
    const int own = interrupt_.signal();
    const auto unless = [&] {
      if (own == 0) read();
    };
    stopped_by_ = static_cast<int>(ranks_.together(unless, static_cast<std::uint64_t>(own)));
    return stopped_by_ != 0;
  }

  void read_step() {
    rows_ = reader_->read(position_.row);
    nothing_to_learn_ = rows_.target_count == 0;
    if (!nothing_to_learn_) return;
    throw Error(Code::kInvalidArgument,
                {.object = options_.data.string(),
                 .happened = fmt::format("no token of the {} rows of step {} is to be predicted", all_rows_per_step(),
                                         engine_->current_step() + 1),
                 .errno_value = 0,
                 .hint = "take more rows a step, or prepare the data without documents that have little to learn"});
  }

  void step(terminal::Progress& progress) {
    StepInfo facts;
    facts.loss = trainer_->run_step(rows_);
    position_.row += all_rows_per_step();
    const std::string blob = position_.text(options_.sequence);
    facts.report = engine_->step(std::as_bytes(std::span(blob)));
    facts.tokens = all_rows_per_step() * options_.sequence;
    step_seconds_.push_back(facts.report.seconds);
    if (!first_loss_) first_loss_ = facts.loss;
    last_loss_ = facts.loss;
    write_log(step_json(facts));
    progress.done(facts.report.step);
    progress.line(step_text(facts, options_.steps));
    finish_snapshot(progress);
    if (snapshots_.due(facts.report.step, options_.steps)) snapshots_.begin(*engine_);
    if (evaluation_ && evaluation_->due(facts.report.step, options_.steps)) evaluate(progress);
  }

  // Every run begins with one: the last evaluation of the run before came after its last commit, which does not have
  // it.
  void evaluate(terminal::Progress& progress) {
    const auto stops = [this](const std::function<void()>& read) { return this->stops(read); };
    auto facts = evaluation_->run(*trainer_, share(), stops, progress);
    if (!facts) return;
    facts->step = engine_->current_step();
    facts->best = std::isfinite(facts->loss) && (!position_.best || facts->loss < position_.best->loss);
    write_log(evaluation_json(*facts));
    progress.line(evaluation_text(*facts, options_.steps));
    if (!facts->best || (!options_.evaluation.best.empty() && !keep_best(progress))) return;
    position_.best = {.loss = facts->loss, .step = facts->step, .data = evaluation_->mark()};
  }

  // A failure is no reason to stop: what there was is there still, and the next one that is as good is tried again.
  bool keep_best(terminal::Progress& progress) {
    finish_snapshot(progress);
    flush();
    try {
      write_model(options_.evaluation.best);
      return true;
    } catch (const Error& error) {
      if (ranks_.first())
        log(LogLevel::kWarning, fmt::format("the best model is not kept: {}", terminal::message_of(error)));
      return false;
    }
  }

  // Losses of other rows are not compared, and a best model that is gone is none.
  void note_best() {
    if (!evaluation_ || !position_.best) return;
    const std::filesystem::path& best = options_.evaluation.best;
    std::error_code ignored;
    const char* const config = model_.adapters ? kAdapterConfig : "config.json";
    const bool gone = ranks_.first() && !best.empty() && !std::filesystem::exists(best / config, ignored);
    const bool other = position_.best->data != evaluation_->mark();
    if (other && ranks_.first()) {
      log(LogLevel::kWarning, fmt::format("{}: holds other rows than those that were evaluated before; the lowest loss "
                                          "is counted anew",
                                          evaluation_->data().string()));
    }
    if (ranks_.together([] {}, gone) != 0 || other) position_.best.reset();
  }

  void tell_best() const {
    if (!evaluation_ || !position_.best) return;
    const auto& [loss, step, data] = *position_.best;
    const std::filesystem::path& best = options_.evaluation.best;
    terminal::tell("lowest evaluation loss: {:.4f}, at step {}{}{}\n", loss, step,
                   best.empty() ? "" : "; its model is in ", best.string());
  }

  void write_log(const std::string& line) {
    ranks_.together([&] {
      if (log_.is_open()) append_to_log(line);
    });
    voice_.check_reader();
  }

  void append_to_log(const std::string& line) {
    log_ << line << std::flush;
    if (log_) return;
    const bool kept = kept_in_store();
    const Error error(Code::kIo, {.object = options_.log.string(),
                                  .happened = "the log cannot be written",
                                  .errno_value = errno,
                                  .hint = !kept            ? "training goes on without"
                                          : errno == EFBIG ? "raise ulimit -f and continue with --resume"
                                                           : "make room and continue with --resume"});
    if (kept) throw error;
    log(LogLevel::kWarning, terminal::message_of(error));
    log_.close();
  }

  void finish_snapshot(terminal::Progress& progress) {
    if (const std::string taken = snapshots_.finish(*engine_); !taken.empty()) progress.line(taken);
  }

  // The last step of a run that ends early, which no store keeps. Returns where it is now.
  std::string keep_step(terminal::Progress& progress) {
    if (!first_loss_) return "nothing was trained";
    finish_snapshot(progress);  // an error may have come before
    const std::uint64_t step = engine_->current_step();
    if (!options_.snapshots.directory.empty() && snapshots_.taken() != step) {
      snapshots_.begin(*engine_);
      finish_snapshot(progress);
    }
    if (snapshots_.taken() != step && !options_.out.empty()) {
      write_model(options_.out);
      return fmt::format("its model is in {}", options_.out.string());
    }
    if (snapshots_.taken()) return fmt::format("--load {} continues", word(snapshots_.place()));
    return fmt::format("nothing is kept, for {}", no_store());
  }

  // After an error that has changed nothing.
  void keep_last_good_step(terminal::Progress& progress) {
    try {
      flush();
      const std::string kept = kept_in_store() ? "--resume continues" : keep_step(progress);
      progress.clear();
      terminal::tell("ended after step {}; {}\n", engine_->current_step(), kept);
    } catch (const Error& error) {
      // The first error is the one to end with.
      if (ranks_.first()) log(LogLevel::kWarning, terminal::message_of(error));
    }
  }

  void write_model(const std::filesystem::path& out) {
    write_output(*engine_, ranks_, model_, output_, out, options_.model);
  }

  // The first two steps of a run touch memory for the first time and have no update of the step before.
  void compare_with_prediction() {
    const std::optional<double> predicted = engine_->predicted_step_seconds();
    constexpr std::size_t kUnusual = 2;
    if (!predicted || step_seconds_.size() <= kUnusual) return;
    const auto first = step_seconds_.begin() + kUnusual;
    const auto middle = first + (step_seconds_.end() - first) / 2;
    std::nth_element(first, middle, step_seconds_.end());
    terminal::tell("step: {:.2f} s predicted, {:.2f} s measured ({:+.0f} %; median of {})\n", *predicted, *middle,
                   100 * (*middle / *predicted - 1), step_seconds_.end() - first);
  }

  void finish() {
    compare_with_prediction();
    if (first_loss_)
      terminal::tell("loss: {:.4f} in the first step of this run, {:.4f} in the last\n", *first_loss_, last_loss_);
    else
      terminal::tell("step {} is done already\n", engine_->current_step());
    tell_best();
    if (!options_.out.empty()) {
      write_model(options_.out);
      terminal::tell("{}", told_of_output(model_, options_.out));
    } else if (kept_in_store()) {
      std::string paths = word(store_[0]) + " DIR";
      for (std::size_t i = 1; i < store_.size(); ++i) paths += " --with " + word(store_[i]);
      terminal::tell("trained model: in the store; spillway export {} writes it\n", paths);
    } else if (snapshots_.taken() == engine_->current_step()) {
      terminal::tell("trained model: in the snapshot; spillway export {} DIR writes it\n", word(snapshots_.place()));
    } else if (store_missing_ && options_.snapshots.directory.empty()) {
      throw Error(
          Code::kNotFound,
          {.object = store_[0].string(),
           .happened = "the trained model is not kept: the store was removed, moved or cut short while the run went on",
           .errno_value = 0,
           .hint = "move it back, or train again; --out or --save keep it elsewhere"});
    } else if (options_.snapshots.directory.empty()) {
      terminal::tell("trained model: not kept, for {}, and no --out or --save\n", no_store());
    } else if (first_loss_) {
      throw Error(Code::kIo, {.object = options_.snapshots.directory.string(),
                              .happened = "the trained model is lost: its snapshot failed, and nothing else keeps it",
                              .errno_value = 0,
                              .hint = snapshots_.taken()
                                          ? fmt::format("make room, and go on with --load {}", word(snapshots_.place()))
                                          : "make room, and train again"});
    }
  }

  const FinetuneOptions& options_;
  Ranks& ranks_;
  RankVoice& voice_;
  const terminal::Interrupt& interrupt_;
  int stopped_by_ = 0;  // a signal
  Config config_;
  TrainedModel model_;
  std::vector<std::filesystem::path> store_;  // as it is configured, for all ranks
  HostShare host_share_;
  std::optional<Rows> data_;
  std::optional<StepRowReader> reader_;
  StepRows rows_;                  // of the step that comes
  bool nothing_to_learn_ = false;  // of them
  std::optional<Evaluation> evaluation_;
  std::optional<FirstWeights> weights_;
  ModelDescription description_, output_;
  std::filesystem::path snapshot_;  // that the run begins with; empty: none
  Snapshots snapshots_;
  std::ofstream log_;
  std::unique_ptr<Engine> engine_;
  std::optional<Trainer> trainer_;  // goes before the engine
  Position position_;
  std::vector<double> step_seconds_;
  bool store_missing_ = false;
  std::optional<double> first_loss_;
  double last_loss_ = 0;
};

}  // namespace

int finetune(const FinetuneOptions& options) {
  terminal::Interrupt interrupt("ending after this step");  // before anything that starts threads
  const std::unique_ptr<Communicator> communicator = make_communicator();
  Ranks ranks(*communicator);
  RankVoice voice(ranks);
  if (!ranks.first()) interrupt.say_nothing();
  try {
    return Run(options, ranks, voice, interrupt).train();
  } catch (const std::exception& error) {
    if (ranks.alone()) throw;
    return voice.tell_failure(ranks, error);
  }
}

}  // namespace spillway::models::finetune
