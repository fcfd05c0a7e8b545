// A tokenizer in a process of Python's. Requests and answers are lines of JSON, one of each at a time:
//
//   {"prompt": "…", "chat": false}   ►   {"tokens": [1, 2]}
//   {"token": 3}                     ►   {"text": "…"}
//   {"end": true}                    ►   {"text": "…"}
//
// An answer {"error": "…", "hint": "…"} is the last one.
#include <fcntl.h>
#include <fmt/format.h>
#include <rapidjson/document.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <utility>

#include "spillway/error.h"
#include "spillway/masked.h"
#include "tools/generate/text.h"
#include "tools/terminal/json.h"

extern char** environ;

namespace spillway::models::generate {
namespace {

constexpr const char* kPackages =
    "`pip install transformers jinja2` and Spillway's wheel for that Python, or give tokens with --ids";

// Both ends close by themselves, also in other processes.
struct Pipe {
  Pipe() {
    if (::pipe2(ends, O_CLOEXEC) != 0) throw std::system_error(errno, std::generic_category(), "pipe");
  }
  ~Pipe() {
    close_reading();
    close_writing();
  }
  Pipe(const Pipe&) = delete;
  Pipe& operator=(const Pipe&) = delete;
  void close_reading() { close(ends[0]); }
  void close_writing() { close(ends[1]); }
  int ends[2];

 private:
  static void close(int& end) {
    if (end >= 0) ::close(std::exchange(end, -1));
  }
};

class Tokenizer final : public Text {
 public:
  explicit Tokenizer(const TokenizerOptions& options) : options_(options) {
    const char* const named = std::getenv("SPILLWAY_PYTHON");
    python_ = named != nullptr && *named != '\0' ? named : "python3";
    said_ = ::memfd_create("spillway-tokenizer", MFD_CLOEXEC);
    start();
  }
  ~Tokenizer() override {
    to_.close_writing();  // which ends it
    from_.close_reading();
    if (process_ > 0) ::waitpid(process_, nullptr, 0);
    if (said_ >= 0) ::close(said_);
  }

  std::vector<std::uint32_t> tokens_of(std::string_view prompt) override {
    for (std::string_view left = prompt; !left.empty(); left.remove_prefix(character_bytes(left))) {
      if (character_bytes(left) > 0) continue;
      throw Error(Code::kInvalidArgument,
                  {.object = "the prompt",
                   .happened = fmt::format("is no UTF-8 at its byte {}", prompt.size() - left.size()),
                   .errno_value = 0,
                   .hint = "save it as UTF-8"});
    }
    terminal::Json request(0);
    request.put("prompt", prompt);
    request.put("chat", options_.chat);
    return numbers_of(ask(request), "tokens");
  }
  std::string add(std::uint32_t token) override {
    terminal::Json request(0);
    request.put("token", token);
    return text_of(request);
  }
  std::string rest() override {
    terminal::Json request(0);
    request.put("end", true);
    return text_of(request);
  }

 private:
  void start() {
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, to_.ends[0], STDIN_FILENO);
    posix_spawn_file_actions_adddup2(&actions, from_.ends[1], STDOUT_FILENO);
    if (said_ >= 0) posix_spawn_file_actions_adddup2(&actions, said_, STDERR_FILENO);
    std::string words[] = {python_, "-m", "spillway.prepare.tokens", options_.directory.string()};
    char* arguments[] = {words[0].data(), words[1].data(), words[2].data(), words[3].data(), nullptr};
    // Signals stay blocked in it as they are here: Ctrl-C is this program's, whose end ends it.
    const int failure = ::posix_spawnp(&process_, python_.c_str(), &actions, nullptr, arguments, environ);
    posix_spawn_file_actions_destroy(&actions);
    to_.close_reading();
    from_.close_writing();
    if (failure == 0) return;
    process_ = -1;
    throw Error(Code::kNotFound, {.object = python_,
                                  .happened = "cannot be started, and the tokenizer is Python's",
                                  .errno_value = failure,
                                  .hint = "install Python 3.10 or newer, name one in SPILLWAY_PYTHON, or give tokens "
                                          "with --ids"});
  }

