// data.pkl of a PyTorch file. What is accepted is walked as deep as a reader of checkpoints goes: values may contain
// themselves.
#include "src/formats/pickle_reader.h"

#include "tests/fuzz/targets.h"

namespace spillway::fuzz {
namespace {

constexpr PickleLimits kLimits{.opcodes = 1 << 16, .values = 1 << 14};

std::size_t walk(const PickleValue& value, unsigned depth, std::size_t left) {
  if (depth == 0 || left == 0) return left;
  SPILLWAY_CHECK(!value.is(PickleValue::Kind::kDict) || value.items.size() % 2 == 0, "a dict has a value for each key");
  SPILLWAY_CHECK(!value.is(PickleValue::Kind::kGlobal) || value.items.size() == 2, "a global is two names");
  SPILLWAY_CHECK(!value.is(PickleValue::Kind::kObject) || value.items.size() >= 3, "an object says what was called");
  --left;
  for (const PickleValue* item : value.items) {
    SPILLWAY_CHECK(item != nullptr, "every value is one");
    left = walk(*item, depth - 1, left);
  }
  return left;
}

}  // namespace

void pickle(Bytes input) {
  const auto read =
      accepted([&] { return Pickle::parse(std::vector<std::byte>(input.begin(), input.end()), "data.pkl", kLimits); });
  if (!read) return;
  walk(read->root(), 12, 1 << 14);
  (void)read->root().find("optimizer_state_dict");
}

}  // namespace spillway::fuzz
