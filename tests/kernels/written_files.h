// A directory of files as the kernel would show them, removed at the end.
#pragma once

#include <gtest/gtest.h>
#include <stdlib.h>

#include <filesystem>
#include <fstream>
#include <string>

namespace spillway {

class WrittenFiles : public testing::Test {
 protected:
  WrittenFiles() {
    std::string pattern = (std::filesystem::temp_directory_path() / "spillway-files-XXXXXX").string();
    directory_ = mkdtemp(pattern.data());
  }
  ~WrittenFiles() override { std::filesystem::remove_all(directory_); }

  void write(const std::filesystem::path& file, const std::string& text) const {
    std::filesystem::create_directories((directory_ / file).parent_path());
    std::ofstream(directory_ / file) << text;
  }

  std::filesystem::path directory_;
};

}  // namespace spillway
