#include <stdlib.h>

#include <fstream>

#include "tests/fuzz/targets.h"

namespace spillway::fuzz {
namespace {

struct ScratchDirectory {
  ScratchDirectory() {
    std::string name = std::filesystem::temp_directory_path() / "spillway-fuzz-XXXXXX";
    SPILLWAY_CHECK(::mkdtemp(name.data()) != nullptr, "a temporary directory can be made");
    path = name;
  }
  ~ScratchDirectory() {
    std::error_code ignored;
    std::filesystem::remove_all(path, ignored);
  }
  std::filesystem::path path;
};

}  // namespace

std::filesystem::path scratch_file(const std::string& name, Bytes content) {
  static const ScratchDirectory directory;
  const auto path = directory.path / name;
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file.write(text_of(content).data(), static_cast<std::streamsize>(content.size()));
  file.close();
  SPILLWAY_CHECK(!file.fail(), "a scratch file can be written");
  return path;
}

}  // namespace spillway::fuzz
