#include "tools/generate/text.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <string>

#include "spillway/error.h"
#include "tests/temp_directory.h"

namespace spillway::models::generate {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

// What is shown after each byte, with a bar between two of them.
std::string shown(std::string_view text) {
  const std::unique_ptr<Text> of = bytes();
  std::string all;
  for (const std::uint32_t token : bytes()->tokens_of(text)) all += of->add(token) + "|";
  return all + of->rest();
}

TEST(GenerateText, BytesAreShownAsWholeCharacters) {
  EXPECT_EQ(shown("ab"), "a|b|");
  EXPECT_EQ(shown("é漢𝄞"), "|é|||漢||||𝄞|");
}

TEST(GenerateText, BytesThatAreNoCharacterAreShownAsTheyAre) {
  EXPECT_EQ(shown("\xff"
                  "a"),
            "\xff|a|");
  EXPECT_EQ(shown("\xc3"
                  "a"),
            "|\xc3"
            "a|");
  EXPECT_EQ(shown("\xe6\xbc"
                  "é"),
            "||\xe6\xbc|é|");
  EXPECT_EQ(shown("\xf0\x9d"), "||\xf0\x9d") << "the end leaves it as it is";
}

TEST(GenerateText, NumbersHaveSpacesOrCommasBetweenThem) {
  EXPECT_THAT(numbers()->tokens_of(" 1, 22\n333,"), ElementsAre(1, 22, 333));
  EXPECT_THAT(numbers()->tokens_of(""), IsEmpty());
  const std::unique_ptr<Text> of = numbers();
  std::string shown = of->add(7);
  shown += of->add(80);
  EXPECT_EQ(shown + of->rest(), "7 80");
  for (const char* wrong : {"-1", "1.5", "x", "4294967296"}) {
    EXPECT_THAT([&] { numbers()->tokens_of(wrong); }, ::testing::ThrowsMessage<Error>(HasSubstr("is no number")));
  }
}

TEST(GenerateText, ATokenizerIsKnownByItsFiles) {
  const TempDirectory folder;
  EXPECT_FALSE(has_tokenizer(folder.path()));
  EXPECT_FALSE(has_tokenizer(folder.path() / "none"));
  std::ofstream(folder.path() / "config.json") << "{}";
  EXPECT_FALSE(has_tokenizer(folder.path()));
  std::ofstream(folder.path() / "tokenizer.json") << "{}";
  EXPECT_TRUE(has_tokenizer(folder.path()));
  EXPECT_TRUE(has_tokenizer(folder.path() / "tokenizer.json"));
}

}  // namespace
}  // namespace spillway::models::generate
