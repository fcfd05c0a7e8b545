// DeepSpeed reads its configuration with hjson, which takes much that JSON does not. Comments and trailing commas are
// taken here as well; of the rest a file is told what it wrote, and what to write.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

#include "src/formats/json_tree.h"

namespace spillway {

struct SyntaxAdvice {
  std::size_t offset = 0, end = 0;  // what it is about
  std::string what, hint;
};

// Of what a reader of JSON stopped at. Nothing: it is wrong in hjson, too.
std::optional<SyntaxAdvice> hjson_advice(std::string_view text, const JsonProblem& problem);

}  // namespace spillway
