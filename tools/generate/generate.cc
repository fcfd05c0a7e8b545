#include "tools/generate/generate.h"

#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <memory>
#include <system_error>
#include <utility>

#include "spillway/config.h"
#include "spillway/engine.h"
#include "spillway/error.h"
#include "spillway/store.h"
#include "tools/generate/generator.h"
#include "tools/generate/model_source.h"
#include "tools/generate/text.h"
#include "tools/models/gpt2/model.h"
#include "tools/models/trained_model.h"
#include "tools/terminal/amount.h"
#include "tools/terminal/byte_bar.h"
#include "tools/terminal/interrupt.h"
#include "tools/terminal/json.h"
#include "tools/terminal/tell.h"

namespace spillway::models::generate {
namespace {

constexpr const char* kMark = "spillway_generate.txt";  // of the weights that a kept store has
constexpr std::uint32_t kByteVocabulary = 256;

struct Stopped {};  // by Ctrl-C

[[noreturn]] void refuse(std::string object, std::string happened, std::string hint,
                         Code code = Code::kInvalidArgument) {
  throw Error(
      code, {.object = std::move(object), .happened = std::move(happened), .errno_value = 0, .hint = std::move(hint)});
}

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

std::string read_prompt(const GenerateOptions& options) {
  if (options.prompt_file.empty()) return options.prompt;
  const bool standard = options.prompt_file == "-";
  std::ifstream file(standard ? "/dev/stdin" : options.prompt_file, std::ios::binary);
  std::string text{std::istreambuf_iterator<char>(file), {}};
  if (file.is_open() && !file.bad()) return text;
  throw Error(Code::kNotFound, {.object = options.prompt_file.string(),
                                .happened = "cannot be read",
                                .errno_value = errno,
                                .hint = "check --prompt-file"});
}

class Run {
 public:
  Run(const GenerateOptions& options, const terminal::Interrupt& interrupt)
      : options_(options), interrupt_(interrupt), source_(options.model, options.others, options.adapter) {
    check_options();
    vocabulary_ = trained_model(source_.config(), 1).vocabulary;
    text_ = make_text();  // a tokenizer opens its files while the rest is made
    ends_ = source_.ends({options.model, options.tokenizer});
    read_config();
    prompt_ = text_->tokens_of(read_prompt(options));
    check_prompt();
    model_ = source_.model(positions_);
    open_log();
    open_weights();
    create_engine();
    import_weights();
  }

  int generate() {
    if (options_.verbose) {
      for (const auto& line : engine_->describe()) terminal::tell(stderr, "{}\n", line);
      for (const auto& line : generator_->describe()) terminal::tell(stderr, "{}\n", line);
    }
    Sampler sampler(options_.sampling);
    const double begin = now();
    std::span<const float> logits = generator_->feed(prompt_);
    const double prompt_seconds = now() - begin;
    traffic();  // what the prompt read is not the tokens'
    std::uint32_t made = 0;
    bool ended = false;
    double at = now();
    const double first = at;
    while (!interrupt_.requested()) {
      const Choice choice = sampler.next(logits);
      ++made;
      ended = !options_.past_end && std::ranges::find(ends_, choice.token) != ends_.end();
      // An end is a token as well, where tokens are what is asked for.
      if (!ended || options_.ids) print(text_->add(choice.token));
      write_log(choice, std::exchange(at, now()));
      if (ended || made == most_) break;
      logits = generator_->feed({&choice.token, 1});
    }
    print(text_->rest() + "\n");
    report(prompt_seconds, made, at - first, ended);
    return interrupt_.requested() && !ended && made < most_ ? interrupt_.exit_code() : 0;
  }

 private:
  void check_options() const {
    if (options_.prompt.empty() && options_.prompt_file.empty())
      refuse("--prompt", "is empty", "give some text, or --prompt-file");
    if (source_.is_store() && !options_.store.empty()) {
      refuse("--store", "keeps the weights of a model's directory, and --model is a store",
             "export it first: `spillway export STORE DIR`");
    }
    if (!options_.store.empty() && options_.config.empty())
      refuse("--store", "is for weights that are streamed", "say in --config what memory they have");
  }

  // Named tokenizers count, then the model's own; a model of bytes needs none.
  std::unique_ptr<Text> make_text() const {
    if (options_.ids) return numbers();
    const std::filesystem::path& place = options_.tokenizer.empty() ? options_.model : options_.tokenizer;
    if (!options_.tokenizer.empty() || has_tokenizer(place))
      return tokenizer({.directory = place, .chat = options_.chat});
    if (options_.chat) refuse("--chat", "needs a tokenizer, and there is none", "name its directory by --tokenizer");
    if (vocabulary_ == kByteVocabulary) return bytes();
    refuse(place.string(), "has no tokenizer", "name its directory by --tokenizer, or give tokens with --ids");
  }

