// spillway_names.json, of a store or a snapshot
#include "src/checkpoint/file_names.h"

#include <vector>

#include "tests/fuzz/targets.h"

namespace spillway::fuzz {

void file_names(Bytes input) {
  ModelDescription model;
  model.blocks = {{"a", {{"up", {2, 4, 3}}, {"kept", {5}}}}, {"b", {{"down", {6}}}}};
  model.attachments = {{kFileNames, std::string(text_of(input))}};
  const auto names = accepted([&] { return FileNames(model); });
  if (!names) return;
  SPILLWAY_CHECK(names->model().attachments.empty(), "it is no part of an export");
  for (std::uint32_t b = 0; b < model.blocks.size(); ++b) {
    const std::vector<Parameter>& in_files = names->model().blocks[b].parameters;
    std::vector<std::uint64_t> written(in_files.size());
    for (std::uint32_t p = 0; p < model.blocks[b].parameters.size(); ++p) {
      std::uint64_t elements = 1;
      for (const std::uint64_t dimension : model.blocks[b].parameters[p].shape) elements *= dimension;
      const std::vector<float> values(elements);
      names->write(b, p, 0, values, [&](std::uint32_t block, std::uint32_t to, std::uint64_t first, auto part) {
        SPILLWAY_CHECK(block == b && written[to] == first, "values come in their order");
        written[to] += part.size();
      });
    }
    for (std::size_t p = 0; p < in_files.size(); ++p) {
      std::uint64_t elements = 1;
      for (const std::uint64_t dimension : in_files[p].shape) elements *= dimension;
      SPILLWAY_CHECK(written[p] == elements, "a tensor of a file is whole");
    }
  }
}

}  // namespace spillway::fuzz
