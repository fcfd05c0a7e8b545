// | how | vocabulary, two bytes | data |: `how` says by its lowest bit whether the file is a .bin, by the others how
// many tokens a row has.
#include <vector>

#include "tests/fuzz/targets.h"
#include "tools/finetune/data.h"

namespace spillway::fuzz {
namespace {

std::uint32_t token_at(Bytes data, bool words, std::uint64_t index) {
  const auto byte = [&](std::uint64_t at) { return std::to_integer<std::uint32_t>(data[at]); };
  return words ? byte(2 * index) | byte(2 * index + 1) << 8 : byte(index);
}

}  // namespace

void token_file(Bytes input) {
  const unsigned how = take_byte(input);
  const bool words = how % 2 != 0;
  const std::uint32_t sequence = 1 + how / 2;
  const std::uint32_t low = take_byte(input), vocabulary = 1 + (low | take_byte(input) << 8);
  const auto path = scratch_file(words ? "tokens.bin" : "tokens.txt", input);
  accepted([&] {
    models::finetune::TokenFile file(path, sequence, vocabulary);
    SPILLWAY_CHECK(file.tokens() == input.size() / (words ? 2 : 1), "every token is there");
    SPILLWAY_CHECK(file.rows() >= 1 && file.rows() * sequence < file.tokens(), "rows end with the file");
    std::vector<std::uint32_t> row(sequence + 1);
    for (const std::uint64_t r : {std::uint64_t{0}, file.rows() - 1, file.rows(), ~std::uint64_t{0}}) {
      file.read_row(r, row);
      for (std::uint64_t i = 0; i < row.size(); ++i) {
        const std::uint32_t expected = token_at(input, words, r % file.rows() * sequence + i);
        SPILLWAY_CHECK(row[i] == expected && row[i] < vocabulary, "a row holds the file's tokens");
      }
    }
    return 0;
  });
}

}  // namespace spillway::fuzz