  void read_config() {
    if (options_.config.empty()) {
      config_.weights = source_.type();
    } else {
      constexpr std::uint32_t kNobodyTrains = 0;  // ranks
      AutoValues automatic;
      automatic.hidden_size = trained_model(source_.config(), 1).width;
      config_ = load_config(options_.config, {}, automatic, kNobodyTrains);
    }
    config_.micro_batch = config_.gradient_accumulation = config_.sum_groups = 1;
    config_.states = config_.parameters;  // there are none
    config_.parameter_groups.clear();     // their names may be of tensors that are left out, or adapters'
    config_.threads = compute_threads(config_);
    place_ = config_.nvme_paths.empty() ? std::filesystem::temp_directory_path() : config_.nvme_paths[0];
    if (config_.parameters != Placement::kNvme) {
      if (!options_.store.empty()) {
        refuse("--store", "is for weights that are streamed, and the configuration keeps them in memory",
               "say \"offload_param\": {\"device\": \"nvme\", …} there");
      }
      config_.nvme_paths.clear();
      config_.nvme_rates.clear();
      return;
    }
    if (!options_.store.empty()) {
      config_.nvme_paths = {options_.store};
      config_.nvme_rates.clear();
      config_.commit_every = 1;
      return;
    }
    config_.commit_every = 0;
    for (std::filesystem::path& path : config_.nvme_paths) path = stores_.emplace_back(path, "nvme_path").path();
  }

  void check_prompt() {
    const std::uint32_t most = trained_model(source_.config(), 1).longest_row();
    if (prompt_.empty()) refuse("--prompt", "has no token", "give some text");
    for (const std::uint32_t token : prompt_) {
      if (token < vocabulary_) continue;
      refuse("--prompt", fmt::format("has token {}, and the model's vocabulary has {}", token, vocabulary_),
             options_.ids ? "give tokens below that" : "take the model's own tokenizer");
    }
    if (prompt_.size() >= most) {
      refuse("--prompt", fmt::format("has {} tokens, and the model {} positions", prompt_.size(), most),
             fmt::format("shorten it to {} or less", most - 1));
    }
    // What comes last is not fed.
    const std::uint64_t wanted = prompt_.size() + std::uint64_t{options_.tokens} - 1;
    positions_ = static_cast<std::uint32_t>(std::min<std::uint64_t>(wanted, most));
    most_ = positions_ + 1 - static_cast<std::uint32_t>(prompt_.size());
  }

  void open_log() {
    if (options_.log.empty()) return;
    log_.open(options_.log, std::ios::app);
    if (log_) return;
    throw Error(Code::kIo, {.object = options_.log.string(),
                            .happened = "cannot be opened for the log",
                            .errno_value = errno,
                            .hint = "check --log"});
  }

  void open_weights() {
    terminal::ByteBar bar("reading the store");
    const auto progress = [&](std::uint64_t done, std::uint64_t all) {
      if (interrupt_.requested()) throw Stopped();
      bar.at(done, all);
    };
    source_.open(model_, config_.weights, place_, progress);
  }

  // Keys and values in the first tier with which all fits, unless one is asked for.
  void create_engine() {
    std::vector<Placement> tiers = {Placement::kHbm, Placement::kHost};
    if (config_.parameters == Placement::kNvme) tiers.push_back(Placement::kNvme);
    if (options_.cache) tiers = {*options_.cache};
    for (const Placement tier : tiers) {
      make_generator(tier);
      try {
        engine_ = Engine::create(config_, description_, {.on_existing = how_to_open(), .trace = options_.trace});
        break;
      } catch (const Error& error) {
        if (error.code() != Code::kDoesNotFit || tier == tiers.back()) throw;
      }
    }
    generator_->attach(*engine_);
  }

  void make_generator(Placement tier) {
    const EmbeddingRow row = [this](std::uint32_t token, std::span<float> values) {
      source_.weights()(kEmbeddingBlock, model_.token_weight, std::uint64_t{token} * model_.width, values);
    };
    generator_.emplace(model_,
                       GeneratorOptions{.device = resolve_device(config_),
                                        .type = config_.weights,
                                        .prompt = static_cast<std::uint32_t>(prompt_.size()),
                                        .positions = positions_,
                                        .slice = options_.slice,
                                        .threads = config_.threads,
                                        .cache = {.tier = tier, .directory = place_}},
                       row);
    description_ = generator_->description();
    if (!options_.store.empty()) description_.attachments.push_back({kMark, source_.mark()});
  }

