#include "tools/report/steps.h"

#include <fmt/format.h>
#include <rapidjson/document.h>
#include <rapidjson/error/en.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <fstream>
#include <map>
#include <string_view>
#include <utility>

#include "spillway/error.h"

namespace spillway::reporting {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t kLongestLine = 64 << 10;  // a step takes some 700 bytes
constexpr double kMost = 1e15;                  // of seconds and percents, so that sums of them stay finite
constexpr const char* kWhatIsTaken = "name what `spillway finetune --log` wrote";

// The key that a line of an evaluation has, and none of a step.
constexpr const char* kEvaluation = "eval_loss";

// A line of a log, and what is wrong with it in terms of where it stands.
class Line {
 public:
  Line(const fs::path& file, std::uint64_t number, std::string_view text) : file_(file), number_(number) {
    constexpr unsigned kFlags = rapidjson::kParseIterativeFlag | rapidjson::kParseValidateEncodingFlag;
    document_.Parse<kFlags>(text.data(), text.size());
    if (document_.HasParseError()) {
      std::string what = rapidjson::GetParseError_En(document_.GetParseError());
      while (what.ends_with('.')) what.pop_back();  // it goes into a sentence of ours
      refuse(fmt::format("not valid JSON at byte {}: {}", document_.GetErrorOffset(), what));
    }
    if (!document_.IsObject()) refuse("is no JSON object");
  }

  // Of the first of these keys that is there: Python's StepReport has names of its own. Null stands for what is not
  // finite.
  std::optional<double> number(std::initializer_list<const char*> keys) const {
    const char* key = nullptr;
    const rapidjson::Value* value = find(keys, key);
    if (value == nullptr || value->IsNull()) return std::nullopt;
    if (!value->IsNumber() || !std::isfinite(value->GetDouble())) refuse(fmt::format("\"{}\" is no number", key));
    return value->GetDouble();
  }
  double amount(std::initializer_list<const char*> keys) const {
    const double value = number(keys).value_or(0);
    if (value < 0) refuse(fmt::format("\"{}\" is negative", *keys.begin()));
    if (value > kMost) refuse(fmt::format("\"{}\" is too large", *keys.begin()));
    return value;
  }
  std::uint64_t count(const char* key) const {
    const rapidjson::Value* value = find({key}, key);
    if (value == nullptr) return 0;
    if (!value->IsUint64()) refuse(fmt::format("\"{}\" is no whole number", key));
    return value->GetUint64();
  }
  std::string text(const char* key) const {
    const rapidjson::Value* value = find({key}, key);
    if (value == nullptr) return "";
    if (!value->IsString()) refuse(fmt::format("\"{}\" is no text", key));
    return {value->GetString(), value->GetStringLength()};
  }
  bool flag(const char* key) const {
    const rapidjson::Value* value = find({key}, key);
    if (value != nullptr && !value->IsBool()) refuse(fmt::format("\"{}\" is neither true nor false", key));
    return value != nullptr && value->GetBool();
  }
  bool has(const char* key) const { return find({key}, key) != nullptr; }
  void stalls(std::array<double, kStallNames.size()>& of) const {
    const char* key = "stalls";
    const rapidjson::Value* value = find({key}, key);
    if (value == nullptr) return;
    if (!value->IsObject()) refuse("\"stalls\" is no object");
    for (std::size_t cause = 0; cause < of.size(); ++cause) {
      const auto found = value->FindMember(kStallNames[cause]);
      if (found == value->MemberEnd()) continue;
      const bool fine = found->value.IsNumber() && found->value.GetDouble() >= 0 && found->value.GetDouble() <= kMost;
      if (!fine) refuse(fmt::format("\"stalls\": \"{}\" is no number of seconds", kStallNames[cause]));
      of[cause] = found->value.GetDouble();
    }
  }

