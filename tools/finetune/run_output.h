// Where a fine-tune writes, made sure of before its first step: what a long run leaves must not be the first thing that
// finds no place.
#pragma once

#include <filesystem>
#include <fstream>

#include "spillway/model.h"
#include "tools/finetune/finetune.h"

namespace spillway::models::finetune {

// Absolute, and `model` for `model/`.
std::filesystem::path plain(const std::filesystem::path& path);

// Makes the directories of --out, --best and --save, or says why they cannot take anything.
void prepare_directories(const FinetuneOptions& options);

// Whether the trained model fits where --out is, and twice where --best is. A model that is there already is replaced
// by a whole one: it gives no room.
void check_room(const FinetuneOptions& options, const ModelDescription& model);

// For more lines at its end; closed where there is none.
std::ofstream open_log(const std::filesystem::path& path);

}  // namespace spillway::models::finetune
