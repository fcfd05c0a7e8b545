// Configurations as people publish them: each loads, or gives exactly the errors that it should.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <rapidjson/stringbuffer.h>
#include <rapidjson/writer.h>

#include <map>
#include <regex>

#include "tests/tools/config/files.h"
#include "tests/tools/config/schema_check.h"
#include "tools/config/report.h"

namespace spillway {
namespace {

using testing::HasSubstr;

class Corpus : public testing::TestWithParam<PublishedConfig> {
 protected:
  const std::string& text() const { return GetParam().text; }
  Silence silence_;
};

std::map<std::string, std::string> values_of(const EffectiveConfig& effective) {
  std::map<std::string, std::string> values;
  for (const EffectiveKey& key : effective.keys) values[std::string(key.key->path)] = key.value;
  return values;
}

TEST_P(Corpus, LoadsOrGivesTheErrorsThatItShould) {
  EXPECT_EQ(errors_in(text()), GetParam().loads ? "" : GetParam().expected);
  if (!GetParam().loads || HasFailure()) return;
  const auto values = values_of(read_text_as_config(text()));
  std::istringstream expected(GetParam().expected);
  for (std::string line; std::getline(expected, line);) {
    const std::size_t space = line.find(' ');
    const auto found = values.find(line.substr(0, space));
    ASSERT_TRUE(found != values.end()) << line;
    EXPECT_EQ(found->second, line.substr(space + 1)) << found->first;
  }
}

// What is printed is what will be run: as a file of its own it means the same, with nothing left to decide.
TEST_P(Corpus, TheEffectiveConfigurationIsOneThatMeansTheSame) {
  if (!errors_in(text()).empty()) return;
  const EffectiveConfig effective = read_text_as_config(text());
  rapidjson::Document report;
  report.Parse(config::report_json(effective).c_str());
  ASSERT_FALSE(report.HasParseError());
  rapidjson::StringBuffer buffer;
  rapidjson::Writer<rapidjson::StringBuffer> writer(buffer);
  report["config"].Accept(writer);
  ASSERT_EQ(errors_in(buffer.GetString()), "") << buffer.GetString();
  const EffectiveConfig again = read_text_as_config(buffer.GetString());
  auto before = values_of(effective);
  std::erase_if(before, [](const auto& value) { return !has_effect(*find_config_key(value.first)); });
  EXPECT_EQ(values_of(again), before);
}

TEST_P(Corpus, TheSchemaTakesWhatTheReaderTakes) {
  static const SchemaCheck schema;
  const std::string errors = errors_in(text());
  // Two of the reader's errors are none of the schema's: what keys say together, and the same key twice.
  const bool alone = std::regex_search(
      errors, std::regex("unknown key|expected |out of range|not known here|not computed here|not JSON"));
  if (errors.empty()) {
    EXPECT_TRUE(schema.accepts(text()));
  } else if (alone) {
    EXPECT_FALSE(schema.accepts(text()));
  }
}

INSTANTIATE_TEST_SUITE_P(Published, Corpus, testing::ValuesIn(published_configs()),
                         [](const auto& info) { return info.param.name; });

TEST(CorpusAsAWhole, IsLargeAndHasBothKinds) {
  const Silence silence;
  int loads = 0, refused = 0;
  for (const PublishedConfig& config : published_configs()) ++(config.loads ? loads : refused);
  EXPECT_GE(loads + refused, 60);
  EXPECT_GE(loads, 40);
  EXPECT_GE(refused, 20);
}

}  // namespace
}  // namespace spillway
