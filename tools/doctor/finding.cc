#include "tools/doctor/finding.h"

#include <fmt/format.h>
#include <rapidjson/prettywriter.h>
#include <rapidjson/stringbuffer.h>

#include <algorithm>
#include <cctype>
#include <cstddef>
#include <string_view>

namespace spillway::doctor {
namespace {

constexpr std::size_t kStatusWidth = 9, kCheckWidth = 17;

const char* colour_of(Status status) {
  switch (status) {
    case Status::kOk: return "\x1b[32m";
    case Status::kSkipped: return "\x1b[2m";
    case Status::kSlower: return "\x1b[33m";
    case Status::kBroken: break;
  }
  return "\x1b[1;31m";
}

std::string line_of(const Finding& finding, bool colours) {
  std::string status = fmt::format("{:<{}}", name_of(finding.status), kStatusWidth);
  if (colours) status = colour_of(finding.status) + status + "\x1b[0m";
  std::string line = fmt::format("{}{:<{}}{}", status, finding.check, kCheckWidth, finding.seen);
  if (!finding.slower_by.empty()) line += fmt::format(": {}", finding.slower_by);
  line += '\n';
  if (!finding.repair.empty()) line += fmt::format("{:{}}repair: {}\n", "", kStatusWidth + kCheckWidth, finding.repair);
  return line;
}

using Json = rapidjson::PrettyWriter<rapidjson::StringBuffer>;

void string(Json& json, const char* key, std::string_view text) {
  json.Key(key);
  json.String(text.data(), static_cast<rapidjson::SizeType>(text.size()));
}

void some_string(Json& json, const char* key, std::string_view text) {
  if (!text.empty()) string(json, key, text);
}

}  // namespace

Status worst_of(std::span<const Finding> findings) {
  Status worst = Status::kOk;
  for (const Finding& finding : findings) {
    if (finding.status != Status::kSkipped) worst = std::max(worst, finding.status);
  }
  return worst;
}

int exit_code_of(Status worst) { return worst == Status::kBroken ? 4 : worst == Status::kSlower ? 3 : 0; }

std::string findings_text(std::span<const Finding> findings, bool colours) {
  std::string text, where;
  for (const Finding& finding : findings) {
    if (finding.where != where) text += fmt::format("\n{}\n", finding.where);
    where = finding.where;
    text += line_of(finding, colours);
  }
  const auto count = [&](Status status) { return std::ranges::count(findings, status, &Finding::status); };
  text += fmt::format("\n{} ok, {} slower, {} broken, {} skipped\n", count(Status::kOk), count(Status::kSlower),
                      count(Status::kBroken), count(Status::kSkipped));
  return text;
}

std::string findings_json(std::span<const Finding> findings) {
  rapidjson::StringBuffer buffer;
  Json json(buffer);
  json.SetIndent(' ', 2);
  const Status worst = worst_of(findings);
  json.StartObject();
  string(json, "status", name_of(worst));
  json.Key("exit_code");
  json.Int(exit_code_of(worst));
  json.Key("findings");
  json.StartArray();
  for (const Finding& finding : findings) {
    json.StartObject();
    some_string(json, "path", finding.where);
    string(json, "check", finding.check);
    string(json, "status", name_of(finding.status));
    string(json, "seen", finding.seen);
    some_string(json, "slower_by", finding.slower_by);
    some_string(json, "repair", finding.repair);
    json.EndObject();
  }
  json.EndArray();
  json.EndObject();
  return buffer.GetString();
}

std::string shell_word(const std::string& text) {
  const auto plain = [](unsigned char c) {
    return std::isalnum(c) != 0 || std::string_view("/._-+:@,=").find(c) != std::string_view::npos;
  };
  if (!text.empty() && std::ranges::all_of(text, plain)) return text;
  std::string quoted = "'";
  for (const char c : text) quoted += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return quoted + "'";
}

}  // namespace spillway::doctor
