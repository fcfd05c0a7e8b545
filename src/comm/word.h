// What ranks tell each other ahead of each collective, so that data moves only between ranks that mean the same; and
// their last words. Pure: what is compared, and how a difference is put in words.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "spillway/communicator.h"

namespace spillway {

// As it travels.
struct Word {
  enum class What : std::uint8_t {
    kCollective,  // this rank has come to collective `number`
    kLeft,        // and takes no further part, after `number` of them
    kGaveUp,      // the same, because of `reason` at collective `failed`
    kHeard,       // that the one it is for has left; this rank is still there
    kAtWork,      // that others are to wait for it: its work goes on
  };
  enum class Reason : std::uint8_t { kTold, kDiffer, kNoProgress, kLeft, kLibrary };

  std::uint32_t magic = kMagic;
  What what = What::kCollective;
  Reason reason = Reason::kTold;
  CollectiveKind kind = CollectiveKind::kBarrier;
  Sums sums = Sums::kTree;
  DType wire = DType::kFloat32;
  Fold fold = Fold::kSum;
  ScalarType scalar_type = ScalarType::kDouble;
  bool is_named = true;  // kind and block are those of a collective
  bool at_work = false;  // of last words: others were told so, and not long ago
  bool ending = false;   // it is of this rank's end, which others need not have come to
  std::uint16_t scalars = 0;
  std::uint32_t root = 0;
  std::int32_t block = 0;
  std::uint64_t number = 0, failed = 0;
  std::uint64_t bytes = 0, slices_hash = 0;
  // The values of an all_reduce; of others the first slices, to name them; of last words a text.
  std::array<std::uint64_t, kMostScalars> values{};

  static constexpr std::uint32_t kMagic = 0x5b11'0004;  // another number with every change of this struct

  void set_text(std::string_view text);
  std::string text() const;
};
static_assert(std::is_trivially_copyable_v<Word>);

Word word_of(const Collective& call, std::uint64_t number);

// Whether two ranks that say these mean the same collective; the values of an all_reduce are their own.
bool same_collective(const Word& a, const Word& b);

// `all_gather of block 5`
std::string name_of(const Word& word);
// `all_gather of block 5 (collective 17)`
std::string numbered_name_of(const Word& word);
// `rank 2`, `ranks 0 to 3 and 5`
std::string ranks_text(std::span<const std::uint32_t> ranks);

// What each of these ranks says, grouped: `ranks 0 and 1: barrier of block 5; rank 2: …`. Words that are null have
// not come.
std::string differences(std::span<const Word* const> word_of_rank);

}  // namespace spillway
