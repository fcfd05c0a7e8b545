// What a prompt is in tokens, and tokens in text: by the model's tokenizer, which is a library of Python's, or as
// bytes, or as the numbers that tokens have.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace spillway::models::generate {

class Text {
 public:
  virtual ~Text() = default;
  // Once. Errors: kInvalidArgument for a prompt that is none.
  virtual std::vector<std::uint32_t> tokens_of(std::string_view prompt) = 0;
  // What is to be shown once `token` follows: whole characters, and nothing while one is not complete.
  virtual std::string add(std::uint32_t token) = 0;
  // What is left of it at the end.
  virtual std::string rest() = 0;
  // Whether it may go to a terminal as it is.
  virtual bool plain() const { return false; }
};

// Numbers with spaces or commas between them.
std::unique_ptr<Text> numbers();
// A token is a byte.
std::unique_ptr<Text> bytes();

struct TokenizerOptions {
  std::filesystem::path directory;  // of a tokenizer, or a tokenizer.json
  bool chat = false;                // the prompt is what a user says, in the tokenizer's chat template
};
// Starts a process of Python's (spillway.prepare.tokens), which works from then on; tokens_of() waits for it. The
// Python is the one that SPILLWAY_PYTHON names, else python3.
std::unique_ptr<Text> tokenizer(const TokenizerOptions& options);
// Whether a directory has files of a tokenizer.
bool has_tokenizer(const std::filesystem::path& directory);

}  // namespace spillway::models::generate
