#include "tools/terminal/tell.h"

#include <gtest/gtest.h>

#include <cstdio>

namespace spillway::terminal {
namespace {

TEST(Tell, NothingInATextCommandsTheTerminal) {
  EXPECT_EQ(masked_report("run\x1b[2J\x07\r\b\x7f"), "run?[2J????");
  EXPECT_EQ(masked_report("two\nlines\tand a tab"), "two\nlines\tand a tab");
  EXPECT_EQ(masked_report(std::string_view("a\0b", 3)), "a?b");
  EXPECT_EQ(masked_report("\xc2\x9b"
                          "31m"),
            "?31m")
      << "CSI as one character";
  EXPECT_EQ(masked_report("\x9b"
                          "31m"),
            "?31m")
      << "CSI as one byte";
}

TEST(Tell, WhatIsNoControlCharacterStays) {
  for (const char* text : {"Größe", "語\xf0\x9f\x98\x80", "caf\xe9", "\xc2\xa0", "\xe4\xb8", ""})
    EXPECT_EQ(masked_report(text), text);
}

TEST(Tell, ColoursOfAReportStayAndNothingElse) {
  EXPECT_EQ(masked_report("\x1b[1;31mno\x1b[0m", true), "\x1b[1;31mno\x1b[0m");
  EXPECT_EQ(masked_report("\x1b[2J\x1b]0;title\x07\x1b[", true), "?[2J?]0;title??[");
}

TEST(Tell, AStreamThatTakesNothingIsNoException) {
  std::FILE* full = std::fopen("/dev/full", "w");
  ASSERT_NE(full, nullptr);
  EXPECT_NO_THROW(tell(full, "{}\n", std::string(1 << 20, 'x')));
  EXPECT_NE(std::ferror(full), 0);
  std::fclose(full);
}

TEST(Tell, AWordForAShellIsInQuotesWhereItHasToBe) {
  EXPECT_EQ(shell_word("/mnt/nvme-0_1"), "/mnt/nvme-0_1");
  EXPECT_EQ(shell_word("/mnt/my drive"), "'/mnt/my drive'");
  EXPECT_EQ(shell_word("it's"), "'it'\\''s'");
  EXPECT_EQ(shell_word(""), "''");
}

}  // namespace
}  // namespace spillway::terminal
