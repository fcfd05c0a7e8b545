#include "tools/gpt2/finetune.h"

#include <fmt/format.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <fstream>
#include <optional>
#include <string>

#include "spillway/config.h"
#include "spillway/engine.h"
#include "spillway/error.h"
#include "spillway/export.h"
#include "spillway/log.h"
#include "spillway/snapshot.h"
#include "spillway/store.h"
#include "spillway/units.h"
#include "tools/gpt2/config_json.h"
#include "tools/gpt2/data.h"
#include "tools/gpt2/report.h"
#include "tools/gpt2/trainer.h"
#include "tools/gpt2/weights.h"
#include "tools/terminal/interrupt.h"
#include "tools/terminal/progress.h"
#include "tools/terminal/remedies.h"
#include "tools/terminal/shell_word.h"
#include "tools/terminal/tell.h"

namespace spillway::gpt2 {
namespace {

[[noreturn]] void refuse(std::string object, std::string happened, std::string hint) {
  throw Error(
      Code::kInvalidArgument,
      {.object = std::move(object), .happened = std::move(happened), .errno_value = 0, .hint = std::move(hint)});
}

constexpr const char* kTrial = ".spillway-trial-XXXXXX";

// Absolute, and `model` for `model/`.
std::filesystem::path plain(const std::filesystem::path& path) {
  std::error_code ignored;
  return std::filesystem::absolute(path / "", ignored).parent_path();
}

std::string word(const std::filesystem::path& path) { return terminal::shell_word(path.string()); }

// What "auto" stands for in the configuration. That is read before the model is, so that it is not the model's errors
// that come first; a model that cannot be read is said so in its turn.
AutoValues automatic(const FinetuneOptions& options) {
  AutoValues values;
  values.total_steps = options.steps;
  try {
    values.hidden_size = load_model_config(options.model).width;
  } catch (const Error&) {
    values.hidden_size.reset();
  }
  return values;
}

// Where the data stands; travels with every commit as `row N of sequence T of MARK`, the data's. Older versions wrote
// no mark.
struct Position {
  std::uint64_t row = 0;
  std::string data;

  std::string text(std::uint32_t sequence) const {
    return fmt::format("row {} of sequence {}{}{}", row, sequence, data.empty() ? "" : kOfData, data);
  }

  static Position parse(std::span<const std::byte> blob, const FinetuneOptions& options) {
    const std::string text(reinterpret_cast<const char*>(blob.data()), blob.size());
    Position position;
    if (text.empty()) return position;  // stopped before a step was committed
    const std::string_view start = "row ";
    const char* begin = text.data() + std::min(start.size(), text.size());
    std::from_chars(begin, text.data() + text.size(), position.row);
    if (const auto of = text.find(kOfData); of != text.npos) position.data = text.substr(of + kOfData.size());
    if (position.text(options.sequence) != text) {
      refuse("--seq", fmt::format("the run was begun with another row length: \"{}\"", text),
             "go on with the same --seq");
    }
    return position;
  }

