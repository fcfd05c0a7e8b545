#include "spillway/log.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "spillway/error.h"

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
TEST(Log, AMessageIsOneLineThatCommandsNoTerminal) {
  std::string heard;
  set_log_sink([&heard](LogLevel, std::string_view message) {
    heard = message;
    log(LogLevel::kInfo, message);
  });
  ::testing::internal::CaptureStderr();
  log(LogLevel::kWarning,
      "/mnt/\x1b[2J\x7f/\xc3\xa4: \xc2\x9b"
      "31m\x9b"
      "31m\xe4, no\tline\nspillway: of its own");
  const std::string shown = "/mnt/?[2J?/\xc3\xa4: ?31m?31m\xe4, no?line?spillway: of its own";
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "spillway: " + shown + "\n");
  EXPECT_EQ(heard, shown);
  set_log_sink({});
}

TEST(Log, AnErrorsObjectAndValuesAreOneLineAndTheRestCommandsNoTerminal) {
  const std::string path = "/mnt/a\nspillway: all is well\x1b[2J\xc2\x9b";
  const std::string shown = "/mnt/a?spillway: all is well?[2J?";
  const Error error(Code::kCorrupt, path, "first\x1b\n\tsecond", 0, {Remedy::kCheckDriveAndRollBack, {"3", path, "2"}});
  EXPECT_EQ(std::string(error.what()).find(shown + ": first?\n\tsecond"), 0u) << error.what();
  EXPECT_NE(std::string(error.what()).find("spillway store " + shown + " --rollback"), std::string::npos);
  EXPECT_NE(error.message_in("go to {} {}").find("go to 3 " + shown), std::string::npos);
  EXPECT_EQ(error.parts().values[1], shown);
  EXPECT_EQ(error.parts().object, path) << "what it is about is nobody's text";
}

}  // namespace
}  // namespace spillway
