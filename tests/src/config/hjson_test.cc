#include "src/config/hjson.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

namespace spillway {
namespace {

using testing::HasSubstr;

// What is said of a text, with the piece of it that it is about; empty: nothing.
std::string advice(const std::string& text) {
  JsonValue root;
  const auto problem = parse_json(text, {}, root);
  EXPECT_TRUE(problem.has_value()) << text;
  if (!problem) return {};
  const auto said = hjson_advice(text, *problem);
  if (!said) return {};
  EXPECT_LE(said->offset, said->end);
  EXPECT_LE(said->end, text.size());
  return "[" + text.substr(said->offset, said->end - said->offset) + "] " + said->what + "; " + said->hint;
}

TEST(Hjson, LibertiesAreNamedWithWhatToWrite) {
  EXPECT_THAT(advice("{a: 1}"), testing::StartsWith("[a] a key without quotes"));
  EXPECT_THAT(advice("{a: 1}"), HasSubstr("write \"a\""));
  EXPECT_THAT(advice("{\"a\": nvme}"), testing::StartsWith("[nvme] a string without quotes"));
  EXPECT_THAT(advice("{\"a\": 'x'}"), testing::StartsWith("['x'] single quotes"));
  EXPECT_THAT(advice("{'a': 1}"), testing::StartsWith("['a'] single quotes"));
  EXPECT_THAT(advice("{\"a\": '''x\ny'''}"), testing::StartsWith("['''] a ''' string"));
  EXPECT_THAT(advice("{# one\n\"a\": 1}"), testing::StartsWith("[#] a comment with #"));
  EXPECT_THAT(advice("{\"a\": 1 # one\n}"), testing::StartsWith("[#] a comment with #"));
  EXPECT_THAT(advice("{\"a\": 1\n\"b\": 2}"), testing::StartsWith("[\"] a comma is missing"));
  EXPECT_THAT(advice("[1 2]"), testing::StartsWith("[2] a comma is missing"));
  EXPECT_THAT(advice("[{} {}]"), testing::StartsWith("[{] a comma is missing"));
  EXPECT_THAT(advice("\"a\": 1"), testing::StartsWith("[:] keys without braces"));
  EXPECT_THAT(advice("{\"a\": \"x\ny\"}"), testing::StartsWith("[\n] a line break or a tab inside a string"));
  EXPECT_THAT(advice("{,\"a\": 1}"), testing::StartsWith("[,] a comma with nothing before it"));
}

TEST(Hjson, NumbersAndWordsOfOtherLanguagesAreNamed) {
  EXPECT_THAT(advice("{\"a\": 1_000}"), testing::StartsWith("[1_000] 1_000 is no number in JSON; write the digits"));
  EXPECT_THAT(advice("{\"a\": 0x10}"), testing::StartsWith("[0x10] 0x10 is no number in JSON; write it in decimal"));
  EXPECT_THAT(advice("{\"a\": 012}"), testing::StartsWith("[012] 012 is no number"));
  EXPECT_THAT(advice("{\"a\": .5}"), testing::StartsWith("[.5] .5 is no number in JSON; begin it with a digit"));
  EXPECT_THAT(advice("{\"a\": 1.}"), testing::StartsWith("[1.] 1. is no number in JSON; begin it with a digit"));
  EXPECT_THAT(advice("{\"a\": +1}"), testing::StartsWith("[+1] +1 is no number"));
  EXPECT_THAT(advice("{\"a\": 12GiB}"), HasSubstr("write \"12GiB\""));
  EXPECT_THAT(advice("{\"a\": NaN}"), testing::StartsWith("[NaN] NaN is no number in JSON; write a finite"));
  EXPECT_THAT(advice("{\"a\": True}"), HasSubstr("write true"));
  EXPECT_THAT(advice("{\"a\": FALSE}"), HasSubstr("write false"));
  EXPECT_THAT(advice("{\"a\": None}"), HasSubstr("write null"));
  EXPECT_THAT(advice("{\"a\": tru}"), HasSubstr("write true"));
}

TEST(Hjson, WhatIsWrongInBothIsLeftToTheReader) {
  for (const char* text : {"", "{", "{\"a\"}", "{\"a\" 1}", "{\"a\": }", "[1, 2}", "{\"a\": 1]", "{} {}", "[",
                           "{\"a\": \"x", "{\"a\": -}", "{\"\xff\": 1}"}) {
    EXPECT_EQ(advice(text), "") << text;
  }
}

}  // namespace
}  // namespace spillway
