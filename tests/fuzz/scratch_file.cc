#include <fstream>

#include "tests/fuzz/targets.h"
#include "tests/temp_directory.h"

namespace spillway::fuzz {

std::filesystem::path scratch_file(const std::string& name, Bytes content) {
  static const TempDirectory directory;
  const auto path = directory / name;
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file.write(text_of(content).data(), static_cast<std::streamsize>(content.size()));
  file.close();
  SPILLWAY_CHECK(!file.fail(), "a scratch file can be written");
  return path;
}

}  // namespace spillway::fuzz
