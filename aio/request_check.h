// What a request must be, for a queue that stops the program at a wrong one and for one that refuses it; and what comes
// to a queue later, or goes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "spillway/io_queue.h"

namespace spillway {

// Why there can be no such request, in words that live for ever; null: there can. `files` by index, null where there is
// none; `stripes` over the first of them, or null.
const char* refusal(const IoRequest& request, std::span<File* const> files, const StripeMap* stripes);

// Each throws kInvalidArgument.
void check_place(const File& file, std::uint32_t index, std::uint32_t places);
void check_leaves(std::uint32_t index, std::span<File* const> files, const StripeMap* stripes);
void check_region(std::span<const std::byte> region, std::span<const std::span<std::byte>> there, std::uint32_t most);
std::ptrdiff_t region_at(const std::byte* begin, std::span<const std::span<std::byte>> there);

}  // namespace spillway
