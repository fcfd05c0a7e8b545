#include <dlfcn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <memory>
#include <string>

#include "spillway/engine.h"
#include "spillway/error.h"
#include "spillway/offload_optimizer.h"
#include "spillway/version.h"
#include "tests/src/toy_trainer.h"
#include "tests/temp_directory.h"

namespace spillway {
namespace {

using ::testing::EndsWith;
using ::testing::HasSubstr;

// Another libspillway.so, for as long as this lives.
class Another {
 public:
  explicit Another(const char* version) {
    ::setenv("SPILLWAY_OTHER_VERSION", version, 1);
    handle_ = ::dlopen(std::getenv("SPILLWAY_OTHER_LIBRARY"), RTLD_NOW | RTLD_LOCAL);
    EXPECT_NE(handle_, nullptr) << ::dlerror();
  }
  ~Another() { ::dlclose(handle_); }
  Another(const Another&) = delete;
  Another& operator=(const Another&) = delete;

 private:
  void* handle_;
};

struct LoadedVersions : ::testing::Test {
  void SetUp() override {
    if (std::getenv("SPILLWAY_OTHER_LIBRARY") == nullptr) GTEST_SKIP() << "SPILLWAY_OTHER_LIBRARY is not set";
    config = testing::toy_config(Placement::kNvme, Placement::kNvme, DType::kFloat32, directory.path());
    config.device = DeviceKind::kHost;
  }
  template <typename Create>
  void expect_refusal(const Create& create) {
    try {
      create();
      ADD_FAILURE() << "it is made";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), Code::kUnsupported);
      EXPECT_THAT(error.what(), HasSubstr("libspillway: is of version " SPILLWAY_VERSION ", and the process has /"));
      EXPECT_THAT(error.what(), HasSubstr("/libspillway.so.0 of 0.0.9; let all that this process loads use one"));
    }
    EXPECT_TRUE(std::filesystem::is_empty(directory.path())) << "and nothing is written";
  }

  TempDirectory directory;
  ModelDescription model = testing::toy_model(2, 300, 1);
  Config config;
};

TEST_F(LoadedVersions, ThatDifferAreRefusedBeforeAnythingIsWritten) {
  {
    const Another another("0.0.9");
    expect_refusal([&] { Engine::create(config, model); });
    expect_refusal([&] { OffloadOptimizer::create(config, model); });
  }
  EXPECT_NO_THROW(Engine::create(config, model)) << "it is gone";
}

TEST_F(LoadedVersions, ThatAgreeAreNoMatter) {
  const Another another(SPILLWAY_VERSION);
  EXPECT_NO_THROW(Engine::create(config, model));
}

}  // namespace
}  // namespace spillway
