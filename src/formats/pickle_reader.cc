#include "src/formats/pickle_reader.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <span>
#include <utility>

#include "spillway/error.h"

namespace spillway {
namespace {

using Kind = PickleValue::Kind;

const PickleValue kNoState;

bool is_text(const PickleValue& value, std::string_view text) { return value.is(Kind::kText) && value.text == text; }

// Classes whose objects are dicts that are filled after the call that makes them.
bool makes_dict(const PickleValue& called, const PickleValue& arguments) {
  if (called.is_global("collections", "OrderedDict") || called.is_global("builtins", "dict") ||
      called.is_global("__builtin__", "dict"))
    return arguments.items.empty();
  return called.is_global("collections", "defaultdict") && arguments.items.size() <= 1;
}

}  // namespace

const PickleValue* PickleValue::find(std::string_view key) const {
  if (kind != Kind::kDict) return nullptr;
  for (std::size_t i = items.size(); i >= 2; i -= 2) {
    if (is_text(*items[i - 2], key)) return items[i - 1];
  }
  return nullptr;
}

bool PickleValue::is_global(std::string_view module, std::string_view name) const {
  return kind == Kind::kGlobal && is_text(*items[0], module) && is_text(*items[1], name);
}

const PickleValue* PickleValue::arguments_of(std::string_view module, std::string_view name) const {
  return kind == Kind::kObject && items[0]->is_global(module, name) ? items[1] : nullptr;
}

std::optional<std::uint64_t> PickleValue::unsigned_integer() const {
  if (kind != Kind::kInteger || integer < 0) return std::nullopt;
  return static_cast<std::uint64_t>(integer);
}

class PickleMachine {
 public:
  PickleMachine(Pickle& pickle, const std::string& object, PickleLimits limits)
      : pickle_(pickle), object_(object), limits_(limits), bytes_(pickle.bytes_) {}

  void run() {
    for (std::size_t done = 0; !pickle_.root_; ++done) {
      if (done == limits_.opcodes) fail(fmt::format("has more than {} opcodes", limits_.opcodes));
      opcode_at_ = at_;
      step(integer<std::uint8_t>());
    }
  }

 private:
  [[noreturn]] void fail(const std::string& happened) const {
    throw Error(Code::kInvalidArgument, {object_, fmt::format("its pickle {} (byte {})", happened, opcode_at_), 0,
                                         "only what torch.save() writes is read; copy it again if it is cut short"});
  }

  // Bytes.
  std::string_view take(std::uint64_t count) {
    if (count > bytes_.size() - at_) fail("ends early");
    const std::string_view taken(reinterpret_cast<const char*>(bytes_.data()) + at_, count);
    at_ += count;
    return taken;
  }
  template <typename T>
  T integer() {
    T value;
    std::memcpy(&value, take(sizeof(T)).data(), sizeof(T));
    return value;
  }
  std::string_view line() {
    const std::string_view rest(reinterpret_cast<const char*>(bytes_.data()) + at_, bytes_.size() - at_);
    const std::string_view taken = take(std::min(rest.find('\n'), rest.size()));
    take(1);
    return taken;
  }

  // Values and the stack.
  PickleValue* make(PickleValue value) {
    if (pickle_.values_.size() == limits_.values) fail(fmt::format("has more than {} values", limits_.values));
    return &pickle_.values_.emplace_back(std::move(value));
  }
  void push(PickleValue value) { stack_.push_back(make(std::move(value))); }
  void push_text(std::string_view text, Kind kind = Kind::kText) { push({.kind = kind, .text = text}); }
  void push_integer(std::int64_t value) { push({.kind = Kind::kInteger, .integer = value}); }
  std::size_t floor() const { return marks_.empty() ? 0 : marks_.back(); }  // nothing below it is popped
  PickleValue* pop() {
    if (stack_.size() <= floor()) fail("takes from an empty stack");
    PickleValue* top = stack_.back();
    stack_.pop_back();
    return top;
  }
  PickleValue& top() {
    if (stack_.size() <= floor()) fail("takes from an empty stack");
    return *stack_.back();
  }
  // What lies above the last mark, which goes.
  std::vector<const PickleValue*> pop_to_mark() {
    if (marks_.empty()) fail("has no mark to go back to");
    const auto first = stack_.begin() + static_cast<std::ptrdiff_t>(marks_.back());
    std::vector<const PickleValue*> items(first, stack_.end());
    stack_.erase(first, stack_.end());
    marks_.pop_back();
    return items;
  }
  void push_tuple(std::size_t count) {
    PickleValue tuple{.kind = Kind::kTuple};
    tuple.items.resize(count);
    for (std::size_t i = count; i-- > 0;) tuple.items[i] = pop();
    push(std::move(tuple));
  }
  void push_dict(std::vector<const PickleValue*> items) {
    if (items.size() % 2 != 0) fail("has a key without a value");
    push({.kind = Kind::kDict, .items = std::move(items)});
  }