  [[noreturn]] void refuse(std::string what) const {
    throw Error(Code::kInvalidArgument, {.object = fmt::format("{}:{}", file_.string(), number_),
                                         .happened = std::move(what),
                                         .errno_value = 0,
                                         .hint = kWhatIsTaken});
  }

 private:
  const rapidjson::Value* find(std::initializer_list<const char*> keys, const char*& found) const {
    for (const char* key : keys) {
      const auto member = document_.FindMember(key);
      if (member == document_.MemberEnd()) continue;
      found = key;
      return &member->value;
    }
    return nullptr;
  }

  const fs::path& file_;
  std::uint64_t number_;
  rapidjson::Document document_;
};

Step step_of(const Line& line) {
  for (const char* key : {"step", "seconds"}) {
    if (!line.has(key)) line.refuse(fmt::format("has no \"{}\"", key));
  }
  Step step{.step = line.count("step"), .seconds = line.amount({"seconds"})};
  step.loss = line.number({"loss"});
  step.norm = line.number({"grad_norm", "gradient_norm"});
  step.learning_rate = line.number({"lr", "learning_rate"});
  step.tokens = line.count("tokens");
  step.read_bytes = line.count("nvme_read_bytes");
  step.written_bytes = line.count("nvme_write_bytes");
  step.up_bytes = line.count("h2d_bytes");
  step.down_bytes = line.count("d2h_bytes");
  step.stall_seconds = line.amount({"stall_seconds"});
  line.stalls(step.stalls);
  step.link = line.text("link");
  step.link_percent = line.amount({"link_percent"});
  step.skipped = line.flag("skipped");
  return step;
}

[[noreturn]] void refuse_file(const fs::path& file, const char* what, int error, Code code = Code::kIo) {
  throw Error(code, {.object = file.string(), .happened = what, .errno_value = error, .hint = kWhatIsTaken});
}

void add(Run& run, std::map<std::uint64_t, Step>& by_number, Step step) {
  run.seconds += step.seconds;
  run.written_bytes += static_cast<double>(step.written_bytes);
  const auto [place, is_new] = by_number.insert_or_assign(step.step, std::move(step));
  if (!is_new) ++run.made_again;
}

}  // namespace

Run read_run(const fs::path& file) {
  std::error_code ignored;
  if (fs::is_directory(file, ignored)) refuse_file(file, "cannot be read", EISDIR);
  errno = 0;
  std::ifstream in(file, std::ios::binary);
  if (!in) refuse_file(file, "cannot be read", errno, errno == ENOENT ? Code::kNotFound : Code::kIo);
  Run run;
  run.name = file.string();
  std::map<std::uint64_t, Step> by_number;
  std::vector<char> buffer(kLongestLine);
  for (std::uint64_t number = 1; in.getline(buffer.data(), static_cast<std::streamsize>(buffer.size())); ++number) {
    const bool whole = !in.eof();  // with its end
    const std::string_view text(buffer.data(), static_cast<std::size_t>(in.gcount()) - (whole ? 1 : 0));
    if (text.find_first_not_of(" \t\r") == text.npos) continue;
    try {
      const Line line(file, number, text);
      if (line.has(kEvaluation)) {
        // That of step 0 belongs to no step.
        if (const auto step = by_number.find(line.count("step")); step != by_number.end()) {
          step->second.held_out_loss = line.number({kEvaluation});
        }
      } else {
        add(run, by_number, step_of(line));
      }
    } catch (const Error&) {
      if (whole || by_number.empty()) throw;
      run.cut = true;  // what a run was writing when it was killed
    }
  }
  if (in.bad()) refuse_file(file, "cannot be read", errno);
  if (!in.eof()) refuse_file(file, "has a line of more than 64 KiB", 0, Code::kInvalidArgument);
  if (by_number.empty()) refuse_file(file, "has no step in it", 0, Code::kInvalidArgument);
  for (auto& [number, step] : by_number) run.steps.push_back(std::move(step));
  return run;
}

}  // namespace spillway::reporting
