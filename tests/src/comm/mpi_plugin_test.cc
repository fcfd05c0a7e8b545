// The plugin that is not there, or not the library's: what is said, and what to do. One process opens it once, so
// meson.build runs this program several times, with SPILLWAY_OTHER_PLUGIN and, but for "missing", with LD_LIBRARY_PATH.
#include <dlfcn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <string>
#include <string_view>

#include "spillway/communicator.h"
#include "spillway/error.h"
#include "spillway/version.h"
#include "tests/error_of.h"

namespace spillway {
namespace {

using ::testing::AllOf;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::StartsWith;

std::string_view kind() {
  const char* told = std::getenv("SPILLWAY_OTHER_PLUGIN");
  return told != nullptr ? told : "";
}

std::string refusal() {
  const Error error = testing::error_of([] { make_communicator("mpi"); });
  EXPECT_EQ(error.code(), Code::kUnsupported);
  return error.what();
}

constexpr const char* kMatching =
    "; install the library and its plugin of Spillway " SPILLWAY_VERSION " from one build";

TEST(MpiPlugin, ThatIsMissingIsOfABuildWithMpi) {
  if (kind() != "missing") GTEST_SKIP() << "SPILLWAY_OTHER_PLUGIN is '" << kind() << "'";
  if (::dlopen("libspillway_mpi.so", RTLD_NOW | RTLD_NOLOAD) != nullptr) GTEST_SKIP() << "it is installed here";
  EXPECT_THAT(refusal(),
              AllOf(StartsWith("communicator mpi: its plugin was not opened: libspillway_mpi.so: cannot open"),
                    EndsWith("; a build of Spillway with libopenmpi-dev installed brings it "
                             "(-Dmpi=enabled)")));
  EXPECT_EQ(make_communicator("self")->ranks(), 1u) << "which needs none";
}

TEST(MpiPlugin, OfAnotherVersionIsNamedWithBoth) {
  if (kind() != "version") GTEST_SKIP() << "SPILLWAY_OTHER_PLUGIN is '" << kind() << "'";
  EXPECT_THAT(refusal(), AllOf(HasSubstr("libspillway_mpi.so is of Spillway 0.0.9, and this is " SPILLWAY_VERSION),
                               EndsWith(kMatching)));
}

TEST(MpiPlugin, OfAnotherInterfaceIsAskedForNothingElse) {
  if (kind() != "interface") GTEST_SKIP() << "SPILLWAY_OTHER_PLUGIN is '" << kind() << "'";
  EXPECT_THAT(refusal(),
              AllOf(HasSubstr("libspillway_mpi.so belongs to another version of Spillway than "), EndsWith(kMatching)));
  EXPECT_EQ(refusal(), refusal());
}

}  // namespace
}  // namespace spillway