  // Objects.
  void push_global(std::string_view module, std::string_view name) {
    const PickleValue* m = make({.kind = Kind::kText, .text = module});
    const PickleValue* n = make({.kind = Kind::kText, .text = name});
    push({.kind = Kind::kGlobal, .items = {m, n}});
  }
  void call(const PickleValue* called, const PickleValue* arguments) {
    if (!arguments->is(Kind::kTuple)) fail("calls something without a tuple of arguments");
    if (makes_dict(*called, *arguments)) return push({.kind = Kind::kDict});
    push({.kind = Kind::kObject, .items = {called, arguments, &kNoState}});
  }
  void build() {
    const PickleValue* state = pop();
    if (top().is(Kind::kObject)) top().items[2] = state;  // a dict's own attributes are of no use here
  }
  void put_into(PickleValue& container, std::span<const PickleValue* const> items, bool pairs) {
    const bool takes = container.is(Kind::kObject) ||
                       (pairs ? container.is(Kind::kDict) : container.is(Kind::kList) || container.is(Kind::kSet));
    if (!takes || (pairs && items.size() % 2 != 0)) fail("puts items into what holds none");
    container.items.insert(container.items.end(), items.begin(), items.end());
  }
  void put_marked(bool pairs) {
    const auto items = pop_to_mark();
    put_into(top(), items, pairs);
  }
  void put_one(bool pair) {
    const PickleValue* last = pop();
    if (!pair) return put_into(top(), std::span(&last, 1), false);
    const PickleValue* both[] = {pop(), last};
    put_into(top(), both, true);
  }

  // The memo. Every pickler numbers in order.
  void put(std::uint64_t index) {
    if (index < memo_.size()) {
      memo_[index] = &top();
    } else if (index == memo_.size()) {
      memo_.push_back(&top());
    } else {
      fail(fmt::format("remembers a value as number {}, after {} of them", index, memo_.size()));
    }
  }
  void get(std::uint64_t index) {
    if (index >= memo_.size()) fail(fmt::format("asks for value {} of {}", index, memo_.size()));
    stack_.push_back(memo_[index]);
  }

  // Little-endian two's complement.
  void push_long(std::string_view digits) {
    if (digits.size() > 8) return push_text(digits, Kind::kBigInteger);
    std::uint64_t value = !digits.empty() && (digits.back() & 0x80) ? ~std::uint64_t{0} : 0;
    std::memcpy(&value, digits.data(), digits.size());
    push_integer(std::bit_cast<std::int64_t>(value));
  }
  void push_double() {
    std::uint64_t bits = 0;
    for (const char byte : take(8)) bits = bits << 8 | static_cast<unsigned char>(byte);
    push({.kind = Kind::kFloat, .number = std::bit_cast<double>(bits)});
  }

  void step(std::uint8_t opcode) {
    if (push_scalar(opcode) || push_container(opcode) || change(opcode)) return;
    switch (opcode) {
      case 0x80:  // PROTO
        if (const auto protocol = integer<std::uint8_t>(); protocol < 2 || protocol > 5)
          fail(fmt::format("is of protocol {}, not 2 to 5", protocol));
        return;
      case 0x95: integer<std::uint64_t>(); return;  // FRAME: how the bytes were cut, of no meaning here
      case '.': pickle_.root_ = pop(); return;
      default: fail(fmt::format("has opcode 0x{:02x}, which torch.save() does not write", opcode));
    }
  }

