#include "tools/terminal/json.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <limits>
#include <optional>
#include <vector>

namespace spillway::terminal {
namespace {

// Of one member.
std::string written(const auto& value) {
  Json json(0);
  json.put("a", value);
  return json.text();
}

TEST(Json, NoControlCharacterIsInIt) {
  EXPECT_EQ(written("a\x1b\x7f\xc2\x9b\xc2\x80z"), "{\n\"a\": \"a\\u001B\\u007f\\u009b\\u0080z\"\n}");
  EXPECT_EQ(written("\xc2\xa0\xc3\x9f"), "{\n\"a\": \"\xc2\xa0\xc3\x9f\"\n}");
}

TEST(Json, MembersAreWrittenByTheirTypes) {
  EXPECT_EQ(written(true), "{\n\"a\": true\n}");
  EXPECT_EQ(written(-3), "{\n\"a\": -3\n}");
  EXPECT_EQ(written(std::numeric_limits<std::uint64_t>::max()), "{\n\"a\": 18446744073709551615\n}");
  EXPECT_EQ(written(2.5), "{\n\"a\": 2.5\n}");
  EXPECT_EQ(written("one \"word\""), "{\n\"a\": \"one \\\"word\\\"\"\n}");
  EXPECT_EQ(written(std::vector<int>{1, 2}), "{\n\"a\": [\n1,\n2\n]\n}");
  EXPECT_EQ(written(std::optional<int>(4)), "{\n\"a\": 4\n}");
  EXPECT_EQ(written(std::optional<int>()), "{\n\"a\": null\n}");
}

TEST(Json, WhatIsNotFiniteIsNull) {
  EXPECT_EQ(written(std::numeric_limits<double>::quiet_NaN()), "{\n\"a\": null\n}");
  EXPECT_EQ(written(-std::numeric_limits<float>::infinity()), "{\n\"a\": null\n}");
}

TEST(Json, PathIsOneText) {
  EXPECT_EQ(written(std::filesystem::path("/mnt/a b")), "{\n\"a\": \"/mnt/a b\"\n}");
  EXPECT_EQ(written(std::vector<std::filesystem::path>{"/mnt"}), "{\n\"a\": [\n\"/mnt\"\n]\n}");
}

TEST(Json, BytesThatAreNoUtf8AreQuestionMarks) {
  EXPECT_EQ(written("caf\xc3\xa9"), "{\n\"a\": \"caf\xc3\xa9\"\n}");
  EXPECT_EQ(written(std::filesystem::path("bad\xff/\xc3")), "{\n\"a\": \"bad?/?\"\n}");
  EXPECT_EQ(written("\xe2\x82x"), "{\n\"a\": \"??x\"\n}");
}

TEST(Json, ListsHoldObjectsAndLists) {
  Json json(0);
  json.list("a", [&] {
    json.item([&] { json.put("b", 1); });
    json.list([&] { json.item(2); });
  });
  EXPECT_EQ(json.text(), "{\n\"a\": [\n{\n\"b\": 1\n},\n[\n2\n]\n]\n}");
}

TEST(Json, TextEndsTheObjectOnce) {
  Json json(0);
  json.put("a", 1);
  EXPECT_EQ(json.text(), "{\n\"a\": 1\n}");
  EXPECT_EQ(json.text(), "{\n\"a\": 1\n}");
}

}  // namespace
}  // namespace spillway::terminal
