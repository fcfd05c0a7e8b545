// Counts every operator new of the program that links allocation_count.cc.
#pragma once

#include <cstdint>

namespace spillway {

std::uint64_t allocation_count();

}  // namespace spillway
