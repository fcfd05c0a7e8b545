#include "src/formats/pickle_reader.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "spillway/error.h"
#include "tests/kernels/random.h"

namespace spillway {
namespace {

using namespace std::string_literals;
using Kind = PickleValue::Kind;

Pickle parse(std::string_view text, PickleLimits limits = {}) {
  std::vector<std::byte> bytes(text.size());
  if (!text.empty()) std::memcpy(bytes.data(), text.data(), text.size());
  return Pickle::parse(std::move(bytes), "file.pt", limits);
}

std::string refusal(std::string_view text, PickleLimits limits = {}) {
  try {
    parse(text, limits);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Code::kInvalidArgument);
    return error.what();
  }
  return "read";
}

TEST(Pickle, ScalarsHaveTheirValues) {
  EXPECT_EQ(parse("\x80\x02N."s).root().kind, Kind::kNone);
  EXPECT_EQ(parse("\x80\x02\x88."s).root().integer, 1);
  EXPECT_EQ(parse("\x80\x02J\xff\xff\xff\xff."s).root().integer, -1);
  EXPECT_EQ(parse("\x80\x02M\xff\xff."s).root().integer, 65535);
  EXPECT_EQ(parse("\x80\x02\x8a\x05\x00\x00\x00\x00\x80."s).root().integer, -(std::int64_t{1} << 39));
  EXPECT_EQ(parse("\x80\x02\x8a\x00."s).root().integer, 0);
  EXPECT_EQ(parse("\x80\x02\x8a\x09\x00\x00\x00\x00\x00\x00\x00\x00\x01."s).root().kind, Kind::kBigInteger);
  EXPECT_EQ(parse("\x80\x02G\x3f\xf8\x00\x00\x00\x00\x00\x00."s).root().number, 1.5);
  EXPECT_EQ(parse("\x80\x02X\x02\x00\x00\x00hi."s).root().text, "hi");
  EXPECT_EQ(parse("\x80\x04\x95\x05\x00\x00\x00\x00\x00\x00\x00\x8c\x02hi\x94."s).root().text, "hi");
}

// {'a': (1, [2]), 'a': 3}, an OrderedDict with a key, and a set.
TEST(Pickle, ContainersHoldTheirItems) {
  const Pickle dict = parse("\x80\x02}q\x00(X\x01\x00\x00\x00\x61q\x01K\x01]K\x02\x61\x86h\x01K\x03u."s);
  ASSERT_EQ(dict.root().kind, Kind::kDict);
  ASSERT_EQ(dict.root().items.size(), 4u);
  const PickleValue& tuple = *dict.root().items[1];
  ASSERT_EQ(tuple.kind, Kind::kTuple);
  EXPECT_EQ(tuple.items[1]->items.at(0)->unsigned_integer(), 2u);
  EXPECT_EQ(dict.root().find("a")->unsigned_integer(), 3u) << "the last of equal keys is the one that Python keeps";
  EXPECT_EQ(dict.root().find("b"), nullptr);

  const Pickle ordered = parse(
      "\x80\x02"
      "ccollections\nOrderedDict\n)RX\x01\x00\x00\x00kK\x07s}b."s);
  EXPECT_EQ(ordered.root().find("k")->unsigned_integer(), 7u);
  EXPECT_EQ(parse("\x80\x04\x8f(K\x01K\x02\x90."s).root().items.size(), 2u);
}

TEST(Pickle, ACallIsAValueAndNothingElse) {
  const Pickle call = parse(
      "\x80\x02"
      "cos\nsystem\n(X\x02\x00\x00\x00lst}b."s);
  ASSERT_EQ(call.root().kind, Kind::kTuple) << "BUILD of what is no object drops the state";
  const Pickle object = parse(
      "\x80\x02"
      "cposix\nsystem\nX\x02\x00\x00\x00ls\x85R}X\x01\x00\x00\x00xK\x01sb."s);
  ASSERT_EQ(object.root().kind, Kind::kObject);
  ASSERT_NE(object.root().arguments_of("posix", "system"), nullptr);
  EXPECT_EQ(object.root().arguments_of("posix", "system")->items[0]->text, "ls");
  EXPECT_EQ(object.root().arguments_of("posix", "other"), nullptr);
  EXPECT_EQ(object.root().items[2]->find("x")->unsigned_integer(), 1u);
  const Pickle by_stack = parse("\x80\x04\x8c\x05torch\x94\x8c\x04Size\x94\x93."s);
  EXPECT_TRUE(by_stack.root().is_global("torch", "Size"));
  const Pickle persistent = parse("\x80\x02X\x01\x00\x00\x00sQ."s);
  EXPECT_EQ(persistent.root().items.at(0)->text, "s");
}

TEST(Pickle, AListMayHoldItself) {
  const Pickle pickle = parse("\x80\x02]q\x00h\x00\x61."s);
  EXPECT_EQ(pickle.root().items.at(0), &pickle.root());
}

TEST(Pickle, MarksAreNotPoppedThrough) {
  EXPECT_THAT(refusal("\x80\x02N(0N."s), ::testing::HasSubstr("empty stack"));
  EXPECT_THAT(refusal("\x80\x02K\x01(K\x02R."s), ::testing::HasSubstr("empty stack"));
  EXPECT_EQ(parse("\x80\x02K\x01(K\x02\x31."s).root().integer, 1) << "POP_MARK";
}

TEST(Pickle, LimitsAreKept) {
  EXPECT_THAT(refusal("\x80\x02"s + std::string(11, 'N') + ".", {.values = 10}), ::testing::HasSubstr("10 values"));
  EXPECT_THAT(refusal("\x80\x02"s + std::string(11, '(') + ".", {.opcodes = 10}), ::testing::HasSubstr("10 opcodes"));
  EXPECT_THAT(refusal("\x80\x02NR."s), ::testing::HasSubstr("(byte 3)"));
}

// Cut anywhere, and with random bytes in it, a pickle is a value or an error.
TEST(Pickle, DamageIsAValueOrAnError) {
  const std::string whole =
      "\x80\x02}q\x00(X\x01\x00\x00\x00\x61q\x01"
      "ctorch._utils\n_rebuild_tensor_v2\nq\x02((X\x07\x00\x00\x00storageq\x03"
      "ctorch\nFloatStorage\nq\x04X\x01\x00\x00\x00\x30q\x05X\x03\x00\x00\x00"
      "cpuq\x06K\x03tq\x07QK\x00K\x03\x85q\x08"
      "K\x01\x85q\x09\x89"
      "ccollections\nOrderedDict\nq\x0a)Rq\x0btq\x0cRq\x0dX\x01\x00\x00\x00"
      "bq\x0e]q\x0f(K\x01K\x02"
      "eu."s;
  ASSERT_NE(parse(whole).root().find("a")->arguments_of("torch._utils", "_rebuild_tensor_v2"), nullptr);
  for (std::size_t length = 0; length < whole.size(); ++length)
    EXPECT_THAT(refusal(whole.substr(0, length)), ::testing::HasSubstr("file.pt: its pickle")) << length;
  auto generator = seeded_generator();
  std::size_t refused = 0;
  for (int i = 0; i < 20'000; ++i) {
    std::string damaged = whole;
    for (std::uint64_t flips = 1 + generator() % 3; flips > 0; --flips)
      damaged[generator() % damaged.size()] = static_cast<char>(generator());
    refused += refusal(damaged) != "read";
  }
  EXPECT_GT(refused, 0u);
}

}  // namespace
}  // namespace spillway
