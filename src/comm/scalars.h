// The values of an all_reduce, which travel in the words that announce it. Pure.
#pragma once

#include <span>

#include "src/comm/word.h"

namespace spillway {

// call.data = the fold of the values in the words of all ranks: the same bits on each.
void fold_scalars(std::span<const Word* const> word_of_rank, const Collective& call);

}  // namespace spillway
