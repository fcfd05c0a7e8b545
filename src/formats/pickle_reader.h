// A pickle as a tree of values, read by a stack machine that executes nothing: what a pickle asks to be called is kept
// as a value that says so, and nobody calls it. A global is two names.
//
// Taken are the opcodes that Python writes in protocols 2 to 5 for what torch.save() writes. Memory is bounded by
// PickleLimits whatever the bytes say, nothing recurses (values may even contain themselves), and every malformed input
// is an error: the function is fit for fuzzing.
// Format: https://github.com/python/cpython/blob/3.11/Lib/pickletools.py. Thread: any.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace spillway {

struct PickleValue {
  enum class Kind : std::uint8_t {
    kNone,
    kBool,        // integer
    kInteger,     // integer
    kBigInteger,  // beyond 64 bits; text has its bytes
    kFloat,       // number
    kText,        // text, UTF-8 as a rule
    kBytes,       // text
    kTuple,       // items, as in kList and kSet
    kList,
    kSet,
    kDict,        // items: key, value, key, value, …; an OrderedDict, too
    kGlobal,      // items: module, name
    kPersistent,  // items: the id
    kObject,      // items: what was to be called, its arguments, its state (kNone: none), and what was put into it
  };

  Kind kind = Kind::kNone;
  std::int64_t integer = 0;
  double number = 0;
  std::string_view text = {};
  std::vector<const PickleValue*> items = {};

  bool is(Kind wanted) const { return kind == wanted; }
  // The value of a text key in a dict, the last one if there are several; null: none, or no dict.
  const PickleValue* find(std::string_view key) const;
  bool is_global(std::string_view module, std::string_view name) const;
  // The arguments (a tuple) of an object made by calling that global; null: it is something else.
  const PickleValue* arguments_of(std::string_view module, std::string_view name) const;
  std::optional<std::uint64_t> unsigned_integer() const;
};

struct PickleLimits {
  std::size_t opcodes = 16 << 20;
  std::size_t values = 4 << 20;
};

// Owns the bytes and the values in them.
class Pickle {
 public:
  // Throws kInvalidArgument; `object` stands in the message.
  static Pickle parse(std::vector<std::byte> bytes, const std::string& object, PickleLimits limits = {});
  Pickle(Pickle&&) noexcept = default;
  Pickle& operator=(Pickle&&) noexcept = default;

  const PickleValue& root() const { return *root_; }

 private:
  friend class PickleMachine;
  Pickle() = default;
  std::vector<std::byte> bytes_;
  std::deque<PickleValue> values_;  // their addresses stay
  const PickleValue* root_ = nullptr;
};

}  // namespace spillway
