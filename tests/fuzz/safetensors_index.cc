// model.safetensors.index.json
#include "src/formats/safetensors_header.h"

#include "tests/fuzz/targets.h"

namespace spillway::fuzz {

void safetensors_index(Bytes input) {
  const std::filesystem::path index = "/models/some/model.safetensors.index.json";
  const auto files = accepted([&] { return parse_safetensors_index(index.string(), text_of(input)); });
  if (!files) return;
  SPILLWAY_CHECK(!files->empty(), "an index names tensors");
  for (const auto& [tensor, file] : *files) {
    // As the reader opens it.
    const auto path = index.parent_path() / file;
    SPILLWAY_CHECK(path.lexically_normal().parent_path() == index.parent_path(), "no path leaves the directory");
    SPILLWAY_CHECK(path.string().find('\0') == std::string::npos, "the kernel sees all of a name");
  }
}

}  // namespace spillway::fuzz
