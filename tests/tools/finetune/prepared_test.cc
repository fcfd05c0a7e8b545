#include "tools/finetune/prepared.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <fstream>
#include <functional>
#include <map>

#include "spillway/error.h"
#include "tests/error_of.h"
#include "tests/temp_directory.h"
#include "tools/finetune/sha256.h"
#include "tools/models/ops/ops.h"

namespace spillway::models::finetune {
namespace {

using Words = std::vector<std::uint32_t>;
using Verify = PreparedData::Verify;

std::string sum_of(const std::string& bytes) {
  Sha256 sum;
  sum.add({reinterpret_cast<const unsigned char*>(bytes.data()), bytes.size()});
  return sum.finish();
}

// Two rows of ten tokens: documents of 4 and 5 tokens and one of padding; one document of 10.
class PreparedTest : public ::testing::Test {
 protected:
  PreparedTest() {
    const Words tokens = {10, 11, 12, 13, 20, 21, 22, 23, 24, 0, 30, 31, 32, 33, 34, 35, 36, 37, 38, 299};
    for (const std::uint32_t token : tokens) {
      bytes_["tokens"].push_back(static_cast<char>(token));
      bytes_["tokens"].push_back(static_cast<char>(token >> 8));
    }
    bytes_["starts"] = {0b0001'0001, 0b10, 0b1, 0};
    bytes_["targets"] = {'\x60', 0, '\x03', '\x01'};  // positions 5 and 6; 0, 1 and 8
    header_ = {{"format", "\"spillway-prepared\""},
               {"version", "1"},
               {"rows", "2"},
               {"tokens_per_row", "10"},
               {"documents", "3"},
               {"targets", "5"},
               {"dtype", "\"uint16\""},
               {"largest_token", "299"},
               {"tokenizer", R"({"name": "x"})"}};
    sums();
  }
  void sums() {
    for (const auto& [name, bytes] : bytes_) header_[name + "_sha256"] = '"' + sum_of(bytes) + '"';
  }
  void write() {
    for (const auto& [name, bytes] : bytes_) put(name + ".bin", bytes);
    std::string text = "{\"part\": \"train\"";
    for (const auto& [key, value] : header_) text += fmt::format(", \"{}\": {}", key, value);
    put("header.json", text + "}\n");
  }
  void put(const std::string& name, const std::string& bytes) {
    std::ofstream(folder_ / name, std::ios::binary).write(bytes.data(), static_cast<long>(bytes.size()));
  }
  PreparedData opened(Verify verify = Verify::kChecksums) { return PreparedData(folder_.path(), 300, verify); }
  static std::vector<Words> row_of(PreparedData& data, std::uint64_t row) {
    std::vector<Words> parts(3, Words(data.sequence()));
    data.read_row(row, {parts[0], parts[1], parts[2]});
    return parts;
  }
  void refused(const std::string& object, const std::string& words, const std::function<void()>& work,
               Code code = Code::kInvalidArgument) {
    const Error error = spillway::testing::error_of(work);
    EXPECT_EQ(error.code(), code) << error.what();
    EXPECT_EQ(error.parts().object, object.empty() ? folder_.path() : folder_ / object);
    EXPECT_NE(std::string(error.what()).find(words), std::string::npos) << error.what();
    EXPECT_FALSE(error.parts().hint.empty());
  }
  void refused_at_opening(const std::string& object, const std::string& words, Code code = Code::kInvalidArgument,
                          Verify verify = Verify::kSizes) {
    write();
    refused(
        object, words, [&] { opened(verify); }, code);
  }

  std::map<std::string, std::string> bytes_, header_;
  const TempDirectory folder_;
};

TEST_F(PreparedTest, ARowHasDocumentsAndTargets) {
  write();
  PreparedData data = opened();
  EXPECT_EQ(data.rows(), 2u);
  EXPECT_EQ(data.sequence(), 10u);
  EXPECT_EQ(data.documents(), 3u);
  EXPECT_TRUE(data.packed());
  EXPECT_EQ(data.targets(), 5u);
  constexpr std::uint32_t kNone = kNoTarget;
  const std::vector<Words> first = {{10, 11, 12, 13, 20, 21, 22, 23, 24, 0},
                                    {0, 0, 0, 0, 4, 4, 4, 4, 4, 9},
                                    {kNone, kNone, kNone, kNone, kNone, 22, 23, kNone, kNone, kNone}};
  const std::vector<Words> second = {{30, 31, 32, 33, 34, 35, 36, 37, 38, 299},
                                     Words(10, 0),
                                     {31, 32, kNone, kNone, kNone, kNone, kNone, kNone, 299, kNone}};
  EXPECT_EQ(row_of(data, 0), first);
  EXPECT_EQ(row_of(data, 1), second);
  EXPECT_EQ(row_of(data, 2), first);  // wraps round
}

// Two documents that were split are three pieces, of which two lie in one row.
TEST_F(PreparedTest, PiecesSayWhetherRowsArePacked) {
  header_["documents"] = "2";
  header_["pieces"] = "3";
  write();
  EXPECT_TRUE(opened().packed());
  header_["pieces"] = "2";
  write();
  PreparedData data = opened();
  EXPECT_FALSE(data.packed());
  refused(
      "targets.bin", "row 0, position 5: a second document of the row has a target", [&] { row_of(data, 0); },
      Code::kCorrupt);
  EXPECT_EQ(row_of(data, 1)[1], Words(10, 0));
}

TEST_F(PreparedTest, TokensOfFourBytesAreReadWhole) {
  header_["dtype"] = "\"uint32\"";
  header_["largest_token"] = "16909060";
  std::string wide;
  for (int i = 0; i < 20; ++i) wide += std::string{4, 3, 2, 1};
  bytes_["tokens"] = wide;
  sums();
  write();
  PreparedData data(folder_.path(), 16909061, Verify::kChecksums);
  EXPECT_EQ(row_of(data, 1)[0], Words(10, 0x01020304));
  EXPECT_EQ(row_of(data, 1)[2][0], 0x01020304u);
}

TEST_F(PreparedTest, AHeaderOfAnotherKindIsRefused) {
  const auto with = [&](const std::string& key, const std::string& value, const std::string& words,
                        Code code = Code::kInvalidArgument) {
    const std::string before = header_.at(key);
    header_[key] = value;
    refused_at_opening("header.json", words, code);
    header_[key] = before;
  };
  with("format", "\"other\"", "is not the header of prepared data");
  with("version", "2", "is of format version 2, and this program reads version 1");
  with("rows", "0", "\"rows\" is not a whole number");
  with("rows", "1.5", "\"rows\" is not a whole number");
  with("rows", "\"2\"", "\"rows\" is not a number");
  with("rows", "null", "\"rows\" is missing");
  with("tokens_per_row", "1", "\"tokens_per_row\" is not a whole number from 2 to");
  with("tokens_per_row", "16777217", "\"tokens_per_row\" is not a whole number from 2 to 16777216");
  with("documents", "-3", "\"documents\" is not");
  header_["pieces"] = "3";
  with("pieces", "0", "\"pieces\" is not");
  header_.erase("pieces");
  with("targets", "0", "\"targets\" is not");
  with("dtype", "\"int8\"", "\"dtype\" is neither");
  with("largest_token", "300", "token 300 is outside the model's vocabulary of 300");
  with("largest_token", "{", "not valid JSON");
}

TEST_F(PreparedTest, AModelWithAnotherTokenizerIsRefused) {
  header_["tokenizer"] = fmt::format(
      R"({{"name": "x", "sha256": {{"tokenizer.json": "{}", "tokenizer_config.json": ""}}}})", sum_of("words"));
  write();
  const PreparedData data = opened();
  EXPECT_NO_THROW(data.check_tokenizer(folder_.path())) << "there is none";
  put("tokenizer_config.json", "of no weight");
  put("tokenizer.json", "words");
  EXPECT_NO_THROW(data.check_tokenizer(folder_.path()));
  put("tokenizer.json", "other words");
  refused("", "another tokenizer (\"x\")", [&] { data.check_tokenizer(folder_.path()); });
}

TEST_F(PreparedTest, AFileThatIsMissingOrOfAnotherLengthIsRefused) {
  bytes_["starts"].pop_back();
  refused_at_opening("starts.bin", "holds 3 bytes, and 2 rows of 10 tokens take 4", Code::kCorrupt);
  bytes_["starts"].push_back(0);
  bytes_["tokens"].push_back(0);
  refused_at_opening("tokens.bin", "holds 41 bytes, and 2 rows of 10 tokens take 40", Code::kCorrupt);
  bytes_["tokens"].pop_back();
  write();
  std::filesystem::remove(folder_ / "targets.bin");
  refused(
      "targets.bin", "cannot be opened", [&] { opened(); }, Code::kNotFound);
  ASSERT_EQ(::mkfifo((folder_ / "targets.bin").c_str(), 0600), 0);  // nobody writes to it
  refused("targets.bin", "is not a regular file", [&] { opened(); });
  std::filesystem::remove(folder_ / "header.json");
  refused(
      "header.json", "cannot be opened", [&] { opened(); }, Code::kNotFound);
}

TEST_F(PreparedTest, AByteThatChangedIsFoundByItsChecksum) {
  for (const char* name : {"tokens", "starts", "targets"}) {
    std::string& bytes = bytes_[name];
    bytes.back() = static_cast<char>(bytes.back() ^ 1);
    refused_at_opening(fmt::format("{}.bin", name), "has the sha256 " + sum_of(bytes), Code::kCorrupt,
                       Verify::kChecksums);
    EXPECT_NO_THROW(opened(Verify::kSizes));
    bytes.back() = static_cast<char>(bytes.back() ^ 1);
  }
  write();
  EXPECT_NO_THROW(opened());
}

TEST_F(PreparedTest, WhatARowCannotBeIsNamedWithItsPosition) {
  const auto refused_in = [&](const char* object, const char* words) {
    write();
    PreparedData data = opened(Verify::kSizes);
    refused(
        object, words, [&] { row_of(data, 3); }, Code::kCorrupt);  // row 1
    EXPECT_NO_THROW(row_of(data, 0));
  };
  bytes_["tokens"][34] = 44;  // position 7 of row 1: 37 + 7
  bytes_["tokens"][35] = 1;
  refused_in("tokens.bin", "row 1, position 7: token 300 is outside the model's vocabulary of 300");
  bytes_["tokens"][35] = 0;
  bytes_["starts"][2] = 0b10;
  refused_in("starts.bin", "row 1, position 0: no document begins there");
  bytes_["starts"][2] = 0b101;
  refused_in("targets.bin", "row 1, position 1: the last token of a document has a target");
  bytes_["starts"][2] = 0b1;
  bytes_["targets"][3] = 0b10;
  refused_in("targets.bin", "row 1, position 9: the last token of a document has a target");
}

TEST_F(PreparedTest, AMarkTellsOtherDataApart) {
  write();
  const std::string mark = opened().mark();
  EXPECT_EQ(mark.substr(0, mark.find(',')), "2 rows of 10 tokens");
  EXPECT_EQ(opened().mark(), mark);
  bytes_["tokens"][0] = 9;
  sums();
  write();
  EXPECT_NE(opened().mark(), mark);
}

TEST_F(PreparedTest, AFileCutWhileItIsReadIsAnError) {
  write();
  PreparedData data = opened();
  std::filesystem::resize_file(folder_ / "tokens.bin", 25);
  EXPECT_NO_THROW(row_of(data, 0));
  refused(
      "tokens.bin", "ended at offset 25", [&] { row_of(data, 1); }, Code::kIo);
}

}  // namespace
}  // namespace spillway::models::finetune
