// | bytes of data after the header | header |
#include "src/formats/safetensors_header.h"

#include <algorithm>

#include "tests/fuzz/targets.h"

namespace spillway::fuzz {

void safetensors_header(Bytes input) {
  constexpr std::uint64_t kStart = 1000;
  constexpr std::uint32_t kFile = 7;
  const std::uint64_t data_bytes = take_byte(input);
  auto tensors =
      accepted([&] { return parse_safetensors_header("m.safetensors", text_of(input), kFile, kStart, data_bytes); });
  if (!tensors) return;
  SPILLWAY_CHECK(std::ranges::is_sorted(*tensors, std::ranges::less_equal{}, &TensorEntry::name),
                 "tensors are sorted by name, and no name occurs twice");
  for (const TensorEntry& tensor : *tensors) {
    std::uint64_t elements = 1;
    for (const std::uint64_t dimension : tensor.shape) elements *= dimension;  // checked not to overflow
    SPILLWAY_CHECK(tensor.elements == elements, "a tensor has the elements of its shape");
    SPILLWAY_CHECK(!tensor.type || tensor.bytes == elements * size_of(*tensor.type), "and their bytes");
    SPILLWAY_CHECK(tensor.file == kFile, "it lies in the file whose header this is");
  }
  std::ranges::sort(*tensors, {}, [](const TensorEntry& t) { return std::pair(t.offset, t.bytes); });
  std::uint64_t covered = kStart;
  for (const TensorEntry& tensor : *tensors) {
    SPILLWAY_CHECK(tensor.offset == covered, "no byte of data belongs to two tensors or to none");
    covered += tensor.bytes;
  }
  SPILLWAY_CHECK(covered == kStart + data_bytes, "tensors end where the file does");
}

}  // namespace spillway::fuzz
