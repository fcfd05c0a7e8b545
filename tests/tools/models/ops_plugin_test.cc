// The plugin of the operations that is not there, or not the program's. One process opens it once, so meson.build runs
// this program twice, with SPILLWAY_OTHER_PLUGIN.
#include "tools/models/ops/ops_plugin.h"

#include <dlfcn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <string>
#include <string_view>

#include "spillway/error.h"

namespace spillway::models {
namespace {

using ::testing::EndsWith;
using ::testing::HasSubstr;

std::string refusal() {
  try {
    create_ops(DeviceKind::kCuda, Shape{}, 1, Fusion::kAuto);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Code::kUnsupported);
    return error.what();
  }
  return "";
}

TEST(OpsPlugin, IsRefusedWithWhatToDo) {
  const char* kind = std::getenv("SPILLWAY_OTHER_PLUGIN");
  ASSERT_NE(kind, nullptr);
  const std::string said = refusal();
  if (std::string_view(kind) == "version") {
    EXPECT_EQ(said, std::string("libspillway_models_cuda.so: is of version 0.0.9/2, the program of ") + kOpsInterface +
                        "; install Spillway and spillway-cuda of one version, or both from one build");
    EXPECT_EQ(refusal(), said) << "once more";
  } else if (::dlopen(kOpsPlugin, RTLD_NOW | RTLD_NOLOAD) != nullptr) {
    GTEST_SKIP() << "it is installed here";
  } else {
    EXPECT_THAT(said, HasSubstr("device cuda: libspillway_models_cuda.so: cannot open shared object file"));
    EXPECT_THAT(said, EndsWith("; the wheel spillway_cuda of `tools/wheel.sh --cuda` brings it, and so does a build "
                               "with nvcc 12.8 or newer; elsewhere name its directory in LD_LIBRARY_PATH"));
  }
}

}  // namespace
}  // namespace spillway::models
