#include "tools/terminal/amount.h"

#include <gtest/gtest.h>

namespace spillway::terminal {
namespace {

TEST(Amount, OfASizeHasUnitsOf1000AndOf1024) {
  EXPECT_EQ(size_of_text("24GiB"), 24.0 * (1ull << 30));
  EXPECT_EQ(size_of_text("2TB"), 2e12);
  EXPECT_EQ(size_of_text("1.5 MiB"), 1.5 * (1 << 20));
  EXPECT_EQ(size_of_text("4096"), 4096.0);
  for (const char* wrong : {"", "GiB", "24GiBs", "-1GiB", "1e30TB", "nan", "inf", "1,5GB"})
    EXPECT_FALSE(size_of_text(wrong)) << wrong;
  EXPECT_EQ(size_of_text("4GB"), 4e9);
  EXPECT_EQ(size_of_text("4gib"), 4.0 * (1ull << 30));
}

TEST(Amount, OfACountIsOneOfParameters) {
  EXPECT_EQ(count_of_text("7B"), 7e9);
  EXPECT_EQ(count_of_text("1e12"), 1e12);
  EXPECT_EQ(count_of_text("1T"), 1e12);
  EXPECT_FALSE(count_of_text("7GiB"));
}

TEST(Amount, OfANumberHasNoUnit) {
  EXPECT_EQ(number_of_text("2.5"), 2.5);
  for (const char* wrong : {"2.5G", "-1", "", "x"}) EXPECT_FALSE(number_of_text(wrong)) << wrong;
}

}  // namespace
}  // namespace spillway::terminal
