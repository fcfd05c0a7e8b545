// Small pages of the caller's memory, asked for before a kernel comes to them.
#pragma once

#include <cstddef>
#include <cstdint>

namespace spillway {

inline constexpr std::size_t kSmallPage = 4096;  // bytes

// Asks for the first lines of the page that begins about `pages` after `from`. A processor follows a stream by itself,
// but within a page alone: at its end it waits for an address to be translated, in a virtual machine twice, and then
// for memory. The lines after the first ones it asks for itself. Beyond the end of an array it does no harm.
inline void ask_page(const void* from, std::size_t pages) {
  constexpr std::uintptr_t kLine = 64, kLines = 4;
  const std::uintptr_t at = reinterpret_cast<std::uintptr_t>(from) + pages * kSmallPage + kSmallPage / 2;
  const std::uintptr_t page = at / kSmallPage * kSmallPage;
  for (std::uintptr_t line = 0; line < kLines; ++line) {
    __builtin_prefetch(reinterpret_cast<const void*>(page + line * kLine), 0, 3);  // NOLINT(performance-no-int-to-ptr)
  }
}

}  // namespace spillway