  static constexpr std::string_view kOfData = " of data of ";
};

void check_options(const FinetuneOptions& options, const Config& config, const ModelConfig& model) {
  if (options.sequence > model.positions) {
    refuse("--seq", fmt::format("{} tokens are more than the model's {} positions", options.sequence, model.positions),
           fmt::format("use --seq {} or less", model.positions));
  }
  if (options.resume && config.nvme_paths.empty()) {
    refuse("--resume", "the configuration has no nvme_path, so there is no store", "start without --resume");
  }
  std::error_code ignored;
  if (!options.out.empty() && std::filesystem::equivalent(options.out, options.model, ignored)) {
    refuse("--out", "is the model that is trained", "name another directory");
  }
  const bool link = !options.out.empty() && std::filesystem::is_symlink(plain(options.out), ignored);
  if (link && !std::filesystem::exists(options.out, ignored))
    refuse("--out", "is a link to what is not there", "make that directory, or name another");
  if (!options.out.empty() && std::filesystem::exists(options.out / "spillway.json", ignored)) {
    refuse("--out", "is a snapshot, whose exact weights would be replaced", "name another directory");
  }
  const auto place = [&](const std::filesystem::path& file) {
    return std::filesystem::weakly_canonical(file, ignored);
  };
  if (!options.log.empty() && place(options.log) == place(options.trace))
    refuse("--trace", "is the file of --log", "name another file");
}

// The config.json that a store or a snapshot was made with; nothing where it has none, or is none.
std::optional<ModelConfig> model_of(const std::vector<std::filesystem::path>& store,
                                    const std::filesystem::path& snapshot) {
  try {
    if (!snapshot.empty() && !find_snapshot(snapshot)) return std::nullopt;
    if (!snapshot.empty()) return load_model_config(snapshot);
    for (const Attachment& attachment : inspect_store(store).model.attachments) {
      if (attachment.name == "config.json") return model_config(ConfigJson(attachment.text, attachment.name));
    }
  } catch (const Error&) {  // what is wrong with it the engine says
  }
  return std::nullopt;
}

// What the engine cannot know: models of the same tensors that compute other things with them.
void check_same_model(const ModelConfig& there, const ModelConfig& here, const std::string& where) {
  const auto compare = [&](const char* key, auto stored, auto wanted) {
    if (stored == wanted) return;
    refuse("--model", fmt::format("has {} {}, that in {} has {}", key, wanted, where, stored),
           "go on with the model that it was made with");
  };
  compare("n_head", there.heads, here.heads);
  compare("layer_norm_epsilon", there.epsilon, here.epsilon);
}

std::unique_ptr<Engine> create_engine(const FinetuneOptions& options, const Config& config,
                                      const ModelDescription& description, const std::filesystem::path& snapshot) {
  const auto existing = options.resume  ? OnExisting::kResume
                        : options.fresh ? OnExisting::kReplace
                                        : OnExisting::kRefuse;
  return Engine::create(config, description, {.on_existing = existing, .snapshot = snapshot, .trace = options.trace});
}

// Before the first step: what a long run leaves must not be the first thing that finds no place. `trial`: a name for
// mkdtemp() where it is to be written.
void prepare_directory(std::string trial, const std::filesystem::path& named, const char* what, const char* option) {
  std::error_code error;
  std::filesystem::create_directories(std::filesystem::path(trial).parent_path(), error);
  // Only trying tells: the superuser is granted every access, also to what takes no directory.
  if (!error && (::mkdtemp(trial.data()) == nullptr || ::rmdir(trial.c_str()) != 0))
    error = {errno, std::generic_category()};
  if (!error) return;
  const bool full = error == std::errc::no_space_on_device;
  throw Error(Code::kIo, {.object = named.string(),
                          .happened = fmt::format("cannot take {}", what),
                          .errno_value = error.value(),
                          .hint = full ? fmt::format("make room, or name a directory on another drive in {}", option)
                                       : fmt::format("name a directory in {} that this user may write to", option)});
}

// What the trained model is written to first: files in its directory, or a directory beside it where that is made when
// it is complete. As long as its name there, `.NAME.partial`.
std::filesystem::path trial_of_model(const std::filesystem::path& out) {
  std::error_code ignored;
  const std::filesystem::path place = plain(out);
  if (std::filesystem::exists(place, ignored)) return place / kTrial;
  return place.parent_path() / fmt::format(".{}.pXXXXXX", place.filename().string());
}

void prepare_directories(const FinetuneOptions& options) {
  if (!options.out.empty()) prepare_directory(trial_of_model(options.out), options.out, "the trained model", "--out");
  const std::filesystem::path& snapshots = options.snapshots.directory;
  if (!snapshots.empty()) prepare_directory(snapshots / kTrial, snapshots, "snapshots", "--save");
}

// A model that is there already is replaced by a whole one: it gives no room.
void check_room(const std::filesystem::path& out, const ModelDescription& model) {
  if (out.empty()) return;
  constexpr std::uint64_t kHeaderEntry = 256;  // of a tensor: its name, type, shape and place
  std::uint64_t need = 0;
  for (const Block& block : model.blocks) {
    for (const Parameter& parameter : block.parameters) need += elements(parameter) * sizeof(float) + kHeaderEntry;
  }
  struct rlimit file {};  // of a file's size
  if (::getrlimit(RLIMIT_FSIZE, &file) == 0 && std::min(need, kMaxFileBytes) > file.rlim_cur) {
    throw Error(Code::kDoesNotFit, {.object = out.string(),
                                    .happened = fmt::format("the trained model takes {} MiB, and a file may have {}",
                                                            div_up(need, kMiB), file.rlim_cur / kMiB),
                                    .errno_value = EFBIG,
                                    .hint = "raise ulimit -f"});
  }
  std::error_code error;
  const std::filesystem::space_info space = std::filesystem::space(trial_of_model(out).parent_path(), error);
  if (error || space.capacity == 0 || need <= space.available) return;  // some file systems do not count
  throw Error(Code::kDoesNotFit, {.object = out.string(),
                                  .happened = fmt::format("the trained model takes {} MiB, {} MiB are free",
                                                          div_up(need, kMiB), space.available / kMiB),
                                  .errno_value = ENOSPC,
                                  .hint = "free some space, or name a directory on another drive in --out"});
}

// What every line of a log begins with: a file that begins otherwise, such as an input of the run, gets none.
bool is_no_log(const std::filesystem::path& path) {
  constexpr std::string_view kBeginning = R"({"step":)";
  std::error_code error;
  if (!std::filesystem::is_regular_file(path, error) || std::filesystem::file_size(path, error) == 0) return false;
  std::string beginning(kBeginning.size(), '\0');
  std::ifstream(path).read(beginning.data(), static_cast<std::streamsize>(beginning.size()));
  return beginning != kBeginning;
}

std::ofstream open_log(const std::filesystem::path& path) {
  std::ofstream log;
  if (path.empty()) return log;
  if (is_no_log(path)) refuse(path.string(), "is there, and is no log of a run", "name another file in --log");
  log.open(path, std::ios::app);
  if (!log) {
    throw Error(Code::kIo, {.object = path.string(),
                            .happened = "cannot be opened for the log",
                            .errno_value = errno,
                            .hint = "check --log"});
  }
  return log;
}

class Run {
 public:
  explicit Run(const FinetuneOptions& options)
      : options_(options),
        config_(load_config(options.config, options.aio, automatic(options))),
        model_(load_model_config(options.model)) {
    check_options(options_, config_, model_);
    data_.emplace(options_.data, options_.sequence, model_.vocabulary);
    // Everything about the input is checked before a store is made.
    if (!options_.load.empty()) snapshot_ = newest_snapshot(options_.load);
    if (options_.resume || !snapshot_.empty()) {
      const std::string where = snapshot_.empty() ? "the store" : snapshot_.string();
      if (const auto there = model_of(config_.nvme_paths, snapshot_)) check_same_model(*there, model_, where);
    }
    if (!options_.resume && snapshot_.empty()) weights_.emplace(options_.model, describe_model(model_, 0));
    if (weights_) weights_->check(config_.weights);
    config_.threads = compute_threads(config_);
    TrainerOptions how = trainer_options(config_, resolve_device(config_), options_.sequence);
    how.fusion = options_.fusion;
    trainer_.emplace(model_, how);
    description_ = trainer_->description();
    log_ = open_log(options_.log);
    prepare_directories(options_);
    check_room(options_.out, description_);
    engine_ = create_engine(options_, config_, description_, snapshot_);
    check_room_beside_store();
    rows_.resize(rows_per_step() * (std::size_t{options_.sequence} + 1));
  }

