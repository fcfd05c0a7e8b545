// What every family of models asks of its config.json; what GPT-2 and the planner ask, their own tests do.
#include "tools/models/config_json.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <fstream>
#include <functional>

#include "spillway/error.h"
#include "tests/temp_directory.h"

namespace spillway::models {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

// The error's text after the file's name.
std::string refusal(const std::function<void()>& what) {
  try {
    what();
  } catch (const Error& error) {
    return error.parts().happened + "; " + error.parts().hint;
  }
  return "accepted";
}

std::string refusal(const std::string& text) {
  return refusal([&] { ConfigJson(text, "config.json"); });
}

TEST(ModelsConfigJson, WhatIsNoJsonObjectIsRefused) {
  const std::pair<std::string, const char*> cases[] = {
      {"[]", "is not a JSON object"},
      {"{\"a\": ", "not valid JSON at byte 6"},
      {std::string(200'000, '['), "nested too deep"},
      {R"({"dtype": "bfloat16", "a": )" + std::string(200'000, '[') + std::string(200'000, ']'), "nested too deep"},
      {std::string("{}\0{", 4), "zero byte at byte 2"},
      {"{\"a\": \"\xff\"}", "not valid JSON"},
      {R"({"a": 99999e308})", "a number that is too large"},
      {R"({"n_head": 4, "n_layer": 2, "n_head": 2})", "has a key twice"},
      {R"([{"a": {"b": 1, "b": 1}}])", "has a key twice"},
  };
  for (const auto& [text, words] : cases) EXPECT_THAT(refusal(text), HasSubstr(words)) << text.substr(0, 200);
  EXPECT_EQ(refusal("{}"), "accepted");
  EXPECT_EQ(refusal(R"({"a": {"a": [{"a": 1}, {"a": 1}]}, "b": {"a": 1}})"), "accepted");
}

TEST(ModelsConfigJson, ValuesHaveTypesAndNullIsMissing) {
  const ConfigJson json(R"({"size": 3, "zero": 0, "below": -1, "part": 1.5, "text": "t", "flag": true, "null": null})",
                        "config.json");
  EXPECT_EQ(json.size("size"), 3u);
  EXPECT_EQ(json.size("null", 7), 7u);
  EXPECT_EQ(json.number("part", 0), 1.5);
  EXPECT_EQ(json.number("size", 0), 3);
  EXPECT_EQ(json.number("null", 0.5), 0.5);
  EXPECT_TRUE(json.flag("flag", false));
  EXPECT_TRUE(json.flag("null", true));
  EXPECT_EQ(json.text("text", ""), "t");
  EXPECT_EQ(json.text("null", "o"), "o");
  EXPECT_TRUE(json.has("zero"));
  EXPECT_FALSE(json.has("null"));

  constexpr const char* kRepair = "take the file as the model came with it";
  EXPECT_EQ(refusal([&] { json.size("null"); }), std::string("\"null\" is missing; ") + kRepair);
  for (const char* key : {"zero", "below", "part", "text"}) {
    EXPECT_EQ(refusal([&] { json.size(key, {}, 9); }),
              std::string("\"") + key + "\" is not a whole number from 1 to 9; " + kRepair);
  }
  EXPECT_THAT(refusal([&] { json.number("text", 0); }), HasSubstr("\"text\" is not a number"));
  EXPECT_THAT(refusal([&] { json.flag("size", true); }), HasSubstr("\"size\" is not true or false"));
  EXPECT_THAT(refusal([&] { json.text("size", ""); }), HasSubstr("\"size\" is not a string"));
}

TEST(ModelsConfigJson, ListsAndObjectsHaveTypesToo) {
  const ConfigJson json(R"({"texts": ["a", "b"], "numbers": [1, 2.5], "mixed": [1, "a"], "null": null, "text": "t",
    "object": {"factor": 1.0299999713897705, "more": {"a": 1}, "nothing": null}})",
                        "config.json");
  EXPECT_THAT(json.texts("texts"), ElementsAre("a", "b"));
  EXPECT_THAT(json.numbers("numbers"), ElementsAre(1, 2.5));
  EXPECT_TRUE(json.texts("null").empty());
  EXPECT_THAT(refusal([&] { json.texts("text"); }), HasSubstr("\"text\" is not a list"));
  EXPECT_THAT(refusal([&] { json.texts("mixed"); }), HasSubstr("\"mixed\" holds something that is not a string"));
  EXPECT_THAT(refusal([&] { json.numbers("mixed"); }), HasSubstr("\"mixed\" holds something that is not a number"));

  const ConfigJson object = json.section("object");
  EXPECT_FLOAT_EQ(static_cast<float>(object.number("factor", 0)), 1.03f);
  EXPECT_EQ(object.section("more").size("a"), 1u);
  EXPECT_FALSE(json.section("null").has("factor"));
  EXPECT_THAT(refusal([&] { json.section("text"); }), HasSubstr("\"text\" is not a JSON object"));
  try {
    object.size("absent");
    ADD_FAILURE() << "nothing was refused";
  } catch (const Error& error) {
    EXPECT_EQ(error.parts().object, "config.json, \"object\"");
  }
}

TEST(ModelsConfigJson, KnowsWhatNothingAskedFor) {
  const ConfigJson json(R"({"a": 1, "b": null, "c": "t", "d": true})", "config.json");
  EXPECT_THAT(json.unread(), ElementsAre("a", "c", "d"));
  json.size("a");
  json.has("d");
  EXPECT_THAT(json.unread(), ElementsAre("c"));
  EXPECT_TRUE(json.is_null("b"));
  EXPECT_FALSE(json.is_null("c") || json.is_null("absent"));
}

// Its file is as it came.
TEST(ModelsConfigJson, AModelBeyondALimitIsNotToldToRepairItsFile) {
  const ConfigJson json(R"({"size": 4, "huge": 99999999999})", "config.json");
  EXPECT_EQ(json.size("size", {}, 4), 4u);
  EXPECT_EQ(refusal([&] { json.size("size", {}, 3); }), "\"size\" is larger than 3; Spillway takes no larger model");
  EXPECT_EQ(refusal([&] { json.size("huge"); }), "\"huge\" is larger than 16777216; Spillway takes no larger model");
}

TEST(ModelsConfigJson, OnlyAFileOfItsSizeIsRead) {
  const TempDirectory folder;
  const auto message = [&] { return refusal([&] { ConfigJson::load(folder.path()); }); };
  const auto file = folder / "config.json";
  EXPECT_THAT(message(), HasSubstr("cannot be opened"));
  ASSERT_EQ(::mkfifo(file.c_str(), 0600), 0);  // nobody writes to it: reading would wait for ever
  EXPECT_THAT(message(), HasSubstr("is not a regular file"));
  std::filesystem::remove(file);
  std::ofstream(file) << "{}";
  EXPECT_EQ(message(), "accepted");
  std::filesystem::resize_file(file, std::uintmax_t{1} << 40);  // sparse
  EXPECT_THAT(message(), HasSubstr("is larger than 4194304 bytes"));
}

}  // namespace
}  // namespace spillway::models
