// `spillway import`: a DeepSpeed checkpoint of a GPT-2 in, a snapshot that `finetune --load` takes out.
#pragma once

#include <filesystem>
#include <optional>
#include <string>

#include "spillway/dtype.h"

namespace spillway::models::finetune {

struct ImportCommand {
  std::filesystem::path checkpoint, model, out;
  std::string tag;            // empty: the latest
  std::optional<DType> type;  // of the weights; not set: as they were trained
  bool json = false, no_verify = false;
};

// 0. Errors: spillway::Error.
int import_checkpoint(const ImportCommand& command);

}  // namespace spillway::models::finetune
