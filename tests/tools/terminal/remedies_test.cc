#include "tools/terminal/remedies.h"

#include <gtest/gtest.h>

#include <stdexcept>

namespace spillway::terminal {
namespace {

TEST(Remedies, AreSaidInTheWordsOfWhoIsAsked) {
  const Error error(Code::kCorrupt, "a.store", "bytes are wrong", EIO, {Remedy::kCheckDriveAndGoBack, {"7"}});
  EXPECT_STREQ(error.what(),
               "a.store: bytes are wrong (Input/output error); check the drive; step 7, the last committed one, is not "
               "affected: on_existing resume goes back to it");
  EXPECT_EQ(message_of(error),
            "a.store: bytes are wrong (Input/output error); check the drive; step 7, the last committed one, is not "
            "affected: --resume goes back to it");
  EXPECT_EQ(hint_of(error),
            "check the drive; step 7, the last committed one, is not affected: --resume goes back to it");
  EXPECT_EQ(error.message_in(""), "a.store: bytes are wrong (Input/output error)");
  EXPECT_EQ(error.parts().values, std::vector<std::string>{"7"});
}

TEST(Remedies, WhatHasNoneIsSaidAsItIs) {
  const Error error(Code::kIo, {"on_existing resume", "failed", 0, "check on_existing resume"});
  EXPECT_EQ(message_of(error), "on_existing resume: failed; check on_existing resume");
  EXPECT_EQ(error.message_in("x"), error.what());
  EXPECT_EQ(hint_of(error), "check on_existing resume");
  EXPECT_EQ(message_of(std::runtime_error("anything")), "anything");
  EXPECT_EQ(message_of(Error(Code::kIo, {"", "is no path", 0, ""})), "\"\": is no path");
}

TEST(Remedies, ValuesComeInTurnAndAreNotLookedInto) {
  EXPECT_EQ(with_values("{} and {}.", {"a{}", "b"}), "a{} and b.");
  EXPECT_EQ(with_values("{}, {}", {"a"}), "a, ");
  EXPECT_EQ(with_values("nothing", {"a"}), "nothing");
}

}  // namespace
}  // namespace spillway::terminal
