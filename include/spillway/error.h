// The one exception type of the public API, and the check for programmer errors.
//
// An Error is thrown in the thread that called Spillway; inside queues and on Spillway's own threads failures travel as
// values. what() reads `<object>: <what happened> (<errno text>); <what to do>`; the parts in brackets and after the
// semicolon appear when there is something to say. What to do is said in the library's words; a client with words of
// its own (a command line, Python) finds them by the Remedy.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "spillway/remedy.h"

namespace spillway {

enum class Code {
  kInvalidArgument,  // the caller's input is wrong: configuration, model description, file contents
  kNotFound,         // a file, tensor or store that should be there is not
  kExists,           // something is there that must not be overwritten
  kDoesNotFit,       // a budget is too small for the plan
  kBusy,             // another engine or process holds the store
  kIo,               // the operating system refused or failed a transfer
  kCorrupt,          // bytes on disk are not the bytes that were written
  kNonFinite,        // NaN or Inf in a gradient
  kUnsupported,      // this machine, kernel or build cannot do it
  kDevice,           // the GPU or its driver failed
};

struct ErrorParts {
  std::string object;    // what it happened to: a path, a tensor, a configuration key
  std::string happened;  // what happened
  int errno_value = 0;   // 0: no system call was involved
  std::string hint;      // what to do about it; may be empty
  // Set where every client has its own words for the hint; `hint` has the library's.
  Remedy remedy = Remedy::kNone;
  std::vector<std::string> values = {};
  std::string more = {};  // lines that follow the hint
};

class Error : public std::runtime_error {
 public:
  Error(Code code, ErrorParts parts) : std::runtime_error(message(parts)), code_(code), parts_(std::move(parts)) {}

  // With a hint that may have a remedy.
  Error(Code code, std::string object, std::string happened, int errno_value, Hint hint)
      : Error(code, ErrorParts{.object = std::move(object),
                               .happened = std::move(happened),
                               .errno_value = errno_value,
                               .hint = std::move(hint.text),
                               .remedy = hint.remedy,
                               .values = std::move(hint.values)}) {}

  Code code() const noexcept { return code_; }
  const ErrorParts& parts() const noexcept { return parts_; }

  // what() with these words in place of its remedy's; without any where they are empty. Unchanged where there is no
  // remedy.
  std::string message_in(std::string_view words) const {
    if (parts_.remedy == Remedy::kNone) return what();
    return message(parts_, with_values(words, parts_.values));
  }

 private:
  static std::string message(const ErrorParts& parts, std::string_view hint) {
    std::string text = masked(parts.object, LineEnds::kMask) + ": " + parts.happened;
    if (parts.errno_value != 0) text += " (" + std::generic_category().message(parts.errno_value) + ")";
    if (!hint.empty()) text += "; ";
    text += hint;
    return masked(text + parts.more, LineEnds::kKeep);
  }
  static std::string message(const ErrorParts& parts) { return message(parts, parts.hint); }

  Code code_;
  ErrorParts parts_;
};

// Prints the failed expression and aborts; stays on in release builds.
[[noreturn]] inline void check_failed(const char* file, int line, const char* expression, const char* why) {
  std::fprintf(stderr, "spillway: %s:%d: check failed: %s: %s\n", file, line, expression, why);
  std::abort();
}

}  // namespace spillway

// The file is asked for after preprocessing, whose output so does not depend on where the source lies.
#define SPILLWAY_CHECK(expression, why)                 \
  (static_cast<bool>(expression) ? static_cast<void>(0) \
                                 : ::spillway::check_failed(__builtin_FILE(), __LINE__, #expression, why))
