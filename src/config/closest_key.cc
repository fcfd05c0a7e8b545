#include "src/config/closest_key.h"

#include <algorithm>
#include <string>
#include <vector>

namespace spillway {
namespace {

std::string lower(std::string_view text) {
  std::string result(text);
  for (char& c : result) c = c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
  return result;
}

}  // namespace

std::size_t edit_distance(std::string_view a, std::string_view b) {
  // Three rows of the table d[i][j] = distance of the first i letters of a to the first j of b.
  std::vector<std::size_t> before(b.size() + 1), above(b.size() + 1), row(b.size() + 1);
  for (std::size_t j = 0; j <= b.size(); ++j) above[j] = j;
  for (std::size_t i = 1; i <= a.size(); ++i) {
    row[0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      row[j] = a[i - 1] == b[j - 1] ? above[j - 1] : 1 + std::min(above[j - 1], std::min(above[j], row[j - 1]));
      const bool swapped = i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1];
      if (swapped) row[j] = std::min(row[j], before[j - 2] + 1);
    }
    std::swap(before, above);
    std::swap(above, row);
  }
  return above[b.size()];
}

std::string_view closest(std::string_view word, std::span<const std::string_view> candidates) {
  // A key from a hostile file may be megabytes long; nothing that long is a misspelling.
  constexpr std::size_t kLongest = 128;
  if (word.size() > kLongest) return {};
  const std::string given = lower(word);
  // A third of the letters wrong is still a misspelling, more is another word.
  std::size_t best = std::max<std::size_t>(2, word.size() / 3) + 1;
  std::string_view found;
  for (const std::string_view candidate : candidates) {
    // At least what one is longer than the other; there are hundreds of keys, and a file may be wrong everywhere.
    if (std::max(candidate.size(), given.size()) - std::min(candidate.size(), given.size()) > best) continue;
    const std::size_t distance = edit_distance(given, lower(candidate));
    if (distance >= candidate.size()) continue;
    // Of two that are as near, the one that begins as the word does: f16 is fp16, and not bf16.
    const bool nearer = distance < best;
    const bool likelier = distance == best && !given.empty() && !found.empty() &&
                          lower(found.substr(0, 1)) != given.substr(0, 1) &&
                          lower(candidate.substr(0, 1)) == given.substr(0, 1);
    if (nearer || likelier) {
      best = distance;
      found = candidate;
    }
  }
  return found;
}

}  // namespace spillway