  int train() {
    describe();
    if (!kept_in_store() && options_.out.empty() && options_.snapshots.directory.empty()) {
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
    terminal::Progress progress(engine_->current_step(), std::max(options_.steps, engine_->current_step()));
    try {
      while (engine_->current_step() < options_.steps && !interrupt_.requested()) step(progress);
      finish_snapshot(progress);
    } catch (const Error& error) {
      if (error.code() == Code::kNonFinite) keep_last_good_step(progress);
      throw;
    }
    const bool stopped = engine_->current_step() < options_.steps;
    flush();
    const std::string kept = !stopped ? "" : kept_in_store() ? "--resume continues" : keep_step(progress);
    progress.clear();
    if (stopped) {
      terminal::tell("stopped after step {}; {}\n", engine_->current_step(), kept);
      return interrupt_.exit_code();
    }
    finish();
    return 0;
  }

 private:
  // Other data than before is no error: some go on with more of it on purpose.
  void note_data() {
    const std::string mark = data_->mark();
    if (!position_.data.empty() && position_.data != mark) {
      log(LogLevel::kWarning,
          fmt::format("{}: is other data than before ({}; it was {}); training goes on with its row {}",
                      options_.data.string(), mark, position_.data, position_.row % data_->rows()));
    }
    position_.data = mark;
  }

  // With what the store leaves. A run that is kept in it need not be refused: an export can go elsewhere.
  void check_room_beside_store() const {
    try {
      check_room(options_.out, description_);
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
  }

  std::size_t rows_per_step() const { return std::size_t{config_.micro_batch} * config_.gradient_accumulation; }

  void describe() const {
    if (model_.has_dropout) terminal::tell("dropout is off: config.json asks for some, and none is applied\n");
    for (const auto& line : engine_->describe()) terminal::tell("{}\n", line);
    for (const auto& line : trainer_->describe()) terminal::tell("{}\n", line);
    terminal::tell("data: {} rows of {} tokens, {} rows a step\n", data_->rows(), options_.sequence, rows_per_step());
    terminal::tell("memory ledger:\n{}", ledger_text(engine_->ledger()));
    if (!snapshot_.empty()) terminal::tell("begun with {}, step {}\n", snapshot_.string(), engine_->current_step());
    std::fflush(stdout);
  }

  void step(terminal::Progress& progress) {
    const std::size_t row_tokens = std::size_t{options_.sequence} + 1;
    for (std::size_t r = 0; r < rows_per_step(); ++r) {
      data_->read_row(position_.row++, std::span(rows_).subspan(r * row_tokens, row_tokens));
    }
    StepFacts facts;
    facts.loss = trainer_->run_step(rows_);
    const std::string blob = position_.text(options_.sequence);
    facts.report = engine_->step(std::as_bytes(std::span(blob)));
    facts.tokens = rows_per_step() * options_.sequence;
    step_seconds_.push_back(facts.report.seconds);
    if (!first_loss_) first_loss_ = facts.loss;
    last_loss_ = facts.loss;
    if (log_.is_open()) write_log(facts);
    progress.done(facts.report.step);
    progress.line(step_text(facts, options_.steps));
    finish_snapshot(progress);
    if (snapshots_.due(facts.report.step, options_.steps)) snapshots_.begin(*engine_);
  }

  void write_log(const StepFacts& facts) {
    log_ << step_json(facts) << std::flush;
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
      write_model();
      return fmt::format("its model is in {}", options_.out.string());
    }
    if (snapshots_.taken()) return fmt::format("--load {} continues", word(snapshots_.place()));
    return fmt::format("nothing is kept, for {}", no_store());
  }

  // Behind an error that has changed nothing.
  void keep_last_good_step(terminal::Progress& progress) {
    try {
      flush();
      const std::string kept = kept_in_store() ? "--resume continues" : keep_step(progress);
      progress.clear();
      terminal::tell("ended after step {}; {}\n", engine_->current_step(), kept);
    } catch (const Error& error) {
      log(LogLevel::kWarning, terminal::message_of(error));  // the first error is the one to end with
    }
  }

  void write_model() { export_model(*engine_, description_, options_.out, {.type = DType::kFloat32, .replace = true}); }

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
    if (!options_.out.empty()) {
      write_model();
      terminal::tell("trained model: {}\n  GPT2LMHeadModel.from_pretrained(\"{}\") loads it\n", options_.out.string(),
                     options_.out.string());
    } else if (kept_in_store()) {
      std::string paths = word(config_.nvme_paths[0]) + " DIR";
      for (std::size_t i = 1; i < config_.nvme_paths.size(); ++i) paths += " --with " + word(config_.nvme_paths[i]);
      terminal::tell("trained model: in the store; spillway export {} writes it\n", paths);
    } else if (snapshots_.taken() == engine_->current_step()) {
      terminal::tell("trained model: in the snapshot; spillway export {} DIR writes it\n", word(snapshots_.place()));
    } else if (store_missing_ && options_.snapshots.directory.empty()) {
      throw Error(
          Code::kNotFound,
          {.object = config_.nvme_paths[0].string(),
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
  terminal::Interrupt interrupt_{"ending after this step"};  // before anything that starts threads
  Config config_;
  ModelConfig model_;
  std::optional<TokenFile> data_;
  std::optional<ModelWeights> weights_;
  std::optional<Gpt2Trainer> trainer_;
  ModelDescription description_;
  std::filesystem::path snapshot_;  // that the run begins with; empty: none
  Snapshots snapshots_{options_.snapshots};
  std::ofstream log_;
  std::unique_ptr<Engine> engine_;
  std::vector<std::uint32_t> rows_;
  Position position_;
  std::vector<double> step_seconds_;
  bool store_missing_ = false;
  std::optional<double> first_loss_;
  double last_loss_ = 0;
};

}  // namespace

int finetune(const FinetuneOptions& options) { return Run(options).train(); }

}  // namespace spillway::gpt2
