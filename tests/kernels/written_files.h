// A directory of files as the kernel would show them, removed at the end.
#pragma once

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "tests/temp_directory.h"

namespace spillway {

class WrittenFiles : public testing::Test {
 protected:
  void write(const std::filesystem::path& file, const std::string& text) const {
    std::filesystem::create_directories((directory_ / file).parent_path());
    std::ofstream(directory_ / file) << text;
  }

  const TempDirectory own_;
  const std::filesystem::path directory_ = own_.path();
};

}  // namespace spillway
