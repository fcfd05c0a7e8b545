// Which files of a directory make a DeepSpeed ZeRO checkpoint, by their names alone.
//
//   latest                                                  "global_step100"
//   global_step100/zero_pp_rank_0_mp_rank_00_model_states.pt    stage 3: one of each rank
//   global_step100/mp_rank_00_model_states.pt                   stages 1 and 2
//   global_step100/[bf16_]zero_pp_rank_0_mp_rank_00_optim_states.pt
//   global_step100/offloaded_tensors/rank00/…                   states that were on NVMe
//
// Errors: kNotFound, kInvalidArgument (a layout that cannot be imported, and why), kIo.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace spillway {

struct DeepSpeedLayout {
  std::string tag;
  std::filesystem::path directory;                 // of the tag
  std::vector<std::filesystem::path> model_files;  // by rank; stages 1 and 2: one
  std::vector<std::filesystem::path> state_files;  // by rank
  bool says_bf16 = false;                          // by the names
};

// `directory` holds tags, or is a tag's. `tag`: which one; empty: the one that `latest` names.
DeepSpeedLayout find_deepspeed_files(const std::filesystem::path& directory, const std::string& tag);

}  // namespace spillway
