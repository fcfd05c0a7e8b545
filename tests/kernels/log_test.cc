#include "spillway/log.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace spillway {
namespace {

TEST(Log, ASinkMayLogAndSetAnother) {
  std::vector<std::string> first, second;
  set_log_sink([&](LogLevel, std::string_view message) {
    first.emplace_back(message);
    log(LogLevel::kInfo, "nested");
    set_log_sink([&](LogLevel, std::string_view text) { second.emplace_back(text); });
    first.emplace_back("still here");
  });
  ::testing::internal::CaptureStderr();
  log(LogLevel::kInfo, "one");
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "spillway: nested\n");
  log(LogLevel::kWarning, "two");
  set_log_sink({});
  log(LogLevel::kWarning, "three");
  EXPECT_EQ(first, (std::vector<std::string>{"one", "still here"}));
  EXPECT_EQ(second, (std::vector<std::string>{"two"}));
}

// A sink whose own message goes to stderr, as every message does at first.
TEST(Log, NothingOnStderrCommandsATerminal) {
  set_log_sink([](LogLevel, std::string_view message) { log(LogLevel::kInfo, message); });
  ::testing::internal::CaptureStderr();
  log(LogLevel::kWarning, "/mnt/\x1b[2J\x7f/\xc3\xa4: two\tlines\nhere");
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "spillway: /mnt/?[2J?/\xc3\xa4: two\tlines\nhere\n");
  set_log_sink({});
}

}  // namespace
}  // namespace spillway
