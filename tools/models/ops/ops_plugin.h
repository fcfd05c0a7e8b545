// What libspillway_models_cuda.so exports: one function, spillway_models_cuda_ops, that returns this table. create_ops
// opens it when operations of the `cuda` device are asked for, so that the same program runs where there is neither
// driver nor cuBLASLt. It is opened once and never closed.
#pragma once

#include <memory>

#include "spillway/version.h"
#include "tools/models/ops/ops.h"

namespace spillway::models {

// The project's version, and a number that changes whenever Ops, this table or a type that crosses it does.
inline constexpr const char* kOpsInterface = SPILLWAY_VERSION "/5";
inline constexpr const char* kOpsPlugin = "libspillway_models_cuda.so";
inline constexpr const char* kOpsPluginEntry = "spillway_models_cuda_ops";

struct OpsPlugin {
  const char* interface;  // read before anything else
  std::unique_ptr<Ops> (*create)(const Shape& shape, Fusion fusion);
};

}  // namespace spillway::models
