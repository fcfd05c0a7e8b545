// The plugin that is not there, or not the library's: what is said, and what to do. One process opens it once, so
// meson.build runs this program several times, with SPILLWAY_OTHER_PLUGIN and, but for "missing", with LD_LIBRARY_PATH.
#include <dlfcn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <string>
#include <string_view>

#include "kernels/cuda/loader.h"
#include "kernels/device.h"
#include "spillway/error.h"
#include "spillway/version.h"

namespace spillway {
namespace {

using ::testing::AllOf;
using ::testing::EndsWith;
using ::testing::HasSubstr;

std::string_view kind() {
  const char* told = std::getenv("SPILLWAY_OTHER_PLUGIN");
  return told != nullptr ? told : "";
}

std::string refusal() {
  try {
    create_cuda_device({.hbm_bytes = 4096});
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Code::kUnsupported);
    return error.what();
  }
  return "";
}

constexpr const char* kMatching = "; install Spillway and spillway-cuda " SPILLWAY_VERSION ", or both from one build";

TEST(CudaPlugin, ThatIsMissingIsAPackage) {
  if (kind() != "missing") GTEST_SKIP() << "SPILLWAY_OTHER_PLUGIN is '" << kind() << "'";
  const std::string said = refusal();
  if (::dlopen("libspillway_cuda.so", RTLD_NOW | RTLD_NOLOAD) != nullptr) GTEST_SKIP() << "it is installed here";
  EXPECT_THAT(said,
              AllOf(HasSubstr("device cuda: the plugin of the cuda device was not opened: "),
                    HasSubstr("libspillway_cuda.so: cannot open shared object file"),
                    EndsWith("; the wheel spillway_cuda of `tools/wheel.sh --cuda` brings it, and so does a build "
                             "with nvcc 12.8 or newer")));
}

TEST(CudaPlugin, OfAnotherVersionIsNamedWithBoth) {
  if (kind() != "version") GTEST_SKIP() << "SPILLWAY_OTHER_PLUGIN is '" << kind() << "'";
  EXPECT_THAT(refusal(), AllOf(HasSubstr("libspillway_cuda.so is of Spillway 0.0.9, and this is " SPILLWAY_VERSION),
                               EndsWith(kMatching)));
}

TEST(CudaPlugin, OfAnotherInterfaceIsAskedForNothingElse) {
  if (kind() != "interface") GTEST_SKIP() << "SPILLWAY_OTHER_PLUGIN is '" << kind() << "'";
  EXPECT_THAT(refusal(), AllOf(HasSubstr("libspillway_cuda.so belongs to another version of Spillway than "),
                               EndsWith(kMatching)));
  EXPECT_EQ(cuda_unavailable(), cuda_unavailable());
}

}  // namespace
}  // namespace spillway
