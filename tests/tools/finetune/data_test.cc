#include "tools/finetune/data.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <fstream>

#include "spillway/error.h"
#include "tests/temp_directory.h"

namespace spillway::models::finetune {
namespace {

class TokenFileTest : public testing::Test {
 protected:
  std::filesystem::path write(const std::string& name, const std::vector<unsigned char>& bytes) {
    const auto path = folder_ / name;
    std::ofstream(path, std::ios::binary)
        .write(reinterpret_cast<const char*>(bytes.data()), static_cast<long>(bytes.size()));
    return path;
  }
  std::filesystem::path words(const std::vector<unsigned>& tokens) {
    std::vector<unsigned char> bytes;
    for (const unsigned t : tokens)
      bytes.insert(bytes.end(), {static_cast<unsigned char>(t), static_cast<unsigned char>(t >> 8)});
    return write("tokens.bin", bytes);
  }
  static std::string refusal(const std::filesystem::path& path, std::uint32_t sequence, std::uint32_t vocabulary) {
    try {
      TokenFile file(path, sequence, vocabulary);
    } catch (const Error& error) {
      EXPECT_FALSE(error.parts().hint.empty());
      return error.what();
    }
    return "accepted";
  }

  const TempDirectory own_;
  const std::filesystem::path folder_ = own_.path();
};

TEST_F(TokenFileTest, BytesAreTokensAndRowsOverlapByOne) {
  TokenFile file(write("text", {10, 11, 12, 13, 14, 15, 255, 17}), 3, 256);
  EXPECT_EQ(file.rows(), 2u);  // (8 - 1) / 3
  std::vector<std::uint32_t> row(4);
  file.read_row(0, row);
  EXPECT_EQ(row, (std::vector<std::uint32_t>{10, 11, 12, 13}));
  file.read_row(1, row);
  EXPECT_EQ(row, (std::vector<std::uint32_t>{13, 14, 15, 255}));
  file.read_row(5, row);  // wraps round
  EXPECT_EQ(row, (std::vector<std::uint32_t>{13, 14, 15, 255}));
}

TEST_F(TokenFileTest, BinHoldsLittleEndianWords) {
  TokenFile file(words({1, 256, 50256, 3}), 2, 50257);
  std::vector<std::uint32_t> row(3);
  file.read_row(0, row);
  EXPECT_EQ(row, (std::vector<std::uint32_t>{1, 256, 50256}));
}

TEST_F(TokenFileTest, TokenOutsideTheVocabularyIsNamedWithItsByteOffset) {
  std::vector<unsigned> tokens(400, 7);
  tokens[37] = 256;
  const auto message = refusal(words(tokens), 32, 256);
  EXPECT_NE(message.find("token 256 at byte offset 74"), std::string::npos) << message;
  tokens.assign(600'000, 7);
  tokens[599'999] = 300;  // in the last chunk of the scan, in no row
  EXPECT_NE(refusal(words(tokens), 32, 300).find("byte offset 1199998"), std::string::npos);
  EXPECT_EQ(refusal(words(tokens), 32, 301), "accepted");
}

// A TiB of holes: read through, it would take longer than a test may.
TEST_F(TokenFileTest, HolesAreZerosAndAreNotRead) {
  const auto path = words({1, 2, 300, 4});
  std::error_code error;
  std::filesystem::resize_file(path, std::uintmax_t{1} << 40, error);
  if (error) GTEST_SKIP() << "no file of 1 TiB here: " << error.message();
  EXPECT_EQ(refusal(path, 32, 301), "accepted");
  EXPECT_NE(refusal(path, 32, 300).find("byte offset 4 "), std::string::npos);
  std::fstream(path, std::ios::in | std::ios::out | std::ios::binary)
      .seekp(std::streamoff{1} << 39)
      .write("\xff\xff", 2);
  EXPECT_NE(refusal(path, 32, 301).find("token 65535 at byte offset 549755813888 "), std::string::npos);
}

TEST_F(TokenFileTest, AMarkTellsFilesOfOtherEndsApart) {
  std::vector<unsigned char> bytes(300'000, 1);
  const auto mark = [&] { return TokenFile(write("text", bytes), 32, 256).mark(); };
  const std::string first = mark();
  EXPECT_EQ(first.substr(0, first.find(',')), "300000 bytes");
  EXPECT_EQ(mark(), first);
  for (const std::size_t at : {std::size_t{0}, std::size_t{65535}, bytes.size() - 1, bytes.size() - 65536}) {
    bytes[at] = 2;
    EXPECT_NE(mark(), first) << at;
    bytes[at] = 1;
  }
  bytes.pop_back();
  EXPECT_NE(mark(), first);
}

TEST_F(TokenFileTest, FilesThatHoldNoRowAreRefused) {
  EXPECT_NE(refusal(write("empty", {}), 4, 256).find("holds 0 tokens"), std::string::npos);
  EXPECT_NE(refusal(write("short", {1, 2, 3, 4}), 4, 256).find("one row takes 5"), std::string::npos);
  EXPECT_EQ(refusal(write("enough", {1, 2, 3, 4, 5}), 4, 256), "accepted");
  EXPECT_NE(refusal(write("odd.bin", {1, 0, 2}), 1, 256).find("no whole 16-bit tokens"), std::string::npos);
  EXPECT_NE(refusal(folder_ / "absent", 4, 256).find("No such file"), std::string::npos);
  EXPECT_NE(refusal(folder_, 4, 256).find("not a regular file"), std::string::npos);
  ASSERT_EQ(::mkfifo((folder_ / "pipe").c_str(), 0600), 0);  // nobody writes to it: reading would wait for ever
  EXPECT_NE(refusal(folder_ / "pipe", 4, 256).find("not a regular file"), std::string::npos);
}

TEST_F(TokenFileTest, FileCutWhileItIsReadIsAnError) {
  const auto path = write("text", std::vector<unsigned char>(100, 1));
  TokenFile file(path, 9, 256);
  std::filesystem::resize_file(path, 50);
  std::vector<std::uint32_t> row(10);
  EXPECT_NO_THROW(file.read_row(0, row));
  EXPECT_THROW(file.read_row(9, row), Error);
}

}  // namespace
}  // namespace spillway::models::finetune
