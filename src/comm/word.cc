#include "src/comm/word.h"

#include <algorithm>
#include <cstring>

#include <fmt/format.h>

#include "kernels/checksum.h"

namespace spillway {
namespace {

const char* kind_text(const Word& word) {
  switch (word.kind) {
    case CollectiveKind::kOpen: return "opening";
    case CollectiveKind::kAllGather: return "all_gather";
    case CollectiveKind::kReduceScatter: return "reduce_scatter";
    case CollectiveKind::kAllReduce: return "all_reduce";
    case CollectiveKind::kBroadcast: return "broadcast";
    case CollectiveKind::kBarrier: return "barrier";
  }
  return "collective of an unknown kind";
}

// What else two words may differ in.
std::string details(const Word& word) {
  constexpr const char* kFolds[] = {"sum", "max", "min", "or"};
  switch (word.kind) {
    case CollectiveKind::kAllReduce:
      return fmt::format(", {} of {} {}", kFolds[static_cast<std::size_t>(word.fold) % 4], word.scalars,
                         word.scalar_type == ScalarType::kDouble ? "doubles" : "integers");
    case CollectiveKind::kBroadcast: return fmt::format(", {} bytes of rank {}", word.bytes, word.root);
    case CollectiveKind::kAllGather:
    case CollectiveKind::kReduceScatter: {
      std::string text = fmt::format(", {} bytes cut into ", word.bytes);
      const std::size_t shown = std::min<std::size_t>(word.scalars, kMostScalars);
      for (std::size_t i = 0; i < shown; ++i) text += fmt::format("{}{}", i == 0 ? "" : " + ", word.values[i]);
      if (word.scalars > shown) text += fmt::format(" + … (cut {:08x})", word.slices_hash & 0xffff'ffff);
      if (word.kind == CollectiveKind::kReduceScatter) text += word.sums == Sums::kTree ? ", in a tree" : ", fastest";
      if (word.wire != DType::kFloat32) text += fmt::format(", in {}", name_of(word.wire));
      return text;
    }
    case CollectiveKind::kOpen: return fmt::format(", with settings {:016x}", word.slices_hash);
    case CollectiveKind::kBarrier: break;
  }
  return {};
}

}  // namespace

void Word::set_text(std::string_view text) {
  values.fill(0);
  std::memcpy(values.data(), text.data(), std::min(text.size(), sizeof(values) - 1));
}

std::string Word::text() const {
  const auto* begin = reinterpret_cast<const char*>(values.data());
  return {begin, std::find(begin, begin + sizeof(values), '\0')};
}

Word word_of(const Collective& call, std::uint64_t number) {
  Word word;
  word.kind = call.kind;
  word.sums = call.sums;
  word.wire = call.wire;
  word.fold = call.fold;
  word.scalar_type = call.scalar_type;
  word.root = call.root;
  word.block = call.block;
  word.ending = call.ending;
  word.number = number;
  word.bytes = call.data.size();
  if (call.kind == CollectiveKind::kAllReduce) {
    word.scalars = static_cast<std::uint16_t>(call.data.size() / 8);
    if (!call.data.empty()) std::memcpy(word.values.data(), call.data.data(), call.data.size());
  } else {
    word.scalars = static_cast<std::uint16_t>(std::min<std::size_t>(call.slices.size(), UINT16_MAX));
    word.slices_hash = granule_checksum(std::as_bytes(call.slices));
    std::ranges::copy(call.slices.first(std::min(call.slices.size(), kMostScalars)), word.values.begin());
  }
  return word;
}

bool same_collective(const Word& a, const Word& b) {
  return a.magic == b.magic && a.kind == b.kind && a.sums == b.sums && a.wire == b.wire && a.fold == b.fold &&
         a.scalar_type == b.scalar_type && a.scalars == b.scalars && a.root == b.root && a.block == b.block &&
         a.number == b.number && a.bytes == b.bytes && a.slices_hash == b.slices_hash;
}

std::string name_of(const Word& word) {
  if (word.kind == CollectiveKind::kOpen) return kind_text(word);
  return fmt::format("{} of block {}", kind_text(word), word.block);
}

std::string numbered_name_of(const Word& word) {
  if (!word.is_named) return fmt::format("collective {}", word.number);
  return fmt::format("{} (collective {})", name_of(word), word.number);
}

std::string ranks_text(std::span<const std::uint32_t> ranks) {
  std::vector<std::string> parts;
  for (std::size_t i = 0; i < ranks.size();) {
    std::size_t end = i + 1;
    while (end < ranks.size() && ranks[end] == ranks[end - 1] + 1) ++end;
    if (end - i > 2) {
      parts.push_back(fmt::format("{} to {}", ranks[i], ranks[end - 1]));
      i = end;
    } else {
      parts.push_back(std::to_string(ranks[i++]));
    }
  }
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (std::size_t i = 0; i < parts.size(); ++i) {
    text += i == 0 ? "" : i + 1 == parts.size() ? " and " : ", ";
    text += parts[i];
  }
  return text;
}

std::string differences(std::span<const Word* const> word_of_rank) {
  std::vector<bool> told(word_of_rank.size());
  std::string text;
  for (std::uint32_t first = 0; first < word_of_rank.size(); ++first) {
    if (told[first] || word_of_rank[first] == nullptr) continue;
    const Word& word = *word_of_rank[first];
    std::vector<std::uint32_t> alike;
    for (std::uint32_t rank = first; rank < word_of_rank.size(); ++rank) {
      if (word_of_rank[rank] == nullptr || !same_collective(word, *word_of_rank[rank])) continue;
      told[rank] = true;
      alike.push_back(rank);
    }
    text += fmt::format("{}{}: ", text.empty() ? "" : "; ", ranks_text(alike));
    text += word.magic == Word::kMagic ? numbered_name_of(word) + details(word) : "another version of Spillway";
  }
  return text;
}

}  // namespace spillway
