#include "tools/generate/text.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <system_error>

#include "spillway/error.h"
#include "spillway/masked.h"

namespace spillway::models::generate {
namespace {

class Numbers final : public Text {
 public:
  std::vector<std::uint32_t> tokens_of(std::string_view prompt) override {
    std::vector<std::uint32_t> tokens;
    constexpr std::string_view kBetween = " ,\t\r\n";
    while (!(prompt.remove_prefix(std::min(prompt.find_first_not_of(kBetween), prompt.size())), prompt.empty())) {
      const std::string_view word = prompt.substr(0, prompt.find_first_of(kBetween));
      const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), tokens.emplace_back());
      if (error != std::errc() || end != word.data() + word.size()) {
        throw Error(Code::kInvalidArgument, {.object = "--ids",
                                             .happened = fmt::format("\"{}\" is no number of a token", word),
                                             .errno_value = 0,
                                             .hint = "give whole numbers with spaces between them"});
      }
      prompt.remove_prefix(word.size());
    }
    return tokens;
  }
  std::string add(std::uint32_t token) override {
    return fmt::format("{}{}", std::exchange(begun_, true) ? " " : "", token);
  }
  std::string rest() override { return {}; }
  bool plain() const override { return true; }

 private:
  bool begun_ = false;
};

class Bytes final : public Text {
 public:
  std::vector<std::uint32_t> tokens_of(std::string_view prompt) override {
    std::vector<std::uint32_t> tokens;
    for (const char byte : prompt) tokens.push_back(static_cast<unsigned char>(byte));
    return tokens;
  }
  std::string add(std::uint32_t token) override {
    waiting_ += static_cast<char>(token);
    std::string shown;
    while (!waiting_.empty() && !may_grow()) {
      const std::size_t bytes = std::max<std::size_t>(1, character_bytes(waiting_));
      shown += waiting_.substr(0, bytes);
      waiting_.erase(0, bytes);
    }
    return shown;
  }
  std::string rest() override { return std::exchange(waiting_, {}); }

 private:
  // Whether what waits is the beginning of a character.
  bool may_grow() const {
    const auto first = static_cast<unsigned char>(waiting_[0]);
    const std::size_t whole = first >= 0xf0 ? 4 : first >= 0xe0 ? 3 : first >= 0xc2 ? 2 : 1;
    return first < 0xf5 && waiting_.size() < whole && std::ranges::all_of(waiting_.substr(1), [](char c) {
             return (static_cast<unsigned char>(c) & 0xc0) == 0x80;
           });
  }
  std::string waiting_;
};

}  // namespace

std::unique_ptr<Text> numbers() { return std::make_unique<Numbers>(); }
std::unique_ptr<Text> bytes() { return std::make_unique<Bytes>(); }

bool has_tokenizer(const std::filesystem::path& directory) {
  std::error_code ignored;
  if (std::filesystem::is_regular_file(directory, ignored)) return true;
  for (const auto& entry : std::filesystem::directory_iterator(directory, ignored)) {
    const std::string name = entry.path().filename().string();
    if (name == "tokenizer.json" || name.starts_with("vocab.") || name.ends_with(".model") ||
        name.ends_with(".tiktoken")) {
      return true;
    }
  }
  return false;
}

}  // namespace spillway::models::generate
