#include "tools/finetune/sha256.h"

#include <gtest/gtest.h>

#include <string>
#include <string_view>

namespace spillway::models::finetune {
namespace {

std::span<const unsigned char> bytes_of(std::string_view text) {
  return {reinterpret_cast<const unsigned char*>(text.data()), text.size()};
}

std::string sum_of(std::string_view text) {
  Sha256 sum;
  sum.add(bytes_of(text));
  return sum.finish();
}

// The examples that NIST gives for FIPS 180.
TEST(Sha256, IsThatOfTheStandard) {
  EXPECT_EQ(sum_of(""), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(sum_of("abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(sum_of("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq"),
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  EXPECT_EQ(sum_of(std::string(1'000'000, 'a')), "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

TEST(Sha256, PiecesAddUpToTheWhole) {
  std::string text;
  for (int i = 0; i < 300; ++i) text.push_back(static_cast<char>(i));
  for (std::size_t length = 0; length <= text.size(); ++length) {  // the padding begins at each place of a block
    const auto whole = std::string_view(text).substr(0, length);
    for (const std::size_t piece :
         {std::size_t{1}, std::size_t{7}, std::size_t{63}, std::size_t{64}, std::size_t{65}}) {
      Sha256 sum;
      for (std::size_t at = 0; at < length; at += piece) sum.add(bytes_of(whole.substr(at, piece)));
      ASSERT_EQ(sum.finish(), sum_of(whole)) << length << " in pieces of " << piece;
    }
  }
}

}  // namespace
}  // namespace spillway::models::finetune
