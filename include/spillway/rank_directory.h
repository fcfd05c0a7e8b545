// Where the stores of a run with several ranks lie: rank r's in `<path>/rank<r>`, below each path of the run.
// One rank's lies in the paths themselves. Thread: any. Nothing fails: no file is looked at.
#pragma once

#include "spillway/cplusplus.h"

#include <cstdint>
#include <filesystem>

namespace spillway {

std::filesystem::path directory_of_rank(const std::filesystem::path& path, std::uint32_t rank);

}  // namespace spillway
