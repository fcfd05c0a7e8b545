#include "src/formats/element_count.h"

#include "spillway/error.h"

namespace spillway {

std::uint64_t count_elements(const std::string& object, const std::vector<std::uint64_t>& shape) {
  const auto refuse = [&](const char* happened, const char* hint) {
    throw Error(Code::kInvalidArgument, {.object = object, .happened = happened, .errno_value = 0, .hint = hint});
  };
  std::uint64_t count = 1;
  for (const std::uint64_t dimension : shape) {
    if (dimension == 0) refuse("a dimension of its shape is 0", "leave the parameter out");
    if (dimension > kMostElements / count) refuse("its shape has more than 2^55 elements", "check the shape");
    count *= dimension;
  }
  return count;
}

}  // namespace spillway
