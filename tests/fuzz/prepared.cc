// | vocabulary | bytes of header.json | of tokens.bin | of starts.bin |, two bytes each, then these files, and
// targets.bin.
#include "tools/finetune/prepared.h"

#include <algorithm>
#include <vector>

#include "tests/fuzz/targets.h"
#include "tools/models/ops/ops.h"

namespace spillway::fuzz {

void prepared(Bytes input) {
  const auto number = [&] {
    const unsigned low = take_byte(input);
    return low | take_byte(input) << 8;
  };
  const std::uint32_t vocabulary = 1 + number();
  const std::size_t lengths[] = {number(), number(), number()};
  std::filesystem::path directory;
  std::size_t i = 0;
  for (const char* name : {"header.json", "tokens.bin", "starts.bin", "targets.bin"}) {
    const Bytes content = i < 3 ? input.first(std::min(lengths[i++], input.size())) : input;
    directory = scratch_file(name, content).parent_path();
    input = input.subspan(content.size());
  }
  using models::finetune::PreparedData;
  accepted([&] { return PreparedData(directory, vocabulary, PreparedData::Verify::kChecksums).rows(); });
  accepted([&] {
    PreparedData data(directory, vocabulary);
    std::vector<std::uint32_t> tokens(data.sequence()), starts(tokens), targets(tokens);
    for (const std::uint64_t row : {std::uint64_t{0}, data.rows() - 1, data.rows(), ~std::uint64_t{0}}) {
      data.read_row(row, {tokens, starts, targets});
      for (std::size_t at = 0; at < tokens.size(); ++at) {
        SPILLWAY_CHECK(tokens[at] < vocabulary, "every token has an embedding");
        SPILLWAY_CHECK(starts[at] == at || (at > 0 && starts[at] == starts[at - 1]), "documents follow each other");
        if (targets[at] == models::kNoTarget) continue;
        SPILLWAY_CHECK(at + 1 < tokens.size() && targets[at] == tokens[at + 1] && starts[at + 1] == starts[at],
                       "a target is the next token of the same document");
      }
    }
    return 0;
  });
}

}  // namespace spillway::fuzz