  rapidjson::Document ask(terminal::Json& request) {
    std::string line;
    for (const char c : request.text()) line += c == '\n' ? ' ' : c;
    line += '\n';
    for (std::size_t at = 0; at < line.size();) {
      const ssize_t written = ::write(to_.ends[1], line.data() + at, line.size() - at);
      if (written < 0 && errno == EINTR) continue;
      if (written < 0) ended();
      at += static_cast<std::size_t>(written);
    }
    rapidjson::Document answer;
    const std::string text = read_line();
    answer.Parse(text.data(), text.size());
    if (!answer.IsObject()) ended();
    if (const rapidjson::Value* error = member(answer, "error")) refuse(*error);
    return answer;
  }

  std::string read_line() {
    for (std::size_t end; (end = read_.find('\n')) == std::string::npos;) {
      char some[4096];
      const ssize_t bytes = ::read(from_.ends[0], some, sizeof(some));
      if (bytes < 0 && errno == EINTR) continue;
      if (bytes <= 0) ended();
      read_.append(some, static_cast<std::size_t>(bytes));
    }
    const std::size_t end = read_.find('\n');
    std::string line = read_.substr(0, end);
    read_.erase(0, end + 1);
    return line;
  }

  // Null where there is none.
  static const rapidjson::Value* member(const rapidjson::Value& object, const char* key) {
    if (!object.IsObject()) return nullptr;
    const auto found = object.FindMember(key);
    return found == object.MemberEnd() ? nullptr : &found->value;
  }

  // As Python's part says it: what happened to what, and what to do.
  [[noreturn]] static void refuse(const rapidjson::Value& error) {
    const auto word = [&error](const char* key) {
      const rapidjson::Value* text = member(error, key);
      return text != nullptr && text->IsString() ? std::string(text->GetString(), text->GetStringLength())
                                                 : std::string();
    };
    throw Error(Code::kInvalidArgument,
                {.object = word("object"), .happened = word("happened"), .errno_value = 0, .hint = word("hint")});
  }

  // What it said last, of an exception or of a module that is not there.
  [[noreturn]] void ended() {
    std::string said(4096, '\0');
    const off_t bytes = said_ < 0 ? 0 : ::lseek(said_, 0, SEEK_END);
    const off_t from = bytes > static_cast<off_t>(said.size()) ? bytes - static_cast<off_t>(said.size()) : 0;
    const ssize_t read = said_ < 0 ? 0 : ::pread(said_, said.data(), said.size(), from);
    said.resize(read < 0 ? 0 : static_cast<std::size_t>(read));
    while (!said.empty() && said.back() == '\n') said.pop_back();
    const std::size_t line = said.rfind('\n');
    if (line != std::string::npos) said.erase(0, line + 1);
    throw Error(Code::kNotFound, {.object = python_,
                                  .happened = fmt::format("the tokenizer's process ended{}",
                                                          said.empty() ? "" : fmt::format(" ({})", said)),
                                  .errno_value = 0,
                                  .hint = kPackages});
  }

  std::string text_of(terminal::Json& request) {
    const rapidjson::Document answer = ask(request);
    const rapidjson::Value* text = member(answer, "text");
    if (text == nullptr || !text->IsString()) ended();
    return {text->GetString(), text->GetStringLength()};
  }
  std::vector<std::uint32_t> numbers_of(const rapidjson::Document& answer, const char* key) {
    const rapidjson::Value* list = member(answer, key);
    if (list == nullptr || !list->IsArray()) ended();
    std::vector<std::uint32_t> numbers;
    for (const rapidjson::Value& value : list->GetArray()) {
      if (!value.IsUint()) ended();
      numbers.push_back(value.GetUint());
    }
    return numbers;
  }

  const TokenizerOptions options_;
  std::string python_;
  Pipe to_, from_;
  int said_ = -1;  // its standard error
  pid_t process_ = -1;
  std::string read_;
};

}  // namespace

std::unique_ptr<Text> tokenizer(const TokenizerOptions& options) { return std::make_unique<Tokenizer>(options); }

}  // namespace spillway::models::generate
