#include "src/plan/communication.h"

#include <fmt/format.h>

#include "spillway/dtype.h"

namespace spillway {

std::string refusal_of_communication(const Config& config) {
  if (config.communication == DType::kFloat32 || config.sum_groups == 1) return {};
  return fmt::format("{} beside spillway.sum_groups, whose bits are the same on any number of ranks",
                     name_of(config.communication));
}

}  // namespace spillway