  bool push_scalar(std::uint8_t opcode) {
    switch (opcode) {
      case 'N': push({}); return true;
      case 0x88: push({.kind = Kind::kBool, .integer = 1}); return true;
      case 0x89: push({.kind = Kind::kBool, .integer = 0}); return true;
      case 'J': push_integer(integer<std::int32_t>()); return true;
      case 'K': push_integer(integer<std::uint8_t>()); return true;
      case 'M': push_integer(integer<std::uint16_t>()); return true;
      case 0x8a: push_long(take(integer<std::uint8_t>())); return true;
      case 0x8b: push_long(take(integer<std::uint32_t>())); return true;
      case 'G': push_double(); return true;
      case 'X': push_text(take(integer<std::uint32_t>())); return true;
      case 0x8c: push_text(take(integer<std::uint8_t>())); return true;
      case 0x8d: push_text(take(integer<std::uint64_t>())); return true;
      case 'T': push_text(take(integer<std::uint32_t>())); return true;  // str of Python 2
      case 'U': push_text(take(integer<std::uint8_t>())); return true;
      case 'B': push_text(take(integer<std::uint32_t>()), Kind::kBytes); return true;
      case 'C': push_text(take(integer<std::uint8_t>()), Kind::kBytes); return true;
      case 0x8e:
      case 0x96: push_text(take(integer<std::uint64_t>()), Kind::kBytes); return true;
      default: return false;
    }
  }

  bool push_container(std::uint8_t opcode) {
    switch (opcode) {
      case ')': push_tuple(0); return true;
      case 0x85: push_tuple(1); return true;
      case 0x86: push_tuple(2); return true;
      case 0x87: push_tuple(3); return true;
      case 't': push({.kind = Kind::kTuple, .items = pop_to_mark()}); return true;
      case ']': push({.kind = Kind::kList}); return true;
      case 'l': push({.kind = Kind::kList, .items = pop_to_mark()}); return true;
      case '}': push({.kind = Kind::kDict}); return true;
      case 'd': push_dict(pop_to_mark()); return true;
      case 0x8f: push({.kind = Kind::kSet}); return true;
      case 0x91: push({.kind = Kind::kSet, .items = pop_to_mark()}); return true;  // FROZENSET
      default: return false;
    }
  }

  bool change(std::uint8_t opcode) {
    switch (opcode) {
      case '(': marks_.push_back(stack_.size()); return true;
      case '0': pop(); return true;
      case '1': pop_to_mark(); return true;
      case 'a': put_one(false); return true;
      case 's': put_one(true); return true;
      case 'e':
      case 0x90: put_marked(false); return true;
      case 'u': put_marked(true); return true;
      case 'q': put(integer<std::uint8_t>()); return true;
      case 'r': put(integer<std::uint32_t>()); return true;
      case 0x94: put(memo_.size()); return true;
      case 'h': get(integer<std::uint8_t>()); return true;
      case 'j': get(integer<std::uint32_t>()); return true;
      case 'c': {
        const std::string_view module = line();
        push_global(module, line());
        return true;
      }
      case 0x93: {  // STACK_GLOBAL
        const PickleValue *name = pop(), *module = pop();
        if (!name->is(Kind::kText) || !module->is(Kind::kText)) fail("names a global by something else than text");
        push({.kind = Kind::kGlobal, .items = {module, name}});
        return true;
      }
      case 0x92:  // NEWOBJ_EX: the keywords are dropped
        pop();
        [[fallthrough]];
      case 'R':
      case 0x81: {  // NEWOBJ
        const PickleValue *arguments = pop(), *called = pop();
        call(called, arguments);
        return true;
      }
      case 'b': build(); return true;
      case 'Q': push({.kind = Kind::kPersistent, .items = {pop()}}); return true;
      default: return false;
    }
  }

  Pickle& pickle_;
  const std::string& object_;
  const PickleLimits limits_;
  const std::vector<std::byte>& bytes_;
  std::size_t at_ = 0, opcode_at_ = 0;
  std::vector<PickleValue*> stack_;
  std::vector<std::size_t> marks_;  // heights of the stack
  std::vector<PickleValue*> memo_;
};

Pickle Pickle::parse(std::vector<std::byte> bytes, const std::string& object, PickleLimits limits) {
  Pickle pickle;
  pickle.bytes_ = std::move(bytes);
  PickleMachine(pickle, object, limits).run();
  return pickle;
}

}  // namespace spillway