  // A store that was cut short before it had its weights is begun again.
  OnExisting how_to_open() {
    std::error_code ignored;
    if (options_.store.empty() || !std::filesystem::exists(options_.store / "spillway.store", ignored))
      return OnExisting::kRefuse;
    const StoreInfo there = inspect_store({options_.store});
    const auto mark = std::ranges::find(there.model.attachments, kMark, &Attachment::name);
    if (mark == there.model.attachments.end())
      refuse(options_.store.string(), "holds another run's store", "name another directory", Code::kExists);
    if (mark->text != source_.mark()) {
      refuse(options_.store.string(), fmt::format("has the weights of another model than {}", options_.model.string()),
             "remove it, or name another directory", Code::kExists);
    }
    if (!there.step) return OnExisting::kReplace;
    kept_ = true;
    return OnExisting::kResume;
  }

  void import_weights() {
    if (kept_) return;
    std::uint64_t bytes = 0, done = 0;
    for (const Block& block : description_.blocks)
      for (const Parameter& parameter : block.parameters) bytes += elements(parameter) * sizeof(float);
    terminal::ByteBar bar(config_.nvme_paths.empty() ? "loading" : "writing the weights to NVMe");
    const WeightSource source = source_.weights();
    engine_->import_weights(
        [&](std::uint32_t block, std::uint32_t parameter, std::uint64_t first, std::span<float> out) {
          if (interrupt_.requested()) throw Stopped();
          source(block + generator_->first_block(), parameter, first, out);
          bar.at(done += out.size_bytes(), bytes);
        });
  }

  void print(const std::string& text) {
    if (text.empty()) return;
    const bool terminal = ::isatty(STDOUT_FILENO) != 0;
    terminal::write(stdout, terminal ? masked(text, LineEnds::kKeep) : text);
    std::fflush(stdout);
  }

  void write_log(const Choice& choice, double since) {
    if (!log_.is_open()) return;
    log_ << fmt::format("{{\"token\":{},\"log_probability\":{:.6f},\"seconds\":{:.6f}}}\n", choice.token,
                        choice.log_probability, now() - since)
         << std::flush;
  }

  // Since the last call. A step of the engine ends for it, which a kept store would note.
  StepReport traffic() { return options_.store.empty() ? engine_->step({}) : StepReport{}; }

  void report(double prompt_seconds, std::uint32_t made, double seconds, bool ended) {
    const StepReport read = traffic();
    const std::uint32_t passes = made > 0 ? made - 1 : 0;  // the first token is the prompt's
    const auto rate = [](double count, double in) { return in > 0 ? count / in : 0; };
    terminal::tell(stderr, "prompt: {} tokens in {:.2f} s; {} new{}", prompt_.size(), prompt_seconds, made,
                   ended ? ", to the end of the text" : "");
    if (passes > 0) terminal::tell(stderr, "; {:.2f} tokens/s", rate(passes, seconds));
    if (passes > 0 && read.nvme_read_bytes > 0) {
      terminal::tell(stderr, ", {} from NVMe for each", terminal::text_of_size(read.nvme_read_bytes / passes));
    }
    terminal::tell(stderr, "\n");
    if (!log_.is_open()) return;
    log_ << fmt::format(
                "{{\"prompt_tokens\":{},\"prompt_seconds\":{:.6f},\"new_tokens\":{},\"passes\":{},\"seconds\":{:.6f},"
                "\"nvme_read_bytes\":{},\"stall_seconds\":{:.6f}}}\n",
                prompt_.size(), prompt_seconds, made, passes, seconds, read.nvme_read_bytes, read.stall_seconds)
         << std::flush;
  }

  const GenerateOptions& options_;
  const terminal::Interrupt& interrupt_;
  ModelSource source_;
  std::uint32_t vocabulary_ = 0;
  std::unique_ptr<Text> text_;
  std::vector<std::uint32_t> ends_, prompt_;
  std::uint32_t positions_ = 0, most_ = 0;  // that are fed; new tokens
  Config config_;
  std::filesystem::path place_;             // of what is written for this run alone
  std::vector<TemporaryDirectory> stores_;  // outlive the engine
  TrainedModel model_;
  std::ofstream log_;
  ModelDescription description_;
  bool kept_ = false;  // the store has its weights from an earlier time
  std::optional<Generator> generator_;
  std::unique_ptr<Engine> engine_;
};

}  // namespace

int generate(const GenerateOptions& options) {
  terminal::Interrupt interrupt("ending after this token");  // before anything that starts threads
  try {
    return Run(options, interrupt).generate();
  } catch (const Stopped&) {
    return interrupt.exit_code();
  }
}

}  // namespace spillway::models::generate
