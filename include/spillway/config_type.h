// The type that a model's config.json names: transformers casts to it as it loads the weights beside it. Who writes the
// tensors (safetensors.h) writes it beside them. Thread: any. Nothing fails.
#pragma once

#include <string>
#include <string_view>

#include "spillway/dtype.h"

namespace spillway {

// The text with `type` where it names another one, as `torch_dtype` or `dtype`; all else as it was written. A text that
// names none, or is no JSON object, comes back as it is: readers take the tensors' own type then.
std::string with_type(std::string_view config, DType type);

}  // namespace spillway
