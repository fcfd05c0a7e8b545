// What ended a communicator, told from the last words of its ranks, in the same way on each of them. Pure.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "spillway/error.h"
#include "src/comm/word.h"

namespace spillway {

struct Ending {
  std::uint32_t rank = 0;                   // that tells it
  std::span<const Word* const> last_words;  // of every rank, this one's too; null: it does not answer
  std::span<const Word* const> announced;   // what each announced as the collective that failed; null: it had not come
  std::span<const std::string> hosts;       // empty ones are not known
  double patience_seconds = 0;
};

// The word that says why all of it ended; others were told so by it.
const Word& cause_of(std::span<const Word* const> last_words);

Error error_of(const Ending& ending);

// Where the library has not come back for that long, and nobody can be asked.
Error error_of_hanging(const Collective& call, std::uint64_t number, const std::string& library, double waited_seconds);

// What a rank says that has left in peace, but without these.
std::string lost_at_the_end(std::span<const std::uint32_t> silent, std::span<const std::string> hosts,
                            double patience_seconds);

}  // namespace spillway
